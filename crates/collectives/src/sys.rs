//! Waiting for two sockets at once, which the standard library lacks.

#![allow(unsafe_code, reason = "this file is the boundary to the kernel")]

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Waits until `write` can be written or `read` can be read, for `millis` at most.
///
/// # Errors
/// The kernel's.
pub fn wait(write: Option<&TcpStream>, read: Option<&TcpStream>, millis: i32) -> io::Result<()> {
    let want = |stream: Option<&TcpStream>, events| libc::pollfd {
        fd: stream.map_or(-1, AsRawFd::as_raw_fd),
        events,
        revents: 0,
    };
    let mut fds = [want(write, libc::POLLOUT), want(read, libc::POLLIN)];
    // Safety: the pointer and the count are of one live array; a negative descriptor is skipped.
    let found = unsafe { libc::poll(fds.as_mut_ptr(), 2, millis) };
    if found < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}
