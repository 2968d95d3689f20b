//! The store across the border of a shared object.
//!
//! `evener._native` and the TensorFlow shim are two shared objects, and each has its own copy of every
//! static of this crate: two registries. So that one name is one store, only `evener._native` runs the
//! store's code. It gives out the address of its [`TABLE`], a table of C functions; the shim is bound to
//! it once ([`Remote::bind`]) and calls through it. The table only grows at its end; `version` changes
//! where an entry's meaning does.
//!
//! No panic crosses: each function catches it and reports [`Status::Internal`]. A message is written to
//! the caller's room as UTF-8 and cut where the room ends.

mod provide;
mod remote;

pub use remote::{Failed, Remote};

use crate::error::Error;
use std::ffi::c_void;

/// Version of the meaning of the entries of [`Table`].
pub const VERSION: u32 = 2;

/// How a call went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Well.
    Ok = 0,
    /// What was given cannot be; nothing has changed.
    Invalid = 1,
    /// No such store.
    NotFound = 2,
    /// The system refused.
    Io = 3,
    /// A file is not whole.
    Corrupt = 4,
    /// No room.
    Exhausted = 5,
    /// A mistake in the store: a panic that was caught.
    Internal = 6,
}

impl Status {
    fn of(code: i32) -> Status {
        const ALL: [Status; 6] = [
            Status::Ok,
            Status::Invalid,
            Status::NotFound,
            Status::Io,
            Status::Corrupt,
            Status::Exhausted,
        ];
        usize::try_from(code).map_or(Status::Internal, |at| {
            ALL.get(at).copied().unwrap_or(Status::Internal)
        })
    }
}

impl From<&Error> for Status {
    fn from(error: &Error) -> Status {
        match error {
            Error::Invalid(_) => Status::Invalid,
            Error::NotFound(_) => Status::NotFound,
            Error::Io { .. } => Status::Io,
            Error::Corrupt { .. } => Status::Corrupt,
            Error::Exhausted(_) => Status::Exhausted,
        }
    }
}

/// A message of a call that failed: the callee writes up to `room` bytes and sets `length`.
#[derive(Debug)]
#[repr(C)]
pub struct Report {
    /// Where to.
    pub text: *mut u8,
    /// How many bytes fit.
    pub room: usize,
    /// How many were written.
    pub length: usize,
}

/// A store that was opened through the table; give it back with `close`.
pub type Handle = *const c_void;

/// Gets a row: context, key, values (dim of them), frequency, version.
pub type Visit = unsafe extern "C" fn(*mut c_void, i64, *const f32, u32, u32);

/// Gets bytes: context, start, length.
pub type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize);

/// What [`Table::file`] does with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FileCall {
    /// [`Store::save`].
    Save = 0,
    /// [`Store::restore`].
    Restore = 1,
    /// [`Store::snapshot`].
    Snapshot = 2,
    /// [`Store::delta`].
    Delta = 3,
    /// [`Store::apply_delta`].
    ApplyDelta = 4,
}

/// The functions, all of the copy of the store that gave the table out. Every pointer and length is of
/// memory that the caller keeps alive, and alone where it is written, until the call returns.
#[derive(Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "the methods of Remote say what each does")]
pub struct Table {
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of the table: later ones are longer.
    pub size: u32,
    /// Name and options (JSON; length 0: it must be there).
    pub open: unsafe extern "C" fn(
        *const u8,
        usize,
        *const u8,
        usize,
        *mut Handle,
        *mut u32,
        *mut Report,
    ) -> i32,
    pub close: unsafe extern "C" fn(Handle),
    pub len: unsafe extern "C" fn(Handle) -> u64,
    pub lookup:
        unsafe extern "C" fn(Handle, *const i64, usize, u32, *mut f32, usize, *mut Report) -> i32,
    /// `found` may be null.
    pub lookup_infer: unsafe extern "C" fn(
        Handle,
        *const i64,
        usize,
        *mut f32,
        usize,
        *mut u8,
        *mut Report,
    ) -> i32,
    /// A learning rate that is NaN: that of the options.
    pub apply: unsafe extern "C" fn(
        Handle,
        *const i64,
        usize,
        *const f32,
        usize,
        u32,
        f32,
        *mut Report,
    ) -> i32,
    pub upsert:
        unsafe extern "C" fn(Handle, *const i64, usize, *const f32, usize, u32, *mut Report) -> i32,
    pub remove: unsafe extern "C" fn(Handle, *const i64, usize) -> u64,
    pub clear: unsafe extern "C" fn(Handle, *mut Report) -> i32,
    pub export: unsafe extern "C" fn(Handle, *mut c_void, Visit, *mut Report) -> i32,
    pub intern: unsafe extern "C" fn(
        Handle,
        *const u8,
        usize,
        *const u64,
        usize,
        i32,
        *mut i64,
        *mut Report,
    ) -> i32,
    /// Frequencies and versions, n long each; 0xFFFFFFFF in both for a key without a row.
    pub info:
        unsafe extern "C" fn(Handle, *const i64, usize, *mut u32, *mut u32, *mut Report) -> i32,
    pub evict: unsafe extern "C" fn(Handle, u32, *mut u64, *mut Report) -> i32,
    /// The options as JSON, to a sink.
    pub options: unsafe extern "C" fn(Handle, *mut c_void, Sink, *mut Report) -> i32,
    /// Sizes and counts as JSON, to a sink.
    pub stats: unsafe extern "C" fn(Handle, *mut c_void, Sink, *mut Report) -> i32,
    pub set_optimizer: unsafe extern "C" fn(Handle, *const u8, usize, *mut Report) -> i32,
    pub freeze: unsafe extern "C" fn(Handle, i32),
    /// To or from a file or folder: one of [`FileCall`].
    pub file: unsafe extern "C" fn(Handle, u32, *const u8, usize, *mut Report) -> i32,
    pub save_bytes: unsafe extern "C" fn(Handle, *mut c_void, Sink, *mut Report) -> i32,
    pub restore_bytes: unsafe extern "C" fn(Handle, *const u8, usize, *mut Report) -> i32,
}

// SAFETY: it holds numbers and addresses of functions.
unsafe impl Sync for Table {}

/// The table of this copy of the code.
pub static TABLE: Table = provide::own();

/// The table of this copy of the code.
pub fn table() -> &'static Table {
    &TABLE
}

/// # Safety
/// `start` is the address of `n` values that live and are not written while the slice is used; null
/// is allowed where `n` is 0.
unsafe fn read<'a, T>(start: *const T, n: usize) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(start, n) }
}

/// # Safety
/// As for [`read`], and nobody else uses them.
unsafe fn write<'a, T>(start: *mut T, n: usize) -> &'a mut [T] {
    if n == 0 {
        return &mut [];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(start, n) }
}
