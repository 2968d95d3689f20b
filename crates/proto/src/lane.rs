//! A lane: the comms and paths that one worker on either side carries between two processes.
//!
//! The driver's loop:
//! - a frame came on a path: [`Lane::receive`]; for a chunk, ask [`Lane::place`] before each read of
//!   its bytes, then [`Lane::filled`];
//! - a path has room: [`Lane::transmit`] until `None`;
//! - a path opened, ended, was looked at: [`Lane::path_up`], [`Lane::path_down`], [`Lane::report`];
//! - [`Lane::deadline`] has come: [`Lane::on_time`];
//! - after any of these: [`Lane::event`] until `None`.

mod event;
mod incoming;
mod outgoing;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

pub use event::{Event, LaneConfig, Side, Why};

use crate::path::{Change, LATE, Path, PathId, PathState, Report};
use crate::receive::{Outcome, ReceiveComm};
use crate::send::{Pace, SendComm};
use crate::window::Quickest;
use crate::wire::{Frame, PACKET};

/// The peer does not speak the protocol: give up the path that this came on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent a chunk that nothing allows")]
pub struct Violation;

/// What a path is to carry.
pub type Transmit = Frame;

/// What is to be said and is no bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Statement {
    Open(u64),
    Opened(u64, bool),
    Ack(u64),
    Credit(u64, u64),
    Refuse(u64, u64),
    CloseSend(u64),
    CloseReceive(u64),
    Closed(u64, bool),
    Gone(PathId),
}

/// A piece is at least what the whole network carries in this time (seconds), between these bounds:
/// each costs a lock and two calls, and a message in few pieces leaves paths idle.
const PIECE: f64 = 20e-6;
const PIECE_LEAST: f64 = PACKET as f64;
const PIECE_MOST: f64 = 4.0 * PACKET as f64;
/// Where a live path has less than this to deliver (bytes per second) in a network without delay, there
/// are more of them than the network has room for: what 16 connections have of 0.8 Gb/s, a queue of
/// 2 ms of which holds eight packets for each. TCP loses a tail then, and waits 200 ms for it.
pub(crate) const SCARCE: f64 = 6e6;
/// A queue of this depth is thought of. A long way holds what is under way besides.
const QUEUE: Duration = Duration::from_millis(2);
/// A path rests for this long at most, there and elsewhere.
const REST_SCARCE: Duration = Duration::from_millis(12_800);
const REST_MOST: Duration = Duration::from_millis(400);
/// This many paths stay awake: with one, four hidden ways of 25 Mb/s carried 25 Mb/s, with four 52; one
/// way of 100 Mb/s carried 76 and 62.
const AWAKE: usize = 3;
/// What all paths deliver is counted over this time.
const WINDOW: Duration = Duration::from_millis(5);

/// See the module.
#[derive(Debug)]
pub struct Lane {
    config: LaneConfig,
    // Quick hashes: only the job's own peers name paths and comms, and each chunk looks up several.
    paths: FxHashMap<PathId, Path>,
    /// How many of them are live: to look at each for every chunk would be most of its price.
    live: usize,
    sends: FxHashMap<u64, SendComm>,
    receives: FxHashMap<u64, ReceiveComm>,
    /// Asked for by the peer, not answered yet.
    offered: FxHashSet<u64>,
    /// Closed here, not known to be closed by the peer.
    closing: BTreeSet<(Side, u64)>,
    unsaid: VecDeque<Statement>,
    /// Messages with bytes that wait for a path, oldest first. May name what is gone.
    ready: VecDeque<(u64, u64)>,
    events: VecDeque<Event>,
    /// Since when no path has been there.
    pathless: Option<Duration>,
    backlog: u64,
    /// Bytes that all paths delivered since then, and per second, the best lately.
    delivered: (u64, Duration),
    rate: f64,
    late: u64,
    /// Bytes that all paths were given and have not confirmed, and the shortest round trip.
    ahead: u64,
    trip: Duration,
    /// The least time that a chunk took lately to come here, by the two clocks.
    quickest: Quickest,
    /// How long chunks wait lately, over all paths, microseconds.
    wait: f64,
}

impl Lane {
    /// A lane without paths or comms.
    pub fn new(config: LaneConfig, now: Duration) -> Self {
        Lane {
            config,
            paths: FxHashMap::default(),
            live: 0,
            sends: FxHashMap::default(),
            receives: FxHashMap::default(),
            offered: FxHashSet::default(),
            closing: BTreeSet::new(),
            unsaid: VecDeque::new(),
            ready: VecDeque::new(),
            events: VecDeque::new(),
            pathless: Some(now),
            backlog: 0,
            delivered: (0, now),
            rate: 0.0,
            late: 0,
            ahead: 0,
            trip: Duration::ZERO,
            quickest: Quickest::default(),
            wait: 0.0,
        }
    }

    /// Adds the sending end of a comm. With `listener`, asks the peer to open it there.
    pub fn add_send(&mut self, comm: u64, listener: Option<u64>, now: Duration) {
        self.start_clock(now);
        let LaneConfig {
            eager_slots,
            eager_bytes,
            ..
        } = self.config;
        self.sends
            .insert(comm, SendComm::new(eager_slots, eager_bytes, listener));
        if listener.is_some() {
            self.unsaid.push_back(Statement::Open(comm));
        }
    }

    /// Adds the receiving end of a comm.
    pub fn add_receive(&mut self, comm: u64, now: Duration) {
        self.start_clock(now);
        self.receives
            .insert(comm, ReceiveComm::new(self.config.eager_slots));
    }

    /// A lane with nothing to carry does not count the time without paths.
    fn start_clock(&mut self, now: Duration) {
        if self.is_idle() && self.pathless.is_some() {
            self.pathless = Some(now);
        }
    }

    /// Whether no comm is here.
    pub fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    /// Answers [`Event::Open`]: yes. All lanes must know the comm by now.
    pub fn accept(&mut self, comm: u64) {
        self.offered.remove(&comm);
        if let Some(receive) = self.receives.get_mut(&comm) {
            receive.accepted = true;
            self.unsaid.push_back(Statement::Opened(comm, true));
        }
    }

    /// Answers [`Event::Open`]: no.
    pub fn decline(&mut self, comm: u64) {
        self.offered.remove(&comm);
        self.unsaid.push_back(Statement::Opened(comm, false));
    }

    /// Takes a message of `length` bytes; its number, or `None` where the comm is not here or 64
    /// messages are unfinished.
    pub fn send(&mut self, comm: u64, length: u64) -> Option<u64> {
        let send = self.sends.get_mut(&comm)?;
        let number = send.push(length)?;
        if send.get(number).is_some_and(|message| message.pending()) {
            self.backlog += length;
            self.ready.push_back((comm, number));
        }
        Some(number)
    }

    /// Takes a buffer of `room` bytes for the next message; see [`Lane::send`].
    pub fn post(&mut self, comm: u64, room: u64) -> Option<u64> {
        let (number, outcome) = self.receives.get_mut(&comm)?.post(room)?;
        self.settle(comm, number, outcome);
        Some(number)
    }

    fn settle(&mut self, comm: u64, message: u64, outcome: Outcome) {
        match outcome {
            Outcome::Wait => {}
            Outcome::Credit => self.unsaid.push_back(Statement::Credit(comm, message)),
            Outcome::Received(length) => {
                self.events.push_back(Event::Received {
                    comm,
                    message,
                    length,
                });
                self.acknowledge(comm);
            }
            Outcome::Deliver { slot, length } => {
                self.events.push_back(Event::Deliver {
                    comm,
                    message,
                    slot,
                    length,
                });
                self.acknowledge(comm);
            }
            Outcome::Oversize { total, room } => {
                self.unsaid.push_back(Statement::Refuse(comm, message));
                self.events.push_back(Event::Failed {
                    comm,
                    side: Side::Receive,
                    why: Why::Oversize { total, room },
                });
            }
            Outcome::Late => self.acknowledge(comm),
        }
    }

    fn acknowledge(&mut self, comm: u64) {
        if let Some(receive) = self.receives.get_mut(&comm)
            && !std::mem::replace(&mut receive.ack_queued, true)
        {
            self.unsaid.push_back(Statement::Ack(comm));
        }
    }

    /// Forgets one end of a comm and tells the peer. Nothing of its buffers is used after this.
    pub fn close(&mut self, comm: u64, side: Side) {
        let known = match side {
            Side::Send => self.sends.remove(&comm).is_some(),
            Side::Receive => self.receives.remove(&comm).is_some(),
        };
        if known && self.closing.insert((side, comm)) {
            self.unsaid.push_back(match side {
                Side::Send => Statement::CloseSend(comm),
                Side::Receive => Statement::CloseReceive(comm),
            });
        }
    }

    /// Whether the peer knows of all comms that were closed here, or cannot be told.
    pub fn is_parted(&self) -> bool {
        self.closing.is_empty() || self.paths.is_empty()
    }

    // ---- paths ----

    /// A path is there.
    pub fn path_up(&mut self, id: PathId, now: Duration) {
        self.paths.insert(id, Path::new(now));
        self.count_live();
        self.pathless = None;
    }

    /// The driver lost a path (or gives it up).
    pub fn path_down(&mut self, id: PathId, now: Duration) {
        let Some(path) = self.paths.remove(&id) else {
            return;
        };
        self.ahead -= path.given - path.confirmed;
        self.count_live();
        if self.paths.is_empty() {
            self.pathless = Some(now);
        }
        self.unsaid.push_back(Statement::Gone(id));
        self.rescue(id);
        self.keep_one_awake(now);
    }

    /// The state of a path, or `None` where it is dead.
    pub fn path_state(&self, id: PathId) -> Option<PathState> {
        self.paths.get(&id).map(|path| path.state)
    }

    /// Whether a path has something unconfirmed, so that [`Lane::report`] is worth a look at it.
    pub fn owes(&self, id: PathId) -> bool {
        self.paths.get(&id).is_some_and(Path::owes)
    }

    /// Smoothed round trip of a path; zero where unknown.
    pub fn rtt(&self, id: PathId) -> Duration {
        self.paths.get(&id).map_or(Duration::ZERO, |path| path.rtt)
    }

    /// How full a path is with `queued` bytes that it has not delivered: the part of its window, at
    /// most 1 where it may take a chunk. The least full of some should have the next.
    pub fn fill(&self, id: PathId, queued: u64) -> f64 {
        let Some(path) = self.paths.get(&id) else {
            return f64::INFINITY;
        };
        path.window.fill(queued as f64, self.least_piece())
    }

    /// There is something for the path, and its window is full.
    pub fn is_full(&mut self, id: PathId) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.window.is_full();
        }
    }

    /// What a path may have on its way, and how long its chunks waited lately.
    pub fn window(&self, id: PathId) -> (u64, Duration) {
        self.paths.get(&id).map_or((0, Duration::ZERO), |path| {
            (path.window.bytes() as u64, path.window.wait())
        })
    }

    /// `outstanding` bytes of what the path was given have not reached the peer, queued ones
    /// included.
    pub fn delivered(&mut self, id: PathId, outstanding: u64, now: Duration) {
        if let Some(path) = self.paths.get_mut(&id) {
            let confirmed = path.given.saturating_sub(outstanding);
            if confirmed > path.confirmed {
                self.delivered.0 += confirmed - path.confirmed;
                self.ahead -= confirmed - path.confirmed;
                path.confirmed = confirmed;
                path.moved = now;
            }
        }
        let passed = now.saturating_sub(self.delivered.1);
        if passed >= WINDOW {
            let rate = self.delivered.0 as f64 / passed.as_secs_f64();
            self.rate = rate.max(self.rate * 0.95);
            self.delivered = (0, now);
        }
    }

    /// Pieces are not made smaller than this.
    fn least_piece(&self) -> f64 {
        (self.rate * PIECE).clamp(PIECE_LEAST, PIECE_MOST)
    }

    /// What the driver knows of a path.
    pub fn report(&mut self, id: PathId, report: &Report, now: Duration) {
        if let Some(path) = self.paths.get_mut(&id)
            && path.on_report(report, now)
        {
            self.count_live();
            self.events.push_back(Event::Recovered(id));
        }
        if report.lossy && self.is_scarce() {
            self.rest(&[id], now);
        }
    }

    /// Whether a path takes chunks now.
    pub fn is_awake(&self, id: PathId, now: Duration) -> bool {
        let path = self.paths.get(&id);
        path.is_some_and(|path| self.live == 0 || path.is_awake(now))
    }

    /// Whether there are more paths than the network has room for.
    pub fn is_scarce(&self) -> bool {
        let room = (QUEUE + self.trip).div_duration_f64(QUEUE);
        self.rate > 0.0 && self.rate * room < SCARCE * self.live as f64
    }

    /// What these paths carried came late: others have the chunks for a while.
    fn rest(&mut self, slow: &[PathId], now: Duration) {
        let most = if self.is_scarce() {
            REST_SCARCE
        } else {
            REST_MOST
        };
        for id in slow {
            if self.awake(now) <= AWAKE {
                return;
            }
            let Some(path) = self.paths.get_mut(id).filter(|path| path.is_awake(now)) else {
                continue;
            };
            path.rest(most, now);
        }
    }

    fn awake(&self, now: Duration) -> usize {
        let paths = self.paths.values();
        paths.filter(|path| path.is_awake(now)).count()
    }

    /// Where none is awake, one is woken: first one that has confirmed all that it was given, of those the
    /// one that has rested for the longest.
    fn keep_one_awake(&mut self, now: Duration) {
        let live = |path: &&mut Path| path.state == PathState::Live;
        if !self.paths.values().any(|path| path.is_awake(now))
            && let Some(next) = self
                .paths
                .values_mut()
                .filter(live)
                .min_by_key(|path| (path.given > path.confirmed, path.rests()))
        {
            next.wake();
        }
    }

    /// Offers the unacknowledged chunks of a path to others and says every state again.
    fn rescue(&mut self, id: PathId) {
        for (comm, send) in &mut self.sends {
            let base = send.base;
            for (index, message) in send.messages.iter_mut().enumerate() {
                if message.give_back(id) {
                    // In front: what was sent before is older than what was not.
                    self.ready.push_front((*comm, base + index as u64));
                }
            }
        }
        self.backlog = self
            .sends
            .values()
            .flat_map(|send| &send.messages)
            .map(|message| message.backlog())
            .sum();
        self.resync();
    }

    fn resync(&mut self) {
        for (side, comm) in &self.closing {
            self.unsaid.push_back(match side {
                Side::Send => Statement::CloseSend(*comm),
                Side::Receive => Statement::CloseReceive(*comm),
            });
        }
        for (comm, send) in &self.sends {
            if send.opening.is_some() {
                self.unsaid.push_back(Statement::Open(*comm));
            }
        }
        for (comm, receive) in &mut self.receives {
            for (index, message) in receive.messages.iter().enumerate() {
                let number = receive.floor + index as u64;
                if message.refused {
                    self.unsaid.push_back(Statement::Refuse(*comm, number));
                } else if message.room.is_some() && !message.complete {
                    self.unsaid.push_back(Statement::Credit(*comm, number));
                }
            }
            if !std::mem::replace(&mut receive.ack_queued, true) {
                self.unsaid.push_back(Statement::Ack(*comm));
            }
        }
    }

    // ---- time ----

    /// When [`Lane::on_time`] is next needed.
    pub fn deadline(&self) -> Option<Duration> {
        let paths = self.paths.values().map(Path::deadline).min();
        let patience = self
            .pathless
            .filter(|_| !self.is_idle())
            .map(|since| since + self.config.patience);
        paths.into_iter().chain(patience).min()
    }

    /// Lets time pass.
    pub fn on_time(&mut self, now: Duration) {
        let (mut suspected, mut died) = (Vec::new(), Vec::new());
        for (id, path) in &mut self.paths {
            match path.on_time(now) {
                Some(Change::Suspected) => suspected.push(*id),
                Some(Change::Died) => died.push(*id),
                None => {}
            }
        }
        if !suspected.is_empty() {
            self.count_live();
        }
        let trips = self.paths.values().map(|path| path.rtt);
        self.trip = trips
            .filter(|trip| !trip.is_zero())
            .min()
            .unwrap_or_default();
        let scarce = self.is_scarce();
        for id in suspected {
            self.events.push_back(Event::Suspected(id));
            if self.live > 0 {
                self.rescue(id);
            }
            // Where it carries again.
            if let Some(path) = self.paths.get_mut(&id).filter(|_| scarce) {
                path.rest(REST_SCARCE, now);
            }
        }
        self.keep_one_awake(now);
        for id in died {
            self.events.push_back(Event::Died(id));
            self.path_down(id, now);
        }
        self.offer_late(now);
        if let Some(since) = self.pathless
            && now >= since + self.config.patience
            && !self.is_idle()
        {
            self.pathless = Some(now);
            self.fail_all(Why::NoPath(now - since));
        }
    }

    /// The driver knows that the peer's process has ended. Where a path is there, it was mistaken.
    pub fn peer_ended(&mut self) {
        if self.paths.is_empty() {
            self.fail_all(Why::PeerEnded);
        }
    }

    fn fail_all(&mut self, why: Why) {
        let sends = self.sends.drain().map(|(comm, _)| (Side::Send, comm));
        let receives = self.receives.drain().map(|(comm, _)| (Side::Receive, comm));
        let lost: Vec<_> = sends.chain(receives).collect();
        for (side, comm) in lost {
            self.events.push_back(Event::Failed { comm, side, why });
            // Should the peer come back, it must not wait for us.
            self.closing.insert((side, comm));
        }
    }

    /// Offers pieces that should have arrived long since to other paths. One that waits on a path that
    /// moves will come: it goes again only where nothing else is to be sent, so that a message never
    /// waits for a path that is much slower than the rest.
    fn offer_late(&mut self, now: Duration) {
        if self.paths.len() < 2 {
            return;
        }
        let paths = &self.paths;
        let standing = |id: PathId| {
            let path = paths.get(&id)?;
            Some((path.confirmed, now >= path.moved + LATE))
        };
        let pace = Pace {
            rate: self.rate,
            trip: self.trip,
        };
        let pace = (self.ready.is_empty() && self.rate > 0.0).then_some(pace);
        let scarce = self.is_scarce();
        let mut rest = Vec::new();
        for (comm, send) in &mut self.sends {
            let base = send.base;
            for (index, message) in send.messages.iter_mut().enumerate() {
                let before = message.backlog();
                if !message.done && message.offer_late(pace, now, standing, &mut rest) {
                    self.late += 1;
                    self.backlog += message.backlog() - before;
                    self.ready.push_front((*comm, base + index as u64));
                }
            }
        }
        // A lost tail alone is no reason: where there is room for all paths, its own will carry again.
        rest.retain(|id| scarce || standing(*id).is_some_and(|(_, still)| !still));
        self.rest(&rest, now);
    }

    /// A path takes a frame: as it is to be sent.
    fn hand(&mut self, id: PathId, frame: Frame, now: Duration) -> Option<Frame> {
        let path = self.paths.get_mut(&id)?;
        let before = path.given;
        let frame = path.on_sent(frame, now);
        self.ahead += path.given - before;
        Some(frame)
    }

    /// Messages of which a part came late and was sent again.
    pub fn late(&self) -> u64 {
        self.late
    }

    fn count_live(&mut self) {
        let live = |path: &&Path| path.state == PathState::Live;
        self.live = self.paths.values().filter(live).count();
    }

    /// What happened, oldest first.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
