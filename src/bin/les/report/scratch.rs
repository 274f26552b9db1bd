//! Where the base's logits are meanwhile, and whether they are all there: llama-perplexity does not look.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context, bail};
use les::options::Size;
use tempfile::TempDir;

/// Magic and context, before anything is known of the text.
const HEAD_BYTES: u64 = 12;
/// As a shell says it of a program that was interrupted.
const INTERRUPTED: i32 = 130;

/// A directory that is gone when this is, also when the program is interrupted.
pub struct Scratch(TempDir);

impl Scratch {
    /// Makes one in `dir`. Once in a program.
    pub fn new(dir: &Path) -> anyhow::Result<Self> {
        let made = TempDir::with_prefix_in("les-report-", dir)
            .with_context(|| format!("{}: cannot hold the logits; give another --scratch", dir.display()))?;
        let path = made.path().to_owned();
        let end = move || {
            // what is left is found by its name
            let _ = fs::remove_dir_all(&path);
            process::exit(INTERRUPTED);
        };
        ctrlc::set_handler(end).context("cannot be told of an interruption")?;
        Ok(Self(made))
    }

    /// The file of the logits.
    pub fn logits(&self) -> PathBuf {
        self.0.path().join("logits")
    }

    /// Fails when `text` was too short for two contexts, or the logits are not all there.
    pub fn check(&self, text: &Path, ctx_size: u32) -> anyhow::Result<()> {
        let path = self.logits();
        let told = || path.display().to_string();
        let mut file = File::open(&path).with_context(told)?;
        let there = file.metadata().with_context(told)?.len();
        if there == HEAD_BYTES {
            let (text, least) = (text.display(), 2 * u64::from(ctx_size));
            bail!(
                "{text}: this text is too short: with contexts of {ctx_size} tokens it needs {least}; give a longer one, or a \
                 smaller --ctx-size"
            );
        }
        let mut head = Vec::new();
        Read::by_ref(&mut file).take(HEAD_BYTES + 8).read_to_end(&mut head).with_context(told)?;
        let need = bytes_of(&head).unwrap_or(HEAD_BYTES + 8);
        if there < need {
            let (dir, need, there) = (self.0.path().parent().unwrap_or(&path).display(), Size(need), Size(there));
            bail!(
                "{dir}: the logits of the base take {need}, of which {there} could be written; make room there, or give \
                 another --scratch"
            );
        }
        Ok(())
    }
}

/// How large a file of logits is that begins with `head`.
fn bytes_of(head: &[u8]) -> Option<u64> {
    let numbers = head.strip_prefix(b"_logits_")?;
    let mut numbers = numbers.as_chunks().0.iter().map(|n| u64::from(u32::from_le_bytes(*n)));
    let [ctx, vocab, chunks] = [numbers.next()?, numbers.next()?, numbers.next()?];
    // of each context the second half is judged, and the last token of it has no next one; two bytes for each token of
    // the vocabulary, of which there is an even number, and eight for their scale
    let judged = ctx.checked_sub(1 + ctx / 2)?;
    let row = 2 * (vocab.next_multiple_of(2) + 4);
    judged.checked_mul(row)?.checked_add(4 * ctx)?.checked_mul(chunks)?.checked_add(HEAD_BYTES + 8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_that_which_llama_perplexity_writes() {
        let head = |ctx: u32, vocab: u32, chunks: u32| {
            [b"_logits_".to_vec(), [ctx, vocab, chunks].map(u32::to_le_bytes).concat()].concat()
        };
        // of the bundled model
        assert_eq!(bytes_of(&head(128, 4096, 8)), Some(4_136_916));
        assert_eq!(bytes_of(&head(4, 3, 1)), Some(20 + 16 + 16));
        assert_eq!(bytes_of(b"_logits_"), None);
        assert_eq!(bytes_of(&head(0, 3, 1)), None);
        assert_eq!(bytes_of(&head(u32::MAX, u32::MAX, u32::MAX)), None);
    }
}
