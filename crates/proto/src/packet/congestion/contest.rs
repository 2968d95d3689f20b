//! When a path competes with TCP, and how: all that do are one stream of cubic (RFC 9438).
//!
//! # When
//! A path whose packets have waited for twice the target (or for [`ALIEN`], where twice the target is more than that)
//! for two epochs, though its window shrank, stands in another's queue. It starts again from most of what it had.
//!
//! In a queue that is not much longer than the target the two take turns around it, until the connection has nothing.
//! So where all windows are down by a third ([`GAVE_UP`]) since the queue was last short, or since the start, it is
//! another's if it has not become short again.
//!
//! Where windows are parts of a packet an epoch may hold one packet of a path, and that may have stood behind a run of
//! another path's. It speaks for the queue only if no path's packets waited for less; else more of them are heard first
//! ([`SAYS`]). A slow link that is the connection's own was taken for another's without that, and so was a peer that
//! has no processor now and then.
//!
//! Beside TCP a queue may not be empty for minutes. So while a path competes the shortest way is
//! [held](super::super::shortest::HOLDS), and is that of all paths: what each has seen of the queue says nothing of its
//! length.
//!
//! # How
//! All paths that compete are one stream, however many they are: their windows together follow the curve. After a
//! loss they are [`KEEPS`] of what they were; from there the sum goes by time, a cube with its flat part where the loss
//! was, or as Reno would where that is more. Paths that do not share a queue are one stream all the same, which is
//! less than each could have (RFC 6356 couples the paths of a multipath TCP for the same reason). Where the queue is
//! nearly empty nobody else has what is free, and windows grow as they do without TCP.

use std::time::Duration;

use super::target::LONGEST;
use super::{Congestion, LEAVE};
use crate::packet::trace::Decision;

/// A queue of this many seconds is no queue of ours, however short the own target is: sixteen senders on
/// 1 Gb/s keep one of a little more than [`LONGEST`], and who has seen a quicker link aims at less.
const ALIEN: f64 = 1.1 * LONGEST;
/// Who has come down to one part in this many of what it had when the queue was last short has given up enough for a
/// queue of its own to be gone.
const GAVE_UP: f64 = 1.5;
/// But not where a way is shorter than one part in this many of the target: drains come often there, and others of our
/// kind that aim at a longer queue, many senders to one receiver, look the same in between.
const NEAR: f64 = 2.0;
/// What a drain leaves behind, a short queue and all windows in full, lasts for this many round trips at most.
const SETTLES: f64 = 8.0;
/// An epoch lasts for this time at least, and for this many round trips.
const LOOK: Duration = Duration::from_millis(10);
const LOOKS: f64 = 4.0;
/// A path of which fewer packets were heard of in an epoch waits for as long as the quickest packet of all paths.
const SAYS: u32 = 2;

/// What a loss leaves.
pub(super) const KEEPS: f64 = 0.7;
/// How steep the curve is, in packets per cubic second.
const STEEP: f64 = 0.4;
/// What Reno would gain per round trip if it kept as much: so that its mean is that of one that halves.
const GAINS: f64 = 3.0 * (1.0 - KEEPS) / (1.0 + KEEPS);
/// Growth in a round trip, at most.
const QUICKEST: f64 = 1.5;

/// The curve since the last loss. Sizes are packets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Curve {
    /// When it begins; none before the first loss or contest.
    began: Option<Duration>,
    /// Where its flat part is.
    most: f64,
    /// Seconds until it is there.
    until: f64,
    /// What Reno would have.
    reno: f64,
}

impl Curve {
    /// From `window` on, which is flat there: nothing was lost.
    pub fn start(&mut self, window: f64, now: Duration) {
        *self = Curve {
            began: Some(now),
            most: window,
            until: 0.0,
            reno: window,
        };
    }

    /// A loss, with this window, which is `left` from here on.
    pub fn lost(&mut self, window: f64, left: f64, now: Duration) {
        *self = Curve {
            began: Some(now),
            most: window,
            until: ((window - left) / STEEP).cbrt(),
            reno: left,
        };
    }

    /// What a window of these packets gains for each that arrives; a round trip takes `trip` seconds.
    pub fn gains(&mut self, window: f64, trip: f64, now: Duration) -> f64 {
        let Some(began) = self.began else {
            self.start(window, now);
            return 0.0;
        };
        let window = window.max(1.0);
        // As Reno does, once it is where it was.
        let gains = if self.reno < self.most { GAINS } else { 1.0 };
        self.reno += gains / window;
        let ahead = now.saturating_sub(began).as_secs_f64() + trip - self.until;
        let aim = (STEEP * ahead.powi(3) + self.most).max(self.reno);
        (aim.min(window * QUICKEST) - window).max(0.01) / window
    }
}

impl Congestion {
    /// Whether a path's queue is another connection's.
    pub(super) fn look(&mut self, path: u8, now: Duration) {
        let Some(window) = self.windows.get(usize::from(path)) else {
            return;
        };
        let span = Duration::from_secs_f64(window.trip * LOOKS).max(LOOK);
        let epoch = window.epoch;
        if now.saturating_sub(self.epoch) >= span {
            (self.least, self.epoch) = ([f64::MAX, self.least[0]], now);
        }
        if now.saturating_sub(epoch) < span {
            return;
        }
        let target = self.target();
        let mut long = (2.0 * target).min(ALIEN.max(1.2 * target));
        let rare = self.longest * NEAR > self.alone();
        let drained = now.saturating_sub(self.drains.last()).as_secs_f64();
        let Some(window) = self.windows.get_mut(usize::from(path)) else {
            return;
        };
        let short = LEAVE * target;
        if !window.competes && window.least < short && drained > SETTLES * window.trip {
            self.once = self.sums.bytes;
        }
        if rare && self.sums.bytes * GAVE_UP < self.once {
            long = long.min(short);
        }
        let mut least = window.least;
        if least >= long && window.said < SAYS {
            least = least.min(self.least[0]).min(self.least[1]);
            if least < long {
                return;
            }
        }
        if window.competes || least < long || least == f64::MAX {
            window.long = 0;
            window.saved = window.bytes;
        } else {
            window.long += 1;
        }
        window.begin_epoch(now);
        if window.long >= 2 {
            window.competes = true;
            window.starting = false;
            // From most of what it had when the queue became long.
            let before = window.sums();
            window.bytes = window.bytes.max(window.saved * 0.7);
            self.sums.replace(before, window.sums());
            self.competes = true;
            self.curve.start(self.sums.bytes / self.packet, now);
            self.decided(Decision::Compete, Some(path), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ack, took, trip};
    use super::*;
    use crate::packet::drain::EVERY;
    use crate::packet::rtt::RoundTrip;

    /// Goes on for so long, a window per round trip; the window then.
    fn run(curve: &mut Curve, mut window: f64, trip: f64, from: f64, to: f64) -> f64 {
        let mut now = from;
        while now < to {
            now += trip;
            let count = window as u32;
            for _ in 0..count {
                window += curve.gains(window, trip, Duration::from_secs_f64(now));
            }
        }
        window
    }

    /// RFC 9438, section 5.1: the curve is back where it was lost after the cube root of what it gave up by 0.4, slow
    /// around that, and quick before and after.
    #[test]
    fn it_is_back_where_it_lost_after_its_time() {
        let mut curve = Curve::default();
        curve.lost(1000.0, 700.0, Duration::ZERO);
        let back = (300.0f64 / 0.4).cbrt();
        let early = run(&mut curve, 700.0, 0.1, 0.0, back * 0.5);
        assert!((955.0..970.0).contains(&early), "{early}");
        let late = run(&mut curve, early, 0.1, back * 0.5, back);
        assert!((995.0..1005.0).contains(&late), "{late}");
        let beyond = run(&mut curve, late, 0.1, back, back * 2.0);
        assert!((1270.0..1340.0).contains(&beyond), "{beyond}");
    }

    /// Where round trips are short it is Reno's line: about half a packet each.
    #[test]
    fn on_a_short_way_it_goes_up_as_reno_does() {
        let mut curve = Curve::default();
        curve.lost(40.0, 28.0, Duration::ZERO);
        let window = run(&mut curve, 28.0, 1e-3, 0.0, 0.02);
        assert!(
            (28.0 + 18.0 * GAINS..28.0 + 21.0 * GAINS).contains(&window),
            "{window}"
        );
    }

    #[test]
    fn a_queue_that_stays_whatever_is_given_up_is_another_s() {
        let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
        let (used, trip) = ([0], trip(1900));
        let mut now = Duration::from_millis(1);
        cc.delay(0, took(5000), (&trip, &trip), now);
        for _ in 0..200 {
            now += Duration::from_micros(500);
            ack(&mut cc, 0, 1800, &trip, now);
        }
        assert_eq!(cc.competing(&used), 1);
        let before = cc.total();
        for _ in 0..100 {
            ack(&mut cc, 0, 1800, &trip, now);
        }
        assert!(cc.total() > before);
        // The queue goes while it drains: it was ours.
        now += EVERY * 2;
        cc.on_time(&used, &trip, now);
        assert!(cc.total() <= before);
        ack(&mut cc, 0, 50, &trip, now);
        cc.on_time(&used, &trip, now + Duration::from_millis(20));
        assert_eq!(cc.competing(&used), 0);
    }

    /// A queue around the target, from which the connection only gives up: it is another's once a third is gone. One
    /// that becomes short in between is its own.
    #[test]
    fn a_queue_that_stays_at_the_target_is_another_s_once_enough_is_given_up() {
        for (shortest, competing) in [(0, 0), (450, 1)] {
            let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
            let used = [0];
            let mut trip = RoundTrip::default();
            trip.sample(Duration::from_millis(1), Duration::ZERO);
            trip.sample(Duration::from_millis(2), Duration::ZERO);
            let mut now = Duration::from_millis(50);
            // It is short at first, with a window of 32.
            for _ in 0..60 {
                now += Duration::from_millis(1);
                cc.delay(0, took(5000), (&trip, &trip), now);
                cc.arrived(0, 100_000, (now, false), &trip, now);
            }
            let first = cc.sums.bytes;
            for turn in 0..600 {
                now += Duration::from_micros(200);
                let waits = if turn % 8 == 0 { shortest } else { 700 };
                cc.delay(0, took(5000 + waits), (&trip, &trip), now);
                cc.arrived(0, 100_000, (now, false), &trip, now);
            }
            assert!(cc.sums.bytes < first / GAVE_UP, "{}", cc.sums.bytes);
            assert_eq!(cc.competing(&used), competing, "{shortest}");
        }
    }

    /// Sixteen paths that compete give up and grow as one stream.
    #[test]
    fn all_paths_are_one_stream_beside_tcp() {
        let mut cc = Congestion::new(16, 16, 1400, 1 << 30, Duration::ZERO);
        let used: Vec<u8> = (0..16).collect();
        let (trip, mut now) = (trip(1900), Duration::from_secs(1));
        for window in &mut cc.windows {
            (window.competes, window.bytes, window.waited) = (true, 14_000.0, 1e-3);
        }
        cc.sum(&used);
        cc.lost(3, 2, &used, &trip, now);
        cc.lost(4, 1, &used, &trip, now);
        let left = 160.0 * KEEPS;
        assert!((cc.total() / 1400.0 - left).abs() < 0.01);
        let mut gains = |cc: &mut Congestion, trips: usize| {
            let before = cc.total();
            for _ in 0..trips {
                now += trip.smoothed();
                let count = (cc.total() / 1400.0) as u64;
                (0..count).for_each(|at| {
                    cc.arrived((at % 16) as u8, 1400, (now, true), &trip, now);
                });
            }
            (cc.total() - before) / 1400.0
        };
        // Reno's line is higher than the cube so soon: half a packet per round trip.
        let gained = gains(&mut cc, 20);
        assert!((9.0..12.5).contains(&gained), "{gained}");
        // Who finds the queue empty takes what nobody has: an eighth per round trip.
        cc.windows.iter_mut().for_each(|window| window.waited = 0.0);
        let (before, gained) = (cc.total() / 1400.0, gains(&mut cc, 1));
        assert!((0.1..0.15).contains(&(gained / before)), "{gained}");
    }

    /// Beside TCP no queue is empty: the shortest way is the one from before.
    #[test]
    fn the_shortest_way_is_not_forgotten_beside_tcp() {
        let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
        let trip = trip(1900);
        cc.delay(0, took(5000), (&trip, &trip), Duration::ZERO);
        cc.windows[0].competes = true;
        cc.sum(&[0]);
        for second in 1..60 {
            cc.delay(0, took(6500), (&trip, &trip), Duration::from_secs(second));
        }
        assert!((cc.windows[0].waited - 1.5e-3).abs() < 1e-6);
    }

    /// One of many senders has seen a link to itself, so it aims at a shorter queue than the others.
    #[test]
    fn a_queue_that_others_of_our_kind_aim_at_is_not_taken_for_tcp_s() {
        for (waits, competing) in [(1_050, 0), (1_200, 1)] {
            let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
            let (used, trip) = ([0], trip(1900));
            let mut now = Duration::ZERO;
            for _ in 0..50 {
                now += Duration::from_millis(1);
                cc.delay(0, took(5000), (&trip, &trip), now);
                cc.arrived(0, 20_000, (now, false), &trip, now);
            }
            for _ in 0..60 {
                now += Duration::from_micros(500);
                ack(&mut cc, 0, waits, &trip, now);
            }
            let target = cc.target() * 1e6;
            assert!((550.0..900.0).contains(&target), "{target}");
            assert_eq!(cc.competing(&used), competing, "{waits}");
        }
    }

    /// One packet of a small window in an epoch has waited for long: that is a run of another path's, where the others'
    /// packets do not wait, and another's queue where all do.
    #[test]
    fn one_packet_of_a_path_says_little_of_its_queue() {
        for (others, competing) in [(50, 0), (2_500, 1)] {
            let mut cc = Congestion::new(2, 2, 1400, 1 << 30, Duration::ZERO);
            let (trip, mut now) = (trip(1900), Duration::from_millis(1));
            cc.delay(0, took(5000), (&trip, &trip), now);
            for _ in 0..3 {
                now += Duration::from_millis(11);
                (0..20).for_each(|_| ack(&mut cc, 0, others, &trip, now));
                ack(&mut cc, 1, 2_500, &trip, now);
            }
            assert_eq!(cc.competing(&[1]), competing, "{others}");
        }
    }

    /// Who comes second has never seen the queue short.
    #[test]
    fn a_queue_that_was_never_short_is_another_s_once_enough_is_given_up() {
        for (bytes, competing) in [(32.0, 0), (16.0, 1)] {
            let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
            let mut trip = RoundTrip::default();
            trip.sample(Duration::from_millis(1), Duration::ZERO);
            trip.sample(Duration::from_millis(2), Duration::ZERO);
            let mut now = Duration::from_millis(1);
            cc.delay(0, took(5000), (&trip, &trip), now);
            cc.windows[0].bytes = bytes * 1400.0;
            cc.windows[0].begin_epoch(now);
            cc.sum(&[0]);
            for _ in 0..40 {
                now += Duration::from_millis(1);
                cc.delay(0, took(5400), (&trip, &trip), now);
                cc.arrived(0, 0, (now, false), &trip, now);
            }
            assert_eq!(cc.competing(&[0]), competing, "{bytes}");
        }
    }
}
