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

use crate::error::Error;
use crate::options::Options;
use crate::registry;
use crate::store::Store;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Of the meaning of the entries of [`Table`].
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
        match code {
            0 => Status::Ok,
            1 => Status::Invalid,
            2 => Status::NotFound,
            3 => Status::Io,
            4 => Status::Corrupt,
            5 => Status::Exhausted,
            _ => Status::Internal,
        }
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
pub static TABLE: Table = Table {
    version: VERSION,
    size: size_of::<Table>() as u32,
    open,
    close,
    len,
    lookup,
    lookup_infer,
    apply,
    upsert,
    remove,
    clear,
    export,
    intern,
    info,
    evict,
    options,
    stats,
    set_optimizer,
    freeze,
    file,
    save_bytes,
    restore_bytes,
};

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

/// # Safety
/// A handle that `open` gave and that was not closed.
unsafe fn store<'a>(handle: Handle) -> &'a Store {
    // SAFETY: `open` gave out the address of a counted store.
    unsafe { &*handle.cast::<Store>() }
}

/// # Safety
/// `report` is null or a report with room for `room` bytes.
unsafe fn guarded(report: *mut Report, call: impl FnOnce() -> crate::Result<()>) -> i32 {
    let (status, message) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return Status::Ok as i32,
        Ok(Err(error)) => (Status::from(&error), error.to_string()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or(panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            (
                Status::Internal,
                format!("the embedding store failed: {text}"),
            )
        }
    };
    // SAFETY: promised by the caller.
    if let Some(report) = unsafe { report.as_mut() } {
        let mut end = message.len().min(report.room);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: as above; `end` is at most `room`.
        unsafe { write(report.text, end) }.copy_from_slice(&message.as_bytes()[..end]);
        report.length = end;
    }
    status as i32
}

fn text<'a>(what: &str, bytes: &'a [u8]) -> crate::Result<&'a str> {
    std::str::from_utf8(bytes)
        .map_err(|error| Error::Invalid(format!("the {what} of an embedding: {error}")))
}

unsafe extern "C" fn open(
    name: *const u8,
    name_length: usize,
    options: *const u8,
    options_length: usize,
    out: *mut Handle,
    dim: *mut u32,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller of a function of the table, here and below.
    unsafe {
        guarded(report, || {
            let name = text("name", read(name, name_length))?;
            let found = match options_length {
                0 => registry::find(name)?,
                n => registry::open(name, Options::parse(text("options", read(options, n))?)?)?,
            };
            *dim = found.dim() as u32;
            *out = Arc::into_raw(found).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn close(handle: Handle) {
    // SAFETY: a handle of `open`, which nobody uses any more.
    let _ = catch_unwind(|| drop(unsafe { Arc::from_raw(handle.cast::<Store>()) }));
}

unsafe extern "C" fn len(handle: Handle) -> u64 {
    // SAFETY: promised by the caller.
    catch_unwind(|| unsafe { store(handle) }.len()).unwrap_or(0)
}

unsafe extern "C" fn lookup(
    handle: Handle,
    keys: *const i64,
    n: usize,
    step: u32,
    out: *mut f32,
    room: usize,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            store(handle).lookup(read(keys, n), step, write(out, room))
        })
    }
}

unsafe extern "C" fn lookup_infer(
    handle: Handle,
    keys: *const i64,
    n: usize,
    out: *mut f32,
    room: usize,
    found: *mut u8,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let found = (!found.is_null()).then(|| write(found, n));
            store(handle).lookup_infer(read(keys, n), write(out, room), found)
        })
    }
}

unsafe extern "C" fn apply(
    handle: Handle,
    keys: *const i64,
    n: usize,
    gradients: *const f32,
    length: usize,
    step: u32,
    lr: f32,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let lr = (!lr.is_nan()).then_some(lr);
            store(handle).apply(read(keys, n), read(gradients, length), step, lr)
        })
    }
}

unsafe extern "C" fn upsert(
    handle: Handle,
    keys: *const i64,
    n: usize,
    values: *const f32,
    length: usize,
    step: u32,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            store(handle).upsert(read(keys, n), read(values, length), step)
        })
    }
}

unsafe extern "C" fn remove(handle: Handle, keys: *const i64, n: usize) -> u64 {
    // SAFETY: promised by the caller.
    catch_unwind(|| unsafe { store(handle).remove(read(keys, n)) }).unwrap_or(0)
}

unsafe extern "C" fn clear(handle: Handle, report: *mut Report) -> i32 {
    // SAFETY: promised by the caller.
    unsafe { guarded(report, || store(handle).clear()) }
}

unsafe extern "C" fn export(
    handle: Handle,
    context: *mut c_void,
    visit: Visit,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            store(handle).export(|key, values, frequency, version| {
                visit(context, key, values.as_ptr(), frequency, version);
            });
            Ok(())
        })
    }
}

unsafe extern "C" fn intern(
    handle: Handle,
    bytes: *const u8,
    length: usize,
    offsets: *const u64,
    n: usize,
    insert: i32,
    out: *mut i64,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let offsets = read(offsets, n + 1);
            store(handle).intern(read(bytes, length), offsets, insert != 0, write(out, n))
        })
    }
}

unsafe extern "C" fn info(
    handle: Handle,
    keys: *const i64,
    n: usize,
    frequencies: *mut u32,
    versions: *mut u32,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let (f, v) = (write(frequencies, n), write(versions, n));
            for (i, meta) in store(handle).meta(read(keys, n)).into_iter().enumerate() {
                (f[i], v[i]) = meta.unwrap_or((u32::MAX, u32::MAX));
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn evict(handle: Handle, step: u32, gone: *mut u64, report: *mut Report) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            *gone = store(handle).evict(step)?;
            Ok(())
        })
    }
}

unsafe extern "C" fn options(
    handle: Handle,
    context: *mut c_void,
    sink: Sink,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let json = store(handle).options().to_json();
            sink(context, json.as_ptr(), json.len());
            Ok(())
        })
    }
}

unsafe extern "C" fn stats(
    handle: Handle,
    context: *mut c_void,
    sink: Sink,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let json = serde_json::to_string(&store(handle).stats()).unwrap_or_default();
            sink(context, json.as_ptr(), json.len());
            Ok(())
        })
    }
}

unsafe extern "C" fn set_optimizer(
    handle: Handle,
    json: *const u8,
    length: usize,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let json = text("optimizer", read(json, length))?;
            store(handle).set_optimizer(crate::Optimizer::parse(json)?)
        })
    }
}

unsafe extern "C" fn freeze(handle: Handle, frozen: i32) {
    // SAFETY: promised by the caller.
    let _ = catch_unwind(|| unsafe { store(handle) }.freeze(frozen != 0));
}

unsafe extern "C" fn file(
    handle: Handle,
    call: u32,
    path: *const u8,
    length: usize,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let (store, path) = (store(handle), Path::new(text("path", read(path, length))?));
            match call {
                0 => store.save(path),
                1 => store.restore(path),
                2 => store.snapshot(path),
                3 => store.delta(path),
                4 => store.apply_delta(path),
                other => crate::error::invalid(format!("there is no call {other} with a file")),
            }
            .map(|_| ())
        })
    }
}

unsafe extern "C" fn save_bytes(
    handle: Handle,
    context: *mut c_void,
    sink: Sink,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            let bytes = store(handle).save_bytes()?;
            sink(context, bytes.as_ptr(), bytes.len());
            Ok(())
        })
    }
}

unsafe extern "C" fn restore_bytes(
    handle: Handle,
    bytes: *const u8,
    length: usize,
    report: *mut Report,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe {
        guarded(report, || {
            store(handle).restore_bytes(read(bytes, length)).map(|_| ())
        })
    }
}

/// Why a call through the table failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failed {
    /// What kind of.
    pub status: Status,
    /// In words.
    pub message: String,
}

/// A store in another shared object of this process.
#[derive(Debug)]
pub struct Remote {
    table: &'static Table,
    handle: Handle,
    dim: usize,
}

// SAFETY: the handle is a counted `Store`, which is Send and Sync.
unsafe impl Send for Remote {}
// SAFETY: as above.
unsafe impl Sync for Remote {}

impl Remote {
    /// The table at an address that `evener._native.embedding_table()` gave.
    ///
    /// # Errors
    /// Where it is null, of another version, or shorter than what this code calls.
    ///
    /// # Safety
    /// `address` is null or that of a [`Table`] of a shared object that stays loaded.
    pub unsafe fn bind(address: *const Table) -> Result<&'static Table, Failed> {
        let failed = |message: String| Failed {
            status: Status::Invalid,
            message,
        };
        // SAFETY: promised by the caller.
        let table = unsafe { address.as_ref() }
            .ok_or_else(|| failed("no table of embedding functions was given".to_owned()))?;
        if table.version != VERSION || (table.size as usize) < size_of::<Table>() {
            return Err(failed(format!(
                "the table of embedding functions has version {} and {} bytes; this needs version \
                 {VERSION} and {} bytes: install both parts of Evener from one build",
                table.version,
                table.size,
                size_of::<Table>()
            )));
        }
        Ok(table)
    }

    fn call(call: impl FnOnce(*mut Report) -> i32) -> Result<(), Failed> {
        let mut room = [0u8; 1024];
        let mut report = Report {
            text: room.as_mut_ptr(),
            room: room.len(),
            length: 0,
        };
        match Status::of(call(&mut report)) {
            Status::Ok => Ok(()),
            status => Err(Failed {
                status,
                message: String::from_utf8_lossy(&room[..report.length.min(1024)]).into_owned(),
            }),
        }
    }

    fn get(table: &'static Table, name: &str, options: &str) -> Result<Remote, Failed> {
        let (mut handle, mut dim) = (std::ptr::null(), 0);
        Remote::call(|report| {
            // SAFETY: strings and places live until the call returns.
            unsafe {
                (table.open)(
                    name.as_ptr(),
                    name.len(),
                    options.as_ptr(),
                    options.len(),
                    &mut handle,
                    &mut dim,
                    report,
                )
            }
        })?;
        Ok(Remote {
            table,
            handle,
            dim: dim as usize,
        })
    }

    /// As [`registry::open`], with options as JSON.
    ///
    /// # Errors
    /// As there.
    pub fn open(table: &'static Table, name: &str, options: &str) -> Result<Remote, Failed> {
        let options = if options.is_empty() { "{}" } else { options };
        Remote::get(table, name, options)
    }

    /// As [`registry::find`].
    ///
    /// # Errors
    /// As there.
    pub fn find(table: &'static Table, name: &str) -> Result<Remote, Failed> {
        Remote::get(table, name, "")
    }

    /// Values per row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Rows.
    pub fn len(&self) -> u64 {
        // SAFETY: the handle is open.
        unsafe { (self.table.len)(self.handle) }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As [`Store::lookup`].
    ///
    /// # Errors
    /// As there.
    pub fn lookup(&self, keys: &[i64], step: u32, out: &mut [f32]) -> Result<(), Failed> {
        let (start, n, to, room) = (keys.as_ptr(), keys.len(), out.as_mut_ptr(), out.len());
        // SAFETY: the handle is open; both slices live until the call returns.
        Remote::call(|report| unsafe {
            (self.table.lookup)(self.handle, start, n, step, to, room, report)
        })
    }

    /// As [`Store::lookup_infer`].
    ///
    /// # Errors
    /// As there.
    pub fn lookup_infer(
        &self,
        keys: &[i64],
        out: &mut [f32],
        found: Option<&mut [u8]>,
    ) -> Result<(), Failed> {
        if let Some(found) = &found
            && found.len() != keys.len()
        {
            return Err(Failed {
                status: Status::Invalid,
                message: format!("{} keys, {} places for `found`", keys.len(), found.len()),
            });
        }
        let found = found.map_or(std::ptr::null_mut(), <[u8]>::as_mut_ptr);
        let (start, n, to, room) = (keys.as_ptr(), keys.len(), out.as_mut_ptr(), out.len());
        // SAFETY: as above; `found` is null or as long as `keys`.
        Remote::call(|report| unsafe {
            (self.table.lookup_infer)(self.handle, start, n, to, room, found, report)
        })
    }

    /// As [`Store::apply`].
    ///
    /// # Errors
    /// As there.
    pub fn apply(
        &self,
        keys: &[i64],
        gradients: &[f32],
        step: u32,
        lr: Option<f32>,
    ) -> Result<(), Failed> {
        let (start, n, from, length) = (
            keys.as_ptr(),
            keys.len(),
            gradients.as_ptr(),
            gradients.len(),
        );
        let lr = lr.unwrap_or(f32::NAN);
        // SAFETY: as above.
        Remote::call(|report| unsafe {
            (self.table.apply)(self.handle, start, n, from, length, step, lr, report)
        })
    }

    /// As [`Store::upsert`].
    ///
    /// # Errors
    /// As there.
    pub fn upsert(&self, keys: &[i64], values: &[f32], step: u32) -> Result<(), Failed> {
        let (start, n, from, length) = (keys.as_ptr(), keys.len(), values.as_ptr(), values.len());
        // SAFETY: as above.
        Remote::call(|report| unsafe {
            (self.table.upsert)(self.handle, start, n, from, length, step, report)
        })
    }

    /// As [`Store::remove`].
    pub fn remove(&self, keys: &[i64]) -> u64 {
        // SAFETY: as above.
        unsafe { (self.table.remove)(self.handle, keys.as_ptr(), keys.len()) }
    }

    /// As [`Store::clear`].
    ///
    /// # Errors
    /// As there.
    pub fn clear(&self) -> Result<(), Failed> {
        // SAFETY: as above.
        Remote::call(|report| unsafe { (self.table.clear)(self.handle, report) })
    }

    /// As [`Store::export`]: key, values, frequency, version of each row. `each` must not panic.
    ///
    /// # Errors
    /// A mistake in the store.
    pub fn export<F: FnMut(i64, &[f32], u32, u32)>(&self, each: F) -> Result<(), Failed> {
        struct Visitor<F> {
            each: F,
            dim: usize,
        }
        unsafe extern "C" fn visit<F: FnMut(i64, &[f32], u32, u32)>(
            context: *mut c_void,
            key: i64,
            values: *const f32,
            frequency: u32,
            version: u32,
        ) {
            // SAFETY: the context is the visitor below, which nobody else uses during the call.
            let visitor = unsafe { &mut *context.cast::<Visitor<F>>() };
            // SAFETY: the store gives `dim` values.
            let values = unsafe { std::slice::from_raw_parts(values, visitor.dim) };
            (visitor.each)(key, values, frequency, version);
        }
        let mut visitor = Visitor {
            each,
            dim: self.dim,
        };
        let context = (&raw mut visitor).cast();
        // SAFETY: the visitor lives until the call returns.
        Remote::call(|report| unsafe {
            (self.table.export)(self.handle, context, visit::<F>, report)
        })
    }

    /// As [`Store::intern`].
    ///
    /// # Errors
    /// As there.
    pub fn intern(
        &self,
        bytes: &[u8],
        offsets: &[u64],
        insert: bool,
        out: &mut [i64],
    ) -> Result<(), Failed> {
        if offsets.len() != out.len() + 1 {
            return Err(Failed {
                status: Status::Invalid,
                message: format!("{} strings, {} offsets", out.len(), offsets.len()),
            });
        }
        let (start, length, ends, n) = (bytes.as_ptr(), bytes.len(), offsets.as_ptr(), out.len());
        let to = out.as_mut_ptr();
        // SAFETY: as above.
        Remote::call(|report| unsafe {
            (self.table.intern)(
                self.handle,
                start,
                length,
                ends,
                n,
                i32::from(insert),
                to,
                report,
            )
        })
    }
}

/// Adds what it gets to a `Vec<u8>`.
unsafe extern "C" fn collect(context: *mut c_void, start: *const u8, length: usize) {
    // SAFETY: the context is the vector of `Remote::bytes`, which nobody else uses during the call.
    let out = unsafe { &mut *context.cast::<Vec<u8>>() };
    // SAFETY: the store gives `length` bytes.
    out.extend_from_slice(unsafe { read(start, length) });
}

impl Remote {
    fn bytes(
        &self,
        call: unsafe extern "C" fn(Handle, *mut c_void, Sink, *mut Report) -> i32,
    ) -> Result<Vec<u8>, Failed> {
        let mut out: Vec<u8> = Vec::new();
        let context = (&raw mut out).cast();
        // SAFETY: the handle is open, and the vector lives until the call returns.
        Remote::call(|report| unsafe { call(self.handle, context, collect, report) })?;
        Ok(out)
    }

    /// Frequencies and versions of keys; 0xFFFFFFFF in both for a key without a row.
    ///
    /// # Errors
    /// [`Status::Invalid`] where lengths differ.
    pub fn info(
        &self,
        keys: &[i64],
        frequencies: &mut [u32],
        versions: &mut [u32],
    ) -> Result<(), Failed> {
        let n = keys.len();
        if frequencies.len() != n || versions.len() != n {
            return Err(Failed {
                status: Status::Invalid,
                message: format!("{n} keys need {n} frequencies and {n} versions"),
            });
        }
        let (f, v) = (frequencies.as_mut_ptr(), versions.as_mut_ptr());
        // SAFETY: the handle is open; all slices are n long and live until the call returns.
        Remote::call(|report| unsafe {
            (self.table.info)(self.handle, keys.as_ptr(), n, f, v, report)
        })
    }

    /// As [`Store::evict`].
    ///
    /// # Errors
    /// As there.
    pub fn evict(&self, step: u32) -> Result<u64, Failed> {
        let mut gone = 0;
        // SAFETY: the handle is open.
        Remote::call(|report| unsafe { (self.table.evict)(self.handle, step, &mut gone, report) })?;
        Ok(gone)
    }

    /// The options, as JSON.
    ///
    /// # Errors
    /// A mistake in the store.
    pub fn options(&self) -> Result<String, Failed> {
        let bytes = self.bytes(self.table.options)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// [`Store::stats`], as JSON.
    ///
    /// # Errors
    /// A mistake in the store.
    pub fn stats(&self) -> Result<String, Failed> {
        let bytes = self.bytes(self.table.stats)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// As [`Store::set_optimizer`], of JSON: `{"kind": "adam", "lr": 0.001}`.
    ///
    /// # Errors
    /// As there.
    pub fn set_optimizer(&self, json: &str) -> Result<(), Failed> {
        // SAFETY: the handle is open; the string lives until the call returns.
        Remote::call(|report| unsafe {
            (self.table.set_optimizer)(self.handle, json.as_ptr(), json.len(), report)
        })
    }

    /// As [`Store::freeze`].
    pub fn freeze(&self, frozen: bool) {
        // SAFETY: the handle is open.
        unsafe { (self.table.freeze)(self.handle, i32::from(frozen)) }
    }

    /// What `call` says, with a path.
    ///
    /// # Errors
    /// As there.
    pub fn file(&self, call: FileCall, path: &str) -> Result<(), Failed> {
        // SAFETY: the handle is open; the string lives until the call returns.
        Remote::call(|report| unsafe {
            (self.table.file)(self.handle, call as u32, path.as_ptr(), path.len(), report)
        })
    }

    /// As [`Store::save_bytes`].
    ///
    /// # Errors
    /// As there.
    pub fn save_bytes(&self) -> Result<Vec<u8>, Failed> {
        self.bytes(self.table.save_bytes)
    }

    /// As [`Store::restore_bytes`].
    ///
    /// # Errors
    /// As there.
    pub fn restore_bytes(&self, bytes: &[u8]) -> Result<(), Failed> {
        // SAFETY: the handle is open; the bytes live until the call returns.
        Remote::call(|report| unsafe {
            (self.table.restore_bytes)(self.handle, bytes.as_ptr(), bytes.len(), report)
        })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and nobody uses it after.
        unsafe { (self.table.close)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_calls_the_store() {
        // SAFETY: the table is a static.
        let table = unsafe { Remote::bind(&TABLE) }.unwrap();
        assert_eq!(
            Remote::find(table, "abi/none").unwrap_err().status,
            Status::NotFound
        );
        let remote = Remote::open(
            table,
            "abi/a",
            r#"{"dim": 3, "optimizer": {"kind": "sgd", "lr": 0.5}, "init": {"kind": "zeros"}}"#,
        )
        .unwrap();
        let mut out = [9.0; 6];
        remote.lookup_infer(&[4, 5], &mut out, None).unwrap();
        assert_eq!((out, remote.len()), ([0.0; 6], 0));
        remote.lookup(&[4, 5], 1, &mut out).unwrap();
        remote
            .apply(&[4, 4], &[1.0, 2.0, 3.0, 1.0, 2.0, 3.0], 1, None)
            .unwrap();
        let mut found = [7; 3];
        let mut out = [9.0; 9];
        remote
            .lookup_infer(&[4, 6, 5], &mut out, Some(&mut found))
            .unwrap();
        assert_eq!(found, [1, 0, 1]);
        assert_eq!(out[..3], [-1.0, -2.0, -3.0]);
        let refused = remote.apply(&[4], &[f32::NAN; 3], 2, None).unwrap_err();
        assert_eq!(refused.status, Status::Invalid);
        assert!(refused.message.contains("key 4"), "{refused}");
        let mut rows = Vec::new();
        remote
            .export(|key, values, frequency, version| {
                rows.push((key, values.to_vec(), frequency, version));
            })
            .unwrap();
        rows.sort_by_key(|row| row.0);
        assert_eq!(rows[0], (4, vec![-1.0, -2.0, -3.0], 2, 1));
        let (mut f, mut v) = ([0; 2], [0; 2]);
        remote.info(&[4, -4], &mut f, &mut v).unwrap();
        assert_eq!((f, v), ([2, u32::MAX], [1, u32::MAX]));
        let bytes = remote.save_bytes().unwrap();
        let message = remote.restore_bytes(&bytes[..99]).unwrap_err();
        assert_eq!(message.status, Status::Corrupt);
        remote.restore_bytes(&bytes).unwrap();
        assert!(remote.options().unwrap().contains("\"dim\":3"));
        assert!(remote.stats().unwrap().contains("\"rows\":2"));
        remote
            .set_optimizer(r#"{"kind": "sgd", "lr": 0.25}"#)
            .unwrap();
        let refused = remote.set_optimizer(r#"{"kind": "adam"}"#).unwrap_err();
        assert!(refused.message.contains("adam"), "{refused}");
        remote.freeze(true);
        assert!(remote.upsert(&[1], &[0.0; 3], 1).is_err());
        remote.freeze(false);
        // Another handle is the same store.
        let again = Remote::find(table, "abi/a").unwrap();
        assert_eq!(again.remove(&[4, 99]), 1);
        assert_eq!(remote.len(), 1);
        remote.clear().unwrap();
        assert!(again.is_empty());
        registry::forget("abi/a");
    }

    #[test]
    fn another_table_is_refused() {
        let table = Table {
            version: VERSION + 1,
            ..TABLE_COPY
        };
        // SAFETY: it is refused before it is kept.
        let error = unsafe { Remote::bind(&table) }.unwrap_err();
        assert!(error.message.contains("one build"), "{error}");
        // SAFETY: null is allowed.
        assert!(unsafe { Remote::bind(std::ptr::null()) }.is_err());
    }

    const TABLE_COPY: Table = Table {
        version: VERSION,
        size: size_of::<Table>() as u32,
        open,
        close,
        len,
        lookup,
        lookup_infer,
        apply,
        upsert,
        remove,
        clear,
        export,
        intern,
        info,
        evict,
        options,
        stats,
        set_optimizer,
        freeze,
        file,
        save_bytes,
        restore_bytes,
    };
}
