//! The ranks: their GPU, and workers that read and pull as the engine's do.

use std::time::Duration;

use evener_proto::ahead::Ahead;
use evener_proto::path::Report;
use evener_proto::wire::HEADER;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId};

use super::fabric::{Fabric, Flow, LATENCY, Network, STEP, random};
use super::nccl::Channel;

/// Between two all-reduces.
const PAUSE: Duration = Duration::from_micros(200);
/// Bytes per second that a worker copies.
const COPY: f64 = 6e9;
/// As the engine does.
const LOOK: Duration = Duration::from_micros(50);
const HELD: f64 = 128.0 * 1024.0;
const BITE: f64 = 128.0 * 1024.0;

struct Worker {
    ahead: Ahead,
    seen: f64,
    looked: Duration,
    /// When it read what was there.
    read: Duration,
    next: Duration,
}

struct Rank {
    lane: Lane,
    workers: Vec<Worker>,
    /// What it sends over.
    flows: Vec<Flow>,
    channels: Vec<Channel>,
}

pub struct Ring {
    network: Network,
    ranks: [Rank; 2],
    fabric: Fabric,
    now: Duration,
    reported: Duration,
    seed: u64,
}

fn rank(network: Network, seed: &mut u64, which: u64) -> Rank {
    let config = LaneConfig {
        eager_slots: 4,
        eager_bytes: 16 << 10,
        patience: Duration::from_secs(60),
    };
    let mut lane = Lane::new(config, Duration::ZERO);
    for flow in 0..network.flows as u64 {
        lane.path_up(PathId(flow), Duration::ZERO);
    }
    for channel in 0..network.channels as u64 {
        // A rank's sending comms are the other's receiving ones.
        lane.add_send(channel * 2 + which, None, Duration::ZERO);
        lane.add_receive(channel * 2 + 1 - which, Duration::ZERO);
    }
    // The first on each path, in any order: that there is a flow on each is the dialler's business.
    let shift = random(seed) as usize;
    let flow = |index: usize| {
        Flow::new(if index < network.paths {
            (index + shift) % network.paths
        } else {
            random(seed) as usize % network.paths
        })
    };
    let worker = |index: usize| Worker {
        ahead: Ahead::default(),
        seen: 0.0,
        looked: Duration::ZERO,
        read: Duration::ZERO,
        next: network.turn * index as u32 / network.workers as u32,
    };
    Rank {
        lane,
        workers: (0..network.workers).map(worker).collect(),
        flows: (0..network.flows).map(flow).collect(),
        channels: network.algorithm.channels(network.channels, which as usize),
    }
}

impl Ring {
    pub fn new(network: Network, mut seed: u64) -> Ring {
        let ranks = [0, 1].map(|which| rank(network, &mut seed, which));
        Ring {
            network,
            ranks,
            fabric: Fabric::new(network, &mut seed),
            now: Duration::ZERO,
            reported: Duration::ZERO,
            seed,
        }
    }

    /// One all-reduce: bytes per second.
    pub fn all_reduce(&mut self, bytes: u64) -> f64 {
        let began = self.now;
        let share = bytes / self.network.channels as u64;
        for rank in &mut self.ranks {
            for channel in &mut rank.channels {
                channel.begin(share);
            }
        }
        let over = |rank: &Rank| rank.channels.iter().all(|one| one.turns.is_empty());
        while !self.ranks.iter().all(over) {
            self.step();
            assert!(self.now < began + Duration::from_secs(5), "no end");
        }
        let speed = bytes as f64 / (self.now - began).as_secs_f64();
        let until = self.now + PAUSE;
        while self.now < until {
            self.step();
        }
        speed
    }

    fn step(&mut self) {
        for which in 0..2 {
            self.compute(which);
            for worker in 0..self.network.workers {
                if self.now >= self.ranks[which].workers[worker].next {
                    let copied = self.read(which, worker) + self.pull(which, worker);
                    let jitter = random(&mut self.seed) % 1000;
                    let mut pause = self.network.turn.as_secs_f64() * (0.5 + jitter as f64 / 1e3);
                    if random(&mut self.seed).is_multiple_of(200) {
                        // Not scheduled.
                        pause += 300e-6;
                    }
                    let turn = Duration::from_secs_f64(pause + copied / COPY);
                    self.ranks[which].workers[worker].next = self.now + turn;
                }
            }
            let flows = &mut self.ranks[which].flows;
            self.fabric.send(which, flows, self.now);
            let back = &self.ranks[1 - which].flows;
            self.fabric.carry(which, back, self.now);
        }
        self.now += STEP;
        let now = self.now;
        let [first, second] = &mut self.ranks;
        self.fabric
            .arrive([&mut first.flows, &mut second.flows], now);
        if now >= self.reported + Duration::from_millis(4) {
            self.reported = now;
            self.report();
        }
    }

    /// The GPU, and NCCL's thread.
    fn compute(&mut self, which: usize) {
        let (now, rank) = (self.now, &mut self.ranks[which]);
        let depth = self.network.algorithm.depth();
        for channel in &mut rank.channels {
            while let Some(turn) = channel.turns.front().copied() {
                match channel.until {
                    None => {
                        let arrived = !turn.receives || channel.arrived > channel.consumed;
                        let room = !turn.sends || channel.flying[1].len() < depth;
                        if !arrived || !room {
                            break;
                        }
                        let copy = Duration::from_secs_f64(turn.length as f64 / 40e9);
                        channel.until = Some(now + Duration::from_micros(5) + copy);
                    }
                    Some(until) if until <= now => {
                        channel.until = None;
                        channel.turns.pop_front();
                        channel.consumed += usize::from(turn.receives);
                        if turn.sends {
                            let comm = (channel.comm * 2 + which) as u64;
                            let number = rank.lane.send(comm, turn.length).unwrap();
                            channel.flying[1].push_back((number, false));
                        }
                    }
                    Some(_) => break,
                }
            }
            while channel.posted < channel.lengths.len().min(channel.consumed + depth) {
                let comm = (channel.comm * 2 + 1 - which) as u64;
                let room = channel.lengths[channel.posted];
                let number = rank.lane.post(comm, room).unwrap();
                channel.flying[0].push_back((number, false));
                channel.posted += 1;
            }
        }
    }

    fn events(&mut self, which: usize) {
        let rank = &mut self.ranks[which];
        while let Some(event) = rank.lane.event() {
            let (side, comm, message) = match event {
                Event::Received { comm, message, .. } => (0, comm, message),
                Event::Sent { comm, message, .. } => (1, comm, message),
                _ => continue,
            };
            let mine = |one: &&mut Channel| one.comm == comm as usize / 2;
            for channel in rank.channels.iter_mut().filter(mine) {
                for one in &mut channel.flying[side] {
                    one.1 |= one.0 == message;
                }
                while channel.flying[side].front().is_some_and(|one| one.1) {
                    channel.flying[side].pop_front();
                    channel.arrived += usize::from(side == 0);
                }
            }
        }
    }

    /// Reads: bytes.
    fn read(&mut self, which: usize, worker: usize) -> f64 {
        let mut read = 0.0;
        let state = &mut self.ranks[which].workers[worker];
        let since = std::mem::replace(&mut state.read, self.now);
        for flow in (worker..self.network.flows).step_by(self.network.workers) {
            while let Some(segment) = self.ranks[1 - which].flows[flow].inbox.pop_front() {
                read += segment.bytes;
                let lane = &mut self.ranks[which].lane;
                for frame in segment.heads {
                    lane.receive(PathId(flow as u64), &frame, since, self.now)
                        .unwrap();
                }
                for frame in segment.tails {
                    if let Frame::Chunk {
                        comm,
                        message,
                        offset,
                        length,
                        ..
                    } = frame
                    {
                        lane.filled(comm, message, offset, length);
                    }
                }
                self.events(which);
            }
        }
        read
    }

    fn give(&mut self, which: usize, flow: usize, frame: Frame) -> f64 {
        let bytes = (HEADER as u32 + frame.payload()) as f64;
        let flow = &mut self.ranks[which].flows[flow];
        flow.held += bytes;
        flow.truly += bytes;
        flow.socket.push_back((frame, bytes));
        bytes
    }

    /// As the engine does: bytes.
    fn pull(&mut self, which: usize, worker: usize) -> f64 {
        let now = self.now;
        let own: Vec<usize> = (worker..self.network.flows)
            .step_by(self.network.workers)
            .collect();
        let rank = &mut self.ranks[which];
        let state = &mut rank.workers[worker];
        if now >= state.looked + LOOK {
            state.looked = now;
            let confirmed: f64 = own.iter().map(|flow| rank.flows[*flow].confirmed).sum();
            state.ahead.count((confirmed - state.seen) as u64, now);
            state.seen = confirmed;
            for flow in &own {
                let flow_ = &mut rank.flows[*flow];
                flow_.held = flow_.truly;
                rank.lane
                    .delivered(PathId(*flow as u64), flow_.held as u64, now);
            }
        }
        let limit = state.ahead.limit(Some(LATENCY * 2), self.network.workers) as f64;
        let mut any = 0.0;
        for flow in &own {
            let id = PathId(*flow as u64);
            while let Some(frame) = self.ranks[which].lane.transmit_own(id, now) {
                any += self.give(which, *flow, frame);
            }
        }
        let mut pulled = vec![0.0; self.network.flows];
        loop {
            let rank = &mut self.ranks[which];
            if !rank.lane.has_frames() || pulled.iter().sum::<f64>() > 8.0 * BITE {
                return any + pulled.iter().sum::<f64>();
            }
            let fill = |flow: &usize| {
                let held = rank.flows[*flow].held as u64;
                rank.lane.fill(PathId(*flow as u64), held)
            };
            let open = own.iter().filter(|flow| pulled[**flow] < 8.0 * HELD);
            let Some(flow) = open.copied().min_by(|a, b| fill(a).total_cmp(&fill(b))) else {
                return any + pulled.iter().sum::<f64>();
            };
            let ahead: f64 = own.iter().map(|flow| rank.flows[*flow].held).sum();
            let full = fill(&flow) >= 1.0 || ahead >= limit;
            for flow in &own {
                let id = PathId(*flow as u64);
                if rank.lane.fill(id, rank.flows[*flow].held as u64) >= 1.0 {
                    rank.lane.is_full(id);
                }
            }
            let id = PathId(flow as u64);
            let frame = if full {
                rank.lane.transmit_statement(id, now)
            } else {
                rank.lane.transmit(id, now)
            };
            let Some(frame) = frame else {
                return any + pulled.iter().sum::<f64>();
            };
            pulled[flow] += self.give(which, flow, frame);
        }
    }

    /// What the kernel tells of each flow.
    fn report(&mut self) {
        for rank in &mut self.ranks {
            for (index, flow) in rank.flows.iter_mut().enumerate() {
                let report = Report {
                    unconfirmed: flow.truly > 0.0,
                    advanced: true,
                    lossy: false,
                    rtt: Some(LATENCY * 2),
                    rate: None,
                };
                let path = PathId(index as u64);
                rank.lane.report(path, &report, self.now);
                rank.lane.delivered(path, flow.truly as u64, self.now);
            }
            rank.lane.on_time(self.now);
        }
    }
}
