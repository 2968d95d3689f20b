//! An all-reduce as NCCL's ring of two ranks asks it of the network, without NCCL and without a GPU.
//!
//! A comm each way is a *channel*. Its share of the data is taken in loops of two *chunks* of at most
//! 2 MiB, a chunk in two *slices* (NCCL's Simple protocol with its buffers of 4 MiB): the GPU sends
//! its first chunk; as each slice of the peer's arrives it adds its own and sends the sum; then it
//! waits for the peer's sums, and only then begins the next loop. So what is in flight is bounded, and
//! a network that delivers the oldest message late loses the time in which nothing else may be sent.
//!
//! The GPU is a clock: a slice costs it [`TOUCH`] and its bytes at [`COPY`], since it reads and writes
//! host memory over PCIe. Facts about NCCL: src/device/all_reduce.h, src/transport/net.cc and
//! src/include/device.h of release 2.28.

use std::time::{Duration, Instant};

use crate::DriveError;
use crate::net::Net;
use crate::scenario::{Memory, Scenario};
use crate::watch::Watch;

/// Half of a channel's buffer of eight steps is a chunk.
const CHUNK: usize = 2 << 20;
/// Two of a chunk.
pub const SLICE: usize = CHUNK / 2;
/// Slices are multiples of this.
const ALIGN: usize = 128;
/// Slices of a channel in flight.
pub const DEPTH: usize = 4;
/// What a slice costs the GPU besides its bytes: flags in host memory, seen across PCIe.
const TOUCH: Duration = Duration::from_micros(5);
/// Bytes per second that it moves between host memory and its own.
const COPY: f64 = 40e9;

/// What the GPU does with one slice of a channel.
#[derive(Clone, Copy)]
struct Turn {
    receives: bool,
    sends: bool,
    length: usize,
}

/// What one channel has to do for `bytes` of an all-reduce.
fn turns(mut bytes: usize) -> Vec<Turn> {
    let mut turns = Vec::new();
    while bytes > 0 {
        let chunk = bytes.div_ceil(2).min(CHUNK);
        let first = chunk.div_ceil(2).next_multiple_of(ALIGN).min(chunk);
        bytes -= (2 * chunk).min(bytes);
        let lengths = [first, chunk - first].into_iter().filter(|one| *one > 0);
        for (receives, sends) in [(false, true), (true, true), (true, false)] {
            turns.extend(lengths.clone().map(|length| Turn {
                receives,
                sends,
                length,
            }));
        }
    }
    turns
}

/// One channel during one all-reduce.
struct Channel {
    turns: Vec<Turn>,
    at: usize,
    /// When the GPU has done the present turn.
    until: Option<Instant>,
    lengths: [Vec<usize>; 2],
    /// Counts of receives and sends: how many the GPU has done with, were posted, were finished.
    through: [usize; 2],
    posted: [usize; 2],
    finished: [usize; 2],
}

impl Channel {
    fn new(bytes: usize) -> Channel {
        let turns = turns(bytes);
        let of = |which: fn(&Turn) -> bool| {
            let some = turns.iter().filter(|turn| which(turn));
            some.map(|turn| turn.length).collect()
        };
        Channel {
            lengths: [of(|turn| turn.receives), of(|turn| turn.sends)],
            turns,
            at: 0,
            until: None,
            through: [0; 2],
            posted: [0; 2],
            finished: [0; 2],
        }
    }

    /// The GPU has its sums.
    fn is_reduced(&self) -> bool {
        self.at == self.turns.len()
    }

    /// And the peer has what it needs.
    fn is_over(&self) -> bool {
        self.is_reduced() && self.finished[1] == self.lengths[1].len()
    }

    /// Lets the GPU go on. Whether it did.
    fn compute(&mut self, now: Instant) -> bool {
        let Some(turn) = self.turns.get(self.at) else {
            return false;
        };
        match self.until {
            None => {
                let arrived = !turn.receives || self.finished[0] > self.through[0];
                let room = !turn.sends || self.through[1] - self.finished[1] < DEPTH;
                if !arrived || !room {
                    return false;
                }
                let copy = Duration::from_secs_f64(turn.length as f64 / COPY);
                self.until = Some(now + TOUCH + copy);
            }
            Some(until) if now >= until => {
                self.through[0] += usize::from(turn.receives);
                self.through[1] += usize::from(turn.sends);
                self.at += 1;
                self.until = None;
            }
            Some(_) => return false,
        }
        true
    }

    /// How many of its requests may be posted.
    fn allowed(&self, sending: bool) -> usize {
        if sending {
            self.through[1]
        } else {
            self.lengths[0].len().min(self.through[0] + DEPTH)
        }
    }
}

/// One all-reduce of `bytes`: seconds, and the longest time in which nothing finished.
pub fn all_reduce(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    bytes: usize,
) -> Result<(f64, f64), DriveError> {
    let count = scenario.comms;
    let share = |index: usize| (bytes * (index + 1) / count) - (bytes * index / count);
    let mut channels: Vec<Channel> = (0..count).map(|index| Channel::new(share(index))).collect();
    let began = Instant::now();
    let mut watch = Watch::new(began);
    let mut seconds = None;
    while !channels.iter().all(Channel::is_over) {
        let mut moved = false;
        for (index, channel) in channels.iter_mut().enumerate() {
            while channel.compute(Instant::now()) {}
            for sending in [false, true] {
                moved |= progress(scenario, net, memory, index, channel, sending)?;
            }
        }
        let now = Instant::now();
        if seconds.is_none() && channels.iter().all(Channel::is_reduced) {
            seconds = Some((now - began).as_secs_f64());
        }
        watch.turn(now, moved)?;
    }
    let seconds = seconds.unwrap_or_else(|| began.elapsed().as_secs_f64());
    Ok((seconds, watch.longest()))
}

/// What NCCL's thread does for one direction of a channel. Whether something finished.
fn progress(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    index: usize,
    channel: &mut Channel,
    sending: bool,
) -> Result<bool, DriveError> {
    let way = usize::from(sending);
    while channel.posted[way] < channel.allowed(sending) {
        let number = channel.posted[way];
        let length = channel.lengths[way][number];
        if sending && scenario.verify {
            memory.write(index, number, length);
        }
        let at = memory.at(sending, index, number);
        // SAFETY: the buffers live in `memory` through the run, and each has one request at a time.
        if !unsafe { net.post(index, sending, at, length) }? {
            break;
        }
        channel.posted[way] += 1;
    }
    let done = net.finished(index, sending)?;
    for _ in 0..done {
        let number = channel.finished[way];
        if !sending && scenario.verify {
            memory.check(index, number, channel.lengths[way][number])?;
        }
        channel.finished[way] += 1;
    }
    Ok(done > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_chunks_of_every_loop_are_sent_and_received() {
        for bytes in [1usize, 256, 1 << 20, 5 << 20, (64 << 20) + 300] {
            let turns = turns(bytes);
            let sum = |which: fn(&Turn) -> bool| -> usize {
                let some = turns.iter().filter(|turn| which(turn));
                some.map(|turn| turn.length).sum()
            };
            let (sent, received) = (sum(|turn| turn.sends), sum(|turn| turn.receives));
            assert_eq!(sent, received);
            assert!(sent >= bytes && sent <= bytes + 1, "{bytes}: {sent}");
            assert!(turns.iter().all(|turn| turn.length <= SLICE));
        }
    }
}
