//! Ethernet, IPv4 and UDP headers of what goes and comes.
//!
//! - **Checksums.** IPv4's is computed over its header. UDP's is zero, which IPv4 allows ("none"): a
//!   datagram carries a keyed tag over all its bytes, which is stronger, and summing the payload would
//!   make the processor read it. What comes is not summed for the same reason; between two
//!   namespaces of one machine kernels leave sums to a card that is not there.
//! - **Not fragmented**: DF is set, and the identification is zero, as RFC 6864 allows then.
//! - **ECN**: packets go as capable of it (ECT(0)), marks are handed on.

use std::net::{Ipv4Addr, SocketAddrV4};

/// Bytes before the payload.
pub const HEADERS: usize = 42;
/// Bytes of the Ethernet header alone.
pub const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const DONT_FRAGMENT: u8 = 0x40;
const ECT0: u8 = 2;
const CE: u8 = 3;
const HOPS: u8 = 64;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// The headers of one path, less lengths and sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    bytes: [u8; HEADERS],
    /// Sum of the IPv4 header with length zero.
    sum: u32,
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn words(bytes: &[u8]) -> u32 {
    let pairs = bytes.chunks_exact(2);
    pairs
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum()
}

impl Template {
    /// From one Ethernet address and port to others.
    pub fn new(here: Mac, hop: Mac, from: SocketAddrV4, to: SocketAddrV4) -> Template {
        let mut bytes = [0; HEADERS];
        bytes[0..6].copy_from_slice(&hop);
        bytes[6..12].copy_from_slice(&here);
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14] = 0x45;
        bytes[15] = ECT0;
        bytes[20] = DONT_FRAGMENT;
        bytes[22] = HOPS;
        bytes[23] = 17;
        bytes[26..30].copy_from_slice(&from.ip().octets());
        bytes[30..34].copy_from_slice(&to.ip().octets());
        bytes[34..36].copy_from_slice(&from.port().to_be_bytes());
        bytes[36..38].copy_from_slice(&to.port().to_be_bytes());
        let sum = words(&bytes[ETHERNET..ETHERNET + IPV4]);
        Template { bytes, sum }
    }

    /// Writes the headers of a datagram with this many bytes of payload. `false`: there is no room for them,
    /// or it is longer than IPv4 can say.
    pub fn write(&self, to: &mut [u8], payload: usize) -> bool {
        let (Some(to), Ok(length)) = (
            to.first_chunk_mut::<HEADERS>(),
            u16::try_from(payload + IPV4 + UDP),
        ) else {
            return false;
        };
        *to = self.bytes;
        to[16..18].copy_from_slice(&length.to_be_bytes());
        let sum = !fold(self.sum + u32::from(length));
        to[24..26].copy_from_slice(&sum.to_be_bytes());
        to[38..40].copy_from_slice(&(length - IPV4 as u16).to_be_bytes());
        true
    }
}

/// A UDP datagram that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// From where.
    pub from: SocketAddrV4,
    /// To which address and port.
    pub to: SocketAddrV4,
    /// A switch says that its queue is long.
    pub marked: bool,
    /// What is in it.
    pub payload: &'a [u8],
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from(bytes[at]) << 8 | u16::from(bytes[at + 1])
}

fn address(bytes: &[u8], at: usize) -> Ipv4Addr {
    Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3])
}

/// The datagram in a frame; `None` where there is no whole one over IPv4 without options.
pub fn parse(frame: &[u8]) -> Option<Datagram<'_>> {
    let head = frame.first_chunk::<HEADERS>()?;
    let plain = head[12..14] == [8, 0] && head[14] == 0x45 && head[23] == 17;
    if !plain || be16(head, 20) & 0x3fff != 0 {
        return None;
    }
    let whole = usize::from(be16(head, 16));
    let length = usize::from(be16(head, 38));
    if length < UDP || IPV4 + length > whole {
        return None;
    }
    Some(Datagram {
        from: SocketAddrV4::new(address(head, 26), be16(head, 34)),
        to: SocketAddrV4::new(address(head, 30), be16(head, 36)),
        marked: head[15] & 3 == CE,
        // A short frame is padded: lengths are the headers'.
        payload: frame.get(HEADERS..HEADERS + length - UDP)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_parsed(
            from: ([u8; 4], u16), to: ([u8; 4], u16),
            payload in prop::collection::vec(any::<u8>(), 0..200),
            padding in 0usize..20, cut in 1usize..20,
        ) {
            let from = SocketAddrV4::new(from.0.into(), from.1);
            let to = SocketAddrV4::new(to.0.into(), to.1);
            let template = Template::new([1; 6], [2; 6], from, to);
            let mut frame = vec![0xee; HEADERS + payload.len() + padding];
            prop_assert!(template.write(&mut frame, payload.len()));
            frame[HEADERS..HEADERS + payload.len()].copy_from_slice(&payload);
            // RFC 1071: over a header with its sum in it, the sum is all ones.
            prop_assert_eq!(fold(words(&frame[14..34])), 0xffff);
            let parsed = parse(&frame).unwrap();
            prop_assert_eq!(parsed, Datagram { from, to, marked: false, payload: &payload });
            let short = (HEADERS + payload.len()).saturating_sub(cut);
            prop_assert_eq!(parse(&frame[..short]), None);
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(frame in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&frame);
        }
    }

    #[test]
    fn the_sum_is_that_of_rfc_1071() {
        // A header whose sum is widely known.
        let mut header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
            0xc7,
        ];
        assert_eq!(!fold(words(&header)), 0xb861);
        header[10..12].copy_from_slice(&[0xb8, 0x61]);
        assert_eq!(fold(words(&header)), 0xffff);
        let (from, to) = ("192.168.0.1:7", "192.168.0.199:9");
        let template = Template::new([0; 6], [0; 6], from.parse().unwrap(), to.parse().unwrap());
        let mut frame = [0; HEADERS];
        assert!(template.write(&mut frame, 0x73 - 28));
        // One bit differs: packets go as capable of ECN.
        assert_eq!(be16(&frame, 24), 0xb861 - 2);
    }

    #[test]
    fn marks_are_read_and_what_is_too_long_is_refused() {
        let address = "10.0.0.1:1".parse().unwrap();
        let template = Template::new([0; 6], [0; 6], address, address);
        let mut frame = [0; HEADERS];
        assert!(template.write(&mut frame, 0));
        frame[15] |= CE;
        assert!(parse(&frame).unwrap().marked);
        assert!(!template.write(&mut frame, 65_508));
        assert!(!template.write(&mut frame[..41], 0));
    }
}
