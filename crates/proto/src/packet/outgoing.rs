//! Messages that go out: which bytes are next, which were lost, which have arrived.
//!
//! A message waits for its credit. Then chunks are cut from it when a path has room, as large as the
//! packet takes; nothing is dealt out in advance. What is lost comes back as a range of bytes and is
//! cut anew, so a packet is never sent again as it was. A message is complete when packets that held
//! all of its bytes were acknowledged: the receiver places bytes before it acknowledges.
//!
//! Messages up to [`SMALL`] go first, then large ones in turn, a packet each: what is short does not
//! wait behind what is long (shortest first is what pFabric and Homa found best), and none of several
//! long ones waits for another.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::format::CHUNK;
use crate::ranges::Ranges;

/// A message of a channel.
pub type Key = (u32, u64);

/// Longest message that goes before others.
pub const SMALL: u64 = 64 << 10;
/// Credits that are kept for messages that are not there yet.
const MOST_CREDITS: usize = 1 << 16;

/// Bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Queue of messages.
    pub channel: u32,
    /// Number in the channel.
    pub message: u64,
    /// Where they belong.
    pub offset: u64,
    /// How many.
    pub length: u32,
    /// The message ends with them.
    pub last: bool,
}

#[derive(Debug)]
struct Message {
    total: u64,
    /// Bytes before it were sent at least once.
    cursor: u64,
    /// An empty message was sent, or the cursor is at the end.
    ended: bool,
    lost: Vec<(u64, u64)>,
    arrived: Ranges,
    queued: bool,
}

/// What a credit and a message did when they met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// They have not.
    Waits,
    /// Chunks can go.
    Ready,
    /// The message has more bytes than the buffer.
    TooLong {
        /// Bytes of the buffer.
        room: u64,
    },
}

/// All messages of one side.
#[derive(Debug, Default)]
pub struct Outgoing {
    next: FxHashMap<u32, u64>,
    /// Messages without credit: their length.
    waiting: FxHashMap<Key, u64>,
    /// Credits without message: the room.
    credits: FxHashMap<Key, u64>,
    messages: FxHashMap<Key, Message>,
    small: VecDeque<Key>,
    large: VecDeque<Key>,
    /// Channels of which nothing goes any more.
    closed: FxHashSet<u32>,
}

impl Outgoing {
    /// The number that the next message of a channel gets.
    pub fn next(&self, channel: u32) -> u64 {
        self.next.get(&channel).copied().unwrap_or(0)
    }

    /// A message of `total` bytes. In a channel that is forgotten it gets a number, and never goes.
    pub fn send(&mut self, channel: u32, total: u64) -> (u64, Met) {
        let next = self.next.entry(channel).or_insert(0);
        let message = *next;
        *next += 1;
        let key = (channel, message);
        if self.closed.contains(&channel) {
            return (message, Met::Waits);
        }
        match self.credits.remove(&key) {
            Some(room) => (message, self.start(key, total, room)),
            None => {
                self.waiting.insert(key, total);
                (message, Met::Waits)
            }
        }
    }

    /// The length of a message that waits for its credit, or 0.
    pub fn waiting(&self, channel: u32, message: u64) -> u64 {
        self.waiting.get(&(channel, message)).copied().unwrap_or(0)
    }

    /// A credit from the peer. `None`: there are too many without a message.
    pub fn credit(&mut self, channel: u32, message: u64, room: u64) -> Option<Met> {
        let key = (channel, message);
        if let Some(total) = self.waiting.remove(&key) {
            return Some(self.start(key, total, room));
        }
        // One that is said twice, or for nothing.
        if message < self.next(channel) || self.closed.contains(&channel) {
            return Some(Met::Waits);
        }
        if self.credits.len() >= MOST_CREDITS && !self.credits.contains_key(&key) {
            return None;
        }
        self.credits.insert(key, room);
        Some(Met::Waits)
    }

    fn start(&mut self, key: Key, total: u64, room: u64) -> Met {
        if total > room {
            return Met::TooLong { room };
        }
        let message = Message {
            total,
            cursor: 0,
            ended: false,
            lost: Vec::new(),
            arrived: Ranges::default(),
            queued: false,
        };
        self.messages.insert(key, message);
        self.queue(key, false);
        Met::Ready
    }

    fn queue(&mut self, key: Key, first: bool) {
        let Some(message) = self.messages.get_mut(&key) else {
            return;
        };
        if std::mem::replace(&mut message.queued, true) {
            return;
        }
        let list = if message.total <= SMALL {
            &mut self.small
        } else {
            &mut self.large
        };
        if first {
            list.push_front(key)
        } else {
            list.push_back(key)
        }
    }

    /// Nothing of this channel goes any more, and its credits mean nothing. Its numbers go on: what is
    /// confirmed late must not be taken for another message.
    pub fn forget(&mut self, channel: u32) {
        self.closed.insert(channel);
        self.waiting.retain(|key, _| key.0 != channel);
        self.credits.retain(|key, _| key.0 != channel);
        self.messages.retain(|key, _| key.0 != channel);
        self.small.retain(|key| key.0 != channel);
        self.large.retain(|key| key.0 != channel);
    }

    /// Whether there is something that could go now.
    pub fn has_work(&self) -> bool {
        !self.small.is_empty() || !self.large.is_empty()
    }

    /// Whether any message is not complete.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.waiting.is_empty()
    }

    /// The next bytes for a packet with so much room, their frame's header included.
    pub fn pull(&mut self, room: usize) -> Option<Span> {
        let most = room.checked_sub(CHUNK + 1)? as u64 + 1;
        let most = most.min(u64::from(u16::MAX));
        loop {
            let small = !self.small.is_empty();
            let list = if small {
                &mut self.small
            } else {
                &mut self.large
            };
            let key = list.pop_front()?;
            let Some(message) = self.messages.get_mut(&key) else {
                continue;
            };
            message.queued = false;
            let Some((offset, end)) = message.pull(most) else {
                continue;
            };
            let span = Span {
                channel: key.0,
                message: key.1,
                offset,
                length: (end - offset) as u32,
                last: end == message.total,
            };
            if !message.lost.is_empty() || !message.ended {
                self.queue(key, small);
            }
            return Some(span);
        }
    }

    /// These bytes were in a packet that is lost.
    pub fn lost(&mut self, span: &Span) {
        let key = (span.channel, span.message);
        let Some(message) = self.messages.get_mut(&key) else {
            return;
        };
        let end = span.offset + u64::from(span.length);
        if message.total == 0 {
            message.ended = false;
        } else if !message.arrived.contains(span.offset, end) {
            message.lost.push((span.offset, end));
        }
        self.queue(key, true);
    }

    /// These bytes have arrived. `true`: and with them the message is complete.
    pub fn arrived(&mut self, span: &Span) -> bool {
        let key = (span.channel, span.message);
        let Some(message) = self.messages.get_mut(&key) else {
            return false;
        };
        let end = span.offset + u64::from(span.length);
        message.arrived.insert(span.offset, end);
        let complete = message.arrived.total() == message.total;
        if complete {
            self.messages.remove(&key);
        }
        complete
    }
}

impl Message {
    /// Lost bytes first, then new ones.
    fn pull(&mut self, most: u64) -> Option<(u64, u64)> {
        while let Some((start, end)) = self.lost.pop() {
            if self.arrived.contains(start, end) {
                continue;
            }
            let cut = end.min(start + most);
            if cut < end {
                self.lost.push((cut, end));
            }
            return Some((start, cut));
        }
        if self.ended {
            return None;
        }
        let start = self.cursor;
        self.cursor = self.total.min(start + most);
        self.ended = self.cursor == self.total;
        Some((start, self.cursor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn credit_and_message_meet_in_any_order() {
        let mut out = Outgoing::default();
        assert_eq!(out.send(3, 10), (0, Met::Waits));
        assert!(!out.has_work());
        assert_eq!(out.credit(3, 0, 10), Some(Met::Ready));
        assert!(out.has_work());
        assert_eq!(out.credit(3, 1, 9), Some(Met::Waits));
        assert_eq!(out.send(3, 10), (1, Met::TooLong { room: 9 }));
        assert_eq!(out.credit(3, 0, 10), Some(Met::Waits));
    }

    /// Found by the fuzzer: numbers began anew, and one message was confirmed twice.
    #[test]
    fn a_channel_that_is_forgotten_takes_nothing_and_repeats_no_number() {
        let mut out = Outgoing::default();
        out.credit(1, 0, 10);
        assert_eq!(out.send(1, 10), (0, Met::Ready));
        let span = out.pull(100).unwrap();
        out.forget(1);
        assert_eq!(out.send(1, 10), (1, Met::Waits));
        assert_eq!(out.credit(1, 1, 10), Some(Met::Waits));
        assert_eq!(out.credit(1, 0, 10), Some(Met::Waits));
        assert!(!out.arrived(&span));
        assert!(!out.has_work() && out.is_idle());
    }

    #[test]
    fn small_ones_go_first_and_large_ones_in_turn() {
        let mut out = Outgoing::default();
        for channel in 0..3 {
            out.credit(channel, 0, 1 << 20);
        }
        out.send(0, 1 << 20);
        out.send(1, 1 << 20);
        let turn: Vec<u32> = (0..4).map(|_| out.pull(1000).unwrap().channel).collect();
        assert_eq!(turn, [0, 1, 0, 1]);
        out.send(2, 2000);
        let turn: Vec<u32> = (0..4).map(|_| out.pull(1000).unwrap().channel).collect();
        assert_eq!(turn[..3], [2, 2, 2]);
    }

    proptest! {
        /// Whatever is lost, and however often: all bytes go until all have arrived, then none.
        #[test]
        fn it_sends_until_all_has_arrived(
            totals in prop::collection::vec(0u64..9000, 1..6),
            fates in prop::collection::vec(any::<bool>(), 1..400), room in 30usize..1500,
        ) {
            let (mut out, mut left) = (Outgoing::default(), totals.len());
            for (channel, total) in totals.iter().enumerate() {
                out.credit(channel as u32, 0, 9000);
                prop_assert_eq!(out.send(channel as u32, *total).1, Met::Ready);
            }
            let mut fates = fates.into_iter();
            while let Some(span) = out.pull(room) {
                prop_assert!(span.offset + u64::from(span.length) <= totals[span.channel as usize]);
                prop_assert!(CHUNK + span.length as usize <= room);
                if fates.next().unwrap_or(true) {
                    left -= usize::from(out.arrived(&span));
                } else {
                    out.lost(&span);
                }
            }
            prop_assert_eq!(left, 0);
            prop_assert!(out.is_idle());
        }
    }
}
