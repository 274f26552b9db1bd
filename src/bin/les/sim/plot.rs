//! Hit rates against the size of the cache, as a picture.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::prelude::*;

use super::Row;

const SIZE: (u32, u32) = (900, 600);

/// Draws the second halves' hit rates of `rows` into an SVG file.
///
/// # Errors
/// When it cannot be written.
pub fn draw(path: &Path, title: &str, rows: &[Row]) -> anyhow::Result<()> {
    // drawn into memory: the library's own writer does not say why a file could not be written
    let mut svg = String::new();
    draw_into(&mut svg, title, rows).map_err(|e| anyhow!("drawing: {e}"))?;
    std::fs::write(path, svg).with_context(|| path.display().to_string())
}

fn draw_into(svg: &mut String, title: &str, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let largest = rows.iter().map(|r| r.cache).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..100.0 * largest, 0.0..100.0)?;
    chart.configure_mesh().x_desc("% of the experts cached").y_desc("% hits, second half").draw()?;
    let mut policies: Vec<_> = Vec::new();
    for row in rows {
        if !policies.contains(&row.policy) {
            policies.push(row.policy);
        }
    }
    for (i, policy) in policies.into_iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|r| r.policy == policy)
            .map(|r| (100.0 * r.cache, 100.0 * r.second_half.hit_rate))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(policy.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}
