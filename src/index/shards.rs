//! Models in several files: which belong together, and where the others are.

use std::path::Path;

use super::gguf::Header;
use crate::error::{Error, Result};

/// Reads the header of the file at `path` and, when it is a shard, those of all others.
pub(super) fn open(path: &Path) -> Result<Vec<Header>> {
    let header = Header::open(path)?;
    let Some((no, count)) = split(&header)? else {
        return Ok(vec![header]);
    };
    let Some(prefix) = prefix(path, no, count) else {
        let why = format!(
            "it is shard {} of {count}, but its name does not end in {:?}, so the others cannot be found; \
             give the shards the names they were published with",
            no + 1,
            suffix(no, count)
        );
        return Err(header.fail(0, why));
    };
    let mut headers = vec![header];
    for other in (0..count).filter(|other| *other != no) {
        let path = path.with_file_name(format!("{prefix}{}", suffix(other, count)));
        headers.push(Header::open(&path).map_err(explain)?);
    }
    Ok(headers)
}

/// Sorts the shards of a model, and checks that they are all there, each once.
pub(super) fn in_order(headers: Vec<Header>) -> Result<Vec<Header>> {
    let given = headers.len();
    let mut numbered = Vec::with_capacity(given);
    for header in headers {
        let (no, count) = split(&header)?.unwrap_or((0, 1));
        if count as usize != given {
            let why = format!(
                "it is one of {count} file(s) of a model, but {given} were given; give all shards of one model"
            );
            return Err(header.fail(0, why));
        }
        numbered.push((no, header));
    }
    numbered.sort_by_key(|(no, _)| *no);
    // As many as there should be, and all numbers in range: if none is there twice, none is missing.
    for pair in numbered.windows(2) {
        if let [(no, a), (next, b)] = pair
            && no == next
        {
            let why =
                format!("it is shard {} of {given}, and so is {}; give each shard once", no + 1, a.file.path.display());
            return Err(b.fail(0, why));
        }
    }
    let headers: Vec<Header> = numbered.into_iter().map(|(_, header)| header).collect();
    check_tensors_count(&headers)?;
    check_packing(&headers)?;
    Ok(headers)
}

/// Shards of two packings fit each other in every way but their content.
fn check_packing(headers: &[Header]) -> Result<()> {
    let packed: Vec<_> = headers.iter().filter_map(|header| Some((header, header.model?))).collect();
    let like = |model: u32| packed.iter().filter(|(_, other)| *other == model).count();
    // of several as frequent ones that of the first file
    let Some((most, model)) = packed.iter().rev().max_by_key(|(_, model)| like(*model)) else { return Ok(()) };
    match packed.iter().find(|(_, other)| other != model) {
        None => Ok(()),
        Some((header, _)) => {
            let why = format!(
                "it is of another packing than {}: other weights, other types, or damaged; \
                 pack the model again, or copy the file again",
                most.file.path.display()
            );
            Err(header.fail(0, why))
        }
    }
}

/// A model lacks tensors when its shards come from different splits.
fn check_tensors_count(headers: &[Header]) -> Result<()> {
    let Some(first) = headers.first().filter(|_| headers.len() > 1) else {
        return Ok(());
    };
    let found: usize = headers.iter().map(|header| header.tensors.len()).sum();
    match first.uint("split.tensors.count") {
        Some(count) if count as usize != found => {
            let why = format!(
                "split.tensors.count is {count}, but the shards have {found} tensors; \
                 they are not all of the same model, download them again"
            );
            Err(first.fail(0, why))
        }
        _ => Ok(()),
    }
}

/// The number of a shard, from 0, and how many there are. `None` for a model in one file.
fn split(header: &Header) -> Result<Option<(u32, u32)>> {
    let count = header.uint("split.count").unwrap_or(0);
    if count < 2 {
        return Ok(None);
    }
    match header.uint("split.no") {
        Some(no) if no < count && count <= u16::MAX.into() => Ok(Some((no, count))),
        no => {
            let no = no.map_or_else(|| "missing".to_owned(), |no| no.to_string());
            let why = format!("split.no is {no} where split.count is {count}; split the model again");
            Err(header.fail(0, why))
        }
    }
}

/// How the name of shard `no` of `count` ends.
fn suffix(no: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", u64::from(no) + 1)
}

/// How the names of all shards begin.
fn prefix(path: &Path, no: u32, count: u32) -> Option<&str> {
    path.file_name()?.to_str()?.strip_suffix(suffix(no, count).as_str())
}

/// Says of a shard that cannot be opened what it is.
fn explain(error: Error) -> Error {
    match error {
        Error::File { path, what: "open", source } => {
            Error::File { path, what: "open this shard (a directory must have all shards of a model)", source }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_shards() {
        let path = Path::new("/models/m-00002-of-00003.gguf");
        assert_eq!(prefix(path, 1, 3), Some("m"));
        assert_eq!(prefix(path, 0, 3), None);
        assert_eq!(prefix(path, 1, 4), None);
        assert_eq!(suffix(u32::MAX, 2), "-4294967296-of-00002.gguf");
    }
}
