//! What happened to packets and windows, and when: for those who look for a cause.
//!
//! Who drives a connection turns it on ([`Connection::trace`](super::Connection::trace)) and takes notes
//! out after each turn. Off, which it is at first, an event costs one look at a flag. On, at most
//! [`MOST`] notes wait between two looks; what is beyond that is counted and left out, so a driver that
//! is slow loses notes and nothing else.

use std::time::Duration;

/// Notes that wait between two looks, at most.
pub const MOST: usize = 8192;

/// Why a packet is taken for lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Later packets, of its path or of others, have arrived, and time has passed.
    Order,
    /// Its path was silent.
    Silence,
}

/// What the congestion control did. In files by its place: `DECISIONS` of `evener.net.trace.pcapng` has a
/// word for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// A packet waited longer than the target: the path's window shrinks.
    Shrink,
    /// Many packets of a round trip were lost: all windows shrink.
    Heavy,
    /// The queue stays long, whatever is given up: the path competes with TCP from here on.
    Compete,
    /// A loss while it competes: windows that compete shrink.
    Yield,
    /// All windows are small for two round trips, to see how short the way is.
    Drain,
    /// They have their size again.
    Refill,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A packet was confirmed.
    Arrived {
        /// The packet's.
        number: u64,
        /// Its bytes.
        size: u32,
        /// Since it was sent.
        took: Duration,
        /// The round trip, where this packet measured one: without the time that the peer kept the
        /// acknowledgement.
        trip: Option<Duration>,
        /// It had been taken for lost.
        late: bool,
    },
    /// A packet is taken for lost: what it held goes again.
    Lost {
        /// The packet's.
        number: u64,
        /// Its bytes.
        size: u32,
        /// Since it was sent.
        took: Duration,
        /// Why.
        cause: Cause,
    },
    /// Nothing of a path was confirmed for too long.
    Silent {
        /// This many times in a row.
        times: u32,
    },
    /// A path is not used any more, and another is in its place.
    Replaced {
        /// That one.
        by: u8,
    },
    /// The congestion control has decided.
    Decided {
        /// What.
        decision: Decision,
        /// How long the path's newest packet waited in queues.
        waited: Duration,
        /// Bytes of the path's window now; of all windows for what concerns all paths.
        window: u64,
    },
}

/// One thing that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Note {
    /// By the driver's clock.
    pub at: Duration,
    /// The path; of all paths: 255.
    pub path: u8,
    /// What it was.
    pub what: What,
    /// Bytes that may be in flight over all paths ...
    pub total: u64,
    /// ... and that are.
    pub flying: u64,
}

/// Notes since the last look; without room until it is turned on.
#[derive(Debug, Default)]
pub struct Notes {
    on: bool,
    kept: Vec<Note>,
    missed: u64,
}

impl Notes {
    /// Notes are kept from here on.
    pub fn start(&mut self) {
        self.on = true;
    }

    /// Whether anybody looks.
    #[inline]
    pub fn on(&self) -> bool {
        self.on
    }

    /// Keeps a note, if there is room.
    pub fn add(&mut self, at: Duration, path: u8, what: What) {
        if !self.on {
            return;
        }
        if self.kept.len() >= MOST {
            self.missed += 1;
            return;
        }
        self.kept.push(Note {
            at,
            path,
            what,
            total: 0,
            flying: 0,
        });
    }

    /// The last note was of a connection with these bytes.
    pub fn of(&mut self, total: u64, flying: u64) {
        if let Some(note) = self.kept.last_mut() {
            (note.total, note.flying) = (total, flying);
        }
    }

    /// Takes all out, and how many were left out.
    pub fn take(&mut self) -> (Vec<Note>, u64) {
        (
            std::mem::take(&mut self.kept),
            std::mem::take(&mut self.missed),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_keeps_nothing_and_on_keeps_no_more_than_it_may() {
        let (mut notes, what) = (Notes::default(), What::Silent { times: 1 });
        notes.add(Duration::ZERO, 0, what);
        assert_eq!(notes.take(), (vec![], 0));
        notes.start();
        for _ in 0..MOST + 3 {
            notes.add(Duration::ZERO, 0, what);
        }
        let (kept, missed) = notes.take();
        assert_eq!((kept.len(), missed), (MOST, 3));
        assert_eq!(notes.take(), (vec![], 0));
    }
}
