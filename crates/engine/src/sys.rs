//! The system calls that neither std nor socket2 has, each behind a safe function where that is
//! possible. Raw memory is touched by [`receive`], [`send`], [`copy`] and [`publish`] alone.
//!
//! - `sockets`: bytes in and out, a socket's options, what the kernel knows of a connection.
//! - `epoll`: which sockets are ready, and what wakes a thread that waits for that.
//! - `publish`: copies into memory that others read meanwhile.
//! - `interfaces`: the machine's addresses, and when a link goes up or down.
//! - Here: memory, and what concerns a thread or the process.

#![allow(unsafe_code, reason = "this file is a boundary to the kernel")]

mod epoll;
mod interfaces;
mod publish;
mod sockets;

pub use self::epoll::{Epoll, Ready, Waker};
pub use self::interfaces::{Interface, LinkChange, LinkWatch, interfaces};
pub use self::publish::publish;
pub use self::sockets::{
    PIECES, TcpInfo, congestion, network_error, receive, send, set_congestion, set_errors_told,
    set_late_port, set_most_segment, set_paced, set_reset_on_close, set_unsent_low_water, tcp_info,
    unacknowledged,
};

use std::ffi::c_void;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::RawFd;
use std::time::Duration;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A piece of memory that the caller owns.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Its first byte.
    pub start: *mut u8,
    /// Its bytes.
    pub length: usize,
}

impl Memory {
    /// The part of it from `offset` on, at most `length` bytes; `None` outside.
    pub fn part(self, offset: u64, length: usize) -> Option<Memory> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(length)? > self.length {
            return None;
        }
        Some(Memory {
            start: self.start.wrapping_add(offset),
            length,
        })
    }

    /// All of it but the first `skip` bytes.
    pub fn from(self, skip: usize) -> Memory {
        let skip = skip.min(self.length);
        Memory {
            start: self.start.wrapping_add(skip),
            length: self.length - skip,
        }
    }

    /// The memory of a slice.
    pub fn of(bytes: &mut [u8]) -> Memory {
        Memory {
            start: bytes.as_mut_ptr(),
            length: bytes.len(),
        }
    }

    /// The memory of a slice that is only read.
    pub fn read_only(bytes: &[u8]) -> Memory {
        Memory {
            start: bytes.as_ptr().cast_mut(),
            length: bytes.len(),
        }
    }

    fn iov(self) -> libc::iovec {
        libc::iovec {
            iov_base: self.start.cast::<c_void>(),
            iov_len: self.length,
        }
    }
}

// SAFETY: an address and a length. Whoever reads or writes through it says why he may.
unsafe impl Send for Memory {}

/// Copies as many bytes as the shorter of the two has, in any order: not into a posted buffer, see
/// [`publish`].
///
/// # Safety
/// `from` may be read and `to` written; they do not overlap.
pub unsafe fn copy(from: Memory, to: Memory) {
    let length = from.length.min(to.length);
    if length > 0 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, length) };
    }
}

/// Processor time that the calling thread has used: its own, and the kernel's for it.
pub fn processor_time() -> [Duration; 2] {
    // SAFETY: a structure of zeros is valid, and the call fills it. Where it fails it stays zero.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    [usage.ru_utime, usage.ru_stime].map(|time| {
        Duration::from_secs(time.tv_sec.unsigned_abs())
            + Duration::from_micros(time.tv_usec.unsigned_abs())
    })
}

/// Sleeps for so long, whatever happens meanwhile.
pub fn nap(time: Duration) {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::c_long::from(time.subsec_nanos()),
    };
    // SAFETY: `time` lives through the call. Where a signal ends it early, nothing is lost.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

/// Has this thread's short sleeps end when they should, and not up to 50 us later.
pub fn set_exact_timers() {
    // SAFETY: no memory is passed. Where it fails, naps are longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) };
}

/// Processors that this thread may run on.
pub fn processors() -> usize {
    // SAFETY: a set of zeros is valid; the call writes at most its size.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        let size = size_of::<libc::cpu_set_t>();
        if libc::sched_getaffinity(0, size, &raw mut set) != 0 {
            return 1;
        }
        usize::try_from(libc::CPU_COUNT(&set)).unwrap_or(1).max(1)
    }
}

/// Blocks every signal in the calling thread: the application's handlers run in its own threads,
/// and a peer that goes away raises no SIGPIPE here.
pub fn block_signals() {
    // SAFETY: a signal set is filled and passed; nothing is kept.
    unsafe {
        let mut set: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// Calls `child` in the child of every later fork of this process.
pub fn at_fork(child: extern "C" fn()) {
    // SAFETY: `child` lives as long as the library, which is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(child)) };
}

/// Closes descriptors by number: for the child of a fork only, which shares them with its parent
/// and must not keep the parent's connections open.
pub fn close_in_child(fds: impl Iterator<Item = RawFd>) {
    for fd in fds {
        // SAFETY: the child's copy of a descriptor that only the parent's threads used.
        unsafe { libc::close(fd) };
    }
}
