//! Flows that a hash has spread over equal-cost paths, as TCP would carry them: all busy flows of a
//! path get equal parts of its rate, a flow holds what its window and its unsent bytes allow, and
//! NCCL keeps a few messages in flight a comm and waits for the oldest. In virtual time, with the
//! figures of the network that the issue of this crate was measured on: four paths of 6.25 Gb/s with
//! queues of 2 ms.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use evener_proto::path::{Report, unsent_room};
use evener_proto::wire::HEADER;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId};

const STEP: Duration = Duration::from_micros(5);
/// One way, without queues.
const LATENCY: Duration = Duration::from_micros(30);
const QUEUE: f64 = 2e-3;

/// One connection, one direction.
struct Flow {
    path: usize,
    /// Chunks and bytes of each that the path has not carried.
    queue: VecDeque<(Frame, f64)>,
    held: f64,
    carried: f64,
    before: f64,
    busy: f64,
    rate: f64,
    /// When it last took a chunk.
    turn: u64,
    /// A tail was lost: nothing moves until that time.
    stuck_until: Duration,
}

/// What the flows are hashed over. Rates in bytes per second.
#[derive(Clone, Copy)]
struct Network {
    paths: usize,
    /// Rate of each path.
    rate: f64,
    /// Cap of each flow.
    cap: f64,
    /// Whoever has room in the kernel's buffers pulls, in turn: no windows of the protocol's.
    in_turn: bool,
}

struct Fabric {
    flows: Vec<Flow>,
    network: Network,
    lanes: [Lane; 2],
    now: Duration,
    /// Frames on their way: when, to whom, over which flow.
    air: VecDeque<(Duration, usize, usize, Frame)>,
    sent: u64,
    /// The same, a comm.
    sent_by: HashMap<u64, u64>,
    turns: u64,
    last: Duration,
    longest: Duration,
    done: HashMap<u64, VecDeque<bool>>,
}

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Fabric {
    fn new(flows: usize, network: Network, mut seed: u64) -> Fabric {
        let paths = network.paths;
        let config = LaneConfig {
            eager_slots: 4,
            eager_bytes: 16 << 10,
            patience: Duration::from_secs(60),
        };
        let mut lanes = [
            Lane::new(config, Duration::ZERO),
            Lane::new(config, Duration::ZERO),
        ];
        let flows: Vec<Flow> = (0..flows)
            .map(|index| Flow {
                // The first on each path: placement is the dialer's test.
                path: if index < paths {
                    index
                } else {
                    random(&mut seed) as usize % paths
                },
                queue: VecDeque::new(),
                held: 0.0,
                carried: 0.0,
                before: 0.0,
                busy: 0.0,
                rate: 0.0,
                turn: 0,
                stuck_until: Duration::ZERO,
            })
            .collect();
        for lane in &mut lanes {
            for index in 0..flows.len() {
                lane.path_up(PathId(index as u64), Duration::ZERO);
            }
        }
        Fabric {
            flows,
            network,
            lanes,
            now: Duration::ZERO,
            air: VecDeque::new(),
            sent: 0,
            sent_by: HashMap::new(),
            turns: 0,
            last: Duration::ZERO,
            longest: Duration::ZERO,
            done: HashMap::new(),
        }
    }

    /// Carries `comms` queues of messages with `depth` in flight for a while: the share of the paths'
    /// sum that was used in the second half.
    fn run(&mut self, comms: u64, depth: usize, size: u64, time: Duration) -> f64 {
        for comm in 0..comms {
            self.lanes[1].add_receive(comm, self.now);
            self.lanes[0].add_send(comm, None, self.now);
            self.done.insert(comm, VecDeque::new());
        }
        self.go_on(depth, size, time)
    }

    fn go_on(&mut self, depth: usize, size: u64, time: Duration) -> f64 {
        let comms = self.done.len() as u64;
        let half = self.now + time / 2;
        let end = self.now + time;
        let mut start = 0;
        let (mut look, mut asked) = (self.now, self.now);
        while self.now < end {
            if self.now < half {
                start = self.sent;
            }
            for comm in 0..comms {
                let flying = self.done.get_mut(&comm).unwrap();
                while flying.len() < depth {
                    self.lanes[0].send(comm, size).unwrap();
                    self.lanes[1].post(comm, size).unwrap();
                    flying.push_back(false);
                }
            }
            self.step();
            if self.now >= asked + Duration::from_micros(50) {
                asked = self.now;
                for (index, flow) in self.flows.iter().enumerate() {
                    self.lanes[0].delivered(PathId(index as u64), flow.held as u64, self.now);
                }
            }
            if self.now >= look + Duration::from_millis(10) {
                look = self.now;
                for (index, flow) in self.flows.iter_mut().enumerate() {
                    // As the kernel's figure: of the time when there was something to deliver.
                    flow.rate = (flow.carried - flow.before) / flow.busy.max(1e-9);
                    (flow.before, flow.busy) = (flow.carried, 0.0);
                    let report = Report {
                        unconfirmed: flow.held > 0.0,
                        advanced: flow.stuck_until <= self.now,
                        lossy: false,
                        rtt: Some(LATENCY * 2),
                        rate: (flow.rate > 0.0).then_some(flow.rate),
                    };
                    self.lanes[0].report(PathId(index as u64), &report, self.now);
                }
                for lane in &mut self.lanes {
                    lane.on_time(self.now);
                }
            }
        }
        let seconds = (end - half).as_secs_f64();
        (self.sent - start) as f64 / seconds / (self.network.rate * self.network.paths as f64)
    }

    fn step(&mut self) {
        let now = self.now;
        // Pull, in turn.
        loop {
            let mut moved = false;
            let on: Vec<usize> = (0..self.network.paths)
                .map(|path| self.flows.iter().filter(|flow| flow.path == path).count())
                .collect();
            let room = |index: &usize| {
                let flow = &self.flows[*index];
                let window = (self.network.rate * QUEUE / on[flow.path] as f64).max(30e3);
                flow.held < window + f64::from(unsent_room(flow.rate as u64))
            };
            let fill = |index: usize| {
                self.lanes[0].fill(PathId(index as u64), self.flows[index].held as u64)
            };
            let first = if self.network.in_turn {
                let open = (0..self.flows.len()).filter(room);
                open.min_by_key(|index| self.flows[*index].turn)
            } else {
                let least = (0..self.flows.len()).min_by(|a, b| fill(*a).total_cmp(&fill(*b)));
                let first = least.filter(|first| fill(*first) < 1.0);
                if first.is_none() && self.lanes[0].has_frames() {
                    for index in 0..self.flows.len() {
                        self.lanes[0].is_full(PathId(index as u64));
                    }
                }
                first
            };
            if let Some(index) = first
                && let Some(frame) = self.lanes[0].transmit(PathId(index as u64), now)
            {
                let bytes = HEADER as f64 + f64::from(frame.payload());
                let flow = &mut self.flows[index];
                flow.held += bytes;
                flow.queue.push_back((frame, bytes));
                self.turns += 1;
                flow.turn = self.turns;
                moved = true;
            }
            if !moved {
                break;
            }
        }
        // The way back is empty: what the receiver says is there at once.
        for index in 0..self.flows.len() {
            while let Some(frame) = self.lanes[1].transmit(PathId(index as u64), now) {
                self.air.push_back((now + LATENCY, 0, index, frame));
            }
        }
        let step = STEP.as_secs_f64();
        for path in 0..self.network.paths {
            let busy: Vec<usize> = (0..self.flows.len())
                .filter(|index| {
                    let flow = &self.flows[*index];
                    flow.path == path && !flow.queue.is_empty() && flow.stuck_until <= now
                })
                .collect();
            let share = (self.network.rate / busy.len().max(1) as f64).min(self.network.cap) * step;
            for index in busy {
                let flow = &mut self.flows[index];
                let mut left = share;
                flow.busy += step;
                while left > 0.0
                    && let Some((frame, bytes)) = flow.queue.front_mut()
                {
                    let part = left.min(*bytes);
                    *bytes -= part;
                    left -= part;
                    flow.held -= part;
                    flow.carried += part;
                    if *bytes <= 0.0 {
                        self.air.push_back((now + LATENCY, 1, index, *frame));
                        flow.queue.pop_front();
                    }
                }
            }
        }
        self.now += STEP;
        while self.air.front().is_some_and(|one| one.0 <= self.now) {
            let (_, to, index, frame) = self.air.pop_front().unwrap();
            let path = PathId(index as u64);
            self.lanes[to]
                .receive(path, &frame, self.now, self.now)
                .unwrap();
            if let Frame::Chunk {
                comm,
                message,
                offset,
                length,
                ..
            } = frame
            {
                self.lanes[to].filled(comm, message, offset, length);
            }
            self.events();
        }
        self.events();
    }

    fn events(&mut self) {
        while self.lanes[1].event().is_some() {}
        while let Some(event) = self.lanes[0].event() {
            if let Event::Sent {
                comm,
                message,
                length,
            } = event
            {
                let _ = message;
                self.sent += length;
                *self.sent_by.entry(comm).or_default() += length;
                self.longest = self.longest.max(self.now - self.last);
                self.last = self.now;
                let flying = self.done.get_mut(&comm).unwrap();
                // NCCL looks at the oldest only.
                let place = flying.iter().position(|done| !done).unwrap();
                flying[place] = true;
                while flying.front() == Some(&true) {
                    flying.pop_front();
                }
            }
        }
    }
}

/// What NCCL's rings, its trees and its point-to-point messages keep in flight: comms, depth, bytes.
const LOADS: [(u64, usize, u64); 4] = [
    (2, 4, 1 << 20),
    (2, 4, 512 << 10),
    (4, 4, 512 << 10),
    (2, 8, 128 << 10),
];

fn share(flows: usize, network: Network, load: (u64, usize, u64), seed: u64) -> f64 {
    let mut fabric = Fabric::new(flows, network, seed);
    let (comms, depth, size) = load;
    fabric.run(comms, depth, size, Duration::from_millis(60))
}

const FOUR: Network = Network {
    paths: 4,
    rate: 6.25e9 / 8.0,
    cap: f64::MAX,
    in_turn: false,
};

#[test]
fn four_hidden_paths_carry_their_sum_whatever_the_hash_did() {
    for load in LOADS {
        for seed in 1..=5 {
            let share = share(16, FOUR, load, seed);
            assert!(share > 0.95, "{load:?}, seed {seed}: {share:.2}");
        }
    }
}

/// Why: what the rule replaced, on the same network.
#[test]
fn room_alone_leaves_paths_idle() {
    let network = Network {
        in_turn: true,
        ..FOUR
    };
    let shares: Vec<f64> = (1..=5)
        .map(|seed| share(16, network, LOADS[1], seed))
        .collect();
    println!("in turn: {shares:.2?}");
    let worst = shares.iter().copied().fold(1.0, f64::min);
    assert!(worst < 0.8, "{shares:.2?}");
}

#[test]
fn caps_a_flow_do_not_cap_the_sum() {
    let network = Network {
        paths: 1,
        rate: 25e9 / 8.0,
        cap: 5e9 / 8.0,
        in_turn: false,
    };
    for load in LOADS {
        let share = share(16, network, load, 1);
        assert!(share > 0.95, "{load:?}: {share:.2}");
    }
}

/// Jain's index of what the comms had carried in the same time.
#[test]
fn comms_share_the_paths_evenly() {
    for (comms, depth, size) in [
        (2, 4, 1 << 20),
        (4, 4, 512 << 10),
        (8, 4, 512 << 10),
        (4, 8, 64 << 10),
    ] {
        for seed in 1..=3 {
            let mut fabric = Fabric::new(16, FOUR, seed);
            fabric.run(comms, depth, size, Duration::from_millis(60));
            let sent: Vec<f64> = (0..comms)
                .map(|comm| fabric.sent_by.get(&comm).copied().unwrap_or(0) as f64)
                .collect();
            let sum: f64 = sent.iter().sum();
            let squares: f64 = sent.iter().map(|one| one * one).sum();
            let fairness = sum * sum / (comms as f64 * squares);
            assert!(
                fairness >= 0.95,
                "{comms} comms of {depth} x {size}, seed {seed}: {fairness:.3}"
            );
        }
    }
}

#[test]
fn a_lost_tail_holds_nobody_up_for_a_kernels_timeout() {
    let mut fabric = Fabric::new(16, FOUR, 1);
    fabric.run(2, 4, 1 << 20, Duration::from_millis(40));
    for flow in &mut fabric.flows[..2] {
        flow.stuck_until = fabric.now + Duration::from_millis(200);
    }
    let before = fabric.sent;
    fabric.longest = Duration::ZERO;
    fabric.go_on(4, 1 << 20, Duration::from_millis(150));
    assert!(fabric.sent > before);
    assert!(
        fabric.longest < Duration::from_millis(50),
        "{:?}",
        fabric.longest
    );
    assert!(fabric.lanes[0].late() > 0);
}
