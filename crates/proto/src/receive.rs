//! The receiving half of a comm in one lane: messages between `irecv` (or the arrival of an eager
//! chunk) and the acknowledgement.

use std::collections::VecDeque;

use crate::ranges::Ranges;
use crate::send::WINDOW;

/// Where the bytes of a chunk belong at this moment. It may change between two reads of one chunk
/// (the message may complete over another path), so it is asked for before each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Into the posted buffer.
    Buffer,
    /// Into this eager slot of the comm.
    Eager(usize),
    /// Nowhere: the message is complete, or the comm is closed.
    Nowhere,
}

#[derive(Debug, Default)]
pub(crate) struct Incoming {
    pub room: Option<u64>,
    pub total: Option<u64>,
    got: Ranges,
    eager: Option<usize>,
    pub complete: bool,
    pub refused: bool,
}

/// What became of a post or a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing more to do for now.
    Wait,
    /// Tell the sender that there is room.
    Credit,
    /// All bytes are in the posted buffer.
    Received(u64),
    /// All bytes are in the eager slot: copy them to the posted buffer.
    Deliver { slot: usize, length: u64 },
    /// The message is longer than the buffer.
    Oversize { total: u64, room: u64 },
    /// Complete long since: the acknowledgement may have been lost.
    Late,
}

#[derive(Debug)]
pub(crate) struct ReceiveComm {
    /// All messages below are complete; number of `messages[0]`.
    pub floor: u64,
    pub messages: VecDeque<Incoming>,
    posted: u64,
    free: Vec<usize>,
    pub accepted: bool,
    pub ack_queued: bool,
}

/// The sender broke a rule of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Violation;

impl ReceiveComm {
    pub fn new(eager_slots: usize) -> Self {
        ReceiveComm {
            floor: 0,
            messages: VecDeque::new(),
            posted: 0,
            free: (0..eager_slots).collect(),
            accepted: false,
            ack_queued: false,
        }
    }

    /// The message, made where it lies in the window.
    fn reach(&mut self, number: u64) -> Option<&mut Incoming> {
        let index = number.checked_sub(self.floor)?;
        if index >= WINDOW {
            return None;
        }
        while self.messages.len() as u64 <= index {
            self.messages.push_back(Incoming::default());
        }
        self.messages.get_mut(index as usize)
    }

    pub fn get(&self, number: u64) -> Option<&Incoming> {
        let index = number.checked_sub(self.floor)?;
        self.messages.get(usize::try_from(index).ok()?)
    }

    /// Takes a buffer; the message's number, or `None` where the window is full.
    pub fn post(&mut self, room: u64) -> Option<(u64, Outcome)> {
        let number = self.posted;
        let message = self.reach(number)?;
        message.room = Some(room);
        self.posted += 1;
        Some((number, self.settle(number, Outcome::Credit)))
    }

    /// What to do about a message that was just posted or has just got bytes.
    fn settle(&mut self, number: u64, otherwise: Outcome) -> Outcome {
        let Some(message) = self.reach(number) else {
            return Outcome::Wait;
        };
        let (Some(room), Some(total)) = (message.room, message.total) else {
            return otherwise;
        };
        if total > room {
            message.refused = true;
            return Outcome::Oversize { total, room };
        }
        if message.got.total() < total {
            // Its bytes are on their way, so the sender needs no credit.
            return Outcome::Wait;
        }
        message.complete = true;
        let slot = message.eager.take();
        self.free.extend(slot);
        while self.messages.front().is_some_and(|first| first.complete) {
            self.messages.pop_front();
            self.floor += 1;
        }
        match slot {
            Some(slot) => Outcome::Deliver {
                slot,
                length: total,
            },
            None => Outcome::Received(total),
        }
    }

    /// A chunk's header came; its bytes follow.
    pub fn chunk(&mut self, number: u64, total: u64, whole: bool) -> Result<Outcome, Violation> {
        if number < self.floor {
            return Ok(Outcome::Late);
        }
        let slot = self.free.last().copied();
        let message = self.reach(number).ok_or(Violation)?;
        if message.complete {
            return Ok(Outcome::Late);
        }
        if message.total.is_some_and(|known| known != total) {
            return Err(Violation);
        }
        if let Some(room) = message.room {
            message.total = Some(total);
            if total > room {
                message.refused = true;
                return Ok(Outcome::Oversize { total, room });
            }
            return Ok(Outcome::Wait);
        }
        if message.eager.is_none() {
            // Only a whole message may come before its buffer, and only where a slot is free.
            let slot = slot.filter(|_| whole).ok_or(Violation)?;
            message.total = Some(total);
            message.eager = Some(slot);
            self.free.pop();
        }
        Ok(Outcome::Wait)
    }

    /// Where a chunk of this message belongs now.
    pub fn place(&self, number: u64) -> Place {
        match self.get(number) {
            Some(message) if message.complete || message.refused => Place::Nowhere,
            Some(Incoming {
                eager: Some(slot), ..
            }) => Place::Eager(*slot),
            Some(Incoming { room: Some(_), .. }) => Place::Buffer,
            _ => Place::Nowhere,
        }
    }

    /// A chunk's bytes are where [`ReceiveComm::place`] said.
    pub fn filled(&mut self, number: u64, offset: u64, length: u32) -> Outcome {
        if number < self.floor {
            return Outcome::Late;
        }
        let Some(message) = self.reach(number) else {
            return Outcome::Wait;
        };
        if message.complete || message.refused {
            return Outcome::Wait;
        }
        message.got.insert(offset, offset + u64::from(length));
        self.settle(number, Outcome::Wait)
    }

    /// The complete ones after the floor, as an acknowledgement names them.
    pub fn beyond(&self) -> u64 {
        let mut bits = 0;
        for (index, message) in self.messages.iter().enumerate().skip(1) {
            bits |= u64::from(message.complete) << (index - 1);
        }
        bits
    }
}
