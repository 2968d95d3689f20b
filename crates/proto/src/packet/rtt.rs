//! Round trips: smoothed, how far they vary, the shortest (RFC 9002, section 5), and how long silence
//! may last before something is taken for lost.

use std::time::Duration;

use super::ack;

/// Until something is known.
const UNKNOWN: Duration = Duration::from_millis(5);
/// The longest that is waited for an answer before the next attempt: a fabric that heals is used
/// again within two of these.
pub const LONGEST: Duration = Duration::from_millis(20);

/// The round trip of one connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct RoundTrip {
    /// Nanoseconds, here and below: Duration's own arithmetic takes several times as long, and this is done for each
    /// packet.
    smoothed: Option<u64>,
    varies: u64,
    shortest: Option<u64>,
    latest: u64,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl RoundTrip {
    /// A packet was acknowledged; `held` is how long the receiver kept that back.
    pub fn sample(&mut self, passed: Duration, held: Duration) {
        let (passed, held) = (nanos(passed), nanos(held));
        let shortest = self.shortest.map_or(passed, |least| least.min(passed));
        self.shortest = Some(shortest);
        let sample = if passed >= shortest.saturating_add(held) {
            passed - held
        } else {
            passed
        };
        self.latest = sample;
        match self.smoothed {
            None => (self.smoothed, self.varies) = (Some(sample), sample / 2),
            Some(smoothed) => {
                let differs = smoothed.abs_diff(sample);
                self.varies = self.varies - self.varies / 4 + differs / 4;
                self.smoothed = Some(smoothed - smoothed / 8 + sample / 8);
            }
        }
    }

    /// The mean, lately.
    pub fn smoothed(&self) -> Duration {
        self.smoothed.map_or(UNKNOWN, Duration::from_nanos)
    }

    /// The shortest, if there was one.
    pub fn shortest(&self) -> Option<Duration> {
        self.shortest.map(Duration::from_nanos)
    }

    /// The last one.
    pub fn latest(&self) -> Duration {
        Duration::from_nanos(self.latest)
    }

    /// Whether there was one.
    pub fn known(&self) -> bool {
        self.smoothed.is_some()
    }

    /// For how long a packet may be unconfirmed. TCP waits for 200 ms at least; `floor` is 1 to 5 ms. Where round
    /// trips are all alike it is half of one more at least: a queue may be new (RFC 8985, section 7.2, takes a
    /// whole one).
    pub fn patience(&self, floor: Duration) -> Duration {
        self.longer(self.smoothed() / 2).max(floor)
    }

    /// How old a packet is when it is acknowledged, at most, where others that were sent later are: a quarter of
    /// the shortest round trip more at least (RFC 8985, section 6.2).
    pub fn age(&self) -> Duration {
        self.longer(self.shortest().unwrap_or_default() / 4)
    }

    fn longer(&self, least: Duration) -> Duration {
        let varies = Duration::from_nanos(self.varies.saturating_mul(4));
        self.smoothed() + varies.max(least) + ack::LONGEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_has_a_floor_and_follows_what_varies() {
        let (floor, micro) = (Duration::from_millis(2), Duration::from_micros);
        let mut trip = RoundTrip::default();
        assert!(trip.patience(floor) > UNKNOWN);
        for _ in 0..50 {
            trip.sample(micro(100), micro(10));
        }
        assert_eq!(trip.patience(floor), floor);
        assert_eq!(trip.shortest(), Some(micro(100)));
        for step in 0..50 {
            trip.sample(micro(2000 + 2000 * (step % 2)), micro(0));
        }
        assert!(trip.patience(floor) > micro(5000));
    }
}
