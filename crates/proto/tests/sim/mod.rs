//! Two lanes and a network between them, on a virtual clock. Latency, rate and faults of a path are
//! plain fields; [`World::run`] jumps from one thing that happens to the next; nothing sleeps.
//!
//! A path is a pair of queues in order, like a TCP connection: it loses nothing while it is up, and
//! everything that is in it when it ends. While it is `black` nothing arrives in either direction; what
//! was sent arrives when it no longer is, as a kernel would send it again.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use evener_proto::line::LINE;
use evener_proto::path::Report;
use evener_proto::wire::HEADER;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId, PathState, Place, Side};

pub const EAGER_BYTES: u64 = 1024;

/// What a byte of a message must be.
pub fn byte(comm: u64, message: u64, offset: u64) -> u8 {
    (comm * 31 + message * 17 + offset * 7 + (offset >> 8)) as u8
}

pub struct Wire {
    pub latency: Duration,
    /// Bytes per second.
    pub rate: f64,
    pub black: bool,
    /// For each direction: frames with the time of their arrival, and when the wire is free.
    queue: [VecDeque<(Duration, Frame)>; 2],
    free: [Duration; 2],
    /// Which ends still think that it is up.
    open: [bool; 2],
}

struct Buffer {
    bytes: Vec<u8>,
    done: bool,
}

pub struct World {
    pub now: Duration,
    pub lanes: [Lane; 2],
    pub wires: BTreeMap<PathId, Wire>,
    next_path: u64,
    /// Receive buffers, by end, comm and message.
    buffers: HashMap<(usize, u64, u64), Buffer>,
    eager: HashMap<(usize, u64, usize), Vec<u8>>,
    pub sent: HashMap<(usize, u64, u64), u64>,
    pub received: HashMap<(usize, u64, u64), u64>,
    pub failed: Vec<(usize, u64, Side)>,
    pub died: Vec<(usize, PathId)>,
    pub suspected: usize,
    pub opened: Vec<(usize, u64, bool)>,
    /// Re-open a path that ended after this long.
    pub redial: Option<Duration>,
    redials: Vec<(Duration, Duration, f64)>,
    pub chunk_bytes: u64,
    /// Chunks that began or ended within a line of a posted buffer.
    pub torn: u64,
    /// The ends know what each path has delivered, as from a kernel.
    pub reports: bool,
}

impl World {
    pub fn new(paths: usize, latency: Duration, rate: f64) -> Self {
        let config = LaneConfig {
            eager_slots: 2,
            eager_bytes: EAGER_BYTES,
            patience: Duration::from_secs(20),
        };
        let lane = || Lane::new(config, Duration::ZERO);
        let mut world = World {
            now: Duration::ZERO,
            lanes: [lane(), lane()],
            wires: BTreeMap::new(),
            next_path: 0,
            buffers: HashMap::new(),
            eager: HashMap::new(),
            sent: HashMap::new(),
            received: HashMap::new(),
            failed: Vec::new(),
            died: Vec::new(),
            suspected: 0,
            opened: Vec::new(),
            redial: None,
            redials: Vec::new(),
            chunk_bytes: 0,
            torn: 0,
            reports: false,
        };
        for _ in 0..paths {
            world.connect(latency, rate);
        }
        world
    }

    pub fn connect(&mut self, latency: Duration, rate: f64) -> PathId {
        self.next_path += 1;
        let id = PathId(self.next_path);
        self.wires.insert(
            id,
            Wire {
                latency,
                rate,
                black: false,
                queue: [VecDeque::new(), VecDeque::new()],
                free: [self.now; 2],
                open: [true; 2],
            },
        );
        for end in 0..2 {
            self.lanes[end].path_up(id, self.now);
        }
        id
    }

    /// A comm from end 0 to end 1 that is open on both.
    pub fn comm(&mut self, comm: u64) {
        self.lanes[1].add_receive(comm, self.now);
        self.lanes[0].add_send(comm, None, self.now);
    }

    pub fn send(&mut self, comm: u64, length: u64) -> Option<u64> {
        let number = self.lanes[0].send(comm, length);
        self.drain(0);
        number
    }

    pub fn post(&mut self, comm: u64, room: u64) -> Option<u64> {
        let message = self.lanes[1].post(comm, room)?;
        // The buffer exists before the lane may write to it: an eager message is delivered here.
        self.buffers.insert(
            (1, comm, message),
            Buffer {
                bytes: vec![0xee; room as usize],
                done: false,
            },
        );
        self.drain(1);
        Some(message)
    }

    /// Cuts a path: both ends learn of it at once, as from a reset.
    pub fn reset(&mut self, id: PathId) {
        for end in 0..2 {
            self.end_path(end, id);
        }
    }

    fn end_path(&mut self, end: usize, id: PathId) {
        self.lanes[end].path_down(id, self.now);
        self.close_wire(end, id);
        self.drain(end);
    }

    fn close_wire(&mut self, end: usize, id: PathId) {
        let Some(wire) = self.wires.get_mut(&id) else {
            return;
        };
        wire.open[end] = false;
        wire.queue[1 - end].clear();
        if !wire.black {
            // The other end's kernel hears a FIN or a reset.
            wire.queue[end].clear();
            let other = wire.open[1 - end];
            wire.open[1 - end] = false;
            if other {
                self.lanes[1 - end].path_down(id, self.now);
                self.drain(1 - end);
            }
        }
        if let Some(wire) = self.wires.get(&id)
            && wire.open == [false; 2]
        {
            let (latency, rate) = (wire.latency, wire.rate);
            self.wires.remove(&id);
            if let Some(wait) = self.redial {
                self.redials.push((self.now + wait, latency, rate));
            }
        }
    }

    fn drain(&mut self, end: usize) {
        while let Some(event) = self.lanes[end].event() {
            match event {
                Event::Sent {
                    comm,
                    message,
                    length,
                } => {
                    let again = self.sent.insert((end, comm, message), length);
                    assert_eq!(again, None, "sent twice: {comm} {message}");
                }
                Event::Received {
                    comm,
                    message,
                    length,
                } => self.complete(end, comm, message, length),
                Event::Deliver {
                    comm,
                    message,
                    slot,
                    length,
                } => {
                    let from = self.eager.get(&(end, comm, slot)).cloned();
                    if let Some(buffer) = self.buffers.get_mut(&(end, comm, message)) {
                        let length = length as usize;
                        if length > 0 {
                            buffer.bytes[..length].copy_from_slice(&from.unwrap()[..length]);
                        }
                    }
                    self.complete(end, comm, message, length);
                }
                Event::Failed { comm, side, .. } => self.failed.push((end, comm, side)),
                Event::Died(id) => {
                    self.died.push((end, id));
                    self.close_wire(end, id);
                }
                Event::Suspected(_) => self.suspected += 1,
                Event::Recovered(_) => {}
                Event::Open { comm, listener } => {
                    if listener == 7 {
                        self.lanes[end].add_receive(comm, self.now);
                        self.lanes[end].accept(comm);
                    } else {
                        self.lanes[end].decline(comm);
                    }
                }
                Event::Opened { comm, accepted } => self.opened.push((end, comm, accepted)),
            }
        }
    }

    fn complete(&mut self, end: usize, comm: u64, message: u64, length: u64) {
        let again = self.received.insert((end, comm, message), length);
        assert_eq!(again, None, "received twice: {comm} {message}");
        let buffer = self.buffers.get_mut(&(end, comm, message)).unwrap();
        assert!(!buffer.done);
        buffer.done = true;
        for (offset, got) in buffer.bytes[..length as usize].iter().enumerate() {
            assert_eq!(*got, byte(comm, message, offset as u64));
        }
        assert!(buffer.bytes[length as usize..].iter().all(|b| *b == 0xee));
    }

    fn arrive(&mut self, end: usize, id: PathId, frame: Frame) {
        self.lanes[end]
            .receive(id, &frame, self.now, self.now)
            .unwrap();
        self.drain(end);
        let Frame::Chunk {
            comm,
            message,
            offset,
            length,
            total,
            ..
        } = frame
        else {
            return;
        };
        let bytes: Vec<u8> = (0..u64::from(length))
            .map(|at| byte(comm, message, offset + at))
            .collect();
        let (start, stop) = (offset as usize, offset as usize + length as usize);
        match self.lanes[end].place(comm, message) {
            Place::Buffer => {
                let buffer = self.buffers.get_mut(&(end, comm, message)).unwrap();
                assert!(!buffer.done, "written after it was complete");
                let end = stop as u64;
                let whole = end == total || end.is_multiple_of(LINE);
                self.torn += u64::from(!whole || !offset.is_multiple_of(LINE));
                buffer.bytes[start..stop].copy_from_slice(&bytes);
            }
            Place::Eager(slot) => {
                let slot = self.eager.entry((end, comm, slot)).or_default();
                slot.resize(EAGER_BYTES as usize, 0);
                slot[start..stop].copy_from_slice(&bytes);
            }
            Place::Nowhere => {}
        }
        self.lanes[end].filled(comm, message, offset, length);
        self.drain(end);
    }

    /// Lets every path with room pull.
    fn pump(&mut self) {
        for end in 0..2 {
            loop {
                let mut moved = false;
                let ids: Vec<PathId> = self.wires.keys().copied().collect();
                for id in ids {
                    let wire = self.wires.get_mut(&id).unwrap();
                    // Room: what is queued would be sent within 100 us.
                    if !wire.open[end] || wire.free[end] > self.now + Duration::from_micros(100) {
                        continue;
                    }
                    let Some(frame) = self.lanes[end].transmit(id, self.now) else {
                        continue;
                    };
                    moved = true;
                    self.chunk_bytes += u64::from(frame.payload());
                    let bytes = HEADER as f64 + f64::from(frame.payload());
                    let start = wire.free[end].max(self.now);
                    wire.free[end] = start + Duration::from_secs_f64(bytes / wire.rate);
                    let at = wire.free[end] + wire.latency;
                    wire.queue[end].push_back((at, frame));
                }
                if !moved {
                    break;
                }
            }
        }
    }

    fn report(&mut self) {
        for (id, wire) in self.wires.iter().filter(|_| self.reports) {
            for (lane, free) in self.lanes.iter_mut().zip(wire.free) {
                let left = free.saturating_sub(self.now).as_secs_f64() * wire.rate;
                lane.delivered(*id, left as u64, self.now);
            }
        }
    }

    /// Runs until `done` or the time is over. Whether it was done.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&World) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.report();
            self.pump();
            if done(self) {
                return true;
            }
            let lit = self.wires.iter().filter(|(_, wire)| !wire.black);
            let arrivals = lit.flat_map(|(id, wire)| {
                (0..2).filter_map(|from| Some((wire.queue[from].front()?.0, *id, from)))
            });
            let arrival = arrivals.min();
            let room = self
                .wires
                .values()
                .flat_map(|wire| wire.free)
                .map(|free| free.saturating_sub(Duration::from_micros(100)))
                .filter(|at| *at > self.now)
                .min()
                .filter(|_| self.lanes.iter().any(Lane::has_work));
            let timers = self.lanes.iter().filter_map(Lane::deadline).min();
            let redial = self.redials.iter().map(|one| one.0).min();
            let next = [arrival.map(|one| one.0), room, timers, redial];
            let Some(next) = next.into_iter().flatten().min().filter(|at| *at <= end) else {
                self.now = end;
                return done(self);
            };
            self.now = self.now.max(next);
            self.report();
            if let Some((at, id, from)) = arrival
                && at <= self.now
            {
                let wire = self.wires.get_mut(&id).unwrap();
                let (_, frame) = wire.queue[from].pop_front().unwrap();
                if wire.open[1 - from] {
                    self.arrive(1 - from, id, frame);
                }
                continue;
            }
            let due = std::mem::take(&mut self.redials);
            for (at, latency, rate) in due {
                if at <= self.now {
                    self.connect(latency, rate);
                } else {
                    self.redials.push((at, latency, rate));
                }
            }
            for end in 0..2 {
                if self.lanes[end].deadline().is_some_and(|at| at <= self.now) {
                    for (id, wire) in self.wires.iter().filter(|_| self.reports) {
                        let report = Report {
                            unconfirmed: wire.free[end] > self.now,
                            advanced: true,
                            ..Report::default()
                        };
                        self.lanes[end].report(*id, &report, self.now);
                    }
                    self.lanes[end].on_time(self.now);
                    self.drain(end);
                }
            }
        }
    }

    pub fn states(&self, end: usize) -> Vec<Option<PathState>> {
        self.wires
            .keys()
            .map(|id| self.lanes[end].path_state(*id))
            .collect()
    }
}
