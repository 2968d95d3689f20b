//! Sockets: bytes in and out without blocking, options, and what the kernel knows of a connection.

#![allow(unsafe_code, reason = "this file is a boundary to the kernel")]

use super::{Memory, check};
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::RawFd;

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
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Takes the oldest message of a socket's queue of errors, and the error that it names.
fn queued_error(fd: RawFd) -> Option<Option<libc::sock_extended_err>> {
    /// `SO_EE_ORIGIN_NONE` of linux/errqueue.h.
    const NONE: u8 = 0;
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
                let known = [
                    (libc::SOL_IP, libc::IP_RECVERR),
                    (libc::SOL_IPV6, libc::IPV6_RECVERR),
                ];
                if known.contains(&(one.cmsg_level, one.cmsg_type)) && error.ee_origin != NONE {
                    return Some(Some(error));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Some(None)
}

/// Has the kernel tell of what the network says about packets of this UDP socket ([`network_error`]).
pub fn set_errors_told(fd: RawFd, v6: bool) -> io::Result<()> {
    if v6 {
        set_option(fd, libc::SOL_IPV6, libc::IPV6_RECVERR, 1)?;
    }
    set_option(fd, libc::SOL_IP, libc::IP_RECVERR, 1)
}

/// The oldest thing that the network has said, if any: whether it is that nobody has the port of a peer.
pub fn network_error(fd: RawFd) -> Option<bool> {
    /// `SO_EE_ORIGIN_ICMP` and `SO_EE_ORIGIN_ICMP6` of linux/errqueue.h.
    const ORIGINS: [u8; 2] = [2, 3];
    let error = queued_error(fd)?;
    Some(error.is_some_and(|error| {
        ORIGINS.contains(&error.ee_origin) && error.ee_errno == libc::ECONNREFUSED as u32
    }))
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

/// Spreads what the congestion control allows over the round trip, instead of a burst: the kernel
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

/// The most bytes of a segment, either way: to be set before it connects.
pub fn set_most_segment(fd: RawFd, bytes: u32) -> io::Result<()> {
    set_option(
        fd,
        libc::IPPROTO_TCP,
        libc::TCP_MAXSEG,
        bytes as libc::c_int,
    )
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
    /// Measured delivery, bytes per second.
    pub delivery_rate: u64,
    /// Microseconds in which something was in flight.
    pub busy_us: u64,
    /// The shortest of the last round trips, microseconds; 0 where the kernel does not tell.
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
