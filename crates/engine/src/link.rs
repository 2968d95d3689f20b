//! What all workers share about one peer: the protocol's state, and which memory is in use.
//!
//! # Why one state and not one per worker
//! Whatever is dealt out in advance waits for the slowest part: with messages assigned to workers,
//! each with connections of its own, four hidden paths gave two thirds of their sum. So all paths to
//! a peer pull from one queue. Its lock is held for the bookkeeping of a chunk (well under a
//! microsecond) and never across a system call that moves a chunk's bytes, so workers copy side by
//! side. NCCL's threads never take it.
//!
//! # Why a caller's memory is safe
//! A worker that is about to give a caller's memory to the kernel *pins* the message under the lock
//! and unpins it, under the lock again, when the call has returned. A request is finished (and its
//! memory given back) only while nothing pins it; where something does, it is noted as *over* and
//! finished by the last unpin. A pin is held
//! - for one call, while a chunk's bytes are read;
//! - from the pulling of a chunk until its last byte is written. On a dead path that may be long:
//!   when the message is over, whoever has the connection copies the rest ([`Conn::detach`]
//!   (crate::conn::Conn::detach)) and unpins it.
//!
//! Eager slots have no pins: they are read and copied under the lock (16 KiB at most).
//!
//! # Effects
//! A link knows no socket, no peer and no other thread. What has to be done outside of it is noted as
//! an [`Effect`]; whoever has called it takes them ([`Link::effects`]) under the same lock, and applies
//! them when the lock is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustc_hash::FxHashMap;

use evener_proto::{Event, Lane, LaneConfig, PathId, Place, Side, Why};

use crate::config::Config;
use crate::requests::{ACCEPTED, DECLINED, Requests};
use crate::slots::SLOTS;
use crate::stats::{Latencies, Silences};
use crate::sys::{self, Memory};

/// Code of a failed request: the peer or the way to it.
pub const REMOTE: usize = 0;
/// Code of a failed request: a message that was longer than its buffer.
pub const OVERSIZE: usize = 1;

fn code(why: Option<Why>) -> usize {
    match why {
        Some(Why::Oversize { .. }) => OVERSIZE,
        _ => REMOTE,
    }
}

/// How a pinned request will end.
#[derive(Debug, Clone, Copy)]
enum Over {
    Done(usize),
    Failed(usize),
}

/// One end of a comm.
#[derive(Debug)]
struct End {
    requests: Arc<Requests>,
    traffic: Arc<Traffic>,
    /// Number of the next request to take.
    next: u64,
    /// Its eager slots, one after the other.
    eager: Vec<u8>,
    failed: bool,
    /// The caller has closed it.
    ending: bool,
    pins: [u16; SLOTS],
    over: [Option<Over>; SLOTS],
    /// When each request was taken.
    taken: [Duration; SLOTS],
    /// Buffers that are posted and not full, and since when nothing was placed in one.
    waiting: usize,
    silent: Duration,
}

impl End {
    fn is_pinned(&self) -> bool {
        self.pins.iter().any(|pins| *pins > 0)
    }

    fn settle(&mut self, message: u64, over: Over) {
        if let Some(memory) = self.requests.slots.memory(message) {
            self.less(memory.length as u64);
        }
        self.waiting = self.waiting.saturating_sub(1);
        match over {
            Over::Done(length) => self.requests.slots.finish(message, length),
            Over::Failed(code) => self.requests.slots.fail(code, |number| number == message),
        }
    }

    fn less(&self, bytes: u64) {
        self.traffic.under_way[self.requests.side as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Ends a taken request, at once or with its last pin. Whether at once.
    fn finish(&mut self, message: u64, over: Over) -> bool {
        let place = message as usize % SLOTS;
        if self.pins[place] > 0 {
            self.over[place] = Some(over);
            return false;
        }
        self.settle(message, over);
        true
    }

    /// Bytes were placed in one of its buffers.
    fn placed(&mut self, silences: &Silences) {
        if self.waiting > 0 {
            let now = silences.now();
            silences.note(self.silent, now);
            self.silent = now;
        }
    }

    /// Fails all that is unfinished and not pinned now, and the rest with its last pin.
    fn fail(&mut self, code: usize) {
        for (over, pins) in self.over.iter_mut().zip(&self.pins) {
            if *pins > 0 && over.is_none() {
                *over = Some(Over::Failed(code));
            }
        }
        self.waiting = 0;
        let pins = &self.pins;
        let before = self.requests.slots.under_way(|_| true);
        self.requests
            .slots
            .fail(code, |number| pins[number as usize % SLOTS] == 0);
        self.less(before - self.requests.slots.under_way(|_| true));
    }
}

/// What a link has to do, for those who look without its lock.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of requests that are taken and not finished: of messages, and of buffers for them.
    pub under_way: [AtomicU64; 2],
    /// How long messages took from their posting's being seen to their acknowledgement.
    pub took: Latencies,
}

/// What is to be done once the lock is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Close this path.
    Drop(PathId),
    /// Nothing was confirmed on this path for a while.
    Suspected(PathId),
    /// It carries again.
    Recovered(PathId),
    /// Copy what connections have queued of messages that are over.
    Detach,
    /// The peer wants to open a comm at a listener: it is offered there, or declined.
    Offer {
        /// The peer's number.
        comm: u64,
        /// Which listener.
        listener: u64,
    },
    /// A comm has failed: to be told to people.
    Failed {
        /// The sender's number.
        comm: u64,
        /// Why.
        why: Why,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Link {
    /// The protocol.
    pub lane: Lane,
    ends: FxHashMap<(Side, u64), End>,
    owners: FxHashMap<PathId, usize>,
    /// How many paths each worker has.
    owned: Vec<usize>,
    /// See [`Link::effects`].
    effects: Vec<Effect>,
    traffic: Arc<Traffic>,
    eager_bytes: usize,
    eager_slots: usize,
    silences: Arc<Silences>,
}

impl Link {
    /// Without comms or paths.
    pub fn new(config: &Config, silences: Arc<Silences>, now: Duration) -> Link {
        let lane = LaneConfig {
            eager_slots: config.eager_slots,
            eager_bytes: config.eager_bytes,
            patience: config.timeout,
        };
        Link {
            lane: Lane::new(lane, now),
            ends: FxHashMap::default(),
            owners: FxHashMap::default(),
            owned: Vec::new(),
            effects: Vec::new(),
            traffic: Arc::default(),
            eager_bytes: config.eager_bytes as usize,
            eager_slots: config.eager_slots,
            silences,
        }
    }

    /// Counts the silences that have not ended yet, as of now.
    pub fn note_silences(&mut self) {
        for end in self.ends.values().filter(|end| end.waiting > 0) {
            self.silences.note(end.silent, self.silences.now());
        }
    }

    /// Whether no comm is here.
    pub fn is_idle(&self) -> bool {
        self.ends.is_empty()
    }

    /// A path is a worker's now, or nobody's.
    pub fn own(&mut self, path: PathId, worker: Option<usize>) {
        let before = match worker {
            Some(worker) => self.owners.insert(path, worker),
            None => self.owners.remove(&path),
        };
        if let Some(before) = before {
            self.owned[before] -= 1;
        }
        if let Some(worker) = worker {
            self.owned.resize(self.owned.len().max(worker + 1), 0);
            self.owned[worker] += 1;
        }
    }

    /// Which worker has a path.
    pub fn owner(&self, path: PathId) -> Option<usize> {
        self.owners.get(&path).copied()
    }

    /// The workers that have paths.
    pub fn workers(&self) -> impl Iterator<Item = usize> {
        let some = self
            .owned
            .iter()
            .enumerate()
            .filter(|(_, paths)| **paths > 0);
        some.map(|(worker, _)| worker)
    }

    /// What is to be done after the lock was freed.
    #[must_use]
    pub fn effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// What it has to do.
    pub fn traffic(&self) -> &Arc<Traffic> {
        &self.traffic
    }

    // ---- comms ----

    /// Adds an end; with a listener, asks the peer to open it there.
    pub fn begin(&mut self, requests: &Arc<Requests>, listener: Option<u64>, now: Duration) {
        let (side, id) = (requests.side, requests.id);
        let eager = match side {
            Side::Send => {
                self.lane.add_send(id, listener, now);
                Vec::new()
            }
            Side::Receive => {
                self.lane.add_receive(id, now);
                vec![0; self.eager_slots * self.eager_bytes]
            }
        };
        let end = End {
            requests: requests.clone(),
            traffic: self.traffic.clone(),
            next: 0,
            eager,
            failed: false,
            ending: false,
            pins: [0; SLOTS],
            over: [None; SLOTS],
            taken: [Duration::ZERO; SLOTS],
            waiting: 0,
            silent: Duration::ZERO,
        };
        self.ends.insert((side, id), end);
        requests.register();
    }

    /// The caller has closed a comm: [`Requests::is_released`] holds once none of its memory is pinned.
    pub fn release(&mut self, requests: &Requests) {
        let key = (requests.side, requests.id);
        self.lane.close(requests.id, requests.side);
        match self.ends.get_mut(&key) {
            Some(end) => {
                end.failed = true;
                end.ending = true;
                end.fail(REMOTE);
                if end.is_pinned() {
                    self.effects.push(Effect::Detach);
                }
                self.bury(key);
            }
            None => requests.let_go(),
        }
    }

    fn bury(&mut self, key: (Side, u64)) {
        if let Some(end) = self.ends.get(&key)
            && end.ending
            && !end.is_pinned()
        {
            end.less(end.requests.slots.under_way(|_| true));
            end.requests.slots.fail(REMOTE, |_| true);
            end.requests.let_go();
            self.ends.remove(&key);
        }
    }

    /// The engine has stopped: no thread has a pin.
    pub fn abandon(&mut self) {
        for (_, end) in self.ends.drain() {
            end.requests.slots.fail(REMOTE, |_| true);
            end.requests.let_go();
        }
    }

    /// Takes the requests that a comm's caller has posted.
    pub fn poll(&mut self, side: Side, id: u64, now: Duration) {
        loop {
            let Some(end) = self.ends.get_mut(&(side, id)) else {
                return;
            };
            if end.failed {
                let code = code(end.requests.failure());
                end.fail(code);
                return;
            }
            let Some(length) = end.requests.slots.take(end.next) else {
                return;
            };
            end.next += 1;
            end.taken[(end.next - 1) as usize % SLOTS] = now;
            end.traffic.under_way[side as usize].fetch_add(length as u64, Ordering::Relaxed);
            if side == Side::Receive {
                if end.waiting == 0 {
                    end.silent = self.silences.now();
                }
                end.waiting += 1;
            }
            let taken = match side {
                Side::Send => self.lane.send(id, length as u64),
                Side::Receive => self.lane.post(id, length as u64),
            };
            if taken.is_none() {
                // Cannot be: there are as many slots as the lane's window. Fail rather than hang.
                end.failed = true;
                end.requests.fail(Why::PeerClosed);
            }
            self.events(now);
        }
    }

    // ---- memory ----

    /// The memory of a taken request, which stays lent until [`Link::unpin`].
    pub fn pin(&mut self, side: Side, comm: u64, message: u64) -> Option<Memory> {
        let end = self.ends.get_mut(&(side, comm))?;
        let place = message as usize % SLOTS;
        if end.ending || end.over[place].is_some() {
            return None;
        }
        let memory = end.requests.slots.memory(message)?;
        end.pins[place] += 1;
        Some(memory)
    }

    /// The kernel has done with it.
    pub fn unpin(&mut self, side: Side, comm: u64, message: u64) {
        let Some(end) = self.ends.get_mut(&(side, comm)) else {
            return;
        };
        let place = message as usize % SLOTS;
        end.pins[place] = end.pins[place].saturating_sub(1);
        if side == Side::Receive {
            end.placed(&self.silences);
        }
        if end.pins[place] == 0 {
            if let Some(over) = end.over[place].take() {
                end.settle(message, over);
            }
            self.bury((side, comm));
        }
    }

    /// Whether a message's memory is wanted back.
    pub fn is_over(&self, comm: u64, message: u64) -> bool {
        self.ends
            .get(&(Side::Send, comm))
            .is_none_or(|end| end.ending || end.over[message as usize % SLOTS].is_some())
    }

    /// Where the bytes from `at` on of an arriving chunk go.
    pub fn place(&mut self, comm: u64, message: u64, at: u64, rest: usize) -> Target {
        match self.lane.place(comm, message) {
            Place::Buffer => match self.pin(Side::Receive, comm, message) {
                Some(memory) => match memory.part(at, rest) {
                    Some(part) => Target::Pinned(part),
                    None => {
                        self.unpin(Side::Receive, comm, message);
                        Target::Nowhere
                    }
                },
                None => Target::Nowhere,
            },
            Place::Eager(slot) => {
                let from = (slot * self.eager_bytes) as u64 + at;
                self.ends
                    .get_mut(&(Side::Receive, comm))
                    .and_then(|end| Memory::of(&mut end.eager).part(from, rest))
                    .map_or(Target::Nowhere, Target::Eager)
            }
            Place::Nowhere => Target::Nowhere,
        }
    }

    // ---- events ----

    /// Applies what the protocol has to say: to requests at once, to all else as effects.
    pub fn events(&mut self, now: Duration) {
        while let Some(event) = self.lane.event() {
            match event {
                Event::Sent {
                    comm,
                    message,
                    length,
                } => {
                    if let Some(end) = self.ends.get(&(Side::Send, comm)) {
                        let since = end.taken[message as usize % SLOTS];
                        self.traffic.took.count(now.saturating_sub(since));
                    }
                    self.finish(Side::Send, comm, message, length);
                }
                Event::Received {
                    comm,
                    message,
                    length,
                } => self.finish(Side::Receive, comm, message, length),
                Event::Deliver {
                    comm,
                    message,
                    slot,
                    length,
                } => {
                    if let Some(end) = self.ends.get(&(Side::Receive, comm))
                        && let Some(memory) = end.requests.slots.memory(message)
                    {
                        let from = slot * self.eager_bytes;
                        let bytes = &end.eager[from..from + length as usize];
                        // SAFETY: the request is taken and this thread has the lock, so nobody
                        // finishes it meanwhile; the lane has checked that the message fits.
                        #[allow(unsafe_code, reason = "an eager message is delivered")]
                        unsafe {
                            sys::publish(Memory::read_only(bytes), memory);
                        }
                    }
                    self.finish(Side::Receive, comm, message, length);
                }
                Event::Failed { comm, side, why } => self.fail(side, comm, why),
                Event::Died(path) => self.effects.push(Effect::Drop(path)),
                Event::Suspected(path) => self.effects.push(Effect::Suspected(path)),
                Event::Recovered(path) => self.effects.push(Effect::Recovered(path)),
                Event::Open { comm, listener } => {
                    self.effects.push(Effect::Offer { comm, listener });
                }
                Event::Opened { comm, accepted } => {
                    if let Some(end) = self.ends.get(&(Side::Send, comm)) {
                        let answer = if accepted { ACCEPTED } else { DECLINED };
                        end.requests.opened.store(answer, Ordering::Release);
                    }
                }
            }
        }
    }

    fn finish(&mut self, side: Side, comm: u64, message: u64, length: u64) {
        let Some(end) = self.ends.get_mut(&(side, comm)) else {
            return;
        };
        if side == Side::Receive {
            // One that came ahead of its buffer is placed now.
            end.placed(&self.silences);
        }
        if !end.finish(message, Over::Done(length as usize)) && side == Side::Send {
            self.effects.push(Effect::Detach);
        }
    }

    fn fail(&mut self, side: Side, comm: u64, why: Why) {
        let Some(end) = self.ends.get_mut(&(side, comm)) else {
            return;
        };
        end.failed = true;
        end.requests.fail(why);
        end.fail(code(Some(why)));
        if end.is_pinned() {
            self.effects.push(Effect::Detach);
        }
        // A receiver that refused a message stays until it is closed: it must go on saying so.
        if side == Side::Send || !matches!(why, Why::Oversize { .. }) {
            self.lane.close(comm, side);
        }
        self.effects.push(Effect::Failed { comm, why });
    }
}

/// Where bytes that are about to be read go.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// To a caller's memory, pinned until [`Link::unpin`].
    Pinned(Memory),
    /// To an eager slot: only under the lock.
    Eager(Memory),
    /// Nowhere.
    Nowhere,
}

#[cfg(test)]
mod tests;
