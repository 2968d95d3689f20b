//! Which path should have the next chunk: the part that each should have of what is on its way.
//!
//! NCCL keeps a few megabytes in flight and waits for the oldest message, so chunks must wait equally
//! long on every path. Where several paths lead through one queue of the fabric, a path that was given
//! nothing looks quick from here, however full that queue is: who foretells where a chunk arrives
//! first, by what is on its way and how quickly that is delivered, is wrong by just that. So nothing is
//! foretold. Every chunk carries the time at which it was sent, the receiver says how long it waited on
//! its way ([`path`](crate::path)), and the window of the path follows: it shrinks while its chunks
//! wait longer than those of all paths do on the average (and longer than [`TARGET`], which does no
//! harm), and grows while they wait less, if it was full. The path whose window is the least full has
//! the next chunk. All that share a queue see the same wait, so a queue holds its part of the whole
//! whether one path leads through it or ten. An average above [`TARGET_MOST`] counts as that: else
//! all would grow where all wait alike, until the bound on what is on its way in all
//! ([`ahead`](crate::ahead)) stops them, which knows nothing of the two directions. (A slow network,
//! of less than 6 Gb/s in all, is busy with [`FEW`] chunks for longer than that.)
//!
//! The way back is the peer's business, so round trips say nothing. (LEDBAT, RFC 6817, steers by the
//! delay of one way likewise, and Swift, SIGCOMM 2020, by the round trip; both towards a fixed target.)
//!
//! The clocks of the two sides differ: what counts is how much longer a chunk took than the quickest
//! lately. NCCL empties all queues between two steps every now and then.

use std::time::Duration;

use crate::wire::PACKET;

/// So long a chunk may wait in any case, seconds.
pub(crate) const TARGET: f64 = 150e-6;
/// Longer than this none should, whatever the others do ...
const TARGET_MOST: f64 = 350e-6;
/// ... or than the network takes for this many bytes: a slow one is busy with a chunk for long.
const FEW: f64 = 4.0 * PACKET as f64;
/// A window grows by a factor of e in this time where nothing waits.
const PACE: f64 = 20e-3;
/// It shrinks this many times as quickly at most.
const HASTE: f64 = 3.0;
/// It grows as quickly while it lacks more than this part of the target.
const NEAR: f64 = 0.8;
/// Added in [`PACE`], whatever the window: so those that share a queue become equal.
const STEP: f64 = 8.0 * 1024.0;
/// Longer ago, what happened says nothing of now.
const LATELY: Duration = Duration::from_millis(1);
/// Bytes of a window at first, at least and at most.
const FIRST: f64 = 64.0 * 1024.0;
const LEAST: f64 = 16.0 * 1024.0;
const MOST: f64 = 16.0 * 1024.0 * 1024.0;
/// A chunk is this part of the window, or what the caller holds for the least, and not more than this;
/// of that, as many whole packets as there are.
const PART: f64 = 2.0;
const CHUNK_MOST: f64 = 4.0 * PACKET as f64;
/// A window that is less full than this is as good as an empty one: the first of them is as good as
/// any, and few connections that are warm cost less than many.
const HARDLY: f64 = 0.25;
/// So is one whose chunks wait less than this, seconds.
const SHORT: f64 = 80e-6;
/// The quickest is looked for in at least this much time. Longer, and two clocks that differ by 100
/// millionths would be wrong by a tenth of a millisecond.
pub(crate) const PERIOD: Duration = Duration::from_millis(500);

/// The smallest of the last times, from a clock that wraps around.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Quickest {
    before: Option<u32>,
    current: Option<u32>,
    since: Duration,
}

/// The earlier of two times of a clock that goes round and round.
pub(crate) fn earlier(one: u32, other: u32) -> u32 {
    if one.wrapping_sub(other) as i32 > 0 {
        other
    } else {
        one
    }
}

fn least(one: Option<u32>, other: Option<u32>) -> Option<u32> {
    match (one, other) {
        (Some(one), Some(other)) => Some(earlier(one, other)),
        (one, other) => one.or(other),
    }
}

impl Quickest {
    pub fn add(&mut self, time: u32, now: Duration) {
        if now >= self.since + PERIOD {
            self.before = self
                .current
                .take()
                .filter(|_| now < self.since + 2 * PERIOD);
            self.since = now;
        }
        self.current = least(self.current, Some(time));
    }

    pub fn get(&self) -> Option<u32> {
        least(self.before, self.current)
    }
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    bytes: f64,
    /// There was something for it, and it had no room.
    waited: bool,
    steered: Duration,
    /// How long chunks waited lately, microseconds.
    wait: f64,
}

impl Window {
    pub fn new(now: Duration) -> Window {
        Window {
            bytes: FIRST,
            waited: false,
            steered: now,
            wait: 0.0,
        }
    }

    /// Bytes that may be on their way.
    pub fn bytes(&self) -> f64 {
        self.bytes
    }

    /// Bytes of a chunk, of at least this many.
    pub fn chunk(&self, least: f64) -> u32 {
        let bytes = (self.bytes / PART).min(CHUNK_MOST).max(least) as u32;
        (bytes / PACKET).max(1) * PACKET
    }

    /// How full it would be with `queued` bytes and a chunk; 1 and more where there is no room. One that
    /// is too small for a chunk comes last.
    pub fn fill(&self, queued: f64, least: f64) -> f64 {
        if queued >= self.bytes {
            return queued / self.bytes;
        }
        let chunk = f64::from(self.chunk(least));
        let short = self.wait < SHORT * 1e6;
        if short || (queued < self.bytes * HARDLY && self.bytes > 2.0 * least) {
            return 0.0;
        }
        (queued + chunk) / (self.bytes + chunk)
    }

    /// How long chunks waited lately.
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64(self.wait * 1e-6)
    }

    /// There is something for the path, and no room in its window.
    pub fn is_full(&mut self) {
        self.waited = true;
    }

    /// Chunks waited for this many microseconds; `of_all`: those of all paths, on the average lately,
    /// which carry `rate` bytes per second together (0: that is not known yet, and nothing is too long).
    pub fn heard(&mut self, wait: u32, of_all: f64, rate: f64, now: Duration) {
        self.wait += (f64::from(wait) - self.wait) / 8.0;
        let passed = now.saturating_sub(self.steered).min(LATELY);
        self.steered = now;
        let passed = passed.as_secs_f64() / PACE;
        let most = TARGET_MOST.max(FEW / rate);
        let target = (of_all * 1e-6).clamp(TARGET, most);
        let lack = (1.0 - f64::from(wait) * 1e-6 / target).max(-HASTE);
        // Far from the target there is nothing to swing about.
        let lack = if lack > NEAR { lack * HASTE } else { lack };
        let waited = std::mem::take(&mut self.waited);
        if lack < 0.0 || waited {
            self.bytes *= (lack * passed).exp();
        }
        if waited {
            self.bytes += STEP * passed;
        }
        self.bytes = self.bytes.clamp(LEAST, MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST_PIECE: f64 = PACKET as f64;
    /// Bytes per second.
    const QUICK: f64 = 3e9;
    const SLOW: f64 = 0.125e9;

    /// A window after some milliseconds in which chunks wait for this many microseconds; `full`: it has
    /// no room all the time.
    fn after(mut window: Window, milliseconds: u64, wait: u32, full: bool) -> Window {
        let start = window.steered;
        for step in 1..=milliseconds * 2 {
            if full {
                window.is_full();
            }
            window.heard(
                wait,
                0.0,
                QUICK,
                start + Duration::from_micros(500) * step as u32,
            );
        }
        window
    }

    fn fresh() -> Window {
        Window::new(Duration::ZERO)
    }

    #[test]
    fn it_grows_where_little_waits_and_only_if_it_was_full() {
        let idle = after(fresh(), 50, 0, false);
        assert_eq!(idle.bytes(), FIRST);
        let grown = after(fresh(), 20, 0, true);
        assert!(grown.bytes() > 20.0 * FIRST, "{}", grown.bytes());
        assert!(after(grown, 1000, 0, true).bytes() <= MOST);
    }

    #[test]
    fn it_shrinks_where_chunks_wait_for_long_and_never_to_nothing() {
        let large = after(fresh(), 20, 0, true);
        let shrunk = after(large, 10, 2000, true);
        assert!(shrunk.bytes() < large.bytes() / 3.0, "{}", shrunk.bytes());
        assert_eq!(after(large, 1000, 2000, false).bytes(), LEAST);
    }

    /// A queue of 0.78 GB/s and windows that share it, one much larger than the other.
    #[test]
    fn those_that_share_a_queue_hold_it_at_the_target_and_become_equal() {
        let rate = 0.78e9;
        let mut windows = [after(fresh(), 8, 0, true), fresh()];
        let mut wait = 0.0;
        for step in 1..=4000u32 {
            let now = Duration::from_millis(8) + Duration::from_micros(500) * step;
            let sum: f64 = windows.iter().map(Window::bytes).sum();
            wait = (sum / rate - 100e-6).max(0.0);
            for window in &mut windows {
                window.is_full();
                window.heard((wait * 1e6) as u32, 0.0, QUICK, now);
            }
        }
        assert!((wait / TARGET - 1.0).abs() < 0.2, "{wait}");
        let [one, other] = windows.map(|window| window.bytes());
        assert!((0.6..1.6).contains(&(one / other)), "{one} {other}");
    }

    #[test]
    fn where_all_wait_alike_and_long_all_shrink() {
        let large = after(fresh(), 20, 0, true);
        for (rate, wait, shrinks) in [
            (QUICK, 300, false),
            (QUICK, 700, true),
            (SLOW, 700, false),
            (SLOW, 2500, true),
        ] {
            let mut window = large;
            for step in 1..=40 {
                window.is_full();
                let now = large.steered + Duration::from_micros(500) * step;
                window.heard(wait, f64::from(wait), rate, now);
            }
            assert_eq!(window.bytes() < large.bytes(), shrinks, "{wait} us");
        }
    }

    #[test]
    fn a_pause_changes_nothing() {
        let before = after(fresh(), 10, 0, true);
        let mut window = before;
        window.is_full();
        window.heard(2000, 0.0, QUICK, before.steered + Duration::from_secs(5));
        assert!(window.bytes() > before.bytes() * 0.8);
    }

    #[test]
    fn the_emptiest_comes_first_and_one_too_small_for_a_chunk_last() {
        let busy = |milliseconds| after(after(fresh(), milliseconds, 0, true), 20, 150, true);
        let (large, small) = (busy(12), busy(1));
        assert_eq!(large.fill(0.0, LEAST_PIECE), 0.0);
        let half = large.fill(large.bytes() / 2.0, LEAST_PIECE);
        assert!((0.5..1.0).contains(&half), "{half}");
        assert!(small.fill(0.9 * small.bytes(), LEAST_PIECE) > half);
        assert!(large.fill(large.bytes(), LEAST_PIECE) >= 1.0);
    }

    #[test]
    fn the_quickest_of_late_forgets_what_was_long_ago() {
        let mut quickest = Quickest::default();
        quickest.add(u32::MAX - 5, Duration::from_secs(1));
        quickest.add(20, Duration::from_secs(1));
        assert_eq!(quickest.get(), Some(u32::MAX - 5));
        quickest.add(30, Duration::from_millis(1600));
        assert_eq!(quickest.get(), Some(u32::MAX - 5));
        quickest.add(40, Duration::from_millis(2200));
        assert_eq!(quickest.get(), Some(30));
        quickest.add(90, Duration::from_secs(9));
        assert_eq!(quickest.get(), Some(90));
    }
}
