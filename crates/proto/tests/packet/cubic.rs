//! A TCP stream with cubic (RFC 9438), as a model: selective acknowledgement of each segment, loss by
//! three later ones, one reduction a round trip, a 200 ms timer, bytes delivered in order. To be
//! compared with, and to share a link with.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::model::{Body, End, Packet, Route};

const SEGMENT: u64 = 1448;
const WIRE: u64 = 1500;
/// The share of a packet that is payload.
pub const LIMIT: f64 = SEGMENT as f64 / WIRE as f64;

pub struct Sender {
    peer: usize,
    route: Route,
    window: f64,
    threshold: f64,
    most: f64,
    /// When and from what the present curve began.
    epoch: Option<Duration>,
    reduced: Duration,
    smoothed: Duration,
    next: u64,
    flying: BTreeMap<u64, (Duration, u32)>,
    again: VecDeque<u64>,
    acked: BTreeSet<u64>,
    progress: Duration,
    timeouts: u32,
    /// Bytes that the program has written; `u64::MAX` for a bulk sender.
    pub written: u64,
    /// A bulk of bytes between messages: so much is written ahead of what is sent.
    pub ahead: u64,
    /// Messages of this length so often, in the stream behind what is written.
    pub every: Option<(u64, Duration)>,
    due: Duration,
    waiting: VecDeque<(u64, Duration)>,
    pub took: Vec<(Duration, Duration)>,
    pub retransmits: u64,
}

impl Sender {
    pub fn new(peer: usize, route: Route) -> Sender {
        Sender {
            peer,
            route,
            window: 10.0,
            threshold: f64::MAX,
            most: 0.0,
            epoch: None,
            reduced: Duration::ZERO,
            smoothed: Duration::from_millis(1),
            next: 0,
            flying: BTreeMap::new(),
            again: VecDeque::new(),
            acked: BTreeSet::new(),
            progress: Duration::ZERO,
            timeouts: 0,
            written: 0,
            ahead: 128 << 10,
            every: None,
            due: Duration::ZERO,
            waiting: VecDeque::new(),
            took: Vec::new(),
            retransmits: 0,
        }
    }

    fn reduce(&mut self, now: Duration) {
        if now.saturating_sub(self.reduced) > self.smoothed {
            self.most = self.window;
            self.window = (self.window * 0.7).max(2.0);
            self.threshold = self.window;
            (self.epoch, self.reduced) = (Some(now), now);
        }
    }

    fn grow(&mut self, now: Duration) {
        if self.window < self.threshold {
            self.window += 1.0;
            return;
        }
        let since = now
            .saturating_sub(*self.epoch.get_or_insert(now))
            .as_secs_f64();
        let trip = self.smoothed.as_secs_f64();
        let k = (self.most * 0.3 / 0.4).cbrt();
        let cubic = 0.4 * (since + trip - k).powi(3) + self.most;
        let reno = self.most * 0.7 + 3.0 * 0.3 / 1.7 * since / trip;
        let target = cubic.max(reno).min(self.window * 1.5);
        self.window += ((target - self.window) / self.window).max(0.01 / self.window);
    }
}

impl End for Sender {
    fn hear(&mut self, body: Body, now: Duration) {
        let Body::Told(below, which) = body else {
            return;
        };
        let Some((at, _)) = self.flying.remove(&which) else {
            return;
        };
        (self.progress, self.timeouts) = (now, 0);
        let sample = now - at;
        self.smoothed = (self.smoothed * 7 + sample) / 8;
        self.acked.insert(which);
        self.grow(now);
        let late: Vec<u64> = self
            .flying
            .range(..which)
            .filter(|(_, (sent, _))| *sent < at)
            .map(|(first, _)| *first)
            .collect();
        for first in late {
            let entry = self.flying.get_mut(&first).map(|entry| {
                entry.1 += 1;
                entry.1
            });
            if entry == Some(3) {
                self.flying.remove(&first);
                self.again.push_back(first);
                self.retransmits += 1;
                self.reduce(now);
            }
        }
        while self.waiting.front().is_some_and(|(end, _)| *end <= below) {
            if let Some((_, at)) = self.waiting.pop_front() {
                self.took.push((at, now - at));
            }
        }
    }

    fn run(&mut self, now: Duration, out: &mut Vec<Packet>) -> Option<Duration> {
        if let Some((length, every)) = self.every {
            while self.due <= now {
                self.written = self.written.max(self.next + self.ahead) + length;
                self.waiting.push_back((self.written, self.due));
                self.due += every;
            }
        }
        let rto =
            Duration::from_millis(200).max(self.smoothed * 2) * 2u32.pow(self.timeouts.min(8));
        if !self.flying.is_empty() && now >= self.progress + rto {
            self.again.extend(self.flying.keys());
            self.flying.clear();
            self.reduced = Duration::ZERO;
            self.reduce(now);
            self.window = 1.0;
            self.timeouts += 1;
            self.progress = now;
        }
        while (self.flying.len() as f64) < self.window {
            let first = self.again.pop_front().unwrap_or_else(|| {
                self.next += SEGMENT;
                self.next - SEGMENT
            });
            self.flying.insert(first, (now, 0));
            out.push(Packet {
                to: self.peer,
                size: WIRE,
                route: self.route.clone(),
                body: Body::Segment(first, SEGMENT as u32),
            });
        }
        let next = self.progress + rto;
        Some(self.every.map_or(next, |_| next.min(self.due)))
    }

    fn as_any(&mut self) -> &mut dyn std::any::Any {
        self
    }
}

pub struct Receiver {
    peer: usize,
    route: Route,
    below: u64,
    beyond: BTreeSet<u64>,
    told: Vec<u64>,
    /// Bytes that came in, the order apart.
    pub got: u64,
    pub last: Duration,
    pub longest_gap: Duration,
}

impl Receiver {
    pub fn new(peer: usize, route: Route) -> Receiver {
        Receiver {
            peer,
            route,
            below: 0,
            beyond: BTreeSet::new(),
            told: Vec::new(),
            got: 0,
            last: Duration::ZERO,
            longest_gap: Duration::ZERO,
        }
    }
}

impl End for Receiver {
    fn hear(&mut self, body: Body, now: Duration) {
        let Body::Segment(first, length) = body else {
            return;
        };
        self.told.push(first);
        if first < self.below || !self.beyond.insert(first) {
            return;
        }
        self.got += u64::from(length);
        let before = self.below;
        while self.beyond.remove(&self.below) {
            self.below += SEGMENT;
        }
        if self.below > before {
            self.longest_gap = self.longest_gap.max(now - self.last);
            self.last = now;
        }
    }

    fn run(&mut self, _: Duration, out: &mut Vec<Packet>) -> Option<Duration> {
        for which in self.told.drain(..) {
            out.push(Packet {
                to: self.peer,
                size: 66,
                route: self.route.clone(),
                body: Body::Told(self.below, which),
            });
        }
        None
    }

    fn as_any(&mut self) -> &mut dyn std::any::Any {
        self
    }
}
