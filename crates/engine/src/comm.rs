//! A comm as callers and workers share it, and the process at its other end.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use evener_proto::{Side, Why};

use crate::hello::ProcessId;
use crate::slots::Slots;

/// A process, as this one sees it. `mirror`: this very process, seen from the accepting end of a
/// connection to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey {
    /// Which process.
    pub process: ProcessId,
    /// The accepting end of a connection to ourselves.
    pub mirror: bool,
}

/// Locks, and goes on where another thread panicked: every state behind these locks is whole at
/// all times.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process at the other end.
#[derive(Debug)]
pub struct Peer {
    /// Who it is.
    pub key: PeerKey,
    /// What admits to it.
    pub token: [u8; 16],
    /// Where it listens.
    pub port: u16,
    /// Lanes between it and us.
    pub lanes: usize,
    /// Its addresses, as far as known.
    pub addresses: Mutex<Vec<IpAddr>>,
    /// Comms between it and us.
    pub comms: AtomicUsize,
    /// Connections, by lane.
    pub paths: Vec<AtomicUsize>,
}

impl Peer {
    /// Connections in all lanes.
    pub fn connections(&self) -> usize {
        self.paths.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// For people: the first address.
    pub fn name(&self) -> String {
        let addresses = lock(&self.addresses);
        let id: String = self.key.process[..3]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        match addresses.first() {
            Some(address) => format!("{address}:{} ({id})", self.port),
            None => id,
        }
    }
}

/// Answers to an open.
pub const UNANSWERED: usize = 0;
/// The listener took the comm.
pub const ACCEPTED: usize = 1;
/// There is no such listener.
pub const DECLINED: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct Comm {
    /// The sending process' number.
    pub id: u64,
    /// Which end this is.
    pub side: Side,
    /// Who is at the other.
    pub peer: Arc<Peer>,
    /// The requests.
    pub slots: Slots,
    /// The bit of each lane's worker's bell.
    pub bits: Vec<AtomicUsize>,
    /// Lanes whose worker knows the comm.
    pub registered: AtomicUsize,
    /// Lanes whose worker has forgotten it.
    pub released: AtomicUsize,
    /// The peer's answer.
    pub opened: AtomicUsize,
    failed: AtomicBool,
    why: Mutex<Option<Why>>,
}

impl Comm {
    /// A comm that no worker knows yet.
    pub fn new(id: u64, side: Side, peer: Arc<Peer>) -> Arc<Comm> {
        peer.comms.fetch_add(1, Ordering::Relaxed);
        Arc::new(Comm {
            id,
            side,
            bits: (0..peer.lanes).map(|_| AtomicUsize::new(0)).collect(),
            peer,
            slots: Slots::default(),
            registered: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
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

    /// Whether all workers know it.
    pub fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Acquire) == self.peer.lanes
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.peer.comms.fetch_sub(1, Ordering::Relaxed);
    }
}
