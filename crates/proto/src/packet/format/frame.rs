//! Frames: what a packet says after its header, read and written.

use super::{CHUNK, FormatError, MAX_OFFSET, MAX_RANGES, Reader};
use crate::packet::number;

const LAST: u8 = 0x80;

/// Bytes of a message that are in a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// A queue of messages.
    pub channel: u32,
    /// Low bits of the message's number.
    pub message: u32,
    /// Where they belong.
    pub offset: u64,
    /// The message ends with them.
    pub last: bool,
    /// The bytes.
    pub payload: &'a [u8],
}

impl<'a> Chunk<'a> {
    /// The chunk that is all of these frames, as in almost every packet with bytes: read at once, where [`Frames`]
    /// reads field by field. `None`: they are something else, or wrong.
    #[inline(always)]
    pub fn alone(body: &'a [u8]) -> Option<Chunk<'a>> {
        let (head, payload) = body.split_first_chunk::<CHUNK>()?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let offset = u64::from(word(11)) | u64::from(half(15)) << 32;
        let fits = head[0] & !LAST == CHUNK_FRAME
            && usize::from(half(1)) == payload.len()
            && offset + payload.len() as u64 <= MAX_OFFSET;
        fits.then_some(Chunk {
            channel: word(3),
            message: word(7),
            offset,
            last: head[0] & LAST != 0,
            payload,
        })
    }
}

/// What came over one path since the last acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    /// The sender's number of it.
    pub path: u8,
    /// Packets that a switch has marked: its queue is long.
    pub marked: u8,
    /// Receiver's clock less sender's clock, in microseconds, of the newest packet. Only differences
    /// of it mean something.
    pub delay: u32,
}

/// Packets that have arrived: newest first, with gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack<'a> {
    /// Low bits of the highest number.
    pub largest: u32,
    /// How long the receiver has kept this back, microseconds.
    pub held: u16,
    /// Numbers below `largest` that have arrived without a gap.
    pub first: u32,
    ranges: &'a [u8],
    heard: &'a [u8],
}

impl Ack<'_> {
    /// Numbers that are missing, and then numbers that are there, downwards from the first range.
    pub fn ranges(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        self.ranges.chunks_exact(4).map(|part| {
            (
                u16::from_le_bytes([part[0], part[1]]),
                u16::from_le_bytes([part[2], part[3]]),
            )
        })
    }

    /// What came over which path.
    pub fn heard(&self) -> impl Iterator<Item = Heard> + '_ {
        self.heard.chunks_exact(6).map(|part| Heard {
            path: part[0],
            marked: part[1],
            delay: u32::from_le_bytes([part[2], part[3], part[4], part[5]]),
        })
    }
}

/// One thing that a packet says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Here are bytes.
    Chunk(Chunk<'a>),
    /// These packets have arrived.
    Ack(Ack<'a>),
    /// There is a buffer of `room` bytes for this message.
    Credit {
        /// A queue of messages.
        channel: u32,
        /// Low bits of the message's number.
        message: u32,
        /// Bytes of the buffer.
        room: u64,
    },
    /// The message has `total` bytes, and the buffer fewer: it will not come.
    TooLong {
        /// A queue of messages.
        channel: u32,
        /// Low bits of the message's number.
        message: u32,
        /// Its length.
        total: u64,
    },
    /// I care for no packet below this number any more: forget what you know of them.
    Floor(u32),
    /// Acknowledge this packet.
    Ping,
    /// The connection is over.
    Close,
}

const CHUNK_FRAME: u8 = 1;
const ACK_FRAME: u8 = 2;
const CREDIT_FRAME: u8 = 3;
const TOO_LONG_FRAME: u8 = 4;
const FLOOR_FRAME: u8 = 5;
const PING_FRAME: u8 = 6;
/// What follows means nothing; probes of the path's MTU are filled with it.
const PADDING_FRAME: u8 = 7;
const CLOSE_FRAME: u8 = 8;

/// The frames of a packet.
#[derive(Debug, Clone)]
pub struct Frames<'a>(Reader<'a>);

impl<'a> Frames<'a> {
    /// The frames in what follows the header.
    pub fn new(body: &'a [u8]) -> Self {
        Frames(Reader(body))
    }

    fn parse(&mut self, kind: u8) -> Result<Option<Frame<'a>>, FormatError> {
        let reader = &mut self.0;
        Ok(Some(match kind & !LAST {
            CHUNK_FRAME => {
                let length = reader.u16("chunk")?;
                let (channel, message) = (reader.u32("chunk")?, reader.u32("chunk")?);
                let offset = reader.u48("chunk")?;
                if offset + u64::from(length) > MAX_OFFSET {
                    return Err(FormatError::Field("chunk"));
                }
                Frame::Chunk(Chunk {
                    channel,
                    message,
                    offset,
                    last: kind & LAST != 0,
                    payload: reader.take(usize::from(length), "chunk")?,
                })
            }
            _ if kind & LAST != 0 => return Err(FormatError::Kind(kind)),
            ACK_FRAME => {
                let (largest, held) = (reader.u32("ack")?, reader.u16("ack")?);
                let first = reader.u32("ack")?;
                let (ranges, heard) = (reader.u8("ack")?, reader.u8("ack")?);
                if usize::from(ranges) > MAX_RANGES {
                    return Err(FormatError::Field("ack"));
                }
                Frame::Ack(Ack {
                    largest,
                    held,
                    first,
                    ranges: reader.take(usize::from(ranges) * 4, "ack")?,
                    heard: reader.take(usize::from(heard) * 6, "ack")?,
                })
            }
            CREDIT_FRAME => Frame::Credit {
                channel: reader.u32("credit")?,
                message: reader.u32("credit")?,
                room: reader.u48("credit")?,
            },
            TOO_LONG_FRAME => Frame::TooLong {
                channel: reader.u32("refusal")?,
                message: reader.u32("refusal")?,
                total: reader.u48("refusal")?,
            },
            FLOOR_FRAME => Frame::Floor(reader.u32("floor")?),
            PING_FRAME => Frame::Ping,
            PADDING_FRAME => {
                reader.0 = &[];
                return Ok(None);
            }
            CLOSE_FRAME => Frame::Close,
            other => return Err(FormatError::Kind(other)),
        }))
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        let kind = self.0.u8("frame").ok()?;
        let result = self.parse(kind).transpose();
        if matches!(result, Some(Err(_))) {
            self.0.0 = &[];
        }
        result
    }
}

/// Writes frames one after the other into a packet, as far as there is room.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    /// Into `out`, from its start.
    pub fn new(out: &'a mut [u8]) -> Self {
        Writer { out, at: 0 }
    }

    /// Bytes that are left.
    pub fn room(&self) -> usize {
        self.out.len() - self.at
    }

    /// Bytes that were written.
    pub fn written(&self) -> usize {
        self.at
    }

    /// The next `count` bytes, to be filled. `None`: fewer are left.
    fn next(&mut self, count: usize) -> Option<&mut [u8]> {
        let end = self.at.checked_add(count)?;
        let slice = self.out.get_mut(self.at..end)?;
        self.at = end;
        Some(slice)
    }

    fn three(&mut self, kind: u8, channel: u32, message: u32, value: u64) -> bool {
        let Some(out) = self.next(15) else {
            return false;
        };
        out[0] = kind;
        out[1..5].copy_from_slice(&channel.to_le_bytes());
        out[5..9].copy_from_slice(&message.to_le_bytes());
        out[9..15].copy_from_slice(&value.to_le_bytes()[..6]);
        true
    }

    /// A chunk's header; the place for its payload comes back.
    pub fn chunk(
        &mut self,
        (channel, message): (u32, u32),
        offset: u64,
        length: usize,
        last: bool,
    ) -> Option<&mut [u8]> {
        let size = u16::try_from(length).ok()?;
        let out = self.next(CHUNK + length)?;
        let (head, payload) = out.split_at_mut(CHUNK);
        head[0] = CHUNK_FRAME | if last { LAST } else { 0 };
        head[1..3].copy_from_slice(&size.to_le_bytes());
        head[3..7].copy_from_slice(&channel.to_le_bytes());
        head[7..11].copy_from_slice(&message.to_le_bytes());
        head[11..17].copy_from_slice(&offset.to_le_bytes()[..6]);
        Some(payload)
    }

    /// A credit. `false`, here and below: there is no room.
    pub fn credit(&mut self, channel: u32, message: u32, room: u64) -> bool {
        self.three(CREDIT_FRAME, channel, message, room)
    }

    /// A refusal.
    pub fn too_long(&mut self, channel: u32, message: u32, total: u64) -> bool {
        self.three(TOO_LONG_FRAME, channel, message, total)
    }

    /// A floor.
    pub fn floor(&mut self, number: u32) -> bool {
        let Some(out) = self.next(5) else {
            return false;
        };
        out[0] = FLOOR_FRAME;
        out[1..5].copy_from_slice(&number.to_le_bytes());
        true
    }

    /// A ping.
    pub fn ping(&mut self) -> bool {
        self.next(1).map(|out| out[0] = PING_FRAME).is_some()
    }

    /// The end of the connection.
    pub fn close(&mut self) -> bool {
        self.next(1).map(|out| out[0] = CLOSE_FRAME).is_some()
    }

    /// Fills what is left.
    pub fn pad(&mut self) {
        let room = self.room();
        if let Some(out) = self.next(room) {
            out.fill(0);
            if let Some(first) = out.first_mut() {
                *first = PADDING_FRAME;
            }
        }
    }

    /// An acknowledgement: as many of the ranges (newest first, `low..=high`) and paths as fit.
    pub fn ack(
        &mut self,
        held: u16,
        mut ranges: impl Iterator<Item = (u64, u64)>,
        heard: &[Heard],
    ) -> bool {
        let heard = &heard[..heard.len().min(255)];
        let fixed = 13 + heard.len() * 6;
        let Some((low, high)) = ranges.next() else {
            return false;
        };
        let Some(room) = self.room().checked_sub(fixed) else {
            return false;
        };
        let mut parts = [(0u16, 0u16); MAX_RANGES];
        let (mut count, mut below) = (0, low);
        for (low, high) in ranges.take(MAX_RANGES.min(room / 4)) {
            let gap = u16::try_from(below.saturating_sub(high + 1));
            let (Ok(gap), Ok(more)) = (gap, u16::try_from(high - low)) else {
                break;
            };
            parts[count] = (gap, more);
            (count, below) = (count + 1, low);
        }
        let Some(out) = self.next(fixed + count * 4) else {
            return false;
        };
        out[0] = ACK_FRAME;
        out[1..5].copy_from_slice(&number::low(high).to_le_bytes());
        out[5..7].copy_from_slice(&held.to_le_bytes());
        let first = u32::try_from(high - low).unwrap_or(u32::MAX);
        out[7..11].copy_from_slice(&first.to_le_bytes());
        (out[11], out[12]) = (count as u8, heard.len() as u8);
        let (places, rest) = out[13..].split_at_mut(count * 4);
        for (place, (gap, more)) in places.chunks_exact_mut(4).zip(parts) {
            place[..2].copy_from_slice(&gap.to_le_bytes());
            place[2..].copy_from_slice(&more.to_le_bytes());
        }
        for (place, heard) in rest.chunks_exact_mut(6).zip(heard) {
            (place[0], place[1]) = (heard.path, heard.marked);
            place[2..].copy_from_slice(&heard.delay.to_le_bytes());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::format::{Greeting, HEADER, Haste, Header, Kind, VERSION};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_and_chunks_come_back(
            path in any::<u8>(), connection in any::<u32>(), number in any::<u32>(),
            channel in any::<u32>(), message in any::<u32>(), offset in 0..MAX_OFFSET - 2000,
            payload in prop::collection::vec(any::<u8>(), 0..1400), last in any::<bool>(),
        ) {
            let haste = [Haste::Now, Haste::Soon, Haste::Patient][usize::from(path % 3)];
            let header = Header {
                version: VERSION, kind: Kind::Data, haste, path, connection, number,
                stamp: number, tag: offset,
            };
            let mut packet = [0; 1472];
            prop_assert!(header.emit(&mut packet));
            let mut writer = Writer::new(&mut packet[HEADER..]);
            prop_assert!(writer.credit(channel, message, offset));
            let place = writer.chunk((channel, message), offset, payload.len(), last).unwrap();
            place.copy_from_slice(&payload);
            let end = HEADER + writer.written();
            let (parsed, body) = Header::parse(&packet[..end]).unwrap();
            let mut both = packet;
            both[2] |= 0xc0;
            prop_assert!(Header::parse(&both[..end]).is_err(), "at once and patient");
            prop_assert_eq!(parsed, header);
            let frames: Result<Vec<_>, _> = Frames::new(body).collect();
            let credit = Frame::Credit { channel, message, room: offset };
            let chunk = Frame::Chunk(Chunk { channel, message, offset, last, payload: &payload });
            prop_assert_eq!(frames, Ok(vec![credit, chunk]));
        }

        /// What is read at once is what is read field by field, whatever bytes those are.
        #[test]
        fn a_chunk_alone_is_what_its_fields_say(
            mut body in prop::collection::vec(any::<u8>(), 0..60), kind in 0u8..4, right in 0u8..4,
        ) {
            if let (true, Ok(length)) = (right > 0, u16::try_from(body.len().saturating_sub(CHUNK))) {
                for (byte, value) in body.iter_mut().zip([CHUNK_FRAME | if kind & 1 == 1 { LAST } else { 0 }]
                    .into_iter().chain(length.to_le_bytes())) {
                    *byte = value;
                }
            }
            let all: Result<Vec<_>, _> = Frames::new(&body).collect();
            let fields = match all.as_deref() {
                Ok([Frame::Chunk(chunk)]) => Some(*chunk),
                _ => None,
            };
            prop_assert_eq!(Chunk::alone(&body), fields);
            prop_assert!(right == 0 || body.len() < CHUNK || body[16] == 0xff || fields.is_some());
        }

        #[test]
        fn acknowledgements_come_back(
            parts in prop::collection::vec((1u64..60_000, 0u64..60_000), 1..40),
            heard in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u32>()), 0..20),
        ) {
            let mut ranges = Vec::new();
            let mut below = 1u64 << 40;
            for (gap, more) in parts {
                let high = below - gap - 1;
                ranges.push((high - more, high));
                below = high - more;
            }
            let heard: Vec<Heard> = heard.into_iter()
                .map(|(path, marked, delay)| Heard { path, marked, delay }).collect();
            let mut out = [0; 1400];
            let mut writer = Writer::new(&mut out);
            prop_assert!(writer.ack(7, ranges.iter().copied(), &heard));
            let end = writer.written();
            let Some(Ok(Frame::Ack(ack))) = Frames::new(&out[..end]).next() else {
                return Err(TestCaseError::fail("no acknowledgement"));
            };
            let mut high = crate::packet::number::expand(ack.largest, 1 << 40);
            let mut low = high - u64::from(ack.first);
            let mut got = vec![(low, high)];
            for (gap, more) in ack.ranges() {
                high = low - u64::from(gap) - 1;
                low = high - u64::from(more);
                got.push((low, high));
            }
            prop_assert_eq!(got, ranges);
            prop_assert_eq!(ack.heard().collect::<Vec<_>>(), heard);
        }

        #[test]
        fn any_bytes_are_frames_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok((_, body)) = Header::parse(&bytes) {
                let _ = Frames::new(body).count();
            }
            let _ = Frames::new(&bytes).count();
            let _ = Greeting::parse(&bytes);
        }
    }
}
