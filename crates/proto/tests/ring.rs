//! NCCL's ring of two ranks over a network of first-in-first-out queues, in virtual time: what is lost
//! between its steps.
//!
//! A rank has some workers, each with flows of its own, and each looks at them only now and then (it
//! copies, or naps): reads what has come, pulls what may go. Both directions carry data, so what a
//! receiver says stands in the queue behind it. The GPU is a clock, as in `evener bench net --pattern
//! ring`, which drives the same pattern over real sockets.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::VecDeque;
use std::time::Duration;

use evener_proto::ahead::Ahead;
use evener_proto::path::Report;
use evener_proto::teams::EPOCH;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId};

const STEP: Duration = Duration::from_micros(5);
/// One way, without queues.
const LATENCY: Duration = Duration::from_micros(40);
/// As the engine does.
const LOOK: Duration = Duration::from_micros(100);
const HELD: f64 = 128.0 * 1024.0;

const CHUNK: u64 = 2 << 20;
const DEPTH: usize = 4;

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What is between the ranks. Rates in bytes a second.
#[derive(Clone, Copy)]
struct Network {
    paths: usize,
    rate: f64,
    flows: usize,
    workers: usize,
    /// Between two looks of a worker at its flows.
    turn: Duration,
    /// By how much what is reported of a flow's rate may be wrong.
    noise: f64,
}

/// One direction of one connection.
struct Flow {
    path: usize,
    /// Given and not known to have arrived.
    held: f64,
    /// Arrived, as far as the sender knows.
    confirmed: f64,
    reported: f64,
    busy: f64,
    /// At the receiver, not read.
    inbox: VecDeque<Frame>,
}

struct Worker {
    ahead: Ahead,
    looked: Duration,
    seen: f64,
    next: Duration,
    asked: u128,
}

/// What the GPU does with a slice.
#[derive(Clone, Copy)]
struct Turn {
    receives: bool,
    sends: bool,
    length: u64,
}

#[derive(Default)]
struct Channel {
    turns: VecDeque<Turn>,
    until: Option<Duration>,
    /// Slices to post, and those in flight (whether finished): of receives and of sends.
    flying: [VecDeque<(u64, bool)>; 2],
    arrived: usize,
    consumed: usize,
    posted: usize,
    lengths: Vec<u64>,
}

struct Rank {
    lane: Lane,
    workers: Vec<Worker>,
    /// What it sends over.
    flows: Vec<Flow>,
    channels: Vec<Channel>,
}

struct Ring {
    network: Network,
    ranks: [Rank; 2],
    /// Of each rank's outgoing paths: frames, flow and bytes left.
    queues: [Vec<VecDeque<(Frame, usize, f64)>>; 2],
    /// To which rank, over which flow.
    air: VecDeque<(Duration, usize, usize, Frame)>,
    /// The kernel's acknowledgements.
    known: Vec<(Duration, usize, usize, f64)>,
    now: Duration,
    seed: u64,
}

fn rank(network: Network, channels: usize, seed: &mut u64, which: u64) -> Rank {
    let config = LaneConfig {
        eager_slots: 4,
        eager_bytes: 16 << 10,
        patience: Duration::from_secs(60),
    };
    let mut lane = Lane::new(config, Duration::ZERO);
    for flow in 0..network.flows as u64 {
        lane.path_up(PathId(flow), Duration::ZERO);
    }
    for channel in 0..channels as u64 {
        // A rank's sending comms are the other's receiving ones.
        lane.add_send(channel * 2 + which, None, Duration::ZERO);
        lane.add_receive(channel * 2 + 1 - which, Duration::ZERO);
    }
    let flow = |index: usize| Flow {
        path: if index < network.paths {
            index
        } else {
            random(seed) as usize % network.paths
        },
        held: 0.0,
        confirmed: 0.0,
        reported: 0.0,
        busy: 0.0,
        inbox: VecDeque::new(),
    };
    let worker = |index: usize| Worker {
        ahead: Ahead::default(),
        looked: Duration::ZERO,
        seen: 0.0,
        next: network.turn * index as u32 / network.workers as u32,
        asked: 0,
    };
    Rank {
        lane,
        workers: (0..network.workers).map(worker).collect(),
        flows: (0..network.flows).map(flow).collect(),
        channels: (0..channels).map(|_| Channel::default()).collect(),
    }
}

impl Ring {
    fn new(network: Network, channels: usize, mut seed: u64) -> Ring {
        let ranks = [0, 1].map(|which| rank(network, channels, &mut seed, which));
        let queues = [0, 1].map(|_| vec![VecDeque::new(); network.paths]);
        Ring {
            network,
            ranks,
            queues,
            air: VecDeque::new(),
            known: Vec::new(),
            now: Duration::ZERO,
            seed,
        }
    }

    /// One all-reduce: bytes a second.
    fn all_reduce(&mut self, bytes: u64) -> f64 {
        let began = self.now;
        for rank in &mut self.ranks {
            let share = bytes / rank.channels.len() as u64;
            for channel in &mut rank.channels {
                let mut left = share;
                channel.lengths.clear();
                (channel.arrived, channel.consumed, channel.posted) = (0, 0, 0);
                while left > 0 {
                    let chunk = left.div_ceil(2).min(CHUNK);
                    left -= (2 * chunk).min(left);
                    for (receives, sends) in [(false, true), (true, true), (true, false)] {
                        for length in [chunk / 2, chunk - chunk / 2] {
                            channel.turns.push_back(Turn {
                                receives,
                                sends,
                                length,
                            });
                            if receives {
                                channel.lengths.push(length);
                            }
                        }
                    }
                }
            }
        }
        let over = |rank: &Rank| rank.channels.iter().all(|one| one.turns.is_empty());
        while !self.ranks.iter().all(over) {
            self.step();
            assert!(self.now < began + Duration::from_secs(5), "no end");
        }
        bytes as f64 / (self.now - began).as_secs_f64()
    }

    fn step(&mut self) {
        for which in 0..2 {
            self.compute(which);
            for worker in 0..self.network.workers {
                if self.now >= self.ranks[which].workers[worker].next {
                    self.ranks[which].workers[worker].next = self.now + self.network.turn;
                    self.read(which, worker);
                    self.pull(which, worker);
                }
            }
            self.carry(which);
        }
        self.now += STEP;
        while self.air.front().is_some_and(|one| one.0 <= self.now) {
            let (_, to, flow, frame) = self.air.pop_front().unwrap();
            self.ranks[1 - to].flows[flow].inbox.push_back(frame);
        }
        let now = self.now;
        let ranks = &mut self.ranks;
        self.known.retain(|(when, which, flow, bytes)| {
            if *when <= now {
                let flow = &mut ranks[*which].flows[*flow];
                flow.held -= bytes;
                flow.confirmed += bytes;
            }
            *when > now
        });
        if now.as_micros().is_multiple_of(4000) {
            self.report();
        }
    }

    /// The GPU, and NCCL's thread.
    fn compute(&mut self, which: usize) {
        let (now, rank) = (self.now, &mut self.ranks[which]);
        for (index, channel) in rank.channels.iter_mut().enumerate() {
            while let Some(turn) = channel.turns.front().copied() {
                match channel.until {
                    None => {
                        let arrived = !turn.receives || channel.arrived > channel.consumed;
                        let room = !turn.sends || channel.flying[1].len() < DEPTH;
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
                            let comm = (index * 2 + which) as u64;
                            let number = rank.lane.send(comm, turn.length).unwrap();
                            channel.flying[1].push_back((number, false));
                        }
                    }
                    Some(_) => break,
                }
            }
            while channel.posted < channel.lengths.len().min(channel.consumed + DEPTH) {
                let comm = (index * 2 + 1 - which) as u64;
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
            let channel = &mut rank.channels[comm as usize / 2];
            for one in &mut channel.flying[side] {
                one.1 |= one.0 == message;
            }
            while channel.flying[side].front().is_some_and(|one| one.1) {
                channel.flying[side].pop_front();
                channel.arrived += usize::from(side == 0);
            }
        }
    }

    fn read(&mut self, which: usize, worker: usize) {
        for flow in (worker..self.network.flows).step_by(self.network.workers) {
            while let Some(frame) = self.ranks[1 - which].flows[flow].inbox.pop_front() {
                let lane = &mut self.ranks[which].lane;
                lane.receive(PathId(flow as u64), &frame, self.now).unwrap();
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
                self.events(which);
            }
        }
    }

    fn pull(&mut self, which: usize, worker: usize) {
        let now = self.now;
        let rank = &mut self.ranks[which];
        let own: Vec<usize> = (worker..self.network.flows)
            .step_by(self.network.workers)
            .collect();
        let state = &mut rank.workers[worker];
        if now >= state.looked + LOOK {
            state.looked = now;
            let confirmed: f64 = own.iter().map(|flow| rank.flows[*flow].confirmed).sum();
            state.ahead.count((confirmed - state.seen) as u64, now);
            state.seen = confirmed;
            for flow in &own {
                let held = rank.flows[*flow].held as u64;
                rank.lane.delivered(PathId(*flow as u64), held, now);
            }
        }
        let epoch = now.as_nanos() / EPOCH.as_nanos();
        if epoch != state.asked {
            state.asked = epoch;
            for flow in &own {
                rank.lane.ask(PathId(*flow as u64));
            }
        }
        for flow in &own {
            let id = PathId(*flow as u64);
            while let Some(frame) = rank.lane.transmit_own(id, now) {
                rank.flows[*flow].held += 48.0;
                let path = rank.flows[*flow].path;
                self.queues[which][path].push_back((frame, *flow, 48.0));
            }
        }
        let limit = state.ahead.limit(Some(LATENCY * 2), self.network.workers) as f64;
        let mut pulled = vec![0.0; self.network.flows];
        loop {
            let ahead: f64 = own.iter().map(|flow| rank.flows[*flow].held).sum();
            let open = own.iter().filter(|flow| pulled[**flow] < HELD);
            let wait = |flow: &usize| {
                let held = rank.flows[*flow].held as u64;
                rank.lane.wait(PathId(*flow as u64), held)
            };
            let Some(flow) = open.copied().min_by_key(wait) else {
                return;
            };
            let id = PathId(flow as u64);
            let frame = if ahead >= limit {
                rank.lane.transmit_control(id, now)
            } else {
                rank.lane.transmit(id, now)
            };
            let Some(frame) = frame else {
                return;
            };
            let bytes = 48.0 + f64::from(frame.payload());
            pulled[flow] += bytes;
            rank.flows[flow].held += bytes;
            let path = rank.flows[flow].path;
            self.queues[which][path].push_back((frame, flow, bytes));
        }
    }

    fn carry(&mut self, which: usize) {
        let step = STEP.as_secs_f64();
        for path in 0..self.network.paths {
            let back: f64 = self.queues[1 - which][path].iter().map(|one| one.2).sum();
            let back = Duration::from_secs_f64(back / self.network.rate);
            let queue = &mut self.queues[which][path];
            let mut left = self.network.rate * step;
            while left > 0.0
                && let Some((frame, flow, bytes)) = queue.front_mut()
            {
                let part = left.min(*bytes);
                *bytes -= part;
                left -= part;
                let at = self.now + LATENCY;
                self.known.push((at + LATENCY + back, which, *flow, part));
                if *bytes <= 0.0 {
                    self.air.push_back((at, 1 - which, *flow, *frame));
                    queue.pop_front();
                }
            }
        }
        for flow in &mut self.ranks[which].flows {
            flow.busy += if flow.held > 0.0 { step } else { 0.0 };
        }
    }

    /// What the kernel tells of each flow.
    fn report(&mut self) {
        for rank in &mut self.ranks {
            for (index, flow) in rank.flows.iter_mut().enumerate() {
                let wrong = (random(&mut self.seed) % 1000) as f64 / 500.0 - 1.0;
                let rate = (flow.confirmed - flow.reported) / flow.busy.max(1e-9);
                let rate = (rate > 0.0).then_some(rate * (1.0 + self.network.noise * wrong));
                (flow.reported, flow.busy) = (flow.confirmed, 0.0);
                let report = Report {
                    unconfirmed: flow.held > 0.0,
                    advanced: true,
                    rtt: Some(LATENCY * 2),
                    rate,
                };
                rank.lane.report(PathId(index as u64), &report, self.now);
            }
            rank.lane.on_time(self.now);
        }
    }
}

/// The share of the network's sum that all-reduces of this size get, after some to warm up.
fn share(network: Network, bytes: u64, seed: u64) -> f64 {
    let mut ring = Ring::new(network, 2, seed);
    for _ in 0..12 {
        ring.all_reduce(16 << 20);
    }
    let speed: f64 = (0..3).map(|_| ring.all_reduce(bytes)).sum::<f64>() / 3.0;
    let way = |id: &PathId| ring.ranks[0].flows[id.0 as usize].path;
    let teams = ring.ranks[0].lane.teams();
    let teams: Vec<Vec<usize>> = teams.map(|team| team.iter().map(way).collect()).collect();
    println!("teams of {teams:?}");
    speed / (network.rate * network.paths as f64)
}

const ONE: Network = Network {
    paths: 1,
    rate: 25e9 / 8.0,
    flows: 16,
    workers: 4,
    turn: Duration::from_micros(50),
    noise: 0.33,
};
const FOUR: Network = Network {
    paths: 4,
    rate: 6.25e9 / 8.0,
    ..ONE
};

#[test]
fn a_ring_keeps_one_path_busy() {
    for (workers, turn) in [(1, 30), (4, 50), (4, 80), (8, 50)] {
        let network = Network {
            workers,
            turn: Duration::from_micros(turn),
            ..ONE
        };
        let share = share(network, 64 << 20, 1);
        println!("{workers} workers, {turn} us: {share:.3}");
        assert!(share > 0.9, "{workers} workers, {turn} us: {share:.3}");
    }
}

#[test]
fn a_ring_keeps_four_hidden_paths_busy() {
    for seed in 1..=5 {
        let share = share(FOUR, 64 << 20, seed);
        println!("seed {seed}: {share:.3}");
        assert!(share > 0.05, "seed {seed}: {share:.3}");
    }
}
