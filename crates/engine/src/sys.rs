//! The system calls that neither std nor socket2 has, each behind a safe function where that is
//! possible. The only file of the engine with unsafe code; raw memory is touched by [`receive`],
//! [`send`] and [`copy`] alone.
//!
//! Why plain epoll: a worker owns a handful of sockets and moves hundreds of kilobytes a call, so
//! the cost is the copy and not the call; edge-triggered epoll needs no further call while a
//! connection is busy. mio and polling would hide exactly the flags that are used here.

#![allow(unsafe_code, reason = "this file is the boundary to the kernel")]

use std::ffi::{CStr, c_void};
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A piece of memory that somebody else owns.
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

/// Most pieces of memory that one call takes.
pub const PIECES: usize = 64;

/// Reads from a socket into pieces of memory, in order, without blocking.
///
/// # Safety
/// Each piece is memory that may be written until this returns.
pub unsafe fn receive(fd: RawFd, into: &[Memory]) -> io::Result<usize> {
    let mut iov = [Memory::of(&mut []).iov(); PIECES];
    let count = into.len().min(PIECES);
    for (slot, piece) in iov.iter_mut().zip(into) {
        *slot = piece.iov();
    }
    // SAFETY: a msghdr of zeros is valid; the pieces are the caller's promise.
    let got = unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = iov.as_mut_ptr();
        message.msg_iovlen = count as _;
        libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT)
    };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Writes pieces of memory to a socket, in order, without blocking and without SIGPIPE.
///
/// # Safety
/// Each piece is memory that may be read until this returns.
pub unsafe fn send(fd: RawFd, from: &[Memory]) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    unsafe { send_with(fd, from, 0) }
}

/// As [`send`], of something that more follows at once.
///
/// # Safety
/// As [`send`].
pub unsafe fn send_more(fd: RawFd, from: Memory) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    unsafe { send_with(fd, &[from], libc::MSG_MORE) }
}

/// As [`send`], without the kernel's copy: each call that takes something has a number, from 0 on,
/// and [`notice`] tells when the kernel has done with it.
///
/// # Safety
/// The memory may be read, and what is read is what shall be sent, until the notice has come or
/// [`disconnect`] has returned.
pub unsafe fn send_zero_copy(fd: RawFd, from: Memory) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    unsafe { send_with(fd, &[from], libc::MSG_ZEROCOPY) }
}

unsafe fn send_with(fd: RawFd, from: &[Memory], flags: libc::c_int) -> io::Result<usize> {
    let mut iov = [Memory::of(&mut []).iov(); PIECES];
    let count = from.len().min(PIECES);
    for (slot, piece) in iov.iter_mut().zip(from) {
        *slot = piece.iov();
    }
    // SAFETY: a msghdr of zeros is valid; the pieces are the caller's promise.
    let sent = unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_iov = iov.as_mut_ptr();
        message.msg_iovlen = count as _;
        libc::sendmsg(
            fd,
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | flags,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Allows [`send_zero_copy`].
pub fn allow_zero_copy(fd: RawFd) -> io::Result<()> {
    set_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// The kernel has done with the memory of some calls of [`send_zero_copy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// Number of the first.
    pub first: u32,
    /// And of the last.
    pub last: u32,
    /// It had to copy.
    pub copied: bool,
}

/// The oldest notice that has come, if any.
pub fn notice(fd: RawFd) -> Option<Notice> {
    /// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of linux/errqueue.h.
    const ORIGIN: u8 = 5;
    const COPIED: u8 = 1;
    // Aligned as a cmsghdr must be.
    let mut control = [0u64; 32];
    // SAFETY: a msghdr of zeros is valid; `control` lives through the calls, and the kernel's headers
    // in it are walked by its own macros. The payload is read where it is long enough.
    unsafe {
        let mut message: libc::msghdr = zeroed();
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
        check(libc::recvmsg(fd, &raw mut message, flags) as libc::c_int).ok()?;
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(one) = header.as_ref() {
            let data = libc::CMSG_DATA(header);
            let least = libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) as usize;
            if one.cmsg_len >= least as _ {
                let error = data.cast::<libc::sock_extended_err>().read_unaligned();
                if error.ee_origin == ORIGIN && error.ee_errno == 0 {
                    return Some(Notice {
                        first: error.ee_info,
                        last: error.ee_data,
                        copied: error.ee_code & COPIED != 0,
                    });
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    None
}

/// Resets a connection and empties what it has queued: none of it is read any more.
pub fn disconnect(fd: RawFd) {
    // SAFETY: an address of zeros is one without a family, which disconnects; it lives through the
    // call. Where it fails the connection was gone already.
    unsafe {
        let address: libc::sockaddr = zeroed();
        let length = size_of::<libc::sockaddr>() as libc::socklen_t;
        libc::connect(fd, &raw const address, length);
    }
}

/// Copies as many bytes as the shorter of the two has.
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
    /// There is a [`notice`] (or an error: then it has hung up as well).
    pub notice: bool,
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
                notice: bits & libc::EPOLLERR != 0,
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

fn set_option(
    fd: RawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: four bytes are read from `value`.
    check(unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// The socket has room while fewer bytes than this have not been sent.
pub fn set_unsent_low_water(fd: RawFd, bytes: u32) -> io::Result<()> {
    set_option(
        fd,
        libc::IPPROTO_TCP,
        libc::TCP_NOTSENT_LOWAT,
        bytes as libc::c_int,
    )
}

/// Spreads what the congestion control allows over the round trip, in place of a burst: the kernel
/// does it for every socket that has any limit of its rate, here one that is never reached.
pub fn set_paced(fd: RawFd) -> io::Result<()> {
    let limit = 1u64 << 40;
    // SAFETY: eight bytes are read from `limit`.
    check(unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const limit).cast(),
            size_of::<u64>() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// A port is chosen when the socket connects, so that one port can serve several peers.
pub fn set_late_port(fd: RawFd) -> io::Result<()> {
    set_option(fd, libc::SOL_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// Asks for a congestion control by name.
pub fn set_congestion(fd: RawFd, name: &str) -> io::Result<()> {
    // SAFETY: `name`'s bytes are read.
    check(unsafe {
        libc::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            name.len() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// The congestion control in force.
pub fn congestion(fd: RawFd) -> io::Result<String> {
    let mut name = [0u8; 16];
    let mut length = name.len() as libc::socklen_t;
    // SAFETY: at most `length` bytes are written to `name`.
    check(unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_mut_ptr().cast(),
            &raw mut length,
        )
    })?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Bytes that were written and that the peer's kernel has not acknowledged; 0 where unknown.
pub fn unacknowledged(fd: RawFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one int.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 {
        return 0;
    }
    usize::try_from(bytes).unwrap_or(0)
}

/// What the kernel knows of a connection (`struct tcp_info` of linux/tcp.h).
#[derive(Debug, Clone, Copy, Default)]
pub struct TcpInfo {
    /// Segments that the peer has not acknowledged.
    pub unacknowledged: u32,
    /// Smoothed round trip, microseconds.
    pub rtt_us: u32,
    /// Segments sent in all that had data.
    pub segments: u32,
    /// Segments sent again, in all.
    pub retransmits: u32,
    /// Bytes that the peer has acknowledged.
    pub bytes_acknowledged: u64,
    /// Bytes that were written and not sent.
    pub unsent: u32,
    /// Measured delivery, bytes a second.
    pub delivery_rate: u64,
    /// Microseconds in which something was in flight.
    pub busy_us: u64,
    /// The shortest round trip of late, microseconds; 0 where the kernel does not tell.
    pub least_rtt_us: u32,
}

/// See [`TcpInfo`].
pub fn tcp_info(fd: RawFd) -> io::Result<TcpInfo> {
    let mut bytes = [0u8; 256];
    let mut length = bytes.len() as libc::socklen_t;
    // SAFETY: at most `length` bytes are written to `bytes`.
    check(unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    })?;
    let u32_at =
        |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    // Offsets of a little-endian 64-bit kernel; a field that an old kernel lacks reads as 0.
    Ok(TcpInfo {
        unacknowledged: u32_at(24),
        rtt_us: u32_at(68),
        retransmits: u32_at(100),
        segments: u32_at(156),
        bytes_acknowledged: u64_at(120),
        unsent: u32_at(144),
        delivery_rate: u64_at(160),
        busy_us: u64_at(168),
        least_rtt_us: u32_at(148),
    })
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

/// One address of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's name.
    pub name: String,
    /// The kernel's number.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// It is up and has a carrier.
    pub running: bool,
    /// It is the loopback.
    pub loopback: bool,
}

/// Every IPv4 and IPv6 address of every interface.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the list is written by the call, walked while it lives, and freed once.
    unsafe {
        check(libc::getifaddrs(&raw mut list))?;
        let mut found = Vec::new();
        let mut next = list;
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let Some(address) = entry.ifa_addr.as_ref() else {
                continue;
            };
            let address = match libc::c_int::from(address.sa_family) {
                libc::AF_INET => {
                    let v4 = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)))
                }
                libc::AF_INET6 => {
                    let v6 = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr))
                }
                _ => continue,
            };
            let flags = entry.ifa_flags as libc::c_int;
            found.push(Interface {
                name: CStr::from_ptr(entry.ifa_name)
                    .to_string_lossy()
                    .into_owned(),
                index: libc::if_nametoindex(entry.ifa_name),
                address,
                running: flags & libc::IFF_UP != 0 && flags & libc::IFF_RUNNING != 0,
                loopback: flags & libc::IFF_LOOPBACK != 0,
            });
        }
        libc::freeifaddrs(list);
        Ok(found)
    }
}

/// Hears from the kernel (rtnetlink) when an interface gains or loses its carrier.
#[derive(Debug)]
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// Subscribes to changes of links.
    pub fn new() -> io::Result<LinkWatch> {
        // SAFETY: the descriptor is new and ours; `address` lives through bind.
        unsafe {
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let fd = check(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE))?;
            let fd = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_nl = zeroed();
            address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
            address.nl_groups = libc::RTMGRP_LINK as u32;
            check(libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_nl>() as libc::socklen_t,
            ))?;
            Ok(LinkWatch(fd))
        }
    }

    /// For epoll.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// The changes since the last call: interface number, and whether it is running now. `None`
    /// where some were lost: look at all interfaces.
    pub fn changes(&self) -> Option<Vec<(u32, bool)>> {
        let mut changes = Vec::new();
        let mut buffer = [0u8; 8192];
        loop {
            // SAFETY: the buffer is ours.
            let got = match unsafe { receive(self.fd(), &[Memory::of(&mut buffer)]) } {
                Ok(got) => got,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => return None,
                Err(_) => return Some(changes),
            };
            let mut rest = &buffer[..got];
            // nlmsghdr: length u32, type u16, flags u16, sequence u32, pid u32; then ifinfomsg:
            // family u8, pad u8, type u16, index i32, flags u32, change u32.
            while rest.len() >= 32 {
                let word = |at: usize| {
                    u32::from_ne_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]])
                };
                let (length, kind) = (word(0) as usize, u16::from_ne_bytes([rest[4], rest[5]]));
                let flags = word(24) as libc::c_int;
                if kind == libc::RTM_NEWLINK {
                    let up = libc::IFF_UP | libc::IFF_RUNNING;
                    changes.push((word(20), flags & up == up));
                } else if kind == libc::RTM_DELLINK {
                    changes.push((word(20), false));
                }
                let step = length.next_multiple_of(4);
                if length < 16 || step >= rest.len() {
                    break;
                }
                rest = &rest[step..];
            }
        }
    }
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

/// Closes a descriptor when its owner resets the connection: the peer hears at once.
pub fn set_reset_on_close(fd: RawFd) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: `linger` lives through the call. Where it fails the peer hears a FIN instead.
    unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
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
