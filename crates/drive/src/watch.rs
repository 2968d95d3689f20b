//! How a loop that polls ends each of its turns: it gives up when nothing has happened for too long,
//! and lends its core to others while it waits.

use std::time::{Duration, Instant};

use crate::DriveError;

/// So long may nothing happen.
pub const LIMIT: Duration = Duration::from_secs(120);

/// One loop's.
pub struct Watch {
    last: Instant,
    longest: Duration,
}

impl Watch {
    /// From now on.
    pub fn new(now: Instant) -> Watch {
        Watch {
            last: now,
            longest: Duration::ZERO,
        }
    }

    /// A turn has ended; `moved`: something happened in it.
    ///
    /// # Errors
    /// [`DriveError::Stalled`] after [`LIMIT`] without anything.
    pub fn turn(&mut self, now: Instant, moved: bool) -> Result<(), DriveError> {
        if moved {
            self.longest = self.longest.max(now - self.last);
            self.last = now;
        } else {
            if now - self.last > LIMIT {
                return Err(DriveError::Stalled(LIMIT.as_secs()));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// The longest time in which nothing happened, and after which something did; seconds.
    pub fn longest(&self) -> f64 {
        self.longest.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_measured_where_it_ends_and_an_error_where_it_does_not() {
        let start = Instant::now();
        let mut watch = Watch::new(start);
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(watch.turn(after(1), true).is_ok());
        assert!(watch.turn(after(100), false).is_ok());
        assert!(watch.turn(after(101), true).is_ok());
        assert!(watch.turn(after(221), false).is_ok());
        assert!((watch.longest() - 100.0).abs() < 1e-9);
        let error = watch.turn(after(222), false);
        assert!(matches!(error, Err(DriveError::Stalled(120))));
    }
}
