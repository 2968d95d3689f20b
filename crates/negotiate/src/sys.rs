//! Calls of the kernel that the standard library lacks.

#![allow(unsafe_code, reason = "this file is the boundary to the kernel")]

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Which of the streams can be read without waiting (or have ended), as bits; `millis`: how long to
/// wait for one, -1: for ever.
///
/// # Errors
/// The kernel's.
pub fn readable(streams: &[&TcpStream], millis: i32) -> io::Result<Vec<bool>> {
    let mut fds: Vec<libc::pollfd> = streams
        .iter()
        .map(|stream| libc::pollfd {
            fd: stream.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // Safety: the pointer and the count are of one live vector.
    let found = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
    if found < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(fds.iter().map(|fd| fd.revents != 0).collect())
}

/// Reads what is there; None where nothing is. 0 bytes: the peer has closed.
///
/// # Errors
/// The kernel's.
pub fn receive(stream: &TcpStream, into: &mut [u8]) -> io::Result<Option<usize>> {
    // Safety: the pointer and the length are of one live slice.
    let got = unsafe {
        libc::recv(
            stream.as_raw_fd(),
            into.as_mut_ptr().cast(),
            into.len(),
            libc::MSG_DONTWAIT,
        )
    };
    if got >= 0 {
        return Ok(Some(got as usize));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

/// Sleeps while `word`, which processes share, is `expected`: until [`wake`] or for `limit`, and now
/// and then for no reason.
pub fn sleep_while(word: &AtomicU32, expected: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    // Safety: the word and the time live through the call. Whatever it answers, the caller looks anew.
    unsafe {
        let (word, limit) = (word.as_ptr(), &raw const limit);
        libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, limit)
    };
}

/// Wakes all that [`sleep_while`] holds.
pub fn wake(word: &AtomicU32) {
    // Safety: the word lives through the call, which does not touch it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
