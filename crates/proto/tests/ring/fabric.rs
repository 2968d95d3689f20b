//! The network between two ranks, and the kernel's part of their connections: congestion windows, queues
//! that overflow, acknowledgements that wait on the way back.

use std::collections::VecDeque;
use std::time::Duration;

use evener_proto::Frame;

use super::capped::Capped;
use super::nccl::Algorithm;

pub const STEP: Duration = Duration::from_micros(5);
/// One way, without queues.
pub const LATENCY: Duration = Duration::from_micros(40);
/// A queue of the fabric drops what would wait longer.
const QUEUE: f64 = 2e-3;
/// What a kernel hands out at a time: as many packets of 1,448 bytes as 64 KiB hold.
const SEGMENT: f64 = 45.0 * 1448.0;

pub fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What is between the ranks. Rates in bytes per second.
#[derive(Clone, Copy)]
pub struct Network {
    pub paths: usize,
    pub rate: f64,
    /// Cap of each flow.
    pub cap: f64,
    pub flows: usize,
    pub workers: usize,
    /// Between two looks of a worker at its flows, if it has nothing to copy.
    pub turn: Duration,
    pub algorithm: Algorithm,
    pub channels: usize,
}

/// What travels: of which flow, bytes that are left, and the frames whose headers and whose last
/// bytes are in it.
pub struct Segment {
    pub flow: usize,
    pub bytes: f64,
    pub left: f64,
    pub heads: Vec<Frame>,
    pub tails: Vec<Frame>,
}

/// One direction of one connection.
pub struct Flow {
    pub path: usize,
    /// In its socket: frames, and what is left of each. Whether the first's header is gone.
    pub socket: VecDeque<(Frame, f64)>,
    pub begun: bool,
    pub window: f64,
    /// Sent and not known to have arrived.
    pub flying: f64,
    /// No window shrinks twice in a round trip.
    pub shrunk: Duration,
    pub slow: bool,
    /// Given and not known to have arrived, as of the last look.
    pub held: f64,
    pub confirmed: f64,
    /// The same, now.
    pub truly: f64,
    /// At the receiver, not read.
    pub inbox: VecDeque<Segment>,
}

impl Flow {
    pub fn new(path: usize) -> Flow {
        Flow {
            path,
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
        }
    }

    /// The kernel's acknowledgement of this many bytes.
    fn confirm(&mut self, bytes: f64) {
        if self.flying >= self.window - SEGMENT {
            // What limits it is its window.
            let more = if self.slow {
                bytes
            } else {
                bytes * 1460.0 / self.window
            };
            self.window = (self.window + more).min(4e6);
        }
        self.truly -= bytes;
        self.confirmed += bytes;
        self.flying -= bytes;
    }
}

pub struct Fabric {
    network: Network,
    /// Queues of each rank's outgoing paths.
    queues: [Vec<VecDeque<Segment>>; 2],
    /// In their place, where flows are capped.
    capped: [Capped; 2],
    /// When, whose.
    air: VecDeque<(Duration, usize, Segment)>,
    /// The kernel's acknowledgements: when, whose, flow, bytes.
    known: Vec<(Duration, usize, usize, f64)>,
}

impl Fabric {
    pub fn new(network: Network, seed: &mut u64) -> Fabric {
        Fabric {
            network,
            queues: [0, 1].map(|_| (0..network.paths).map(|_| VecDeque::new()).collect()),
            capped: [0, 1].map(|_| Capped::new(network, seed)),
            air: VecDeque::new(),
            known: Vec::new(),
        }
    }

    /// What has come until now, and what is known to have: of each rank's flows.
    pub fn arrive(&mut self, flows: [&mut [Flow]; 2], now: Duration) {
        while self.air.front().is_some_and(|one| one.0 <= now)
            && let Some((_, which, segment)) = self.air.pop_front()
        {
            flows[which][segment.flow].inbox.push_back(segment);
        }
        self.known.retain(|(when, which, flow, bytes)| {
            if *when <= now {
                flows[*which][*flow].confirm(*bytes);
            }
            *when > now
        });
    }

    /// What the kernel hands out.
    pub fn send(&mut self, which: usize, flows: &mut [Flow], now: Duration) {
        for (index, flow) in flows.iter_mut().enumerate() {
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
                if waiting > QUEUE * self.network.rate && now > flow.shrunk {
                    flow.shrunk = now + Duration::from_millis(2);
                    flow.window = (flow.window * 0.7).max(14600.0);
                    flow.slow = false;
                }
                queue.push_back(segment);
            }
        }
    }

    /// A step of this rank's paths; `back`: the other rank's flows.
    pub fn carry(&mut self, which: usize, back: &[Flow], now: Duration) {
        let step = STEP.as_secs_f64();
        if self.network.cap < f64::MAX {
            for segment in self.capped[which].carry(step) {
                let wait = self.capped[1 - which].wait(segment.flow);
                self.fly(which, segment, wait, now);
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
                    let queue = &self.queues[1 - which][back[segment.flow].path];
                    let bytes: f64 = queue.iter().map(|one| one.left).sum();
                    let wait = Duration::from_secs_f64(bytes / self.network.rate);
                    self.fly(which, segment, wait, now);
                }
            }
        }
    }

    /// The network has carried a segment of this rank's; the kernel's acknowledgement waits so long on
    /// the way back.
    fn fly(&mut self, which: usize, segment: Segment, wait: Duration, now: Duration) {
        let at = now + LATENCY;
        let known = at + LATENCY + wait;
        self.known.push((known, which, segment.flow, segment.bytes));
        self.air.push_back((at, which, segment));
    }
}
