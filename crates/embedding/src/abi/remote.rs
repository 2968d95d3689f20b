//! A store in another shared object, through its table.

use super::{FileCall, Handle, Report, Sink, Status, Table, VERSION, read};
use std::ffi::c_void;

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
    use crate::abi::{TABLE, provide};
    use crate::registry;

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
            ..provide::own()
        };
        // SAFETY: it is refused before it is kept.
        let error = unsafe { Remote::bind(&table) }.unwrap_err();
        assert!(error.message.contains("one build"), "{error}");
        // SAFETY: null is allowed.
        assert!(unsafe { Remote::bind(std::ptr::null()) }.is_err());
    }
}
