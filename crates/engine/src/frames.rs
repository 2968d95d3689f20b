//! Frames of the cards' memory for callers: payload goes from them to the network and stays in them when it
//! comes, and no processor of this process touches it.
//!
//! - **Sending.** A caller has a run of *lent* frames, and puts a message into them: some bytes
//!   ([`Frames::unit`] at most) into each, [`LENT_HEADERS`] behind its start. The instance writes headers in front
//!   of them, and a card sends both ([`evener_xdp::pool`]).
//! - **Receiving.** A caller posts a *table* of words, one for each unit of the message. The instance writes into it
//!   where the unit lies: in a frame of a card's, which is the caller's until it gives it back.
//! - **Bounds.** Who posts buffers has reserved as many frames as their messages can take, so frames for what
//!   comes never run out: a receiver takes whole units alone (`credit.rs` of proto), and posts no more.
//! - **Where no card sends** (its next hop is not known, the kernel has the frame still, the path is one of an
//!   interface without a card) or brings it (another queue), the payload is copied, and counted as such
//!   ([`Packets::bare`](crate::packets::Packets::bare)).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use evener_proto::packet::format::BARE;
pub use evener_xdp::LENT_HEADERS;
use evener_xdp::Pool;

use crate::lock::lock;
use crate::sys::Memory;

/// Bytes of a packet that are not payload: of IPv4, UDP, and its own.
pub const HEADERS: usize = 28 + BARE;

/// How many frames callers want: lent ones, and for what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// For sending.
    pub send: u32,
    /// For receiving, of each card.
    pub receive: u32,
}

/// What is not in use.
#[derive(Debug)]
struct Free {
    /// By lent frame.
    lent: Vec<bool>,
    receive: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Frames {
    pool: Pool,
    unit: u16,
    free: Mutex<Free>,
    returned: Mutex<Vec<usize>>,
    any_returned: AtomicBool,
}

impl Frames {
    /// All that are lent of a pool, and `receive` of those for what comes. A frame has `unit` bytes of payload.
    pub(crate) fn new(pool: Pool, unit: u16, receive: u32) -> Frames {
        let lent = vec![true; pool.lent() as usize];
        Frames {
            pool,
            unit,
            free: Mutex::new(Free { lent, receive }),
            returned: Mutex::default(),
            any_returned: AtomicBool::new(false),
        }
    }

    /// Bytes of payload that a packet of this process' links carries.
    pub fn unit(&self) -> u16 {
        self.unit
    }

    /// Where all frames are, and how many bytes: what a device has to be told of.
    pub fn memory(&self) -> (usize, usize) {
        (self.pool.start(), self.pool.length())
    }

    /// The number of a lent frame, by where it begins.
    pub(crate) fn number(&self, at: usize) -> Option<u32> {
        let number = at.checked_sub(self.pool.start())? / self.pool.size();
        u32::try_from(number)
            .ok()
            .filter(|number| *number < self.pool.lent())
    }

    /// A run of `send` lent frames, and `receive` frames for what comes. `None`: fewer are free.
    pub fn lease(self: &Arc<Self>, send: u32, receive: u32) -> Option<Lease> {
        let mut free = lock(&self.free);
        let mut run = free.lent.windows(send.max(1) as usize);
        let first = run.position(|run| run.iter().all(|free| *free))?;
        free.receive = free.receive.checked_sub(receive)?;
        free.lent[first..first + send as usize].fill(false);
        Some(Lease {
            frames: self.clone(),
            first: first as u32,
            send,
            receive,
        })
    }

    /// The caller has read what lies there: the frames may be used again.
    pub fn give_back(&self, places: impl IntoIterator<Item = usize>) {
        let mut returned = lock(&self.returned);
        returned.extend(places);
        self.any_returned
            .store(!returned.is_empty(), Ordering::Release);
    }

    /// What was given back.
    pub(crate) fn returned(&self) -> Vec<usize> {
        if !self.any_returned.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&self.returned))
    }
}

/// Frames that one caller has until this is dropped. Its comms are released before, and what came for it is given
/// back.
#[derive(Debug)]
pub struct Lease {
    frames: Arc<Frames>,
    first: u32,
    send: u32,
    receive: u32,
}

impl Lease {
    /// Where they are.
    pub fn frames(&self) -> &Arc<Frames> {
        &self.frames
    }

    /// Where its lent frame `number` begins.
    pub fn at(&self, number: usize) -> usize {
        self.frames.pool.start() + (self.first as usize + number) * self.stride()
    }

    /// Bytes from one frame to the next.
    pub fn stride(&self) -> usize {
        self.frames.pool.size()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut free = lock(&self.frames.free);
        let lent = self.first as usize..(self.first + self.send) as usize;
        free.lent[lent].fill(true);
        free.receive += self.receive;
    }
}

/// How the requests of a comm lie in frames.
#[derive(Debug, Clone)]
pub struct Framed {
    /// Which.
    pub frames: Arc<Frames>,
    /// Bytes in each: the least of all ends.
    pub unit: u16,
}

impl Framed {
    /// The lent frame in which these bytes of a message lie. `memory` is the request's: its first frame, and the
    /// message's length.
    pub(crate) fn lent(&self, memory: &Memory, offset: u64, length: usize) -> Option<usize> {
        let piece = self.piece(memory, offset, length)?;
        Some(memory.start as usize + piece * self.frames.pool.size())
    }

    /// The word of the table for these bytes of a message. `memory` is the request's: its table, and the message's
    /// length.
    pub(crate) fn word(&self, memory: &Memory, offset: u64, length: usize) -> Option<*mut usize> {
        // An empty message has a packet, and no word.
        let piece = self.piece(memory, offset, length).filter(|_| length > 0)?;
        Some(memory.start.cast::<usize>().wrapping_add(piece))
    }

    /// All words of the table.
    pub(crate) fn words(&self, memory: &Memory) -> impl Iterator<Item = *mut usize> + use<> {
        let table = memory.start.cast::<usize>();
        let count = memory.length.div_ceil(usize::from(self.unit).max(1));
        (0..count).map(move |at| table.wrapping_add(at))
    }

    fn piece(&self, memory: &Memory, offset: u64, length: usize) -> Option<usize> {
        let (offset, unit) = (usize::try_from(offset).ok()?, usize::from(self.unit));
        let inside = offset.checked_add(length)? <= memory.length && length <= unit;
        inside.then_some(offset.checked_div(unit)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Arc<Frames> {
        let pool = Pool::new(2048, 8, 1, (16, 4)).expect("memory");
        Arc::new(Frames::new(pool, 1424, 10))
    }

    #[test]
    fn frames_are_one_callers_until_its_lease_ends() {
        let frames = frames();
        let one = frames.lease(5, 4).expect("free");
        assert!(frames.lease(4, 1).is_none() && frames.lease(1, 7).is_none());
        let other = frames.lease(3, 6).expect("free");
        assert_eq!(other.at(0), one.at(5));
        assert_eq!(frames.number(other.at(2)), Some(7));
        assert_eq!(frames.number(other.at(3)), None);
        assert_eq!(frames.number(0), None);
        drop(one);
        assert!(frames.lease(5, 4).is_some());
    }

    #[test]
    fn pieces_are_found_inside_of_a_message_alone() {
        let frames = frames();
        let framed = Framed {
            frames: frames.clone(),
            unit: 1000,
        };
        let lease = frames.lease(3, 3).expect("free");
        let memory = Memory {
            start: lease.at(0) as *mut u8,
            length: 2500,
        };
        assert_eq!(framed.lent(&memory, 1000, 1000), Some(lease.at(1)));
        assert_eq!(framed.lent(&memory, 2000, 500), Some(lease.at(2)));
        assert_eq!(framed.word(&memory, 0, 0), None);
        for (offset, length) in [(2000, 501), (0, 1001), (u64::MAX, 1)] {
            assert_eq!(framed.lent(&memory, offset, length), None);
        }
        assert_eq!(framed.words(&memory).count(), 3);
    }

    #[test]
    fn what_is_given_back_is_taken_once() {
        let frames = frames();
        assert!(frames.returned().is_empty());
        frames.give_back([1, 2]);
        frames.give_back([3]);
        assert_eq!(frames.returned(), [1, 2, 3]);
        assert!(frames.returned().is_empty());
    }
}
