//! Each packet counts once: a window of the last numbers, one bit each (RFC 4303, section 3.4.3).
//!
//! Over hundreds of source ports packets overtake each other by whole queues, so the window holds
//! 32,768 of them: 20 ms at 20 Gb/s and MTU 1500. What is older is refused as if it had been seen; its
//! sender takes it for lost and sends the bytes again.

const WORDS: usize = 512;
/// Numbers that are remembered.
pub const WINDOW: u64 = WORDS as u64 * 64;

/// See the module.
#[derive(Debug)]
pub struct Replay {
    /// One above the highest number that was seen.
    next: u64,
    bits: Box<[u64; WORDS]>,
}

impl Default for Replay {
    fn default() -> Self {
        Replay {
            next: 0,
            bits: Box::new([0; WORDS]),
        }
    }
}

impl Replay {
    /// One above the highest number that was seen: what is about to come.
    pub fn next(&self) -> u64 {
        self.next
    }

    fn place(number: u64) -> (usize, u64) {
        let slot = number % WINDOW;
        ((slot / 64) as usize, 1 << (slot % 64))
    }

    /// Whether this number was not seen and is not too old to know.
    pub fn is_new(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        number >= self.next || (number + WINDOW >= self.next && self.bits[word] & bit == 0)
    }

    /// Remembers one that was verified.
    pub fn mark(&mut self, number: u64) {
        if number >= self.next {
            if number - self.next >= WINDOW {
                self.bits.fill(0);
            } else {
                for passed in self.next..number {
                    let (word, bit) = Self::place(passed);
                    self.bits[word] &= !bit;
                }
            }
            self.next = number + 1;
        }
        let (word, bit) = Self::place(number);
        self.bits[word] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn equals_a_set(steps in prop::collection::vec((0u64..3, 0u64..70_000), 1..300)) {
            let (mut replay, mut seen, mut highest) = (Replay::default(), HashSet::new(), 100_000u64);
            replay.mark(highest);
            seen.insert(highest);
            for (kind, far) in steps {
                let number = match kind {
                    0 => highest + far % 40,
                    1 => highest.saturating_sub(far),
                    _ => highest + far,
                };
                let old = number + WINDOW < highest + 1;
                prop_assert_eq!(replay.is_new(number), !old && !seen.contains(&number));
                if replay.is_new(number) {
                    replay.mark(number);
                    seen.insert(number);
                    highest = highest.max(number);
                }
            }
        }
    }
}
