//! How much may be in flight: one decision a connection, a window a path.
//!
//! # By delay
//! What says that there is too much is how much longer packets take than they once did, in the
//! sender's own direction. As in Swift (SIGCOMM 2020) there is a [`target`] for that. Below it the windows
//! of all paths together grow by about one packet per round trip, whatever their number; a path whose
//! delay is above it shrinks, once per round trip, to what would leave its queue empty. So the queue
//! is a saw-tooth between nothing and the target: those who share it see it empty together, and agree
//! on what "once" was (Copa, NSDI 2018, drains for the same reason). Where packets almost never wait
//! (a quarter of the target) nobody is disturbed, and a window grows by a share of itself.
//!
//! A path that a hash put on a busy or slow route has a small window, and the others carry: that is
//! the cap per path. The windows' sum bounds the connection; a path's window may be less than a packet,
//! so that sixteen paths of sixteen senders fit into one queue (incast).
//!
//! Windows bound what is on its way *there*. What is unconfirmed has in part arrived, and its
//! acknowledgement stands in the queue of the way back. If a window bounded both, the two queues of a
//! pair that sends both ways would share it, now one would run dry and now the other, and a tenth of
//! the network would be lost (Zhang, Shenker and Clark saw it in 1991). So the bound on what is
//! unconfirmed is the window times the round trip in parts of the way there. And bytes go at a pace there
//! ([`pace`](super::pace)), for the acknowledgements come in bunches.
//!
//! # Long ways, and ways of unequal delay
//! Windows go spread over a way that is long beside the target ([`target`]).
//!
//! A way that is longer than others looks like a full queue. So a path is judged by the shortest way of all until a
//! packet that was sent at the end of a drain, with an empty queue, has said that it is longer; those that seem so
//! are asked then. From there on its own delays and round trips count. It has to be longer by more than the target of
//! short ways, and by twice [`SEVERAL`] packets: less is no matter on a slow network, and a queue looks so too.
//!
//! # By loss
//! A loss alone changes nothing: networks lose packets for other reasons too. Where more than
//! [`HEAVY`] of a round trip's packets are lost the queue is shorter than the target, and the windows of
//! paths that lost as many shrink by half of what they lost and a tenth. Others may have longer queues. A mark by a
//! switch (ECN) counts as the target reached.
//!
//! # Drains
//! Who starts in a full queue takes its wait for the shortest, and would then push the others aside.
//! So a connection drains now and then, together with others if it can ([`drain`](super::drain)).
//! Whoever has more than its part has most of the queue, and sees how short the way is without it.
//!
//! # Beside TCP
//! TCP fills queues, so its delay never falls, whatever a delay-based sender gives up. Paths whose queue seems to be
//! another's compete with it ([`contest`]). If the delay goes during a drain, the queue was ours, and the contest is
//! over: Copa switches in this way, and asks whether the queue is ever empty.

mod contest;
mod target;

use std::time::Duration;

use smallvec::SmallVec;

use super::delivery::Delivery;
use super::drain::Drains;
use super::pace::Pace;
use super::rtt::RoundTrip;
use super::shortest::Shortest;
use super::trace::{Decision, Notes, What};
pub use super::window::Took;
use super::window::{LEAST, MOST_BACK, Sums, Window};
use contest::{Curve, KEEPS};
use target::SEVERAL;

/// Windows at the start hold this many packets together.
const FIRST: f64 = 32.0;
/// Share of packets whose loss means that queues are shorter than the target.
pub const HEAVY: f64 = 0.05;
/// A path with fewer packets in a round trip is judged by what all paths lose.
const SPEAKS: f64 = 16.0;
/// What a path keeps of the target when it shrinks: acknowledgements wait on their way too, now more
/// and now less, and an empty queue is a link that stands still.
const LEAVE: f64 = 0.6;
/// Where packets wait for less than this part of the target nobody is disturbed ...
const FREE: f64 = 0.25;
/// ... and a window grows by this part of itself in a round trip, also beside TCP: what TCP has left nobody has.
const QUICK: f64 = 0.125;
/// Who sees the wait fall to this part of what is usual, and gave up nothing, sees another's drain.
const FELL: f64 = 0.55;
/// How fast the last waits count where acknowledgements wait: as fast as round trips do.
const LATELY: f64 = 4.0;

/// See the module.
#[derive(Debug)]
pub struct Congestion {
    windows: Vec<Window>,
    /// Those in use together.
    sums: Sums,
    /// Seconds of the longest way there and back, of those in use, with nothing in its queue.
    longest: f64,
    /// A round trip is known.
    heard: bool,
    /// Some of those in use double.
    starting: bool,
    packet: f64,
    /// All paths: what a new one is compared with.
    shortest: Shortest,
    /// Packets of the present round trip that arrived and that were lost.
    arrived: u32,
    lost: u32,
    round: Duration,
    drains: Drains,
    yielded: Duration,
    most: f64,
    /// Seconds that packets wait, on the average, and when a window was last made smaller.
    usual: f64,
    /// The same over few packets.
    lately: f64,
    /// How far waits are from what is usual, on the average.
    apart: f64,
    shrunk: Duration,
    delivery: Delivery,
    pace: Pace,
    /// Some of those in use compete, and how they grow together.
    competes: bool,
    curve: Curve,
    /// All windows when a path's queue was last short; those of the start until one was.
    once: f64,
    /// The least that a packet of any path waited in the present epoch and in the one before, and when that began.
    least: [f64; 2],
    epoch: Duration,
    /// What it decided, for those who look.
    pub(super) notes: Notes,
}

impl Congestion {
    /// For `count` paths of which `used` are in use; never more than `most` bytes in flight.
    pub fn new(count: usize, used: usize, packet: usize, most: u64, now: Duration) -> Self {
        let packet = packet as f64;
        let window = Window::new(FIRST * packet / used.max(1) as f64);
        Congestion {
            windows: vec![window; count],
            sums: std::iter::repeat_n(window.sums(), used.max(1)).sum(),
            longest: 0.0,
            heard: false,
            starting: true,
            packet,
            shortest: Shortest::default(),
            arrived: 0,
            lost: 0,
            round: Duration::ZERO,
            drains: Drains::new(now),
            yielded: Duration::ZERO,
            most: most as f64,
            usual: 0.0,
            lately: 0.0,
            apart: 0.0,
            shrunk: now,
            delivery: Delivery::new(now),
            pace: Pace::new(now),
            competes: false,
            curve: Curve::default(),
            once: FIRST * packet,
            least: [f64::MAX; 2],
            epoch: now,
            notes: Notes::default(),
        }
    }

    /// Packets have another size.
    pub fn set_packet(&mut self, bytes: usize) {
        self.packet = bytes as f64;
    }

    /// Bytes that a path may have in flight.
    pub fn window(&self, path: u8) -> f64 {
        self.windows
            .get(usize::from(path))
            .map_or(0.0, |window| window.sums().open)
    }

    /// Bytes that all may have in flight together.
    pub fn total(&self) -> f64 {
        self.sums
            .open
            .clamp(self.packet, self.most.max(self.packet))
    }

    /// Whether bytes may go by the pace, if there is one.
    pub fn ready(&mut self, trip: &RoundTrip, now: Duration) -> bool {
        let target = self.target();
        let rate = self.is_long().then(|| {
            let gain = if self.starting { 2.0 } else { 1.25 };
            gain * self.sums.rate
        });
        self.pace.spread(rate, target);
        self.pace.ready(self.packet, trip, now)
    }

    /// A packet with bytes goes.
    pub fn sent(&mut self, trip: &RoundTrip, now: Duration) {
        self.pace.sent(self.packet, trip, now);
    }

    /// Everything has arrived, and nothing is there to be sent.
    pub fn rest(&mut self) {
        self.pace.rest();
    }

    /// When bytes go that the pace held back.
    pub fn paced(&self) -> Option<Duration> {
        self.pace.due()
    }

    /// How many of these paths compete with TCP.
    pub fn competing(&self, used: &[u8]) -> usize {
        used.iter()
            .filter(|at| {
                self.windows
                    .get(usize::from(**at))
                    .is_some_and(|w| w.competes)
            })
            .count()
    }

    /// The sum, after the paths in use or their windows changed.
    pub fn sum(&mut self, used: &[u8]) {
        let windows = || {
            used.iter()
                .filter_map(|at| self.windows.get(usize::from(*at)))
        };
        self.sums = windows().map(Window::sums).sum();
        self.longest = windows().map(|window| window.base).fold(0.0, f64::max);
        self.starting = windows().any(|window| window.starting);
        self.competes = windows().any(|window| window.competes);
    }

    fn decided(&mut self, decision: Decision, path: Option<u8>, now: Duration) {
        if !self.notes.on() {
            return;
        }
        let window = path.and_then(|path| self.windows.get(usize::from(path)));
        let what = What::Decided {
            decision,
            waited: Duration::from_secs_f64(window.map_or(self.usual, |window| window.waited)),
            window: window.map_or(self.sums.bytes, |window| window.bytes) as u64,
        };
        self.notes.add(now, path.unwrap_or(u8::MAX), what);
    }

    /// A packet of this path took so long, by both clocks (their difference is not known).
    pub fn delay(
        &mut self,
        path: u8,
        took: Took,
        (trip, own): (&RoundTrip, &RoundTrip),
        now: Duration,
    ) {
        let Took { delay, marked, .. } = took;
        if self.competes {
            self.shortest.hold(now);
        }
        self.shortest.add(delay, now);
        let all = self.shortest.get().unwrap_or(delay);
        let target = self.target();
        let rate = self.delivery.rate();
        let alike = self
            .alone()
            .max(self.delivery.takes(2.0 * SEVERAL * self.packet));
        let Some(window) = self.windows.get_mut(usize::from(path)) else {
            return;
        };
        let own = window.heard((took, all), (alike, rate), (trip, own), now);
        self.longest = self.longest.max(window.base);
        if marked {
            window.waited = window.waited.max(target);
        }
        if window.starting && window.waited > target / 2.0 {
            window.starting = false;
            self.starting = false;
        }
        let waited = window.waited;
        let competes = window.competes;
        self.least[0] = self.least[0].min(waited);
        self.apart += ((waited - self.usual).abs() - self.apart) / 64.0;
        self.usual += (waited - self.usual) / 32.0;
        self.lately += (waited - self.lately) / LATELY;
        let around = |wait: f64| {
            let there = own.shortest().unwrap_or_default().as_secs_f64() + wait;
            own.smoothed().as_secs_f64() / there.max(1e-6)
        };
        self.pace.heard(around(self.usual));
        // Where both queues change at once, what was usual a moment ago says little.
        let wait = if self.pace.both() {
            self.lately
        } else {
            self.usual
        };
        let back = around(wait).clamp(1.0, MOST_BACK);
        let before = window.sums();
        (window.back, window.trip) = (back, own.smoothed().as_secs_f64());
        self.sums.replace(before, window.sums());
        if !self.heard {
            // The first that is heard speaks for all: else the pace would be that of one path.
            self.heard = true;
            let trip = window.trip;
            self.windows
                .iter_mut()
                .for_each(|window| window.trip = trip);
            self.sums.rate = self.sums.open / trip.max(1e-6);
        }
        // Another drains: if all do, all see how short the way is.
        let quiet = now.saturating_sub(self.shrunk) > trip.smoothed() * 2;
        if quiet && self.usual > target / 3.0 && waited < self.usual * FELL {
            self.drains.noticed(competes, trip.smoothed(), now);
        }
    }

    /// Bytes of this path have arrived: when they were sent, and whether there was more to send then.
    pub fn arrived(
        &mut self,
        path: u8,
        bytes: u64,
        (sent, limited): (Duration, bool),
        trip: &RoundTrip,
        now: Duration,
    ) {
        self.arrived += 1;
        self.delivery.add(bytes, trip.smoothed(), now);
        self.pace.arrived(bytes, trip, now);
        let (target, packet) = (self.target(), self.packet);
        let total = self.sums.bytes.max(packet);
        let draining = self.drains.on();
        let Some(window) = self.windows.get_mut(usize::from(path)) else {
            return;
        };
        window.arrived += 1;
        window.judged &= !self.drains.ended(sent);
        let before = window.sums();
        let mut shrank = false;
        let share = bytes as f64 / total;
        let pace = ((total / packet).sqrt() * 0.25).max(1.0) * packet;
        if draining {
            return;
        }
        if window.competes {
            if limited {
                let around = trip.smoothed().as_secs_f64();
                let mut gains = self.curve.gains(total / packet, around, now);
                if window.waited < target * FREE {
                    gains = gains.max(QUICK);
                }
                window.bytes += gains * bytes as f64;
            }
        } else if window.waited >= target {
            // What was sent before the last time says nothing about it.
            if sent >= window.shrunk {
                let part = 1.0 - (window.waited - target * LEAVE) / (window.base + window.waited);
                window.bytes *= part.clamp(0.5, 0.95);
                window.shrunk = now;
                self.shrunk = now;
                shrank = true;
            }
        } else if limited {
            window.bytes += if window.starting {
                bytes as f64
            } else if window.waited < target * FREE {
                (bytes as f64 * QUICK).max(pace * share)
            } else {
                pace * share
            };
        }
        window.bytes = window.bytes.clamp(LEAST * packet, self.most);
        self.sums.replace(before, window.sums());
        if shrank {
            self.decided(Decision::Shrink, Some(path), now);
        }
        self.look(path, now);
    }

    /// Packets of this path were lost, by order or age.
    pub fn lost(&mut self, path: u8, packets: u32, used: &[u8], trip: &RoundTrip, now: Duration) {
        self.lost += packets;
        if let Some(window) = self.windows.get_mut(usize::from(path)) {
            window.lost += packets;
        }
        let seen = self.arrived + self.lost;
        let heavy = seen >= 64 && f64::from(self.lost) > HEAVY * f64::from(seen);
        if now.saturating_sub(self.round) > trip.smoothed() && seen >= 64 {
            let all = f64::from(self.lost) / f64::from(seen);
            (self.arrived, self.lost, self.round) = (0, 0, now);
            for at in used {
                if let Some(window) = self.windows.get_mut(usize::from(*at)) {
                    let (arrived, lost) = (f64::from(window.arrived), f64::from(window.lost));
                    (window.arrived, window.lost) = (0, 0);
                    let own = arrived + lost;
                    let share = if own < SPEAKS { all } else { lost / own };
                    if heavy && share > HEAVY {
                        window.bytes *= (0.9 - share / 2.0).max(0.5);
                        window.starting = false;
                    }
                }
            }
            if heavy {
                self.sum(used);
                self.decided(Decision::Heavy, None, now);
            }
        }
        let contest = self
            .windows
            .get(usize::from(path))
            .is_some_and(|window| window.competes);
        // One loss event is one for the connection: it gives up as one flow does.
        if contest && !self.drains.on() && now.saturating_sub(self.yielded) > trip.smoothed() {
            // A queue that is shorter now is no drain of others.
            (self.yielded, self.shrunk) = (now, now);
            let before = self.sums.bytes / self.packet;
            for at in used {
                if let Some(window) = self.windows.get_mut(usize::from(*at))
                    && window.competes
                {
                    window.bytes *= KEEPS;
                }
            }
            self.sum(used);
            self.curve.lost(before, self.sums.bytes / self.packet, now);
            self.decided(Decision::Yield, Some(path), now);
        }
        self.sum(used);
    }

    /// A path was silent for too long: what it has is little, until it answers.
    pub fn silent(&mut self, path: u8, used: &[u8]) {
        if let Some(window) = self.windows.get_mut(usize::from(path)) {
            window.bytes = (window.bytes / 2.0).max(LEAST * self.packet);
            window.starting = false;
        }
        self.sum(used);
    }

    /// A path comes into use instead of another, whose window it takes, if that is not much.
    pub fn replaced(&mut self, old: u8, new: u8, used: &[u8]) {
        let fair = self.sums.bytes / used.len().max(1) as f64;
        let old = self.windows.get(usize::from(old));
        let bytes = old.map_or(0.0, |old| old.bytes).max(fair / 2.0);
        if let Some(window) = self.windows.get_mut(usize::from(new)) {
            *window = window.replaced(bytes.max(LEAST * self.packet));
        }
        self.sum(used);
    }

    /// Paths of which it has to be asked how long they are, if now is the time: the queue is empty.
    pub fn asks(&mut self, used: &[u8], now: Duration) -> SmallVec<[u8; 16]> {
        let looks = self.drains.looks(now);
        let open = |at: &&u8| {
            let window = self.windows.get(usize::from(**at));
            window.is_some_and(|window| window.judged && window.far)
        };
        used.iter()
            .filter(open)
            .filter(|_| looks)
            .copied()
            .collect()
    }

    /// Drains, on a clock.
    pub fn on_time(&mut self, used: &[u8], trip: &RoundTrip, now: Duration) {
        if now < self.drains.due() {
            return;
        }
        if self.drains.on() {
            let target = self.target();
            for at in used {
                if let Some(window) = self.windows.get_mut(usize::from(*at))
                    && window.drained
                {
                    window.drained = false;
                    if window.competes && window.least < 1.5 * target {
                        (window.competes, window.long) = (false, 0);
                    } else {
                        window.bytes = window.saved;
                    }
                    window.begin_epoch(now);
                }
            }
            self.sum(used);
            let competes = self.competing(used) > 0;
            self.drains.end(competes, self.around(used, trip), now);
            self.decided(Decision::Refill, None, now);
        } else {
            self.drains.begin(self.around(used, trip), now);
            for at in used {
                if let Some(window) = self.windows.get_mut(usize::from(*at)) {
                    (window.saved, window.drained) = (window.bytes, true);
                    window.bytes *= self.drains.leaves(window.base, window.waited);
                    window.begin_epoch(now);
                }
            }
            self.sum(used);
            self.decided(Decision::Drain, None, now);
        }
    }

    /// A round trip of the longest path.
    fn around(&self, used: &[u8], trip: &RoundTrip) -> Duration {
        used.iter()
            .filter_map(|at| self.windows.get(usize::from(*at)))
            .filter(|window| window.far && !window.judged)
            .map(|window| Duration::from_secs_f64(window.trip))
            .fold(trip.smoothed(), Duration::max)
    }

    /// When a drain begins or ends.
    pub fn deadline(&self) -> Duration {
        self.drains.due()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn took(delay: u32) -> Took {
        Took {
            delay,
            marked: false,
            of: None,
        }
    }

    pub(super) fn trip(micros: u64) -> RoundTrip {
        let mut trip = RoundTrip::default();
        trip.sample(Duration::from_micros(100), Duration::ZERO);
        for _ in 0..60 {
            trip.sample(Duration::from_micros(micros), Duration::ZERO);
        }
        trip
    }

    pub(super) fn ack(cc: &mut Congestion, path: u8, waited: u32, trip: &RoundTrip, now: Duration) {
        cc.delay(path, took(5000 + waited), (trip, trip), now);
        cc.arrived(
            path,
            1400,
            (now - Duration::from_millis(1), true),
            trip,
            now,
        );
    }

    #[test]
    fn it_grows_while_nothing_waits_and_shrinks_once_a_round_trip() {
        let mut cc = Congestion::new(4, 4, 1400, 1 << 30, Duration::ZERO);
        let first = cc.total();
        let now = Duration::from_millis(1);
        for _ in 0..32 {
            ack(&mut cc, 0, 0, &trip(100), now);
        }
        assert!(cc.total() > 1.9 * first);
        let full = cc.windows[0].bytes;
        for _ in 0..32 {
            ack(
                &mut cc,
                0,
                1200,
                &trip(1300),
                now + Duration::from_millis(2),
            );
        }
        assert!((0.49..0.51).contains(&(cc.windows[0].bytes / full)));
        let sum: f64 = cc.windows.iter().map(|window| window.bytes).sum();
        assert!((sum - cc.sums.bytes).abs() < 1.0);
    }

    /// Path 1 takes 5 ms more than path 0. That looks like a queue until a packet from the end of a drain says that
    /// it is none; a queue of another's is one still.
    #[test]
    fn a_longer_path_is_known_after_a_drain() {
        let mut cc = Congestion::new(2, 2, 1400, 1 << 30, Duration::ZERO);
        let (short, used) = (trip(500), [0, 1]);
        let mut long = RoundTrip::default();
        long.sample(Duration::from_micros(10_500), Duration::ZERO);
        let hear = |cc: &mut Congestion, longer: u32, sent: Duration, now: Duration| {
            cc.delay(0, took(5000), (&short, &short), now);
            cc.delay(1, took(5000 + longer), (&short, &long), now);
            cc.arrived(1, 10_000_000, (sent, false), &short, now);
            cc.windows[1].waited
        };
        let mut now = Duration::from_millis(1);
        assert!(hear(&mut cc, 5000, now, now) > 0.0 && !cc.is_long());
        now = cc.deadline();
        assert_eq!(cc.asks(&used, now).len(), 0);
        cc.on_time(&used, &short, now);
        let late = cc.deadline();
        // Sent before the queue was empty.
        assert!(hear(&mut cc, 5000, now, late) > 0.0);
        // It is asked, and once.
        assert_eq!(cc.asks(&used, late)[..], [1]);
        assert_eq!(cc.asks(&used, late).len(), 0);
        let end = cc.deadline();
        cc.on_time(&used, &short, end);
        hear(&mut cc, 5000, late, end);
        assert_eq!(hear(&mut cc, 5000, end, end), 0.0);
        assert!(cc.is_long() && cc.burst() < 0.5 && cc.windows[1].base > 10e-3);
        assert!((hear(&mut cc, 5300, end, end) - 300e-6).abs() < 1e-9);
    }

    #[test]
    fn a_few_losses_change_nothing_and_many_do() {
        let mut cc = Congestion::new(1, 1, 1400, 1 << 30, Duration::ZERO);
        let used = [0];
        let mut now = Duration::from_millis(1);
        let trip = trip(120);
        for _ in 0..50 {
            for _ in 0..99 {
                cc.arrived(0, 1400, (now, false), &trip, now);
            }
            cc.lost(0, 1, &used, &trip, now);
            now += Duration::from_millis(1);
        }
        let before = cc.total();
        assert!((before - 32.0 * 1400.0).abs() < 1.0);
        for _ in 0..50 {
            for _ in 0..80 {
                cc.arrived(0, 1400, (now, false), &trip, now);
            }
            cc.lost(0, 20, &used, &trip, now);
            now += Duration::from_millis(1);
        }
        assert!(cc.total() < before / 4.0);
    }

    #[test]
    fn losses_of_one_path_leave_the_others() {
        let mut cc = Congestion::new(2, 2, 1400, 1 << 30, Duration::ZERO);
        let (used, trip, now) = ([0, 1], trip(120), Duration::from_millis(9));
        for path in used {
            (0..80).for_each(|_| cc.arrived(path, 1400, (now, false), &trip, now));
        }
        let before = cc.window(0);
        cc.lost(1, 40, &used, &trip, now);
        assert_eq!(cc.window(0), before);
        assert!(cc.window(1) < before * 0.75);
    }
}
