//! The blocks of a trace: pcapng (draft-ietf-opsawg-pcapng), with two interfaces.
//!
//! The first has packets as raw IP: the addresses and ports are real, behind UDP's header come the 24
//! bytes of the packet protocol's, and the payload is left out (the block says how long it was). The
//! second has events in a layout of our own (LINKTYPE_USER0), of [`EVENT`] bytes each. What is worth
//! reading has a comment.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use evener_proto::packet::trace::{Cause, Decision, Note, What};

/// Interface of packets ...
pub const PACKETS: u32 = 0;
/// ... and of events.
pub const EVENTS: u32 = 1;
/// Bytes of an event.
pub const EVENT: usize = 48;
/// Version of an event's layout.
const LAYOUT: u8 = 1;
const RAW_IP: u16 = 101;
const USER0: u16 = 147;
const UDP: u8 = 17;
/// Bytes of a UDP header.
const BEFORE: usize = 8;

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    let length = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    out.extend(length.to_le_bytes());
}

fn pad(out: &mut Vec<u8>, length: usize) {
    out.extend(std::iter::repeat_n(0, length.next_multiple_of(4) - length));
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(value);
    pad(out, value.len());
}

const END: [u8; 4] = [0; 4];
const COMMENT: u16 = 1;

fn time(out: &mut Vec<u8>, at: Duration) {
    let nanoseconds = at.as_nanos() as u64;
    out.extend(((nanoseconds >> 32) as u32).to_le_bytes());
    out.extend((nanoseconds as u32).to_le_bytes());
}

/// The blocks that a file begins with. `process`: its name.
pub fn begin(out: &mut Vec<u8>, process: &str) {
    block(out, 0x0a0d_0d0a, |out| {
        out.extend(0x1a2b_3c4du32.to_le_bytes());
        out.extend([1, 0, 0, 0]);
        out.extend(u64::MAX.to_le_bytes());
        option(out, COMMENT, process.as_bytes());
        let by = concat!("Evener ", env!("CARGO_PKG_VERSION"));
        option(out, 4, by.as_bytes());
        out.extend(END);
    });
    let interfaces = [
        (RAW_IP, "packets", "headers of packets, payload left out"),
        (USER0, "events", "docs/reference/network-trace.md"),
    ];
    for (link, name, description) in interfaces {
        block(out, 1, |out| {
            out.extend(link.to_le_bytes());
            out.extend([0; 6]);
            option(out, 2, name.as_bytes());
            option(out, 3, description.as_bytes());
            // Times are in nanoseconds.
            option(out, 9, &[9]);
            out.extend(END);
        });
    }
}

/// A packet or an event. `size`: its bytes before some were left out; `inbound`: it came, or went.
pub fn packet(
    out: &mut Vec<u8>,
    interface: u32,
    at: Duration,
    bytes: &[u8],
    size: usize,
    inbound: Option<bool>,
    comment: &str,
) {
    block(out, 6, |out| {
        out.extend(interface.to_le_bytes());
        time(out, at);
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend((size as u32).to_le_bytes());
        out.extend(bytes);
        pad(out, bytes.len());
        if let Some(inbound) = inbound {
            let flags: u32 = if inbound { 1 } else { 2 };
            option(out, 2, &flags.to_le_bytes());
        }
        if !comment.is_empty() {
            option(out, COMMENT, comment.as_bytes());
        }
        if inbound.is_some() || !comment.is_empty() {
            out.extend(END);
        }
    });
}

/// What was counted on an interface.
pub fn counted(out: &mut Vec<u8>, interface: u32, at: Duration, records: u64, missed: u64) {
    block(out, 5, |out| {
        out.extend(interface.to_le_bytes());
        time(out, at);
        option(out, 4, &records.to_le_bytes());
        option(out, 5, &missed.to_le_bytes());
        out.extend(END);
    });
}

fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2);
    let mut sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// IP and UDP before `head`, the first bytes of a datagram of `length`. No checksum of UDP: the payload
/// is not there.
pub fn datagram(from: SocketAddr, to: SocketAddr, head: &[u8], length: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(40 + BEFORE + head.len());
    let inner = (BEFORE + length).min(usize::from(u16::MAX) - 40) as u16;
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            out.extend([0x45, 0]);
            out.extend((inner + 20).to_be_bytes());
            out.extend([0, 0, 0x40, 0, 64, UDP, 0, 0]);
            out.extend(from.octets());
            out.extend(to.octets());
            let sum = sum(&out);
            out[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (from, to) => {
            let six = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            out.extend([0x60, 0, 0, 0]);
            out.extend(inner.to_be_bytes());
            out.extend([UDP, 64]);
            out.extend(six(from).octets());
            out.extend(six(to).octets());
        }
    }
    out.extend(from.port().to_be_bytes());
    out.extend(to.port().to_be_bytes());
    out.extend(inner.to_be_bytes());
    out.extend([0, 0]);
    out.extend(head);
    out
}

fn fixed(kind: u8, path: u8, detail: u8, connection: u32) -> [u8; EVENT] {
    let mut out = [0; EVENT];
    out[..4].copy_from_slice(&[LAYOUT, kind, path, detail]);
    out[4..8].copy_from_slice(&connection.to_le_bytes());
    out
}

fn small(time: Duration) -> [u8; 4] {
    u32::try_from(time.as_micros())
        .unwrap_or(u32::MAX)
        .to_le_bytes()
}

/// A connection is open: its number here and at the peer.
pub fn opened(own: u32, other: u32) -> [u8; EVENT] {
    let mut out = fixed(6, u8::MAX, 0, own);
    out[8..16].copy_from_slice(&u64::from(other).to_le_bytes());
    out
}

/// A connection is over.
pub fn over(own: u32) -> [u8; EVENT] {
    fixed(7, u8::MAX, 0, own)
}

/// What the protocol did, and in words, if it is no everyday matter.
pub fn event(connection: u32, note: &Note) -> ([u8; EVENT], String) {
    let path = note.path;
    let (kind, detail) = match note.what {
        What::Arrived { late, .. } => (1, u8::from(late)),
        What::Lost { cause, .. } => (2, cause as u8 + 1),
        What::Silent { .. } => (3, 0),
        What::Replaced { by } => (4, by),
        What::Decided { decision, .. } => (5, decision as u8 + 1),
    };
    let mut out = fixed(kind, path, detail, connection);
    let mut words = String::new();
    let mut numbers = |number: u64, size: u32, took: Duration, trip: Duration| {
        out[8..16].copy_from_slice(&number.to_le_bytes());
        out[16..20].copy_from_slice(&size.to_le_bytes());
        out[20..24].copy_from_slice(&small(took));
        out[24..28].copy_from_slice(&small(trip));
    };
    match note.what {
        What::Arrived {
            number,
            size,
            took,
            trip,
            late,
        } => {
            numbers(number, size, took, trip.unwrap_or_default());
            if late {
                words = format!("packet {number} of path {path} was taken for lost, and arrived");
            }
        }
        What::Lost {
            number,
            size,
            took,
            cause,
        } => {
            numbers(number, size, took, Duration::ZERO);
            let why = match cause {
                Cause::Order => "later ones have arrived",
                Cause::Silence => "the path is silent",
            };
            words = format!("packet {number} of path {path} is taken for lost: {why}");
        }
        What::Silent { times } => {
            numbers(0, times, Duration::ZERO, Duration::ZERO);
            words = format!("path {path} is silent, {times} time(s) in a row");
        }
        What::Replaced { by } => words = format!("path {path} is replaced by path {by}"),
        What::Decided {
            decision,
            waited,
            window,
        } => {
            let size = u32::try_from(window).unwrap_or(u32::MAX);
            numbers(0, size, waited, Duration::ZERO);
            let waited = waited.as_micros();
            words = match decision {
                Decision::Shrink => {
                    format!("path {path} shrinks to {window} bytes: packets waited {waited} us")
                }
                Decision::Heavy => format!("many are lost: all windows shrink, to {window} bytes"),
                Decision::Compete => {
                    format!("path {path} competes from {window} bytes: another fills its queue")
                }
                Decision::Yield => format!("a loss on path {path} while it competes: it shrinks"),
                Decision::Drain => format!("a drain begins: all windows together {window} bytes"),
                Decision::Refill => format!("a drain ends: all windows together {window} bytes"),
            };
        }
    }
    out[32..40].copy_from_slice(&note.total.to_le_bytes());
    out[40..48].copy_from_slice(&note.flying.to_le_bytes());
    (out, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_of_ip_has_its_sum() {
        let (from, to) = ("10.0.0.1:5", "10.0.0.2:6");
        let bytes = datagram(from.parse().unwrap(), to.parse().unwrap(), &[1; 24], 1472);
        assert_eq!(bytes.len(), 20 + 8 + 24);
        // With its own sum in it the sum is nothing.
        assert_eq!(sum(&bytes[..20]), 0);
        assert_eq!(u16::from_be_bytes([bytes[2], bytes[3]]), 1500);
        let six = datagram(
            "[::1]:5".parse().unwrap(),
            "[::1]:6".parse().unwrap(),
            &[],
            9,
        );
        assert_eq!((six.len(), six[0]), (48, 0x60));
    }
}
