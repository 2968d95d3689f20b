//! What one carrier does between two processes: messages of 64 KiB, alone and in bulk, over a comm.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_proto::accord::Measured;

use crate::callers::Callers;
use crate::comm::Comm;
use crate::hello::Handle;
use crate::lock::lock;
use crate::peer::Transport;
use crate::requests::{ACCEPTED, DECLINED};
use crate::slots::{Slot, Status};
use crate::sys::Memory;

/// Bytes of a message.
pub(crate) const MESSAGE: usize = 64 << 10;
/// Messages in flight in bulk.
const DEPTH: usize = 8;
/// Messages that go alone, in this time at most.
const ALONE: usize = 5;
const ALONE_TIME: Duration = Duration::from_millis(100);
/// Bulk goes for this long.
const BULK_TIME: Duration = Duration::from_millis(100);
/// A connection must stand in this time.
const OPENING: Duration = Duration::from_millis(1500);
/// Between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// Waits until it is accepted; `false`: it is not in this time.
pub(crate) fn accepted(callers: &Callers, comm: &Comm, limit: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let opened = comm.opened.load(std::sync::atomic::Ordering::Acquire);
        if comm.failure().is_some() || opened == DECLINED {
            return false;
        }
        if opened == ACCEPTED && comm.is_registered() {
            return true;
        }
        if begun.elapsed() >= limit || callers.shared.choosing.stops() {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// A comm and the memory that its requests use: released before that goes.
struct Sender<'a> {
    callers: &'a Callers,
    comm: &'a Arc<Comm>,
    memory: Vec<u8>,
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        self.callers.release(self.comm);
    }
}

impl<'a> Sender<'a> {
    /// Posts one message. Only sends read the memory, so all of them may have the same.
    fn post(&mut self) -> Option<&'a Slot> {
        let memory = Memory::of(&mut self.memory);
        // SAFETY: a message that goes out is only read, and the memory lives until the comm is released,
        // which `drop` does before the fields go. This thread is the only one that posts.
        #[allow(unsafe_code, reason = "see above")]
        unsafe {
            self.callers.post(self.comm, memory).ok()?
        }
    }

    /// Whether a message has gone; `None`: nothing more will.
    fn gone(&self, slot: &Slot) -> Option<bool> {
        if self.callers.shared.choosing.stops() {
            return None;
        }
        match slot.test() {
            Status::Pending => Some(false),
            Status::Done(_) => Some(true),
            Status::Failed(_) => None,
        }
    }

    /// How long messages take that go alone: the median of those that ended in the time.
    fn alone(&mut self) -> Option<Duration> {
        let begun = Instant::now();
        let mut took = Vec::new();
        while took.len() < ALONE && begun.elapsed() < ALONE_TIME {
            let at = Instant::now();
            let slot = self.post()?;
            // The first may take longer than all may together: it is waited for.
            while !self.gone(slot)? {
                if at.elapsed() > ALONE_TIME * 4 {
                    return Some(at.elapsed());
                }
                std::thread::sleep(LOOK);
            }
            took.push(at.elapsed());
        }
        took.sort_unstable();
        took.get(took.len() / 2).copied()
    }

    /// Bytes per second in bulk.
    fn bulk(&mut self) -> Option<f64> {
        let begun = Instant::now();
        let mut flying: VecDeque<&Slot> = VecDeque::new();
        let mut bytes = 0;
        while begun.elapsed() < BULK_TIME {
            while flying.len() < DEPTH
                && let Some(slot) = self.post()
            {
                flying.push_back(slot);
            }
            let slot = *flying.front()?;
            if self.gone(slot)? {
                flying.pop_front();
                bytes += MESSAGE;
            } else {
                std::thread::sleep(LOOK);
            }
        }
        Some(bytes as f64 / begun.elapsed().as_secs_f64())
    }
}

/// Packets to this process that went again: of UDP each path tells the number of its connection, and the
/// largest counts.
fn again(callers: &Callers, comm: &Comm, transport: Transport) -> u64 {
    let name = comm.first().peer.name();
    let paths = lock(&callers.shared.paths);
    let all = paths.live().filter(|(_, stats)| stats.peer == name);
    let all = all.map(|(_, stats)| stats.report().retransmits);
    match transport {
        Transport::Tcp => all.sum(),
        Transport::Udp => all.max().unwrap_or(0),
    }
}

/// Measures a carrier to a process that serves; `None`: it does not come through.
pub(crate) fn measure(callers: &Callers, to: &Handle, transport: Transport) -> Option<Measured> {
    let comm = callers.open(to, transport);
    let comm = &comm;
    let mut sender = Sender {
        callers,
        comm,
        memory: vec![0x5a; MESSAGE],
    };
    if !accepted(callers, comm, OPENING) {
        return None;
    }
    let small = sender.alone()?;
    let rate = sender.bulk()?;
    let again = again(callers, comm, transport);
    Some(Measured { rate, small, again })
}
