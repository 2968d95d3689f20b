//! A ring of descriptors in memory that is shared with the kernel: one side produces, the other
//! consumes. Both counters run freely and wrap; a place in the ring is a counter's low bits.
//!
//! # Order
//! The producer writes entries and then stores its counter with release; the consumer loads that counter
//! with acquire and then reads. The consumer stores its own counter with release when it is done with
//! entries; the producer loads that with acquire before it writes over them. The kernel does the same
//! on its side (Documentation/networking/af_xdp.rst).
//!
//! Each side keeps both counters for itself too, and looks at the other's only when its copy says that
//! the ring is full or empty.

#![allow(unsafe_code, reason = "rings are in memory that the kernel shares")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::{Mapping, Offsets};

/// What may be in a ring: any bytes are a value of it.
///
/// # Safety
/// Every pattern of bits must be a valid value.
pub unsafe trait Entry: Copy {}

// Safety: a plain number.
unsafe impl Entry for u64 {}

/// A packet or a part of one.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Where it begins in the memory of frames.
    pub address: u64,
    /// Its bytes.
    pub length: u32,
    /// [`CONTINUED`].
    pub options: u32,
}

/// The packet goes on in the next descriptor.
pub const CONTINUED: u32 = libc::XDP_PKT_CONTD;

// Safety: plain numbers without gaps.
unsafe impl Entry for Descriptor {}

/// The shared memory of a ring.
#[derive(Debug)]
struct Shared<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    mask: u32,
    /// Keeps the memory; `None`: a test does.
    _mapping: Option<Mapping>,
}

// Safety: the pointers lead into memory that lives as long as this, and the two counters are atomics. Entries
// are plain numbers, touched by the side whose turn it is (see the module).
unsafe impl<T: Entry> Send for Shared<T> {}

impl<T: Entry> Shared<T> {
    fn map(mapping: Mapping, offsets: Offsets, entries: u32) -> Option<Shared<T>> {
        if !entries.is_power_of_two() {
            return None;
        }
        let end = offsets
            .entries
            .checked_add((entries as usize).checked_mul(size_of::<T>())?)?;
        let last = [offsets.producer, offsets.consumer, offsets.flags];
        let inside = last
            .iter()
            .all(|at| at % 4 == 0 && at + 4 <= mapping.length());
        if end > mapping.length() || !inside || !offsets.entries.is_multiple_of(align_of::<T>()) {
            return None;
        }
        let start = mapping.start();
        // Safety: all four offsets are inside of the mapping and aligned, as was just seen (a mapping
        // begins at a page).
        unsafe {
            Some(Shared {
                producer: start.add(offsets.producer).cast(),
                consumer: start.add(offsets.consumer).cast(),
                flags: start.add(offsets.flags).cast(),
                entries: start.add(offsets.entries).cast(),
                mask: entries - 1,
                _mapping: Some(mapping),
            })
        }
    }

    fn producer(&self) -> &AtomicU32 {
        // Safety: it points to an aligned number in memory that lives as long as this.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // Safety: as above.
        unsafe { self.consumer.as_ref() }
    }

    fn needs_wakeup(&self) -> bool {
        // Safety: as above.
        let flags = unsafe { self.flags.as_ref() }.load(Ordering::Relaxed);
        flags & libc::XDP_RING_NEED_WAKEUP != 0
    }

    fn entry(&self, at: u32) -> NonNull<T> {
        // Safety: the mask keeps it below the number of entries.
        unsafe { self.entries.add((at & self.mask) as usize) }
    }
}

/// The side that puts entries in.
#[derive(Debug)]
pub struct Producer<T> {
    shared: Shared<T>,
    /// The next entry to be written.
    next: u32,
    /// What the other side has been told of.
    told: u32,
    /// The consumer's counter when it was last looked at.
    seen: u32,
}

impl<T: Entry> Producer<T> {
    pub(crate) fn map(mapping: Mapping, offsets: Offsets, entries: u32) -> Option<Self> {
        Shared::map(mapping, offsets, entries).map(Self::over)
    }

    fn over(shared: Shared<T>) -> Self {
        let at = shared.producer().load(Ordering::Relaxed);
        let seen = shared.consumer().load(Ordering::Acquire);
        Producer {
            shared,
            next: at,
            told: at,
            seen,
        }
    }

    fn room_seen(&self) -> u32 {
        // A counter that the other side has spoilt must not make room where there is none.
        (self.shared.mask + 1).saturating_sub(self.next.wrapping_sub(self.seen))
    }

    /// Entries that may be put in now; looks at the other side where fewer than `wanted` are known.
    pub fn room(&mut self, wanted: u32) -> u32 {
        if self.room_seen() < wanted {
            self.seen = self.shared.consumer().load(Ordering::Acquire);
        }
        self.room_seen()
    }

    /// Puts an entry in, which the other side does not see yet. `false`: the ring is full.
    pub fn push(&mut self, entry: T) -> bool {
        if self.room(1) == 0 {
            return false;
        }
        // Safety: the consumer is past this entry (there was room), and does not look at it before the
        // next `submit`.
        unsafe { self.shared.entry(self.next).write(entry) };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Shows the other side what was put in; how many entries.
    pub fn submit(&mut self) -> u32 {
        let new = self.next.wrapping_sub(self.told);
        if new > 0 {
            self.shared.producer().store(self.next, Ordering::Release);
            self.told = self.next;
        }
        new
    }

    /// Entries that the other side has not taken yet.
    pub fn waiting(&mut self) -> u32 {
        self.seen = self.shared.consumer().load(Ordering::Acquire);
        self.told.wrapping_sub(self.seen)
    }

    /// The kernel sleeps and has to be called.
    pub fn needs_wakeup(&self) -> bool {
        self.shared.needs_wakeup()
    }
}

/// The side that takes entries out.
#[derive(Debug)]
pub struct Consumer<T> {
    shared: Shared<T>,
    /// The next entry to be read.
    next: u32,
    /// What the other side may use again.
    freed: u32,
    /// The producer's counter when it was last looked at.
    seen: u32,
}

impl<T: Entry> Consumer<T> {
    pub(crate) fn map(mapping: Mapping, offsets: Offsets, entries: u32) -> Option<Self> {
        Shared::map(mapping, offsets, entries).map(Self::over)
    }

    fn over(shared: Shared<T>) -> Self {
        let at = shared.consumer().load(Ordering::Relaxed);
        Consumer {
            shared,
            next: at,
            freed: at,
            seen: at,
        }
    }

    /// Entries that may be taken; looks at the other side where none is known.
    pub fn available(&mut self) -> u32 {
        if self.next == self.seen {
            let seen = self.shared.producer().load(Ordering::Acquire);
            // More than the ring holds cannot be there.
            let ahead = seen.wrapping_sub(self.next).min(self.shared.mask + 1);
            self.seen = self.next.wrapping_add(ahead);
        }
        self.seen.wrapping_sub(self.next)
    }

    /// Takes an entry. The other side does not use its place before [`Consumer::release`].
    pub fn pop(&mut self) -> Option<T> {
        if self.available() == 0 {
            return None;
        }
        // Safety: the producer has written this entry and stored its counter with release, which was
        // loaded with acquire; it does not write it again before `release`. Any bits are a value.
        let entry = unsafe { self.shared.entry(self.next).read() };
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Gives the places of what was taken back.
    pub fn release(&mut self) {
        if self.freed != self.next {
            self.shared.consumer().store(self.next, Ordering::Release);
            self.freed = self.next;
        }
    }
}

/// Both ends of a ring in memory of our own, for tests; counters begin at `start`.
///
/// `memory` keeps what the ends point to: it must be dropped last.
#[cfg(test)]
pub(crate) struct Both<T> {
    pub producer: Producer<T>,
    pub consumer: Consumer<T>,
    _memory: Box<[std::cell::UnsafeCell<u64>]>,
}

#[cfg(test)]
impl<T: Entry> Both<T> {
    fn new(entries: u32, start: u32) -> Both<T> {
        let bytes = 64 + entries as usize * size_of::<T>();
        let cell = |_| std::cell::UnsafeCell::new(0u64);
        let memory: Box<[_]> = (0..bytes.div_ceil(8)).map(cell).collect();
        let all = NonNull::new(memory.as_ptr().cast_mut()).unwrap();
        // Safety: the first words are there, by `bytes` above.
        let at = |word: usize| unsafe { all.add(word) };
        let shared = || Shared {
            producer: at(0).cast::<AtomicU32>(),
            consumer: at(2).cast(),
            flags: at(4).cast(),
            // Safety: the words after the first eight are there, by `bytes` above.
            entries: unsafe { all.add(8) }.cast(),
            mask: entries - 1,
            _mapping: None,
        };
        let (one, other) = (shared(), shared());
        one.producer().store(start, Ordering::Relaxed);
        one.consumer().store(start, Ordering::Relaxed);
        Both {
            producer: Producer::over(one),
            consumer: Consumer::over(other),
            _memory: memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push(u8),
        Submit,
        Pop(u8),
        Release,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u8..12).prop_map(Step::Push),
            Just(Step::Submit),
            (1u8..12).prop_map(Step::Pop),
            Just(Step::Release),
        ]
    }

    proptest! {
        /// Against three queues: written, shown, taken and not given back.
        #[test]
        fn entries_come_out_as_they_went_in_also_when_counters_wrap(
            power in 0u32..5,
            start in prop_oneof![Just(0), (u32::MAX - 40)..=u32::MAX, any::<u32>()],
            steps in prop::collection::vec(step(), 0..200),
        ) {
            let size = 1u32 << power;
            let mut ring = Both::<Descriptor>::new(size, start);
            let (mut written, mut shown) = (VecDeque::new(), VecDeque::new());
            let (mut taken, mut number) = (0u32, 0u64);
            for step in steps {
                match step {
                    Step::Push(count) => for _ in 0..count {
                        let used = written.len() as u32 + shown.len() as u32 + taken;
                        let entry = Descriptor { address: number, length: !(number as u32), options: 0 };
                        prop_assert_eq!(ring.producer.push(entry), used < size);
                        if used < size {
                            written.push_back(entry);
                            number += 1;
                        }
                    },
                    Step::Submit => {
                        prop_assert_eq!(ring.producer.submit() as usize, written.len());
                        shown.append(&mut written);
                        prop_assert_eq!(ring.producer.waiting(), shown.len() as u32 + taken);
                    }
                    Step::Pop(count) => for _ in 0..count {
                        let wanted = shown.pop_front();
                        prop_assert_eq!(ring.consumer.pop(), wanted);
                        taken += u32::from(wanted.is_some());
                    },
                    Step::Release => {
                        ring.consumer.release();
                        taken = 0;
                    }
                }
            }
        }

        /// Whatever is in the other side's counter, an end stays inside of the ring.
        #[test]
        fn a_spoilt_counter_makes_neither_room_nor_entries(start: u32, spoilt: u32) {
            let mut ring = Both::<u64>::new(8, start);
            ring.producer.shared.consumer().store(spoilt, Ordering::Relaxed);
            prop_assert!(ring.producer.room(9) <= 8);
            ring.consumer.shared.producer().store(spoilt, Ordering::Relaxed);
            prop_assert!(ring.consumer.available() <= 8);
        }
    }

    #[test]
    fn two_threads_hand_over_a_million_entries() {
        let count: u64 = if cfg!(miri) { 500 } else { 1_000_000 };
        let Both {
            mut producer,
            mut consumer,
            _memory,
        } = Both::<u64>::new(64, u32::MAX - 1000);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut next = 0;
                while next < count {
                    while next < count && producer.push(next) {
                        next += 1;
                    }
                    if producer.submit() == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            let mut next = 0;
            while next < count {
                while let Some(entry) = consumer.pop() {
                    assert_eq!(entry, next);
                    next += 1;
                }
                consumer.release();
                std::thread::yield_now();
            }
        });
    }
}
