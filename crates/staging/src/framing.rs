//! Slots that are frames of a card's memory: no processor of this process touches payload.
//!
//! With `EVENER_NET_ENGINE=xdp` an exchange leases frames of its engine's ([`evener_engine::frames`]). If all ranks
//! have some, slots are these, and not the memory of the [`Room`](crate::Room):
//!
//! ```text
//! stream "out"   copy engine: payload -> lent frames, strided      then write: `ready`
//! engine         headers in front of the payload; the card sends both
//! engine         a packet that comes stays in its frame; its place goes into the slot's table
//! pump           wait: `begun`    copy engine: frames -> result, by the table    then write: `consumed`
//! pump           wait: `consumed` frames go back to the card       then write: `arrived`
//! stream "in"    wait: `arrived`
//! ```
//!
//! - A send slot is a run of frames, [`PER_SLOT`]; a piece has [`Framing::unit`] bytes in each, the last fewer. The unit is
//!   the least of all ranks', which their handles name.
//! - Where a piece will lie is not known when the exchange is enqueued. So the pump issues the copies, on a stream of its
//!   own, when the piece is there and `begun` says that the result may be written. What lies in frames behind each
//!   other is one copy.
//! - On a CPU the calling thread stands for the device, and waits for `arrived` as in slots.
//! - A device's result is all ones (NaN) until a piece is copied there: what a failure leaves is no gradient.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use evener_engine::Memory;
use evener_engine::frames::{Framed, HEADERS, LENT_HEADERS, Lease};

/// Slots of each kind.
pub const SLOTS: u32 = 16;
/// Frames of a slot: with packets of 1500 bytes one of about 1 MiB.
pub const PER_SLOT: u32 = 736;
/// Frames of each kind that an exchange leases.
pub const FRAMES: u32 = SLOTS * PER_SLOT;

/// What a handle ends with: these bytes, and the unit.
const MARK: [u8; 6] = *b"frames";
/// Bytes of that.
pub const OFFER: usize = MARK.len() + 2;

/// What a rank with frames adds to its handle.
pub fn offer(unit: u16) -> [u8; OFFER] {
    let mut bytes = [0; OFFER];
    bytes[..MARK.len()].copy_from_slice(&MARK);
    bytes[MARK.len()..].copy_from_slice(&unit.to_le_bytes());
    bytes
}

/// The unit that this end of a handle names.
pub fn offered(end: &[u8]) -> Option<u16> {
    let unit = end.strip_prefix(&MARK)?;
    let unit = u16::from_le_bytes(unit.try_into().ok()?);
    (unit > 0).then_some(unit)
}

/// A part of a piece that lies in frames behind each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Where the first of its units lies.
    pub at: usize,
    /// Bytes from the start of the piece.
    pub offset: usize,
    /// Bytes of each unit.
    pub width: usize,
    /// Units.
    pub count: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Framing {
    lease: Lease,
    unit: usize,
    /// Where each receive slot's units lie. The engine writes into the table of a slot until its request is
    /// finished.
    tables: Box<[AtomicUsize]>,
    /// Pieces that were taken out of frames, and the copies that it took.
    gathered: [AtomicU64; 2],
}

impl Framing {
    /// Framing in leased frames ([`FRAMES`] of each kind), with units that all ranks can.
    pub fn new(lease: Lease, unit: u16) -> Framing {
        Framing {
            lease,
            unit: usize::from(unit),
            tables: (0..FRAMES).map(|_| AtomicUsize::new(0)).collect(),
            gathered: Default::default(),
        }
    }

    /// Bytes of a slot.
    pub fn slot(&self) -> usize {
        self.unit * PER_SLOT as usize
    }

    /// Bytes of payload in a frame.
    pub fn unit(&self) -> usize {
        self.unit
    }

    /// What else silence may mean, in words: units are not made smaller for a link on the way.
    pub fn doubt(&self) -> String {
        format!(
            ", or a link between takes no packets of {} bytes: EVENER_NET_ENGINE=udp finds what it takes",
            self.unit + HEADERS
        )
    }

    /// For the trial of a way: one unit in a frame of its own, and the word for one.
    pub fn trial(&self, peer: usize) -> (Memory, Memory) {
        let place = peer % self.tables.len();
        let word = self.tables[place].as_ptr();
        let of = |start| Memory {
            start,
            length: self.unit,
        };
        (of(self.lease.at(place) as *mut u8), of(word.cast()))
    }

    /// What comms are told.
    pub fn framed(&self) -> Framed {
        Framed {
            frames: self.lease.frames().clone(),
            // It was made of 16 bits.
            unit: self.unit as u16,
        }
    }

    /// Bytes from one frame to the next.
    pub fn stride(&self) -> usize {
        self.lease.stride()
    }

    /// The send slot of a piece, for the engine.
    pub fn send(&self, piece: u32, length: usize) -> Memory {
        let first = (piece % SLOTS * PER_SLOT) as usize;
        Memory {
            start: self.lease.at(first) as *mut u8,
            length,
        }
    }

    /// Where the payload of its first frame begins.
    pub fn payload(&self, piece: u32) -> usize {
        self.send(piece, 0).start as usize + LENT_HEADERS
    }

    fn table(&self, piece: u32) -> &[AtomicUsize] {
        let first = (piece % SLOTS * PER_SLOT) as usize;
        &self.tables[first..first + PER_SLOT as usize]
    }

    /// The receive slot of a piece, for the engine: its table.
    pub fn receive(&self, piece: u32, length: usize) -> Memory {
        Memory {
            start: self.table(piece).as_ptr().cast_mut().cast(),
            length,
        }
    }

    /// Where a piece lies that has come.
    pub fn runs(&self, piece: u32, length: usize) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (index, word) in self.table(piece).iter().enumerate() {
            let offset = index * self.unit;
            if offset >= length {
                break;
            }
            let (at, width) = (word.load(Ordering::Relaxed), self.unit.min(length - offset));
            match runs.last_mut() {
                Some(run) if run.width == width && at == run.at + run.count * self.stride() => {
                    run.count += 1;
                }
                _ => runs.push(Run {
                    at,
                    offset,
                    width,
                    count: 1,
                }),
            }
        }
        self.gathered[0].fetch_add(1, Ordering::Relaxed);
        self.gathered[1].fetch_add(runs.len() as u64, Ordering::Relaxed);
        runs
    }

    /// Gives the frames of a piece back to the card.
    pub fn give_back(&self, piece: u32) {
        let taken = self.table(piece).iter();
        let taken = taken.map(|word| word.swap(0, Ordering::Relaxed));
        self.lease.frames().give_back(taken.filter(|at| *at != 0));
    }

    /// Gives back what came and was not taken out. The comms are released.
    pub fn give_all_back(&self) {
        (0..SLOTS).for_each(|slot| self.give_back(slot));
    }

    /// Pieces that were taken out of frames, and in how many copies.
    pub fn gathered(&self) -> [u64; 2] {
        self.gathered
            .each_ref()
            .map(|one| one.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_names_its_unit() {
        assert_eq!(offered(&offer(1424)), Some(1424));
        assert_eq!(offered(&offer(0)), None);
        for wrong in [&b""[..], b"frames", b"frames1", b"framed12", b"frames123"] {
            assert_eq!(offered(wrong), None);
        }
    }
}
