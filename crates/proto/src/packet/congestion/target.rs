//! What a connection's queue should be: the wait that it aims at, and what goes over one path in a row.
//!
//! On a slow link a packet that waits behind another one waits for as long as the target of a quick
//! link: at 100 Mb/s 120 us, and four times that where this is four routes of 25 Mb/s. So the target
//! is at least the time of [`SEVERAL`] packets at the rate at which bytes arrive
//! ([`delivery`](crate::packet::delivery)), a millisecond at most.
//!
//! Over many routes the runs of several connections meet in one of them now and then: 30 us of a connection's
//! bytes are 90 us of a route that is a third as quick. Such a queue is gone when the windows are smaller, and the
//! route stands still. So where waits differ from each other ([`EVEN`]) the target is longer, up to twice.
//!
//! # Long ways
//! What a window sends at once is a queue of as much as a round trip. Where that is short beside the target nobody
//! minds. Where it is long ([`LONG`]) windows go spread over it ([`pace`](crate::packet::pace)): at twice their rate while
//! they double, so that the queue tells when to stop (HyStart, 2011), and at a quarter more after that. There the
//! target is longer as well ([`STRETCH`]), as Swift's grows with the length of the way.

use std::time::Duration;

use super::Congestion;
use crate::packet::ack::EVERY_PATIENT;
use crate::packet::window::TARGET;

/// A queue that is worth it lasts for [`TARGET`], and at least this many packets at the rate at which bytes arrive ...
pub(super) const SEVERAL: f64 = 8.0;
/// ... but no more seconds than this: a longer queue harms others.
pub(super) const LONGEST: f64 = 1e-3;
/// Packets of this time go over one path, one after the other: a short time beside the target, and on
/// quick networks a full call to the kernel.
const RUN: Duration = Duration::from_micros(30);
/// Where waits differ by more than this part of the target, on the average, ...
const EVEN: f64 = 0.2;
/// ... it is longer by this multiple of what they differ by more, up to twice as long.
const UNEVEN: f64 = 2.0;
/// Where less is in flight than a part in this many of what may be, threads are the limit and the network is not.
const ROOMY: f64 = 4.0;
/// Threads have more time where calls to the kernel are few: a run is one part in this many of the window then.
const PARTS: f64 = 8.0;
/// More for small windows: Swift's flow scaling.
const SCALING: f64 = 2.0;
/// Round trips of this many targets are long: windows go spread over them.
const LONG: f64 = 4.0;
/// A queue of one in this many parts of the longest way there and back is short beside it ...
const SHORT: f64 = 2.0;
/// ... and may be aimed at, if it is no more than this many times what it would be else.
const STRETCH: f64 = 3.0;

impl Congestion {
    /// Bytes that one path should take in a row: what the connection sends in [`RUN`], and more where the network
    /// is not the limit.
    pub fn run(&self, flying: u64) -> f64 {
        let run = self.delivery.rate() * RUN.as_secs_f64();
        if self.is_roomy(flying) {
            run.max(self.total() / PARTS)
        } else {
            run
        }
    }

    /// Whether much less is in flight than may be, and that is much: threads are the limit, or what is there to be
    /// sent.
    pub fn is_roomy(&self, flying: u64) -> bool {
        let total = self.total();
        flying as f64 * ROOMY < total && total >= ROOMY * f64::from(EVERY_PATIENT) * self.packet
    }

    /// The wait that a connection of this size aims at, in seconds.
    pub(super) fn target(&self) -> f64 {
        let packets = (self.sums.bytes / self.packet).max(0.25);
        let base = TARGET.as_secs_f64();
        let alone = self.alone();
        let alone = alone * (self.longest / alone / SHORT).clamp(1.0, STRETCH);
        alone + (base * SCALING / packets.sqrt()).min(base * SCALING)
    }

    /// The same where ways are short.
    pub(super) fn alone(&self) -> f64 {
        let base = TARGET.as_secs_f64();
        let several = self.delivery.takes(SEVERAL * self.packet).min(LONGEST);
        (base * (1.0 + self.uneven())).max(several)
    }

    /// Whether what a window sends at once is a longer queue than what is aimed at.
    pub(super) fn is_long(&self) -> bool {
        self.longest > LONG * self.alone()
    }

    /// The part of a window that may go over its path in a row.
    pub fn burst(&self) -> f64 {
        if self.is_long() {
            (self.target() / self.longest / 2.0).min(0.5)
        } else {
            0.5
        }
    }

    /// How far waits differ from each other, from 0 (all wait for one link) to 1 (runs meet in one of many routes).
    fn uneven(&self) -> f64 {
        let base = TARGET.as_secs_f64();
        (UNEVEN * (self.apart / base - EVEN)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ack, trip};
    use super::*;

    #[test]
    fn where_waits_differ_the_target_is_longer() {
        let target = |waits: [u32; 2]| {
            let mut cc = Congestion::new(4, 4, 1400, 1 << 30, Duration::ZERO);
            let mut now = Duration::from_millis(1);
            for turn in 0..4000 {
                now += Duration::from_micros(1);
                ack(&mut cc, (turn % 4) as u8, waits[turn % 2], &trip(300), now);
            }
            cc.target()
        };
        let (even, uneven) = (target([70, 70]), target([0, 140]));
        assert!((150e-6..170e-6).contains(&even), "{even}");
        assert!((220e-6..260e-6).contains(&uneven), "{uneven}");
    }

    #[test]
    fn runs_are_longer_where_the_network_is_not_the_limit() {
        let mut cc = Congestion::new(4, 4, 1400, 1 << 30, Duration::ZERO);
        cc.sums.open = 1400.0 * 100.0;
        assert!(!cc.is_roomy(0) && cc.run(0) == 0.0, "too little for that");
        cc.sums.open = 1400.0 * 1000.0;
        assert!(cc.is_roomy(1400 * 200) && !cc.is_roomy(1400 * 300));
        assert_eq!(cc.run(1400 * 200), 1400.0 * 125.0);
        assert_eq!(cc.run(1400 * 300), 0.0);
    }

    #[test]
    fn on_a_slow_link_the_target_is_several_packets() {
        // Bytes per millisecond, and the target in milliseconds: 25 Mb/s, 100 Mb/s, 1 Gb/s, 10 Gb/s.
        for (bytes, least, most) in [
            (3_125, 1.0, 1.1),
            (12_500, 0.9, 1.0),
            (125_000, 0.15, 0.25),
            (1_250_000, 0.15, 0.25),
        ] {
            let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
            for step in 1..300 {
                let now = Duration::from_millis(step);
                cc.arrived(0, bytes, (now, false), &trip(500), now);
            }
            let target = cc.target() * 1e3;
            assert!((least..most).contains(&target), "{bytes}: {target}");
        }
    }
}
