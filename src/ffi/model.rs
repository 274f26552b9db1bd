//! Models: open, ask, decide, start, close.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::path::Path;

use crate::error::Error;
use crate::index::is_packed_name;
use crate::model::Model;

use super::guard::{
    Failure, Versioned, guard, guard_telling, ok, path, put, put_sized, put_text, size_up_to, sized, string,
};
use super::handle::Handles;
use super::params::{DEFAULT_PARAMS, LesParams, options};
use super::status::{LES_ERR_HANDLE, LES_ERR_INVALID, LES_ERR_NOT_FOUND, LES_ERR_NULL, LES_OK, LesStatus};

/// A model whose experts can stream. Never dereferenced: a closed handle is noticed, not followed.
pub struct LesModel {
    _opaque: (),
}

pub(super) static MODELS: Handles<Model> = Handles::new();

pub(super) fn model(handle: *const LesModel) -> Result<std::sync::Arc<Model>, LesStatus> {
    if handle.is_null() {
        return Err(LES_ERR_NULL);
    }
    MODELS.get(handle.addr()).ok_or(LES_ERR_HANDLE)
}

/// What is known of a model when it is open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesModelInfo {
    /// `sizeof(struct les_model_info)`.
    pub struct_size: usize,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// Bytes of all other tensors.
    pub dense_bytes: u64,
    /// The smallest cache, in bytes: the experts of one token.
    pub floor_bytes: u64,
    /// The largest useful cache, in bytes: all experts.
    pub all_bytes: u64,
    /// Tensors of experts.
    pub n_tensors: u32,
    /// Files.
    pub n_files: u32,
    /// Experts used per token.
    pub n_expert_used: u32,
}

// SAFETY: repr(C), the size first, integers only.
unsafe impl Versioned for LesModelInfo {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, n_expert_used), size_of::<u32>());
}

/// One tensor of experts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesTensorInfo {
    /// `sizeof(struct les_tensor_info)`.
    pub struct_size: usize,
    /// Where expert 0 begins in its file, in bytes; expert `e` begins `e * expert_bytes` later, unless the file is packed.
    pub offset: u64,
    /// Bytes of one expert of the tensor's type.
    pub expert_bytes: u64,
    /// Which file (0: the first shard).
    pub file: u32,
    /// The layer.
    pub layer: u32,
    /// How many experts.
    pub n_expert: u32,
    /// The tensor's ggml type; see `les_model_types`.
    pub ggml_type: u32,
    /// Its GGUF name.
    pub name: [c_char; 64],
    /// Elements of a row.
    pub n_columns: u64,
    /// Rows of one expert.
    pub n_rows: u64,
    /// 1 when the file is packed, else 0.
    pub packed: u32,
}

// SAFETY: repr(C), the size first, integers only.
unsafe impl Versioned for LesTensorInfo {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, name), size_of::<[c_char; 64]>());
}

/// Opens the model whose first (or only) shard is at `path`; reads headers only. On success `*out` is a handle for
/// `les_model_free`. On failure `err`, if there is room, tells why. Any thread.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string, `out` NULL or writable, `err` NULL or writable for `err_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_open(
    path: *const c_char,
    out: *mut *mut LesModel,
    err: *mut c_char,
    err_len: usize,
) -> LesStatus {
    let body = || {
        // SAFETY: the caller vouches for `path`.
        let path = unsafe { self::path(path) }?;
        // SAFETY: the caller vouches for `out`.
        unsafe { opened(|| Model::open(path), out) }
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, body) }
}

/// Opens a model whose `n` shards are at `paths`, in their order, whatever their names. Otherwise `les_model_open`.
///
/// # Safety
/// As `les_model_open`; `paths` is NULL or points to `n` such strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_open_shards(
    paths: *const *const c_char,
    n: usize,
    out: *mut *mut LesModel,
    err: *mut c_char,
    err_len: usize,
) -> LesStatus {
    let body = || {
        if paths.is_null() {
            return Err(LES_ERR_NULL.into());
        }
        if n == 0 || n > 1 << 16 {
            return Err(LES_ERR_INVALID.into());
        }
        // SAFETY: not NULL, and the caller vouches for n of them.
        let paths = unsafe { std::slice::from_raw_parts(paths, n) };
        // SAFETY: each is NULL or a string.
        let paths = paths.iter().map(|&p| unsafe { path(p) }.map(Path::to_path_buf)).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the caller vouches for `out`.
        unsafe { opened(|| Model::open_shards(&paths), out) }
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, body) }
}

/// # Safety
/// `out` is NULL or writable.
unsafe fn opened(open: impl FnOnce() -> Result<Model, Error>, out: *mut *mut LesModel) -> Result<LesStatus, Failure> {
    if out.is_null() {
        return Err(LES_ERR_NULL.into());
    }
    let handle = std::ptr::without_provenance_mut(MODELS.open(open()?));
    // SAFETY: not NULL, and the caller vouches for it.
    unsafe { put(out, handle) }?;
    Ok(LES_OK)
}

/// Closes the handle. Tickets that are open keep what they need until they are closed. NULL is fine. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_free(model: *mut LesModel) -> LesStatus {
    guard(|| {
        if model.is_null() {
            return Ok(LES_OK);
        }
        MODELS.close(model.addr()).map(|_| LES_OK).ok_or(LES_ERR_HANDLE)
    })
}

/// Fills `info`, whose `struct_size` the caller has set. Any thread.
///
/// # Safety
/// `info` is NULL or a writable struct that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_info(handle: *const LesModel, info: *mut LesModelInfo) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        let index = model.index();
        let (floor_bytes, all_bytes) = model.cache_bounds();
        let value = LesModelInfo {
            struct_size: size_of::<LesModelInfo>(),
            expert_bytes: index.expert_bytes(),
            dense_bytes: index.dense_bytes,
            floor_bytes,
            all_bytes,
            n_tensors: index.tensors.len() as u32,
            n_files: index.files.len() as u32,
            n_expert_used: index.n_expert_used,
        };
        // SAFETY: the caller vouches for `info`.
        ok(unsafe { put_sized(info, value) })
    })
}

/// The number of the tensor of experts named `name`, for `les_op`. `LES_ERR_NOT_FOUND` when it does not stream. Any
/// thread.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string, `tensor` NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_find(handle: *const LesModel, name: *const c_char, tensor: *mut u32) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `name`.
        let name = unsafe { string(name) }?;
        let found = model.index().find(name).ok_or(LES_ERR_NOT_FOUND)?;
        // SAFETY: the caller vouches for `tensor`.
        ok(unsafe { put(tensor, found as u32) })
    })
}

/// Fills `info`, whose `struct_size` the caller has set, for tensor number `tensor`. Any thread.
///
/// # Safety
/// `info` is NULL or a writable struct that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_tensor(handle: *const LesModel, tensor: u32, info: *mut LesTensorInfo) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        let t = model.index().tensors.get(tensor as usize).ok_or(LES_ERR_NOT_FOUND)?;
        let mut name = [0; 64];
        for (to, from) in name.iter_mut().take(63).zip(t.name.bytes()) {
            *to = from as c_char;
        }
        let value = LesTensorInfo {
            struct_size: size_of::<LesTensorInfo>(),
            offset: t.offset,
            expert_bytes: t.expert_bytes,
            file: t.file,
            layer: t.layer,
            n_expert: t.n_expert(),
            ggml_type: t.ty.0,
            name,
            n_columns: t.ne[0],
            n_rows: t.ne[1],
            packed: u32::from(t.packed.is_some()),
        };
        // SAFETY: the caller vouches for `info`.
        ok(unsafe { put_sized(info, value) })
    })
}

/// Fills `types` with the ggml type of each of the `n` experts of tensor number `tensor`: a packed file may hold some of
/// another type than the tensor's own. `LES_ERR_INVALID` when it has another number of experts. Any thread.
///
/// # Safety
/// `types` is NULL or writable for `n` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_types(handle: *const LesModel, tensor: u32, types: *mut u32, n: u32) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        let t = model.index().tensors.get(tensor as usize).ok_or(LES_ERR_NOT_FOUND)?;
        if types.is_null() {
            return Err(LES_ERR_NULL);
        }
        if n != t.n_expert() {
            return Err(LES_ERR_INVALID);
        }
        let all: Vec<u32> = (0..n).map(|expert| t.type_of(expert).0).collect();
        // SAFETY: not NULL, and the caller vouches for `n` numbers.
        unsafe { types.copy_from_nonoverlapping(all.as_ptr(), all.len()) };
        Ok(LES_OK)
    })
}

/// Whether only packed files have tensors of this name: `LES_OK` for one that holds a layer's experts or checksums, else
/// `LES_ERR_NOT_FOUND`. Any thread.
///
/// # Safety
/// `name` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_is_packed_name(name: *const c_char) -> LesStatus {
    guard(|| {
        // SAFETY: the caller vouches for `name`.
        let name = unsafe { string(name) }?;
        Ok(if is_packed_name(name) { LES_OK } else { LES_ERR_NOT_FOUND })
    })
}

/// Decides by `params` and the memory of the machine whether the experts stream: `*streams` is 1 or 0, `*cache_bytes`
/// the memory that they will take (the least, when that depends on what is left later), `message` one line for the user
/// (empty for a model without routed experts). The choice holds for everything after it. Takes no memory yet. On
/// failure `message` tells why. Any thread; `LES_ERR_INVALID` when the model streams already.
///
/// # Safety
/// `params` is NULL or begins with its size and holds NULL or strings, `streams` and `cache_bytes` are NULL or
/// writable, `message` is NULL or writable for `message_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_decide(
    handle: *const LesModel,
    params: *const LesParams,
    streams: *mut i32,
    cache_bytes: *mut u64,
    message: *mut c_char,
    message_len: usize,
) -> LesStatus {
    let body = || {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `params`.
        let params = unsafe { sized(params, DEFAULT_PARAMS) }?;
        if streams.is_null() || cache_bytes.is_null() {
            return Err(LES_ERR_NULL.into());
        }
        // SAFETY: the caller vouches for the strings in `params`.
        let decision = model.decide(&unsafe { options(&params) }?)?;
        // SAFETY: the caller vouches for `message`.
        unsafe { put_text(message, message_len, &decision.message) };
        // SAFETY: the caller vouches for `cache_bytes`.
        unsafe { put(cache_bytes, decision.cache_bytes) }?;
        // SAFETY: the caller vouches for `streams`.
        unsafe { put(streams, i32::from(decision.streams)) }?;
        Ok(LES_OK)
    };
    // SAFETY: the caller vouches for `message`.
    unsafe { guard_telling(message, message_len, body) }
}

/// Reads `n` bytes at byte `offset` of tensor number `tensor` to `data`, from its file and past the cache: for copies of the
/// model, whether or not it streams. On failure `les_model_last_error` tells why, and what `data` holds is undefined. Any
/// thread.
///
/// # Safety
/// `data` is NULL or writable for `n` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_read(
    handle: *const LesModel,
    tensor: u32,
    offset: u64,
    data: *mut c_void,
    n: usize,
) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        if data.is_null() {
            return Err(LES_ERR_NULL);
        }
        if isize::try_from(n).is_err() {
            return Err(LES_ERR_INVALID);
        }
        // SAFETY: not NULL, and the caller vouches for `n` bytes.
        let to = unsafe { std::slice::from_raw_parts_mut(data.cast::<u8>(), n) };
        ok(model.read(tensor as usize, offset, to).map_err(|e| {
            model.set_last_error(e.to_string());
            LesStatus::from(&e)
        }))
    })
}

/// Takes the memory and starts the I/O now; the first ticket does it otherwise. Any thread.
///
/// # Safety
/// `err` is NULL or writable for `err_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_start(handle: *const LesModel, err: *mut c_char, err_len: usize) -> LesStatus {
    let body = || {
        model(handle)?.streamer()?;
        Ok(LES_OK)
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, body) }
}

/// Drops what the page cache holds of the model's files: call it when all other weights are loaded. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_forget_cached(handle: *const LesModel) -> LesStatus {
    guard(|| {
        model(handle)?.forget_cached();
        Ok(LES_OK)
    })
}

/// From now on a pass over the model with exactly `n_rows` rows (tokens) verifies drafts: row 0 is certain, the others may be
/// rejected. What they alone need displaces little, and nothing is learned from them before `les_model_judged` tells which of them
/// stand, or, when `les_model_drafted` is called again first, all do. Passes of other numbers of rows are as ever. 0 or 1: nothing
/// is drafted. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_drafted(handle: *const LesModel, n_rows: u32) -> LesStatus {
    guard(|| {
        model(handle)?.drafted(n_rows as usize);
        Ok(LES_OK)
    })
}

/// Of the pass that `les_model_drafted` announced the first `n_rows` rows stand; 1: no draft does. Passes that follow are as ever.
/// Without effect when there was no such pass. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_model_judged(handle: *const LesModel, n_rows: u32) -> LesStatus {
    guard(|| {
        model(handle)?.judged(n_rows as usize);
        Ok(LES_OK)
    })
}
