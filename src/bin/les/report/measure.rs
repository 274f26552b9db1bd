//! llama-perplexity, and what it says.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::Serialize;

use super::Args;
use super::scratch::Scratch;

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub value: f64,
    pub error: f64,
}

/// What a model loses against the base.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Harm {
    /// Its own, and the base's; in rows' own fields.
    #[serde(skip)]
    pub perplexity: f64,
    #[serde(skip)]
    pub base_perplexity: f64,
    pub mean_kl: Estimate,
    /// Of a thousand tokens one has a larger one.
    pub kl_999: f64,
    /// How often the base's likeliest token is this one's, in percent.
    pub same_top: Estimate,
}

/// The program, and the base's logits, as long as this lives.
pub struct Perplexity<'a> {
    args: &'a Args,
    program: PathBuf,
    scratch: Scratch,
}

impl<'a> Perplexity<'a> {
    pub fn new(args: &'a Args) -> anyhow::Result<Self> {
        let beside = || {
            let path = std::env::current_exe().ok()?.with_file_name("llama-perplexity");
            path.is_file().then_some(path)
        };
        let program = args.llama_perplexity.clone().or_else(beside).unwrap_or_else(|| "llama-perplexity".into());
        let dir = args.scratch.clone().unwrap_or_else(std::env::temp_dir);
        Ok(Self { args, program, scratch: Scratch::new(&dir)? })
    }

    /// Writes the logits of the base.
    pub fn base(&self, model: &Path) -> anyhow::Result<()> {
        self.run(model, &["-f".as_ref(), self.args.text.as_os_str()])?;
        self.scratch.check(&self.args.text, self.args.ctx_size)
    }

    /// Compares a model with the base, of which [`Perplexity::base`] knows.
    pub fn harm(&self, model: &Path) -> anyhow::Result<Harm> {
        let said = self.run(model, &["--kl-divergence".as_ref()])?;
        // it does not wait for its log to be written when it ends
        let cut = "the end of what it says may have been lost: give the command again";
        parse(&said).with_context(|| format!("{} said of {}: {said}\n{cut}", self.program.display(), model.display()))
    }

    fn run(&self, model: &Path, more: &[&std::ffi::OsStr]) -> anyhow::Result<String> {
        eprintln!("les: {} is computed", model.display());
        let mut command = Command::new(&self.program);
        command.arg("-m").arg(model).arg("-c").arg(self.args.ctx_size.to_string());
        command.arg("--kl-divergence-base").arg(self.scratch.logits()).args(more);
        if let Some(n) = self.args.threads {
            command.arg("-t").arg(n.to_string());
        }
        let start = || format!("{}: cannot be started; give --llama-perplexity", self.program.display());
        let output = command.output().with_context(start)?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = log.lines().collect();
            bail!(
                "{} failed with {}:\n{}",
                self.program.display(),
                model.display(),
                lines[lines.len().saturating_sub(8)..].join("\n")
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Reads the last tables of `--kl-divergence`.
fn parse(said: &str) -> anyhow::Result<Harm> {
    let numbers = |name: &str| -> anyhow::Result<Vec<f64>> {
        let line = |line: &str| {
            let (key, rest) = line.split_once(':')?;
            let same = key.split_whitespace().eq(name.split_whitespace());
            same.then(|| rest.split_whitespace().filter_map(|word| word.parse().ok()).collect())
        };
        said.lines().find_map(line).with_context(|| format!("there is no line {name:?}"))
    };
    let first = |name: &str| numbers(name)?.first().copied().with_context(|| format!("{name:?} has no number"));
    let estimate = |name: &str| match numbers(name)?[..] {
        [value, error, ..] => Ok(Estimate { value, error }),
        _ => bail!("{name:?} has no error"),
    };
    Ok(Harm {
        perplexity: first("Mean PPL(Q)")?,
        base_perplexity: first("Mean PPL(base)")?,
        mean_kl: estimate("Mean KLD")?,
        kl_999: first("99.9% KLD")?,
        same_top: estimate("Same top p")?,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SAID: &str = "
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence
   1      17.7344 \u{b1}    3.6076       0.00127 \u{b1}    0.00446       0.00171 \u{b1}    0.00041

====== Perplexity statistics ======
Mean PPL(Q)                   :  26.362470 \u{b1}   1.782379
Mean PPL(base)                :  26.375901 \u{b1}   1.784722

====== KL divergence statistics ======
Mean    KLD:   0.001247 \u{b1}   0.000096
Maximum KLD:   0.098226
99.9%   KLD:   0.033754
Same top p: 97.781 \u{b1} 0.394 %
";

    #[test]
    fn what_it_says_is_understood() {
        let expected = Harm {
            perplexity: 26.362_470,
            base_perplexity: 26.375_901,
            mean_kl: Estimate { value: 0.001_247, error: 0.000_096 },
            kl_999: 0.033_754,
            same_top: Estimate { value: 97.781, error: 0.394 },
        };
        assert_eq!(parse(SAID).unwrap(), expected);
        for line in SAID.lines().filter(|line| ["Mean PPL", "Mean    KLD", "99.9%"].iter().any(|l| line.contains(l))) {
            assert!(parse(&SAID.replace(line, "")).is_err(), "{line}");
        }
    }
}
