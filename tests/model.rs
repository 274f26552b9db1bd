//! What is decided about a model, and that a model streams what is in its file.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::expect_used)]

#[path = "common/gguf.rs"]
mod gguf;

use std::path::PathBuf;

use les::Error;
use les::lookahead::trace::Reader;
use les::lookahead::{GateMass, Input, LEAST_PROBABILITY, Recall, Reliability, Router, expected_error};
use les::model::Model;
use les::options::{CacheSize, Mode, Options};
use les::sched::{LayerRequest, Request, Step};

const GIB: u64 = 1 << 30;

struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

/// A model of 4 layers with 16 experts, of which 2 are used.
fn file() -> File {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let model = gguf::Gguf::moe(4, 16, 2);
    let mut bytes = model.bytes();
    // no two places alike: zeros would be right wherever they are read from
    for (i, byte) in bytes.iter_mut().enumerate().skip(model.header().len()) {
        *byte = ((i as u32).wrapping_mul(2_654_435_761) >> 24) as u8;
    }
    std::fs::write(&path, bytes).unwrap();
    File { _dir: dir, path }
}

fn options(mode: Mode, cache: CacheSize) -> Options {
    Options { mode, cache, ..Options::default() }
}

#[test]
fn auto_streams_what_does_not_fit() {
    let file = file();
    let model = Model::open(&file.path).unwrap();
    let (floor, all) = model.cache_bounds();
    let decide = |cache, memory| model.decide_given(&options(Mode::Auto, cache), memory).unwrap();
    assert!(!decide(CacheSize::Auto, Some(16 * GIB)).streams);
    assert!(!decide(CacheSize::Auto, None).streams, "nobody knows how much memory there is");
    let small = decide(CacheSize::Auto, Some(1 << 20));
    assert!(small.streams && small.cache_bytes == floor, "{small:?}");
    assert!(small.message.contains("--les-cache") && small.message.contains("--les off"), "{}", small.message);
    // a budget is a wish, whatever memory there is
    let given = decide(CacheSize::Bytes(floor), Some(16 * GIB));
    assert!(given.streams && given.cache_bytes == floor);
    assert!(!decide(CacheSize::Bytes(all), Some(16 * GIB)).streams);
    assert!(decide(CacheSize::Min, Some(16 * GIB)).streams);
}

#[test]
fn on_and_off_are_obeyed() {
    let file = file();
    let model = Model::open(&file.path).unwrap();
    let decide = |mode| model.decide_given(&options(mode, CacheSize::Auto), Some(16 * GIB)).unwrap();
    assert!(decide(Mode::On).streams);
    assert!(!decide(Mode::Off).streams);
}

#[test]
fn a_cache_below_the_floor_is_refused_with_the_floor() {
    let file = file();
    let model = Model::open(&file.path).unwrap();
    let (floor, _) = model.cache_bounds();
    let refused = model.decide_given(&options(Mode::On, CacheSize::Bytes(floor - 1)), Some(GIB)).unwrap_err();
    assert!(matches!(refused, Error::Budget { floor_mib, .. } if floor_mib == floor.div_ceil(1 << 20)), "{refused}");
    // the one that is named is accepted
    let named = CacheSize::Bytes(floor.div_ceil(1 << 20) << 20);
    assert!(model.decide_given(&options(Mode::On, named), Some(GIB)).unwrap().streams);
}

#[test]
fn what_is_handed_out_is_what_the_file_holds() {
    let file = file();
    let bytes = std::fs::read(&file.path).unwrap();
    for io in ["auto", "pread"] {
        let model = Model::open(&file.path).unwrap();
        let options = Options { io: io.parse().unwrap(), ..options(Mode::On, CacheSize::Min) };
        assert!(model.decide(&options).unwrap().streams);
        let (floor, _) = model.cache_bounds();
        for round in 0..3 {
            for (tensor, t) in model.index().tensors.iter().enumerate() {
                let ids: Vec<i32> = (0..16).filter(|e| (e + round) % 3 != 0).collect();
                let request = Request { tensor, ids: &ids, rows: ids.len(), certain: ids.len(), walkers: 1 };
                let ticket = model.ticket(request, &[]).unwrap();
                let mut seen = Vec::new();
                while let Step::Expert { expert, address } = ticket.next(seen.len() as u32).unwrap() {
                    let want = (t.offset + u64::from(expert) * t.expert_bytes) as usize;
                    let len = t.expert_bytes as usize;
                    // SAFETY: the address is valid for the expert's bytes until the next call.
                    #[allow(unsafe_code)]
                    let got = unsafe { std::slice::from_raw_parts(address as *const u8, len) };
                    assert!(got == &bytes[want..want + len], "{} expert {expert}", t.name);
                    seen.push(expert as i32);
                }
                seen.sort_unstable();
                assert_eq!(seen, ids);
            }
        }
        let stats = model.stats().unwrap();
        assert!(stats.cache_bytes <= floor && stats.evictions > 0, "{stats:?}");
    }
}

#[test]
fn an_input_that_is_not_finite_is_an_error_where_the_layer_begins() {
    let file = file();
    let model = Model::open(&file.path).unwrap();
    model.decide(&options(Mode::On, CacheSize::Min)).unwrap();
    let ticket = |value: f32| {
        let row = [1.0, value, 1.0];
        model.ticket(Request { tensor: 0, ids: &[1], rows: 1, certain: 1, walkers: 1 }, &[&row[..]]).map(|_| ())
    };
    ticket(1e30).unwrap();
    assert!(matches!(ticket(f32::NAN), Err(Error::NotANumber { .. })));
    assert!(matches!(ticket(f32::NEG_INFINITY), Err(Error::NotANumber { .. })));
}

#[test]
fn inputs_are_recorded_operation_by_operation() {
    let file = file();
    let path = file.path.with_extension("inputs");
    let model = Model::open(&file.path).unwrap();
    model.decide(&Options { inputs: Some(path.clone()), ..options(Mode::On, CacheSize::Part(1.0)) }).unwrap();
    let row = [0.5; 64];
    let layer = LayerRequest { tensors: &[0, 1, 2], ids: &[1], rows: 1, certain: 1, walkers: 1 };
    assert!(model.layer(layer, &[&row[..]]).unwrap().is_none(), "waves tell nothing of what down is applied to");
    for (tensor, columns) in [(0, 64), (1, 64), (2, 32)] {
        model.ticket(Request { tensor, ids: &[1], rows: 1, certain: 1, walkers: 1 }, &[&row[..columns]]).unwrap();
    }
    assert!(model.close_inputs().unwrap() && !model.close_inputs().unwrap());
    let bytes = std::fs::read(&path).unwrap();
    let header = bytes.iter().position(|b| *b == b'\n').unwrap() + 1;
    // up's, which are gate's too, and down's: their numbers, a pick, a row
    let expected = [(0, 64), (1, 32)].map(|(at, columns)| {
        let numbers = [at, 1, 1, 1, 1].map(u32::to_le_bytes).concat();
        [numbers, [0, 0x38].repeat(columns)].concat()
    });
    assert_eq!(bytes[header..], expected.concat());
}

#[test]
fn a_pass_of_as_many_rows_as_were_drafted_is_a_verification() {
    let file = file();
    let model = Model::open(&file.path).unwrap();
    model.decide(&options(Mode::On, CacheSize::Min)).unwrap();
    // before it streams, too
    model.drafted(3);
    assert_eq!([0, 1, 2, 3, 4].map(|rows| model.certain(rows)), [0, 1, 2, 1, 4]);
    let pass = |ids: &[i32]| {
        for tensor in 0..model.index().tensors.len() {
            let rows = ids.len() / 2;
            let request = Request { tensor, ids, rows, certain: model.certain(rows), walkers: 1 };
            let ticket = model.ticket(request, &[]).unwrap();
            (0..).find(|&position| matches!(ticket.next(position).unwrap(), Step::End)).unwrap();
        }
        let stats = model.stats().unwrap();
        (stats.verifications, stats.draft_reads > 0, stats.draft_reads_rejected > 0)
    };
    // other numbers of rows are as ever
    assert_eq!(pass(&[0, 1, 2, 3]), (0, false, false));
    assert_eq!(pass(&[0, 1, 2, 3, 4, 5]), (1, true, false));
    model.judged(1);
    assert_eq!(model.certain(3), 3);
    assert_eq!(pass(&[6, 7, 8, 9, 10, 11]), (1, true, true));
    for rows in [0, 1] {
        model.drafted(3);
        model.drafted(rows);
        assert_eq!([0, 1, 3].map(|rows| model.certain(rows)), [0, 1, 3]);
    }
}

/// What a trace with lookahead tells: guesses at each layer but the last, more of them than are read.
#[test]
fn guesses_are_traced_where_they_are_made() {
    let dir = tempfile::tempdir().unwrap();
    let traced = |ahead: usize, rows: usize| {
        let path = dir.path().join(format!("trace-{ahead}-{rows}"));
        let model = Model::open(&PathBuf::from("tests/data/docmoe-53m-q4_k_m.gguf")).unwrap();
        let options = Options {
            lookahead: Some(ahead),
            trace: Some(path.clone()),
            io: "pread".parse().unwrap(),
            ..options(Mode::On, CacheSize::Min)
        };
        model.decide(&options).unwrap();
        let input: Vec<f32> = (0..256).map(|i| (i as f32).sin()).collect();
        for tensor in 0..model.index().tensors.len() {
            let ids: Vec<i32> = (0..4).cycle().take(4 * rows).collect();
            let request = Request { tensor, ids: &ids, rows, certain: rows, walkers: 1 };
            let ticket = model.ticket(request, &vec![&input[..]; rows]).unwrap();
            (0..5).for_each(|position| assert!(ticket.next(position).is_ok()));
        }
        drop(model);
        Reader::open(&path).unwrap().map(Result::unwrap).collect::<Vec<_>>()
    };
    let records = traced(2, 1);
    assert!(records.iter().flat_map(|r| r.guesses.iter().flatten()).any(|g| g.1 >= LEAST_PROBABILITY));
    for (at, record) in records.iter().enumerate() {
        assert_eq!(record.guesses.len(), 2.min(7 - at), "layer {at} of 8 looks two layers ahead");
        for guesses in &record.guesses {
            assert!(guesses.iter().any(|g| g.1 < LEAST_PROBABILITY), "{guesses:?}");
            assert!(guesses.is_sorted_by(|a, b| a.1 >= b.1), "{guesses:?}");
        }
    }
    for (ahead, rows) in [(0, 1), (2, 9)] {
        assert!(traced(ahead, rows).iter().all(|record| record.guesses.is_empty() && !record.picks.is_empty()));
    }
}

#[test]
fn parts_of_tensors_are_read_for_copies() {
    let file = file();
    let bytes = std::fs::read(&file.path).unwrap();
    let model = Model::open(&file.path).unwrap();
    for (tensor, t) in model.index().tensors.iter().enumerate() {
        let whole = t.expert_bytes as usize * 16;
        for (offset, len) in [(0, whole), (7, 100), (whole - 1, 1), (whole, 0)] {
            let mut to = vec![0; len];
            model.read(tensor, offset as u64, &mut to).unwrap();
            let at = t.offset as usize + offset;
            assert!(to == bytes[at..at + len], "{len} bytes at {offset} of {}", t.name);
        }
        let past = model.read(tensor, whole as u64, &mut [0]).unwrap_err();
        assert!(matches!(past, Error::Invalid(_)), "{past}");
    }
    std::fs::write(&file.path, &bytes[..bytes.len() - 1]).unwrap();
    let last = model.index().tensors.len() - 1;
    let whole = model.index().tensors[last].expert_bytes * 16;
    assert!(matches!(
        model.read(last, 0, &mut vec![0; whole as usize]),
        Err(Error::Read { .. } | Error::Changed { .. })
    ));
    assert!(matches!(model.read(0, 0, &mut [0]), Err(Error::Changed { .. })));
}

#[test]
fn predictions_are_counted_layer_by_layer() {
    let file = file();
    let mut model = Model::open(&file.path).unwrap();
    let mut bytes = std::fs::read(&file.path).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for router in &model.index().routers {
        let at = router.weight.offset as usize;
        for weight in bytes[at..at + router.weight.bytes as usize].as_chunks_mut::<4>().0 {
            *weight = (random.f32() - 0.5).to_le_bytes();
        }
    }
    std::fs::write(&file.path, bytes).unwrap();
    model = Model::open(&file.path).unwrap();
    let trace = file.path.with_extension("trace");
    model
        .decide(&Options { lookahead: Some(2), trace: Some(trace.clone()), ..options(Mode::On, CacheSize::Min) })
        .unwrap();
    for _ in 0..50 {
        let row: Vec<f32> = (0..64).map(|_| random.f32() - 0.5).collect();
        for tensor in 0..model.index().tensors.len() {
            let ids = [random.i32(0..8), random.i32(8..16)];
            let request = Request { tensor, ids: &ids, rows: 1, certain: 1, walkers: 1 };
            let ticket = model.ticket(request, &[&row[..]]).unwrap();
            (0..).take_while(|&i| ticket.next(i).unwrap() != Step::End).count();
        }
    }
    let stats = model.stats().unwrap();
    // 2 picks per token; the first layer has none before it, the second one
    let picks: Vec<Vec<u64>> = stats.layers.iter().map(|l| l.recall.iter().map(|r| r.picks).collect()).collect();
    assert_eq!(picks, [[0, 0], [100, 0], [100, 100], [100, 100]]);
    for (d, total) in stats.recall.iter().enumerate() {
        let sum = |of: fn(&Recall) -> u64| stats.layers.iter().map(|l| of(&l.recall[d])).sum::<u64>();
        assert_eq!([sum(|r| r.picks), sum(|r| r.at_k), sum(|r| r.at_2k)], [total.picks, total.at_k, total.at_2k]);
        assert!(total.at_k > 0 && total.at_k < total.at_2k && total.at_2k < total.picks, "{total:?}");
        let mass = stats.gate_mass[d];
        assert_eq!(mass.tokens, total.picks / 2);
        assert!(0.0 < mass.at_k && mass.at_k < mass.at_2k && mass.at_2k < mass.tokens as f64, "{mass:?}");
        let bins = &stats.calibration[d];
        assert!(bins.iter().all(|bin| (0.0..1.0).contains(&bin.promised) && bin.picked <= bin.predictions));
        // 16 experts per token, but for those far below; among them all that were predicted and picked
        let [seen, picked] =
            [|b: &Reliability| b.predictions, |b: &Reliability| b.picked].map(|of| bins.iter().map(of).sum::<u64>());
        assert!(seen <= 8 * total.picks && (total.at_k..=total.picks).contains(&picked), "{seen} {picked}");
    }
    // chance makes the picks, whatever was promised first
    assert!(stats.calibration_error.is_some_and(|off| 0.0 < off && off < 0.5), "{:?}", stats.calibration_error);
    let json = serde_json::to_value(&stats).unwrap();
    let sum: u64 = (0..4).map(|l| json["layers"][l]["guessed"].as_u64().unwrap()).sum();
    assert_eq!(json["guessed"], sum);
    // the trace tells the same, pass by pass
    drop(model);
    let records: Vec<_> = Reader::open(&trace).unwrap().map(Result::unwrap).collect();
    assert_eq!(records[1].outcomes.len(), 1, "the second layer has one before it");
    for d in 0..2 {
        let (mut recall, mut mass) = (Recall::default(), GateMass::default());
        for outcome in records.iter().filter_map(|record| record.outcomes.get(d)) {
            recall += outcome.recall;
            mass += outcome.gate_mass;
        }
        assert_eq!((recall, mass), (stats.recall[d], stats.gate_mass[d]), "{d}");
    }
}

/// Passes over the bundled model, whose hidden state no layer changes and whose picks are its routers'.
#[test]
fn batches_and_the_first_layer_of_the_next_pass_are_foreseen() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&PathBuf::from("tests/data/docmoe-53m-q4_k_m.gguf")).unwrap();
    // with a trace every layer is predicted, also when all of it is in memory
    let trace = Some(dir.path().join("trace"));
    model.decide(&Options { trace, ..options(Mode::On, CacheSize::Part(0.5)) }).unwrap();
    let routers: Vec<Router> =
        model.index().routers.iter().map(|places| Router::load(model.index(), places).unwrap().unwrap()).collect();
    let (mut input, mut scores) = (Input::default(), Vec::new());
    // the last layer is computed for the last `outputs` tokens; answers how many experts the layers after the first have wanted
    let mut pass = |states: &[Vec<f32>], known: bool, outputs: usize| {
        let (mut wanted, mut ids, mut rows) = (0, Vec::new(), Vec::new());
        for tensor in 0..model.index().tensors.len() {
            let leads = model.index().leads(tensor);
            let layer = model.index().tensors[tensor].layer as usize;
            let router = &routers[layer];
            let states = &states[if layer == 7 { states.len() - outputs } else { 0 }..];
            if states.is_empty() {
                continue;
            }
            if leads {
                ids.clear();
                let of = |state: &Vec<f32>| state.iter().zip(&router.norm).map(|(x, norm)| x * norm).collect();
                rows = states.iter().map(of).collect::<Vec<Vec<f32>>>();
                for row in &rows {
                    input.set(row, &[]);
                    router.scores(&input, &mut scores);
                    let mut order: Vec<i32> = (0..scores.len() as i32).collect();
                    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
                    ids.extend_from_slice(&order[..model.index().n_expert_used as usize]);
                }
            }
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).take(if known { states.len() } else { 0 }).collect();
            let ticket = model
                .ticket(Request { tensor, ids: &ids, rows: states.len(), certain: states.len(), walkers: 1 }, &rows)
                .unwrap();
            let experts = (0..).take_while(|&i| ticket.next(i).unwrap() != Step::End).count() as u64;
            wanted += if leads && layer > 0 { experts } else { 0 };
        }
        wanted
    };
    let mut random = fastrand::Rng::with_seed(1);
    let mut states = |n: usize, like: &[f32]| -> Vec<Vec<f32>> {
        (0..n).map(|_| like.iter().map(|x| x + random.f32() - 0.5).collect()).collect()
    };
    let n_embd = routers[0].n_embd();
    let zeros = vec![0.0; n_embd];
    pass(&states(12, &zeros), false, 12);
    let wanted: u64 = (0..10).map(|_| pass(&states(12, &zeros), true, 12)).sum();
    let stats = model.stats().unwrap();
    let batch = &stats.batch.recall;
    assert_eq!((batch.picks, stats.history.recall.picks), (wanted, 0));
    // eight of twelve tokens were looked at, and the more likely experts are wanted more often
    assert!(batch.at_k as f64 > 0.75 * wanted as f64 && batch.at_k < batch.at_2k, "{batch:?}");
    assert!(stats.reads.guessed > 100 && stats.reads.guessed_wasted * 5 < stats.reads.guessed, "{:?}", stats.reads);
    let off = expected_error(stats.batch.calibration.iter());
    assert!(off.is_some_and(|off| off < 0.1), "{:?}", stats.batch.calibration);
    pass(&states(12, &zeros), false, 12);
    assert_eq!(model.stats().unwrap().batch, stats.batch, "of tokens that nobody knows nothing is said");
    let guessed = |layer: usize| model.stats().unwrap().layers[layer].reads.guessed;
    for outputs in [1, 0] {
        pass(&states(12, &zeros), true, outputs);
        let before = [guessed(6), guessed(7)];
        for _ in 0..4 {
            pass(&states(12, &zeros), true, outputs);
        }
        assert!(guessed(6) > before[0] && guessed(7) == before[1], "{outputs} outputs");
        pass(&states(12, &zeros), true, 12);
    }
    let stats = model.stats().unwrap();

    let text: Vec<f32> = states(1, &zeros).concat().iter().map(|x| 4.0 * x).collect();
    for _ in 0..25 {
        pass(&states(1, &text), true, 1);
    }
    let after = model.stats().unwrap();
    let history = &after.history.recall;
    assert_eq!((&after.batch, history.picks), (&stats.batch, 24 * u64::from(model.index().n_expert_used)));
    assert!(2 * history.at_k > history.picks && history.at_k < history.at_2k, "{history:?}");
    assert!(after.history.calibration.iter().any(|bin| bin.promised >= f64::from(LEAST_PROBABILITY)));
    assert!(after.layers[0].recall.iter().all(|recall| recall.picks == 0), "no router has foreseen it");
}

#[test]
fn what_was_learned_is_there_the_next_time() {
    let file = file();
    let profile = file.path.with_file_name("profile");
    let run = || {
        let model = Model::open(&file.path).unwrap();
        let options = Options { profile: Some(profile.clone()), ..options(Mode::On, CacheSize::Min) };
        model.decide(&options).unwrap();
        assert!(!model.save_profile().unwrap(), "nothing was learned yet");
        for token in 0..20_usize {
            let row: Vec<f32> = (0..64).map(|i| ((token * 31 + i * 7) % 13) as f32 - 6.0).collect();
            for tensor in 0..model.index().tensors.len() {
                let ids = [(token * 5 % 16) as i32, (token % 2) as i32];
                let request = Request { tensor, ids: &ids, rows: 1, certain: 1, walkers: 1 };
                let ticket = model.ticket(request, &[&row[..]]).unwrap();
                let mut n = 0;
                while let Step::Expert { .. } = ticket.next(n).unwrap() {
                    n += 1;
                }
            }
        }
        assert!(model.save_profile().unwrap());
        let notice = model.notice().filter(|notice| notice.contains("profile"));
        (model.stats().unwrap().profile_loaded, notice, std::fs::read(&profile).unwrap())
    };
    let (first, notice, cold) = run();
    assert!(!first && notice.is_none(), "{notice:?}");
    let (second, notice, warm) = run();
    assert!(second && notice.is_none() && warm != cold, "{notice:?}");
    std::fs::write(&profile, &warm[..warm.len() / 2]).unwrap();
    let (third, notice, anew) = run();
    assert!(!third && notice.is_some_and(|notice| notice.contains("damaged")) && anew == cold);
}

/// The seed of the fuzz target stays a profile, or the fuzzer starts from nothing. `LES_WRITE_SEEDS=1` writes it anew.
#[test]
fn the_fuzz_seed_is_a_profile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    gguf::Gguf::moe(1, 3, 1).write(&path);
    let model = Model::open(&path).unwrap();
    let profile = dir.path().join("profile");
    model.decide(&Options { profile: Some(profile.clone()), ..options(Mode::On, CacheSize::Min) }).unwrap();
    for id in [0, 1, 0, 2, 0] {
        let row: Vec<f32> = (0..64).map(|i| (i % 7) as f32 - 3.0).collect();
        model
            .ticket(Request { tensor: 0, ids: &[id], rows: 1, certain: 1, walkers: 1 }, &[&row[..]])
            .map(drop)
            .unwrap();
    }
    model.save_profile().unwrap();
    let seed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/profile/seed-1");
    if std::env::var_os("LES_WRITE_SEEDS").is_some() {
        std::fs::create_dir_all(seed.parent().unwrap()).unwrap();
        std::fs::copy(&profile, &seed).unwrap();
    }
    assert!(les::lookahead::profile::parse(&std::fs::read(&seed).unwrap(), model.index()).is_ok());
}
