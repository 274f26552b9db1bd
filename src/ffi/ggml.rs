//! ggml's own quantizers, from its library at run time: what they write is what llama.cpp was tested with.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Error, Result};
use crate::index::GgmlType;

/// bf16: of the types after it a library may know nothing, and reads past the end of its table when asked.
const NEWEST: GgmlType = GgmlType(30);

/// What `struct ggml_type_traits` of ggml.h begins with.
#[repr(C)]
struct Traits {
    type_name: *const c_char,
    blck_size: i64,
    blck_size_interleave: i64,
    type_size: usize,
    is_quantized: bool,
    to_float: Option<ToFloat>,
}

type ToFloat = unsafe extern "C" fn(*const c_void, *mut f32, i64);
type GetTraits = unsafe extern "C" fn(c_int) -> *const Traits;
type NeedsImportance = unsafe extern "C" fn(c_int) -> bool;
type Init = unsafe extern "C" fn(c_int);
type Chunk = unsafe extern "C" fn(c_int, *const f32, *mut c_void, i64, i64, i64, *const f32) -> usize;

/// The library libggml-base. Any number of threads may use it.
#[derive(Debug)]
pub struct Ggml {
    path: PathBuf,
    get_traits: GetTraits,
    needs_importance: NeedsImportance,
    init: Init,
    chunk: Chunk,
    // last: the functions are its
    _library: Library,
}

/// The rows of a matrix: values row by row, `columns` in each.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// The values, which [fit](Rows::fit).
    pub values: &'a [f32],
    /// Values of a row.
    pub columns: usize,
}

impl Rows<'_> {
    /// Whether all values are finite, and none is larger than f16 can hold, as which the scales of blocks are stored.
    pub fn fit(&self) -> bool {
        const LARGEST: f32 = 65504.0;
        self.values.iter().all(|v| v.abs() <= LARGEST)
    }
}

impl Ggml {
    /// Loads the library from `path` (a file, or the directory that it is in), or from beside the running program, from
    /// `../lib` there, or from where the system looks.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is none, or it lacks a function.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let mut why = String::new();
        for path in places(path) {
            // SAFETY: ggml's initializers touch nothing of ours.
            match unsafe { Library::new(&path) } {
                Ok(library) => return Self::new(library, path),
                Err(e) if why.is_empty() => why = format!("{}: {}", path.display(), cause(&e)),
                Err(_) => {}
            }
        }
        Err(Error::Invalid(format!(
            "cannot load ggml, whose quantizers are needed: {why}; build llama.cpp with shared libraries and give its \
             libggml-base by --ggml"
        )))
    }

    fn new(library: Library, path: PathBuf) -> Result<Self> {
        // SAFETY: the types are those of ggml.h.
        let get_traits = unsafe { symbol::<GetTraits>(&library, &path, "ggml_get_type_traits") }?;
        // SAFETY: as above.
        let needs_importance = unsafe { symbol::<NeedsImportance>(&library, &path, "ggml_quantize_requires_imatrix") }?;
        // SAFETY: as above.
        let init = unsafe { symbol::<Init>(&library, &path, "ggml_quantize_init") }?;
        // SAFETY: as above.
        let chunk = unsafe { symbol::<Chunk>(&library, &path, "ggml_quantize_chunk") }?;
        Ok(Self { path, get_traits, needs_importance, init, chunk, _library: library })
    }

    /// Whether the type cannot be made without an importance of each column.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the library has another idea of the type than we have.
    pub fn needs_importance(&self, ty: GgmlType) -> Result<bool> {
        self.traits(ty)?;
        // SAFETY: it takes any number.
        Ok(unsafe { (self.needs_importance)(ty.0 as c_int) })
    }

    /// The bytes of `rows` in the type `ty`. `importance` of each column; `None`: ggml's own.
    ///
    /// # Errors
    /// [`Error::Invalid`] when rows, importance and type do not fit together, or as [`Ggml::needs_importance`].
    pub fn quantize(&self, ty: GgmlType, rows: Rows, importance: Option<&[f32]>) -> Result<Vec<u8>> {
        let Rows { values, columns } = rows;
        let refuse = |why: &str| Err(Error::Invalid(format!("rows of {columns} cannot become {ty}: {why}")));
        let needs_importance = self.needs_importance(ty)?;
        // it aborts where these do not hold
        if columns == 0 || !values.len().is_multiple_of(columns) {
            return refuse("they are not whole");
        }
        if !rows.fit() {
            return refuse("a value is not finite, or too large");
        }
        match importance {
            Some(of) if of.len() != columns || !of.iter().all(|v| v.is_finite() && *v > 0.0) => {
                return refuse("the importance of columns makes no sense");
            }
            None if needs_importance => return refuse("it needs an importance matrix"),
            _ => {}
        }
        let n_rows = values.len() / columns;
        let Some(row_bytes) = ty.row_bytes(columns as u64) else { return refuse("they are no whole blocks") };
        let mut out = vec![0_u8; row_bytes as usize * n_rows];
        let importance = importance.map_or(std::ptr::null(), <[f32]>::as_ptr);
        // SAFETY: the type is one of the library's.
        unsafe { (self.init)(ty.0 as c_int) };
        let (from, to) = (values.as_ptr(), out.as_mut_ptr().cast());
        // SAFETY: it reads n_rows * columns values and `columns` importances, and writes as many blocks as `out` has room
        // for, since the library's blocks are of our size.
        let written = unsafe { (self.chunk)(ty.0 as c_int, from, to, 0, n_rows as i64, columns as i64, importance) };
        if written == out.len() { Ok(out) } else { refuse("ggml wrote another number of bytes than it should") }
    }

    /// The values of whole rows of blocks of the type `ty`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the bytes are no whole blocks, or as [`Ggml::needs_importance`].
    pub fn dequantize(&self, ty: GgmlType, bytes: &[u8]) -> Result<Vec<f32>> {
        if ty == GgmlType::F32 {
            return Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
        }
        let refuse = |why: &str| Err(Error::Invalid(format!("{} bytes of {ty} have no values: {why}", bytes.len())));
        let traits = self.traits(ty)?;
        let Some(to_float) = traits.to_float else { return refuse("ggml cannot read that type") };
        // no field of a block is larger
        if !bytes.len().is_multiple_of(traits.type_size) || !bytes.as_ptr().cast::<f32>().is_aligned() {
            return refuse("they are no whole blocks");
        }
        let mut out = vec![0.0; bytes.len() / traits.type_size * traits.blck_size as usize];
        // SAFETY: it reads the blocks of `bytes` and writes as many values as `out` has room for.
        unsafe { to_float(bytes.as_ptr().cast(), out.as_mut_ptr(), out.len() as i64) };
        Ok(out)
    }

    /// What the library says of a type that both know.
    fn traits(&self, ty: GgmlType) -> Result<&Traits> {
        let refuse = || {
            let path = self.path.display();
            Error::Invalid(format!(
                "{path}: its {ty} is not the one that is known here; give another version by --ggml"
            ))
        };
        let known = ty.block_elements().filter(|_| ty.0 <= NEWEST.0);
        let Some((block, bytes)) = known.and_then(|block| Some((block, ty.row_bytes(block)?))) else {
            return Err(refuse());
        };
        // SAFETY: every library that has the functions has so many types.
        let traits = unsafe { (self.get_traits)(ty.0 as c_int) };
        // SAFETY: a table of the library, which lives as long as `self`.
        let traits = unsafe { traits.as_ref() }.ok_or_else(refuse)?;
        if traits.type_name.is_null() {
            return Err(refuse());
        }
        // SAFETY: a name in the table ends with zero.
        let name = unsafe { CStr::from_ptr(traits.type_name) };
        let same = name.to_bytes() == ty.name().as_bytes();
        if same && (traits.blck_size, traits.type_size) == (block as i64, bytes as usize) {
            Ok(traits)
        } else {
            Err(refuse())
        }
    }
}

/// What the system says.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// # Safety
/// `T` must be the type of the function.
unsafe fn symbol<T: Copy>(library: &Library, path: &Path, name: &str) -> Result<T> {
    // SAFETY: as the caller says.
    let found = unsafe { library.get::<T>(name) };
    found.map(|function| *function).map_err(|e| {
        Error::Invalid(format!(
            "{}: this is no libggml-base that is known here ({}); give one by --ggml",
            path.display(),
            cause(&e)
        ))
    })
}

/// Where the library may be, in the order in which they are tried.
fn places(given: Option<&Path>) -> Vec<PathBuf> {
    let name = libloading::library_filename("ggml-base");
    match given {
        Some(path) if path.is_dir() => vec![path.join(name)],
        Some(path) => vec![path.to_owned()],
        None => {
            let program = std::env::current_exe().ok().and_then(|path| path.canonicalize().ok());
            let beside = program.as_deref().and_then(Path::parent);
            let mut places: Vec<_> =
                beside.iter().flat_map(|dir| [dir.join(&name), dir.join("../lib").join(&name)]).collect();
            places.retain(|path| path.exists());
            // what is installed to be run, not to be built with, has only the last of the names
            places.extend([PathBuf::from(&name), PathBuf::from(&name).with_extension("so.0")]);
            places
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_the_error_says_what_to_do() {
        let text = Ggml::open(Some(Path::new("/nonexistent"))).unwrap_err().to_string();
        assert!(text.contains("/nonexistent") && text.contains("give its libggml-base by --ggml"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        let text = Ggml::open(Some(dir.path())).unwrap_err().to_string();
        assert!(text.contains("ggml-base"), "{text}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_refused() {
        let text = Ggml::open(Some(Path::new("libc.so.6"))).unwrap_err().to_string();
        assert!(text.contains("libc.so.6: this is no libggml-base"), "{text}");
    }
}
