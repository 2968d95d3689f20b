//! Copies into memory that others read meanwhile: NCCL looks at a posted buffer while it fills, and
//! takes a line's data as soon as its flag is there ([`line`](evener_proto::line)).
//!
//! `memcpy` may store the last bytes of a piece before those between, and the string instructions of
//! x86, which the kernel's copies use as well, store in any order. So each word here is stored by an
//! instruction of its own, at rising addresses, none of which crosses a multiple of its size:
//!
//! - x86 makes stores visible in their order. Whole lines go 16 bytes at a time, in an assembler's
//!   words, which no compiler reorders or takes for a `memcpy`.
//! - Others need to be told: every word is stored with release.

#![allow(unsafe_code, reason = "memory that others read is written")]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::Memory;
use evener_proto::faults::{self, Fault};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Copies as many bytes as the shorter of the two has. Who sees one of them sees all before it.
///
/// # Safety
/// `from` may be read and `to` written; they do not overlap, and nobody else writes to `to` but the same
/// bytes in this way.
pub unsafe fn publish(from: Memory, to: Memory) {
    if faults::is(Fault::AnyOrder) {
        // SAFETY: the caller's promise.
        return unsafe { super::copy(from, to) };
    }
    let length = from.length.min(to.length);
    let (mut place, end) = (0, length);
    let boundary = |multiple: usize| to.start.align_offset(multiple).min(end);
    // SAFETY: all that is read and written is inside of `length` bytes of both, see each loop; words are
    // aligned where they are written.
    unsafe {
        let byte = |at: usize| {
            let cell = AtomicU8::from_ptr(to.start.add(at));
            cell.store(from.start.add(at).read(), Ordering::Release);
        };
        let word = |at: usize| {
            let value = from.start.add(at).cast::<u64>().read_unaligned();
            let cell = AtomicU64::from_ptr(to.start.add(at).cast());
            cell.store(value, Ordering::Release);
        };
        while place < boundary(WORD) {
            byte(place);
            place += 1;
        }
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            while place < boundary(lines::ALIGNED) && place + WORD <= end {
                word(place);
                place += WORD;
            }
            let whole = (end - place) / lines::LINE;
            lines::copy(from.start.add(place), to.start.add(place), whole);
            place += whole * lines::LINE;
        }
        while place + WORD <= end {
            word(place);
            place += WORD;
        }
        while place < end {
            byte(place);
            place += 1;
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod lines {
    use std::arch::asm;

    pub const LINE: usize = evener_proto::line::LINE as usize;
    /// What a store does not cross a multiple of.
    pub const ALIGNED: usize = 16;

    /// Copies lines, each from its first byte to its last.
    ///
    /// # Safety
    /// This many lines may be read at `from` and written at `to`, which is a multiple of [`ALIGNED`].
    pub unsafe fn copy(from: *const u8, to: *mut u8, count: usize) {
        let (mut from, mut to) = (from, to);
        for _ in 0..count {
            // SAFETY: 128 bytes of each, by the caller's promise; nothing but eight registers changes.
            unsafe {
                asm!(
                    "movups {a}, [{from}]",
                    "movups {b}, [{from} + 16]",
                    "movups {c}, [{from} + 32]",
                    "movups {d}, [{from} + 48]",
                    "movups {e}, [{from} + 64]",
                    "movups {f}, [{from} + 80]",
                    "movups {g}, [{from} + 96]",
                    "movups {h}, [{from} + 112]",
                    "movaps [{to}], {a}",
                    "movaps [{to} + 16], {b}",
                    "movaps [{to} + 32], {c}",
                    "movaps [{to} + 48], {d}",
                    "movaps [{to} + 64], {e}",
                    "movaps [{to} + 80], {f}",
                    "movaps [{to} + 96], {g}",
                    "movaps [{to} + 112], {h}",
                    from = in(reg) from,
                    to = in(reg) to,
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    e = out(xmm_reg) _,
                    f = out(xmm_reg) _,
                    g = out(xmm_reg) _,
                    h = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
                (from, to) = (from.add(LINE), to.add(LINE));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use proptest::prelude::*;

    const WORDS: usize = 16;

    const LINES: usize = 32;

    /// Copies the same lines again and again, each time with other numbers and in other pieces, while
    /// another thread reads them: lines that were seen new, and those of them of which data was old.
    fn read_meanwhile(lines: u64) -> (u64, u64) {
        let place: Vec<AtomicU64> = (0..2 * LINES * WORDS).map(|_| AtomicU64::new(0)).collect();
        let skip = place.as_ptr().align_offset(128);
        let place = &place[skip..skip + LINES * WORDS];
        let (over, mut seen, mut torn) = (AtomicBool::new(false), 0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut step = 1;
                for number in 1u64.. {
                    let mut from = vec![number; place.len()];
                    let mut at = 0;
                    while at < place.len() {
                        step = step * 193 % 1009;
                        let next = place.len().min(at + 1 + step % 180);
                        let to = Memory {
                            start: place[at..next].as_ptr().cast_mut().cast(),
                            length: (next - at) * WORD,
                        };
                        let piece = Memory {
                            start: from[at..].as_mut_ptr().cast(),
                            ..to
                        };
                        // SAFETY: both are vectors of this test's; the other thread reads words.
                        unsafe { publish(piece, to) };
                        at = next;
                    }
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let mut last = [0; LINES];
            while seen < lines {
                for (line, last) in place.chunks_exact(WORDS).zip(&mut last) {
                    let flag = line[WORDS - 1].load(Ordering::Acquire);
                    if flag > *last {
                        // What comes later is newer.
                        let is_old = |word: &AtomicU64| word.load(Ordering::Acquire) < flag;
                        torn += u64::from(line.iter().any(is_old));
                        seen += 1;
                        *last = flag;
                    }
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        (seen, torn)
    }

    #[test]
    fn who_sees_the_flag_of_a_line_sees_the_line() {
        if cfg!(miri) {
            return;
        }
        let lines = std::env::var("EVENER_TEST_LINES").ok();
        let lines = lines.and_then(|text| text.parse().ok()).unwrap_or(50_000);
        assert_eq!(read_meanwhile(lines).1, 0);
        // And a copy in any order is found.
        faults::put(&[Fault::AnyOrder]);
        let (mut seen, mut torn) = (0, 0);
        while torn == 0 && seen < 100 * lines {
            let found = read_meanwhile(lines);
            (seen, torn) = (seen + found.0, torn + found.1);
        }
        faults::put(&[]);
        println!("{torn} of {seen} torn by a copy in any order");
        assert!(torn > 0);
    }

    proptest! {
        #[test]
        fn it_copies_what_is_there_and_nothing_beside(
            (from, to) in (0usize..40, 0usize..40), length in 0usize..700,
        ) {
            let source: Vec<u8> = (0..800).map(|at| (at * 7 + at / 256) as u8).collect();
            let mut target = vec![0xa5u8; 800];
            let memory = Memory::of(&mut target[to..to + length]);
            // SAFETY: two vectors of this test's.
            unsafe { publish(Memory::read_only(&source[from..]), memory) };
            prop_assert_eq!(&target[to..to + length], &source[from..from + length]);
            prop_assert!(target[..to].iter().chain(&target[to + length..]).all(|one| *one == 0xa5));
        }
    }
}
