//! Log lines go to NCCL's logger, which is C-variadic: the text is always an argument of "%s".

use std::ffi::{CString, c_int, c_ulong};
use std::sync::atomic::{AtomicUsize, Ordering};

use evener_engine::Level;

use evener_nccl_abi::Logger;

static LOGGER: AtomicUsize = AtomicUsize::new(0);

const WARN: c_int = 2;
const INFO: c_int = 3;
const TRACE: c_int = 5;
/// NCCL_INIT | NCCL_NET.
const SUBSYSTEMS: c_ulong = 1 | 16;

/// Takes a logger; the last one is used.
pub fn set(logger: Logger) {
    if let Some(logger) = logger {
        LOGGER.store(logger as usize, Ordering::Release);
    }
}

/// Says something.
pub fn say(level: Level, text: &str) {
    let address = LOGGER.load(Ordering::Acquire);
    if address == 0 {
        return;
    }
    // SAFETY: only `set` writes the address, from a function of this type; None is 0.
    #[allow(unsafe_code, reason = "a function pointer that was stored as a number")]
    let logger: Logger = unsafe { std::mem::transmute::<usize, Logger>(address) };
    let level = match level {
        Level::Error | Level::Warn => WARN,
        Level::Info => INFO,
        Level::Debug => TRACE,
    };
    let line = format!("NET/Evener : {text}").replace('\0', " ");
    if let (Some(logger), Ok(line)) = (logger, CString::new(line)) {
        // SAFETY: NCCL's logger; all strings end with a zero and live through the call.
        #[allow(unsafe_code, reason = "a call into NCCL")]
        unsafe {
            logger(
                level,
                SUBSYSTEMS,
                c"evener".as_ptr(),
                c_int::try_from(line!()).unwrap_or(0),
                c"%s".as_ptr(),
                line.as_ptr(),
            );
        }
    }
}
