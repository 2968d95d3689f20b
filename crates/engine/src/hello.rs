//! What two processes say before frames flow: the handle that travels out of band (128 bytes, NCCL's
//! limit), and what is said on each new connection.
//!
//! The handle names a process and carries its key, 16 random bytes, which never cross the network here:
//!
//! ```text
//! dials                                             listens
//! greeting: who, a random number, tag
//!                                                   challenge: another random number, tag
//! proof: its own key under a pad, tag
//!                                                   answer: addresses, tag
//! ```
//!
//! Each tag is a hash with the listener's key of what it stands behind and, from the second on, of the
//! greeting's tag and both random numbers. So both ends have shown that they know the key, and what was
//! recorded means nothing on another connection. Who sends a greeting without it is told nothing. The
//! pad is such a hash as well: the listener needs the other's key to dial back. Addresses that do not
//! fit the handle come with the greeting and the answer. The bytes that follow are not protected: see
//! docs/reference/security.md.
//!
//! Addresses have an edition, which grows each time that a card of the process comes or changes its
//! address. It stands where older peers say and expect zeros, so they stay with what they know.

use evener_proto::packet::JobKey;
use evener_proto::packet::auth::LABELS;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::addresses::Addresses;

/// A process, for as long as it lives.
pub type ProcessId = [u8; 16];

/// Bytes of a handle.
pub const HANDLE: usize = 128;
const HANDLE_MAGIC: [u8; 4] = *b"EVNH";
const HANDLE_ADDRESSES: usize = 49;
/// The connecting side's own note, kept in the handle between two calls.
const COOKIE: usize = 120;
/// Bytes of a greeting before its addresses; a tag is behind them.
pub const GREETING: usize = 76;
/// Bytes of a challenge and of a proof.
pub const CHALLENGE: usize = 40;
/// See [`CHALLENGE`].
pub const PROOF: usize = 32;
/// Bytes of an answer before its addresses.
pub const ANSWER: usize = 16;
/// Bytes of an address.
pub const ADDRESS: usize = 17;
/// Most addresses of a process.
pub const MOST_ADDRESSES: usize = crate::addresses::MOST;
/// Bytes of a tag.
pub const TAG: usize = 16;
/// The last byte is the version. 3 had tokens in clear.
const MAGIC: [u8; 8] = *b"EVENER\0\x04";
const HANDLE_VERSION: u8 = 3;
// What a hash with the key is for.
const OF_GREETING: u8 = LABELS;
const OF_CHALLENGE: u8 = LABELS + 1;
const OF_PROOF: u8 = LABELS + 2;
const PAD: u8 = LABELS + 3;
const OF_ANSWER: u8 = LABELS + 4;

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// What a listener gives to whoever will connect to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    /// The listening process.
    pub process: ProcessId,
    /// The key of connections to it.
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
        bytes[4] = HANDLE_VERSION;
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
        if bytes[0..4] != HANDLE_MAGIC || bytes[4] != HANDLE_VERSION {
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

/// The version of a peer that begins a connection as Evener does, but in another version.
pub fn other_version(start: &[u8]) -> Option<u8> {
    let start: [u8; 8] = array(start, 0)?;
    (start[..7] == MAGIC[..7] && start[7] != MAGIC[7]).then_some(start[7])
}

/// `body` and its tag.
fn sealed(mut body: Vec<u8>, key: &JobKey, label: u8, before: &[&[u8]]) -> Vec<u8> {
    let parts = [before, &[&body]].concat();
    let tag = key.proof(label, &parts);
    body.extend_from_slice(&tag);
    body
}

/// What stands before the tag, if it is right.
fn opened<'a>(bytes: &'a [u8], key: &JobKey, label: u8, before: &[&[u8]]) -> Option<&'a [u8]> {
    let (body, tag) = bytes.split_last_chunk::<TAG>()?;
    let right = key.proof(label, &[before, &[body]].concat());
    // As two numbers: it takes the same time whichever byte is wrong.
    (u128::from_le_bytes(right) == u128::from_le_bytes(*tag)).then_some(body)
}

/// What both ends know of a connection after the challenge: the greeting's tag, and the listener's
/// random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Met {
    /// The last bytes of the greeting.
    pub greeting: [u8; TAG],
    /// From the challenge.
    pub random: [u8; 16],
}

impl Met {
    fn parts(&self) -> [&[u8]; 2] {
        [&self.greeting, &self.random]
    }

    /// The challenge, from the listener.
    pub fn challenge(&self, key: &JobKey) -> Vec<u8> {
        let body = [MAGIC.as_slice(), &self.random].concat();
        sealed(body, key, OF_CHALLENGE, &[&self.greeting])
    }

    /// From a challenge to the greeting with this tag; `None` where it is none, or not of who has the
    /// key.
    pub fn of_challenge(bytes: &[u8], key: &JobKey, greeting: [u8; TAG]) -> Option<Met> {
        let body = opened(bytes, key, OF_CHALLENGE, &[&greeting])?;
        let random = array(body, 8)?;
        (body.len() == CHALLENGE - TAG && body[..8] == MAGIC).then_some(Met { greeting, random })
    }

    /// The proof, from who dialled, with its own key.
    pub fn proof(&self, key: &JobKey, own: [u8; 16]) -> Vec<u8> {
        let body = self.padded(key, own).to_vec();
        sealed(body, key, OF_PROOF, &self.parts())
    }

    /// The key of who dialled, from a proof; `None` where it proves nothing.
    pub fn of_proof(&self, bytes: &[u8], key: &JobKey) -> Option<[u8; 16]> {
        let body = opened(bytes, key, OF_PROOF, &self.parts())?;
        Some(self.padded(key, body.try_into().ok()?))
    }

    /// With the pad, or without it again.
    fn padded(&self, key: &JobKey, own: [u8; 16]) -> [u8; 16] {
        let pad = key.proof(PAD, &self.parts());
        (u128::from_le_bytes(own) ^ u128::from_le_bytes(pad)).to_le_bytes()
    }
}

/// The first bytes of a connection, from the side that opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Who is wanted.
    pub to: ProcessId,
    /// Who it is.
    pub from: ProcessId,
    /// Another one for each connection.
    pub random: [u8; 16],
    /// Where it listens.
    pub port: u16,
    /// The number of this path.
    pub path: u64,
    /// Place of the NIC in the greeting process' addresses.
    pub local: u8,
    /// Place of the NIC in the greeted process' addresses.
    pub remote: u8,
    /// All of its addresses.
    pub addresses: Addresses,
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

/// The last bytes of a greeting.
pub fn tag_of(greeting: &[u8]) -> [u8; TAG] {
    greeting.last_chunk().copied().unwrap_or_default()
}

impl Greeting {
    /// As bytes.
    pub fn emit(&self, key: &JobKey) -> Vec<u8> {
        let Addresses { edition, list } = &self.addresses;
        let mut bytes = Vec::with_capacity(GREETING + ADDRESS * list.len() + TAG);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.to);
        bytes.extend_from_slice(&self.from);
        bytes.extend_from_slice(&self.random);
        bytes.extend_from_slice(&self.port.to_le_bytes());
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&self.path.to_le_bytes());
        let count = list.len().min(MOST_ADDRESSES) as u8;
        bytes.extend_from_slice(&[self.local, self.remote, count, 0]);
        bytes.extend_from_slice(&edition.to_le_bytes());
        emit_addresses(list, &mut bytes);
        sealed(bytes, key, OF_GREETING, &[])
    }

    /// How many bytes a greeting that starts so has; `None` where it is none.
    pub fn length(start: &[u8; GREETING]) -> Option<usize> {
        let count = usize::from(start[70]);
        (start[..8] == MAGIC && count <= MOST_ADDRESSES).then_some(GREETING + count * ADDRESS + TAG)
    }

    /// From bytes; `None` where they are not a greeting, or not of who has the key.
    pub fn parse(bytes: &[u8], key: &JobKey) -> Option<Greeting> {
        if bytes.len() != Greeting::length(&array(bytes, 0)?)? {
            return None;
        }
        let body = opened(bytes, key, OF_GREETING, &[])?;
        Some(Greeting {
            to: array(body, 8)?,
            from: array(body, 24)?,
            random: array(body, 40)?,
            port: u16::from_le_bytes(array(body, 56)?),
            path: u64::from_le_bytes(array(body, 60)?),
            local: body[68],
            remote: body[69],
            addresses: Addresses {
                edition: u32::from_le_bytes(array(body, 72)?),
                list: parse_addresses(&body[GREETING..])?,
            },
        })
    }
}

/// The answer to a proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// All of its addresses.
    pub addresses: Addresses,
}

impl Answer {
    /// As bytes.
    pub fn emit(&self, key: &JobKey, met: &Met) -> Vec<u8> {
        let Addresses { edition, list } = &self.addresses;
        let mut bytes = Vec::with_capacity(ANSWER + ADDRESS * list.len() + TAG);
        bytes.extend_from_slice(&MAGIC);
        let count = list.len().min(MOST_ADDRESSES) as u8;
        bytes.extend_from_slice(&[0, count, 0, 0]);
        bytes.extend_from_slice(&edition.to_le_bytes());
        emit_addresses(list, &mut bytes);
        sealed(bytes, key, OF_ANSWER, &met.parts())
    }

    /// How many bytes an answer that starts so has; `None` where it is none.
    pub fn length(start: &[u8; ANSWER]) -> Option<usize> {
        let count = usize::from(start[9]);
        (start[..8] == MAGIC && count <= MOST_ADDRESSES).then_some(ANSWER + count * ADDRESS + TAG)
    }

    /// From bytes; `None` where they are not an answer, or not of who has the key.
    pub fn parse(bytes: &[u8], key: &JobKey, met: &Met) -> Option<Answer> {
        if bytes.len() != Answer::length(&array(bytes, 0)?)? {
            return None;
        }
        let body = opened(bytes, key, OF_ANSWER, &met.parts())?;
        Some(Answer {
            addresses: Addresses {
                edition: u32::from_le_bytes(array(body, 12)?),
                list: parse_addresses(&body[ANSWER..])?,
            },
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
        fn two_ends_with_one_key_meet_and_say_no_key(
            names: [[u8; 16]; 6], port: u16, path: u64, bit: usize,
            list in prop::collection::vec(address(), 0..MOST_ADDRESSES), edition: u32,
        ) {
            let addresses = Addresses { edition, list };
            let [token, own, to, from, random, other] = names;
            let (key, wrong) = (JobKey::new(token), JobKey::new(other));
            let greeting = Greeting {
                to, from, random, port, path, local: 1, remote: 2, addresses: addresses.clone(),
            };
            let said = greeting.emit(&key);
            prop_assert_eq!(Greeting::parse(&said, &key), Some(greeting.clone()));
            let met = Met { greeting: tag_of(&said), random: to };
            let challenge = met.challenge(&key);
            prop_assert_eq!(Met::of_challenge(&challenge, &key, tag_of(&said)), Some(met));
            let proof = met.proof(&key, own);
            prop_assert_eq!(met.of_proof(&proof, &key), Some(own));
            let answer = Answer { addresses };
            let heard = answer.emit(&key, &met);
            prop_assert_eq!(Answer::parse(&heard, &key, &met), Some(answer));
            // Another key, another connection, a wrong bit.
            let later = Met { random: from, ..met };
            prop_assert!(token == other || Greeting::parse(&said, &wrong).is_none());
            prop_assert!(to == from || later.of_proof(&proof, &key).is_none());
            prop_assert!(to == from || Answer::parse(&heard, &key, &later).is_none());
            prop_assert_eq!(Met::of_challenge(&challenge, &key, [0; TAG]), None);
            let mut forged = proof.clone();
            let bit = bit % (8 * forged.len());
            forged[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(met.of_proof(&forged, &key), None);
            for bytes in [&said, &challenge, &proof, &heard] {
                for secret in [token, own] {
                    let clear = bytes.windows(16).any(|part| part == secret);
                    prop_assert!(!clear || names[2..].contains(&secret));
                }
            }
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let (key, met) = (JobKey::new([1; 16]), Met { greeting: [2; 16], random: [3; 16] });
            let _ = Greeting::parse(&bytes, &key);
            let _ = Answer::parse(&bytes, &key, &met);
            let _ = Met::of_challenge(&bytes, &key, [2; 16]);
            let _ = met.of_proof(&bytes, &key);
            let _ = other_version(&bytes);
            let mut handle = [0; HANDLE];
            handle[..bytes.len().min(HANDLE)].copy_from_slice(&bytes[..bytes.len().min(HANDLE)]);
            let _ = Handle::parse(&handle);
            handle[0..4].copy_from_slice(&HANDLE_MAGIC);
            handle[4] = HANDLE_VERSION;
            let _ = Handle::parse(&handle);
        }
    }
}
