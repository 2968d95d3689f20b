//! What two processes say before frames flow: the handle that travels out of band (128 bytes, NCCL's
//! limit), and the greeting on each new connection.
//!
//! The handle names a process and carries its token, 16 random bytes. A connection whose greeting
//! has not that token is closed; its other end is told nothing. Addresses that do not fit the
//! handle come in the answer to the greeting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A process, for as long as it lives.
pub type ProcessId = [u8; 16];

/// Bytes of a handle.
pub const HANDLE: usize = 128;
const HANDLE_MAGIC: [u8; 4] = *b"EVNH";
const HANDLE_ADDRESSES: usize = 49;
/// The connecting side's own note, kept in the handle between two calls.
const COOKIE: usize = 120;
/// Bytes of a greeting before its addresses.
pub const GREETING: usize = 92;
/// Bytes of an answer before its addresses.
pub const ANSWER: usize = 16;
/// Bytes of an address.
pub const ADDRESS: usize = 17;
/// Most addresses of a process.
pub const MOST_ADDRESSES: usize = crate::nics::MOST;
const MAGIC: [u8; 8] = *b"EVENER\0\x03";

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// What a listener gives to whoever will connect to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    /// The listening process.
    pub process: ProcessId,
    /// What admits to it.
    pub token: [u8; 16],
    /// Its listener.
    pub listener: u64,
    /// The TCP port of all its addresses.
    pub port: u16,
    /// It takes packets at the UDP port of the same number.
    pub udp: bool,
    /// As many of its addresses as fit.
    pub addresses: Vec<IpAddr>,
}

impl Handle {
    /// As bytes.
    pub fn emit(&self) -> [u8; HANDLE] {
        let mut bytes = [0; HANDLE];
        bytes[0..4].copy_from_slice(&HANDLE_MAGIC);
        bytes[4] = 2;
        bytes[5] = u8::from(self.udp);
        bytes[6..8].copy_from_slice(&self.port.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.process);
        bytes[24..40].copy_from_slice(&self.token);
        bytes[40..48].copy_from_slice(&self.listener.to_le_bytes());
        let mut at = HANDLE_ADDRESSES;
        for address in &self.addresses {
            let (kind, octets) = match address {
                IpAddr::V4(v4) => (4, v4.octets().to_vec()),
                IpAddr::V6(v6) => (6, v6.octets().to_vec()),
            };
            if at + 1 + octets.len() > COOKIE {
                break;
            }
            bytes[at] = kind;
            bytes[at + 1..at + 1 + octets.len()].copy_from_slice(&octets);
            at += 1 + octets.len();
            bytes[48] += 1;
        }
        bytes
    }

    /// From bytes; `None` where they are not a handle.
    pub fn parse(bytes: &[u8; HANDLE]) -> Option<Handle> {
        if bytes[0..4] != HANDLE_MAGIC || bytes[4] != 2 {
            return None;
        }
        let mut addresses = Vec::new();
        let mut at = HANDLE_ADDRESSES;
        for _ in 0..bytes[48] {
            let address = match bytes.get(at)? {
                4 => IpAddr::V4(Ipv4Addr::from(array::<4>(&bytes[..COOKIE], at + 1)?)),
                6 => IpAddr::V6(Ipv6Addr::from(array::<16>(&bytes[..COOKIE], at + 1)?)),
                _ => return None,
            };
            at += if address.is_ipv4() { 5 } else { 17 };
            addresses.push(address);
        }
        Some(Handle {
            process: array(bytes, 8)?,
            token: array(bytes, 24)?,
            listener: u64::from_le_bytes(array(bytes, 40)?),
            port: u16::from_le_bytes(array(bytes, 6)?),
            udp: bytes[5] & 1 != 0,
            addresses,
        })
    }

    /// The note that [`Handle::set_cookie`] left; 0 at first.
    pub fn cookie(bytes: &[u8; HANDLE]) -> u64 {
        array(bytes, COOKIE).map_or(0, u64::from_le_bytes)
    }

    /// Leaves a note for the next call with the same handle.
    pub fn set_cookie(bytes: &mut [u8; HANDLE], cookie: u64) {
        bytes[COOKIE..].copy_from_slice(&cookie.to_le_bytes());
    }
}

/// The first bytes of a connection, from the side that opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// What admits.
    pub token: [u8; 16],
    /// Who is wanted.
    pub to: ProcessId,
    /// Who it is.
    pub from: ProcessId,
    /// What admits to the greeting process.
    pub from_token: [u8; 16],
    /// Where it listens.
    pub port: u16,
    /// The number of this path.
    pub path: u64,
    /// Place of the NIC in the greeting process' addresses.
    pub local: u8,
    /// Place of the NIC in the greeted process' addresses.
    pub remote: u8,
    /// All of its addresses.
    pub addresses: Vec<IpAddr>,
}

fn emit_addresses(addresses: &[IpAddr], bytes: &mut Vec<u8>) {
    for address in addresses.iter().take(MOST_ADDRESSES) {
        match address {
            IpAddr::V4(v4) => {
                bytes.push(4);
                bytes.extend_from_slice(&v4.octets());
                bytes.extend_from_slice(&[0; 12]);
            }
            IpAddr::V6(v6) => {
                bytes.push(6);
                bytes.extend_from_slice(&v6.octets());
            }
        }
    }
}

fn parse_addresses(bytes: &[u8]) -> Option<Vec<IpAddr>> {
    bytes
        .chunks_exact(ADDRESS)
        .map(|one| match one[0] {
            4 => array::<4>(one, 1).map(|octets| IpAddr::V4(Ipv4Addr::from(octets))),
            6 => array::<16>(one, 1).map(|octets| IpAddr::V6(Ipv6Addr::from(octets))),
            _ => None,
        })
        .collect()
}

impl Greeting {
    /// As bytes.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(GREETING + ADDRESS * self.addresses.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.token);
        bytes.extend_from_slice(&self.to);
        bytes.extend_from_slice(&self.from);
        bytes.extend_from_slice(&self.from_token);
        bytes.extend_from_slice(&self.port.to_le_bytes());
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&self.path.to_le_bytes());
        let count = self.addresses.len().min(MOST_ADDRESSES) as u8;
        bytes.extend_from_slice(&[self.local, self.remote, count, 0, 0, 0, 0, 0]);
        emit_addresses(&self.addresses, &mut bytes);
        bytes
    }

    /// How many bytes a greeting that starts so has; `None` where it is none.
    pub fn length(start: &[u8; GREETING]) -> Option<usize> {
        let count = usize::from(start[86]);
        (start[..8] == MAGIC && count <= MOST_ADDRESSES).then_some(GREETING + count * ADDRESS)
    }

    /// From bytes; `None` where they are not a greeting.
    pub fn parse(bytes: &[u8]) -> Option<Greeting> {
        if bytes.len() != Greeting::length(&array(bytes, 0)?)? {
            return None;
        }
        Some(Greeting {
            token: array(bytes, 8)?,
            to: array(bytes, 24)?,
            from: array(bytes, 40)?,
            from_token: array(bytes, 56)?,
            port: u16::from_le_bytes(array(bytes, 72)?),
            path: u64::from_le_bytes(array(bytes, 76)?),
            local: bytes[84],
            remote: bytes[85],
            addresses: parse_addresses(&bytes[GREETING..])?,
        })
    }
}

/// The answer to a greeting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// All of its addresses.
    pub addresses: Vec<IpAddr>,
}

impl Answer {
    /// As bytes.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ANSWER + ADDRESS * self.addresses.len());
        bytes.extend_from_slice(&MAGIC);
        let count = self.addresses.len().min(MOST_ADDRESSES) as u8;
        bytes.extend_from_slice(&[0, count, 0, 0, 0, 0, 0, 0]);
        emit_addresses(&self.addresses, &mut bytes);
        bytes
    }

    /// How many bytes an answer that starts so has; `None` where it is none.
    pub fn length(start: &[u8; ANSWER]) -> Option<usize> {
        let count = usize::from(start[9]);
        (start[..8] == MAGIC && count <= MOST_ADDRESSES).then_some(ANSWER + count * ADDRESS)
    }

    /// From bytes; `None` where they are not an answer.
    pub fn parse(bytes: &[u8]) -> Option<Answer> {
        if bytes.len() != Answer::length(&array(bytes, 0)?)? {
            return None;
        }
        Some(Answer {
            addresses: parse_addresses(&bytes[ANSWER..])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(|octets| IpAddr::V4(octets.into())),
            any::<[u8; 16]>().prop_map(|octets| IpAddr::V6(octets.into())),
        ]
    }

    proptest! {
        #[test]
        fn a_handle_keeps_what_fits(
            process: [u8; 16], token: [u8; 16], listener: u64, port: u16,
            addresses in prop::collection::vec(address(), 0..20), cookie: u64,
        ) {
            let udp = port % 2 == 0;
            let handle = Handle { process, token, listener, port, udp, addresses };
            let mut bytes = handle.emit();
            Handle::set_cookie(&mut bytes, cookie);
            prop_assert_eq!(Handle::cookie(&bytes), cookie);
            let parsed = Handle::parse(&bytes).unwrap();
            prop_assert!(handle.addresses.starts_with(&parsed.addresses));
            prop_assert!(parsed.addresses.len() >= handle.addresses.len().min(4));
            prop_assert_eq!(Handle { addresses: parsed.addresses.clone(), ..handle }, parsed);
        }

        #[test]
        fn greetings_and_answers_parse_to_the_same(
            tokens: [[u8; 16]; 4], port: u16, path: u64,
            addresses in prop::collection::vec(address(), 0..MOST_ADDRESSES),
        ) {
            let [token, to, from, from_token] = tokens;
            let greeting = Greeting {
                token, to, from, from_token, port, path,
                local: 1, remote: 2, addresses: addresses.clone(),
            };
            let parsed = Greeting::parse(&greeting.emit());
            prop_assert_eq!(parsed, Some(greeting));
            let answer = Answer { addresses };
            prop_assert_eq!(Answer::parse(&answer.emit()), Some(answer));
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Greeting::parse(&bytes);
            let _ = Answer::parse(&bytes);
            let mut handle = [0; HANDLE];
            handle[..bytes.len().min(HANDLE)].copy_from_slice(&bytes[..bytes.len().min(HANDLE)]);
            let _ = Handle::parse(&handle);
            handle[0..4].copy_from_slice(&HANDLE_MAGIC);
            handle[4] = 2;
            let _ = Handle::parse(&handle);
        }
    }
}
