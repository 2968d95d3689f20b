//! When a thread had no processor, or nothing to do: what lay in its sockets meanwhile stood in no queue of
//! the network's.
//!
//! A thread that is slow and one that waits for a processor look the same by the time that packets lie in
//! their socket. The first must be told to the sender, for it takes no more than it takes. The second must
//! not: a window that shrinks for it shrinks again each time, and where the processors are busy nothing
//! else bounds that. The processor time that the thread has used tells them apart.

use std::time::Duration;

/// Between two looks: each asks the kernel.
const EVERY: Duration = Duration::from_millis(1);
/// What is shorter is overlooked anyway.
const LEAST: Duration = Duration::from_micros(200);

/// See the module.
#[derive(Debug, Default)]
pub struct Away {
    looked: Duration,
    /// Processor time that the thread had used then.
    used: Duration,
}

impl Away {
    /// From when until when the thread was away since the last look, if that was long: taken to be the end
    /// of that time. `used` is the processor time that it has used.
    pub fn look(
        &mut self,
        now: Duration,
        used: impl FnOnce() -> Duration,
    ) -> Option<(Duration, Duration)> {
        let passed = now.saturating_sub(self.looked);
        if passed < EVERY {
            return None;
        }
        let used = used();
        let away = passed.saturating_sub(used.saturating_sub(self.used));
        (self.looked, self.used) = (now, used);
        (away >= LEAST).then(|| (now.saturating_sub(away), now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn a_thread_that_works_is_not_away_and_one_that_waits_is() {
        let mut away = Away::default();
        // It works all the time.
        assert_eq!(away.look(MILLI * 5, || MILLI * 5), None);
        // It has not been long: the kernel is not asked.
        assert_eq!(away.look(MILLI * 11 / 2, || unreachable!()), None);
        // It has worked for one millisecond of nine.
        let seen = away.look(MILLI * 14, || MILLI * 6);
        assert_eq!(seen, Some((MILLI * 6, MILLI * 14)));
        // Clocks that differ a little are no time.
        assert_eq!(away.look(MILLI * 16, || MILLI * 9), None);
    }
}
