//! One path of a lane: alive, suspect or dead, and how large a chunk it should take.
//!
//! Silence means nothing on a path where all is confirmed, so time counts only while something that was
//! sent is unconfirmed. Two things confirm: the answer to a ping, and the driver's own knowledge
//! (for TCP the kernel's: [`Report`]). Data that comes the other way does not: a fabric may lose one
//! direction only.

use std::collections::VecDeque;
use std::time::Duration;

use crate::window::{PERIOD, Quickest, TARGET, Window, earlier};
use crate::wire::{Frame, HEADER};

/// A path's number: chosen at random by the side that opened it, the same on both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u64);

/// What a path is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathState {
    /// Takes chunks.
    Live,
    /// Nothing was confirmed for a while: used only where no path is live.
    Suspect,
}

/// What the driver knows of a path by other means than frames.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Bytes were sent that the far kernel has not acknowledged.
    pub unconfirmed: bool,
    /// Some were acknowledged since the last report.
    pub advanced: bool,
    /// Much of what was sent since then was sent again.
    pub lossy: bool,
    /// Smoothed round trip, where known.
    pub rtt: Option<Duration>,
    /// Delivered bytes per second while there was something to deliver, where known.
    pub rate: Option<f64>,
}

/// Between two pings of a path with something unconfirmed.
pub const HEARTBEAT: Duration = Duration::from_millis(10);
/// An idle path is asked this often whether it still leads anywhere.
const IDLE: Duration = Duration::from_secs(1);
/// Unconfirmed for this long, and four round trips: suspect.
const SUSPECT: Duration = Duration::from_millis(60);
/// A piece that has not arrived for this long, three times what it should take, and four round trips
/// more, goes over another path as well: a lost tail holds up one piece for a timeout of the
/// kernel's (200 ms), and without this everything behind it.
pub(crate) const LATE: Duration = Duration::from_millis(10);
/// On a path that moves, one is late after this long at least; see [`send`](crate::send).
pub(crate) const SLOW: Duration = Duration::from_millis(20);
/// A path whose pieces came late *rests*: for this long at first, for twice as long each time ...
const REST: Duration = Duration::from_millis(200);
/// ... until it has confirmed this many bytes between two rests.
const PROVEN: u64 = 512 << 10;
/// Suspect for this long, and sixteen round trips: dead.
const DEAD: Duration = Duration::from_millis(1000);
/// How long chunks waited is told at least this often while they come.
const TELL: Duration = Duration::from_micros(500);
/// Nothing is known of a chunk that came while the driver did not look for so long, except if it waited
/// too long in any case.
const BLIND: Duration = Duration::from_micros(500);
/// In a frame of its own when this many bytes have come: chunks that go the other way say it as well.
const UNTOLD: u64 = 128 << 10;

/// Unsent bytes under which a path has room for more, by its rate in bytes per second: enough to keep
/// it busy until its driver comes again.
pub fn unsent_room(rate: u64) -> u32 {
    (rate / 2000).clamp(16 << 10, 512 << 10) as u32
}

fn microseconds(time: Duration) -> u32 {
    time.as_micros() as u32
}

#[derive(Debug)]
pub(crate) struct Path {
    pub state: PathState,
    pub window: Window,
    pub rtt: Duration,
    /// Bytes, headers included, that it was given, and that are known to have arrived.
    pub given: u64,
    pub confirmed: u64,
    /// When that grew last.
    pub moved: Duration,
    /// Bytes per second that it delivers while it has something to deliver; 0 where unknown.
    pub rate: f64,
    /// Frames that belong to this path and no other.
    pub own: VecDeque<Frame>,
    /// When the oldest unconfirmed frame was sent.
    owes: Option<Duration>,
    progress: Duration,
    sent: Duration,
    pinged: Duration,
    /// The longest wait of a chunk that came, microseconds, since that was told; and when it was.
    waited: Option<u32>,
    told: Duration,
    /// Bytes of chunks that came since.
    untold: u64,
    quickest: Quickest,
    born: Duration,
    /// Others have the chunks until this time.
    rests: Duration,
    rest: Duration,
    /// What it had confirmed when its last rest began.
    rested_at: u64,
}

/// What time did to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Suspected,
    Died,
}

impl Path {
    pub fn new(now: Duration) -> Self {
        Path {
            state: PathState::Live,
            window: Window::new(now),
            rtt: Duration::ZERO,
            given: 0,
            confirmed: 0,
            moved: now,
            rate: 0.0,
            own: VecDeque::new(),
            owes: None,
            progress: now,
            sent: now,
            pinged: now,
            waited: None,
            told: now,
            untold: 0,
            quickest: Quickest::default(),
            born: now,
            rests: Duration::ZERO,
            rest: Duration::ZERO,
            rested_at: 0,
        }
    }

    /// Whether it takes what it is asked to take.
    pub fn is_awake(&self, now: Duration) -> bool {
        self.state == PathState::Live && now >= self.rests
    }

    /// Something came late on it: it rests, for `most` at most.
    pub fn rest(&mut self, most: Duration, now: Duration) {
        let proven = self.confirmed - self.rested_at >= PROVEN;
        let longer = if proven { REST } else { self.rest * 2 };
        self.rest = longer.clamp(REST, most.max(REST));
        self.rests = now + self.rest;
        self.rested_at = self.confirmed;
    }

    /// When its rest ends.
    pub fn rests(&self) -> Duration {
        self.rests
    }

    /// Its rest is over.
    pub fn wake(&mut self) {
        self.rests = Duration::ZERO;
    }

    /// A frame is handed to the path: as it is to be sent.
    pub fn on_sent(&mut self, frame: Frame, now: Duration) -> Frame {
        self.given += HEADER as u64 + u64::from(frame.payload());
        match frame {
            // Needs no confirmation itself, or two idle peers would ping each other for ever.
            Frame::Pong { .. } => return frame,
            Frame::Heard { .. } => {
                return Frame::Heard {
                    heard: self.tell(now),
                };
            }
            _ => {}
        }
        self.sent = now;
        if self.owes.is_none() {
            self.owes = Some(now);
            self.progress = now;
        }
        match frame {
            // Its own time, not that at which it was queued: it confirms all that went before it.
            Frame::Ping { .. } => Frame::Ping {
                stamp: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            },
            Frame::Chunk {
                comm,
                message,
                offset,
                length,
                total,
                ..
            } => Frame::Chunk {
                comm,
                message,
                offset,
                length,
                total,
                stamp: microseconds(now),
                heard: self.tell(now),
            },
            other => other,
        }
    }

    /// How long chunks waited, for the peer; 0 where none came.
    fn tell(&mut self, now: Duration) -> u32 {
        (self.told, self.untold) = (now, 0);
        self.waited
            .take()
            .map_or(0, |waited| waited.saturating_add(1))
    }

    /// A chunk came, after `since`, that was sent at `stamp` by the peer's clock; the quickest of all
    /// paths.
    pub fn on_stamp(
        &mut self,
        (stamp, length): (u32, u32),
        since: Duration,
        now: Duration,
        of_all: &mut Quickest,
    ) {
        let took = microseconds(now).wrapping_sub(stamp);
        self.quickest.add(took, now);
        of_all.add(took, now);
        let mut quickest = self.quickest.get().unwrap_or(took);
        if now < self.born + PERIOD {
            // All of its own may have waited.
            quickest = earlier(quickest, of_all.get().unwrap_or(took));
        }
        // It may have come at any time since the driver looked for it before: that it was not looked
        // for is not a wait of the network's.
        let wait = |came: Duration| {
            let took = microseconds(came).wrapping_sub(stamp);
            (took.wrapping_sub(quickest) as i32).max(0) as u32
        };
        let absent = now.saturating_sub(since);
        let wait = if absent < BLIND {
            Some(wait(since + absent / 2))
        } else {
            Some(wait(since)).filter(|wait| f64::from(*wait) * 1e-6 > TARGET)
        };
        self.waited = self.waited.max(wait);
        self.untold += u64::from(length);
        if self.untold >= UNTOLD && now >= self.told + TELL && self.own.is_empty() {
            self.own.push_back(Frame::Heard { heard: 0 });
        }
    }

    /// When a piece of this many bytes, given now, would be late.
    pub fn due(&self, bytes: u32, now: Duration) -> Duration {
        let ahead = self.given.saturating_sub(self.confirmed) + u64::from(bytes);
        let expected = if self.rate > 0.0 {
            Duration::from_secs_f64(ahead as f64 / self.rate)
        } else {
            SUSPECT
        };
        now + LATE.max(expected * 3 + self.rtt * 4)
    }

    /// A ping came back. Whether the path was suspect.
    pub fn on_pong(&mut self, stamp: u64, now: Duration) -> bool {
        let at = Duration::from_nanos(stamp).min(now);
        let sample = now - at;
        self.rtt = if self.rtt.is_zero() {
            sample
        } else {
            (self.rtt * 7 + sample) / 8
        };
        if at >= self.sent {
            self.owes = None;
        }
        self.confirm(now)
    }

    /// The driver's knowledge. Whether the path was suspect and is no longer.
    pub fn on_report(&mut self, report: &Report, now: Duration) -> bool {
        if let Some(rtt) = report.rtt {
            self.rtt = rtt;
        }
        if let Some(rate) = report.rate {
            self.rate = if self.rate == 0.0 {
                rate
            } else {
                self.rate + (rate - self.rate) / 4.0
            };
        }
        if !report.unconfirmed {
            self.owes = None;
            return self.confirm(now);
        }
        report.advanced && self.confirm(now)
    }

    fn confirm(&mut self, now: Duration) -> bool {
        self.progress = now;
        std::mem::replace(&mut self.state, PathState::Live) == PathState::Suspect
    }

    /// Whether something that was sent is unconfirmed.
    pub fn owes(&self) -> bool {
        self.owes.is_some()
    }

    /// Lets time pass: pings, and what silence means.
    pub fn on_time(&mut self, now: Duration) -> Option<Change> {
        let (suspect, dead) = (SUSPECT.max(self.rtt * 4), DEAD.max(self.rtt * 16));
        let silent = now.saturating_sub(self.progress);
        if self.owes.is_some() && silent >= dead {
            return Some(Change::Died);
        }
        let every = if self.owes() { HEARTBEAT } else { IDLE };
        let last = self.pinged.max(if self.owes() {
            self.progress
        } else {
            self.sent
        });
        if now >= last + every {
            self.pinged = now;
            if self.own.is_empty() {
                self.own.push_back(Frame::Ping { stamp: 0 });
            }
        }
        if self.owes() && silent >= suspect && self.state == PathState::Live {
            self.state = PathState::Suspect;
            return Some(Change::Suspected);
        }
        None
    }

    /// When [`Path::on_time`] has something to do.
    pub fn deadline(&self) -> Duration {
        if self.owes() {
            self.pinged.max(self.progress) + HEARTBEAT
        } else {
            self.pinged.max(self.sent) + IDLE
        }
    }
}
