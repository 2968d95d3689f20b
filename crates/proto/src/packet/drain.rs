//! When a connection drains: sends so little that its queue empties, to see how short the way is.
//!
//! Who starts in a full queue takes its wait for the shortest, and would then push the others aside.
//! So every [`EVERY`] a connection sends for two and a half round trips a little less than what needs
//! no queue (BBR's probe of the round trip, but often and shallow: it costs a fifth of that time).
//!
//! Who takes a full queue for the shortest way drains too little: a little less than what it thinks
//! needs no queue is nearly all that it has. So one drain of [`DEEP`] is deep, the first one too, and
//! leaves [`LEAST`] whatever the connection thinks: by arithmetic three thousandths of the time at most.
//!
//! One that drains alone sees the queue of the others. So who notices another's drain joins it, and if
//! all do, all see an empty queue. Who has drained a moment ago does not join: that may be the answer
//! to its own. On a slow link 0.4 s pass between two drains, and only in the last 75 ms is another's
//! joined: more would cost too much. But who competes with TCP may have taken one of our own for it, that
//! has a wrong idea of the way. So it joins all that it notices, but for those right after its own.

use std::time::Duration;

/// From the end of one to the next.
pub const EVERY: Duration = Duration::from_millis(100);
/// A drain is followed by this many round trips without.
const REST: u32 = 200;
/// Beside TCP they are rarer, by this factor: a drain gives away what TCP takes. But fewer round trips are without:
/// there they are as long as the queue, and if that is ours after all only a drain tells.
const RARER: u32 = 2;
const REST_BESIDE: u32 = 100;
/// Nor is another's joined for this many, beside TCP.
const ALONE: u32 = 20;
/// What a drain leaves of what needs no queue ...
const TO: f64 = 0.8;
/// ... and of all, if it is deep: one of this many.
const LEAST: f64 = 0.1;
const DEEP: u32 = 4;

/// See the module.
#[derive(Debug)]
pub struct Drains {
    until: Option<Duration>,
    /// When its last round trip begins.
    late: Duration,
    /// It has begun.
    looked: bool,
    next: Duration,
    /// When the last one ended.
    last: Duration,
    count: u32,
}

impl Drains {
    /// The first one is soon.
    pub fn new(now: Duration) -> Self {
        Drains {
            until: None,
            late: now,
            looked: false,
            next: now + EVERY / 4,
            last: now,
            count: 0,
        }
    }

    /// When the last one ended.
    pub fn last(&self) -> Duration {
        self.last
    }

    /// Whether one goes on.
    pub fn on(&self) -> bool {
        self.until.is_some()
    }

    /// When one begins or ends.
    pub fn due(&self) -> Duration {
        match self.until {
            Some(_) if !self.looked => self.late,
            Some(until) => until,
            None => self.next,
        }
    }

    /// Whether this was the last round trip of the last one: by then the queue is empty, if it is ours.
    pub fn ended(&self, sent: Duration) -> bool {
        self.looked && sent >= self.late && sent <= self.until.unwrap_or(self.last)
    }

    /// Whether that begins, once for each.
    pub fn looks(&mut self, now: Duration) -> bool {
        let looks = self.on() && !self.looked && now >= self.late;
        self.looked |= looks;
        looks
    }

    /// Another connection drains.
    pub fn noticed(&mut self, competes: bool, trip: Duration, now: Duration) {
        let recent = if competes {
            now < self.last + (EVERY / 4).max(trip * ALONE)
        } else {
            now + EVERY / 4 * 3 < self.next
        };
        if !recent {
            self.next = now;
        }
    }

    /// One begins.
    pub fn begin(&mut self, trip: Duration, now: Duration) {
        self.looked = false;
        self.late = now + trip + trip / 2;
        self.until = Some(self.late + trip);
        self.count = self.count.wrapping_add(1);
    }

    /// What the one that goes on leaves of a window whose packets take `base` seconds there and back, and wait for
    /// this many.
    pub fn leaves(&self, base: f64, waited: f64) -> f64 {
        let base = base.max(1e-6);
        let shallow = (base / (base + waited)).max(0.02) * TO;
        if self.count % DEEP == 1 {
            shallow.min(LEAST)
        } else {
            shallow
        }
    }

    /// It has ended.
    pub fn end(&mut self, competes: bool, trip: Duration, now: Duration) {
        let (times, rest) = if competes {
            (RARER, REST_BESIDE)
        } else {
            (1, REST)
        };
        self.until = None;
        self.last = now;
        self.next = now + (EVERY * times).max(trip * rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    const TRIP: Duration = Duration::from_micros(500);

    /// One after the other: what each leaves of a window whose packets do not seem to wait.
    fn one(drains: &mut Drains, competes: bool) -> f64 {
        let now = drains.due();
        drains.begin(TRIP, now);
        let leaves = drains.leaves(5e-4, 0.0);
        // Its last round trip is told once, and then its end.
        let late = drains.due();
        assert!(!drains.looks(now) && drains.looks(late) && !drains.looks(late));
        assert!(drains.on() && drains.due() > now + TRIP * 2);
        assert!(drains.ended(late) && !drains.ended(now));
        drains.end(competes, TRIP, drains.due());
        leaves
    }

    #[test]
    fn the_first_is_deep_and_every_fourth_after_it() {
        let mut drains = Drains::new(MILLI);
        assert!(drains.due() < EVERY / 2);
        let all: Vec<f64> = (0..9).map(|_| one(&mut drains, false)).collect();
        for (at, leaves) in all.into_iter().enumerate() {
            assert_eq!(leaves, if at % 4 == 0 { LEAST } else { TO }, "{at}");
        }
        // Who knows that packets wait leaves less.
        drains.begin(TRIP, MILLI);
        assert!(drains.leaves(5e-4, 2e-3) < 0.2);
    }

    #[test]
    fn another_s_is_joined_but_not_right_after_its_own() {
        let mut drains = Drains::new(MILLI);
        one(&mut drains, false);
        let (ended, next) = (drains.last, drains.due());
        drains.noticed(false, TRIP, ended + MILLI * 10);
        assert_eq!(drains.due(), next);
        drains.noticed(false, TRIP, ended + MILLI * 40);
        assert_eq!(drains.due(), ended + MILLI * 40);
    }

    /// Its own is far away, and it joins all the same: that is how two that took each other for TCP
    /// see the way together.
    #[test]
    fn who_competes_drains_seldom_and_joins_all() {
        let mut drains = Drains::new(MILLI);
        one(&mut drains, true);
        let ended = drains.last;
        assert_eq!(drains.due(), ended + EVERY * 2);
        drains.noticed(true, TRIP, ended + MILLI * 10);
        assert_eq!(drains.due(), ended + EVERY * 2);
        drains.noticed(false, TRIP, ended + MILLI * 40);
        assert_eq!(drains.due(), ended + EVERY * 2);
        drains.noticed(true, TRIP, ended + MILLI * 40);
        assert_eq!(drains.due(), ended + MILLI * 40);
        // The queue of a contest makes round trips long: they are less than without one.
        for (competes, trips) in [(true, 100), (false, 200)] {
            drains.end(competes, MILLI * 20, ended);
            assert_eq!(drains.due(), ended + MILLI * 20 * trips);
        }
    }
}
