use proptest::prelude::*;

use super::super::{Lookahead, Reliability};
use super::*;
use crate::store::testing::index;

/// Two layers of five experts.
fn model() -> Index {
    index(2, 5, 2, &[512, 512, 512])
}

/// What a model learns from picks of two experts and scores of all, layer by layer in turns.
fn observe(learned: &mut Learned, steps: &[([i32; 2], [f32; 5])]) {
    for (i, (picks, scores)) in steps.iter().enumerate() {
        learned.keep.observe(i % 2, 1, picks, scores);
        let bin = Calibration::bin(scores[0].clamp(-0.9, 3.0));
        bin.into_iter().for_each(|bin| learned.calibrations[i % 2].learn(bin, 0.5, i % 3 > 0));
    }
}

fn nothing() -> Learned {
    Learned { calibrations: vec![Calibration::default(); 2], keep: Keep::new(&[5, 5]) }
}

/// Something that is learned, the same each time.
fn learned() -> Learned {
    let steps: Vec<_> =
        (0..60_u8).map(|i| ([i % 5, i % 3].map(i32::from), [1, 2, 3, 5, 7].map(|p| score(i, p)))).collect();
    let mut learned = nothing();
    observe(&mut learned, &steps);
    learned
}

fn score(i: u8, p: u8) -> f32 {
    f32::from(i.wrapping_mul(p).wrapping_mul(37)) / 100.3 - 1.0
}

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn save(path: &Path, learned: &Learned) -> Result<bool> {
    Profile::open(path, &model()).0.save(&learned.calibrations, &learned.keep)
}

/// The bytes of a profile.
fn bytes(learned: &Learned) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (profile, _) = Profile::open(Path::new("/no/such/file"), &model());
    profile.write(&mut bytes, &learned.calibrations, &learned.keep).unwrap();
    bytes
}

/// Where the numbers of what was learned are in the text of a profile.
fn numbers(text: &str) -> Vec<std::ops::Range<usize>> {
    let mut places = Vec::new();
    let mut at = text.find("\"calibrations\"").unwrap();
    while let Some(begin) = text[at..].find(|c: char| c.is_ascii_digit() || c == '-').map(|i| at + i) {
        at = begin + text[begin..].find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c)).unwrap();
        places.push(begin..at);
    }
    places
}

/// All that it answers, to the last bit.
fn answers(learned: &Learned) -> Vec<Vec<u32>> {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    let values = (0..2).map(|at| bits(learned.keep.values(at)));
    values.chain((1..3).map(|distance| bits(&learned.probabilities(distance)))).collect()
}

/// What became of the predictions of this run.
fn run(learned: &Learned) -> Vec<Reliability> {
    learned.calibrations.iter().flat_map(Calibration::reliability).collect()
}

fn damaged(bytes: &[u8]) -> bool {
    matches!(parse(bytes, &model()), Err(Unfit::Damaged(why)) if !why.is_empty())
}

#[test]
fn what_was_learned_comes_back_and_goes_on() {
    let (dir, mut before) = (Dir::new(), learned());
    let path = dir.file("profile");
    assert!(save(&path, &before).unwrap());
    let (profile, after) = Profile::open(&path, &model());
    let mut after = after.unwrap();
    assert!(profile.knew() && profile.notice().is_none());
    assert_eq!(answers(&after), answers(&before));
    assert_ne!(answers(&after), answers(&nothing()));
    assert_eq!(bytes(&after), bytes(&before));

    let more = [([0, 4], [0.5, 1.0, -1.0, 0.25, 3.0]), ([1, 2], [3.0, 0.0, 0.125, -4.0, 1.0])];
    let mut anew = nothing();
    assert!(!run(&before).is_empty() && run(&after).is_empty(), "each run counts its own predictions");
    for learned in [&mut before, &mut after, &mut anew] {
        observe(learned, &more);
    }
    assert_eq!(run(&after), run(&anew));
    for (a, b) in (0..2).flat_map(|at| before.keep.values(at).iter().zip(after.keep.values(at))) {
        // the sums over all layers are added up anew
        assert!((a - b).abs() < 1e-5, "{a} is not {b}");
    }
}

#[test]
fn what_is_cut_off_is_damaged_and_written_anew() {
    let whole = bytes(&learned());
    assert!(parse(&whole, &model()).is_ok());
    assert!((0..whole.len()).all(|n| damaged(&whole[..n])));
    let dir = Dir::new();
    let path = dir.file("profile");
    for n in [0, 1, BEGINNING.len(), whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..n]).unwrap();
        let (profile, learned) = Profile::open(&path, &model());
        let notice = profile.notice().unwrap();
        assert!(learned.is_none() && !profile.knew());
        assert!(notice.contains(&*path.to_string_lossy()) && notice.contains("written anew"), "{notice}");
        assert_eq!(fs::read(&path).unwrap(), &whole[..n], "nothing is lost before the end");
        let learned = super::tests::learned();
        assert!(profile.save(&learned.calibrations, &learned.keep).unwrap());
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
}

/// Every number of what was learned, replaced.
#[test]
fn numbers_that_cannot_be_are_refused() {
    let text = String::from_utf8(bytes(&learned())).unwrap();
    let from = text.find("\"calibrations\"").unwrap();
    let places = numbers(&text);
    assert_eq!(places.len(), 2 * 2 * 64 + 2 * (1 + 1 + 2 * 5 * 8 + 36 + 8 + 5));
    for place in places {
        for bad in ["null", "NaN", "Infinity", "-1e300", "1e300", "1e39", "1e13", "1e999", "\"1\"", "[]"] {
            // a value may be any number, but no sum, average or count
            let value = text[..place.start].rfind("\"values\"") > text[..place.start].rfind("\"sums\"");
            let mut changed = text.clone();
            changed.replace_range(place.clone(), bad);
            assert!(damaged(changed.as_bytes()) || (value && bad == "1e13"), "{bad} at {place:?}");
        }
    }
    // one too few, one too many
    for (what, with) in
        [("\"values\":[", "\"values\":[1,"), ("\"sums\":[", "\"sums\":[1,"), ("\"keep\":[", "\"keep\":[],[")]
    {
        assert!(damaged(text.replacen(what, with, 1).as_bytes()), "{with}");
    }
    assert!(damaged(text.replacen("\"n_expert\":5,\"seen\"", "\"n_expert\":6,\"seen\"", 1).as_bytes()));
    let calibration = &text[from + "\"calibrations\":[".len()..text.find(",{\"picked\"").unwrap()];
    let many = format!("\"calibrations\":[{}", format!("{calibration},").repeat(super::super::MAX_DEPTH));
    assert!(damaged(text.replacen("\"calibrations\":[", &many, 1).as_bytes()));
}

#[test]
fn an_older_profile_of_this_model_is_written_anew() {
    let whole = bytes(&learned());
    let older = |text: &str| String::from_utf8(whole.clone()).unwrap().replacen(text, "\"les_profile\":1", 1);
    assert!(damaged(older("\"les_profile\":2").as_bytes()));
    let others = older("\"les_profile\":2").replacen("\"arch\":\"test\"", "\"arch\":\"best\"", 1);
    assert!(matches!(parse(others.as_bytes(), &model()), Err(Unfit::Foreign(_))));
}

#[test]
fn what_is_no_profile_of_this_model_stays_as_it_is() {
    let text = String::from_utf8(bytes(&learned())).unwrap();
    let change = |what: &str, with: &str| text.replacen(what, with, 1);
    for (contents, named) in [
        ("GGUF and more".into(), "not a profile"),
        ("{}".into(), "not a profile"),
        (change("\"les_profile\":2", "\"les_profile\":3"), "version 3"),
        (change("\"arch\":\"test\"", "\"arch\":\"best\""), "another model (\"test.gguf\")"),
        (change("\"part_bytes\":[512", "\"part_bytes\":[256"), "another model"),
        (change("\"file_bytes\":[", "\"file_bytes\":[1"), "another model"),
        (change("\"n_used\":2", "\"n_used\":3"), "another model"),
    ] {
        assert_ne!(contents, text);
        let dir = Dir::new();
        let path = dir.file("profile");
        fs::write(&path, &contents).unwrap();
        let (profile, learned) = Profile::open(&path, &model());
        let notice = profile.notice().unwrap();
        assert!(learned.is_none() && !profile.knew());
        assert!(notice.contains(named) && notice.contains(&*path.to_string_lossy()), "{notice}");
        let learned = super::tests::learned();
        assert!(!profile.save(&learned.calibrations, &learned.keep).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), contents);
    }
    // nor what another has put there meanwhile
    let (dir, learned) = (Dir::new(), learned());
    let (profile, _) = Profile::open(&dir.file("profile"), &model());
    let others = change("\"arch\":\"test\"", "\"arch\":\"best\"");
    fs::write(dir.file("profile"), &others).unwrap();
    let error = profile.save(&learned.calibrations, &learned.keep).unwrap_err();
    assert!(error.to_string().contains("another model"), "{error}");
    assert_eq!(fs::read_to_string(dir.file("profile")).unwrap(), others);
    // the same model by another name
    assert!(parse(change("\"model\":\"test.gguf\"", "\"model\":\"moved.gguf\"").as_bytes(), &model()).is_ok());
}

#[test]
fn what_is_no_file_stays_as_it_is() {
    let dir = Dir::new();
    for path in [dir.0.path(), Path::new("/dev/null")].into_iter().filter(|path| path.exists()) {
        assert!(!save(path, &learned()).unwrap());
        assert!(Profile::open(path, &model()).0.notice().unwrap().contains("not a regular file"));
        assert!(path.exists() && !path.is_file());
    }
    // sparse: it takes no room
    let large = dir.file("large");
    fs::File::create(&large).unwrap().set_len(MOST_BYTES + 1).unwrap();
    assert!(Profile::open(&large, &model()).0.notice().unwrap().contains("larger than any profile"));
    assert!(!save(&large, &learned()).unwrap());
}

#[test]
fn what_cannot_be_written_is_an_error_that_names_the_file() {
    let (dir, learned) = (Dir::new(), learned());
    let refused = |path: &Path| {
        let (profile, _) = Profile::open(path, &model());
        let error = profile.save(&learned.calibrations, &learned.keep).unwrap_err().to_string();
        assert!(error.contains(&*path.to_string_lossy()) && error.contains("cannot write the profile"), "{error}");
        profile
    };
    let absent = dir.file("absent");
    let profile = refused(&absent.join("profile"));
    assert!(profile.notice().unwrap().contains("directory does not exist"));
    fs::create_dir(&absent).unwrap();
    assert!(profile.save(&learned.calibrations, &learned.keep).unwrap());

    // even root writes nothing there
    if Path::new("/proc/self").exists() {
        refused(Path::new("/proc/les-profile"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;

        let locked = dir.file("locked");
        fs::create_dir(&locked).unwrap();
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
        if fs::write(locked.join("probe"), "").is_err() {
            refused(&locked.join("profile"));
        }
        fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let left = |dir: &Path| fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(left(&absent), ["profile"], "something is left behind");
}

#[cfg(unix)]
#[test]
fn a_link_stays_one() {
    let dir = Dir::new();
    fs::write(dir.file("file"), "").unwrap();
    std::os::unix::fs::symlink(dir.file("file"), dir.file("link")).unwrap();
    assert!(save(&dir.file("link"), &learned()).unwrap());
    assert!(dir.file("link").is_symlink());
    assert!(Profile::open(&dir.file("file"), &model()).0.knew());
}

#[test]
fn a_run_that_uses_less_keeps_the_rest() {
    let (dir, before) = (Dir::new(), learned());
    let path = dir.file("profile");
    save(&path, &before).unwrap();
    // looks one layer ahead where two were, and evicts nothing
    let mut lookahead = Lookahead::new(&model(), Some(1), false, None, Some(&path)).unwrap();
    assert!(lookahead.knew());
    assert_eq!(lookahead.reliability(), [[]], "of the distance that it looks");
    fs::remove_file(&path).unwrap();
    assert!(lookahead.save_profile().unwrap());
    assert_eq!(fs::read(&path).unwrap(), bytes(&before));
    // and one that looks farther begins with what is known
    let lookahead = Lookahead::new(&model(), Some(3), true, None, Some(&path)).unwrap();
    assert_eq!((lookahead.calibrations.len(), lookahead.values(3)), (3, Some(before.keep.values(1))));
    assert!(!Lookahead::new(&model(), Some(1), true, None, None).unwrap().save_profile().unwrap());
}

proptest! {
    #[test]
    fn whatever_was_learned_comes_back(
        steps in proptest::collection::vec(([-1..6i32, -1..6i32], proptest::array::uniform5(any::<f32>())), 0..50),
    ) {
        let mut before = nothing();
        observe(&mut before, &steps);
        let bytes = bytes(&before);
        let after = parse(&bytes, &model());
        prop_assert!(after.is_ok(), "{:?}", after);
        let after = after.unwrap();
        prop_assert_eq!(answers(&after), answers(&before));
        prop_assert_eq!(super::tests::bytes(&after), bytes);
    }

    /// Numbers that could be, where they were not: useless perhaps, but never harmful.
    #[test]
    fn whatever_is_accepted_does_no_harm(
        at in any::<prop::sample::Index>(),
        many in 1..100_usize,
        number in prop_oneof![Just(0.0), Just(1e12), Just(-1e12), Just(1e-40), -2.0..2.0_f32, any::<f32>()],
        steps in proptest::collection::vec(([-1..6i32, -1..6i32], proptest::array::uniform5(any::<f32>())), 0..20),
    ) {
        let mut text = String::from_utf8(bytes(&learned())).unwrap();
        let places = numbers(&text);
        let at = at.index(places.len());
        for place in places[at..].iter().take(many).rev() {
            text.replace_range(place.clone(), &format!("{number:e}"));
        }
        let Ok(mut learned) = parse(text.as_bytes(), &model()) else { return Ok(()) };
        for step in [None].into_iter().chain(steps.iter().map(Some)) {
            observe(&mut learned, step.map(std::slice::from_ref).unwrap_or_default());
            for at in 0..2 {
                prop_assert!(learned.keep.values(at).iter().all(|value| value.is_finite()));
                prop_assert!(learned.probabilities(at + 1).iter().all(|p| (0.0..=1.0).contains(p)));
            }
        }
    }
}
