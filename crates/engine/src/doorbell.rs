//! How callers tell a worker which comms have work: a bit a comm, and a summary bit for each word.
//!
//! A caller sets its bit and, if the worker sleeps, wakes it; the worker swaps the words for zero.
//! Nobody waits for anybody. More comms than bits share bits: the worker looks at all of them.
//!
//! # Sleeping
//! The worker says that it sleeps and then looks at the summary once more; the caller sets the
//! summary and then looks whether the worker sleeps. Between the two steps of each lies a
//! sequentially consistent fence, so at least one of the two sees the other: no request is left
//! behind a sleeping worker.

use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

const WORDS: usize = if cfg!(loom) { 1 } else { 64 };
/// Bits of a bell.
pub const BITS: usize = WORDS * 64;

/// See the module.
#[derive(Debug)]
pub struct Doorbell {
    summary: AtomicU64,
    words: [AtomicU64; WORDS],
    asleep: AtomicBool,
}

impl Default for Doorbell {
    fn default() -> Self {
        Doorbell {
            summary: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            asleep: AtomicBool::new(false),
        }
    }
}

impl Doorbell {
    /// Rings `bit`. Whether the worker sleeps and must be woken. Any thread's.
    #[must_use]
    pub fn ring(&self, bit: usize) -> bool {
        let word = bit / 64 % WORDS;
        self.words[word].fetch_or(1 << (bit % 64), Ordering::Release);
        self.summary.fetch_or(1 << word, Ordering::SeqCst);
        self.must_wake()
    }

    /// Whether the worker sleeps and must be woken: true for one caller a sleep. Any thread's,
    /// after it has written its news.
    #[must_use]
    pub fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Whether a bit is set. The worker's.
    pub fn rung(&self) -> bool {
        self.summary.load(Ordering::SeqCst) != 0
    }

    /// Calls `each` with every bit that was rung since the last call. The worker's.
    pub fn drain(&self, mut each: impl FnMut(usize)) {
        let mut summary = self.summary.swap(0, Ordering::SeqCst);
        while summary != 0 {
            let word = summary.trailing_zeros() as usize;
            summary &= summary - 1;
            let mut bits = self.words[word].swap(0, Ordering::Acquire);
            while bits != 0 {
                each(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// The worker is about to sleep. It must look at all of its news after this, and not sleep if
    /// there are any.
    pub fn sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The worker is awake.
    pub fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_bit_is_heard_once() {
        let bell = Doorbell::default();
        for bit in [0, 63, 64, 4095] {
            assert!(!bell.ring(bit));
        }
        let mut heard = Vec::new();
        bell.drain(|bit| heard.push(bit));
        assert_eq!(heard, [0, 63, 64, 4095]);
        bell.drain(|_| unreachable!("nothing was rung"));
        bell.sleep();
        assert!(bell.ring(1));
        assert!(!bell.ring(2));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn loom_nobody_sleeps_through_a_ring() {
        loom::model(|| {
            let bell = Arc::new(Doorbell::default());
            let caller = {
                let bell = bell.clone();
                loom::thread::spawn(move || bell.ring(3))
            };
            bell.sleep();
            let slept = !bell.rung();
            let woken = caller.join().unwrap();
            // If the worker went to sleep, the caller must have seen it.
            assert!(!slept || woken);
            let mut heard = 0;
            bell.drain(|_| heard += 1);
            assert_eq!(heard, 1);
        });
    }

    #[test]
    fn loom_a_ring_is_never_lost() {
        loom::model(|| {
            let bell = Arc::new(Doorbell::default());
            let callers: Vec<_> = (0..2)
                .map(|bit| {
                    let bell = bell.clone();
                    loom::thread::spawn(move || {
                        let _ = bell.ring(bit);
                    })
                })
                .collect();
            let mut heard = 0u64;
            bell.drain(|bit| heard |= 1 << bit);
            for caller in callers {
                caller.join().unwrap();
            }
            bell.drain(|bit| heard |= 1 << bit);
            assert_eq!(heard, 3);
        });
    }
}
