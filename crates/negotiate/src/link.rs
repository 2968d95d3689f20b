//! Carries the messages: rank 0 has a TCP connection to every other rank.
//!
//! All state of a process is behind one mutex. Whoever brings news (a caller that submits, a reader
//! of a connection, the clock) takes it, feeds the state machines, writes what comes out of them to
//! the sockets, and wakes the executor. A caller that waits for its operation reads the connections
//! itself for a while, so that what one rank says reaches the other's caller without a change of
//! threads; after that, and when nobody waits, threads of their own read. Frames are small; a peer
//! that does not read them for the whole timeout is lost.
//! How a connection begins, and what separates messages on it, is in [`crate::stream`].

mod pump;

use self::pump::{clock_loop, read_loop};
use crate::coordinator::{Coordinator, Event, Policy};
pub use crate::error::LinkError;
use crate::gate::Gate;
use crate::gather;
use crate::meet;
use crate::stream::{frames, invalid, listen, whole};
use crate::sys;
use crate::threads::spawn;
use crate::wire::{Down, Request, Up};
use crate::worker::{Action, Worker};
use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// So long a caller that waits reads the connections itself, the first part without giving its core
/// to others. Beyond it the wait is for a rank that is late, and a change of threads does not matter.
const EAGER: Duration = Duration::from_micros(300);
const SPIN: Duration = Duration::from_micros(50);

struct Core {
    worker: Worker,
    coordinator: Option<Coordinator>,
    /// Rank 0: a connection a rank. Others: rank 0's, under 0.
    links: HashMap<u32, TcpStream>,
    closed: bool,
    /// Since when something is submitted and not announced. Times are the node's microseconds.
    waiting: Option<u64>,
    /// When something was submitted last by a caller who did not wait for it at once.
    submitted: u64,
    /// When the clock looks next.
    alarm: u64,
    readers: usize,
    /// A caller does the launching itself; the background thread is left asleep.
    driven: bool,
}

/// What came over one connection and is not a whole frame yet. Locked before the core, never after.
struct Inbox {
    peer: u32,
    stream: TcpStream,
    bytes: Mutex<Vec<u8>>,
}

struct Shared {
    core: Mutex<Core>,
    inboxes: OnceLock<Vec<Inbox>>,
    /// Who drives waits on it.
    ready: Condvar,
    /// The background thread waits on it: launches are there, and nobody drives.
    idle: Condvar,
    /// The clock waits on it.
    clock: Condvar,
    start: Instant,
    /// Microseconds.
    cycle: u64,
    patience: u64,
    rank: u32,
}

/// What became of [`Node::quick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quick {
    /// Nothing. Submit it.
    No,
    /// All ranks launch this operation now, and it alone.
    Launch,
    /// It is submitted, and the caller drives, as after [`Node::submit`].
    Submitted,
}

/// One process's part in the negotiation.
pub struct Node {
    shared: Arc<Shared>,
    gate: OnceLock<Gate>,
    gated: AtomicBool,
    listener: Mutex<Option<TcpListener>>,
    port: u16,
    size: u32,
    timeout: Duration,
}

impl Node {
    /// `sets`: process sets from the start. `cycle`: how long submissions are gathered before they
    /// are announced, unless a caller waits. `timeout`: bounds connecting, and writing to a peer.
    ///
    /// # Errors
    /// Where rank 0 cannot listen.
    pub fn new(
        rank: u32,
        size: u32,
        sets: &[Vec<u32>],
        policy: Policy,
        cycle: Duration,
        timeout: Duration,
    ) -> Result<Self, LinkError> {
        let cycle = cycle.as_micros() as u64;
        let patience = cycle.saturating_mul(5).max(5000);
        let core = Core {
            worker: Worker::new(rank, patience),
            coordinator: (rank == 0).then(|| Coordinator::new(size, sets, policy)),
            links: HashMap::new(),
            closed: false,
            waiting: None,
            submitted: 0,
            alarm: 0,
            readers: 0,
            driven: false,
        };
        let listener = if rank == 0 && size > 1 {
            Some(listen()?)
        } else {
            None
        };
        Ok(Self {
            shared: Arc::new(Shared {
                core: Mutex::new(core),
                inboxes: OnceLock::new(),
                ready: Condvar::new(),
                idle: Condvar::new(),
                clock: Condvar::new(),
                start: Instant::now(),
                cycle,
                patience,
                rank,
            }),
            gate: OnceLock::new(),
            gated: AtomicBool::new(false),
            port: listener
                .as_ref()
                .and_then(|l| l.local_addr().ok())
                .map_or(0, |a| a.port()),
            listener: Mutex::new(listener),
            size,
            timeout,
        })
    }

    /// Rank 0's port; 0 elsewhere.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Rank 0: wait for all other ranks. Others: reach rank 0 at one of `addresses`. Then start.
    /// Once only.
    ///
    /// # Errors
    /// Where that does not come about within the timeout.
    pub fn connect(&self, addresses: &[String], port: u16, token: &str) -> Result<(), LinkError> {
        let deadline = Instant::now() + self.timeout;
        let links = if self.shared.rank == 0 {
            let listener = self
                .listener
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            match listener {
                Some(listener) => meet::accept(&listener, token, 1..self.size, deadline)?,
                None => HashMap::new(),
            }
        } else {
            let stream = meet::reach(addresses, port, token, self.shared.rank, deadline)?;
            HashMap::from([(0, stream)])
        };
        let mut inboxes = Vec::with_capacity(links.len());
        for (peer, stream) in &links {
            stream.set_write_timeout(Some(self.timeout))?;
            inboxes.push(Inbox {
                peer: *peer,
                stream: stream.try_clone()?,
                bytes: Mutex::new(Vec::new()),
            });
        }
        let count = inboxes.len();
        if self.shared.inboxes.set(inboxes).is_err() {
            return Err(io::Error::other("connected twice").into());
        }
        lock(&self.shared).links = links;
        for index in 0..count {
            let shared = self.shared.clone();
            lock(&self.shared).readers += 1;
            spawn("read", move || read_loop(&shared, index))?;
        }
        let shared = self.shared.clone();
        spawn("clock", move || clock_loop(&shared))?;
        Ok(())
    }

    /// See [`Worker::submit`]. `urgent`: a caller waits for it; announce at once. `drives`: the
    /// caller calls [`Node::next`] itself, until [`Node::undrive`].
    #[must_use]
    pub fn submit(&self, request: Request, urgent: bool, drives: bool) -> bool {
        let mut core = lock(&self.shared);
        core.driven |= drives;
        let now = self.shared.now();
        if !urgent {
            core.submitted = now;
        }
        let taken = core.worker.submit(request, now);
        if urgent {
            core.worker.flush();
        }
        self.shared.pump(&mut core);
        self.shared.schedule_flush(&mut core);
        taken
    }

    /// Maps `file`, in which the frozen schedule's flag can be reduced where all ranks share this
    /// machine. It counts from [`Node::use_gate`] on.
    ///
    /// # Errors
    /// Where it cannot be mapped.
    pub fn open_gate(&self, file: &std::fs::File) -> Result<(), LinkError> {
        let gate = Gate::new(file, self.shared.rank as usize, self.size as usize)?;
        self.gate
            .set(gate)
            .map_err(|_| io::Error::other("opened twice").into())
    }

    /// All ranks have opened the gate. Before the first submission; on all ranks or on none.
    pub fn use_gate(&self) {
        self.gated.store(true, Ordering::Relaxed);
    }

    fn gate(&self) -> Option<&Gate> {
        let gated = self.gated.load(Ordering::Relaxed);
        self.gate.get().filter(|_| gated)
    }

    /// Reduce the flag of the frozen step that [`Node::next`] gave last: whether any rank's is up.
    /// None: there is no gate, so it travels in the collective; or all has ended.
    #[must_use]
    pub fn exchange(&self, flag: bool) -> Option<bool> {
        self.gate()?.exchange(flag, || self.ended().is_some())
    }

    /// Submits `request`, announces it, and waits for its launch, in one call. For who drives, and
    /// where nothing else is waiting to be launched.
    #[must_use]
    pub fn quick(&self, request: Request) -> Quick {
        let key = (request.set, request.name.clone());
        let mut core = lock(&self.shared);
        let gate = self.gate().filter(|_| core.worker.is_next(&request));
        if core.worker.has_next() || !core.worker.submit(request, self.shared.now()) {
            return Quick::No;
        }
        if let Some(gate) = gate {
            // Nobody else saw it: the lock was held.
            let action = core.worker.take_action();
            debug_assert!(matches!(action, Some(Action::Frozen { real: true, .. })));
            drop(core);
            let flagged = gate.exchange(false, || self.ended().is_some());
            core = lock(&self.shared);
            if let Some(flagged) = flagged {
                core.worker.finished(flagged, self.shared.now());
            }
            core.driven = flagged != Some(false);
            self.shared.pump(&mut core);
            self.shared.schedule_flush(&mut core);
            return if core.driven {
                Quick::Submitted
            } else {
                Quick::Launch
            };
        }
        core.driven = true;
        core.worker.flush();
        self.shared.pump(&mut core);
        self.shared.schedule_flush(&mut core);
        let mut action = core.worker.take_action();
        drop(core);
        if action.is_none() {
            action = self.eager(EAGER);
        }
        let mut core = lock(&self.shared);
        match action {
            Some(Action::Launch(answers))
                if answers.len() == 1
                    && answers[0].error.is_empty()
                    && answers[0].request.set == key.0
                    && answers[0].request.name == key.1 =>
            {
                core.driven = false;
                if core.worker.has_next() {
                    self.shared.idle.notify_all();
                }
                return Quick::Launch;
            }
            Some(action) => core.worker.put_back(action),
            None => {}
        }
        Quick::Submitted
    }

    /// The next thing to do, while the caller reads the connections itself.
    fn eager(&self, limit: Duration) -> Option<Action> {
        let start = Instant::now();
        while start.elapsed() < limit {
            self.shared.read_what_is_there();
            let action = lock(&self.shared).worker.take_action();
            if action.is_some() {
                return action;
            }
            if start.elapsed() > SPIN {
                thread::yield_now();
            }
        }
        None
    }

    /// Announce what is submitted: a caller waits. `drives`: and calls [`Node::next`] himself from
    /// now on.
    pub fn flush(&self, drives: bool) {
        let mut core = lock(&self.shared);
        core.driven |= drives;
        if core.worker.unflushed() {
            core.worker.flush();
            self.shared.pump(&mut core);
            self.shared.schedule_flush(&mut core);
        }
    }

    /// The next thing to do; none after `timeout`.
    #[must_use]
    pub fn next(&self, timeout: Duration) -> Option<Action> {
        let mut core = lock(&self.shared);
        if let Some(action) = core.worker.take_action() {
            return Some(action);
        }
        drop(core);
        let deadline = Instant::now() + timeout;
        if let Some(action) = self.eager(EAGER.min(timeout)) {
            return Some(action);
        }
        core = lock(&self.shared);
        loop {
            if let Some(action) = core.worker.take_action() {
                return Some(action);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            core = wait(&self.shared.ready, core, left);
        }
    }

    /// Wait until there is something to do, nobody drives, and no burst goes on (see
    /// [`gather::launch`]); false after `timeout`.
    #[must_use]
    pub fn await_work(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut core = lock(&self.shared);
        loop {
            let mut left = deadline.saturating_duration_since(Instant::now());
            if let Some(since) = core.worker.next_since()
                && !core.driven
            {
                let at = gather::launch(since, core.submitted, self.shared.cycle);
                let early = at.saturating_sub(self.shared.now());
                if early == 0 {
                    return true;
                }
                left = left.min(Duration::from_micros(early));
            }
            if left.is_zero() {
                return false;
            }
            core = wait(&self.shared.idle, core, left);
        }
    }

    /// The caller calls [`Node::next`] itself from now on.
    pub fn drive(&self) {
        lock(&self.shared).driven = true;
    }

    /// It does no longer.
    pub fn undrive(&self) {
        let mut core = lock(&self.shared);
        core.driven = false;
        if core.worker.has_next() {
            self.shared.idle.notify_all();
        }
    }

    /// See [`Worker::finished`].
    pub fn finished(&self, flagged: bool) {
        let mut core = lock(&self.shared);
        core.worker.finished(flagged, self.shared.now());
        self.shared.pump(&mut core);
        self.shared.schedule_flush(&mut core);
    }

    /// Why nothing more can be launched, if so.
    #[must_use]
    pub fn ended(&self) -> Option<String> {
        lock(&self.shared).worker.ended().map(ToOwned::to_owned)
    }

    /// See [`Worker::frozen`].
    #[must_use]
    pub fn frozen(&self) -> (bool, u64) {
        lock(&self.shared).worker.frozen()
    }

    /// What the coordinator has to tell: timeline events and warnings. Empty but on rank 0.
    #[must_use]
    pub fn news(&self) -> (Vec<Event>, Vec<String>) {
        match &mut lock(&self.shared).coordinator {
            Some(coordinator) => (coordinator.events(), coordinator.warnings()),
            None => (Vec::new(), Vec::new()),
        }
    }

    /// Record timeline events from now on, or no longer. The clock of their times starts with the
    /// node; [`Node::now`] gives it.
    pub fn record(&self, on: bool) {
        if let Some(coordinator) = &mut lock(&self.shared).coordinator {
            coordinator.record(on);
        }
    }

    /// Microseconds on the node's clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.shared.now()
    }

    /// Tell all that this rank ends: [`Node::ended`] is set here after it. The others go on, and what
    /// needs this rank is an error.
    pub fn shutdown(&self) {
        let mut core = lock(&self.shared);
        if core.worker.ended().is_none() {
            core.worker.shutdown(self.shared.now());
            self.shared.pump(&mut core);
        }
    }

    /// Tell all that this rank cannot go on. [`Node::ended`] is set on every rank after it.
    pub fn fail(&self, reason: &str) {
        let mut core = lock(&self.shared);
        core.worker.fail(reason, self.shared.now());
        self.shared.pump(&mut core);
    }

    /// Close the connections; what was sent still arrives. Waits for the peers for `linger` at most.
    /// On rank 0, false and nothing is closed where others go on after that: they need the
    /// coordinator, which lives here.
    #[must_use]
    pub fn close(&self, linger: Duration) -> bool {
        let deadline = Instant::now() + linger;
        let mut core = lock(&self.shared);
        // Closing on unread data would reset the connection, and lose what was said last.
        let said = |core: &Core| {
            let rest = core.coordinator.as_ref().is_some_and(|c| !c.ended());
            core.links.is_empty() || (core.worker.ended().is_some() && !rest)
        };
        while !said(&core) && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            core = wait(&self.shared.ready, core, left);
        }
        if self.shared.rank == 0 && !said(&core) {
            return false;
        }
        core.closed = true;
        self.shared.clock.notify_all();
        for stream in core.links.values() {
            let _ = stream.shutdown(Shutdown::Write);
        }
        if self.shared.rank == 0 {
            while core.readers > 0 && Instant::now() < deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                core = wait(&self.shared.ready, core, left);
            }
        }
        true
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let mut core = lock(&self.shared);
        core.closed = true;
        for stream in core.links.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.shared.clock.notify_all();
        self.shared.ready.notify_all();
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Core> {
    // A thread that panicked inside left no half-made state that matters more than going on.
    shared.core.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a>(
    condition: &Condvar,
    core: MutexGuard<'a, Core>,
    left: Duration,
) -> MutexGuard<'a, Core> {
    match condition.wait_timeout(core, left) {
        Ok((core, _)) => core,
        Err(poisoned) => poisoned.into_inner().0,
    }
}
