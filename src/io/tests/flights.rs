//! Reads that follow each other in a file and are done at once.

use super::*;
use crate::io::flight::{Flight, runs};

/// Reads of `lens` bytes that follow each other from the file's beginning, to slots 0, 1, ...
fn following(lens: &[usize]) -> Vec<Read> {
    let mut offset = 0;
    let read = |(i, &len): (usize, &usize)| {
        let read = Read { token: i as u64, file: 0, offset, len, need: len, buf: i * SLOT, check: None };
        offset += len as u64;
        read
    };
    lens.iter().enumerate().map(read).collect()
}

/// What an attempt completes: tokens, and how.
fn advance(flight: &mut Flight, bed: &Bed, attempt: io::Result<usize>) -> Vec<(u64, Option<ErrorKind>)> {
    let mut out = Vec::new();
    flight.advance(attempt, &bed.files, &bed.arena, &mut out);
    out.into_iter().map(|c| (c.token, c.result.err().map(|e| e.kind()))).collect()
}

/// Where the next attempt begins, and what it asks for.
fn rest(flight: &mut Flight, bed: &Bed) -> (u64, Vec<usize>) {
    let rest = flight.rest(&bed.files, &bed.arena).unwrap();
    (rest.offset, rest.spans.iter().map(|span| span.len()).collect())
}

#[test]
fn a_short_read_goes_on_from_an_aligned_position() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let mut f = Flight::new(&following(&[8 * step]));
    assert_eq!(advance(&mut f, &bed, Ok(step + 1)), []);
    assert_eq!(rest(&mut f, &bed), (step as u64, vec![7 * step]));
    assert_eq!(advance(&mut f, &bed, Ok(step + 1)), []);
    assert_eq!(rest(&mut f, &bed).0, 2 * step as u64);
    assert_eq!(advance(&mut f, &bed, Ok(6 * step)), [(0, None)]);
}

#[test]
fn several_end_where_the_attempt_ends() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let mut f = Flight::new(&following(&[step, 2 * step, 4 * step]));
    assert_eq!(rest(&mut f, &bed), (0, vec![step, 2 * step, 4 * step]));
    // the first, and a half of the second
    assert_eq!(advance(&mut f, &bed, Ok(2 * step + 5)), [(0, None)]);
    assert_eq!(rest(&mut f, &bed), (2 * step as u64, vec![step, 4 * step]));
    assert_eq!(advance(&mut f, &bed, Ok(5 * step)), [(1, None), (2, None)]);
    assert!(f.rest(&bed.files, &bed.arena).is_err(), "nothing is left");
}

#[test]
fn no_progress_is_the_end_of_the_file() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let eof = Some(ErrorKind::UnexpectedEof);
    assert_eq!(advance(&mut Flight::new(&following(&[step])), &bed, Ok(0)), [(0, eof)]);
    let mut f = Flight::new(&following(&[2 * step, step]));
    assert_eq!(advance(&mut f, &bed, Ok(step + 7)), []);
    assert_eq!(advance(&mut f, &bed, Ok(7)), [(0, eof)]);
    assert_eq!(advance(&mut f, &bed, Ok(0)), [(1, eof)]);
}

#[test]
fn what_is_not_needed_need_not_be_there() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let mut reads = following(&[step, step]);
    reads[1].need = 10;
    let mut f = Flight::new(&reads);
    assert_eq!(advance(&mut f, &bed, Ok(step + 9)), [(0, None)]);
    assert_eq!(advance(&mut f, &bed, Ok(10)), [(1, None)]);
}

#[test]
fn an_error_is_that_of_the_read_that_has_it() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let broken = || Err(io::Error::from(ErrorKind::PermissionDenied));
    let mut f = Flight::new(&following(&[step; 3]));
    assert_eq!(advance(&mut f, &bed, broken()), []);
    // now one by one
    assert_eq!(rest(&mut f, &bed), (0, vec![step]));
    assert_eq!(advance(&mut f, &bed, Ok(step)), [(0, None)]);
    assert_eq!(advance(&mut f, &bed, broken()), [(1, Some(ErrorKind::PermissionDenied))]);
    assert_eq!(advance(&mut f, &bed, Ok(step)), [(2, None)]);
}

#[test]
fn passing_errors_are_tried_again_but_not_for_ever() {
    let bed = Bed::new(false);
    let interrupted = || Err(io::Error::from(ErrorKind::Interrupted));
    let mut f = Flight::new(&following(&[512]));
    let attempts = (1..1000).find(|_| !advance(&mut f, &bed, interrupted()).is_empty());
    assert!((10..100).contains(&attempts.unwrap()));
}

#[test]
fn what_makes_no_sense_ends_alone() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let mut reads = following(&[step; 3]);
    reads[1].buf = bed.arena.len();
    let mut f = Flight::new(&reads);
    assert_eq!(rest(&mut f, &bed), (0, vec![step]), "what is before it is read");
    assert_eq!(advance(&mut f, &bed, Ok(step)), [(0, None)]);
    assert!(f.rest(&bed.files, &bed.arena).is_err());
    // whatever was attempted: an engine may have done nothing
    let mut ended = Vec::new();
    while ended.is_empty() {
        ended = advance(&mut f, &bed, Ok(0));
    }
    assert_eq!(ended, [(1, Some(ErrorKind::InvalidInput))]);
    assert_eq!(advance(&mut f, &bed, Ok(step)), [(2, None)]);
}

#[test]
fn reads_that_follow_each_other_are_one() {
    let bed = Bed::new(true);
    let step = bed.files.align();
    let mut reads = following(&[step; 9]);
    reads[2].offset += step as u64; // a gap before it, and after it
    let lens: Vec<usize> = runs(&reads).map(|mut f| rest(&mut f, &bed).1.len()).collect();
    assert_eq!(lens, [2, 1, 4, 2]);
    assert_eq!(runs(&[]).count(), 0);
}

#[test]
fn every_engine_does_them() {
    each(|kind, bed| {
        let engine = bed.open(kind, 16, None);
        let step = bed.files.align();
        let mut reads = following(&[4 * step, step, 2 * step, 8 * step, step, step]);
        // to the end of the file, which is no multiple of anything
        let last = SIZE - SIZE % step;
        for (i, offset) in [last - step, last].into_iter().enumerate() {
            let need = step.min(SIZE - offset);
            let buf = (10 + i) * SLOT;
            reads.push(Read {
                token: 10 + i as u64,
                file: 0,
                offset: offset as u64,
                len: step,
                need,
                buf,
                check: None,
            });
        }
        for in_turn in [false, true] {
            bed.fill(0);
            if in_turn {
                engine.submit_in_turn(&reads)
            } else {
                engine.submit(&reads)
            }
            let done = reap_all(&*engine, reads.len());
            assert!(done.iter().all(|c| c.result.is_ok()), "{done:?}");
            reads.iter().for_each(|read| bed.assert_right(read));
        }
        // past the end of the file: what is there comes, the rest is an error
        bed.truncate((6 * step + 1) as u64);
        engine.submit(&reads);
        let done: HashMap<_, _> = reap_all(&*engine, reads.len()).into_iter().map(|c| (c.token, c.result)).collect();
        assert!(done[&0].is_ok() && done[&1].is_ok());
        for token in [2, 3, 4, 5, 10, 11] {
            assert_eq!(done[&token].as_ref().unwrap_err().kind(), ErrorKind::UnexpectedEof, "{token}");
        }
    });
}
