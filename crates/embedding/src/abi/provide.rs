//! The functions of the table: what a call from another shared object does here. Each catches panics,
//! and reports what went wrong in words.

use super::{Handle, Report, Sink, Status, Table, VERSION, Visit, read, write};
use crate::error::Error;
use crate::options::Options;
use crate::registry;
use crate::store::Store;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// The table of the functions here.
pub(super) const fn own() -> Table {
    Table {
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
    }
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

/// Gives the bytes that a call makes to a sink.
///
/// # Safety
/// A handle that `open` gave and that was not closed; `sink` takes `context`.
unsafe fn pour(
    handle: Handle,
    context: *mut c_void,
    sink: Sink,
    report: *mut Report,
    make: impl FnOnce(&Store) -> crate::Result<Vec<u8>>,
) -> i32 {
    // SAFETY: promised by the caller; the bytes live until the sink returns.
    unsafe {
        guarded(report, || {
            let bytes = make(store(handle))?;
            sink(context, bytes.as_ptr(), bytes.len());
            Ok(())
        })
    }
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
            })
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
            for (i, meta) in store(handle).meta(read(keys, n))?.into_iter().enumerate() {
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
        pour(handle, context, sink, report, |store| {
            Ok(store.options().to_json().into_bytes())
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
        pour(handle, context, sink, report, |store| {
            Ok(serde_json::to_vec(&store.stats()).unwrap_or_default())
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
    unsafe { pour(handle, context, sink, report, Store::save_bytes) }
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
