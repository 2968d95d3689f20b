//! Collectives of host memory: the calling thread does what a device's streams do, and blocks until its peers
//! have what it sent. Its process may end right after the last one, and take with it what is still in a slot.

#![allow(unsafe_code, reason = "copies between a caller's memory and the slots")]

use std::time::Duration;

use crate::pieces::Pieces;
use crate::room::reached;
use crate::{Error, Exchange, Kind, Order, Word};

impl Exchange {
    /// Collective over all ranks; blocks. `payload` is of `bytes` ([`Kind::Gather`]) or of `bytes`
    /// for each rank ([`Kind::Parts`]), `received` of `bytes` from each rank. A payload of
    /// [`Kind::Gather`] may lie at its place in the result.
    ///
    /// # Errors
    /// [`Error::Failed`].
    ///
    /// # Safety
    /// The two are addresses of this much live memory. They do not overlap, except as said above, and
    /// nobody else uses them until this returns.
    pub unsafe fn run_on_host(
        &self,
        kind: Kind,
        bytes: usize,
        payload: usize,
        received: usize,
    ) -> Result<(), Error> {
        let own = match kind {
            Kind::Gather => 0,
            Kind::Parts => self.inner.rank as usize * bytes,
        };
        let place = received + self.inner.rank as usize * bytes;
        if payload + own != place {
            // SAFETY: within both, as the caller says.
            unsafe { copy(payload + own, place, bytes) };
        }
        self.submit(kind, bytes, |pieces, order| {
            // SAFETY: as above.
            unsafe { self.carry(pieces, order, payload, received) }
        })
    }

    /// # Safety
    /// As for [`Exchange::run_on_host`].
    unsafe fn carry(
        &self,
        pieces: &Pieces,
        order: &Order,
        payload: usize,
        received: usize,
    ) -> Result<(), Error> {
        let room = self.inner.room;
        let (mut out, mut back) = (0, 0);
        let all = order.sends.wrapping_add(pieces.sends.len() as u32);
        while back < pieces.receives.len() || !reached(room.load(Word::Sent), all) {
            let mut moved = false;
            if let Some(why) = self.failure() {
                return Err(Error::Failed(why));
            }
            if let Some(part) = pieces.sends.get(out) {
                let piece = order.sends.wrapping_add(out as u32);
                let free = piece.wrapping_add(1).wrapping_sub(room.slots);
                if reached(room.load(Word::Sent), free) {
                    let slot = room.slot(room.send, piece, part.piece.length);
                    // SAFETY: the piece that was in the slot has left, so it is ours; a slot has room for a piece.
                    unsafe { copy(payload + part.offset, slot.start as usize, slot.length) };
                    room.store(Word::Ready, piece.wrapping_add(1));
                    out += 1;
                    moved = true;
                }
            }
            if let Some(part) = pieces.receives.get(back) {
                let piece = order.receives.wrapping_add(back as u32);
                if reached(room.load(Word::Arrived), piece.wrapping_add(1)) {
                    let slot = room.slot(room.receive, piece, part.piece.length);
                    // SAFETY: the piece has arrived and is not consumed, so the slot is ours.
                    unsafe { copy(slot.start as usize, received + part.offset, slot.length) };
                    room.store(Word::Consumed, piece.wrapping_add(1));
                    back += 1;
                    moved = true;
                }
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // The words pass everything after a failure.
        self.failure().map_or(Ok(()), |why| Err(Error::Failed(why)))
    }
}

/// # Safety
/// Two live areas of `bytes`, which do not overlap.
unsafe fn copy(from: usize, to: usize, bytes: usize) {
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}
