//! The receiver's side of messages: posted buffers, the credits that tell of them, and which of their
//! bytes have arrived.
//!
//! The sender may send only what a posted buffer waits for, so there is no unexpected data and no
//! queue of it: a chunk names message and offset, and its place in memory follows. A chunk of a
//! message that was never posted, or beyond its buffer, comes from a peer that breaks the rules: the
//! whole packet is refused and *not acknowledged*, so that nothing counts as delivered that was not
//! placed. A chunk of a complete message is an echo, and is acknowledged again.

use rustc_hash::FxHashMap;

use super::format::Chunk;
use super::number;
use super::numbered::Numbered;
use crate::ranges::Ranges;

/// What becomes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its bytes go into the buffer of this message.
    Place(u64),
    /// All of it was there already.
    Echo,
    /// No buffer was posted for it.
    NotPosted,
}

#[derive(Debug)]
struct Buffer {
    room: u64,
    /// Payload of the bare packets that it takes; 0: none.
    unit: u64,
    got: Ranges,
    total: Option<u64>,
}

impl Buffer {
    /// Whether a chunk has the form that was asked for. In bare packets each but the last has a whole unit, at
    /// a multiple of it: so a buffer never holds more packets than it has units.
    fn takes(&self, chunk: &Chunk<'_>, bare: bool) -> bool {
        let length = chunk.payload.len() as u64;
        match self.unit {
            0 => !bare,
            unit => {
                let whole = length == unit || (chunk.last && length < unit);
                bare && whole && chunk.offset.is_multiple_of(unit)
            }
        }
    }
}

/// The buffers of a channel.
#[derive(Debug, Default)]
struct Channel {
    /// The number of the next message.
    next: u64,
    posted: Numbered<Buffer>,
}

/// All posted buffers of one side.
#[derive(Debug, Default)]
pub struct Incoming {
    channels: FxHashMap<u32, Channel>,
    /// How many buffers wait.
    waiting: usize,
}

impl Incoming {
    /// A buffer of `room` bytes is there: the number of the message that will come into it. With a `unit` it
    /// takes bare packets of that much payload, and no others.
    pub fn post(&mut self, channel: u32, room: u64, unit: u16) -> u64 {
        let channel = self.channels.entry(channel).or_default();
        let message = channel.next;
        channel.next += 1;
        let buffer = Buffer {
            room,
            unit: u64::from(unit),
            got: Ranges::default(),
            total: None,
        };
        channel.posted.insert(message, buffer);
        self.waiting += 1;
        message
    }

    /// The full number of a message of this channel.
    pub fn number(&self, channel: u32, low: u32) -> u64 {
        let next = self.channels.get(&channel).map_or(0, |of| of.next);
        number::expand(low, next)
    }

    /// What would become of this chunk, of a bare packet or another; nothing changes.
    pub fn judge(&self, chunk: &Chunk<'_>, bare: bool) -> Verdict {
        let Some(channel) = self.channels.get(&chunk.channel) else {
            return Verdict::NotPosted;
        };
        let message = number::expand(chunk.message, channel.next);
        let Some(buffer) = channel.posted.get(message) else {
            return if message < channel.next {
                Verdict::Echo
            } else {
                Verdict::NotPosted
            };
        };
        let end = chunk.offset + chunk.payload.len() as u64;
        let beyond = end > buffer.total.unwrap_or(buffer.room);
        let another_end = chunk.last && buffer.total.is_some_and(|total| total != end);
        if beyond || another_end || !buffer.takes(chunk, bare) {
            return Verdict::NotPosted;
        }
        let there = buffer.got.contains(chunk.offset, end);
        if there && !(chunk.last && buffer.total.is_none()) {
            return Verdict::Echo;
        }
        Verdict::Place(message)
    }

    /// A chunk's bytes were placed. The message's length, if it is complete.
    pub fn placed(&mut self, message: u64, chunk: &Chunk<'_>) -> Option<u64> {
        let posted = &mut self.channels.get_mut(&chunk.channel)?.posted;
        let buffer = posted.get_mut(message)?;
        let end = chunk.offset + chunk.payload.len() as u64;
        buffer.got.insert(chunk.offset, end);
        if chunk.last {
            buffer.total = Some(end);
        }
        let total = buffer.total.filter(|total| buffer.got.total() >= *total)?;
        posted.remove(message);
        self.waiting -= 1;
        Some(total)
    }

    /// The peer will not send this one.
    pub fn refused(&mut self, channel: u32, message: u64) -> Option<u64> {
        let buffer = self.channels.get_mut(&channel)?.posted.remove(message)?;
        self.waiting -= 1;
        Some(buffer.room)
    }

    /// No byte of this channel is placed any more: what still comes counts as heard before.
    pub fn forget(&mut self, channel: u32) {
        if let Some(channel) = self.channels.get_mut(&channel) {
            self.waiting -= channel.posted.len();
            channel.posted.clear();
        }
    }

    /// Whether buffers wait.
    pub fn waits(&self) -> bool {
        self.waiting > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_finds_its_buffer_or_is_refused() {
        let mut incoming = Incoming::default();
        let chunk = |message, offset, payload, last| Chunk {
            channel: 1,
            message,
            offset,
            last,
            payload,
        };
        assert_eq!(
            incoming.judge(&chunk(0, 0, b"abc", true), false),
            Verdict::NotPosted
        );
        assert_eq!(incoming.post(1, 5, 0), 0);
        assert_eq!(
            incoming.judge(&chunk(1, 0, b"abc", true), false),
            Verdict::NotPosted
        );
        assert_eq!(
            incoming.judge(&chunk(0, 3, b"abc", true), false),
            Verdict::NotPosted
        );
        let end = chunk(0, 2, b"cd", true);
        assert_eq!(incoming.judge(&end, false), Verdict::Place(0));
        assert_eq!(incoming.placed(0, &end), None);
        assert_eq!(incoming.judge(&end, false), Verdict::Echo);
        assert_eq!(
            incoming.judge(&chunk(0, 0, b"ab", true), false),
            Verdict::NotPosted
        );
        assert_eq!(
            incoming.judge(&chunk(0, 4, b"e", false), false),
            Verdict::NotPosted
        );
        assert_eq!(incoming.placed(0, &chunk(0, 0, b"ab", false)), Some(4));
        assert_eq!(incoming.judge(&end, false), Verdict::Echo);
        assert!(!incoming.waits());
        assert_eq!(incoming.post(1, 0, 0), 1);
        let empty = chunk(1, 0, b"", true);
        assert_eq!(incoming.judge(&empty, false), Verdict::Place(1));
        assert_eq!(incoming.placed(1, &empty), Some(0));
    }

    #[test]
    fn bare_packets_come_in_units_to_buffers_that_ask_for_them() {
        let mut incoming = Incoming::default();
        let chunk = |message, offset, payload, last| Chunk {
            channel: 1,
            message,
            offset,
            last,
            payload,
        };
        incoming.post(1, 11, 4);
        incoming.post(1, 11, 0);
        let first = chunk(0, 0, b"abcd", false);
        let end = chunk(0, 8, b"ijk", true);
        assert_eq!(incoming.judge(&first, true), Verdict::Place(0));
        assert_eq!(incoming.judge(&end, true), Verdict::Place(0));
        for wrong in [
            chunk(0, 0, b"abc", false),
            chunk(0, 2, b"abcd", false),
            chunk(0, 0, b"", false),
            chunk(0, 4, b"abcde", true),
            chunk(0, 8, b"abcd", true),
        ] {
            assert_eq!(
                incoming.judge(&wrong, true),
                Verdict::NotPosted,
                "{wrong:?}"
            );
        }
        assert_eq!(incoming.judge(&first, false), Verdict::NotPosted);
        let other = chunk(1, 0, b"abcd", false);
        assert_eq!(incoming.judge(&other, true), Verdict::NotPosted);
        assert_eq!(incoming.judge(&other, false), Verdict::Place(1));
    }
}
