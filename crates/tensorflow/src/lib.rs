//! `libevener-tensorflow.so`: Evener's embedding store and Horovod's collectives as TensorFlow ops,
//! for `tf.load_op_library`.
//!
//! Everything goes through TensorFlow's C API, whose functions are found in the process when the
//! library is loaded, so that one binary serves TensorFlow 2.16 and all later releases and is built
//! without TensorFlow. The C API registers ops and kernels; it has no ResourceMgr, so stores live in
//! a registry of their own and ops name them ([`stores`]).
//!
//! `tf.load_op_library` makes Python functions of the ops that appear while it loads a library.
//! Nothing may load this one before it does: no other library of Evener is linked with it.
//!
//! Design: [`capi`] is TensorFlow's functions, [`kernel`] turns a Rust type into an op, [`ops`] are
//! the ops of embeddings, [`collectives`] those of Horovod, which run beside the graph.

#![allow(
    unsafe_code,
    reason = "TensorFlow's C API is pointers; capi.rs, kernel.rs, stores.rs and collectives say why each holds"
)]

mod aside;
mod capi;
mod collectives;
mod kernel;
mod ops;
mod stores;

use evener_embedding::abi::{Remote, Table};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// What went wrong while the library was loaded: a constructor can tell nobody.
static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();

/// The loader calls it, inside `dlopen`: TensorFlow collects the ops that are registered then.
extern "C" fn load() {
    OUTCOME.get_or_init(|| {
        std::panic::catch_unwind(register).unwrap_or_else(|_| Err("a panic in Evener".to_owned()))
    });
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

fn register() -> Result<(), String> {
    capi::find().map_err(|name| {
        format!("TensorFlow's function {name} is not in this process: load TensorFlow 2.16 or newer first")
    })?;
    ops::register_all()?;
    collectives::register()
}

/// 0 if the ops are registered; else the length of the reason, of which up to `room` bytes are
/// written to `reason`, without a zero at the end.
///
/// # Safety
/// `reason` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evener_tensorflow_problem(reason: *mut c_char, room: usize) -> usize {
    match OUTCOME.get() {
        Some(Ok(())) => 0,
        outcome => {
            let words = match outcome {
                Some(Err(words)) => words.as_str(),
                _ => "its constructor did not run",
            };
            if !reason.is_null() {
                let length = words.len().min(room);
                // SAFETY: promised by the caller; the two do not overlap.
                unsafe { words.as_ptr().cast::<c_char>().copy_to(reason, length) };
            }
            words.len()
        }
    }
}

/// Uses the stores of another library of this process (`evener._native`) from now on. 0, or -1 where
/// the table is not of this version.
///
/// # Safety
/// `table` is null or the table of a library that stays loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evener_tensorflow_bind(table: *const Table) -> c_int {
    // SAFETY: promised by the caller.
    match unsafe { Remote::bind(table) } {
        Ok(table) => {
            stores::bind(table);
            0
        }
        Err(_) => -1,
    }
}

/// The store of this name was closed or made anew: kernels look it up again, and what is known of
/// its steps is forgotten. A null name stands for all.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evener_tensorflow_forget(name: *const c_char) {
    let name = if name.is_null() {
        None
    } else {
        // SAFETY: promised by the caller.
        unsafe { CStr::from_ptr(name) }.to_str().ok()
    };
    stores::forget(name);
}
