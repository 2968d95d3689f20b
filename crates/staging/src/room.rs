//! The memory that a device and the pump share: slots of payload, and the words that count pieces.
//!
//! The words count modulo 2^32 and lie a cache line apart, in host memory that the device sees. They are
//! all that the two sides tell each other.

use std::sync::atomic::{AtomicU32, Ordering};

use evener_engine::Memory;

/// Bytes of the words: four, a cache line each, and one to try the driver with.
pub const WORDS: usize = 5 * LINE;
const LINE: usize = 64;
/// What is added to `sent` and `arrived` at the end.
pub const PASSED: u32 = 1 << 30;

/// Where the slots and words are. Whoever makes an [`Exchange`](crate::Exchange) keeps them until it is closed.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// First send slot.
    pub send: usize,
    /// First receive slot.
    pub receive: usize,
    /// The words, [`WORDS`] zeroed bytes, aligned to 4.
    pub words: usize,
    /// Bytes of a slot.
    pub slot: usize,
    /// Slots, of each kind.
    pub slots: u32,
}

/// One of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Pieces in send slots: the device's.
    Ready = 0,
    /// Pieces that the peers have: the pump's.
    Sent = 1,
    /// Pieces in receive slots: the pump's.
    Arrived = 2,
    /// Pieces taken out of receive slots: the device's.
    Consumed = 3,
    /// For a trial of the driver.
    Trial = 4,
}

impl Room {
    pub(crate) fn address(&self, word: Word) -> usize {
        self.words + word as usize * LINE
    }

    #[allow(unsafe_code, reason = "the words are shared with a device")]
    fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: `Exchange::listen` demands live, aligned memory until the exchange is closed, and
        // everybody uses it as atomics only.
        unsafe { AtomicU32::from_ptr(self.address(word) as *mut u32) }
    }

    /// Fills the receive slots with ones, which is NaN in every floating format: what a failed
    /// exchange leaves must not look like gradients.
    #[allow(unsafe_code, reason = "the slots are the caller's memory")]
    pub(crate) fn spoil(&self) {
        // SAFETY: `Exchange::listen` demands live memory of this size; the comms are released, so
        // the engine writes there no more, and a device only reads.
        unsafe {
            let slots = self.slots as usize * self.slot;
            std::ptr::write_bytes(self.receive as *mut u8, 0xff, slots);
        }
    }

    pub(crate) fn load(&self, word: Word) -> u32 {
        self.word(word).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, word: Word, value: u32) {
        self.word(word).store(value, Ordering::Release);
    }

    pub(crate) fn slot(&self, base: usize, piece: u32, length: usize) -> Memory {
        let index = (piece % self.slots) as usize;
        Memory {
            start: (base + index * self.slot) as *mut u8,
            length,
        }
    }
}

/// What is before what, on a circle.
pub(crate) fn reached(value: u32, wanted: u32) -> bool {
    value.wrapping_sub(wanted).cast_signed() >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_go_round() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(2, u32::MAX) && !reached(u32::MAX, 2));
        assert!(reached(7u32.wrapping_add(PASSED), 1000));
    }
}
