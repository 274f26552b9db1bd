//! What the user may choose, and how it is spelled.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::io::EngineKind;
use crate::lookahead::MAX_DEPTH;
use crate::spec;

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
        let part = |percent: &str| positive(percent).filter(|n| *n <= 100.0).map(|n| Self::Part(n / 100.0));
        match text.strip_suffix('%') {
            Some(percent) => part(percent),
            None => parse_bytes(text, "M").map(Self::Bytes),
        }
        .ok_or_else(wrong)
    }
}

/// Reads how many drafted tokens to verify: `off`, `adaptive` or nothing, or a number.
///
/// # Errors
/// [`Error::Invalid`] for anything else.
pub fn parse_spec(text: &str) -> Result<spec::Mode> {
    match (text, text.parse()) {
        ("off", _) => Ok(spec::Mode::Off),
        ("" | "adaptive", _) => Ok(spec::Mode::Adaptive),
        (_, Ok(n)) => Ok(spec::Mode::Fixed(n)),
        _ => Err(Error::Invalid(format!("--les-spec takes off, adaptive or a number of tokens, not {text:?}"))),
    }
}

/// Reads what `--les-lookahead` takes.
///
/// # Errors
/// [`Error::Invalid`] when it is neither `auto` nor a number up to [`MAX_DEPTH`].
pub fn parse_lookahead(text: &str) -> Result<Option<usize>> {
    match text.parse() {
        _ if text.is_empty() || text == "auto" => Ok(None),
        Ok(depth) if depth <= MAX_DEPTH => Ok(Some(depth)),
        _ => Err(Error::Invalid(format!("--les-lookahead takes auto or a number up to {MAX_DEPTH}, not {text:?}"))),
    }
}

/// Reads a size such as `1500M`, `3G`, `2.5GiB` or `512K`, in bytes. A number alone is of `unit`; of `""`: of bytes.
pub fn parse_bytes(text: &str, unit: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let shift = match if suffix.is_empty() { unit } else { suffix } {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "m" | "MiB" => 20,
        "G" | "g" | "GiB" => 30,
        _ => return None,
    };
    let bytes = positive(number)? * (1u64 << shift) as f64;
    (bytes < (1u64 << 60) as f64).then_some(bytes as u64)
}

/// A number of digits, and a point at the most.
fn positive(text: &str) -> Option<f64> {
    text.parse().ok().filter(|_| text.chars().all(|c| c.is_ascii_digit() || c == '.'))
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
    /// Layers to look ahead; `None`: one, or two where reads come late.
    pub lookahead: Option<usize>,
    /// Where to write the routing trace.
    pub trace: Option<PathBuf>,
    /// Where what is learned is kept from one run to the next.
    pub profile: Option<PathBuf>,
    /// Where to record what the experts are applied to.
    pub inputs: Option<PathBuf>,
}

/// A size for people: `512 KiB`, `1.50 GiB`; with a precision, such as `{:.2}`, so many decimals; with a width, such as
/// `{:12}`, at the right.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit, decimals) = match self.0 {
            0..0x10_0000 => (10, "KiB", 0),
            0x10_0000..0x4000_0000 => (20, "MiB", 0),
            _ => (30, "GiB", 2),
        };
        let decimals = f.precision().unwrap_or(decimals);
        let text = format!("{:.decimals$} {unit}", self.0 as f64 / (1u64 << shift) as f64);
        write!(f, "{text:>width$}", width = f.width().unwrap_or(0))
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
        for bad in ["-1", "3T", "101%", "x", "1..2", "%", "+1%", "1e1%", "1e30", "99999999999999999999G", "3 G"] {
            assert!(bad.parse::<CacheSize>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_written() {
        assert_eq!(Size(96 << 10).to_string(), "96 KiB");
        assert_eq!(Size(3 << 20).to_string(), "3 MiB");
        assert_eq!(Size(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(format!("{:12.2}|{:.1}|", Size(2176), Size(3 << 29)), "    2.12 KiB|1.5 GiB|");
    }

    #[test]
    fn sizes_of_other_units_are_read() {
        assert_eq!(parse_bytes("589824", ""), Some(589_824));
        assert_eq!(parse_bytes("576K", ""), Some(576 << 10));
        assert_eq!(parse_bytes("1.5", "M"), Some(1536 << 10));
        for bad in ["", "K", "-1", "+1", "1e3", "inf", "1 K", "1.2.3", "1B", "1%"] {
            assert_eq!(parse_bytes(bad, ""), None, "{bad}");
        }
    }
}
