//! Layers: the experts of one layer's operations as a whole.

use std::ffi::c_void;
use std::sync::Arc;

use crate::error::Error;
use crate::model::Model;
use crate::sched::{Due, Layer, LayerRequest};

use super::guard::{guard, ok, put, sized};
use super::handle::Handles;
use super::model::{LesModel, model};
use super::status::{LES_END, LES_ERR_HANDLE, LES_ERR_INVALID, LES_ERR_NOT_FOUND, LES_ERR_NULL, LES_OK, LesStatus};
use super::ticket::{Asked, LesOp, NO_OP, asked, remember};

/// The experts of one layer, to be walked by every thread that computes it. Never dereferenced.
pub struct LesLayer {
    _opaque: (),
}

struct Open {
    model: Arc<Model>,
    layer: Layer,
}

static LAYERS: Handles<Open> = Handles::new();

/// Opens a layer, in place of a ticket for each of its operations: `op` is the first of them in the model's order, `later`
/// are the `n_later` other tensors, in that order, whose experts are needed for the same picks.
/// An expert is handed out when all its matrices are there, so that those that are can be computed, with all operations,
/// while the others are read. `LES_ERR_NOT_FOUND` when the cache has no room for all of them at once: open tickets then.
/// Reads are started by `les_layer_attend`, or when a walker waits. The handle is closed when the last walker leaves. Any thread.
///
/// # Safety
/// `op` and `out` as for `les_ticket_open`; `later` is NULL or readable for `n_later` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_layer_open(
    handle: *const LesModel,
    op: *const LesOp,
    later: *const u32,
    n_later: u32,
    out: *mut *mut LesLayer,
) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `op`.
        let op = unsafe { sized(op, NO_OP) }?;
        if later.is_null() || out.is_null() {
            return Err(LES_ERR_NULL);
        }
        if n_later as usize >= model.index().tensors.len() {
            return Err(remember(&model, &Error::Invalid("a layer has more tensors than the model".into())));
        }
        // SAFETY: passed on.
        let Asked { ids, rows } = unsafe { asked(&model, &op) }?;
        // SAFETY: not NULL, and the caller vouches for the rest.
        let later = unsafe { std::slice::from_raw_parts(later, n_later as usize) };
        let tensors: Vec<usize> = std::iter::once(&op.tensor).chain(later).map(|&t| t as usize).collect();
        let n_rows = op.n_tokens as usize;
        let certain = model.certain(n_rows);
        let request = LayerRequest { tensors: &tensors, ids: &ids, rows: n_rows, certain, walkers: op.n_walkers };
        match model.layer(request, &rows) {
            Ok(Some(layer)) => {
                let handle = std::ptr::without_provenance_mut(LAYERS.open(Open { model, layer }));
                // SAFETY: the caller vouches for `out`.
                ok(unsafe { put(out, handle) })
            }
            Ok(None) => Err(LES_ERR_NOT_FOUND),
            Err(e) => Err(remember(&model, &e)),
        }
    })
}

/// To be called by one walker twice for each wave: before it asks for wave `wave` with `computing` 0, and with 1 when the
/// others have begun to compute it. Starts the reads, learns from the picks and reads ahead, each when the walkers have
/// something to compute meanwhile, or would wait anyway. `op` is what the layer was opened with: its ids and input must be
/// what they were. A layer that is not attended does without guesses. Waves 0 and 1 suffice.
///
/// # Safety
/// `op` as for `les_layer_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_layer_attend(
    layer: *mut LesLayer,
    wave: u32,
    computing: i32,
    op: *const LesOp,
) -> LesStatus {
    guard(|| {
        let open = open(layer)?;
        // SAFETY: the caller vouches for `op`.
        let op = unsafe { sized(op, NO_OP) }?;
        let due = open.layer.due(wave, computing != 0);
        if due != Due::default() {
            // SAFETY: passed on.
            let Asked { ids, rows } = unsafe { asked(&open.model, &op) }?;
            let n_tokens = op.n_tokens as usize;
            open.model.attend(&open.layer, due, &ids, n_tokens, &rows);
        }
        Ok(LES_OK)
    })
}

/// The next experts whose matrices are all there, at least one: the positions from `*first` up to, but not with, `*last`.
/// `wave` is 0 first, then 1, and so on; every walker gets the same answers. By asking for a wave a walker gives up the
/// experts of the one before. Waits for the device if need be. After the last one the answer is `LES_END`, and this walker
/// has left; so it has after an error, but not after `LES_ERR_NULL` or `LES_ERR_INVALID`. Each walker is a thread, as for `les_ticket_next`.
///
/// # Safety
/// `first` and `last` are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_layer_wave(layer: *mut LesLayer, wave: u32, first: *mut u32, last: *mut u32) -> LesStatus {
    guard(|| {
        let open = open(layer)?;
        if first.is_null() || last.is_null() {
            return Err(LES_ERR_NULL);
        }
        match open.layer.wave(wave) {
            Ok(Some(wave)) => {
                // SAFETY: the caller vouches for `first`.
                unsafe { put(first, wave.start) }?;
                // SAFETY: the caller vouches for `last`.
                ok(unsafe { put(last, wave.end) })
            }
            Ok(None) => {
                close_if_left(layer, &open);
                Ok(LES_END)
            }
            Err(e) => {
                close_if_left(layer, &open);
                Err(remember(&open.model, &e))
            }
        }
    })
}

/// The expert at `position` of the wave that this walker was given last, and its matrix of `tensor`. Both are valid until
/// the walker asks for the next wave. `LES_ERR_INVALID` for a position that was not handed out, or another layer's tensor.
///
/// # Safety
/// `expert` and `data` are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_layer_expert(
    layer: *mut LesLayer,
    position: u32,
    tensor: u32,
    expert: *mut u32,
    data: *mut *const c_void,
) -> LesStatus {
    guard(|| {
        let open = open(layer)?;
        if expert.is_null() || data.is_null() {
            return Err(LES_ERR_NULL);
        }
        let (e, address) = open.layer.expert(position, tensor as usize).ok_or(LES_ERR_INVALID)?;
        // SAFETY: the caller vouches for `expert`.
        unsafe { put(expert, e) }?;
        // SAFETY: the caller vouches for `data`.
        ok(unsafe { put(data, std::ptr::with_exposed_provenance(address)) })
    })
}

/// Leaves a layer before its end: like asking for waves on to `LES_END`. The walker's own thread; `LES_ERR_INVALID` when it
/// has left, or is one more than the op's `n_walkers`.
#[unsafe(no_mangle)]
pub extern "C" fn les_layer_leave(layer: *mut LesLayer) -> LesStatus {
    guard(|| {
        let open = open(layer)?;
        open.layer.leave().map_err(|e| remember(&open.model, &e))?;
        close_if_left(layer, &open);
        Ok(LES_OK)
    })
}

/// Gives up a layer that not all walkers will leave by themselves, as `les_ticket_free` does a ticket. NULL is fine. Any
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_layer_free(layer: *mut LesLayer) -> LesStatus {
    guard(|| {
        if layer.is_null() {
            return Ok(LES_OK);
        }
        LAYERS.close(layer.addr()).map(|_| LES_OK).ok_or(LES_ERR_HANDLE)
    })
}

fn close_if_left(layer: *mut LesLayer, open: &Open) {
    if open.layer.is_closed() {
        LAYERS.close(layer.addr());
    }
}

fn open(layer: *mut LesLayer) -> Result<Arc<Open>, LesStatus> {
    if layer.is_null() {
        return Err(LES_ERR_NULL);
    }
    LAYERS.get(layer.addr()).ok_or(LES_ERR_HANDLE)
}
