//! Models: open, ask, decide, report, close.

use std::ffi::c_char;
use std::io::Write;
use std::mem::offset_of;
use std::path::Path;

use crate::error::Error;
use crate::io::parse_depth;
use crate::memory;
use crate::model::Model;
use crate::options::Options;

use super::guard::{
    Failure, Sized1, guard, guard_telling, ok, path, put, put_sized, put_text, size_up_to, sized, string,
    string_or_empty,
};
use super::handle::Handles;
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

/// What a user may choose. Fill it with `les_params_default`, then change what matters.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesParams {
    /// `sizeof(struct les_params)`.
    pub struct_size: usize,
    /// "off", "auto" or "on"; NULL: "auto".
    pub mode: *const c_char,
    /// Memory for experts: "1500" (MiB), "3G", "512K", "40%" (of the experts), "min", "auto"; NULL: "auto".
    pub cache: *const c_char,
    /// "auto", "uring" or "pread"; NULL: "auto".
    pub io: *const c_char,
    /// The most reads in flight, as a number; NULL or "0": the default.
    pub io_depth: *const c_char,
    /// A file for the routing trace; NULL: none.
    pub trace: *const c_char,
}

// SAFETY: repr(C), the size first, and every field takes any bytes (pointers are checked for NULL, and the caller
// vouches for the strings).
unsafe impl Sized1 for LesParams {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, trace), size_of::<*const c_char>());
}

const DEFAULT_PARAMS: LesParams = LesParams {
    struct_size: size_of::<LesParams>(),
    mode: std::ptr::null(),
    cache: std::ptr::null(),
    io: std::ptr::null(),
    io_depth: std::ptr::null(),
    trace: std::ptr::null(),
};

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
unsafe impl Sized1 for LesModelInfo {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, n_expert_used), size_of::<u32>());
}

/// One tensor of experts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesTensorInfo {
    /// `sizeof(struct les_tensor_info)`.
    pub struct_size: usize,
    /// Where expert 0 begins in its file, in bytes; expert `e` begins `e * expert_bytes` later.
    pub offset: u64,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Which file (0: the first shard).
    pub file: u32,
    /// The layer.
    pub layer: u32,
    /// How many experts.
    pub n_expert: u32,
    /// The tensor's ggml type.
    pub ggml_type: u32,
    /// Its GGUF name.
    pub name: [c_char; 64],
}

// SAFETY: repr(C), the size first, integers only.
unsafe impl Sized1 for LesTensorInfo {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, name), size_of::<[c_char; 64]>());
}

/// Fills `params` with the defaults and its own size. Any thread.
///
/// # Safety
/// `params` is NULL or valid for writing a `struct les_params`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_params_default(params: *mut LesParams) -> LesStatus {
    // SAFETY: the caller vouches for `params`.
    guard(|| ok(unsafe { put(params, DEFAULT_PARAMS) }))
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
        };
        // SAFETY: the caller vouches for `info`.
        ok(unsafe { put_sized(info, value) })
    })
}

/// Whether `params` make sense for any model. If not, `err`, if there is room, tells why. Any thread.
///
/// # Safety
/// `params` is NULL or begins with its size and holds NULL or strings, `err` is NULL or writable for `err_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_params_check(params: *const LesParams, err: *mut c_char, err_len: usize) -> LesStatus {
    let body = || {
        // SAFETY: the caller vouches for `params`.
        let params = unsafe { sized(params, DEFAULT_PARAMS) }?;
        // SAFETY: the caller vouches for the strings in `params`.
        unsafe { options(&params) }?;
        Ok(LES_OK)
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard_telling(err, err_len, body) }
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

/// # Safety
/// The strings in `params` are NULL or NUL-terminated.
unsafe fn options(params: &LesParams) -> Result<Options, Failure> {
    // SAFETY: the caller vouches for the strings.
    let text = |p| unsafe { string_or_empty(p) };
    let or = |t: &'static str, p| text(p).map(|s: &str| if s.is_empty() { t } else { s }.to_owned());
    let (mode, cache, io) = (or("auto", params.mode)?, or("auto", params.cache)?, or("auto", params.io)?);
    let io_depth = parse_depth(&or("0", params.io_depth)?)?;
    // SAFETY: the caller vouches for the string.
    let trace = (!params.trace.is_null()).then(|| unsafe { path(params.trace) }.map(Path::to_path_buf)).transpose()?;
    Ok(Options {
        mode: mode.parse()?,
        cache: cache.parse()?,
        io: io.parse()?,
        io_depth,
        trace: trace.filter(|path| !path.as_os_str().is_empty()),
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

/// What the user should know of how the files are read, in one line; empty when all is as it should be. Any thread.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_notice(handle: *const LesModel, buf: *mut c_char, len: usize) -> LesStatus {
    guard(|| {
        let notice = model(handle)?.notice().unwrap_or_default();
        // SAFETY: the caller vouches for `buf`.
        unsafe { put_text(buf, len, &notice) };
        Ok(LES_OK)
    })
}

/// What went wrong last in a ticket of this model; empty if nothing did. Any thread.
///
/// # Safety
/// `buf` is NULL or writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_last_error(handle: *const LesModel, buf: *mut c_char, len: usize) -> LesStatus {
    guard(|| {
        let error = model(handle)?.last_error();
        // SAFETY: the caller vouches for `buf`.
        unsafe { put_text(buf, len, &error) };
        Ok(LES_OK)
    })
}

/// The counters of one phase.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct LesPhase {
    /// Tokens that passed the first tensor of experts that streams.
    pub tokens: u64,
    /// Experts asked for, each once per operation with the first matrix of its layer.
    pub requests: u64,
    /// Of these, in memory when asked for.
    pub hits: u64,
    /// Bytes whose reading was started.
    pub bytes_read: u64,
    /// Nanoseconds that the computation waited for reads.
    pub wait_ns: u64,
}

/// The main counters; `les_model_stats_write` writes all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LesStats {
    /// `sizeof(struct les_stats)`.
    pub struct_size: usize,
    /// Tokens generated one at a time.
    pub decode: LesPhase,
    /// Several tokens at once.
    pub prompt: LesPhase,
    /// Bytes of all slots.
    pub cache_bytes: u64,
    /// Matrices of experts evicted.
    pub evictions: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Nanoseconds from one generated token to the next, summed over `decode_steps`: all but the longest.
    pub decode_ns: u64,
    /// See `decode_ns`.
    pub decode_steps: u64,
    /// The largest resident set of the process so far, in bytes; 0 where the system does not tell.
    pub peak_rss_bytes: u64,
}

// SAFETY: repr(C), the size first, integers only.
unsafe impl Sized1 for LesStats {
    const LEAST: usize = size_up_to::<Self>(offset_of!(Self, peak_rss_bytes), size_of::<u64>());
}

impl From<&crate::stats::Phase> for LesPhase {
    fn from(p: &crate::stats::Phase) -> Self {
        Self { tokens: p.tokens, requests: p.requests, hits: p.hits, bytes_read: p.bytes_read, wait_ns: p.wait_ns }
    }
}

/// Fills `stats`, whose `struct_size` the caller has set. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
///
/// # Safety
/// `stats` is NULL or a writable struct that begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_stats(handle: *const LesModel, stats: *mut LesStats) -> LesStatus {
    guard(|| {
        let s = model(handle)?.stats().ok_or(LES_ERR_NOT_FOUND)?;
        let value = LesStats {
            struct_size: size_of::<LesStats>(),
            decode: (&s.decode).into(),
            prompt: (&s.prompt).into(),
            cache_bytes: s.cache_bytes,
            evictions: s.evictions,
            read_errors: s.read_errors,
            decode_ns: s.decode_ns,
            decode_steps: s.decode_steps,
            peak_rss_bytes: s.peak_rss_bytes,
        };
        // SAFETY: the caller vouches for `stats`.
        ok(unsafe { put_sized(stats, value) })
    })
}

/// Writes all counters as JSON to the file `path`. `LES_ERR_NOT_FOUND` before the first ticket. Any thread.
///
/// # Safety
/// `path` is NULL or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn les_model_stats_write(handle: *const LesModel, path: *const c_char) -> LesStatus {
    guard(|| {
        let model = model(handle)?;
        // SAFETY: the caller vouches for `path`.
        let path = unsafe { self::path(path) }?;
        let stats = model.stats().ok_or(LES_ERR_NOT_FOUND)?;
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
            serde_json::to_writer_pretty(&mut file, &stats)?;
            // dropping it would not tell of a full disk
            file.flush()
        };
        match write() {
            Ok(()) => Ok(LES_OK),
            Err(source) => {
                let e = Error::File { path: path.into(), what: "write the statistics", source };
                model.set_last_error(e.to_string());
                Err(LesStatus::from(&e))
            }
        }
    })
}

/// Bytes of memory that this process may still take, control groups respected; 0 where the system does not tell. Any
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn les_memory_available() -> u64 {
    let mut available = 0;
    guard(|| {
        available = memory::available().unwrap_or(0);
        Ok(LES_OK)
    });
    available
}
