//! What a caller and the workers share about one end of a comm: the requests, and how the comm stands.
//!
//! It knows no peer, no connection and no thread, so that a [`Link`](crate::link::Link) can be tested
//! with nothing else.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use evener_proto::{Side, Why};

use crate::frames::Framed;
use crate::lock::lock;
use crate::slots::Slots;

/// Answers to an open.
pub const UNANSWERED: usize = 0;
/// The listener took the comm.
pub const ACCEPTED: usize = 1;
/// There is no such listener.
pub const DECLINED: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct Requests {
    /// The sending process' number of the comm.
    pub id: u64,
    /// Which end this is.
    pub side: Side,
    /// The requests.
    pub slots: Slots,
    /// Its lanes ([`comm`](crate::comm)).
    pub lanes: usize,
    /// A bit for each lane whose worker knows it.
    registered: AtomicU64,
    /// A bit for each lane whose worker will not use the requests' memory any more.
    released: AtomicU64,
    /// The peer's answer.
    pub opened: AtomicUsize,
    failed: AtomicBool,
    why: Mutex<Option<Why>>,
    /// Where the memory of requests is frames.
    framed: OnceLock<Framed>,
}

impl Requests {
    /// Requests of an end with this number of lanes, which no worker knows yet.
    pub fn new(id: u64, side: Side, lanes: usize) -> Arc<Requests> {
        Arc::new(Requests {
            id,
            side,
            slots: Slots::default(),
            lanes,
            registered: AtomicU64::new(0),
            released: AtomicU64::new(0),
            opened: AtomicUsize::new(UNANSWERED),
            failed: AtomicBool::new(false),
            why: Mutex::new(None),
            framed: OnceLock::new(),
        })
    }

    /// From the first request on their memory is in frames ([`frames`](crate::frames)).
    pub(crate) fn frame(&self, framed: Framed) {
        let _ = self.framed.set(framed);
    }

    /// How requests lie in frames, if they do.
    pub fn framed(&self) -> Option<&Framed> {
        self.framed.get()
    }

    /// Nothing more will complete.
    pub fn fail(&self, why: Why) {
        lock(&self.why).get_or_insert(why);
        self.failed.store(true, Ordering::Release);
    }

    /// Why nothing more will complete, if so.
    pub fn failure(&self) -> Option<Why> {
        if self.failed.load(Ordering::Acquire) {
            *lock(&self.why)
        } else {
            None
        }
    }

    fn all(&self) -> u64 {
        (1 << self.lanes) - 1
    }

    /// The worker of this lane knows it.
    pub fn register(&self, lane: usize) {
        self.registered.fetch_or(1 << lane, Ordering::Release);
    }

    /// Whether the workers of all lanes know it.
    pub fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Acquire) == self.all()
    }

    /// The worker of this lane will not use the requests' memory any more.
    pub fn let_go(&self, lane: usize) {
        self.released.fetch_or(1 << lane, Ordering::Release);
    }

    /// Whether no worker will use its requests' memory any more.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire) == self.all()
    }
}
