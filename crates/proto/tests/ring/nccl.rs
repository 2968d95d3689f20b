//! What NCCL has two nodes do for an all-reduce: which slices go and come, in which order, and how many
//! may be in flight.

use std::collections::VecDeque;
use std::time::Duration;

/// Chunk of a ring; a slice is half of it.
const CHUNK: u64 = 2 << 20;

/// How NCCL reduces between two nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Algorithm {
    /// Each rank sends one half of a chunk, then what it got of the other and reduced.
    Ring,
    /// One rank of a channel sends all it has, the other reduces that and sends it back: the next
    /// channel the other way round. Slices are half as large, and twice as many are in flight.
    Tree,
}

impl Algorithm {
    /// Slices of a channel that may be in flight.
    pub fn depth(self) -> usize {
        match self {
            Algorithm::Ring => 4,
            Algorithm::Tree => 8,
        }
    }

    /// The channels of a rank, as they are before the first all-reduce.
    pub fn channels(self, count: usize, rank: usize) -> Vec<Channel> {
        let roles = |comm: usize| match self {
            Algorithm::Ring => vec![Role::Ring],
            Algorithm::Tree if comm % 2 == rank => vec![Role::Root],
            Algorithm::Tree => vec![Role::Up, Role::Down],
        };
        let channel = |comm| move |role| Channel::new(comm, role);
        (0..count)
            .flat_map(|comm| roles(comm).into_iter().map(channel(comm)))
            .collect()
    }
}

/// What the GPU does with a slice.
#[derive(Clone, Copy)]
pub struct Turn {
    pub receives: bool,
    pub sends: bool,
    pub length: u64,
}

#[derive(Clone, Copy)]
enum Role {
    Ring,
    Root,
    /// Who is not the root of a tree sends and receives side by side.
    Up,
    Down,
}

/// A channel of a rank, or one of the two sides of one.
pub struct Channel {
    pub comm: usize,
    role: Role,
    pub turns: VecDeque<Turn>,
    pub until: Option<Duration>,
    /// Slices to post, and those in flight (whether finished): of receives and of sends.
    pub flying: [VecDeque<(u64, bool)>; 2],
    pub arrived: usize,
    pub consumed: usize,
    pub posted: usize,
    pub lengths: Vec<u64>,
}

impl Channel {
    fn new(comm: usize, role: Role) -> Channel {
        Channel {
            comm,
            role,
            turns: VecDeque::new(),
            until: None,
            flying: [VecDeque::new(), VecDeque::new()],
            arrived: 0,
            consumed: 0,
            posted: 0,
            lengths: Vec::new(),
        }
    }

    /// Begins an all-reduce of which this much is the channel's.
    pub fn begin(&mut self, bytes: u64) {
        self.lengths.clear();
        (self.arrived, self.consumed, self.posted) = (0, 0, 0);
        match self.role {
            Role::Ring => self.ring(bytes),
            Role::Root => self.tree(bytes, true, true),
            Role::Up => self.tree(bytes, false, true),
            Role::Down => self.tree(bytes, true, false),
        }
    }

    fn ring(&mut self, mut left: u64) {
        while left > 0 {
            let chunk = left.div_ceil(2).min(CHUNK);
            left -= (2 * chunk).min(left);
            for (receives, sends) in [(false, true), (true, true), (true, false)] {
                for length in [chunk / 2, chunk - chunk / 2] {
                    self.turn(receives, sends, length);
                }
            }
        }
    }

    fn tree(&mut self, mut left: u64, receives: bool, sends: bool) {
        while left > 0 {
            let length = left.min(CHUNK / 4);
            left -= length;
            self.turn(receives, sends, length);
        }
    }

    fn turn(&mut self, receives: bool, sends: bool, length: u64) {
        self.turns.push_back(Turn {
            receives,
            sends,
            length,
        });
        if receives {
            self.lengths.push(length);
        }
    }
}
