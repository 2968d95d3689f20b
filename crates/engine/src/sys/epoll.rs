//! Which descriptors are ready, and what wakes a thread that waits for that.
//!
//! Why plain epoll: a worker owns a handful of sockets and moves hundreds of kilobytes a call, so
//! the cost is the copy and not the call; edge-triggered epoll needs no further call while a
//! connection is busy. mio and polling would hide exactly the flags that are used here.

#![allow(unsafe_code, reason = "this file is a boundary to the kernel")]

use super::check;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// What epoll says of one descriptor.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    /// What it was added with.
    pub token: u64,
    /// There is something to read, or the end.
    pub readable: bool,
    /// There is room.
    pub writable: bool,
    /// The other side is done, or the connection is broken.
    pub hung_up: bool,
}

/// An epoll instance.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// A new one.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: no memory is passed; the descriptor is new and ours.
        unsafe {
            let fd = check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            Ok(Epoll(OwnedFd::from_raw_fd(fd)))
        }
    }

    fn add_with(&self, fd: RawFd, token: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: `event` lives through the call.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event)
        })?;
        Ok(())
    }

    /// Tells of every change of a socket, once.
    pub fn add_edge(&self, fd: RawFd, token: u64) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.add_with(fd, token, events)
    }

    /// Tells of it no longer.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        // SAFETY: no memory is passed.
        check(unsafe {
            libc::epoll_ctl(
                self.0.as_raw_fd(),
                libc::EPOLL_CTL_DEL,
                fd,
                std::ptr::null_mut(),
            )
        })?;
        Ok(())
    }

    /// Tells that there is something to read for as long as there is.
    pub fn add_readable(&self, fd: RawFd, token: u64) -> io::Result<()> {
        self.add_with(fd, token, libc::EPOLLIN)
    }

    /// As [`Epoll::wait`], but not rounded up to milliseconds where the kernel (5.11) can.
    pub fn wait_exactly(&self, ready: &mut Vec<Ready>, timeout: Duration) -> io::Result<()> {
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
        };
        // SAFETY: no event is taken (the one that there is room for is thrown away, and is still there
        // for `wait`); `event` and `time` live through the call; no signals are masked.
        let done = unsafe {
            let mut event = libc::epoll_event { events: 0, u64: 0 };
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.0.as_raw_fd(),
                &raw mut event,
                1,
                &raw const time,
                std::ptr::null::<libc::sigset_t>(),
                0,
            )
        };
        if done < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
            return self.wait(ready, Some(timeout));
        }
        self.wait(ready, Some(Duration::ZERO))
    }

    /// Waits for at most `timeout` (`None`: for ever) and replaces `ready` with what is.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        const MANY: usize = 64;
        let milliseconds = match timeout {
            None => -1,
            // Rounded up, so that a wait never ends before its deadline and spins.
            Some(time) => i32::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX),
        };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MANY];
        // SAFETY: `events` has room for MANY.
        let got = check(unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                MANY as libc::c_int,
                milliseconds,
            )
        });
        ready.clear();
        let count = match got {
            Ok(count) => count as usize,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        ready.extend(events[..count].iter().map(|event| {
            let bits = event.events as libc::c_int;
            let hung_up = bits & (libc::EPOLLRDHUP | libc::EPOLLHUP) != 0;
            Ready {
                token: event.u64,
                readable: bits & libc::EPOLLIN != 0 || hung_up,
                writable: bits & libc::EPOLLOUT != 0,
                hung_up,
            }
        }));
        Ok(())
    }
}

/// Wakes a thread that sleeps in epoll.
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// A new one.
    pub fn new() -> io::Result<Waker> {
        // SAFETY: no memory is passed; the descriptor is new and ours.
        unsafe {
            let fd = check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?;
            Ok(Waker(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from `one`. A full counter is as good as a write.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it unreadable again.
    pub fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes are written to `count`.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// For epoll.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
