//! The window of one path, and what is known of the path: how long its way is, and how long its packets wait.
//! What becomes of it decides [`congestion`](super::congestion).

use std::iter::Sum;
use std::time::Duration;

use super::rtt::RoundTrip;
use super::shortest::Shortest;

/// A queue that is worth it: enough to keep a path busy while windows are set anew.
pub const TARGET: Duration = Duration::from_micros(150);
/// Least window of a path, in packets.
pub const LEAST: f64 = 0.05;
/// The most that is in flight, in windows, while acknowledgements wait on their way back.
pub const MOST_BACK: f64 = 4.0;

/// Several windows together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    /// The windows.
    pub bytes: f64,
    /// What may be unconfirmed: windows and what is on its way back.
    pub open: f64,
    /// The same in bytes per second: each by its own round trip.
    pub rate: f64,
}

impl Sums {
    /// One of them is other than it was.
    pub fn replace(&mut self, before: Sums, after: Sums) {
        self.bytes += after.bytes - before.bytes;
        self.open += after.open - before.open;
        self.rate += after.rate - before.rate;
    }
}

impl Sum for Sums {
    fn sum<I: Iterator<Item = Sums>>(all: I) -> Sums {
        all.fold(Sums::default(), |mut sums, one| {
            sums.replace(Sums::default(), one);
            sums
        })
    }
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    pub bytes: f64,
    shortest: Shortest,
    /// The same by its own packets alone.
    alone: Shortest,
    /// Seconds of its way there and back, with nothing in its queue.
    pub base: f64,
    /// A round trip in parts of its way there: what is unconfirmed has in part arrived.
    pub back: f64,
    /// Seconds of a round trip, lately.
    pub trip: f64,
    /// Seconds that its newest packet waited.
    pub waited: f64,
    pub shrunk: Duration,
    /// Until a packet has waited for the first time, it doubles.
    pub starting: bool,
    /// The least wait of the present epoch, when that began, and epochs in a row above the bound.
    pub least: f64,
    pub epoch: Duration,
    pub long: u32,
    pub competes: bool,
    /// No packet of it has seen the end of a drain, so what it knows of its length may be a queue.
    pub judged: bool,
    /// It seems to be longer than others.
    pub far: bool,
    /// It is smaller for the time of a drain.
    pub drained: bool,
    /// Its window before a drain, and when the queue was last short.
    pub saved: f64,
}

impl Window {
    /// Of this many bytes; nothing is known of its path.
    pub fn new(bytes: f64) -> Self {
        Window {
            bytes,
            shortest: Shortest::default(),
            alone: Shortest::default(),
            base: 0.0,
            back: 1.0,
            trip: 0.0,
            waited: 0.0,
            shrunk: Duration::ZERO,
            starting: true,
            least: f64::MAX,
            epoch: Duration::ZERO,
            long: 0,
            competes: false,
            judged: true,
            far: false,
            drained: false,
            saved: 0.0,
        }
    }

    /// The same place with another path, and this many bytes: what is known of time stays.
    pub fn replaced(&self, bytes: f64) -> Self {
        Window {
            back: self.back,
            trip: self.trip,
            shrunk: self.shrunk,
            epoch: self.epoch,
            saved: self.saved,
            starting: false,
            ..Window::new(bytes)
        }
    }

    /// As a part of the sums.
    pub fn sums(&self) -> Sums {
        let open = self.bytes * self.back;
        Sums {
            bytes: self.bytes,
            open,
            rate: if self.trip > 0.0 {
                open / self.trip
            } else {
                0.0
            },
        }
    }

    /// A packet took so long, where the shortest that any path's packets take is `all`, and `alike` seconds more are
    /// no matter. The round trip that it goes by from here on: the connection's, or its own.
    pub fn heard<'a>(
        &mut self,
        (delay, all): (u32, u32),
        alike: f64,
        (trip, own): (&'a RoundTrip, &'a RoundTrip),
        now: Duration,
    ) -> &'a RoundTrip {
        // It is judged by what the others know: it may have started in a full queue. If it still seems longer at the
        // end of a drain, when the queue is empty, it is.
        if self.shortest.get().is_none() {
            self.shortest.add(all, now);
        }
        self.shortest.add(delay, now);
        self.alone.add(delay, now);
        let longer = |shortest: Option<u32>| shortest.unwrap_or(delay).wrapping_sub(all);
        self.far = f64::from(longer(self.alone.get())) * 1e-6 >= alike;
        let (more, own) = if self.far && !self.judged {
            (longer(self.alone.get()), own)
        } else {
            (longer(self.shortest.get()), trip)
        };
        // Paths of one length know together more than each alone.
        let same = u128::from(more) < TARGET.as_micros();
        let shortest = if same { all } else { all.wrapping_add(more) };
        self.base = own.shortest().unwrap_or_default().as_secs_f64();
        let one_way = f64::from(delay.wrapping_sub(shortest)) * 1e-6;
        // If a clock jumped, the round trip knows better.
        let least = trip.shortest().unwrap_or_default();
        let around = trip.latest().max(trip.smoothed()).saturating_sub(least);
        self.waited = one_way.min(around.as_secs_f64() + TARGET.as_secs_f64() / 2.0);
        self.least = self.least.min(self.waited);
        own
    }
}
