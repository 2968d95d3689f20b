//! Messages that go out: which bytes are next, which were lost, which have arrived.
//!
//! A message waits for its credit. Then chunks are cut from it when a path has room, as large as the
//! packet takes but between [`line`]s; nothing is dealt out in advance. What is lost comes back as a range of bytes and is
//! cut anew, so a packet is never sent again as it was. A message is complete when packets that held
//! all of its bytes were acknowledged: the receiver places bytes before it acknowledges.
//!
//! Messages up to [`SMALL`] go first, then large ones: what is short does not wait behind what is long
//! (shortest first is what pFabric and Homa found best). Large ones of a channel go one after the other,
//! as their receiver uses them: if all went at once, all would be complete at once, and who sends a few
//! at a time (NCCL: eight) would have nothing to send then. Channels are in turn, [`TURN`] bytes each, so
//! none waits for another.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::format::CHUNK;
use super::numbered::Numbered;
use crate::line;
use crate::ranges::Ranges;

/// A message of a channel.
pub type Key = (u32, u64);

/// Longest message that goes before others.
pub const SMALL: u64 = 64 << 10;
/// Bytes of a channel's large messages before it is another channel's turn.
const TURN: u64 = 32 << 10;
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

/// A channel's messages.
#[derive(Debug, Default)]
struct Channel {
    /// What it is called.
    name: u32,
    /// The number of the next message.
    next: u64,
    /// Nothing of it goes any more.
    closed: bool,
    /// Those that have their credit and are not complete.
    messages: Numbered<Message>,
    /// The large ones that have something to send, the next first, and bytes in its present turn.
    line: VecDeque<u64>,
    sent: u64,
}

/// A message under way: the place of its channel, and its number in it.
type Place = (usize, u64);

/// All messages of one side.
#[derive(Debug, Default)]
pub struct Outgoing {
    channels: Vec<Channel>,
    places: FxHashMap<u32, usize>,
    /// Messages without credit: their length.
    waiting: FxHashMap<Key, u64>,
    /// Credits without message: the room.
    credits: FxHashMap<Key, u64>,
    /// Messages that have their credit and are not complete.
    started: usize,
    small: VecDeque<Place>,
    /// Places of channels whose line is not empty, in turn.
    large: VecDeque<usize>,
}

impl Outgoing {
    fn channel(&self, channel: u32) -> Option<&Channel> {
        self.channels.get(*self.places.get(&channel)?)
    }

    /// The place of a channel, which is made if it is new.
    fn place(&mut self, channel: u32) -> usize {
        *self.places.entry(channel).or_insert_with(|| {
            self.channels.push(Channel {
                name: channel,
                ..Channel::default()
            });
            self.channels.len() - 1
        })
    }

    fn message(&mut self, (place, message): Place) -> Option<&mut Message> {
        self.channels.get_mut(place)?.messages.get_mut(message)
    }

    /// The number that the next message of a channel gets.
    pub fn next(&self, channel: u32) -> u64 {
        self.channel(channel).map_or(0, |channel| channel.next)
    }

    fn is_closed(&self, channel: u32) -> bool {
        self.channel(channel).is_some_and(|channel| channel.closed)
    }

    /// A message of `total` bytes. In a channel that is forgotten it gets a number, and never goes.
    pub fn send(&mut self, channel: u32, total: u64) -> (u64, Met) {
        let place = self.place(channel);
        let of = &mut self.channels[place];
        let message = of.next;
        of.next += 1;
        if of.closed {
            return (message, Met::Waits);
        }
        match self.credits.remove(&(channel, message)) {
            Some(room) => (message, self.start((place, message), total, room)),
            None => {
                self.waiting.insert((channel, message), total);
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
            let place = self.place(channel);
            return Some(self.start((place, message), total, room));
        }
        // One that is said twice, or for nothing.
        if message < self.next(channel) || self.is_closed(channel) {
            return Some(Met::Waits);
        }
        if self.credits.len() >= MOST_CREDITS && !self.credits.contains_key(&key) {
            return None;
        }
        self.credits.insert(key, room);
        Some(Met::Waits)
    }

    fn start(&mut self, at: Place, total: u64, room: u64) -> Met {
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
        self.channels[at.0].messages.insert(at.1, message);
        self.started += 1;
        self.queue(at, false);
        Met::Ready
    }

    fn queue(&mut self, at: Place, first: bool) {
        let Some(message) = self.message(at) else {
            return;
        };
        if std::mem::replace(&mut message.queued, true) {
            return;
        }
        if message.total <= SMALL {
            put(&mut self.small, at, first);
            return;
        }
        let line = &mut self.channels[at.0].line;
        if line.is_empty() {
            put(&mut self.large, at.0, first);
        }
        put(line, at.1, first);
    }

    /// Nothing of this channel goes any more, and its credits mean nothing. Its numbers go on: what is
    /// confirmed late must not be taken for another message.
    pub fn forget(&mut self, channel: u32) {
        let place = self.place(channel);
        let of = &mut self.channels[place];
        self.started -= of.messages.len();
        of.closed = true;
        of.messages.clear();
        (of.line, of.sent) = (VecDeque::new(), 0);
        self.waiting.retain(|key, _| key.0 != channel);
        self.credits.retain(|key, _| key.0 != channel);
        self.small.retain(|at| at.0 != place);
        self.large.retain(|at| *at != place);
    }

    /// Whether there is something that could go now.
    pub fn has_work(&self) -> bool {
        !self.small.is_empty() || !self.large.is_empty()
    }

    /// Whether any message is not complete.
    pub fn is_idle(&self) -> bool {
        self.started == 0 && self.waiting.is_empty()
    }

    /// The next bytes for a packet with so much room, their frame's header included. `None`: nothing is left,
    /// or no line of what is next fits.
    pub fn pull(&mut self, room: usize) -> Option<Span> {
        let most = room.checked_sub(CHUNK + 1)? as u64 + 1;
        let at = self.front()?;
        let channel = self.channels.get_mut(at.0)?;
        let message = channel.messages.get_mut(at.1)?;
        let (offset, end) = message.pull(most.min(u64::from(u16::MAX)))?;
        let span = Span {
            channel: channel.name,
            message: at.1,
            offset,
            length: (end - offset) as u32,
            last: end == message.total,
        };
        let large = message.total > SMALL;
        if message.lost.is_empty() && message.ended {
            self.leave(at);
        }
        if large && let Some(channel) = self.channels.get_mut(at.0) {
            channel.sent += u64::from(span.length);
            if channel.sent >= TURN && !channel.line.is_empty() {
                channel.sent = 0;
                self.large.rotate_left(1);
            }
        }
        Some(span)
    }

    /// As `has_work`, once what has gone or arrived after all is forgotten.
    pub fn has_next(&mut self) -> bool {
        self.front().is_some()
    }

    /// The message that is next, and has something to send.
    fn front(&mut self) -> Option<Place> {
        loop {
            let small = self.small.front().copied();
            let at = small.or_else(|| self.next_large())?;
            if self.message(at).is_some_and(Message::has_more) {
                return Some(at);
            }
            // It has gone, or what was lost of it has arrived after all.
            self.leave(at);
        }
    }

    fn next_large(&self) -> Option<Place> {
        let place = *self.large.front()?;
        Some((place, *self.channels.get(place)?.line.front()?))
    }

    /// The first of its list has nothing to send now.
    fn leave(&mut self, at: Place) {
        if let Some(message) = self.message(at) {
            message.queued = false;
        }
        if self.small.front() == Some(&at) {
            self.small.pop_front();
        } else if let Some(channel) = self.channels.get_mut(at.0) {
            channel.line.pop_front();
            if channel.line.is_empty() {
                channel.sent = 0;
                self.large.pop_front();
            }
        }
    }

    /// These bytes were in a packet that is lost.
    pub fn lost(&mut self, span: &Span) {
        let Some(place) = self.places.get(&span.channel).copied() else {
            return;
        };
        let at = (place, span.message);
        let Some(message) = self.message(at) else {
            return;
        };
        let end = span.offset + u64::from(span.length);
        if message.total == 0 {
            message.ended = false;
        } else if !message.arrived.contains(span.offset, end) {
            message.lost.push((span.offset, end));
        }
        self.queue(at, true);
    }

    /// These bytes have arrived. `true`: and with them the message is complete.
    pub fn arrived(&mut self, span: &Span) -> bool {
        let Some(place) = self.places.get(&span.channel).copied() else {
            return false;
        };
        let Some(message) = self.message((place, span.message)) else {
            return false;
        };
        let end = span.offset + u64::from(span.length);
        message.arrived.insert(span.offset, end);
        let complete = message.arrived.total() == message.total;
        if complete {
            self.channels[place].messages.remove(span.message);
            self.started -= 1;
        }
        complete
    }
}

fn put<T>(list: &mut VecDeque<T>, one: T, first: bool) {
    if first {
        list.push_front(one);
    } else {
        list.push_back(one);
    }
}

impl Message {
    /// Whether there is something to send; what of the lost has arrived is forgotten.
    fn has_more(&mut self) -> bool {
        while let Some((start, end)) = self.lost.last() {
            if !self.arrived.contains(*start, *end) {
                return true;
            }
            self.lost.pop();
        }
        !self.ended
    }

    /// Lost bytes first, then new ones. `None`: not even one line fits, or nothing is left.
    fn pull(&mut self, most: u64) -> Option<(u64, u64)> {
        while let Some((start, end)) = self.lost.pop() {
            if self.arrived.contains(start, end) {
                continue;
            }
            let cut = start + line::cut(most, end - start);
            if cut < end {
                self.lost.push((cut, end));
            }
            return (cut > start).then_some((start, cut));
        }
        if self.ended {
            return None;
        }
        let start = self.cursor;
        self.cursor += line::cut(most, self.total - start);
        self.ended = self.cursor == self.total;
        (self.ended || self.cursor > start).then_some((start, self.cursor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::LINE;
    use proptest::prelude::*;

    /// What a packet with room for 1000 bytes takes of a long message.
    const PIECE: usize = (1000 - CHUNK) / LINE as usize * LINE as usize;

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
        let turn: Vec<u32> = (0..100).map(|_| out.pull(1000).unwrap().channel).collect();
        let first = turn.iter().position(|channel| *channel == 1).unwrap();
        assert_eq!(first, (TURN as usize).div_ceil(PIECE));
        assert_eq!(turn[2 * first], 0);
        out.send(2, 2000);
        let turn: Vec<u32> = (0..4).map(|_| out.pull(1000).unwrap().channel).collect();
        assert_eq!(turn[..3], [2, 2, 2]);
    }

    #[test]
    fn large_ones_of_a_channel_go_one_after_the_other() {
        let mut out = Outgoing::default();
        for message in 0..3 {
            out.credit(0, message, 1 << 17);
            out.send(0, 1 << 17);
        }
        let all: Vec<Span> = std::iter::from_fn(|| out.pull(1000)).collect();
        assert!(all.is_sorted_by_key(|span| (span.message, span.offset)));
        assert_eq!(all.len(), 3 * (1usize << 17).div_ceil(PIECE));
        // What is lost goes before what is new.
        assert!(!out.has_work());
        out.credit(0, 3, 1 << 17);
        out.send(0, 1 << 17);
        out.lost(&all[3]);
        assert_eq!(out.pull(1000).unwrap().message, 0);
        assert_eq!(out.pull(1000).unwrap().message, 3);
    }

    proptest! {
        /// Whatever is lost, and however often: all bytes go until all have arrived, then none.
        #[test]
        fn it_sends_until_all_has_arrived(
            totals in prop::collection::vec(0u64..9000, 1..6),
            fates in prop::collection::vec(any::<bool>(), 1..400), room in CHUNK + LINE as usize..1500,
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
