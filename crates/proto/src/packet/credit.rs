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
use crate::faults::{self, Fault};
use crate::line::LINE;
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
    got: Ranges,
    total: Option<u64>,
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
    /// A buffer of `room` bytes is there: the number of the message that will come into it.
    pub fn post(&mut self, channel: u32, room: u64) -> u64 {
        let channel = self.channels.entry(channel).or_default();
        let message = channel.next;
        channel.next += 1;
        let buffer = Buffer {
            room,
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

    /// What would become of this chunk; nothing changes.
    pub fn judge(&self, chunk: &Chunk<'_>) -> Verdict {
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
        if beyond || another_end {
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
        let missing = if faults::is(Fault::Unfinished) {
            16 * LINE
        } else {
            0
        };
        let total = buffer
            .total
            .filter(|total| buffer.got.total() + missing >= *total)?;
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
            incoming.judge(&chunk(0, 0, b"abc", true)),
            Verdict::NotPosted
        );
        assert_eq!(incoming.post(1, 5), 0);
        assert_eq!(
            incoming.judge(&chunk(1, 0, b"abc", true)),
            Verdict::NotPosted
        );
        assert_eq!(
            incoming.judge(&chunk(0, 3, b"abc", true)),
            Verdict::NotPosted
        );
        let end = chunk(0, 2, b"cd", true);
        assert_eq!(incoming.judge(&end), Verdict::Place(0));
        assert_eq!(incoming.placed(0, &end), None);
        assert_eq!(incoming.judge(&end), Verdict::Echo);
        assert_eq!(
            incoming.judge(&chunk(0, 0, b"ab", true)),
            Verdict::NotPosted
        );
        assert_eq!(
            incoming.judge(&chunk(0, 4, b"e", false)),
            Verdict::NotPosted
        );
        assert_eq!(incoming.placed(0, &chunk(0, 0, b"ab", false)), Some(4));
        assert_eq!(incoming.judge(&end), Verdict::Echo);
        assert!(!incoming.waits());
        assert_eq!(incoming.post(1, 0), 1);
        let empty = chunk(1, 0, b"", true);
        assert_eq!(incoming.judge(&empty), Verdict::Place(1));
        assert_eq!(incoming.placed(1, &empty), Some(0));
    }
}
