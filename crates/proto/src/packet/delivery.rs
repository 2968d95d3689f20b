//! How fast a connection's bytes arrive, lately: what one packet's time on the link is known by.
//!
//! Bytes that were confirmed are counted over two round trips at a time. The fastest of these counts
//! in the last [`LATELY`] to twice that is the rate: a connection that had nothing to send for a
//! moment is not taken for a slow one (BBR filters its bandwidth in the same way).
//!
//! A connection that others push aside is not on a slow link either. So a packet's time is never that
//! of less than a part of the fastest rate in the last [`ONCE`]. Else the target would grow while the
//! rate falls, and the connection would make room for TCP until it has nothing.

use std::time::Duration;

const LATELY: Duration = Duration::from_millis(100);
/// A link that has become slower is believed to be so after twice this time at most.
const ONCE: Duration = Duration::from_secs(10);
/// Four connections that share a link in equal parts still go by what they have.
const PART: f64 = 0.25;
/// The shortest time that is counted over, if nobody says another.
const SPAN: Duration = Duration::from_millis(2);

/// The fastest of the last `memory` to twice that.
#[derive(Debug, Clone, Copy)]
pub struct Fastest {
    memory: Duration,
    present: f64,
    before: f64,
    since: Duration,
}

impl Fastest {
    /// Nothing is known yet.
    pub fn new(memory: Duration, now: Duration) -> Self {
        Fastest {
            memory,
            present: 0.0,
            before: 0.0,
            since: now,
        }
    }

    /// One more, in bytes per second.
    pub fn add(&mut self, rate: f64, now: Duration) {
        if now.saturating_sub(self.since) > self.memory {
            (self.before, self.present, self.since) = (self.present, 0.0, now);
        }
        self.present = self.present.max(rate);
    }

    /// Bytes per second; 0 until something is known.
    pub fn get(&self) -> f64 {
        self.present.max(self.before)
    }
}

/// Whether time counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// It does.
    Over,
    /// Not until bytes arrive again.
    Lasts,
    /// They have, at this time: what arrives with the first ones was sent before.
    Ended(Duration),
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct Delivery {
    bytes: f64,
    begun: Duration,
    /// The last arrival.
    last: Duration,
    rest: Rest,
    /// The shortest time that is counted over.
    span: Duration,
    lately: Fastest,
    once: Fastest,
}

impl Delivery {
    /// Nothing is known yet.
    pub fn new(now: Duration) -> Self {
        Delivery::over(SPAN, now)
    }

    /// Counted over at least this time: longer than what comes in a bunch.
    pub fn over(span: Duration, now: Duration) -> Self {
        Delivery {
            bytes: 0.0,
            begun: now,
            last: now,
            rest: Rest::Over,
            span,
            lately: Fastest::new(LATELY, now),
            once: Fastest::new(ONCE, now),
        }
    }

    /// Everything has arrived, and nothing is there to be sent: until bytes arrive again no time counts. What
    /// arrives first then counts for none.
    pub fn rest(&mut self) {
        self.rest = Rest::Lasts;
    }

    /// These bytes were confirmed; `trip` is a round trip.
    pub fn add(&mut self, bytes: u64, trip: Duration, now: Duration) {
        let gap = now.saturating_sub(self.last);
        self.last = now;
        match self.rest {
            Rest::Over => {}
            Rest::Lasts => {
                self.begun += gap;
                self.rest = Rest::Ended(now);
                return;
            }
            Rest::Ended(first) if first == now => return,
            Rest::Ended(_) => self.rest = Rest::Over,
        }
        self.bytes += bytes as f64;
        let passed = now.saturating_sub(self.begun);
        if passed < (trip * 2).max(self.span) {
            return;
        }
        let rate = self.bytes / passed.as_secs_f64();
        (self.bytes, self.begun) = (0.0, now);
        self.lately.add(rate, now);
        self.once.add(rate, now);
    }

    /// Bytes per second; 0 until something is known.
    pub fn rate(&self) -> f64 {
        self.lately.get()
    }

    /// Seconds that this many bytes take; 0 until something is known.
    pub fn takes(&self, bytes: f64) -> f64 {
        let rate = self.lately.get().max(self.once.get() * PART);
        if rate > 0.0 { bytes / rate } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    /// Goes on for so long at this many bytes per millisecond.
    fn run(delivery: &mut Delivery, now: &mut Duration, time: u32, bytes: u64) {
        for _ in 0..time {
            *now += MILLI;
            delivery.add(bytes, MILLI / 2, *now);
        }
    }

    #[test]
    fn a_pause_changes_nothing_and_a_slower_link_does() {
        let (mut delivery, mut now) = (Delivery::new(Duration::ZERO), Duration::ZERO);
        assert_eq!(delivery.takes(1500.0), 0.0);
        run(&mut delivery, &mut now, 300, 12_500);
        assert!((delivery.takes(1500.0) - 120e-6).abs() < 1e-6);
        run(&mut delivery, &mut now, 80, 100);
        assert!((delivery.takes(1500.0) - 120e-6).abs() < 1e-6);
        run(&mut delivery, &mut now, 300, 6_250);
        assert!((delivery.takes(1500.0) - 240e-6).abs() < 1e-6);
        run(&mut delivery, &mut now, 3, 12_500);
        assert!(delivery.takes(1500.0) < 130e-6);
    }

    #[test]
    fn pauses_with_nothing_to_send_do_not_count() {
        let (mut delivery, mut now) = (Delivery::new(Duration::ZERO), Duration::ZERO);
        // A megabyte in one millisecond, then nine without: by acknowledgements of 50 kB each.
        for _ in 0..50 {
            for _ in 0..20 {
                now += MILLI / 20;
                for _ in 0..10 {
                    delivery.add(5_000, MILLI / 2, now);
                }
            }
            delivery.rest();
            now += MILLI * 9;
        }
        assert!((delivery.rate() - 1e9).abs() < 1e8, "{}", delivery.rate());
        // What one acknowledgement confirms says nothing.
        let (mut delivery, mut now) = (Delivery::new(Duration::ZERO), Duration::ZERO);
        for _ in 0..50 {
            delivery.rest();
            now += MILLI * 9;
            delivery.add(5_000, MILLI / 2, now);
        }
        assert_eq!(delivery.rate(), 0.0);
    }

    #[test]
    fn who_is_pushed_aside_is_not_on_a_slow_link() {
        let (mut delivery, mut now) = (Delivery::new(Duration::ZERO), Duration::ZERO);
        run(&mut delivery, &mut now, 300, 12_500);
        run(&mut delivery, &mut now, 300, 125);
        assert!((delivery.takes(1500.0) - 480e-6).abs() < 1e-6);
        assert!(delivery.rate() < 130e3);
        // What lasts is the link.
        run(&mut delivery, &mut now, 20_000, 125);
        assert!((delivery.takes(1500.0) - 12e-3).abs() < 1e-5);
    }
}
