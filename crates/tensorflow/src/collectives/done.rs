//! The callback by which an asynchronous kernel says that it has ended.
//!
//! TensorFlow's C API hands a kernel the address of a `std::function` that lives only while the kernel
//! is being called (tensorflow/c/kernels.cc, CAsyncOpKernel::ComputeAsync), although the kernel ends
//! later. So its content is moved out, as C++ would move it. That is four words in the library with
//! which TensorFlow's wheels are built, libstdc++ (bits/std_function.h): two of data, which may be
//! copied to another place as they are, a manager, which destroys them, and an invoker. Where the words
//! are not so, nothing is moved, and the kernel waits inside the call.

use crate::capi::{AsyncDone, api};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `__destroy_functor` of libstdc++'s `_Manager_operation`.
const DESTROY: c_int = 3;

type Manager = unsafe extern "C" fn(*mut c_void, *const c_void, c_int) -> bool;

/// A callback that is ours, and is called once.
pub struct Done([usize; 4]);

// SAFETY: TensorFlow's callbacks are called on any thread.
unsafe impl Send for Done {}

impl Done {
    /// Moves it out of TensorFlow's hands. None where it is of a kind that is not known; then it is
    /// left as it was.
    ///
    /// # Safety
    /// `done` is what TensorFlow gave to the kernel that is being called.
    pub unsafe fn take(done: *mut AsyncDone) -> Option<Self> {
        let words = done.cast::<[usize; 4]>();
        // SAFETY: a std::function of either known C++ library has at least 32 bytes.
        let found = unsafe { words.read() };
        if !is_code(found[2]) || !is_code(found[3]) {
            return None;
        }
        // SAFETY: as above. Without a manager it is empty, and its destructor does nothing.
        unsafe { (*words)[2] = 0 };
        Some(Self(found))
    }

    /// Tells TensorFlow. The kernel's context is gone after it.
    pub fn run(mut self) {
        let function = (&raw mut self.0).cast::<c_void>();
        // SAFETY: the words are a std::function, and `take` has checked that the manager is code. It
        // is called once and destroyed once.
        unsafe {
            (api().TF_RunAsyncOpKernelDoneCallback)(function.cast());
            let manager = std::mem::transmute::<usize, Manager>(self.0[2]);
            manager(function, function, DESTROY);
        }
    }
}

/// Addresses that were found to be code. To ask is slow in a library of TensorFlow's size, and there
/// are few: two for each kind of callback.
static KNOWN: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

/// Whether `address` is in a library of this process, as a function's is.
fn is_code(address: usize) -> bool {
    if address == 0 {
        return false;
    }
    if KNOWN
        .iter()
        .any(|one| one.load(Ordering::Relaxed) == address)
    {
        return true;
    }
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address may be asked for; the struct is written where the answer is not 0.
    let found = unsafe { libc::dladdr(address as *const c_void, info.as_mut_ptr()) != 0 };
    if found {
        let free = |one: &&AtomicUsize| {
            one.compare_exchange(0, address, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let _ = KNOWN.iter().find(free);
    }
    found
}
