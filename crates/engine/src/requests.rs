//! What a caller and the workers share about one end of a comm: the requests, and how the comm stands.
//!
//! It knows no peer, no connection and no thread, so that a [`Link`](crate::link::Link) can be tested
//! with nothing else.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use evener_proto::{Side, Why};

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
    registered: AtomicBool,
    released: AtomicBool,
    /// The peer's answer.
    pub opened: AtomicUsize,
    failed: AtomicBool,
    why: Mutex<Option<Why>>,
}

impl Requests {
    /// Requests of an end that no worker knows yet.
    pub fn new(id: u64, side: Side) -> Arc<Requests> {
        Arc::new(Requests {
            id,
            side,
            slots: Slots::default(),
            registered: AtomicBool::new(false),
            released: AtomicBool::new(false),
            opened: AtomicUsize::new(UNANSWERED),
            failed: AtomicBool::new(false),
            why: Mutex::new(None),
        })
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

    /// The worker knows it.
    pub fn register(&self) {
        self.registered.store(true, Ordering::Release);
    }

    /// Whether the worker knows it.
    pub fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Acquire)
    }

    /// The worker will not use the requests' memory any more.
    pub fn let_go(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Whether no worker will use its requests' memory any more.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }
}
