//! Collectives of host memory: the calling thread does what a device's streams do, and blocks.

#![allow(unsafe_code, reason = "copies between a caller's memory and the slots")]

use std::time::Duration;

use crate::plan::Plan;
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
        self.submit(kind, bytes, received, |plan, order| {
            // SAFETY: as above.
            unsafe { self.carry(plan, order, payload, received) }
        })
    }

    /// # Safety
    /// As for [`Exchange::run_on_host`].
    unsafe fn carry(
        &self,
        plan: &Plan,
        order: &Order,
        payload: usize,
        received: usize,
    ) -> Result<(), Error> {
        let room = self.inner.room;
        let (mut out, mut back) = (0, 0);
        while out < plan.sends.len() || back < plan.receives.len() {
            let mut moved = false;
            if let Some(why) = self.failure() {
                return Err(Error::Failed(why));
            }
            if let Some(part) = plan.sends.get(out) {
                let piece = order.sends.wrapping_add(out as u32);
                let free = piece.wrapping_add(1).wrapping_sub(self.inner.slots());
                if reached(room.load(Word::Sent), free) {
                    // SAFETY: the piece that was in the slot has left, so it is ours.
                    unsafe { self.fill(piece, payload + part.offset, part.piece.length) };
                    room.store(Word::Ready, piece.wrapping_add(1));
                    out += 1;
                    moved = true;
                }
            }
            if let Some(part) = plan.receives.get(back) {
                let piece = order.receives.wrapping_add(back as u32);
                if reached(room.load(Word::Arrived), piece.wrapping_add(1)) {
                    // SAFETY: the piece has arrived and is not consumed, so the slot is ours.
                    unsafe { self.empty(piece, received + part.offset, part.piece.length) };
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

impl Exchange {
    /// Puts a piece into its send slot.
    ///
    /// # Safety
    /// The piece is live memory, and the slot is the caller's.
    unsafe fn fill(&self, piece: u32, from: usize, length: usize) {
        let Some(framing) = self.inner.framing.get() else {
            let slot = self.inner.send(piece, length);
            // SAFETY: promised by the caller; a slot has room for a piece.
            unsafe { copy(from, slot.start as usize, length) };
            return;
        };
        let (unit, stride) = (framing.unit(), framing.stride());
        for (at, offset) in (0..length).step_by(unit).enumerate() {
            let to = framing.payload(piece) + at * stride;
            // SAFETY: as above: a frame has room for a unit.
            unsafe { copy(from + offset, to, unit.min(length - offset)) };
        }
    }

    /// Takes a piece out of its receive slot.
    ///
    /// # Safety
    /// As for `fill`.
    unsafe fn empty(&self, piece: u32, to: usize, length: usize) {
        let Some(framing) = self.inner.framing.get() else {
            let slot = self.inner.receive(piece, length);
            // SAFETY: promised by the caller.
            unsafe { copy(slot.start as usize, to, length) };
            return;
        };
        for run in framing.runs(piece, length) {
            for unit in 0..run.count {
                let from = run.at + unit * framing.stride();
                // SAFETY: as above; the table of a piece that has come names all its frames.
                unsafe { copy(from, to + run.offset + unit * run.width, run.width) };
            }
        }
    }
}

/// # Safety
/// Two live areas of `bytes`, which do not overlap.
unsafe fn copy(from: usize, to: usize, bytes: usize) {
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}
