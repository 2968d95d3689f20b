//! When bytes go: at a pace, where acknowledgements come in bunches.
//!
//! What windows allow goes when acknowledgements come. Where both ends send, these stand behind the
//! packets of the other direction, and come in bunches (Zhang, Shenker and Clark, SIGCOMM 1991, call it
//! compression). Sent on them, packets go in bunches as well: those at the end of one wait longer than
//! the target, so windows shrink, and the link stands still until the next.
//!
//! So there a connection sends at the rate at which its bytes arrive, and a little more ([`GAIN`]), so
//! that it finds what is free; and one packet per round trip besides, as windows grow, or a connection
//! with almost nothing would not grow at all. The rate is counted over [`SPAN`], which is longer than a
//! bunch, and only while there is something to send: who sends a message now and then would be held to
//! the mean of messages and pauses, and take longer for each message than for the one before it. Windows
//! bound what is in flight as before: the pace only says when.
//!
//! What goes in [`SLACK`], or two packets, goes at once. So a call to the kernel has as many packets
//! as a run over one path ([`paths`](super::paths)) has. A thread that wakes late sends what it would
//! have sent by then: else who is away for a tenth of the time would lose that part for good.
//!
//! Where round trips are long beside the queue that is aimed at, windows are spread over them ([`Pace::spread`]), as
//! Linux paces TCP and as Swift does with small windows: what a window sends at once would be a queue of a round trip.
//! How long is long says [`congestion`](super::congestion). Then a part of the target goes at once ([`AT_ONCE`]).
//!
//! Elsewhere acknowledgements come as packets arrived, and are the better clock: nothing has to be
//! measured. Both ways are told by the round trip, which is longer than its way there explains
//! ([`BOTH`]), on the average over some [`MEAN`] packets: a queue that has just gone looks so too.

use std::time::Duration;

use super::delivery::Delivery;
use super::rtt::RoundTrip;

/// More than what arrives.
const GAIN: f64 = 1.15;
/// Bytes that arrive are counted over this time at least.
const SPAN: Duration = Duration::from_millis(10);
/// What goes in this time goes at once ...
const SLACK: f64 = 30e-6;
/// ... and so do this many packets.
const PACKETS: f64 = 2.0;
/// Where round trips are long, what goes at once is this part of the queue that is aimed at.
const AT_ONCE: f64 = 8.0;
/// Round trips of this many ways there and more: acknowledgements wait.
const BOTH: f64 = 1.3;
const MEAN: f64 = 128.0;

/// In whole nanoseconds, and less work than Duration's own: it is done for each packet.
fn seconds(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}

/// See the module.
#[derive(Debug)]
pub struct Pace {
    delivery: Delivery,
    /// A round trip in parts of its way there, on the average.
    around: f64,
    /// When what was sent so far has gone at the pace, and whether that is waited for.
    next: Duration,
    held: bool,
    /// When it was last woken: what was due before goes at once.
    woken: Duration,
    /// Windows go at this many bytes per second, if round trips are long.
    spread: Option<f64>,
    /// What goes in this many seconds goes at once.
    slack: f64,
}

impl Pace {
    /// Nothing is known yet: no pace.
    pub fn new(now: Duration) -> Self {
        Pace {
            delivery: Delivery::over(SPAN, now),
            around: 1.0,
            next: Duration::ZERO,
            held: false,
            woken: Duration::ZERO,
            spread: None,
            slack: SLACK,
        }
    }

    /// Windows go at this many bytes per second, if round trips are long beside a queue of `target` seconds.
    pub fn spread(&mut self, rate: Option<f64>, target: f64) {
        self.spread = rate;
        self.slack = rate.map_or(SLACK, |_| SLACK.max(target / AT_ONCE));
    }

    /// A round trip was this many ways there.
    pub fn heard(&mut self, around: f64) {
        self.around += (around - self.around) / MEAN;
    }

    /// These bytes were confirmed.
    pub fn arrived(&mut self, bytes: u64, trip: &RoundTrip, now: Duration) {
        self.delivery.add(bytes, trip.smoothed(), now);
    }

    /// Everything has arrived, and nothing is there to be sent.
    pub fn rest(&mut self) {
        self.delivery.rest();
    }

    /// Whether acknowledgements wait on their way back.
    pub fn both(&self) -> bool {
        self.around >= BOTH
    }

    /// Bytes per second; `None`: as acknowledgements come.
    fn rate(&self, packet: f64, trip: &RoundTrip) -> Option<f64> {
        if self.spread.is_some() {
            return self.spread;
        }
        if !self.both() {
            return None;
        }
        let rate = self.delivery.rate();
        let more = packet / trip.smoothed().as_secs_f64().max(1e-6);
        (rate > 0.0).then_some(rate * GAIN + more)
    }

    /// Whether bytes may go. If not, they may at [`Pace::due`]; a run goes then.
    pub fn ready(&mut self, packet: f64, trip: &RoundTrip, now: Duration) -> bool {
        let Some(rate) = self.rate(packet, trip) else {
            self.held = false;
            return true;
        };
        let slack = seconds(self.slack.max(PACKETS * packet / rate));
        if self.held {
            self.held = self.next > now;
            self.woken = now;
        } else {
            self.held = self.next > now + slack;
        }
        !self.held
    }

    /// A packet of this many bytes goes.
    pub fn sent(&mut self, packet: f64, trip: &RoundTrip, now: Duration) {
        if let Some(rate) = self.rate(packet, trip) {
            // What could have gone earlier and was not there does not go in a bunch now. What was there
            // and waited for a thread does: else who is away for a tenth of the time loses that part.
            if self.next >= self.woken {
                self.next = self.next.max(now);
            }
            self.next += seconds(packet / rate);
        }
    }

    /// When bytes that are held back may go.
    pub fn due(&self) -> Option<Duration> {
        self.held.then_some(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PACKET: f64 = 1500.0;
    const MICRO: Duration = Duration::from_micros(1);

    fn trip() -> RoundTrip {
        let mut trip = RoundTrip::default();
        trip.sample(MICRO * 500, Duration::ZERO);
        trip
    }

    /// This many bytes per second arrive for half a second, and round trips are this many ways there.
    fn known(rate: f64, around: f64) -> (Pace, Duration) {
        let (mut pace, mut now) = (Pace::new(Duration::ZERO), Duration::ZERO);
        while now < MICRO * 500_000 {
            now += MICRO * 1000;
            pace.arrived((rate / 1e3) as u64, &trip(), now);
            pace.heard(around);
        }
        (pace, now)
    }

    /// What goes at this moment, if there is always more.
    fn all(pace: &mut Pace, now: Duration) -> f64 {
        let mut bytes = 0.0;
        while bytes < 1e7 && pace.ready(PACKET, &trip(), now) {
            pace.sent(PACKET, &trip(), now);
            bytes += PACKET;
        }
        bytes
    }

    #[test]
    fn acknowledgements_that_do_not_wait_are_clock_enough() {
        let (mut pace, now) = known(125e6, 1.1);
        assert!(!pace.both());
        assert_eq!(all(&mut pace, now), 1e7 - 1e7 % PACKET + PACKET);
        assert_eq!(pace.due(), None);
        // One round trip that is long for another reason is not enough.
        pace.heard(4.0);
        assert!(!pace.both());
    }

    /// A message of 250 kB per 10 ms, each confirmed by five acknowledgements at the pace: it is not slowed
    /// down more and more.
    #[test]
    fn pauses_make_no_slower_pace() {
        let (mut pace, mut now) = known(250e6, 2.0);
        for _ in 0..100 {
            let end = now + MICRO * 10_000;
            for _ in 0..5 {
                let begun = now;
                let mut bytes = 0.0;
                while bytes < 50e3 {
                    bytes += all(&mut pace, now).min(50e3);
                    now = pace.due().unwrap_or(now);
                }
                now = now.max(begun + MICRO * 200);
                pace.arrived(50_000, &trip(), now);
            }
            pace.rest();
            now = end;
        }
        let rate = pace.rate(PACKET, &trip()).unwrap_or(f64::MAX);
        assert!(rate > 150e6, "{rate}");
    }

    #[test]
    fn what_is_not_known_has_no_pace() {
        let mut pace = Pace::new(Duration::ZERO);
        (0..1000).for_each(|_| pace.heard(2.0));
        assert!(pace.both() && all(&mut pace, Duration::ZERO) >= 1e7);
    }

    #[test]
    fn who_has_almost_nothing_grows() {
        let (mut pace, mut now) = known(2.0 * PACKET / 10e-3, 2.0);
        let (mut bytes, until) = (0.0, now + MICRO * 100_000);
        while now < until {
            bytes += all(&mut pace, now);
            now = pace.due().unwrap();
        }
        // Twenty packets arrived in this time before.
        assert!(bytes > 100.0 * PACKET, "{bytes}");
    }

    /// A thread that is late sends what it would have sent; who had nothing to send does not.
    #[test]
    fn what_was_held_back_is_made_up_for_and_idle_time_is_not() {
        let (mut pace, now) = known(125e6, 2.0);
        let run = all(&mut pace, now);
        assert!((2.0 * PACKET..8.0 * PACKET).contains(&run), "{run}");
        let late = pace.due().unwrap() + MICRO * 2000;
        let bytes = all(&mut pace, late);
        assert!(bytes > 250e3 && bytes < 350e3, "{bytes}");
        // It ends its turn before the pace does, and comes back later.
        let mut at = pace.due().unwrap();
        assert!(pace.ready(PACKET, &trip(), at));
        pace.sent(PACKET, &trip(), at);
        at += MICRO * 10_000;
        assert!(all(&mut pace, at) <= run + PACKET);
    }

    proptest! {
        /// Windows that are spread over a round trip: no more goes than their rate and a part of the target, whenever
        /// it is woken, and no less if it is woken in time. Acknowledgements that come in bunches change nothing.
        #[test]
        fn what_is_spread_is_kept(rate in 1e5f64..1e10, target in 100e-6f64..4e-3, both in any::<bool>()) {
            let (mut pace, start) = known(125e6, if both { 2.0 } else { 1.0 });
            pace.spread(Some(rate), target);
            let slack = (rate * (target / AT_ONCE).max(SLACK)).max(PACKETS * PACKET) + 2.0 * PACKET;
            let (mut now, mut bytes) = (start, 0.0);
            for _ in 0..200 {
                prop_assert!(bytes <= 1.005 * rate * (now - start).as_secs_f64() + slack);
                bytes += all(&mut pace, now);
                now = pace.due().unwrap_or(now);
            }
            let want = rate * (now - start).as_secs_f64();
            prop_assert!((bytes - want).abs() <= slack + 0.005 * want, "{} of {}", bytes, want);
            // Where ways are short again there is none.
            pace.spread(None, target);
            prop_assert!(both || all(&mut pace, now) >= 1e7);
        }

        /// However it is woken, no more goes than the pace and one run; woken in time, no less.
        #[test]
        fn it_is_kept(rate in 1e6f64..1e9, gaps in prop::collection::vec(1u32..2000, 10..60)) {
            let (mut pace, start) = known(rate, 2.0);
            let most = rate * GAIN + PACKET / trip().smoothed().as_secs_f64();
            let run = (most * SLACK).max(PACKETS * PACKET) + 2.0 * PACKET;
            let (mut now, mut bytes) = (start, 0.0);
            for gap in &gaps {
                bytes += all(&mut pace, now);
                now += MICRO * *gap;
                // Times are whole nanoseconds.
                let bound = 1.005 * most * (now - start).as_secs_f64() + run;
                prop_assert!(bytes <= bound, "{} of {}", bytes, bound);
            }
            let (mut pace, mut now) = known(rate, 2.0);
            let (start, mut bytes) = (now, 0.0);
            for _ in 0..200 {
                bytes += all(&mut pace, now);
                now = pace.due().unwrap();
            }
            let want = most * (now - start).as_secs_f64();
            prop_assert!((bytes - want).abs() <= run + 0.005 * want, "{} of {}", bytes, want);
        }
    }
}
