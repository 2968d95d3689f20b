//! The shortest time that packets take, by two clocks whose difference nobody knows: what longer times are compared
//! with. Ways change, so it is that of the last ten to twenty seconds. Where the queue is another's, and may not be empty
//! for long, it is held; but two clocks drift apart, by 20 us a second and more, and ways become longer beside TCP too. So
//! it is forgotten if nothing as short was seen for [`HOLDS`].

use std::time::Duration;

/// The shortest delay is that of so long ago at most, twice.
pub const MEMORY: Duration = Duration::from_secs(10);

/// What is held was seen again so long ago at most.
pub const HOLDS: Duration = Duration::from_secs(60);

/// The least of a wrapping count of microseconds, lately.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shortest {
    present: Option<u32>,
    before: Option<u32>,
    since: Duration,
    /// When something as short as the least was last seen.
    seen: Duration,
}

fn earlier(one: u32, other: u32) -> u32 {
    // Two clocks have any difference, so the least is the one that is behind.
    if (one.wrapping_sub(other) as i32) < 0 {
        one
    } else {
        other
    }
}

impl Shortest {
    /// One more.
    pub fn add(&mut self, value: u32, now: Duration) {
        if now.saturating_sub(self.since) >= MEMORY {
            (self.before, self.present, self.since) = (self.present, None, now);
        }
        if self
            .get()
            .is_none_or(|least| earlier(least, value) == value)
        {
            self.seen = now;
        }
        self.present = Some(self.present.map_or(value, |least| earlier(least, value)));
    }

    /// What is known now is not forgotten yet, if it was seen within [`HOLDS`].
    pub fn hold(&mut self, now: Duration) {
        if now.saturating_sub(self.seen) < HOLDS {
            self.since = now;
        }
    }

    /// The least of the last ten to twenty seconds, if there was one.
    pub fn get(&self) -> Option<u32> {
        match (self.present, self.before) {
            (Some(one), Some(other)) => Some(earlier(one, other)),
            (one, other) => one.or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_is_found_whatever_the_clocks_differ_by() {
        let mut shortest = Shortest::default();
        for value in [u32::MAX - 3, 10, u32::MAX - 7, 4] {
            shortest.add(value, Duration::ZERO);
        }
        assert_eq!(shortest.get(), Some(u32::MAX - 7));
        shortest.add(100, MEMORY);
        assert_eq!(shortest.get(), Some(u32::MAX - 7));
        shortest.add(101, MEMORY * 2);
        assert_eq!(shortest.get(), Some(100));
    }

    #[test]
    fn what_is_held_is_forgotten_if_it_is_not_seen_again() {
        let second = Duration::from_secs(1);
        let mut shortest = Shortest::default();
        shortest.add(100, Duration::ZERO);
        let mut run = |from: u32, to: u32| {
            for at in from..to {
                shortest.hold(second * at);
                shortest.add(500, second * at);
            }
            shortest.get()
        };
        assert_eq!(run(1, 60), Some(100));
        assert_eq!(run(60, 82), Some(500));
        shortest.add(100, second * 82);
        shortest.add(100, second * 120);
        shortest.hold(second * 170);
        shortest.add(500, second * 170);
        assert_eq!(shortest.get(), Some(100));
    }
}
