//! Requests with their data, agreed on with the other ranks, and run by one thread in one order.
//!
//! A framework hands over a [`Request`] and a [`Job`], which knows where the data is and whom to tell.
//! The negotiation ([`evener_negotiate`]) says what comes next on all ranks, fused; the engine's thread
//! does it on the [`Mesh`]. A rank that has joined takes part with zeros.
//!
//! Where the requests of the ranks do not fit together, each gets the same error and the next
//! operation works. Where a connection is lost, everything ends: this rank closes its connections, so
//! that the error spreads and nobody waits for a rank that does not come any more.

use crate::algorithms::Members;
use crate::light::{Fall, Light, Reducer};
use crate::mesh::{Lost, Mesh, Place};
use evener_negotiate::link::{LinkError, Node};
use evener_negotiate::{Action, Answer, Kind, Policy, Request};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

mod operations;

/// What came of an operation, beside its outputs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// `Join`: the last rank; `AddSet`: the set's number or -1; `RemoveSet`: the number.
    pub value: i64,
    /// `Alltoall`: the rows of each member that this rank has got.
    pub received: Vec<u64>,
}

/// Why there are no outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The caller's mistake, seen at once and on this rank alone.
    Refused(String),
    /// The ranks' requests do not fit together; the same text on all of them.
    Mismatch(String),
    /// A rank is gone, or has failed, and this engine can do nothing more.
    Broken(String),
}

/// The framework's side of one operation. It is called on any thread.
pub trait Job: Send {
    /// The data of input `index`, row-major.
    fn input(&self, index: usize) -> &[u8];
    /// Memory for output `index` of this shape, which is then filled.
    ///
    /// # Errors
    /// Where there is none.
    fn output(&mut self, index: usize, shape: &[u64]) -> Result<&mut [u8], String>;
    /// The same, with a copy of input `index` in it from byte `start` on.
    ///
    /// # Errors
    /// Where there is no memory.
    fn begin(&mut self, index: usize, shape: &[u64], start: usize) -> Result<&mut [u8], String>;
    /// It has ended.
    fn finish(self: Box<Self>, outcome: Result<Outcome, Failure>);
}

struct Entry {
    request: Request,
    job: Box<dyn Job>,
}

/// What an engine goes by. Times are seconds.
#[derive(Debug, Clone)]
pub struct Options {
    /// This rank, and how many there are.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    /// Process sets that exist from the start, numbered from 1.
    pub sets: Vec<Vec<u32>>,
    /// See [`Policy`].
    pub policy: Policy,
    /// How long submissions are gathered where nobody waits.
    pub cycle: f64,
    /// How long a peer may be silent.
    pub timeout: f64,
}

type Key = (u32, String);

struct Shared {
    node: Node,
    mesh: RwLock<Mesh>,
    rank: usize,
    size: usize,
    entries: Mutex<HashMap<Key, Entry>>,
    sets: Mutex<HashMap<u32, Vec<usize>>>,
    broken: Mutex<Option<String>>,
    gated: AtomicBool,
    closing: AtomicBool,
    /// Times at which all ranks had joined.
    joins: AtomicI64,
    /// How sums of all ranks go, where they do not go as they are.
    light: OnceLock<Reducer>,
}

/// From a job's `init` to its `shutdown`.
pub struct Engine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Not connected yet: [`Engine::connect`] is next.
    ///
    /// # Errors
    /// Where this process cannot listen.
    pub fn new(options: Options) -> Result<Self, LinkError> {
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 1e9));
        let timeout = seconds(options.timeout);
        let node = Node::new(
            options.rank,
            options.size,
            &options.sets,
            options.policy,
            seconds(options.cycle),
            timeout,
        )?;
        let (rank, size) = (options.rank as usize, options.size as usize);
        let every = std::iter::once((0..size).collect());
        let given = options.sets.iter();
        let sets = every.chain(given.map(|set| set.iter().map(|rank| *rank as usize).collect()));
        Ok(Self {
            shared: Arc::new(Shared {
                node,
                mesh: RwLock::new(Mesh::new(rank, size, timeout)?),
                rank,
                size,
                entries: Mutex::default(),
                sets: Mutex::new((0..).zip(sets).collect()),
                broken: Mutex::default(),
                gated: AtomicBool::new(false),
                closing: AtomicBool::new(false),
                joins: AtomicI64::new(0),
                light: OnceLock::new(),
            }),
            thread: Mutex::default(),
        })
    }

    /// The ports of the negotiation (0 but on rank 0) and of the data.
    #[must_use]
    pub fn ports(&self) -> (u16, u16) {
        (self.shared.node.port(), self.shared.mesh().port())
    }

    /// The negotiation, for what is not about data: the gate, the timeline, the end.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.shared.node
    }

    /// Connects all ranks and starts. `places`: where each one's data port is; `control`: rank 0's
    /// port of the negotiation.
    ///
    /// # Errors
    /// Names who did not come.
    pub fn connect(&self, places: &[Place], control: u16, token: &str) -> Result<(), String> {
        let shared = &self.shared;
        let first = places.first().map_or(&[][..], |(addresses, _)| addresses);
        shared
            .node
            .connect(first, control, token)
            .map_err(|error| format!("the negotiation of rank 0 at port {control}: {error}"))?;
        shared
            .mesh
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .connect(places, token)
            .map_err(|error| error.to_string())?;
        let work = shared.clone();
        let thread = thread::Builder::new()
            .name("evener-engine".to_owned())
            .spawn(move || work.work())
            .map_err(|error| error.to_string())?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// Sends less between nodes from now on, in sums of all ranks. Once, before [`Engine::connect`].
    pub fn lighten(&self, light: Light) {
        let reducer = Reducer::new(light, self.shared.rank, self.shared.size);
        let _ = self.shared.light.set(reducer);
    }

    /// How many sums went in two levels, and how many gradients in part.
    #[must_use]
    pub fn lightened(&self) -> (u64, u64) {
        self.shared.light.get().map_or((0, 0), Reducer::counts)
    }

    /// See [`Reducer::is_linear`].
    pub fn is_linear(&self, mark: u32) {
        if let Some(light) = self.shared.light.get() {
            light.is_linear(mark);
        }
    }

    /// See [`Reducer::falls`].
    #[must_use]
    pub fn falls(&self) -> Vec<Fall> {
        self.shared
            .light
            .get()
            .map(Reducer::falls)
            .unwrap_or_default()
    }

    /// All ranks have opened the gate ([`Node::open_gate`]): use it.
    pub fn use_gate(&self) {
        self.shared.node.use_gate();
        self.shared.gated.store(true, Ordering::Release);
    }

    /// Submits an operation; `job` hears of its end, perhaps before this returns. `urgent`: the
    /// caller waits for it.
    pub fn submit(&self, request: Request, job: Box<dyn Job>, urgent: bool) {
        let shared = &self.shared;
        let key = (request.set, request.name.clone());
        let refused = {
            let mut entries = lock(&shared.entries);
            let in_flight = entries.contains_key(&key);
            // Whoever breaks the engine sets the reason first and then takes the entries.
            if let Some(reason) = lock(&shared.broken).clone() {
                Some(Failure::Broken(reason))
            } else if in_flight {
                Some(Failure::Refused(format!(
                    "{:?} is still in flight; wait for it first, or give the second one another \
                     name (Duplicate tensor name)",
                    request.name
                )))
            } else if let Some(problem) = shared.problem(&request) {
                Some(Failure::Refused(problem))
            } else {
                let copy = request.clone();
                entries.insert(key, Entry { request: copy, job });
                drop(entries);
                // It is in no other request's way: the name was free.
                let _ = shared.node.submit(request, urgent, false);
                return;
            }
        };
        if let Some(failure) = refused {
            job.finish(Err(failure));
        }
    }

    /// Submits an operation without data and waits: barriers, joins, process sets.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn wait(&self, request: Request) -> Result<Outcome, Failure> {
        let end = Arc::new((Mutex::new(None), Condvar::new()));
        self.submit(request, Box::new(Plain(end.clone())), true);
        let mut found = lock(&end.0);
        loop {
            if let Some(outcome) = found.take() {
                return outcome;
            }
            found = end.1.wait(found).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The members of a process set, in order.
    #[must_use]
    pub fn members(&self, set: u32) -> Option<Vec<usize>> {
        lock(&self.shared.sets).get(&set).cloned()
    }

    /// All process sets: number and members.
    #[must_use]
    pub fn sets(&self) -> Vec<(u32, Vec<usize>)> {
        let sets = lock(&self.shared.sets);
        let mut all: Vec<_> = sets.iter().map(|(n, ranks)| (*n, ranks.clone())).collect();
        all.sort();
        all
    }

    /// How often all ranks have joined.
    #[must_use]
    pub fn joins(&self) -> i64 {
        self.shared.joins.load(Ordering::Acquire)
    }

    /// Ends everything now: who waits fails, here and at the peers.
    pub fn abort(&self, reason: &str) {
        self.shared.end(reason);
    }

    /// Finishes what is agreed and stops the thread; the others go on without this rank. `linger`:
    /// seconds for the peers to hear of it. False on rank 0 where the others go on: call it again,
    /// for they need the negotiation.
    #[must_use]
    pub fn close(&self, linger: f64) -> bool {
        let shared = &self.shared;
        if !shared.closing.load(Ordering::Acquire) {
            shared.node.shutdown();
            let deadline = Instant::now() + Duration::from_secs(5);
            let thread = lock(&self.thread).take();
            if let Some(thread) = thread {
                while !thread.is_finished() && Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(1));
                }
                shared.closing.store(true, Ordering::Release);
                shared.end("Horovod has been shut down");
                let _ = thread.join();
            }
            shared.closing.store(true, Ordering::Release);
        }
        shared
            .node
            .close(Duration::from_secs_f64(linger.clamp(0.0, 60.0)))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.end("Horovod has been shut down");
    }
}

impl Shared {
    fn mesh(&self) -> std::sync::RwLockReadGuard<'_, Mesh> {
        self.mesh.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a request cannot be, as far as this rank can see.
    fn problem(&self, request: &Request) -> Option<String> {
        let sets = lock(&self.sets);
        let Some(members) = sets.get(&request.set) else {
            return Some(format!(
                "process set {} does not exist: give it to hvd.init(process_sets=...) or \
                 hvd.add_process_set() first",
                request.set
            ));
        };
        if !members.contains(&self.rank) {
            return Some(format!(
                "rank {} is not in process set {} of ranks {members:?}",
                self.rank, request.set
            ));
        }
        if request.kind == Kind::Adasum && !members.len().is_power_of_two() {
            return Some(format!(
                "Adasum needs a number of ranks that is a power of 2, not {}",
                members.len()
            ));
        }
        let root = request.root as usize;
        if request.kind == Kind::Broadcast && !members.contains(&root) {
            return Some(format!(
                "root rank {root} is not in process set {}",
                request.set
            ));
        }
        None
    }

    fn work(&self) {
        while !self.closing.load(Ordering::Acquire) {
            if !self.node.await_work(Duration::from_millis(500)) {
                continue;
            }
            let Some(action) = self.node.next(Duration::ZERO) else {
                continue;
            };
            let outcome = match action {
                Action::Launch(answers) => self.launch(&answers),
                Action::Frozen { answers, real } => self.frozen(&answers, real),
                Action::End(reason) => {
                    self.end(&reason);
                    return;
                }
            };
            if let Err(lost) = outcome {
                let reason = format!("rank {}: {lost}", self.rank);
                // The others cannot go on without this rank.
                self.node.fail(&reason);
                self.end(&reason);
                return;
            }
        }
    }

    /// Nothing more is done: whoever waits is told, and so are the peers.
    fn end(&self, reason: &str) {
        let entries: Vec<Entry> = {
            let mut entries = lock(&self.entries);
            let mut broken = lock(&self.broken);
            broken.get_or_insert_with(|| reason.to_owned());
            entries.drain().map(|(_, entry)| entry).collect()
        };
        // A writer holds the mesh only while the ranks connect, which has a limit of its own.
        if let Ok(mesh) = self.mesh.try_read() {
            mesh.close();
        }
        for entry in entries {
            entry.job.finish(Err(Failure::Broken(reason.to_owned())));
        }
    }

    fn take(&self, answer: &Answer) -> Option<Entry> {
        let key = (answer.request.set, answer.request.name.clone());
        lock(&self.entries).remove(&key)
    }

    fn frozen(&self, answers: &[Arc<Answer>], real: bool) -> Result<(), Lost> {
        let flagged = if self.gated.load(Ordering::Acquire) {
            match self.node.exchange(!real) {
                Some(flagged) => flagged,
                None => return Ok(()), // why it ended comes next
            }
        } else {
            let ranks: Vec<usize> = (0..self.size).collect();
            let mesh = self.mesh();
            let members = Members {
                mesh: &mesh,
                ranks: &ranks,
                place: self.rank,
            };
            members.any(!real)?
        };
        // Before anybody hears of the end, who may submit the same at once.
        self.node.finished(flagged);
        if flagged {
            return Ok(());
        }
        self.launch(answers)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked inside left no half-made state that matters more than going on.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type End = Arc<(Mutex<Option<Result<Outcome, Failure>>>, Condvar)>;

/// A job without data.
struct Plain(End);

impl Job for Plain {
    fn input(&self, _index: usize) -> &[u8] {
        &[]
    }

    fn output(&mut self, _index: usize, _shape: &[u64]) -> Result<&mut [u8], String> {
        Err("it has no outputs".to_owned())
    }

    fn begin(&mut self, _index: usize, _shape: &[u64], _start: usize) -> Result<&mut [u8], String> {
        Err("it has no outputs".to_owned())
    }

    fn finish(self: Box<Self>, outcome: Result<Outcome, Failure>) {
        *lock(&self.0.0) = Some(outcome);
        self.0.1.notify_all();
    }
}
