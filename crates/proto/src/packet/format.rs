//! What a packet looks like: one UDP datagram, little endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | magic |
//! | 1 | version |
//! | 2 | kind, and two flags: acknowledge this at once, or with many others |
//! | 3 | path: the place of the source port in the sender's list |
//! | 4..8 | connection: the number that the receiver gave it |
//! | 8..12 | packet number, its low 32 bits |
//! | 12..16 | when it was sent: microseconds of the sender's clock, round and round |
//! | 16..24 | tag ([`auth`](super::auth)) |
//! | 24.. | frames, or what a greeting says |
//!
//! Bytes 0 to 16 and the layout of greetings do not change between versions (as the invariants of
//! RFC 8999), so that two versions can tell each other what they speak.
//!
//! A chunk's header has 17 bytes: at MTU 1500 over IPv4 a packet has room for 1431 bytes of payload, 95.4%
//! of it; TCP with time stamps carries 1448.
//!
//! [`Frames`] checks each length before it reads, and never panics. Nothing here knows state: what a
//! frame *may* say is the connection's to judge.

mod frame;
mod header;

pub use frame::{Ack, Chunk, Frame, Frames, Heard, Writer};
pub use header::{GREETING, Greeting, Haste, Header, Kind};

/// Bytes before the frames.
pub const HEADER: usize = 24;
/// Bytes of a chunk's frame before its payload.
pub const CHUNK: usize = 17;
/// Bytes of the header before the tag.
pub const PLAIN: usize = 16;
/// Highest offset of a message: 48 bits are written.
pub const MAX_OFFSET: u64 = (1 << 48) - 1;
/// Most ranges in one acknowledgement, the newest not counted. Over ways of unequal delay each run of a longer one is
/// a gap for as long as it is on its way; what is not told is taken for lost.
pub const MAX_RANGES: usize = 255;
/// The only version there is.
pub const VERSION: u8 = 5;

/// Why bytes are not a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Fewer bytes than a field needs.
    #[error("a packet ends in the middle of its {0}")]
    Short(&'static str),
    /// Not our magic number.
    #[error("magic {0:#04x} is not Evener's")]
    Magic(u8),
    /// A version that this build does not speak.
    #[error("version {0} of the packet protocol; this build speaks {VERSION}")]
    Version(u8),
    /// A kind of packet or frame that does not exist.
    #[error("kind {0} does not exist")]
    Kind(u8),
    /// A field is outside of what its kind allows.
    #[error("a {0} frame with fields that cannot be")]
    Field(&'static str),
}

#[derive(Debug, Clone)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    #[inline(always)]
    fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], FormatError> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or(FormatError::Short(what))?;
        self.0 = rest;
        Ok(taken)
    }

    #[inline(always)]
    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FormatError> {
        let (taken, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(FormatError::Short(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    #[inline(always)]
    fn u8(&mut self, what: &'static str) -> Result<u8, FormatError> {
        Ok(self.array::<1>(what)?[0])
    }

    #[inline(always)]
    fn u16(&mut self, what: &'static str) -> Result<u16, FormatError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    #[inline(always)]
    fn u32(&mut self, what: &'static str) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    #[inline(always)]
    fn u48(&mut self, what: &'static str) -> Result<u64, FormatError> {
        let (low, high) = (self.u32(what)?, self.u16(what)?);
        Ok(u64::from(low) | u64::from(high) << 32)
    }
}
