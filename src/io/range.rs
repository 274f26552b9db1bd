//! Reads a range of a file to the caller's memory, here and now: for copies of a model. What computes reads by an engine.
#![allow(unsafe_code)]

use std::io;

use super::pread::read;
use super::{Files, Read};
use crate::store::{Arena, extent};

/// So much is read at once.
const STEP: usize = 1 << 20;

/// Fills `to` with what is at `offset` of file `file`, whose checksum is `crc32` if that is known. Any thread.
///
/// # Errors
/// The system's answer; `UnexpectedEof` when the file ends before that, `InvalidData` when the checksum is another one.
pub fn read_range(files: &Files, file: u32, offset: u64, to: &mut [u8], crc32: Option<u32>) -> io::Result<()> {
    let align = files.align();
    let arena = Arena::new(STEP + 2 * align).map_err(io::Error::other)?;
    let mut offset = offset;
    for to in to.chunks_mut(STEP) {
        let range = extent(offset, to.len() as u64, align as u64);
        let (len, need) = (range.len as usize, range.need as usize);
        read(files, &arena, Read { token: 0, file, offset: range.offset, len, need, buf: 0, check: None })?;
        let from = arena.at(range.head as usize, to.len());
        // SAFETY: the read has filled `need` bytes of the arena, which are `head` and as many as `to` has; `to` is the
        // caller's, so it is not in the arena.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        offset += to.len() as u64;
    }
    if crc32.is_some_and(|crc32| crc32fast::hash(to) != crc32) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum is wrong"));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::index::ModelFile;

    #[test]
    fn any_range_comes_as_it_is_in_the_file() {
        let data: Vec<u8> = (0..2 * STEP + 777).map(|i| (i * 31 / 7) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&data).unwrap();
        let model = ModelFile { path: file.path().into(), size: data.len() as u64 };
        for direct in [true, false] {
            let files = Files::open(std::slice::from_ref(&model), direct).unwrap();
            for (offset, len) in [(0, data.len()), (5, STEP), (4095, STEP + 2), (2 * STEP + 700, 77), (9, 0)] {
                let mut to = vec![0; len];
                read_range(&files, 0, offset as u64, &mut to, Some(crc32fast::hash(&data[offset..offset + len])))
                    .unwrap();
                assert!(to == data[offset..offset + len], "{len} bytes at {offset}, direct: {direct}");
            }
            let fails = |len: usize, crc32| read_range(&files, 0, 5, &mut vec![0; len], crc32).unwrap_err().kind();
            assert_eq!(fails(data.len(), None), io::ErrorKind::UnexpectedEof);
            assert_eq!(fails(9, Some(0)), io::ErrorKind::InvalidData);
        }
    }
}
