//! Drives an NCCL net plug-in as NCCL's threads do, without NCCL and without a GPU.
//!
//! [`Plugin`] loads a library and speaks any version of the interface; [`bench`] measures with it.

#![allow(unsafe_code, reason = "calls through C tables that a library gave")]

pub mod bench;
mod net;
mod ring;
mod scenario;
mod stream;
mod team;
mod until;
mod watch;

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::path::Path;
use std::ptr::{null_mut, without_provenance_mut};

use evener_nccl_abi as abi;
use libloading::Library;

/// Why a plug-in cannot be driven.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The library cannot be loaded, or lacks the table.
    #[error("{path}: {source}")]
    Load {
        /// Which library.
        path: String,
        /// What the loader says.
        source: libloading::Error,
    },
    /// A version that this crate does not know.
    #[error("the interface has no version {0}: 6 to 12")]
    Version(u32),
    /// A call failed.
    #[error("{call} returned {code}")]
    Call {
        /// Which call.
        call: &'static str,
        /// NCCL's code.
        code: c_int,
    },
    /// The other side, or the way to it.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// What was received is not what was sent.
    #[error("message {0} is not what was sent")]
    Content(u64),
    /// Nothing happened for too long.
    #[error("nothing happened for {0} s")]
    Stalled(u64),
}

enum Table {
    V6(&'static abi::TableV6),
    V7(&'static abi::TableV7),
    V8(&'static abi::TableV8),
    V9(&'static abi::TableV9),
    V10(&'static abi::TableV10),
    V11(&'static abi::TableV11),
    V12(&'static abi::TableV12),
}

macro_rules! each {
    ($table:expr, $t:ident => $body:expr) => {
        match $table {
            Table::V6($t) => $body,
            Table::V7($t) => $body,
            Table::V8($t) => $body,
            Table::V9($t) => $body,
            Table::V10($t) => $body,
            Table::V11($t) => $body,
            Table::V12($t) => $body,
        }
    };
}

/// A pointer that the plug-in gave; it may be given back to it by any thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object(pub *mut c_void);

// SAFETY: NCCL passes these between its threads, so a plug-in must take them from any.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

/// Nothing.
pub const NULL: Object = Object(null_mut());

/// The fields of a device's properties that NCCL steers by.
#[derive(Debug, Clone, PartialEq)]
pub struct Properties {
    /// The device's name.
    pub name: String,
    /// Mb/s.
    pub speed: i32,
    /// Buffers of one receive.
    pub max_recvs: i32,
    /// Kinds of memory.
    pub ptr_support: i32,
}

/// A loaded plug-in.
pub struct Plugin {
    table: Table,
    /// Version of the interface.
    pub version: u32,
    context: Object,
    _library: Library,
}

/// NCCL's logger is variadic; Rust cannot define such a function, but on the platforms that NCCL
/// runs on a call with one string after the format reaches one that takes six arguments.
unsafe extern "C" fn logger(
    level: c_int,
    _subsystems: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: strings that end with a zero.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s", "NCCL would read the text as a format");
    let most = if std::env::var_os("EVENER_DRIVE_LOG").is_some() {
        5
    } else {
        1
    };
    if level <= most {
        eprintln!("{}", text.to_string_lossy());
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), DriveError> {
    if code == abi::SUCCESS {
        Ok(())
    } else {
        Err(DriveError::Call { call, code })
    }
}

impl Plugin {
    /// Loads a library and takes the table of a version of the interface.
    ///
    /// # Errors
    /// [`DriveError::Load`], [`DriveError::Version`].
    pub fn load(path: &Path, version: u32) -> Result<Plugin, DriveError> {
        let load = |source| DriveError::Load {
            path: path.display().to_string(),
            source,
        };
        // SAFETY: a plug-in's initialisers are as trustworthy as NCCL's would find them.
        let library = unsafe { Library::new(path) }.map_err(load)?;
        let symbol = format!("ncclNetPlugin_v{version}\0");
        macro_rules! table {
            ($variant:ident, $type:ty) => {
                // SAFETY: the symbol's name says its type; the library is never unloaded while
                // the reference lives, because it is kept beside it.
                Table::$variant(unsafe {
                    &**library
                        .get::<*const $type>(symbol.as_bytes())
                        .map_err(load)?
                })
            };
        }
        let table = match version {
            6 => table!(V6, abi::TableV6),
            7 => table!(V7, abi::TableV7),
            8 => table!(V8, abi::TableV8),
            9 => table!(V9, abi::TableV9),
            10 => table!(V10, abi::TableV10),
            11 => table!(V11, abi::TableV11),
            12 => table!(V12, abi::TableV12),
            other => return Err(DriveError::Version(other)),
        };
        Ok(Plugin {
            table,
            version,
            context: NULL,
            _library: library,
        })
    }

    /// The `name` of the table.
    pub fn name(&self) -> String {
        let name = each!(&self.table, t => t.name);
        // SAFETY: a table's name ends with a zero and lives as long as the library.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    /// Begins: NCCL's `init`.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn init(&mut self) -> Result<(), DriveError> {
        // SAFETY: see `logger`; the two types differ in the dots only.
        let log: abi::Logger =
            unsafe { std::mem::transmute::<*const (), abi::Logger>(logger as *const ()) };
        let mut context = null_mut();
        // SAFETY: a call as NCCL makes it.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => call1(t.init, log),
                Table::V7(t) => call1(t.init, log),
                Table::V8(t) => call1(t.init, log),
                Table::V9(t) => call1(t.init, log),
                Table::V10(t) => t.init.map_or(MISSING, |f| f(log, null_mut())),
                Table::V11(t) => t.init.map_or(MISSING, |f| {
                    f(&raw mut context, 7, null_mut(), log, null_mut())
                }),
                Table::V12(t) => t.init.map_or(MISSING, |f| {
                    f(&raw mut context, 7, null_mut(), log, null_mut())
                }),
            }
        };
        self.context = Object(context);
        check("init", code)
    }

    /// Ends: NCCL's `finalize`, where the version has it.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn finalize(&mut self) -> Result<(), DriveError> {
        let context = std::mem::replace(&mut self.context, NULL);
        self.finalize_with(context)
    }

    /// `finalize` with a context of the caller's.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn finalize_with(&self, context: Object) -> Result<(), DriveError> {
        // SAFETY: a call as NCCL makes it.
        let code = unsafe {
            match &self.table {
                Table::V11(t) => t.finalize.map_or(MISSING, |f| f(context.0)),
                Table::V12(t) => t.finalize.map_or(MISSING, |f| f(context.0)),
                _ => abi::SUCCESS,
            }
        };
        check("finalize", code)
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn devices(&self) -> Result<i32, DriveError> {
        let mut count = -1;
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe {
            t.devices.map_or(MISSING, |f| f(&raw mut count))
        });
        check("devices", code)?;
        Ok(count)
    }

    /// A device's properties.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn properties(&self, device: i32) -> Result<Properties, DriveError> {
        // SAFETY: properties are plain data, for which zeros are a value; calls as NCCL makes them.
        each!(&self.table, t => unsafe {
            let get = t.get_properties.ok_or(DriveError::Call { call: "getProperties", code: MISSING })?;
            let mut properties = std::mem::zeroed();
            check("getProperties", get(device, &raw mut properties))?;
            Ok(Properties {
                name: CStr::from_ptr(properties.name).to_string_lossy().into_owned(),
                speed: properties.speed,
                max_recvs: properties.max_recvs,
                ptr_support: properties.ptr_support,
            })
        })
    }

    /// A listener, and its handle.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn listen(&self, device: i32) -> Result<(Object, [u8; 128]), DriveError> {
        let (mut handle, mut to) = ([0u8; 128], null_mut());
        let at = handle.as_mut_ptr().cast();
        let (ctx, out) = (self.context.0, &raw mut to);
        // SAFETY: calls as NCCL makes them.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t.listen.map_or(MISSING, |f| f(device, at, out)),
                Table::V7(t) => t.listen.map_or(MISSING, |f| f(device, at, out)),
                Table::V8(t) => t.listen.map_or(MISSING, |f| f(device, at, out)),
                Table::V9(t) => t.listen.map_or(MISSING, |f| f(device, at, out)),
                Table::V10(t) => t.listen.map_or(MISSING, |f| f(device, at, out)),
                Table::V11(t) => t.listen.map_or(MISSING, |f| f(ctx, device, at, out)),
                Table::V12(t) => t.listen.map_or(MISSING, |f| f(ctx, device, at, out)),
            }
        };
        check("listen", code)?;
        Ok((Object(to), handle))
    }

    /// A sending comm; `None`: call again with the same handle.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn connect(
        &self,
        device: i32,
        handle: &mut [u8; 128],
    ) -> Result<Option<Object>, DriveError> {
        let (mut to, mut extra) = (null_mut(), null_mut());
        let at = handle.as_mut_ptr().cast();
        let (ctx, out, more) = (self.context.0, &raw mut to, &raw mut extra);
        // SAFETY: calls as NCCL makes them.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t.connect.map_or(MISSING, |f| f(device, at, out)),
                Table::V7(t) => t.connect.map_or(MISSING, |f| f(device, at, out, more)),
                Table::V8(t) => t.connect.map_or(MISSING, |f| f(device, at, out, more)),
                Table::V9(t) => t.connect.map_or(MISSING, |f| f(device, at, out, more)),
                Table::V10(t) => t
                    .connect
                    .map_or(MISSING, |f| f(device, null_mut(), at, out, more)),
                Table::V11(t) => t.connect.map_or(MISSING, |f| f(ctx, device, at, out, more)),
                Table::V12(t) => t.connect.map_or(MISSING, |f| f(ctx, device, at, out, more)),
            }
        };
        check("connect", code)?;
        Ok((!to.is_null()).then_some(Object(to)))
    }

    /// A receiving comm; `None`: call again.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn accept(&self, listener: Object) -> Result<Option<Object>, DriveError> {
        let (mut to, mut extra) = (null_mut(), null_mut());
        let (out, more) = (&raw mut to, &raw mut extra);
        // SAFETY: calls as NCCL makes them.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t.accept.map_or(MISSING, |f| f(listener.0, out)),
                Table::V7(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
                Table::V8(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
                Table::V9(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
                Table::V10(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
                Table::V11(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
                Table::V12(t) => t.accept.map_or(MISSING, |f| f(listener.0, out, more)),
            }
        };
        check("accept", code)?;
        Ok((!to.is_null()).then_some(Object(to)))
    }

    /// Registers memory of a kind (1: the host's).
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn register(
        &self,
        comm: Object,
        start: *mut u8,
        length: usize,
        kind: i32,
    ) -> Result<Object, DriveError> {
        let mut to = null_mut();
        let (data, out) = (start.cast(), &raw mut to);
        let short = c_int::try_from(length).unwrap_or(c_int::MAX);
        // SAFETY: calls as NCCL makes them.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, short, kind, out)),
                Table::V7(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, short, kind, out)),
                Table::V8(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, length, kind, out)),
                Table::V9(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, length, kind, out)),
                Table::V10(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, length, kind, out)),
                Table::V11(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, length, kind, out)),
                Table::V12(t) => t
                    .reg_mr
                    .map_or(MISSING, |f| f(comm.0, data, length, kind, out)),
            }
        };
        check("regMr", code)?;
        Ok(Object(to))
    }

    /// Takes a registration back.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn deregister(&self, comm: Object, registration: Object) -> Result<(), DriveError> {
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe {
            t.dereg_mr.map_or(MISSING, |f| f(comm.0, registration.0))
        });
        check("deregMr", code)
    }

    /// Posts a send; `None`: try again.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    ///
    /// # Safety
    /// The memory stays as it is until the request is done or the comm closed.
    pub unsafe fn isend(
        &self,
        comm: Object,
        start: *mut u8,
        length: usize,
        registration: Object,
    ) -> Result<Option<Object>, DriveError> {
        let mut to = null_mut();
        let (c, data, mh, out) = (comm.0, start.cast(), registration.0, &raw mut to);
        let short = c_int::try_from(length).unwrap_or(c_int::MAX);
        // SAFETY: promised by the caller.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t.isend.map_or(MISSING, |f| f(c, data, short, 0, mh, out)),
                Table::V7(t) => t.isend.map_or(MISSING, |f| f(c, data, short, 0, mh, out)),
                Table::V8(t) => t.isend.map_or(MISSING, |f| f(c, data, short, 0, mh, out)),
                Table::V9(t) => t.isend.map_or(MISSING, |f| f(c, data, length, 0, mh, out)),
                Table::V10(t) => t
                    .isend
                    .map_or(MISSING, |f| f(c, data, length, 0, mh, null_mut(), out)),
                Table::V11(t) => t
                    .isend
                    .map_or(MISSING, |f| f(c, data, length, 0, mh, null_mut(), out)),
                Table::V12(t) => t
                    .isend
                    .map_or(MISSING, |f| f(c, data, length, 0, mh, null_mut(), out)),
            }
        };
        check("isend", code)?;
        Ok((!to.is_null()).then_some(Object(to)))
    }

    /// Posts a receive of one buffer; `None`: try again. The request comes in as (void*)1, as NCCL's
    /// does for LL and LL128.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    ///
    /// # Safety
    /// Nobody else uses the memory until the request is done or the comm closed.
    pub unsafe fn irecv(
        &self,
        comm: Object,
        start: *mut u8,
        length: usize,
        registration: Object,
    ) -> Result<Option<Object>, DriveError> {
        let mut to = without_provenance_mut(1);
        let (mut data, mut mh) = (start.cast::<c_void>(), registration.0);
        let (mut long, mut tag) = (length, 0);
        let mut short = c_int::try_from(length).unwrap_or(c_int::MAX);
        let (c, d, m) = (comm.0, &raw mut data, &raw mut mh);
        let (l, s, g, out) = (&raw mut long, &raw mut short, &raw mut tag, &raw mut to);
        // SAFETY: promised by the caller.
        let code = unsafe {
            match &self.table {
                Table::V6(t) => t.irecv.map_or(MISSING, |f| f(c, 1, d, s, g, m, out)),
                Table::V7(t) => t.irecv.map_or(MISSING, |f| f(c, 1, d, s, g, m, out)),
                Table::V8(t) => t.irecv.map_or(MISSING, |f| f(c, 1, d, s, g, m, out)),
                Table::V9(t) => t.irecv.map_or(MISSING, |f| f(c, 1, d, l, g, m, out)),
                Table::V10(t) => t
                    .irecv
                    .map_or(MISSING, |f| f(c, 1, d, l, g, m, null_mut(), out)),
                Table::V11(t) => t
                    .irecv
                    .map_or(MISSING, |f| f(c, 1, d, l, g, m, null_mut(), out)),
                Table::V12(t) => t
                    .irecv
                    .map_or(MISSING, |f| f(c, 1, d, l, g, m, null_mut(), out)),
            }
        };
        check("irecv", code)?;
        Ok((!to.is_null()).then_some(Object(to)))
    }

    /// Flushes a receive: `None` counts as done.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn iflush(&self, comm: Object) -> Result<Option<Object>, DriveError> {
        let mut to = without_provenance_mut(1);
        let (mut data, mut size, mut mh) = (null_mut(), 0, null_mut());
        let (d, s, m, out) = (&raw mut data, &raw mut size, &raw mut mh, &raw mut to);
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe {
            t.iflush.map_or(MISSING, |f| f(comm.0, 1, d, s, m, out))
        });
        check("iflush", code)?;
        Ok((!to.is_null()).then_some(Object(to)))
    }

    /// Whether a request is done: the bytes it moved. `sizes`: whether to ask for them.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn test(&self, request: Object, sizes: bool) -> Result<Option<usize>, DriveError> {
        let (mut done, mut size) = (0, 0);
        let at = if sizes { &raw mut size } else { null_mut() };
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe {
            t.test.map_or(MISSING, |f| f(request.0, &raw mut done, at))
        });
        check("test", code)?;
        Ok((done != 0).then_some(usize::try_from(size).unwrap_or(0)))
    }

    /// Closes a sending comm.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn close_send(&self, comm: Object) -> Result<(), DriveError> {
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe { t.close_send.map_or(MISSING, |f| f(comm.0)) });
        check("closeSend", code)
    }

    /// Closes a receiving comm.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn close_recv(&self, comm: Object) -> Result<(), DriveError> {
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe { t.close_recv.map_or(MISSING, |f| f(comm.0)) });
        check("closeRecv", code)
    }

    /// Closes a listener.
    ///
    /// # Errors
    /// [`DriveError::Call`].
    pub fn close_listen(&self, listener: Object) -> Result<(), DriveError> {
        // SAFETY: a call as NCCL makes it.
        let code = each!(&self.table, t => unsafe {
            t.close_listen.map_or(MISSING, |f| f(listener.0))
        });
        check("closeListen", code)
    }
}

/// What a call of an absent function counts as.
const MISSING: c_int = abi::INTERNAL_ERROR;

unsafe fn call1(
    function: Option<unsafe extern "C" fn(abi::Logger) -> c_int>,
    log: abi::Logger,
) -> c_int {
    // SAFETY: promised by the caller.
    function.map_or(MISSING, |f| unsafe { f(log) })
}
