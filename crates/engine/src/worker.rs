//! A worker: one thread with its own lanes, connections and epoll. It shares nothing with other
//! workers, and with callers only slots and a doorbell.
//!
//! The loop: take news (tasks, rung comms, ready sockets), read what can be read, let paths with
//! room pull, look at the clock. Nothing to do for 50 us: sleep in epoll until a socket, a caller
//! or a deadline wakes it.
//!
//! # Why a caller's memory is safe here
//! Pointers stay in their slots. Before each system call the worker asks the slot for the memory
//! ([`Slots::memory`](crate::slots::Slots::memory)), which answers only while the request with that
//! number is taken, and no other thread ends that state. Before it finishes a request it has copied
//! what a connection still had to write of it. So after `test` says done, or `release` returns, no
//! system call of ours knows the address.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evener_proto::path::Report;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId, Place, Side, Why};

use crate::comm::{ACCEPTED, Comm, DECLINED, Peer, PeerKey, lock};
use crate::conn::{Arriving, Conn};
use crate::control::News;
use crate::doorbell::{BITS, Doorbell};
use crate::stats::PathStats;
use crate::sync::{AtomicBool, Ordering as SyncOrdering};
use crate::sys::{self, Epoll, Memory, Ready, Waker};
use crate::{Level, Shared};

/// Idle for this long, a worker sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// A connection reads at most this much before others have their turn.
const READ_TURN: usize = 2 << 20;
/// A connection holds at most this much that the kernel has not taken.
const PULL: usize = 64 << 10;
/// Timers are looked at this often where the loop is busy.
const TICK: Duration = Duration::from_millis(2);
const WAKER: u64 = u64::MAX;

/// What other threads ask of a worker.
#[derive(Debug)]
pub enum Task {
    /// A connection was greeted and answered.
    Connect {
        /// With whom.
        peer: Arc<Peer>,
        /// The socket.
        fd: OwnedFd,
        /// Its number.
        path: PathId,
        /// Index of the interface.
        interface: u32,
        /// Its counters.
        stats: Arc<PathStats>,
    },
    /// A comm begins; with a listener, the peer is asked to open it.
    Begin(Arc<Comm>, Option<u64>),
    /// All workers know the receiving end of a comm that the peer asked for.
    Accept(Arc<Comm>),
    /// There is no such listener.
    Decline(PeerKey, u64),
    /// A comm ends. Its memory is not used after `released` counts this worker.
    Release(Arc<Comm>),
    /// A path is not worth keeping.
    Drop(PeerKey, PathId),
    /// An interface lost its carrier.
    InterfaceDown(u32),
    /// The end.
    Stop,
}

/// The part of a worker that other threads see.
#[derive(Debug)]
pub struct Handle {
    bell: Doorbell,
    waker: Waker,
    tasks: Mutex<Vec<Task>>,
    has_tasks: AtomicBool,
}

impl Handle {
    /// For a worker that is about to start.
    pub fn new() -> std::io::Result<Handle> {
        Ok(Handle {
            bell: Doorbell::default(),
            waker: Waker::new()?,
            tasks: Mutex::new(Vec::new()),
            has_tasks: AtomicBool::new(false),
        })
    }

    /// A comm has posted a request.
    pub fn ring(&self, bit: usize) {
        if self.bell.ring(bit) {
            self.waker.wake();
        }
    }

    /// Asks for something.
    pub fn ask(&self, task: Task) {
        lock(&self.tasks).push(task);
        self.has_tasks.store(true, SyncOrdering::SeqCst);
        if self.bell.must_wake() {
            self.waker.wake();
        }
    }

    /// Drops what the worker has not come to.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *lock(&self.tasks)));
    }

    /// The descriptor that a fork's child must close.
    pub fn fd(&self) -> i32 {
        self.waker.fd()
    }
}

/// One end of a comm in one lane.
struct End {
    comm: Arc<Comm>,
    /// Number of the next request to take.
    next: u64,
    /// Its eager slots, one after the other.
    eager: Vec<u8>,
    bit: usize,
    failed: bool,
}

struct LaneState {
    peer: Arc<Peer>,
    lane: Lane,
    ends: HashMap<(Side, u64), End>,
    /// Connections, the quickest first.
    conns: Vec<usize>,
    /// Something may be ready to send.
    dirty: bool,
}

impl LaneState {
    fn memory(&self, index: usize, side: Side, comm: u64, message: u64) -> Option<Memory> {
        let end = self.ends.get(&(side, comm))?;
        let number = message * self.peer.lanes as u64 + index as u64;
        end.comm.slots.memory(number)
    }
}

/// See the module.
pub struct Worker {
    index: usize,
    shared: Arc<Shared>,
    epoll: Epoll,
    started: Instant,
    lanes: Vec<Option<LaneState>>,
    by_peer: HashMap<PeerKey, usize>,
    conns: Vec<Option<Conn>>,
    /// Connections that may have something to read.
    hot: Vec<usize>,
    /// Which comms share a bit of the bell.
    bits: Vec<Vec<(usize, Side, u64)>>,
    next_bit: usize,
    scratch: Vec<u8>,
    stopped: bool,
}

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

fn eager(shared: &Shared, lanes: usize) -> (usize, u64) {
    let slots = (shared.config.eager_slots / lanes).max(1);
    (slots, shared.config.eager_bytes)
}

impl Worker {
    /// A worker for the lanes with this number.
    pub fn new(index: usize, shared: Arc<Shared>) -> std::io::Result<Worker> {
        let epoll = Epoll::new()?;
        epoll.add_readable(shared.workers[index].waker.fd(), WAKER)?;
        Ok(Worker {
            index,
            shared,
            epoll,
            started: Instant::now(),
            lanes: Vec::new(),
            by_peer: HashMap::new(),
            conns: Vec::new(),
            hot: Vec::new(),
            bits: vec![Vec::new(); BITS],
            next_bit: 0,
            scratch: vec![0; 256 << 10],
            stopped: false,
        })
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let shared = self.shared.clone();
        let handle = &shared.workers[self.index];
        let mut ready: Vec<Ready> = Vec::new();
        let (mut idle_since, mut timers_at) = (self.now(), Duration::ZERO);
        while !self.stopped {
            let mut active = false;
            if handle.has_tasks.swap(false, SyncOrdering::SeqCst) {
                let tasks = std::mem::take(&mut *lock(&handle.tasks));
                for task in tasks {
                    self.perform(task);
                }
                active = true;
            }
            if handle.bell.rung() {
                handle.bell.drain(|bit| self.poll_bit(bit));
                active = true;
            }
            let timeout = Some(Duration::ZERO);
            if self.epoll.wait(&mut ready, timeout).is_ok() {
                active |= self.note(&ready);
            }
            active |= self.read_hot();
            active |= self.pump_dirty();
            let now = self.now();
            if now >= timers_at {
                timers_at = self.timers(now).min(now + TICK);
            }
            if active {
                idle_since = now;
            } else if now - idle_since >= SPIN {
                let until = self.timers(now);
                handle.bell.sleep();
                let news = handle.bell.rung() || handle.has_tasks.load(SyncOrdering::SeqCst);
                if !news {
                    let timeout = until.saturating_sub(self.now());
                    if self.epoll.wait(&mut ready, Some(timeout)).is_ok() {
                        self.note(&ready);
                    }
                }
                handle.bell.awake();
                handle.waker.clear();
                idle_since = self.now();
                timers_at = idle_since;
            }
        }
    }

    fn note(&mut self, ready: &[Ready]) -> bool {
        let mut any = false;
        for one in ready {
            if one.token == WAKER {
                continue;
            }
            any = true;
            let index = one.token as usize;
            let Some(Some(conn)) = self.conns.get_mut(index) else {
                continue;
            };
            conn.hung_up |= one.hung_up;
            if one.readable && !conn.readable {
                conn.readable = true;
                self.hot.push(index);
            }
            if one.writable && !conn.writable {
                conn.writable = true;
                if let Some(Some(lane)) = self.lanes.get_mut(conn.lane) {
                    lane.dirty = true;
                }
            }
        }
        any
    }

    // ---- tasks ----

    fn lane_for(&mut self, peer: &Arc<Peer>) -> usize {
        if let Some(index) = self.by_peer.get(&peer.key) {
            return *index;
        }
        let (eager_slots, eager_bytes) = eager(&self.shared, peer.lanes);
        let config = LaneConfig {
            eager_slots,
            eager_bytes,
            patience: self.shared.config.timeout,
        };
        let state = LaneState {
            peer: peer.clone(),
            lane: Lane::new(config, self.now()),
            ends: HashMap::new(),
            conns: Vec::new(),
            dirty: false,
        };
        let index = match self.lanes.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.lanes.push(None);
                self.lanes.len() - 1
            }
        };
        self.lanes[index] = Some(state);
        self.by_peer.insert(peer.key, index);
        index
    }

    fn perform(&mut self, task: Task) {
        let now = self.now();
        match task {
            Task::Connect {
                peer,
                fd,
                path,
                interface,
                stats,
            } => {
                let lane = self.lane_for(&peer);
                let index = match self.conns.iter().position(Option::is_none) {
                    Some(index) => index,
                    None => {
                        self.conns.push(None);
                        self.conns.len() - 1
                    }
                };
                if let Err(error) = self.epoll.add_edge(fd.as_raw_fd(), index as u64) {
                    self.shared
                        .log(Level::Warn, &format!("a connection was dropped: {error}"));
                    self.shared.news(News::Lost(peer.key, self.index, path));
                    return;
                }
                lock(&self.shared.paths).insert((peer.key.mirror, path), stats.clone());
                peer.paths[self.index].fetch_add(1, Ordering::Relaxed);
                self.conns[index] = Some(Conn::new(fd, lane, path, interface, stats));
                self.hot.push(index);
                if let Some(Some(state)) = self.lanes.get_mut(lane) {
                    state.lane.path_up(path, now);
                    state.conns.push(index);
                    state.dirty = true;
                }
            }
            Task::Begin(comm, listener) => self.begin(comm, listener),
            Task::Accept(comm) => {
                if let Some(index) = self.by_peer.get(&comm.peer.key).copied()
                    && let Some(Some(state)) = self.lanes.get_mut(index)
                {
                    state.lane.accept(comm.id);
                    state.dirty = true;
                }
            }
            Task::Decline(peer, comm) => {
                if let Some(index) = self.by_peer.get(&peer).copied()
                    && let Some(Some(state)) = self.lanes.get_mut(index)
                {
                    state.lane.decline(comm);
                    state.dirty = true;
                }
            }
            Task::Release(comm) => {
                self.release(&comm);
                comm.released.fetch_add(1, Ordering::Release);
            }
            Task::Drop(peer, path) => {
                if let Some(index) = self.by_peer.get(&peer).copied()
                    && let Some(conn) = self.conn_of(index, path)
                {
                    self.lose(conn, "not worth keeping");
                }
            }
            Task::InterfaceDown(interface) => {
                for index in 0..self.conns.len() {
                    if let Some(conn) = &self.conns[index]
                        && conn.interface == interface
                    {
                        self.lose(index, "its interface lost the carrier");
                    }
                }
            }
            Task::Stop => self.stopped = true,
        }
    }

    fn begin(&mut self, comm: Arc<Comm>, listener: Option<u64>) {
        let now = self.now();
        let index = self.lane_for(&comm.peer);
        let (slots, bytes) = eager(&self.shared, comm.peer.lanes);
        let bit = self.next_bit;
        self.next_bit = (self.next_bit + 1) % BITS;
        self.bits[bit].push((index, comm.side, comm.id));
        comm.bits[self.index].store(bit, Ordering::Relaxed);
        let Some(Some(state)) = self.lanes.get_mut(index) else {
            return;
        };
        let eager = match comm.side {
            Side::Send => {
                state.lane.add_send(comm.id, listener, now);
                Vec::new()
            }
            Side::Receive => {
                state.lane.add_receive(comm.id, now);
                vec![0; slots * bytes as usize]
            }
        };
        state.dirty = true;
        let end = End {
            comm: comm.clone(),
            next: self.index as u64,
            eager,
            bit,
            failed: false,
        };
        state.ends.insert((comm.side, comm.id), end);
        comm.registered.fetch_add(1, Ordering::Release);
    }

    fn release(&mut self, comm: &Comm) {
        let Some(index) = self.by_peer.get(&comm.peer.key).copied() else {
            return;
        };
        self.detach(index, comm.side, comm.id, None);
        let Some(Some(state)) = self.lanes.get_mut(index) else {
            return;
        };
        comm.slots.fail(self.index, comm.peer.lanes, REMOTE);
        if let Some(end) = state.ends.remove(&(comm.side, comm.id)) {
            self.bits[end.bit].retain(|one| *one != (index, comm.side, comm.id));
        }
        state.lane.close(comm.id, comm.side);
        state.dirty = true;
        self.events(index);
        self.forget_if_over(index);
    }

    fn forget_if_over(&mut self, index: usize) {
        if let Some(Some(state)) = self.lanes.get(index)
            && state.ends.is_empty()
            && state.conns.is_empty()
        {
            self.by_peer.remove(&state.peer.key);
            self.lanes[index] = None;
        }
    }

    // ---- requests ----

    fn poll_bit(&mut self, bit: usize) {
        for place in 0..self.bits[bit].len() {
            let (index, side, comm) = self.bits[bit][place];
            self.poll_comm(index, side, comm);
        }
    }

    fn poll_comm(&mut self, index: usize, side: Side, id: u64) {
        loop {
            let Some(Some(state)) = self.lanes.get_mut(index) else {
                return;
            };
            let Some(end) = state.ends.get_mut(&(side, id)) else {
                return;
            };
            if end.failed {
                let code = code(end.comm.failure());
                end.comm.slots.fail(self.index, state.peer.lanes, code);
                return;
            }
            let Some(length) = end.comm.slots.take(end.next) else {
                return;
            };
            end.next += state.peer.lanes as u64;
            let taken = match side {
                Side::Send => state.lane.send(id, length as u64),
                Side::Receive => state.lane.post(id, length as u64),
            };
            state.dirty = true;
            if taken.is_none() {
                // Cannot be: there are as many slots as the lane's window. Fail rather than hang.
                end.failed = true;
                end.comm.fail(Why::PeerClosed);
            }
            self.events(index);
        }
    }

    // ---- events ----

    /// What is queued of a message is copied, before its memory goes back to its owner.
    fn detach(&mut self, index: usize, side: Side, comm: u64, message: Option<u64>) {
        if side == Side::Receive {
            return;
        }
        let Some(Some(state)) = self.lanes.get(index) else {
            return;
        };
        for conn in &state.conns {
            if let Some(Some(conn)) = self.conns.get_mut(*conn)
                && conn.frames() > 0
            {
                conn.detach(comm, message, |comm, message| {
                    state.memory(self.index, Side::Send, comm, message)
                });
            }
        }
    }

    fn events(&mut self, index: usize) {
        loop {
            let Some(Some(state)) = self.lanes.get_mut(index) else {
                return;
            };
            let Some(event) = state.lane.event() else {
                return;
            };
            let lanes = state.peer.lanes as u64;
            let number = |message: u64| message * lanes + self.index as u64;
            match event {
                Event::Sent {
                    comm,
                    message,
                    length,
                } => {
                    let number = number(message);
                    self.detach(index, Side::Send, comm, Some(message));
                    self.finish(index, Side::Send, comm, number, length);
                }
                Event::Received {
                    comm,
                    message,
                    length,
                } => {
                    let number = number(message);
                    self.finish(index, Side::Receive, comm, number, length);
                }
                Event::Deliver {
                    comm,
                    message,
                    slot,
                    length,
                } => {
                    let number = number(message);
                    if let Some(end) = state.ends.get(&(Side::Receive, comm))
                        && let Some(memory) = end.comm.slots.memory(number)
                    {
                        let from = slot * self.shared.config.eager_bytes as usize;
                        let bytes = &end.eager[from..from + length as usize];
                        // SAFETY: the request is taken, so its memory is lent to this worker, and
                        // the lane has checked that the message fits it.
                        #[allow(unsafe_code, reason = "an eager message is delivered")]
                        unsafe {
                            sys::copy(Memory::read_only(bytes), memory);
                        }
                    }
                    self.finish(index, Side::Receive, comm, number, length);
                }
                Event::Failed { comm, side, why } => self.fail(index, side, comm, why),
                Event::Died(path) => {
                    if let Some(conn) = self.conn_of(index, path) {
                        self.lose(conn, "nothing was confirmed for too long");
                    }
                }
                Event::Suspected(path) => {
                    let peer = state.peer.key;
                    self.mark(index, path, true);
                    self.shared.news(News::Suspected(peer, self.index, path));
                }
                Event::Recovered(path) => self.mark(index, path, false),
                Event::Open { comm, listener } => {
                    let peer = state.peer.clone();
                    if !self.shared.offer(listener, peer, comm)
                        && let Some(Some(state)) = self.lanes.get_mut(index)
                    {
                        state.lane.decline(comm);
                    }
                }
                Event::Opened { comm, accepted } => {
                    if let Some(end) = state.ends.get(&(Side::Send, comm)) {
                        let answer = if accepted { ACCEPTED } else { DECLINED };
                        end.comm.opened.store(answer, Ordering::Release);
                    }
                }
            }
        }
    }

    fn finish(&mut self, index: usize, side: Side, comm: u64, number: u64, length: u64) {
        if let Some(Some(state)) = self.lanes.get(index)
            && let Some(end) = state.ends.get(&(side, comm))
        {
            end.comm.slots.finish(number, length as usize);
        }
    }

    fn fail(&mut self, index: usize, side: Side, comm: u64, why: Why) {
        self.detach(index, side, comm, None);
        let Some(Some(state)) = self.lanes.get_mut(index) else {
            return;
        };
        let Some(end) = state.ends.get_mut(&(side, comm)) else {
            return;
        };
        end.failed = true;
        end.comm.fail(why);
        end.comm
            .slots
            .fail(self.index, state.peer.lanes, code(Some(why)));
        // A receiver that refused a message stays until it is closed: it must go on saying so.
        if side == Side::Send || !matches!(why, Why::Oversize { .. }) {
            state.lane.close(comm, side);
        }
        let level = match why {
            Why::PeerClosed => Level::Debug,
            _ => Level::Warn,
        };
        let name = state.peer.name();
        self.shared
            .log(level, &format!("comm {comm} with {name}: {why}"));
    }

    fn mark(&self, index: usize, path: PathId, suspect: bool) {
        if let Some(conn) = self.conn_of(index, path)
            && let Some(Some(conn)) = self.conns.get(conn)
        {
            conn.stats.suspected(suspect);
            let what = if suspect {
                "is suspect: nothing was confirmed for a while"
            } else {
                "carries again"
            };
            let PathStats {
                nic, port, peer, ..
            } = &*conn.stats;
            let text = format!("path {nic}:{port} to {peer} {what}");
            self.shared.log(Level::Info, &text);
        }
    }

    // ---- connections ----

    fn conn_of(&self, index: usize, path: PathId) -> Option<usize> {
        let state = self.lanes.get(index)?.as_ref()?;
        state.conns.iter().copied().find(|conn| {
            self.conns
                .get(*conn)
                .and_then(Option::as_ref)
                .is_some_and(|conn| conn.path == path)
        })
    }

    fn lose(&mut self, index: usize, why: &str) {
        let Some(conn) = self.conns.get_mut(index).and_then(Option::take) else {
            return;
        };
        let now = self.now();
        sys::set_reset_on_close(conn.fd.as_raw_fd());
        if let Some(Some(state)) = self.lanes.get_mut(conn.lane) {
            state.conns.retain(|one| *one != index);
            state.lane.path_down(conn.path, now);
            state.dirty = true;
            let peer = &state.peer;
            peer.paths[self.index].fetch_sub(1, Ordering::Relaxed);
            lock(&self.shared.paths).remove(&(peer.key.mirror, conn.path));
            let stats = &conn.stats;
            let level = if state.ends.is_empty() {
                Level::Debug
            } else {
                Level::Info
            };
            let text = format!(
                "path {}:{} to {} is gone: {why}",
                stats.nic, stats.port, stats.peer
            );
            self.shared.log(level, &text);
            self.shared
                .news(News::Lost(peer.key, self.index, conn.path));
        }
        let lane = conn.lane;
        drop(conn);
        self.events(lane);
        self.forget_if_over(lane);
    }

    fn read_hot(&mut self) -> bool {
        let mut any = false;
        for index in std::mem::take(&mut self.hot) {
            match self.read(index) {
                Ok(bytes) => any |= bytes > 0,
                Err(why) => self.lose(index, &why),
            }
            if let Some(Some(conn)) = self.conns.get(index)
                && conn.readable
                && !self.hot.contains(&index)
            {
                self.hot.push(index);
            }
        }
        any
    }

    /// Reads for one turn: bytes, or why the connection is over.
    fn read(&mut self, index: usize) -> Result<usize, String> {
        let mut total = 0;
        while let Some(Some(conn)) = self.conns.get(index) {
            if !conn.readable || total >= READ_TURN {
                break;
            }
            self.parse(index)?;
            let place = self.place(index);
            let Some(Some(conn)) = self.conns.get_mut(index) else {
                break;
            };
            match conn.fill(place) {
                Ok(0) => return Err("the peer closed it".into()),
                Ok(bytes) => total += bytes,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    conn.readable = false;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        self.parse(index)?;
        Ok(total)
    }

    /// The memory from the first missing byte of the arriving chunk on; scratch where it goes
    /// nowhere; `None` where no chunk is arriving.
    fn place(&mut self, index: usize) -> Option<Memory> {
        let conn = self.conns.get(index)?.as_ref()?;
        let Arriving {
            comm,
            message,
            offset,
            length,
            got,
        } = conn.arriving?;
        let (at, rest) = (offset + u64::from(got), (length - got) as usize);
        let state = self.lanes.get_mut(conn.lane)?.as_mut()?;
        let found = match state.lane.place(comm, message) {
            Place::Buffer => state
                .memory(self.index, Side::Receive, comm, message)
                .and_then(|memory| memory.part(at, rest)),
            Place::Eager(slot) => {
                let bytes = self.shared.config.eager_bytes;
                let end = state.ends.get_mut(&(Side::Receive, comm))?;
                let from = slot as u64 * bytes + at;
                Memory::of(&mut end.eager).part(from, rest)
            }
            Place::Nowhere => None,
        };
        let mut scratch = Memory::of(&mut self.scratch);
        scratch.length = scratch.length.min(rest);
        Some(found.unwrap_or(scratch))
    }

    /// Takes frames and their bytes out of the staging buffer.
    fn parse(&mut self, index: usize) -> Result<(), String> {
        loop {
            let place = self.place(index);
            let Some(Some(conn)) = self.conns.get_mut(index) else {
                return Ok(());
            };
            let (lane, path) = (conn.lane, conn.path);
            if let Some(arriving) = conn.arriving {
                if arriving.got < arriving.length {
                    if conn.staged() == 0 {
                        return Ok(());
                    }
                    conn.unstage(place);
                    continue;
                }
                conn.arriving = None;
                if let Some(Some(state)) = self.lanes.get_mut(lane) {
                    let Arriving {
                        comm,
                        message,
                        offset,
                        length,
                        ..
                    } = arriving;
                    state.lane.filled(comm, message, offset, length);
                    state.dirty = true;
                }
                self.events(lane);
                continue;
            }
            let Some(header) = conn.header() else {
                return Ok(());
            };
            let frame = Frame::parse(&header).map_err(|error| error.to_string())?;
            if let Frame::Chunk {
                comm,
                message,
                offset,
                length,
                ..
            } = frame
            {
                conn.arriving = Some(Arriving {
                    comm,
                    message,
                    offset,
                    length,
                    got: 0,
                });
            }
            let now = self.now();
            if let Some(Some(state)) = self.lanes.get_mut(lane) {
                let result = state.lane.receive(path, &frame, now);
                result.map_err(|error| error.to_string())?;
                state.dirty = true;
            }
            self.events(lane);
        }
    }

    // ---- out ----

    fn pump_dirty(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.lanes.len() {
            if let Some(Some(state)) = self.lanes.get_mut(index)
                && std::mem::take(&mut state.dirty)
            {
                any |= self.pump(index);
            }
        }
        any
    }

    /// Lets every path with room pull, in turn.
    fn pump(&mut self, index: usize) -> bool {
        let now = self.now();
        let mut any = false;
        for _ in 0..8 {
            let mut moved = false;
            let (mut broken, mut used) = (Vec::new(), Vec::new());
            let Some(Some(state)) = self.lanes.get_mut(index) else {
                return any;
            };
            for place in 0..state.conns.len() {
                let number = state.conns[place];
                let Some(Some(conn)) = self.conns.get_mut(number) else {
                    continue;
                };
                if !conn.writable {
                    continue;
                }
                let mut chunks = 0;
                while conn.queued() < PULL && conn.frames() < sys::PIECES / 2 {
                    let Some(frame) = state.lane.transmit(conn.path, now) else {
                        break;
                    };
                    chunks += usize::from(frame.payload() > 0);
                    let chunk = match frame {
                        Frame::Chunk {
                            comm,
                            message,
                            offset,
                            length,
                            ..
                        } => Some((comm, message, offset, length)),
                        _ => None,
                    };
                    conn.push(frame.emit(), chunk);
                }
                if conn.frames() == 0 {
                    continue;
                }
                if chunks > 0 {
                    used.push(number);
                }
                let want = conn.queued();
                let result =
                    conn.flush(|comm, message| state.memory(self.index, Side::Send, comm, message));
                match result {
                    Ok(bytes) => {
                        moved = true;
                        if bytes < want {
                            conn.writable = false;
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        conn.writable = false;
                    }
                    Err(error) => broken.push((number, error.to_string())),
                }
            }
            // Who took a chunk has its next turn after the others.
            state.conns.sort_by_key(|number| used.contains(number));
            for (number, why) in broken {
                self.lose(number, &why);
            }
            any |= moved;
            if !moved {
                return any;
            }
        }
        if let Some(Some(state)) = self.lanes.get_mut(index) {
            state.dirty = true;
        }
        any
    }

    // ---- time ----

    /// Does what is due; when it is next needed.
    fn timers(&mut self, now: Duration) -> Duration {
        let mut next = now + Duration::from_secs(1);
        for index in 0..self.lanes.len() {
            let Some(Some(state)) = self.lanes.get_mut(index) else {
                continue;
            };
            let Some(deadline) = state.lane.deadline() else {
                continue;
            };
            if deadline > now {
                next = next.min(deadline);
                continue;
            }
            for number in &state.conns {
                let Some(Some(conn)) = self.conns.get_mut(*number) else {
                    continue;
                };
                if !state.lane.owes(conn.path) {
                    continue;
                }
                let Ok(info) = sys::tcp_info(conn.fd.as_raw_fd()) else {
                    continue;
                };
                conn.stats.looked(&info);
                conn.adapt(&info);
                let report = Report {
                    unconfirmed: info.unacknowledged > 0 || info.unsent > 0 || conn.queued() > 0,
                    advanced: info.bytes_acknowledged != conn.acknowledged,
                    rtt: Some(Duration::from_micros(info.rtt_us.into())),
                    rate: (info.delivery_rate > 0).then_some(info.delivery_rate as f64),
                };
                conn.acknowledged = info.bytes_acknowledged;
                state.lane.report(conn.path, &report, now);
            }
            let (conns, lane) = (&self.conns, &state.lane);
            let rtt = |number: &usize| {
                let conn = conns.get(*number).and_then(Option::as_ref);
                conn.map_or(Duration::ZERO, |conn| lane.rtt(conn.path))
            };
            // Paths that are about equally quick keep their turns.
            let quickest = state.conns.iter().map(rtt).min().unwrap_or_default();
            let class = (quickest * 2 + Duration::from_micros(50)).as_nanos();
            state
                .conns
                .sort_by_key(|number| rtt(number).as_nanos() / class);
            state.lane.on_time(now);
            state.dirty = true;
            if let Some(deadline) = state.lane.deadline() {
                next = next.min(deadline.max(now + Duration::from_millis(1)));
            }
            self.events(index);
            self.pump_dirty();
        }
        next
    }
}
