//! The bytes of a message that have arrived: sorted, disjoint intervals, merged as they touch. A
//! message in order is one interval, so this is a short vector and not a bitmap a byte.

/// A set of bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges {
    parts: Vec<(u64, u64)>,
    total: u64,
}

impl Ranges {
    /// Adds `start..end`. An empty interval changes nothing.
    pub fn insert(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        // In order, as almost always.
        if let Some(last) = self.parts.last_mut()
            && last.1 == start
        {
            last.1 = end;
            self.total += end - start;
            return;
        }
        // The first part that ends at or after `start` may touch the new one.
        let first = self.parts.partition_point(|part| part.1 < start);
        let last = self.parts.partition_point(|part| part.0 <= end);
        // It is on the way of every packet: no general replacement where one part grows.
        if first == last {
            self.total += end - start;
            self.parts.insert(first, (start, end));
            return;
        }
        let merged = &self.parts[first..last];
        let old: u64 = merged.iter().map(|part| part.1 - part.0).sum();
        let high = end.max(merged[merged.len() - 1].1);
        let part = &mut self.parts[first];
        *part = (start.min(part.0), high);
        self.total = self.total - old + (part.1 - part.0);
        self.parts.drain(first + 1..last);
    }

    /// Whether all of `start..end` is there.
    pub fn contains(&self, start: u64, end: u64) -> bool {
        start >= end
            || self
                .parts
                .iter()
                .any(|part| part.0 <= start && end <= part.1)
    }

    /// How many bytes are there.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_a_bitmap(inserts in prop::collection::vec((0u64..64, 0u64..64), 0..24)) {
            let (mut ranges, mut bits) = (Ranges::default(), [false; 64]);
            for (start, end) in inserts {
                ranges.insert(start, end);
                for at in start..end {
                    bits[at as usize] = true;
                }
                prop_assert_eq!(ranges.total(), bits.iter().filter(|bit| **bit).count() as u64);
                prop_assert!(ranges.parts.windows(2).all(|pair| pair[0].1 < pair[1].0));
                for low in 0..64u64 {
                    for high in low..64 {
                        let want = bits[low as usize..high as usize].iter().all(|bit| *bit);
                        prop_assert_eq!(ranges.contains(low, high), want);
                    }
                }
            }
        }
    }
}
