//! Tickets: the experts of one operation.

use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::Arc;

use crate::error::Error;
use crate::model::Model;
use crate::sched::{Request, Step, Ticket};

use super::guard::{Versioned, guard, ok, put, size_up_to, sized};
use super::handle::Handles;
use super::model::{LesModel, model};
use super::status::{LES_END, LES_ERR_HANDLE, LES_ERR_NULL, LES_OK, LesStatus};

/// The experts of one operation, to be walked by every thread that computes it. Never dereferenced.
pub struct LesTicket {
    _opaque: (),
}

struct Open {
    model: Arc<Model>,
    ticket: Ticket,
}

static TICKETS: Handles<Open> = Handles::new();

/// One operation: what the router picked, for one tensor of experts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesOp {
    /// `sizeof(struct les_op)`.
    pub struct_size: usize,
    /// The router's picks: expert `i` of token `t` is the `int32_t` at `ids + t * ids_stride + i * 4`.
    pub ids: *const i32,
    /// Bytes from one token's picks to the next's.
    pub ids_stride: usize,
    /// Picks per token.
    pub n_used: u32,
    /// Tokens.
    pub n_tokens: u32,
    /// What the experts are applied to: row `r` begins at `input + r * input_stride` and has `n_input` floats. Checked
    /// to be finite once per layer, with the tensor of its up projections. NULL: not checked.
    pub input: *const f32,
    /// Bytes from one row to the next.
    pub input_stride: usize,
    /// Floats per row.
    pub n_input: u32,
    /// Rows.
    pub n_rows: u32,
    /// The tensor's number, from `les_model_find`.
    pub tensor: u32,
    /// How many threads will walk the ticket.
    pub n_walkers: u32,
}

// SAFETY: repr(C), the size first, and every field takes any bytes (pointers are checked for NULL, and the caller
// vouches for what they point to).
unsafe impl Versioned for LesOp {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, n_walkers), size_of::<u32>());
}

pub(super) const NO_OP: LesOp = LesOp {
    struct_size: 0,
    ids: std::ptr::null(),
    ids_stride: 0,
    n_used: 0,
    n_tokens: 0,
    input: std::ptr::null(),
    input_stride: 0,
    n_input: 0,
    n_rows: 0,
    tensor: 0,
    n_walkers: 0,
};

/// Opens a ticket: starts the reads that the operation needs, and those that its layer will need next. The ids and the
/// input are not used after the call. The handle is closed when the last walker leaves. Any thread; one ticket per
/// operation.
///
/// # Safety
/// `op` is NULL or begins with its size; `op->ids` and `op->input` are NULL or readable as described there; `out` is
/// NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_ticket_open(
    handle: *const LesModel,
    op: *const LesOp,
    out: *mut *mut LesTicket,
) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `op`.
        let op = unsafe { sized(op, NO_OP) }?;
        if out.is_null() {
            return Err(LES_ERR_NULL);
        }
        // SAFETY: passed on.
        let Asked { ids, rows } = unsafe { asked(&model, &op) }?;
        let n_rows = op.n_tokens as usize;
        let request = Request {
            tensor: op.tensor as usize,
            ids: &ids,
            rows: n_rows,
            certain: model.certain(n_rows),
            walkers: op.n_walkers,
        };
        match model.ticket(request, &rows) {
            Ok(ticket) => {
                let handle = std::ptr::without_provenance_mut(TICKETS.open(Open { model, ticket }));
                // SAFETY: the caller vouches for `out`.
                ok(unsafe { put(out, handle) })
            }
            Err(e) => Err(remember(&model, &e)),
        }
    })
}

/// What an operation points to.
pub(super) struct Asked<'a> {
    /// The picks, token by token.
    pub(super) ids: Vec<i32>,
    /// The input.
    pub(super) rows: Vec<&'a [f32]>,
}

/// Reads what `op` points to.
///
/// # Safety
/// As [`les_ticket_open`] says of `op`'s pointers, for as long as the answer is used.
pub(super) unsafe fn asked<'a>(model: &Model, op: &LesOp) -> Result<Asked<'a>, LesStatus> {
    if op.ids.is_null() {
        return Err(LES_ERR_NULL);
    }
    check(model, op).map_err(|why| remember(model, &Error::Invalid(why.into())))?;
    let mut ids = Vec::with_capacity(op.n_used as usize * op.n_tokens as usize);
    for t in 0..op.n_tokens as usize {
        // SAFETY: the caller vouches for n_tokens rows at this stride.
        let row = unsafe { op.ids.byte_add(t * op.ids_stride) };
        // SAFETY: ... of n_used ids each.
        ids.extend_from_slice(unsafe { std::slice::from_raw_parts(row, op.n_used as usize) });
    }
    let n_rows = if op.input.is_null() { 0 } else { op.n_rows as usize };
    let row = |r: usize| {
        // SAFETY: the caller vouches for n_rows rows at this stride.
        let row = unsafe { op.input.byte_add(r * op.input_stride) };
        // SAFETY: ... of n_input floats each.
        unsafe { std::slice::from_raw_parts(row, op.n_input as usize) }
    };
    Ok(Asked { ids, rows: (0..n_rows).map(row).collect() })
}

/// What can be seen to be wrong before the caller's memory is read.
fn check(model: &Model, op: &LesOp) -> Result<(), &'static str> {
    let whole = |pointer: usize, stride: usize, n: u32, rows: u32| {
        let apart = stride.is_multiple_of(4) && stride.div_ceil(4) >= n as usize;
        pointer.is_multiple_of(4) && (rows < 2 || apart)
    };
    let Some(tensor) = model.index().tensors.get(op.tensor as usize) else {
        return Err("there is no such tensor of experts");
    };
    if op.n_walkers == 0 {
        return Err("a ticket needs at least one walker");
    }
    if op.n_used > tensor.n_expert() {
        return Err("an operation asks for more experts per token than there are");
    }
    if !whole(op.ids.addr(), op.ids_stride, op.n_used, op.n_tokens) {
        return Err("the ids of an operation overlap or are not aligned");
    }
    if !op.input.is_null() && !whole(op.input.addr(), op.input_stride, 0, op.n_rows) {
        return Err("the input of an operation is not aligned");
    }
    Ok(())
}

pub(super) fn remember(model: &Model, error: &Error) -> LesStatus {
    model.set_last_error(error.to_string());
    LesStatus::from(error)
}

/// The expert at `position` of the walk: 0 first, then 1, and so on; every walker sees the same order. By asking for a
/// position a walker gives up the expert before. Waits for the device if need be. `*expert` and `*data` are valid until
/// this walker's next call. After the last one the answer is `LES_END`, and this walker has left; so it has after an
/// error, but not after `LES_ERR_NULL`. Each walker is a thread, the same for all its calls: `LES_ERR_INVALID`, without
/// effect, when this thread has left, asks for another position, or is one more than the op's `n_walkers`.
///
/// # Safety
/// `expert` and `data` are NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_ticket_next(
    ticket: *mut LesTicket,
    position: u32,
    expert: *mut u32,
    data: *mut *const c_void,
) -> LesStatus {
    guard(|| {
        let open = open(ticket)?;
        if expert.is_null() || data.is_null() {
            return Err(LES_ERR_NULL);
        }
        match open.ticket.next(position) {
            Ok(Step::Expert { expert: e, address }) => {
                // SAFETY: the caller vouches for `expert`.
                unsafe { put(expert, e) }?;
                // SAFETY: the caller vouches for `data`.
                ok(unsafe { put(data, std::ptr::with_exposed_provenance(address)) })
            }
            Ok(Step::End) => {
                close_if_left(ticket, &open);
                Ok(LES_END)
            }
            Err(e) => {
                close_if_left(ticket, &open);
                Err(remember(&open.model, &e))
            }
        }
    })
}

/// Leaves a walk before its end, or before its first expert: like reading on to `LES_END`. The walker's own thread;
/// `LES_ERR_INVALID` when it has left, or is one more than the op's `n_walkers`.
#[unsafe(no_mangle)]
pub extern "C" fn les_ticket_leave(ticket: *mut LesTicket) -> LesStatus {
    guard(|| {
        let open = open(ticket)?;
        open.ticket.leave().map_err(|e| remember(&open.model, &e))?;
        close_if_left(ticket, &open);
        Ok(LES_OK)
    })
}

/// Gives up a ticket that not all walkers will leave by themselves; the last one to leave closes the handle otherwise.
/// No walker may use an expert of it any more, nor what a call that was under way in its thread answers. NULL is fine.
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_ticket_free(ticket: *mut LesTicket) -> LesStatus {
    guard(|| {
        if ticket.is_null() {
            return Ok(LES_OK);
        }
        TICKETS.close(ticket.addr()).map(|_| LES_OK).ok_or(LES_ERR_HANDLE)
    })
}

fn close_if_left(ticket: *mut LesTicket, open: &Open) {
    if open.ticket.is_closed() {
        TICKETS.close(ticket.addr());
    }
}

fn open(ticket: *mut LesTicket) -> Result<Arc<Open>, LesStatus> {
    if ticket.is_null() {
        return Err(LES_ERR_NULL);
    }
    TICKETS.get(ticket.addr()).ok_or(LES_ERR_HANDLE)
}
