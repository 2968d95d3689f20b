//! NCCL's ring of two ranks, and its tree, over a network of first-in-first-out queues, in virtual
//! time: what is lost between their steps.
//!
//! Each direction of each connection takes one of the paths by chance. A path serves what comes to it
//! in order, 64 KiB at a time, as a kernel hands it out (where flows are capped, it serves them in turn:
//! see [`capped`]); both directions are full, so the kernel's
//! acknowledgements and what a receiver says stand in the queue of the way back. A connection sends
//! no more than its congestion window, which starts small and shrinks where a queue overflows; the
//! rest waits in its socket. A rank has some workers, each with connections of its own, and each looks
//! at them only now and then (it copies, naps, or is not scheduled): reads what has come, pulls what
//! may go. The GPU is a clock, as in `evener bench net --pattern ring`, which drives the same pattern
//! over real sockets: two channels or four, each with four slices of 1 MiB in flight (or eight of
//! 512 KiB: see [`nccl`]), a pause between all-reduces.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod capped;
mod nccl;

use std::collections::VecDeque;
use std::time::Duration;

use capped::Capped;
use evener_proto::ahead::Ahead;
use evener_proto::path::Report;
use evener_proto::wire::HEADER;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId};
use nccl::{Algorithm, Channel};

const STEP: Duration = Duration::from_micros(5);
/// One way, without queues.
const LATENCY: Duration = Duration::from_micros(40);
/// Between two all-reduces.
const PAUSE: Duration = Duration::from_micros(200);
/// A queue of the fabric drops what would wait longer.
const QUEUE: f64 = 2e-3;
/// What a kernel hands out at a time: as many packets of 1,448 bytes as 64 KiB hold.
const SEGMENT: f64 = 45.0 * 1448.0;
/// Bytes a second that a worker copies.
const COPY: f64 = 6e9;
/// As the engine does.
const LOOK: Duration = Duration::from_micros(50);
const HELD: f64 = 128.0 * 1024.0;
const BITE: f64 = 128.0 * 1024.0;

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
    /// Of each flow.
    cap: f64,
    flows: usize,
    workers: usize,
    /// Between two looks of a worker at its flows, if it has nothing to copy.
    turn: Duration,
    algorithm: Algorithm,
    channels: usize,
}

/// What travels: of which flow, bytes that are left, and the frames whose headers and whose last
/// bytes are in it.
struct Segment {
    flow: usize,
    bytes: f64,
    left: f64,
    heads: Vec<Frame>,
    tails: Vec<Frame>,
}

/// One direction of one connection.
struct Flow {
    path: usize,
    /// In its socket: frames, and what is left of each. Whether the first's header is gone.
    socket: VecDeque<(Frame, f64)>,
    begun: bool,
    window: f64,
    /// Sent and not known to have arrived.
    flying: f64,
    /// No window shrinks twice in a round trip.
    shrunk: Duration,
    slow: bool,
    /// Given and not known to have arrived, as of the last look.
    held: f64,
    confirmed: f64,
    /// The same, now.
    truly: f64,
    /// At the receiver, not read.
    inbox: VecDeque<Segment>,
}

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

struct Ring {
    network: Network,
    ranks: [Rank; 2],
    /// Of each rank's outgoing paths.
    queues: [Vec<VecDeque<Segment>>; 2],
    /// In their place, where flows are capped.
    capped: [Capped; 2],
    /// To which rank.
    air: VecDeque<(Duration, usize, Segment)>,
    /// The kernel's acknowledgements: when, whose, flow, bytes.
    known: Vec<(Duration, usize, usize, f64)>,
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
    let flow = |index: usize| Flow {
        path: if index < network.paths {
            (index + shift) % network.paths
        } else {
            random(seed) as usize % network.paths
        },
        socket: VecDeque::new(),
        begun: false,
        window: 14600.0,
        flying: 0.0,
        shrunk: Duration::ZERO,
        slow: true,
        held: 0.0,
        confirmed: 0.0,
        truly: 0.0,
        inbox: VecDeque::new(),
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
    fn new(network: Network, mut seed: u64) -> Ring {
        let ranks = [0, 1].map(|which| rank(network, &mut seed, which));
        let queues = [0, 1].map(|_| (0..network.paths).map(|_| VecDeque::new()).collect());
        Ring {
            network,
            ranks,
            queues,
            capped: [0, 1].map(|_| Capped::new(network, &mut seed)),
            air: VecDeque::new(),
            known: Vec::new(),
            now: Duration::ZERO,
            reported: Duration::ZERO,
            seed,
        }
    }

    /// One all-reduce: bytes a second.
    fn all_reduce(&mut self, bytes: u64) -> f64 {
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
            self.send(which);
            self.carry(which);
        }
        self.now += STEP;
        while self.air.front().is_some_and(|one| one.0 <= self.now) {
            let (_, to, segment) = self.air.pop_front().unwrap();
            self.ranks[1 - to].flows[segment.flow]
                .inbox
                .push_back(segment);
        }
        let now = self.now;
        let ranks = &mut self.ranks;
        self.known.retain(|(when, which, flow, bytes)| {
            if *when <= now {
                let flow = &mut ranks[*which].flows[*flow];
                if flow.flying >= flow.window - SEGMENT {
                    // What limits it is its window.
                    let more = if flow.slow {
                        *bytes
                    } else {
                        bytes * 1460.0 / flow.window
                    };
                    flow.window = (flow.window + more).min(4e6);
                }
                flow.truly -= bytes;
                flow.confirmed += bytes;
                flow.flying -= bytes;
            }
            *when > now
        });
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
                rank.lane.transmit_control(id, now)
            } else {
                rank.lane.transmit(id, now)
            };
            let Some(frame) = frame else {
                return any + pulled.iter().sum::<f64>();
            };
            pulled[flow] += self.give(which, flow, frame);
        }
    }

    /// What the kernel hands out.
    fn send(&mut self, which: usize) {
        for (index, flow) in self.ranks[which].flows.iter_mut().enumerate() {
            while flow.flying < flow.window && !flow.socket.is_empty() {
                let mut segment = Segment {
                    flow: index,
                    bytes: 0.0,
                    left: 0.0,
                    heads: Vec::new(),
                    tails: Vec::new(),
                };
                let most = SEGMENT.min((flow.window - flow.flying).max(1460.0));
                while segment.bytes < most
                    && let Some((frame, left)) = flow.socket.front_mut()
                {
                    let part = left.min(most - segment.bytes);
                    segment.bytes += part;
                    *left -= part;
                    if !std::mem::replace(&mut flow.begun, true) {
                        segment.heads.push(*frame);
                    }
                    if *left <= 0.0 {
                        segment.tails.push(*frame);
                        flow.begun = false;
                        flow.socket.pop_front();
                    }
                }
                segment.left = segment.bytes;
                flow.flying += segment.bytes;
                if self.network.cap < f64::MAX {
                    self.capped[which].push(segment);
                    continue;
                }
                let queue = &mut self.queues[which][flow.path];
                let waiting: f64 = queue.iter().map(|one| one.left).sum();
                if waiting > QUEUE * self.network.rate && self.now > flow.shrunk {
                    flow.shrunk = self.now + Duration::from_millis(2);
                    flow.window = (flow.window * 0.7).max(14600.0);
                    flow.slow = false;
                }
                queue.push_back(segment);
            }
        }
    }

    fn carry(&mut self, which: usize) {
        let step = STEP.as_secs_f64();
        if self.network.cap < f64::MAX {
            for segment in self.capped[which].carry(step) {
                let back = self.capped[1 - which].wait(segment.flow);
                self.arrive(which, segment, back);
            }
            return;
        }
        for path in 0..self.network.paths {
            let mut left = self.network.rate * step;
            while left > 0.0
                && let Some(segment) = self.queues[which][path].front_mut()
            {
                let part = left.min(segment.left);
                segment.left -= part;
                left -= part;
                if segment.left <= 0.0 {
                    let segment = self.queues[which][path].pop_front().unwrap();
                    let back = self.ranks[1 - which].flows[segment.flow].path;
                    let back: f64 = self.queues[1 - which][back]
                        .iter()
                        .map(|one| one.left)
                        .sum();
                    let back = Duration::from_secs_f64(back / self.network.rate);
                    self.arrive(which, segment, back);
                }
            }
        }
    }

    /// The network has carried a segment of this rank's; the kernel's acknowledgement waits so long on
    /// the way back.
    fn arrive(&mut self, which: usize, segment: Segment, back: Duration) {
        let at = self.now + LATENCY;
        let known = at + LATENCY + back;
        self.known.push((known, which, segment.flow, segment.bytes));
        self.air.push_back((at, 1 - which, segment));
    }

    /// What the kernel tells of each flow.
    fn report(&mut self) {
        for rank in &mut self.ranks {
            for (index, flow) in rank.flows.iter_mut().enumerate() {
                let report = Report {
                    unconfirmed: flow.truly > 0.0,
                    advanced: true,
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

/// The share of the network's sum that all-reduces of this size get, after some to warm up: enough
/// for windows to grow as far as they will.
fn share(network: Network, bytes: u64, seed: u64) -> f64 {
    let mut ring = Ring::new(network, seed);
    for _ in 0..12 {
        ring.all_reduce(64 << 20);
    }
    let count = (256 << 20) / bytes;
    let speed: f64 = (0..count).map(|_| ring.all_reduce(bytes)).sum::<f64>() / count as f64;
    speed / (network.rate * network.paths as f64)
}

const ONE: Network = Network {
    paths: 1,
    rate: 25e9 / 8.0,
    cap: f64::MAX,
    flows: 16,
    workers: 4,
    turn: Duration::from_micros(50),
    algorithm: Algorithm::Ring,
    channels: 2,
};
const FOUR: Network = Network {
    paths: 4,
    rate: 6.25e9 / 8.0,
    ..ONE
};

/// The shares of all-reduces of 64 MiB and of 256 MiB, over some hash seeds, as a ring and as a tree,
/// with two channels and four: the least of each size.
fn least(network: Network, seeds: u64) -> [f64; 2] {
    let mut least = [1.0f64; 2];
    for algorithm in [Algorithm::Ring, Algorithm::Tree] {
        for channels in [2, 4] {
            let network = Network {
                algorithm,
                channels,
                ..network
            };
            for (least, size) in least.iter_mut().zip([64 << 20, 256 << 20]) {
                let shares: Vec<f64> = (1..=seeds).map(|seed| share(network, size, seed)).collect();
                println!(
                    "{algorithm:?} of {channels}, {} MiB: {shares:.3?}",
                    size >> 20
                );
                *least = shares.iter().copied().fold(*least, f64::min);
            }
        }
    }
    least
}

fn at_least(network: Network, seeds: u64, small: f64, large: f64) {
    let found = least(network, seeds);
    assert!(found[0] > small && found[1] > large, "{found:?}");
}

#[test]
fn four_hidden_paths_are_full_whatever_the_hash_did() {
    at_least(FOUR, 4, 0.94, 0.96);
}

#[test]
fn two_hidden_paths_are_full() {
    let two = Network {
        paths: 2,
        rate: 12.5e9 / 8.0,
        ..ONE
    };
    at_least(two, 2, 0.95, 0.97);
}

#[test]
fn one_path_is_full_and_a_slower_one() {
    at_least(ONE, 2, 0.95, 0.97);
    let slower = Network {
        rate: 10e9 / 8.0,
        ..ONE
    };
    at_least(slower, 2, 0.93, 0.95);
}

#[test]
fn caps_a_flow_do_not_cap_the_sum() {
    for flows in [16, 24, 32] {
        let capped = Network {
            cap: 5e9 / 8.0,
            flows,
            ..ONE
        };
        at_least(capped, 2, 0.93, 0.94);
    }
}

/// Workers that look more seldom see less of the queues, and let them run dry more often.
#[test]
fn more_workers_that_look_more_seldom_fill_them_too() {
    let seldom = |paths: Network, turn: u64| Network {
        workers: 8,
        turn: Duration::from_micros(turn),
        ..paths
    };
    at_least(seldom(FOUR, 150), 2, 0.93, 0.95);
    at_least(seldom(FOUR, 300), 2, 0.9, 0.93);
    at_least(seldom(ONE, 300), 2, 0.92, 0.95);
}
