//! A worker: one thread with its own connections and epoll. What it knows of a peer it shares with
//! the others ([`link`](crate::link)); a connection is one worker's alone.
//!
//! The loop: take news (tasks, rung comms, ready sockets), read what can be read ([`reading`]), let
//! connections with room pull ([`pulling`]), look at the clock. A peer has a *home* worker, which
//! takes its comms' requests and has all its connections at first; when it has no time left, it hands
//! half of them to a worker with more, and those with little to do gather ([`spreading`]).
//!
//! # When to sleep
//! With nothing to do for [`SPIN`] ([`SPIN_WAITED`] while a request waits), a worker sleeps until a
//! socket, a caller or a deadline wakes it. Where the network is the limit (there is more to send than
//! may be on its way) time is not what counts but what a byte costs: after a turn that moved little a
//! worker naps ([`NAP`](crate::crew)) and nothing wakes it, so that the next turn moves much at once. On one core
//! or many, that also makes the time in which a worker works a true measure of what it could still
//! take ([`spreading`]). Where the network is not the limit and much is under way ([`BULK`]), what
//! arrives should be read at once: only the home looks on, the others sleep when they have nothing.

mod pulling;
mod reading;
mod spreading;
mod timers;

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use evener_proto::{PathId, Side, Why};

use crate::conn::Conn;
use crate::crew::{LIGHT, Load};
use crate::doorbell::BITS;
use crate::inbox::taken;
use crate::link::{Effect, Link};
use crate::lock::lock;
use crate::log::Level;
use crate::news::News;
use crate::peer::Peer;
use crate::peers::Claim;
use crate::shared::Shared;
use crate::stats::WorkerStats;
use crate::sys::{self, Epoll, Ready};
use crate::task::{Asked, StreamTask, Task};
use pulling::Delivery;

/// Idle for this long, a worker sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// And for this long while a request waits: NCCL's own thread looks on all the time then, and the
/// next step of a ring is often farther away than [`SPIN`].
const SPIN_WAITED: Duration = Duration::from_micros(300);
/// No event says that something has arrived at a peer: so long a sleep may be while that matters.
const FULL_LOOK: Duration = Duration::from_millis(1);
/// With fewer processors than this nobody looks on for long: others need them.
const ROOMY: usize = 8;
/// This many bytes being sent are worth a wake, and keep a network busy for longer than it takes.
const BULK: u64 = 2 << 20;
/// A path that has carried less than this has perhaps let nothing through but small packets.
const FRUIT: u64 = 8 << 10;
/// Timers are looked at this often where the loop is busy.
const TICK: Duration = Duration::from_millis(2);
/// A worker that is told to stop goes on for this long at most, until every peer has confirmed that it
/// heard of the comms that were closed. A connection that is closed with bytes in it may be reset, and
/// what it had not delivered is lost with it: the goodbye too, and the peer would wait for us.
const GOODBYE: Duration = Duration::from_secs(1);
const WAKER: u64 = u64::MAX;

/// What this worker has of a peer.
struct Mine {
    peer: Arc<Peer>,
    /// Its connections here, the quickest first.
    conns: Vec<usize>,
    /// Something may be ready to send.
    dirty: bool,
    /// There was something to send at the last look.
    wants: bool,
    /// When the kernel was last asked what is on its way.
    looked: Duration,
    /// What its connections here deliver.
    delivery: Delivery,
}

/// See the module.
pub struct Worker {
    index: usize,
    shared: Arc<Shared>,
    epoll: Epoll,
    links: Vec<Option<Mine>>,
    conns: Vec<Option<Box<Conn>>>,
    /// Connections that may have something to read.
    hot: Vec<usize>,
    /// Which comms share a bit of the bell.
    bits: Vec<Vec<(Arc<Peer>, Side, u64)>>,
    next_bit: usize,
    /// Where payload is read before it is placed, or because nobody wants it.
    scratch: Vec<u8>,
    load: Load,
    /// It was told to stop: when it does at the latest.
    stops: Option<Duration>,
}

/// The peer's lock; what waiting for it costs is counted.
fn enter<'a>(peer: &'a Peer, counts: &WorkerStats) -> MutexGuard<'a, Link> {
    if let Ok(link) = peer.link.try_lock() {
        return link;
    }
    let began = Instant::now();
    let link = lock(&peer.link);
    counts.waited(began.elapsed());
    link
}

fn place_in<T>(all: &mut Vec<Option<T>>, one: T) -> usize {
    match all.iter().position(Option::is_none) {
        Some(place) => {
            all[place] = Some(one);
            place
        }
        None => {
            all.push(Some(one));
            all.len() - 1
        }
    }
}

impl Worker {
    /// The worker with this number.
    pub fn new(index: usize, shared: Arc<Shared>) -> std::io::Result<Worker> {
        let epoll = Epoll::new()?;
        epoll.add_readable(shared.workers[index].waker.fd(), WAKER)?;
        Ok(Worker {
            index,
            shared,
            epoll,
            links: Vec::new(),
            conns: Vec::new(),
            hot: Vec::new(),
            bits: vec![Vec::new(); BITS],
            next_bit: 0,
            scratch: vec![0; 256 << 10],
            load: Load::default(),
            stops: None,
        })
    }

    fn now(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let shared = self.shared.clone();
        let inbox = &shared.workers[self.index];
        let mut ready: Vec<Ready> = Vec::new();
        let (mut idle_since, mut timers_at) = (self.now(), Duration::ZERO);
        let (mut turn, mut polled) = (idle_since, idle_since);
        let roomy = sys::processors() >= ROOMY;
        while !self.is_over() {
            let (mut active, mut moved) = (false, 0);
            if taken(&inbox.has_tasks) {
                for task in inbox.take() {
                    match task {
                        Asked::Any(task) => self.perform(task),
                        Asked::Own(task) => self.perform_own(task),
                    }
                }
                active = true;
            }
            if inbox.bell.rung() {
                inbox.bell.drain(|bit| self.poll_bit(bit));
                active = true;
            }
            if taken(&inbox.nudged) {
                for mine in self.links.iter_mut().flatten() {
                    mine.dirty = true;
                }
            }
            // Requests first: what they send travels while the rest is looked at.
            moved += self.pump_dirty();
            let before = std::mem::replace(&mut polled, self.now());
            if self.epoll.wait(&mut ready, Some(Duration::ZERO)).is_ok() {
                active |= self.note(&ready, before);
            }
            moved += self.read_hot();
            moved += self.pump_dirty();
            active |= moved > 0;
            let now = self.now();
            let full = self.links.iter().flatten().any(|mine| mine.delivery.full);
            self.load.count(now - turn, active, full, moved);
            inbox.counts.turn(now - turn, active, full);
            turn = now;
            if now >= timers_at {
                timers_at = self.timers(now).min(now + TICK);
                self.spread();
            }
            if active {
                idle_since = now;
            }
            let (sending, waited) = self.under_way();
            let bulk = sending >= BULK && !full;
            let spin = if bulk && roomy && !self.is_home() {
                Duration::ZERO
            } else if waited > 0 && roomy {
                SPIN_WAITED
            } else {
                SPIN
            };
            if (full || (bulk && !roomy)) && moved < LIGHT && now - idle_since < spin {
                sys::nap(self.load.nap());
                turn = self.now();
                self.load.count(turn - now, false, full, 0);
                inbox.counts.napped(turn - now, full);
            } else if !active && now - idle_since >= spin {
                let mut until = self.timers(now);
                if self.links.iter().flatten().any(|mine| mine.delivery.full) {
                    until = until.min(now + FULL_LOOK);
                }
                if let Some(latest) = self.stops {
                    // Another worker may hear that the peer knows.
                    until = until.min(latest).min(now + TICK);
                }
                inbox.bell.sleep();
                if !inbox.has_news() {
                    let timeout = until.saturating_sub(self.now());
                    if self.epoll.wait(&mut ready, Some(timeout)).is_ok() {
                        self.note(&ready, polled);
                    }
                }
                inbox.bell.awake();
                if ready.iter().any(|one| one.token == WAKER) {
                    inbox.waker.clear();
                }
                idle_since = self.now();
                inbox.counts.slept(idle_since - turn);
                self.load.sleep(idle_since - turn);
                turn = idle_since;
                timers_at = timers_at.min(idle_since + TICK);
            }
        }
    }

    /// Whether it was told to stop, and its peers were told.
    fn is_over(&self) -> bool {
        let Some(latest) = self.stops else {
            return false;
        };
        let mut peers = self.links.iter().flatten().map(|mine| &mine.peer);
        self.now() >= latest || peers.all(|peer| lock(&peer.link).lane.is_parted())
    }

    /// Whether requests to some peer come here first.
    fn is_home(&self) -> bool {
        let mut peers = self.links.iter().flatten().map(|mine| &mine.peer);
        peers.any(|peer| peer.home == self.index)
    }

    /// Bytes of requests that are not finished: to be sent, and in all.
    fn under_way(&self) -> (u64, u64) {
        let peers = self.links.iter().flatten().map(|mine| &mine.peer);
        peers.fold((0, 0), |(sending, all), peer| {
            let [send, receive] = &peer.traffic.under_way;
            let send = send.load(Ordering::Relaxed);
            let receive = receive.load(Ordering::Relaxed);
            (sending + send, all + send + receive)
        })
    }

    /// Takes the kernel's word of what is ready; `before`: when it said nothing of that.
    fn note(&mut self, ready: &[Ready], before: Duration) -> bool {
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
                conn.since = conn.since.max(before);
                self.hot.push(index);
            }
            if one.writable && !conn.writable {
                conn.writable = true;
                if let Some(Some(mine)) = self.links.get_mut(conn.link) {
                    mine.dirty = true;
                }
            }
        }
        any
    }

    // ---- tasks ----

    /// The place of a peer in the list, made where it is new.
    fn link_for(&mut self, peer: &Arc<Peer>) -> usize {
        let known = self.link_of(peer);
        known.unwrap_or_else(|| {
            let mine = Mine {
                peer: peer.clone(),
                conns: Vec::new(),
                dirty: false,
                wants: false,
                looked: Duration::ZERO,
                delivery: Delivery::default(),
            };
            place_in(&mut self.links, mine)
        })
    }

    fn link_of(&self, peer: &Arc<Peer>) -> Option<usize> {
        self.links.iter().position(|mine| {
            mine.as_ref()
                .is_some_and(|mine| Arc::ptr_eq(&mine.peer, peer))
        })
    }

    fn dirty(&mut self, peer: &Arc<Peer>) {
        let link = self.link_for(peer);
        if let Some(Some(mine)) = self.links.get_mut(link) {
            mine.dirty = true;
        }
    }

    fn perform(&mut self, task: Task) {
        match task {
            Task::Begin(comm, listener) => {
                let bit = self.next_bit;
                self.next_bit = (self.next_bit + 1) % BITS;
                self.bits[bit].push((comm.peer.clone(), comm.side, comm.id));
                comm.bit.store(bit, Ordering::Relaxed);
                let now = self.now();
                lock(&comm.peer.link).begin(&comm.requests, listener, now);
                self.dirty(&comm.peer);
            }
            Task::Accept(comm) => {
                let peer = &comm.peer;
                lock(&peer.link).lane.accept(comm.id);
                self.dirty(peer);
            }
            Task::Decline(peer, comm) => {
                lock(&peer.link).lane.decline(comm);
                self.dirty(&peer);
            }
            Task::Release(comm) => {
                let of = &comm.peer;
                let bit = comm.bit.load(Ordering::Relaxed);
                self.bits[bit].retain(|(peer, side, id)| {
                    !(Arc::ptr_eq(peer, of) && *side == comm.side && *id == comm.id)
                });
                let now = self.now();
                let effects = {
                    let mut link = lock(&of.link);
                    link.release(&comm.requests);
                    link.events(now);
                    link.effects()
                };
                self.dirty(of);
                self.apply(of, effects);
                self.forget_if_over(of);
            }
            Task::Drop(peer, path, why) => self.drop_path(&peer, path, why),
            Task::Stop => self.stops = Some(self.now() + GOODBYE),
        }
    }

    fn perform_own(&mut self, task: StreamTask) {
        match task {
            StreamTask::Connect {
                peer,
                fd,
                path,
                interface,
                stats,
            } => {
                let now = self.now();
                lock(&self.shared.paths).insert(peer.key.mirror, path, stats.clone());
                peer.connections.fetch_add(1, Ordering::Relaxed);
                {
                    let mut link = lock(&peer.link);
                    link.lane.path_up(path, now);
                    link.own(path, Some(self.index));
                }
                let conn = Conn::new(fd, 0, path, interface, stats);
                self.adopt(&peer, Box::new(conn));
            }
            StreamTask::Adopt(peer, conn) => self.adopt(&peer, conn),
            StreamTask::Detach(peer) => {
                self.detach(&peer);
            }
            StreamTask::Give(peer, to) => {
                if let Some(link) = self.link_of(&peer) {
                    self.give(link, self.count(link).div_ceil(2), to);
                }
            }
            StreamTask::Ended(peer) => {
                let now = self.now();
                let effects = {
                    let mut link = lock(&peer.link);
                    link.lane.peer_ended();
                    link.events(now);
                    link.effects()
                };
                self.apply(&peer, effects);
            }
            StreamTask::InterfaceDown(interface, why) => {
                for index in 0..self.conns.len() {
                    if let Some(conn) = &self.conns[index]
                        && conn.interface == interface
                    {
                        self.lose(index, why);
                    }
                }
            }
        }
    }

    fn poll_bit(&mut self, bit: usize) {
        for place in 0..self.bits[bit].len() {
            let (peer, side, id) = self.bits[bit][place].clone();
            let now = self.now();
            let effects = {
                let mut link = lock(&peer.link);
                link.poll(side, id, now);
                link.effects()
            };
            self.dirty(&peer);
            self.apply(&peer, effects);
        }
    }

    /// Applies what a link has left to its caller, now that its lock is free.
    fn apply(&mut self, peer: &Arc<Peer>, effects: Vec<Effect>) {
        let mut detach = false;
        for effect in effects {
            match effect {
                Effect::Drop(path) => {
                    self.drop_path(peer, path, "nothing was confirmed for too long");
                }
                Effect::Suspected(path) => {
                    self.mark(peer, path, true);
                    // Where paths are too many, it is silent because of the others, and carries again.
                    let scarce = lock(&peer.link).lane.is_scarce();
                    if !scarce {
                        self.shared.news(News::Suspected(peer.key, path));
                    }
                }
                Effect::Recovered(path) => {
                    self.mark(peer, path, false);
                    self.shared.news(News::Recovered(peer.key, path));
                }
                Effect::Detach => detach = true,
                Effect::Offer { comm, listener } => {
                    // A connection of this worker's has brought it, and keeps the peer meanwhile.
                    let claim = Claim::of(peer);
                    if self.shared.offer(listener, claim, comm).is_err() {
                        lock(&peer.link).lane.decline(comm);
                        self.dirty(peer);
                    }
                }
                Effect::Failed { comm, why } => {
                    let level = match why {
                        Why::PeerClosed => Level::Debug,
                        _ => Level::Warn,
                    };
                    let text = format!("comm {comm} with {}: {why}", peer.name());
                    self.shared.log(level, &text);
                }
            }
        }
        if detach {
            self.detach(peer);
            for other in self.others(peer) {
                self.shared.workers[other].ask_own(StreamTask::Detach(peer.clone()));
            }
        }
    }

    fn mark(&self, peer: &Peer, path: PathId, suspect: bool) {
        let Some(stats) = lock(&self.shared.paths).get(peer.key.mirror, path).cloned() else {
            return;
        };
        stats.suspected(suspect);
        let what = if suspect {
            "is suspect: nothing was confirmed for a while"
        } else {
            "carries again"
        };
        let text = format!("path {}:{} to {} {what}", stats.nic, stats.port, stats.peer);
        self.shared.log(Level::Info, &text);
    }

    /// The other workers that have connections to a peer.
    fn others(&self, peer: &Peer) -> Vec<usize> {
        if self.shared.workers.len() == 1 {
            return Vec::new();
        }
        let link = lock(&peer.link);
        let others = link.workers().filter(|worker| *worker != self.index);
        others.collect()
    }

    fn detach(&mut self, peer: &Arc<Peer>) {
        let Some(Some(mine)) = self.link_of(peer).and_then(|link| self.links.get(link)) else {
            return;
        };
        let mut link = lock(&peer.link);
        for index in &mine.conns {
            if let Some(Some(conn)) = self.conns.get_mut(*index) {
                conn.detach(|comm, message| link.is_over(comm, message));
                for (comm, message) in conn.done.drain(..) {
                    link.unpin(Side::Send, comm, message);
                }
            }
        }
    }

    fn forget_if_over(&mut self, peer: &Arc<Peer>) {
        let Some(index) = self.link_of(peer) else {
            return;
        };
        if let Some(Some(mine)) = self.links.get(index)
            && mine.conns.is_empty()
            && !mine.dirty
            && lock(&peer.link).is_idle()
        {
            self.links[index] = None;
        }
    }

    // ---- connections ----

    fn adopt(&mut self, peer: &Arc<Peer>, mut conn: Box<Conn>) {
        let link = self.link_for(peer);
        conn.link = link;
        conn.readable = true;
        conn.writable = true;
        let fd = conn.fd.as_raw_fd();
        let index = place_in(&mut self.conns, conn);
        if let Some(Some(mine)) = self.links.get_mut(link) {
            mine.conns.push(index);
            mine.dirty = true;
        }
        self.hot.push(index);
        match self.epoll.add_edge(fd, index as u64) {
            Ok(()) => self.detach(peer),
            Err(error) => self.lose(index, &error.to_string()),
        }
    }

    fn conn_of(&self, peer: &Arc<Peer>, path: PathId) -> Option<usize> {
        let mine = self.links.get(self.link_of(peer)?)?.as_ref()?;
        mine.conns.iter().copied().find(|conn| {
            self.conns
                .get(*conn)
                .and_then(Option::as_ref)
                .is_some_and(|conn| conn.path == path)
        })
    }

    /// Closes a path, or asks the worker that has it.
    fn drop_path(&mut self, peer: &Arc<Peer>, path: PathId, why: &'static str) {
        if let Some(conn) = self.conn_of(peer, path) {
            self.lose(conn, why);
            return;
        }
        let owner = lock(&peer.link).owner(path);
        if let Some(owner) = owner.filter(|owner| *owner != self.index) {
            self.shared.workers[owner].ask(Task::Drop(peer.clone(), path, why));
        }
    }

    fn lose(&mut self, index: usize, why: &str) {
        let Some(mut conn) = self.conns.get_mut(index).and_then(Option::take) else {
            return;
        };
        let now = self.now();
        // A path that was given up before it had to send anything again says nothing of the network.
        let fruitless = sys::tcp_info(conn.fd.as_raw_fd()).is_ok_and(|info| {
            let carried = info.bytes_acknowledged + conn.stats.report().received;
            info.retransmits > 0 && carried < FRUIT
        });
        sys::set_reset_on_close(conn.fd.as_raw_fd());
        let Some(Some(mine)) = self.links.get_mut(conn.link) else {
            return;
        };
        mine.conns.retain(|one| *one != index);
        mine.dirty = true;
        let peer = mine.peer.clone();
        peer.connections.fetch_sub(1, Ordering::Release);
        lock(&self.shared.paths).end(peer.key.mirror, conn.path, why);
        conn.abandon();
        let (effects, idle, others) = {
            let mut link = lock(&peer.link);
            for (comm, message) in conn.done.drain(..) {
                link.unpin(Side::Send, comm, message);
            }
            link.own(conn.path, None);
            link.lane.path_down(conn.path, now);
            link.events(now);
            (link.effects(), link.is_idle(), link.lane.has_work())
        };
        let stats = &conn.stats;
        let level = if idle { Level::Debug } else { Level::Info };
        let text = format!(
            "path {}:{} to {} is gone: {why}",
            stats.nic, stats.port, stats.peer
        );
        self.shared.log(level, &text);
        self.shared.news(if !idle && fruitless {
            News::Fruitless(peer.key, conn.path)
        } else {
            News::Lost(peer.key, conn.path)
        });
        drop(conn);
        self.apply(&peer, effects);
        if others {
            for other in self.others(&peer) {
                self.shared.workers[other].nudge();
            }
        }
    }
}
