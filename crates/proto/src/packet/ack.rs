//! The receiver's side of acknowledgements: what has arrived, and when to say so.
//!
//! An acknowledgement names ranges of packet numbers, newest first (RFC 9000, section 19.3), so the
//! loss of one costs nothing: the next says it again. It goes out after [`EVERY`] packets
//! ([`EVERY_PATIENT`] if the sender has room for much more), after
//! [`LONGEST`], or at once if the sender asks for it, which it does with the last packet that it may
//! send: a short message does not wait for a timer. A packet that comes after one that has asked, and was
//! sent before it, is acknowledged at once too: its process may end as soon as it has the message, and its peer
//! would wait for an answer that nobody gives. Gaps do not hasten it: over many paths packets
//! overtake each other all the time, and what is a gap is for the sender to say.
//!
//! Beside the numbers stands how long the newest packet of each path took, by the two clocks: only
//! the sender's own direction counts for its congestion control (as TIMELY's and Swift's one-way
//! delays), whatever waits on the way back.
//!
//! Numbers are never sent twice, so a lost packet leaves a gap for ever. The sender says which numbers
//! it does not care for any more, and [`Received::forget_below`] drops them.

use std::collections::VecDeque;
use std::time::Duration;

use super::format::{Haste, Heard, Writer};

/// Packets that are acknowledged together, ...
pub const EVERY: u32 = 8;
/// ... and where the sender is patient: an acknowledgement costs both ends a call to the kernel.
pub const EVERY_PATIENT: u32 = 40;
/// The longest that an acknowledgement waits for more packets.
pub const LONGEST: Duration = Duration::from_micros(100);
/// Ranges that are kept; a range more, and the oldest goes.
const MOST: usize = 1024;

/// Packets that have arrived.
#[derive(Debug, Default)]
pub struct Received {
    /// Sorted, disjoint, with gaps between them.
    ranges: VecDeque<(u64, u64)>,
    /// Since the last acknowledgement: packets that want one, and when the first of them came.
    waiting: u32,
    since: Option<Duration>,
    at_once: bool,
    /// The highest number that has asked for an acknowledgement at once.
    asked: Option<u64>,
    /// The last packet's sender could wait for [`EVERY_PATIENT`].
    patient: bool,
    /// When the highest number came.
    newest: Duration,
    heard: Vec<Heard>,
}

impl Received {
    /// A packet that was not seen before. `wants`: it asks to be acknowledged.
    pub fn insert(&mut self, number: u64, wants: bool, haste: Haste, now: Duration) {
        if self.ranges.back().is_none_or(|range| range.1 < number) {
            self.newest = now;
        }
        let after = self
            .ranges
            .iter()
            .rposition(|range| range.0 <= number)
            .map_or(0, |at| at + 1);
        let joins_before = after > 0 && self.ranges[after - 1].1 + 1 >= number;
        let joins_after = self.ranges.get(after).is_some_and(|r| r.0 == number + 1);
        match (joins_before, joins_after) {
            (true, true) => {
                self.ranges[after - 1].1 = self.ranges[after].1;
                self.ranges.remove(after);
            }
            (true, false) => self.ranges[after - 1].1 = self.ranges[after - 1].1.max(number),
            (false, true) => self.ranges[after].0 = number,
            (false, false) => self.ranges.insert(after, (number, number)),
        }
        if self.ranges.len() > MOST {
            self.ranges.pop_front();
        }
        if wants {
            self.waiting += 1;
            self.since.get_or_insert(now);
            if haste == Haste::Now {
                self.asked = self.asked.max(Some(number));
            }
            self.at_once |= self.asked >= Some(number);
            self.patient = haste == Haste::Patient;
        }
    }

    /// How long a packet of this path took, and whether a switch marked it.
    pub fn heard(&mut self, path: u8, delay: u32, marked: bool) {
        let marked = u8::from(marked);
        match self.heard.iter_mut().find(|heard| heard.path == path) {
            Some(heard) => {
                heard.delay = delay;
                heard.marked = heard.marked.saturating_add(marked);
            }
            None => self.heard.push(Heard {
                path,
                marked,
                delay,
            }),
        }
    }

    /// The sender does not care for lower numbers.
    pub fn forget_below(&mut self, floor: u64) {
        while let Some(range) = self.ranges.front_mut() {
            if range.1 >= floor {
                range.0 = range.0.max(floor);
                break;
            }
            // The newest stays: without it there is nothing to say.
            if self.ranges.len() == 1 {
                break;
            }
            self.ranges.pop_front();
        }
    }

    /// When an acknowledgement is due, if one is.
    pub fn deadline(&self) -> Option<Duration> {
        let since = self.since?;
        let together = if self.patient { EVERY_PATIENT } else { EVERY };
        let now = self.at_once || self.waiting >= together;
        Some(if now { since } else { since + LONGEST })
    }

    /// Whether there is something to acknowledge, due or not.
    pub fn waits(&self) -> bool {
        self.since.is_some()
    }

    /// Writes an acknowledgement. `false`: there is nothing to say, or no room.
    pub fn emit(&mut self, writer: &mut Writer<'_>, now: Duration) -> bool {
        let held = now.saturating_sub(self.newest).as_micros();
        let held = u16::try_from(held).unwrap_or(u16::MAX);
        if !writer.ack(held, self.ranges.iter().rev().copied(), &self.heard) {
            return false;
        }
        (self.waiting, self.since, self.at_once) = (0, None, false);
        self.heard.clear();
        true
    }

    /// How many ranges are kept.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn ranges_equal_a_set(numbers in prop::collection::vec(0u64..200, 1..150), floor in 0u64..200) {
            let (mut received, mut set) = (Received::default(), BTreeSet::new());
            for number in numbers {
                if set.insert(number) {
                    received.insert(number, true, Haste::Soon, Duration::ZERO);
                }
            }
            let flat = |received: &Received| -> BTreeSet<u64> {
                received.ranges.iter().flat_map(|r| r.0..=r.1).collect()
            };
            prop_assert_eq!(&flat(&received), &set);
            let apart = |r: &Received| (1..r.ranges.len()).all(|i| r.ranges[i - 1].1 + 1 < r.ranges[i].0);
            prop_assert!(apart(&received));
            received.forget_below(floor);
            prop_assert!(received.ranges() > 0);
            prop_assert!(flat(&received).is_subset(&set));
            prop_assert!(set.range(floor..).all(|number| flat(&received).contains(number)));
        }
    }

    #[test]
    fn it_is_due_after_some_packets_after_some_time_or_at_once() {
        let at = Duration::from_millis(1);
        let mut received = Received::default();
        assert_eq!(received.deadline(), None);
        received.insert(0, false, Haste::Now, at);
        assert_eq!(received.deadline(), None);
        received.insert(1, true, Haste::Soon, at);
        assert_eq!(received.deadline(), Some(at + LONGEST));
        for number in 2..=u64::from(EVERY) {
            received.insert(number, true, Haste::Soon, at);
        }
        assert_eq!(received.deadline(), Some(at));
        let mut out = [0; 100];
        assert!(received.emit(&mut Writer::new(&mut out), at));
        assert_eq!(received.deadline(), None);
        received.insert(50, true, Haste::Now, at);
        assert_eq!(received.deadline(), Some(at));
        assert!(received.emit(&mut Writer::new(&mut out), at));
        // A patient sender's wait for more of them, and no longer.
        for number in 51..50 + u64::from(EVERY_PATIENT) {
            received.insert(number, true, Haste::Patient, at);
            assert_eq!(received.deadline(), Some(at + LONGEST));
        }
        received.insert(100, true, Haste::Patient, at);
        assert_eq!(received.deadline(), Some(at));
    }
}
