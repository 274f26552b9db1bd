//! Size against harm, as a picture.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::prelude::*;

use super::Row;

const SIZE: (u32, u32) = (900, 600);

/// Draws the mean KL divergence of `rows` over the bits per weight of their experts into an SVG file.
///
/// # Errors
/// When it cannot be written.
pub fn draw(path: &Path, rows: &[Row]) -> anyhow::Result<()> {
    // drawn into memory: the library's own writer does not say why a file could not be written
    let mut svg = String::new();
    draw_into(&mut svg, rows).map_err(|e| anyhow!("drawing: {e}"))?;
    std::fs::write(path, svg).with_context(|| path.display().to_string())
}

fn draw_into(svg: &mut String, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let points: Vec<(f64, f64, &str)> =
        rows.iter().filter_map(|row| Some((row.expert_bpw, row.harm?.mean_kl.value, row.model.as_str()))).collect();
    let largest = |of: fn(&(f64, f64, &str)) -> f64| points.iter().map(of).fold(0.0, f64::max);
    let (bits, kl) = (1.3 * largest(|p| p.0), 1.1 * largest(|p| p.1).max(1e-6));
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("what smaller experts cost", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..bits, 0.0..kl)?;
    chart.configure_mesh().x_desc("bits per weight of the experts").y_desc("mean KL divergence").draw()?;
    chart.draw_series(points.iter().map(|&(x, y, name)| {
        EmptyElement::at((x, y))
            + Circle::new((0, 0), 4, BLUE.filled())
            + Text::new(name.to_owned(), (8, -6), ("sans-serif", 14))
    }))?;
    root.present()?;
    Ok(())
}
