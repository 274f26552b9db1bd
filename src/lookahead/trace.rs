//! The routing trace: what the routers did, one JSON object per line, to be replayed.
//!
//! The first line is a [`Header`], every other one a [`Record`].

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use super::predict::{GateMass, Recall};
use crate::error::{Error, Result, failed};
use crate::index::Index;

/// The version of the format.
const VERSION: u32 = 1;
/// Guesses are traced down to this, which is further than they are read, so that other thresholds can be tried.
pub const LEAST_PROBABILITY: f32 = 0.05;

/// What was traced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version of the format, 1.
    pub les_trace: u32,
    /// The model's file name.
    pub model: String,
    /// The layers that have experts, in the order of use.
    pub layers: Vec<TraceLayer>,
}

/// One layer with experts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLayer {
    /// Its number.
    pub layer: u32,
    /// How many experts it has.
    pub n_expert: u32,
    /// How many each token uses at most.
    pub n_used: u32,
    /// Bytes of the parts of one expert, in the order of use; the average where they differ.
    pub part_bytes: Vec<u64>,
}

/// One pass of a batch through the experts of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Index into [`Header::layers`].
    pub at: u32,
    /// Tokens in the batch.
    pub rows: u32,
    /// The router's picks, token by token.
    pub picks: Vec<i32>,
    /// What the experts were selected by, computed again with less precision: for each of the last tokens of the batch,
    /// one score per expert. Empty where the router cannot be computed. Masked experts score negative infinity, which is
    /// `null` in JSON.
    #[serde(deserialize_with = "scores")]
    pub scores: Vec<Vec<f32>>,
    /// What was predicted here for the next layers, by distance, from 1: experts and how likely each is to be picked, the
    /// likeliest first, down to [`LEAST_PROBABILITY`]. Empty where nothing was, without lookahead. What is predicted for
    /// long batches, or from history, is not traced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guesses: Vec<Vec<(u32, f32)>>,
    /// What became of the predictions for this layer, by the distance from which they were made, from 1. Empty where there
    /// were none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
}

/// How good the predictions for one pass of a layer were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// By the number of picks.
    pub recall: Recall,
    /// By the router's weight.
    pub gate_mass: GateMass,
}

fn scores<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<f32>>, D::Error> {
    let rows = Vec::<Vec<Option<f32>>>::deserialize(from)?;
    let masked = |score: Option<f32>| score.unwrap_or(f32::NEG_INFINITY);
    Ok(rows.into_iter().map(|row| row.into_iter().map(masked).collect()).collect())
}

/// The layers of a model as a trace names them.
pub fn layers(index: &Index) -> Vec<TraceLayer> {
    let mut layers: Vec<TraceLayer> = Vec::new();
    for (i, t) in index.tensors.iter().enumerate() {
        if index.leads(i) {
            layers.push(TraceLayer {
                layer: t.layer,
                n_expert: t.n_expert(),
                n_used: index.n_expert_used,
                part_bytes: Vec::new(),
            });
        }
        if let Some(layer) = layers.last_mut() {
            layer.part_bytes.push(t.all_bytes() / t.ne[2].max(1));
        }
    }
    layers
}

/// Writes a trace.
pub struct Writer {
    out: BufWriter<File>,
    path: PathBuf,
}

impl Writer {
    /// Creates the file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn create(path: &Path, index: &Index) -> Result<Self> {
        let file = File::create(path).map_err(|e| failed(path, "create the trace", e))?;
        let header = Header { les_trace: VERSION, model: index.model_name(), layers: layers(index) };
        let mut writer = Self { out: BufWriter::new(file), path: path.to_owned() };
        writer.line(&header)?;
        Ok(writer)
    }

    /// Appends a record.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.line(record)
    }

    /// Writes what is left to the file.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn close(mut self) -> Result<()> {
        self.out.flush().map_err(|e| failed(&self.path, "write the trace", e))
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.out, value)
            .map_err(Into::into)
            .and_then(|()| self.out.write_all(b"\n"))
            .map_err(|e| failed(&self.path, "write the trace", e))
    }
}

/// Reads a trace, record by record. A last line that was cut, as that of a run which was killed, is left out.
pub struct Reader {
    input: BufReader<File>,
    path: PathBuf,
    line: u64,
    /// Whether the last line was cut: known at the end.
    pub cut: bool,
    /// What was traced.
    pub header: Header,
}

impl Reader {
    /// Opens a trace.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, [`Error::Invalid`] when it is no trace.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| failed(path, "open the trace", e))?;
        let mut input = BufReader::new(file);
        let mut first = String::new();
        input.read_line(&mut first).map_err(|e| failed(path, "read the trace", e))?;
        let header: Header = serde_json::from_str(&first)
            .map_err(|e| Error::Invalid(format!("{}: not a trace of --les-trace: {e}", path.display())))?;
        if header.les_trace != VERSION {
            let why = format!("{}: a trace of version {}, not {VERSION}", path.display(), header.les_trace);
            return Err(Error::Invalid(why));
        }
        Ok(Self { input, path: path.to_owned(), line: 1, cut: false, header })
    }
}

impl Iterator for Reader {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        self.line += 1;
        let place = format!("{}: line {}", self.path.display(), self.line);
        let wrong = |why: String| Error::Invalid(format!("{place}: {why}; the trace is damaged: make it again"));
        let mut text = String::new();
        match self.input.read_line(&mut text) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(e) => return Some(Err(failed(&self.path, "read the trace", e))),
        }
        let record = serde_json::from_str::<Record>(&text);
        if !text.ends_with('\n') && record.as_ref().is_err_and(serde_json::Error::is_eof) {
            self.cut = true;
            return None;
        }
        let record = record.map_err(|e| wrong(e.to_string())).and_then(|record| {
            let layers = self.header.layers.get(record.at as usize..).unwrap_or_default();
            let layer = layers.first().ok_or_else(|| wrong("no such layer".into()))?;
            let known = |e: &i32| u32::try_from(*e).is_ok_and(|e| e < layer.n_expert);
            let whole = record.scores.iter().all(|row| row.len() == layer.n_expert as usize);
            if !record.picks.iter().all(known) || !whole {
                return Err(wrong("picks or scores that the layer cannot have".into()));
            }
            let next = layers[1..].iter().map(Some).chain(std::iter::repeat(None));
            let likely = |(layer, guesses): (Option<&TraceLayer>, &Vec<(u32, f32)>)| {
                let n = layer.map_or(0, |layer| layer.n_expert);
                guesses.iter().all(|(e, probability)| *e < n && (0.0..=1.0).contains(probability))
            };
            if !next.zip(&record.guesses).all(likely) {
                return Err(wrong("guesses that the next layers cannot have".into()));
            }
            Ok(record)
        });
        Some(record)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(record: &str) -> Result<Vec<Record>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let layer = |n| format!(r#"{{"layer":{n},"n_expert":{},"n_used":2,"part_bytes":[1,2]}}"#, 4 + n);
        let header = format!(r#"{{"les_trace":1,"model":"m","layers":[{},{}]}}"#, layer(0), layer(1));
        std::fs::write(&path, format!("{header}\n{record}\n")).unwrap();
        Reader::open(&path)?.collect()
    }

    #[test]
    fn what_was_traced_before_there_were_guesses_is_read_and_written_as_ever() {
        let text = r#"{"at":0,"rows":1,"picks":[0,3],"scores":[]}"#;
        let records = read(text).unwrap();
        assert_eq!(records[0].guesses, Vec::<Vec<(u32, f32)>>::new());
        assert_eq!(serde_json::to_string(&records[0]).unwrap(), text);
    }

    #[test]
    fn a_last_line_that_was_cut_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        let header = r#"{"les_trace":1,"model":"m","layers":[{"layer":0,"n_expert":4,"n_used":2,"part_bytes":[1]}]}"#;
        let line = r#"{"at":0,"rows":1,"picks":[0,3],"scores":[]}"#;
        let read = |text: String| {
            std::fs::write(&path, text).unwrap();
            let mut reader = Reader::open(&path).unwrap();
            let records: Vec<_> = reader.by_ref().collect();
            (records.len(), records.iter().all(Result::is_ok), reader.cut)
        };
        for len in 1..line.len() {
            assert_eq!(read(format!("{header}\n{line}\n{}", &line[..len])), (1, true, true), "{len}");
        }
        assert_eq!(read(format!("{header}\n{line}\n{line}")), (2, true, false));
        // what is wrong in another way, or in the middle
        assert_eq!(read(format!("{header}\n{line}\n{{\"at\":x")), (2, false, false));
        assert_eq!(read(format!("{header}\n{}\n{line}\n", &line[..9])), (2, false, false));
    }

    #[test]
    fn masked_scores_come_back() {
        let text = r#"{"at":0,"rows":1,"picks":[0,3],"scores":[[1.5,null,null,0.5]]}"#;
        let records = read(text).unwrap();
        assert_eq!(records[0].scores, [[1.5, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.5]]);
        assert_eq!(serde_json::to_string(&records[0]).unwrap(), text);
    }

    #[test]
    fn guesses_are_those_of_the_next_layers() {
        let with = |at, guesses| read(&format!(r#"{{"at":{at},"rows":1,"picks":[],"scores":[],"guesses":{guesses}}}"#));
        assert_eq!(with(0, "[[[4,0.5],[0,0.25]]]").unwrap()[0].guesses, [[(4, 0.5), (0, 0.25)]]);
        assert!(with(1, "[[]]").is_ok(), "the last layer has none to tell of");
        for (at, wrong) in [(0, "[[[5,0.5]]]"), (0, "[[[0,1.5]]]"), (0, "[[],[[0,0.5]]]"), (1, "[[[0,0.5]]]")] {
            let error = with(at, wrong).unwrap_err().to_string();
            assert!(error.contains("line 2: guesses"), "{wrong}: {error}");
        }
    }
}
