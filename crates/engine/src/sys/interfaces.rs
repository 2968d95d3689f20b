//! The machine's interfaces: their addresses, and when a link goes up or down or an address changes.

#![allow(unsafe_code, reason = "this file is a boundary to the kernel")]

use super::{Memory, check, receive};
use std::ffi::CStr;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

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

/// What the kernel has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkChange {
    /// The interface of this number is running now, or is not.
    Running(u32, bool),
    /// Some interface has got an address, or lost one.
    Address,
}

/// Hears from the kernel (rtnetlink) when an interface gains or loses its carrier or an address.
#[derive(Debug)]
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// Subscribes to changes of links and addresses.
    pub fn new() -> io::Result<LinkWatch> {
        // SAFETY: the descriptor is new and ours; `address` lives through bind.
        unsafe {
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let fd = check(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE))?;
            let fd = OwnedFd::from_raw_fd(fd);
            let mut address: libc::sockaddr_nl = zeroed();
            address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
            let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
            address.nl_groups = groups as u32;
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

    /// The changes since the last call. `None` where some were lost: look at all interfaces.
    pub fn changes(&self) -> Option<Vec<LinkChange>> {
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
            // family u8, pad u8, type u16, index i32, flags u32, change u32. That of an address is
            // shorter, and has the address behind it.
            while rest.len() >= 32 {
                let word = |at: usize| {
                    u32::from_ne_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]])
                };
                let (length, kind) = (word(0) as usize, u16::from_ne_bytes([rest[4], rest[5]]));
                let flags = word(24) as libc::c_int;
                let up = libc::IFF_UP | libc::IFF_RUNNING;
                match kind {
                    libc::RTM_NEWLINK => {
                        changes.push(LinkChange::Running(word(20), flags & up == up));
                    }
                    libc::RTM_DELLINK => changes.push(LinkChange::Running(word(20), false)),
                    libc::RTM_NEWADDR | libc::RTM_DELADDR => changes.push(LinkChange::Address),
                    _ => {}
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
