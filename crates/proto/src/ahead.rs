//! How much a sender has on its way to a peer.
//!
//! What is on its way beyond a round trip waits in the fabric's queues: until they drop something,
//! and with every acknowledgement and credit of the other direction behind it. NCCL keeps a fixed
//! number of bytes in flight, so what they wait is what it loses. What is not sent yet waits at the
//! sender, and the next path with room takes it.
//!
//! This bound is a wide one, for the start and for when nothing is heard. What is not confirmed may
//! have arrived: both directions are full, and its confirmation stands in the queue of the way back.
//! Who bounds by it bounds the sum of the two queues, and any split of that is as good as another:
//! now one runs dry, now the other, and a network loses 5 to 15 parts in a hundred. What keeps the
//! queues short is how long chunks wait on their own way ([`window`](crate::window)).

use std::time::Duration;

/// At most this much is on its way, in time of what is delivered, and two round trips more ...
const AHEAD: Duration = Duration::from_micros(1500);
/// ... or this many bytes, shared by all who send to the peer: a few chunks for each of a few paths ...
const LEAST: u64 = 512 << 10;
/// ... and for each of them at least two chunks.
const LEAST_EACH: u64 = 128 << 10;
/// Until a round trip is known.
const UNKNOWN_TRIP: Duration = Duration::from_millis(1);
/// What is delivered is counted over this time.
const WINDOW: Duration = Duration::from_millis(2);

/// What one sender (of some) delivers to a peer, and so what it may have on its way.
#[derive(Debug, Default)]
pub struct Ahead {
    /// Bytes that arrived since `since`.
    delivered: u64,
    since: Duration,
    /// Bytes per second, the best lately.
    rate: f64,
}

impl Ahead {
    /// This many bytes have arrived.
    pub fn count(&mut self, delivered: u64, now: Duration) {
        self.delivered += delivered;
        let passed = now.saturating_sub(self.since);
        if passed >= WINDOW {
            let rate = self.delivered as f64 / passed.as_secs_f64();
            self.rate = rate.max(self.rate * 0.95);
            (self.delivered, self.since) = (0, now);
        }
    }

    /// Bytes that may be on their way over paths whose round trip, unloaded, is this (where it is
    /// known), where this many senders share the peer.
    pub fn limit(&self, round_trip: Option<Duration>, senders: usize) -> u64 {
        let round_trip = round_trip.unwrap_or(UNKNOWN_TRIP);
        let bytes = self.rate * (AHEAD + round_trip * 2).as_secs_f64();
        let least = LEAST / senders.max(1) as u64;
        (bytes as u64).max(least).max(LEAST_EACH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIP: Option<Duration> = Some(Duration::from_micros(100));

    fn delivering(rate: f64, milliseconds: u32) -> Ahead {
        let mut ahead = Ahead::default();
        for step in 1..=milliseconds {
            ahead.count((rate / 1e3) as u64, Duration::from_millis(1) * step);
        }
        ahead
    }

    #[test]
    fn it_is_what_is_delivered_in_some_time_and_two_round_trips() {
        let limit = delivering(1e9, 20).limit(TRIP, 1) as f64;
        assert!((1.65e6..1.75e6).contains(&limit), "{limit}");
        let far = delivering(1e9, 20).limit(Some(Duration::from_millis(5)), 1) as f64;
        assert!((11.4e6..11.6e6).contains(&far), "{far}");
    }

    #[test]
    fn a_start_and_a_pause_leave_room_to_find_the_rate() {
        assert_eq!(Ahead::default().limit(None, 1), LEAST);
        assert_eq!(Ahead::default().limit(TRIP, 1), LEAST);
        assert_eq!(Ahead::default().limit(TRIP, 8), LEAST_EACH);
        let mut ahead = delivering(3e9, 20);
        let before = ahead.limit(TRIP, 1);
        ahead.count(0, Duration::from_millis(25));
        assert!(ahead.limit(TRIP, 1) > before * 9 / 10);
    }

    /// Whatever the bound is at first: what it lets through in a round trip makes it grow.
    #[test]
    fn it_grows_until_the_network_is_full() {
        let (rate, trip) = (12.5e9, Duration::from_micros(300));
        let mut ahead = Ahead::default();
        for step in 1..=20 {
            let limit = ahead.limit(Some(trip), 4) as f64;
            let delivered = (limit / trip.as_secs_f64()).min(rate) * 2e-3;
            ahead.count(delivered as u64, Duration::from_millis(2) * step);
        }
        assert!(ahead.limit(Some(trip), 4) as f64 > rate * 0.9e-3);
    }
}
