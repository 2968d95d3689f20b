//! The ring between a caller and the workers: one comm's requests, without locks or copies.
//!
//! A request never leaves its slot. The caller writes pointer and length and sets the phase to
//! *posted*; a worker *takes* it, and a worker later sets it to *done* or *failed*, under the lock of
//! the peer that the comm leads to ([`link`](crate::link));
//! the caller sees that in `test` and frees the slot. So submission and completion are one ring:
//! each slot has one owner at a time, named by its phase, and the phase is the only word both write.
//!
//! Request `n` of a comm uses slot `n % SLOTS`, and the phase word holds `n` as well: that is the
//! generation. A late chunk of an older request finds another number and goes nowhere.
//!
//! | phase | owner | may become |
//! |---|---|---|
//! | free | caller | posted |
//! | posted | worker | taken |
//! | taken | worker | done, failed |
//! | done, failed | caller | free |
//!
//! There is one caller at a time (NCCL's progress thread), and one worker at a time has the peer's
//! lock. Two callers at once would confuse requests, but break no memory: everything is an atomic.

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use crate::sys::Memory;

/// Requests of one comm that may be unfinished at a time: NCCL has at most 32.
pub const SLOTS: usize = if cfg!(loom) { 1 } else { 64 };

const FREE: u64 = 0;
const POSTED: u64 = 1;
const TAKEN: u64 = 2;
const DONE: u64 = 3;
const FAILED: u64 = 4;

fn word(number: u64, phase: u64) -> u64 {
    number << 3 | phase
}

/// How a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not finished.
    Pending,
    /// This many bytes were moved. The slot is free again.
    Done(usize),
    /// The comm failed, with the code that the worker gave.
    Failed(usize),
}

/// One request.
#[derive(Debug)]
#[repr(align(64))]
pub struct Slot {
    phase: AtomicU64,
    start: AtomicPtr<u8>,
    length: AtomicUsize,
}

impl Slot {
    /// Whether the request is finished; if so, gives the slot back. The caller's.
    pub fn test(&self) -> Status {
        let phase = self.phase.load(Ordering::Acquire);
        match phase & 7 {
            DONE => {
                let length = self.length.load(Ordering::Relaxed);
                self.phase.store(word(phase >> 3, FREE), Ordering::Release);
                Status::Done(length)
            }
            FAILED => Status::Failed(self.length.load(Ordering::Relaxed)),
            _ => Status::Pending,
        }
    }
}

/// The requests of one comm.
#[derive(Debug)]
pub struct Slots {
    slots: Box<[Slot]>,
    /// Number of the next request. The caller's.
    next: AtomicU64,
}

impl Default for Slots {
    fn default() -> Self {
        let slot = |_| Slot {
            phase: AtomicU64::new(FREE),
            start: AtomicPtr::new(std::ptr::null_mut()),
            length: AtomicUsize::new(0),
        };
        Slots {
            slots: (0..SLOTS).map(slot).collect(),
            next: AtomicU64::new(0),
        }
    }
}

impl Slots {
    fn of(&self, number: u64) -> &Slot {
        &self.slots[number as usize % SLOTS]
    }

    /// The slot that the next request will have, if it is free. The caller's.
    pub fn vacant(&self) -> Option<u64> {
        let number = self.next.load(Ordering::Relaxed);
        let phase = self.of(number).phase.load(Ordering::Acquire);
        (phase & 7 == FREE).then_some(number)
    }

    /// Posts a request in the slot that [`Slots::vacant`] named. The caller's.
    pub fn post(&self, number: u64, memory: Memory) -> &Slot {
        let slot = self.of(number);
        slot.start.store(memory.start, Ordering::Relaxed);
        slot.length.store(memory.length, Ordering::Relaxed);
        slot.phase.store(word(number, POSTED), Ordering::Release);
        self.next.store(number + 1, Ordering::Relaxed);
        slot
    }

    /// The slot of request `number`, which was posted. The caller's.
    pub fn at(&self, number: u64) -> &Slot {
        self.of(number)
    }

    /// Takes request `number` if it is posted: its length. The worker's.
    pub fn take(&self, number: u64) -> Option<usize> {
        let slot = self.of(number);
        if slot.phase.load(Ordering::Acquire) != word(number, POSTED) {
            return None;
        }
        slot.phase.store(word(number, TAKEN), Ordering::Relaxed);
        Some(slot.length.load(Ordering::Relaxed))
    }

    /// The memory of a request that is taken and not finished. The worker's.
    pub fn memory(&self, number: u64) -> Option<Memory> {
        let slot = self.of(number);
        (slot.phase.load(Ordering::Relaxed) == word(number, TAKEN)).then(|| Memory {
            start: slot.start.load(Ordering::Relaxed),
            length: slot.length.load(Ordering::Relaxed),
        })
    }

    /// Finishes a taken request; after this its memory is the caller's. The worker's.
    pub fn finish(&self, number: u64, length: usize) {
        let slot = self.of(number);
        if slot.phase.load(Ordering::Relaxed) == word(number, TAKEN) {
            slot.length.store(length, Ordering::Relaxed);
            slot.phase.store(word(number, DONE), Ordering::Release);
        }
    }

    /// Fails the unfinished requests that `which` names, posted ones too. The worker's.
    pub fn fail(&self, code: usize, which: impl Fn(u64) -> bool) {
        for slot in &self.slots {
            let phase = slot.phase.load(Ordering::Acquire);
            let number = phase >> 3;
            if matches!(phase & 7, POSTED | TAKEN) && which(number) {
                slot.length.store(code, Ordering::Relaxed);
                slot.phase.store(word(number, FAILED), Ordering::Release);
            }
        }
    }

    /// Bytes of the taken requests that `which` names. The worker's.
    pub fn under_way(&self, which: impl Fn(u64) -> bool) -> u64 {
        let taken = |slot: &&Slot| {
            let phase = slot.phase.load(Ordering::Relaxed);
            phase & 7 == TAKEN && which(phase >> 3)
        };
        let lengths = self.slots.iter().filter(taken);
        lengths
            .map(|slot| slot.length.load(Ordering::Relaxed) as u64)
            .sum()
    }

    /// Whether an unfinished request uses memory from `start` to `end`. Anyone's.
    pub fn uses(&self, start: usize, end: usize) -> bool {
        self.slots.iter().any(|slot| {
            let phase = slot.phase.load(Ordering::Acquire) & 7;
            let first = slot.start.load(Ordering::Relaxed) as usize;
            let last = first.saturating_add(slot.length.load(Ordering::Relaxed));
            matches!(phase, POSTED | TAKEN) && first < end && start < last
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn memory(length: usize) -> Memory {
        Memory {
            start: std::ptr::dangling_mut(),
            length,
        }
    }

    #[test]
    fn a_full_ring_says_so_and_an_old_number_finds_nothing() {
        let slots = Slots::default();
        for number in 0..SLOTS as u64 {
            assert_eq!(slots.vacant(), Some(number));
            slots.post(number, memory(7));
        }
        assert_eq!(slots.vacant(), None);
        assert_eq!(slots.take(0), Some(7));
        assert_eq!(slots.take(0), None);
        slots.finish(0, 5);
        assert!(slots.memory(0).is_none());
        assert_eq!(slots.of(0).test(), Status::Done(5));
        let again = SLOTS as u64;
        slots.post(again, memory(9));
        assert_eq!(slots.take(0), None);
        assert_eq!(slots.take(again), Some(9));
        assert!(slots.memory(0).is_none() && slots.memory(again).is_some());
    }

    #[test]
    fn failing_some_leaves_the_others() {
        let slots = Slots::default();
        for number in 0..4 {
            slots.post(number, memory(1));
        }
        slots.take(1);
        slots.fail(6, |number| number % 2 == 1);
        let status: Vec<_> = (0..4).map(|number| slots.of(number).test()).collect();
        assert_eq!(
            (status[1], status[3]),
            (Status::Failed(6), Status::Failed(6))
        );
        assert_eq!((status[0], status[2]), (Status::Pending, Status::Pending));
    }
}

/// Every interleaving of one caller and one worker: `RUSTFLAGS="--cfg loom" cargo test -p
/// evener-engine --release --lib loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn loom_every_request_is_served_once_in_order() {
        // Three preemptions reach every ordering of two requests in one slot that matters, and end.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let slots = Arc::new(Slots::default());
            let worker = {
                let slots = slots.clone();
                loom::thread::spawn(move || {
                    for number in 0..2u64 {
                        let length = loop {
                            if let Some(length) = slots.take(number) {
                                break length;
                            }
                            loom::thread::yield_now();
                        };
                        assert_eq!(length, number as usize + 10);
                        assert_eq!(slots.memory(number).map(|m| m.length), Some(length));
                        slots.finish(number, length + 100);
                    }
                })
            };
            let mut tested = 0;
            let mut posted = 0;
            while tested < 2 {
                if posted < 2
                    && let Some(number) = slots.vacant()
                {
                    assert_eq!(number, posted);
                    let start = std::ptr::dangling_mut();
                    let length = posted as usize + 10;
                    slots.post(number, Memory { start, length });
                    posted += 1;
                }
                if tested < posted {
                    match slots.of(tested).test() {
                        Status::Done(length) => {
                            assert_eq!(length, tested as usize + 110);
                            tested += 1;
                        }
                        Status::Failed(_) => unreachable!("nothing fails here"),
                        Status::Pending => loom::thread::yield_now(),
                    }
                }
            }
            worker.join().unwrap();
        });
    }
}
