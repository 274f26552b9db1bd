//! Speculative decoding: how many tokens to draft and to verify, and which of them stand.

use std::ffi::c_char;
use std::mem::offset_of;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::model::Model;
use crate::options::parse_spec;
use crate::sched::PassReads;
use crate::spec::{Candidate, Step, Summary, Widths, draw, judge};

use super::guard::{Failure, Versioned, guard, guard_telling, ok, put, put_sized, size_up_to, sized, string_or_empty};
use super::handle::Handles;
use super::model::{LesModel, model};
use super::status::{LES_ERR_HANDLE, LES_ERR_INVALID, LES_ERR_NULL, LES_OK, LesStatus};

/// The speculation of one sequence of tokens. Never dereferenced.
pub struct LesSpec {
    _opaque: (),
}

struct Open {
    widths: Widths,
    rng: fastrand::Rng,
    model: Option<Arc<Model>>,
    /// What the model had read when the step began, or had drafted.
    reads: PassReads,
}

static SPECS: Handles<Mutex<Open>> = Handles::new();

/// A drafter that is as long is none.
const MOST_DRAFTED: u32 = 256;

/// How to speculate.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesSpecParams {
    /// `sizeof(struct les_spec_params)`.
    pub struct_size: usize,
    /// `off`, `adaptive` or the number of tokens to verify at most; NULL or empty: `adaptive`.
    pub width: *const c_char,
    /// The most tokens that the drafter drafts at once, up to 256.
    pub n_max: u32,
    /// What the draws begin with: the same calls after the same seed give the same tokens.
    pub seed: u64,
    /// The model that verifies; NULL: none is told. `les_spec_verify` and `les_spec_done` call `les_model_drafted` and
    /// `les_model_judged` for it, and its statistics tell of the sequence when that has ended.
    pub model: *const LesModel,
}

// SAFETY: repr(C), the size first, and every field takes any bytes (pointers are checked for NULL, and the caller
// vouches for what they point to).
unsafe impl Versioned for LesSpecParams {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, seed), size_of::<u64>());
}

const NO_PARAMS: LesSpecParams =
    LesSpecParams { struct_size: 0, width: std::ptr::null(), n_max: 0, seed: 0, model: std::ptr::null() };

/// A token, and how likely it is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesCandidate {
    /// The token's id.
    pub token: i32,
    /// Its probability, up to a factor that is the same for all candidates.
    pub p: f32,
}

/// What became of a step.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesSpecStep {
    /// `sizeof(struct les_spec_step)`.
    pub struct_size: usize,
    /// Tokens that were drafted.
    pub drafted: u32,
    /// Of these, verified: as many as `les_spec_verify` said, or fewer.
    pub verified: u32,
    /// Of these, standing.
    pub stood: u32,
    /// Nanoseconds that drafting took.
    pub draft_ns: u64,
    /// Nanoseconds that all the rest of the step took.
    pub step_ns: u64,
    /// Tokens that it yielded beside those that stood and the one after them: where the target can only go back as a whole, what
    /// stands is computed anew, and tells one token more.
    pub more: u32,
}

// SAFETY: repr(C), the size first, and every field takes any bytes.
unsafe impl Versioned for LesSpecStep {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, step_ns), size_of::<u64>());
}

const NO_STEP: LesSpecStep =
    LesSpecStep { struct_size: 0, drafted: 0, verified: 0, stood: 0, draft_ns: 0, step_ns: 0, more: 0 };

/// The counters of the steps that verified one number of tokens, and of the tokens that were drafted at that place.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct LesSpecWidth {
    /// `sizeof(struct les_spec_width)`.
    pub struct_size: usize,
    /// Steps.
    pub steps: u64,
    /// Tokens that they yielded.
    pub tokens: u64,
    /// Nanoseconds that they took, without drafting.
    pub ns: u64,
    /// Of the steps, those that were made to find out whether conditions have changed.
    pub tries: u64,
    /// Tokens at this place of a draft, from 1, that were verified with all those before them standing.
    pub verified: u64,
    /// Of these, standing.
    pub stood: u64,
    /// How many of these were expected to stand.
    pub promised: f64,
}

// SAFETY: repr(C), the size first, and every field takes any bytes.
unsafe impl Versioned for LesSpecWidth {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, promised), size_of::<f64>());
}

/// Begins the speculation of a sequence of tokens. `err` is told what is wrong. Any thread.
///
/// # Safety
/// `params` is NULL or begins with its size, and its `width` is NULL or a string; `out` is NULL or writable; `err` is
/// NULL or writable for `err_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_open(
    params: *const LesSpecParams,
    out: *mut *mut LesSpec,
    err: *mut c_char,
    err_len: usize,
) -> LesStatus {
    let open = || -> Result<LesStatus, Failure> {
        // SAFETY: the caller vouches for `params`.
        let params = unsafe { sized(params, NO_PARAMS) }?;
        if out.is_null() {
            return Err(LES_ERR_NULL.into());
        }
        if params.n_max > MOST_DRAFTED {
            return Err(LES_ERR_INVALID.into());
        }
        // SAFETY: the caller vouches for `width`.
        let mode = parse_spec(unsafe { string_or_empty(params.width) }?)?;
        let widths = Widths::new(mode, params.n_max as usize);
        let rng = fastrand::Rng::with_seed(params.seed);
        let model = if params.model.is_null() { None } else { Some(model(params.model)?) };
        let handle = std::ptr::without_provenance_mut(SPECS.open(Mutex::new(Open {
            widths,
            rng,
            model,
            reads: PassReads::default(),
        })));
        // SAFETY: the caller vouches for `out`.
        unsafe { put(out, handle) }?;
        Ok(LES_OK)
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, open) }
}

/// How many tokens to draft for the next step. Any thread.
///
/// # Safety
/// `n` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_draft(spec: *mut LesSpec, n: *mut u32) -> LesStatus {
    with(spec, |open| {
        if n.is_null() {
            return Err(LES_ERR_NULL);
        }
        open.reads = open.model.as_ref().map_or_else(PassReads::default, |model| model.pass_reads());
        // SAFETY: the caller vouches for `n`.
        ok(unsafe { put(n, open.widths.draft() as u32) })
    })
}

/// How many of the `n` tokens that were drafted to verify, the first ones. `confidences` has for each how likely the
/// drafter thinks that it stands when those before it do: not a number where it does not say, NULL when it never does. Any thread.
///
/// # Safety
/// `confidences` is NULL or readable for `n` floats; `width` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_verify(
    spec: *mut LesSpec,
    confidences: *const f32,
    n: u32,
    width: *mut u32,
) -> LesStatus {
    with(spec, |open| {
        if width.is_null() {
            return Err(LES_ERR_NULL);
        }
        let n = (n as usize).min(open.widths.n_max());
        let confidences: Vec<Option<f32>> = if confidences.is_null() {
            vec![None; n]
        } else {
            // SAFETY: not NULL, and the caller vouches for the rest.
            let told = unsafe { std::slice::from_raw_parts(confidences, n) };
            told.iter().map(|c| Some(*c).filter(|c| !c.is_nan())).collect()
        };
        let verified = open.widths.verify(&confidences);
        if let Some(model) = &open.model {
            // with the token before them
            model.drafted(1 + verified);
            // a drafter may use the same model
            open.reads = model.pass_reads();
        }
        // SAFETY: the caller vouches for `width`.
        ok(unsafe { put(width, verified as u32) })
    })
}

/// Whether the token `drafted` stands: `*token` is that one if it does, else the one in its place, after which nothing of
/// the draft counts. `target` is the target's distribution after the user's samplers, `draft` that which the token was drawn from;
/// `n_draft` 0 when the drafter always proposes its best. Tokens that are not there have probability 0. `LES_ERR_INVALID`
/// for what is no distribution. Any thread.
///
/// # Safety
/// `target` and `draft` are readable for so many candidates, or NULL with none; `token` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_judge(
    spec: *mut LesSpec,
    drafted: i32,
    target: *const LesCandidate,
    n_target: usize,
    draft: *const LesCandidate,
    n_draft: usize,
    token: *mut i32,
) -> LesStatus {
    with(spec, |open| {
        if token.is_null() {
            return Err(LES_ERR_NULL);
        }
        // SAFETY: the caller vouches for `target`.
        let target = unsafe { candidates(target, n_target) }?;
        // SAFETY: the caller vouches for `draft`.
        let draft = unsafe { candidates(draft, n_draft) }?;
        let judged = judge(drafted, &target, &draft, || open.rng.f64()).map_err(|_| LES_ERR_INVALID)?;
        // SAFETY: the caller vouches for `token`.
        ok(unsafe { put(token, judged) })
    })
}

/// Draws a token from the target's distribution: the one after a draft that stands as a whole. As `les_spec_judge`.
///
/// # Safety
/// As `les_spec_judge`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_draw(
    spec: *mut LesSpec,
    target: *const LesCandidate,
    n_target: usize,
    token: *mut i32,
) -> LesStatus {
    with(spec, |open| {
        if token.is_null() {
            return Err(LES_ERR_NULL);
        }
        // SAFETY: the caller vouches for `target`.
        let target = unsafe { candidates(target, n_target) }?;
        let drawn = draw(&target, || open.rng.f64()).map_err(|_| LES_ERR_INVALID)?;
        // SAFETY: the caller vouches for `token`.
        ok(unsafe { put(token, drawn) })
    })
}

/// The step is over for which `les_spec_draft` and, when tokens were drafted, `les_spec_verify` were called. Any thread.
///
/// # Safety
/// `step` is NULL or begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_done(spec: *mut LesSpec, step: *const LesSpecStep) -> LesStatus {
    with(spec, |open| {
        // SAFETY: the caller vouches for `step`.
        let step = unsafe { sized(step, NO_STEP) }?;
        let mut reads = None;
        if let Some(model) = &open.model {
            reads = model.pass_reads().since(&open.reads, 1 + step.verified as usize);
            if step.verified > 0 {
                model.judged(1 + step.stood.min(step.verified) as usize);
            }
        }
        let step = Step {
            drafted: step.drafted as usize,
            verified: step.verified as usize,
            stood: step.stood as usize,
            draft_ns: step.draft_ns,
            step_ns: step.step_ns,
            more: step.more as usize,
        };
        open.widths.done(step, reads.as_deref());
        Ok(LES_OK)
    })
}

/// The counters of the steps that verified `width` tokens. `LES_ERR_INVALID` for more than the drafter drafts. Any thread.
///
/// # Safety
/// `out` is NULL or begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_spec_stats(spec: *mut LesSpec, width: u32, out: *mut LesSpecWidth) -> LesStatus {
    with(spec, |open| {
        let mut summary = Summary::default();
        summary.add(&open.widths);
        let counters = counters(&summary, width)?;
        // SAFETY: the caller vouches for `out`.
        ok(unsafe { put_sized(out, counters) })
    })
}

/// As `les_spec_stats`, of all sequences of a model that have ended. Any thread.
///
/// # Safety
/// As `les_spec_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_spec_stats(
    handle: *const LesModel,
    width: u32,
    out: *mut LesSpecWidth,
) -> LesStatus {
    guard(|| {
        let counters = counters(&model(handle)?.speculation(), width)?;
        // SAFETY: the caller vouches for `out`.
        ok(unsafe { put_sized(out, counters) })
    })
}

fn counters(summary: &Summary, width: u32) -> Result<LesSpecWidth, LesStatus> {
    let (of, place) = summary.of(width as usize).ok_or(LES_ERR_INVALID)?;
    Ok(LesSpecWidth {
        struct_size: 0,
        steps: of.steps,
        tokens: of.tokens,
        ns: of.ns,
        tries: of.tries,
        verified: place.verified,
        stood: place.stood,
        promised: place.promised,
    })
}

/// Ends the speculation of a sequence. NULL is fine. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_spec_free(spec: *mut LesSpec) -> LesStatus {
    guard(|| {
        if spec.is_null() {
            return Ok(LES_OK);
        }
        let open = SPECS.close(spec.addr()).ok_or(LES_ERR_HANDLE)?;
        let open = open.lock();
        if let Some(model) = &open.model {
            model.speculated(&open.widths);
        }
        Ok(LES_OK)
    })
}

fn with(spec: *mut LesSpec, body: impl FnOnce(&mut Open) -> Result<LesStatus, LesStatus>) -> LesStatus {
    guard(|| {
        if spec.is_null() {
            return Err(LES_ERR_NULL);
        }
        let open = SPECS.get(spec.addr()).ok_or(LES_ERR_HANDLE)?;
        body(&mut open.lock())
    })
}

/// # Safety
/// `at` is NULL, or readable for `n` candidates.
unsafe fn candidates(at: *const LesCandidate, n: usize) -> Result<Vec<Candidate>, LesStatus> {
    match (at.is_null(), n) {
        (_, 0) => Ok(Vec::new()),
        (true, _) => Err(LES_ERR_NULL),
        _ => {
            // SAFETY: not NULL, and the caller vouches for the rest.
            let from = unsafe { std::slice::from_raw_parts(at, n) };
            Ok(from.iter().map(|c| Candidate { token: c.token, p: c.p }).collect())
        }
    }
}
