//! The part of a worker, or of an instance of UDP, that other threads see: they ring for posted
//! requests, ask for tasks, and nudge where there is something to pull. `Own` is what only one of the
//! two kinds can be asked for.

use std::sync::Mutex;

use crate::doorbell::Doorbell;
use crate::lock::lock;
use crate::stats::WorkerStats;
use crate::sync::{AtomicBool, Ordering as SyncOrdering};
use crate::sys::Waker;
use crate::task::{Asked, Task};

/// Whether a flag was set, which it is not any more. Looked at first: a worker asks in each turn, and a swap that
/// finds nothing takes the cache line away from those who ring.
pub(crate) fn taken(flag: &AtomicBool) -> bool {
    flag.load(SyncOrdering::Relaxed) && flag.swap(false, SyncOrdering::SeqCst)
}

/// See the module. In cache lines of its own, in pairs as processors fetch them: each worker writes to its
/// own inbox in each turn.
#[derive(Debug)]
#[repr(align(128))]
pub struct Inbox<Own> {
    pub(crate) bell: Doorbell,
    pub(crate) waker: Waker,
    tasks: Mutex<Vec<Asked<Own>>>,
    pub(crate) has_tasks: AtomicBool,
    /// There is something to pull, and another worker's connections are full.
    pub(crate) nudged: AtomicBool,
    /// Some of its connections had room when there was nothing to pull.
    pub(crate) hungry: AtomicBool,
    /// What it did.
    pub counts: WorkerStats,
}

impl<Own> Inbox<Own> {
    /// For a worker that is about to start.
    pub fn new() -> std::io::Result<Inbox<Own>> {
        Ok(Inbox {
            bell: Doorbell::default(),
            waker: Waker::new()?,
            tasks: Mutex::new(Vec::new()),
            has_tasks: AtomicBool::new(false),
            nudged: AtomicBool::new(false),
            hungry: AtomicBool::new(true),
            counts: WorkerStats::default(),
        })
    }

    /// A comm has posted a request.
    pub fn ring(&self, bit: usize) {
        if self.bell.ring(bit) {
            self.waker.wake();
        }
    }

    /// Asks for something that both kinds do.
    pub fn ask(&self, task: Task) {
        self.push(Asked::Any(task));
    }

    /// Asks for something that only this kind does.
    pub fn ask_own(&self, task: Own) {
        self.push(Asked::Own(task));
    }

    fn push(&self, task: Asked<Own>) {
        lock(&self.tasks).push(task);
        self.has_tasks.store(true, SyncOrdering::SeqCst);
        if self.bell.must_wake() {
            self.waker.wake();
        }
    }

    /// Says that there is something to pull: whether the worker had room. Where all its connections
    /// are full, the kernel will tell it when one is not.
    pub fn nudge(&self) -> bool {
        if !self.hungry.swap(false, SyncOrdering::SeqCst) {
            return false;
        }
        WorkerStats::add(&self.counts.nudges, 1);
        if !self.nudged.swap(true, SyncOrdering::SeqCst) && self.bell.must_wake() {
            self.waker.wake();
        }
        true
    }

    /// Whether there is anything that the worker has not looked at.
    pub fn has_news(&self) -> bool {
        self.bell.rung()
            || self.has_tasks.load(SyncOrdering::SeqCst)
            || self.nudged.load(SyncOrdering::SeqCst)
    }

    /// What was asked for since the last call. The worker's.
    pub fn take(&self) -> Vec<Asked<Own>> {
        std::mem::take(&mut *lock(&self.tasks))
    }

    /// Drops what the worker has not come to.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *lock(&self.tasks)));
    }
}
