//! What the kernel knows of interfaces, routes and neighbours, asked by netlink. Its messages are made and
//! read here, without unsafe code.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};

use crate::frames::Mac;
use crate::sys;

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROG_ID: u16 = 4;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const RTN_UNICAST: u8 = 1;
const IPV4: u8 = libc::AF_INET as u8;
/// Reachable, stale, delayed, probed, without ARP, permanent: the address is known.
const USABLE: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80;
/// The groups of changes to neighbours and to IPv4 routes.
const NEWS: u32 = 0x4 | 0x40;
const HEADER: usize = 16;

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number of it.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Bytes of a packet with its IP header.
    pub mtu: usize,
    /// The XDP program that is attached to it.
    pub program: Option<u32>,
}

/// Where a packet goes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// By this interface
    pub interface: u32,
    /// to this neighbour.
    pub neighbour: Ipv4Addr,
}

/// A connection to the kernel's tables.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    number: u32,
}

fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend((4 + value.len() as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

/// The attributes in these bytes; what is cut off ends them.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & 0x3fff;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn ipv4(bytes: &[u8]) -> Option<Ipv4Addr> {
    Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?))
}

impl Netlink {
    /// For questions.
    pub fn open() -> io::Result<Netlink> {
        let socket = sys::netlink(0)?;
        Ok(Netlink { socket, number: 0 })
    }

    /// Sends a question and hears the answer: its bytes after the header.
    fn ask(&mut self, kind: u16, body: &[u8], answer: u16) -> io::Result<Vec<u8>> {
        self.number += 1;
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend((HEADER as u32 + body.len() as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(NLM_F_REQUEST.to_ne_bytes());
        message.extend(self.number.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(body);
        sys::send(self.socket.as_fd(), &message)?;
        let mut room = vec![0; 1 << 15];
        loop {
            let count = sys::receive(self.socket.as_fd(), &mut room, false)?.unwrap_or(0);
            let bytes = room.get(..count).unwrap_or_default();
            let cut = || io::Error::from(io::ErrorKind::UnexpectedEof);
            let length = u32_at(bytes, 0).ok_or_else(cut)? as usize;
            let kind = u16_at(bytes, 4).ok_or_else(cut)?;
            // An answer to a question that was given up is not ours.
            if u32_at(bytes, 8) != Some(self.number) {
                continue;
            }
            let body = bytes.get(HEADER..length).ok_or_else(cut)?;
            if kind == NLMSG_ERROR {
                let code = u32_at(body, 0).ok_or_else(cut)? as i32;
                return Err(io::Error::from_raw_os_error(code.wrapping_neg()));
            }
            if kind == answer {
                return Ok(body.to_vec());
            }
        }
    }

    /// The interface with this name.
    pub fn interface(&mut self, name: &str) -> io::Result<Interface> {
        let mut body = vec![0; 16];
        let mut text = name.as_bytes().to_vec();
        text.push(0);
        attribute(&mut body, IFLA_IFNAME, &text);
        let answer = self.ask(RTM_GETLINK, &body, RTM_NEWLINK)?;
        let index = u32_at(&answer, 4).unwrap_or(0);
        let (mut mac, mut mtu, mut program) = (None, 1500, None);
        for (kind, value) in attributes(answer.get(16..).unwrap_or_default()) {
            match kind {
                IFLA_ADDRESS => mac = <Mac>::try_from(value).ok(),
                IFLA_MTU => mtu = u32_at(value, 0).unwrap_or(1500) as usize,
                IFLA_XDP => {
                    let mut inner = attributes(value);
                    let id = inner.find(|(kind, _)| *kind == IFLA_XDP_PROG_ID);
                    program = id
                        .and_then(|(_, value)| u32_at(value, 0))
                        .filter(|id| *id != 0);
                }
                _ => {}
            }
        }
        Ok(Interface {
            index,
            mac: mac.unwrap_or_default(),
            mtu,
            program,
        })
    }

    /// How the kernel would send from this address, by this interface; `None`: not to another host.
    pub fn route(&mut self, to: Ipv4Addr, interface: u32) -> io::Result<Option<Route>> {
        let mut body = vec![0; 12];
        body[0] = IPV4;
        body[1] = 32;
        attribute(&mut body, RTA_DST, &to.octets());
        attribute(&mut body, RTA_OIF, &interface.to_ne_bytes());
        let answer = self.ask(RTM_GETROUTE, &body, RTM_NEWROUTE)?;
        if answer.get(7) != Some(&RTN_UNICAST) {
            return Ok(None);
        }
        let (mut by, mut neighbour) = (0, to);
        for (kind, value) in attributes(answer.get(12..).unwrap_or_default()) {
            match kind {
                RTA_OIF => by = u32_at(value, 0).unwrap_or(0),
                RTA_GATEWAY => neighbour = ipv4(value).unwrap_or(to),
                _ => {}
            }
        }
        Ok((by == interface).then_some(Route {
            interface: by,
            neighbour,
        }))
    }

    /// The Ethernet address of a neighbour, where the kernel knows it now.
    pub fn neighbour(&mut self, address: Ipv4Addr, interface: u32) -> io::Result<Option<Mac>> {
        let mut body = vec![0; 12];
        body[0] = IPV4;
        body[4..8].copy_from_slice(&interface.to_ne_bytes());
        attribute(&mut body, NDA_DST, &address.octets());
        let answer = match self.ask(RTM_GETNEIGH, &body, RTM_NEWNEIGH) {
            Ok(answer) => answer,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        if u16_at(&answer, 8).unwrap_or(0) & USABLE == 0 {
            return Ok(None);
        }
        let mut all = attributes(answer.get(12..).unwrap_or_default());
        let mac = all.find(|(kind, _)| *kind == NDA_LLADDR);
        Ok(mac.and_then(|(_, value)| <Mac>::try_from(value).ok()))
    }
}

/// Changes to neighbours and routes.
#[derive(Debug)]
pub struct News {
    socket: OwnedFd,
}

impl News {
    pub fn open() -> io::Result<News> {
        let socket = sys::netlink(NEWS)?;
        Ok(News { socket })
    }

    /// Whether anything changed since the last time.
    pub fn any(&self) -> bool {
        let mut room = [0; 1 << 13];
        let mut any = false;
        loop {
            match sys::receive(self.socket.as_fd(), &mut room, true) {
                Ok(None) => return any,
                Ok(Some(_)) => any = true,
                // More than fits has changed; what is left is read next.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => any = true,
                Err(_) => return true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_written_and_what_is_cut_ends_them() {
        let mut bytes = Vec::new();
        attribute(&mut bytes, 3, b"abcde");
        attribute(&mut bytes, 4, b"");
        assert_eq!(bytes.len(), 16);
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(3, b"abcde".as_slice()), (4, b"")]);
        for cut in 0..bytes.len() {
            assert!(attributes(&bytes[..cut]).count() < 2);
        }
        assert_eq!(attributes(&[0; 8]).count(), 0);
    }

    #[test]
    fn loopback_is_known_and_an_unknown_name_refused() {
        let mut netlink = Netlink::open().unwrap();
        let interface = netlink.interface("lo").unwrap();
        assert_eq!((interface.index, interface.mac), (1, [0; 6]));
        let refused = netlink.interface("nosuch0").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENODEV));
        assert_eq!(netlink.route(Ipv4Addr::LOCALHOST, 1).unwrap(), None);
        let unknown = netlink.neighbour(Ipv4Addr::new(127, 0, 0, 2), 1).unwrap();
        assert_eq!(unknown, None);
    }
}
