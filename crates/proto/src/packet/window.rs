//! The window of one path, and what is known of the path: how long its way is, and how long its packets wait.
//! What becomes of it decides [`congestion`](super::congestion).
//!
//! What a path sends at once waits for itself. Where the connection goes over several links that is longer than its
//! whole rate tells, and no queue of others: it is taken out of the wait. The link's rate is that at which the packets
//! of a run arrive, the fastest of the last ten to twenty seconds (packet pairs; Keshav, SIGCOMM 1991).

use std::iter::Sum;
use std::time::Duration;

use super::delivery::Fastest;
use super::loss::Run;
use super::rtt::RoundTrip;
use super::shortest::{MEMORY, Shortest};

/// A queue that is worth it: enough to keep a path busy while windows are set anew.
pub const TARGET: Duration = Duration::from_micros(150);
/// A link is one of several if the connection is this many times as fast.
const SLOWER: f64 = 1.5;
/// Others' packets may stand between two of a run: this many pairs are seen first.
const PAIRS: u32 = 4;
/// Least window of a path, in packets.
pub const LEAST: f64 = 0.05;
/// The most that is in flight, in windows, while acknowledgements wait on their way back.
pub const MOST_BACK: f64 = 4.0;

/// How long a packet took to the peer.
#[derive(Debug, Clone, Copy)]
pub struct Took {
    /// Microseconds, by both clocks: their difference is not known.
    pub delay: u32,
    /// A switch marked it.
    pub marked: bool,
    /// When it was sent, in microseconds of this end's clock, and what went at once up to it; if that is known.
    pub of: Option<(u32, Run)>,
}

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
    /// Bytes per second of the slowest link of its way.
    link: Fastest,
    /// How often that was seen.
    pairs: u32,
    /// The run of the packet that was heard of last, and when that arrived at the peer.
    last: (Run, u32),
    /// Seconds of its way there and back, with nothing in its queue.
    pub base: f64,
    /// A round trip in parts of its way there: what is unconfirmed has in part arrived.
    pub back: f64,
    /// Seconds of a round trip, lately.
    pub trip: f64,
    /// Seconds that its newest packet waited.
    pub waited: f64,
    pub shrunk: Duration,
    /// Packets of the present round trip that arrived and that were lost.
    pub arrived: u32,
    pub lost: u32,
    /// Until a packet has waited for the first time, it doubles.
    pub starting: bool,
    /// The least wait of the present epoch, when that began, and epochs in a row above the bound.
    pub least: f64,
    pub epoch: Duration,
    /// Packets that were heard of in it.
    pub said: u32,
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
            link: Fastest::new(MEMORY, Duration::ZERO),
            pairs: 0,
            last: Default::default(),
            base: 0.0,
            back: 1.0,
            trip: 0.0,
            waited: 0.0,
            shrunk: Duration::ZERO,
            arrived: 0,
            lost: 0,
            starting: true,
            least: f64::MAX,
            epoch: Duration::ZERO,
            said: 0,
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

    /// How fast the packets of a run pass the slowest link of the way: by when each of them arrives.
    fn passed(&mut self, arrived: u32, run: Run, now: Duration) {
        let (before, then) = std::mem::replace(&mut self.last, (run, arrived));
        let apart = arrived.wrapping_sub(then) as i32;
        if before.first == run.first && run.bytes > before.bytes && apart > 0 {
            let bytes = f64::from(run.bytes - before.bytes);
            self.link.add(bytes / f64::from(apart) * 1e6, now);
            self.pairs = self.pairs.saturating_add(1);
        }
    }

    /// Seconds that this many bytes of a run take longer on the slowest link of the way than at this rate; 0 until
    /// something is known.
    fn takes_longer(&self, bytes: u32, rate: f64) -> f64 {
        let link = self.link.get();
        if self.pairs >= PAIRS && link * SLOWER < rate {
            f64::from(bytes) * (1.0 / link - 1.0 / rate)
        } else {
            0.0
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
        (took, all): (Took, u32),
        (alike, rate): (f64, f64),
        (trip, own): (&'a RoundTrip, &'a RoundTrip),
        now: Duration,
    ) -> &'a RoundTrip {
        // It is judged by what the others know: it may have started in a full queue. If it still seems longer at the
        // end of a drain, when the queue is empty, it is.
        if self.shortest.get().is_none() {
            self.shortest.add(all, now);
        }
        let delay = took.delay;
        if self.competes {
            self.shortest.hold(now);
            self.alone.hold(now);
        }
        self.shortest.add(delay, now);
        self.alone.add(delay, now);
        let longer = |shortest: Option<u32>| shortest.unwrap_or(delay).wrapping_sub(all);
        self.far = f64::from(longer(self.alone.get())) * 1e-6 >= alike;
        let (more, own) = if self.far && !self.judged {
            (longer(self.alone.get()), own)
        } else if self.competes {
            (0, trip)
        } else {
            (longer(self.shortest.get()), trip)
        };
        // Paths of one length know together more than each alone.
        let same = u128::from(more) < TARGET.as_micros();
        let shortest = if same { all } else { all.wrapping_add(more) };
        self.base = own.shortest().unwrap_or_default().as_secs_f64();
        let mut one_way = f64::from(delay.wrapping_sub(shortest)) * 1e-6;
        if let Some((sent, run)) = took.of {
            self.passed(sent.wrapping_add(delay), run, now);
            one_way = (one_way - self.takes_longer(run.bytes, rate)).max(0.0);
        }
        // If a clock jumped, the round trip knows better.
        let least = trip.shortest().unwrap_or_default();
        let around = trip.latest().max(trip.smoothed()).saturating_sub(least);
        self.waited = one_way.min(around.as_secs_f64() + TARGET.as_secs_f64() / 2.0);
        self.least = self.least.min(self.waited);
        self.said = self.said.saturating_add(1);
        own
    }

    /// Waits from here on are of another epoch.
    pub fn begin_epoch(&mut self, now: Duration) {
        (self.least, self.said, self.epoch) = (f64::MAX, 0, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_waits_for_itself_on_one_of_several_links() {
        let mut window = Window::new(1e5);
        // Four runs of two packets, 120 us apart: 12.5 MB/s.
        for first in 0..4 {
            let start = first as u32 * 1000;
            let run = |bytes| Run { first, bytes };
            assert_eq!(window.takes_longer(3000, 5e7), 0.0);
            window.passed(start, run(1500), Duration::ZERO);
            window.passed(start + 120, run(3000), Duration::ZERO);
        }
        let longer = window.takes_longer(3000, 5e7);
        assert!((longer - (240e-6 - 60e-6)).abs() < 1e-9, "{longer}");
        // As fast as the connection: it is the only one.
        assert_eq!(window.takes_longer(3000, 1.5e7), 0.0);
    }
}
