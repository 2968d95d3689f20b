//! The shortest time that packets take, by two clocks whose difference nobody knows: what longer times are compared
//! with. Ways change, so it is that of the last ten to twenty seconds.

use std::time::Duration;

/// The shortest delay is that of so long ago at most, twice.
pub const MEMORY: Duration = Duration::from_secs(10);

/// The least of a wrapping count of microseconds, lately.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shortest {
    present: Option<u32>,
    before: Option<u32>,
    since: Duration,
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
        self.present = Some(self.present.map_or(value, |least| earlier(least, value)));
    }

    /// What is known now is not forgotten yet.
    pub fn hold(&mut self, now: Duration) {
        self.since = now;
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
}
