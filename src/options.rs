//! What the user may choose, and how it is spelled.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::io::EngineKind;
use crate::lookahead::MAX_DEPTH;

/// Whether to stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Never.
    Off,
    /// When the model does not fit in memory.
    #[default]
    Auto,
    /// Always, if the model has routed experts.
    On,
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            _ => Err(Error::Invalid(format!("--les takes off, auto or on, not {text:?}"))),
        }
    }
}

/// How much memory the experts get.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum CacheSize {
    /// What the machine has to spare when the first token is computed.
    #[default]
    Auto,
    /// The experts of one token.
    Min,
    /// So many bytes.
    Bytes(u64),
    /// A part of the model's experts, 0 to 1.
    Part(f64),
}

impl FromStr for CacheSize {
    type Err = Error;

    /// `auto`, `min`, `1500` (MiB), `512K`, `1500M`, `3G`, `2.5G` or `40%` (of the model's experts).
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Invalid(format!(
                "--les-cache takes a size in MiB, or one such as 3G, 1500M, 512K, or 40% of the experts, or min or auto, \
                 not {text:?}"
            ))
        };
        match text {
            "" | "auto" => return Ok(Self::Auto),
            "min" => return Ok(Self::Min),
            _ => {}
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let number: f64 = text[..split].parse().map_err(|_| wrong())?;
        let unit = match &text[split..] {
            "%" if number <= 100.0 => return Ok(Self::Part(number / 100.0)),
            "K" | "k" | "KiB" => 10,
            "" | "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            _ => return Err(wrong()),
        };
        let bytes = number * (1u64 << unit) as f64;
        if bytes < (1u64 << 60) as f64 { Ok(Self::Bytes(bytes as u64)) } else { Err(wrong()) }
    }
}

/// Reads what `--les-lookahead` takes.
///
/// # Errors
/// [`Error::Invalid`] when it is neither `auto` nor a number up to [`MAX_DEPTH`](crate::lookahead::MAX_DEPTH).
pub fn parse_lookahead(text: &str) -> Result<Option<usize>> {
    match text.parse() {
        _ if text.is_empty() || text == "auto" => Ok(None),
        Ok(depth) if depth <= MAX_DEPTH => Ok(Some(depth)),
        _ => Err(Error::Invalid(format!("--les-lookahead takes auto or a number up to {MAX_DEPTH}, not {text:?}"))),
    }
}

/// All of it.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Whether to stream.
    pub mode: Mode,
    /// How much memory.
    pub cache: CacheSize,
    /// How to read.
    pub io: EngineKind,
    /// The most reads in flight; 0: the default.
    pub io_depth: usize,
    /// Layers to look ahead; `None`: the default.
    pub lookahead: Option<usize>,
    /// Where to write the routing trace.
    pub trace: Option<PathBuf>,
}

/// A size for people: `512 KiB`, `1.50 GiB`.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x10_0000 => write!(f, "{:.0} KiB", bytes / f64::from(1 << 10)),
            0x10_0000..0x4000_0000 => write!(f, "{:.0} MiB", bytes / f64::from(1 << 20)),
            _ => write!(f, "{:.2} GiB", bytes / f64::from(1 << 30)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let read = |t: &str| t.parse::<CacheSize>().unwrap();
        assert_eq!(read("1500"), CacheSize::Bytes(1500 << 20));
        assert_eq!(read("1.5G"), CacheSize::Bytes(1536 << 20));
        assert_eq!(read("512K"), CacheSize::Bytes(512 << 10));
        assert_eq!(read("40%"), CacheSize::Part(0.4));
        assert_eq!(read("min"), CacheSize::Min);
        assert_eq!(read("auto"), CacheSize::Auto);
        for bad in ["-1", "3T", "101%", "x", "1..2", "%", "1e30", "99999999999999999999G", "3 G"] {
            assert!(bad.parse::<CacheSize>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_written() {
        assert_eq!(Size(96 << 10).to_string(), "96 KiB");
        assert_eq!(Size(3 << 20).to_string(), "3 MiB");
        assert_eq!(Size(3 << 29).to_string(), "1.50 GiB");
    }
}
