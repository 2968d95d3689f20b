//! A comm as callers and workers share it, and the process at its other end.

use std::hint::spin_loop;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use evener_proto::{Side, Why};

use crate::hello::ProcessId;
use crate::link::Link;
use crate::peers::Claim;
use crate::slots::Slots;
use crate::stats::Latencies;

/// A process, as this one sees it. `mirror`: this very process, seen from the accepting end of a
/// connection to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey {
    /// Which process.
    pub process: ProcessId,
    /// The accepting end of a connection to ourselves.
    pub mirror: bool,
}

/// Doublings of the time between two tries of [`lock`]; together a few microseconds.
const TRIES: u32 = 7;

/// Locks, and goes on where another thread panicked: every state behind these locks is whole at
/// all times.
///
/// What these locks guard is looked at for well under a microsecond, and a thread that sleeps and is
/// woken has lost ten: so it looks on for a while, where std's lock sleeps at once as soon as another
/// does.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    for doubling in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => (0..1 << doubling).for_each(|_| spin_loop()),
        }
    }
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
    /// The worker that takes its comms' requests.
    pub home: usize,
    /// Its addresses, as far as known.
    pub addresses: Mutex<Vec<IpAddr>>,
    /// Who uses it: comms, offers of comms, connections on their way ([`Claim`]).
    pub claims: AtomicUsize,
    /// Connections.
    pub connections: AtomicUsize,
    /// Bytes of requests that are taken and not finished: of messages, and of buffers for them.
    pub under_way: [AtomicU64; 2],
    /// How long messages took from their posting's being seen to their acknowledgement.
    pub took: Latencies,
    /// What became of the flows that were tried out.
    pub placement: Placement,
    /// The protocol between it and us.
    pub link: Mutex<Link>,
}

/// What became of the flows that were tried out ([`evener_proto::dial`]), for statistics.
#[derive(Debug, Default)]
pub struct Placement {
    /// Times that flows were opened to see whether the sum grows.
    pub trials: AtomicU64,
    /// Times that it grew.
    pub gains: AtomicU64,
    /// Flows that were replaced by one from another port.
    pub rerolls: AtomicU64,
    /// Most bytes per second that were sent to the peer within a tenth of a second.
    pub best: AtomicU64,
}

impl Peer {
    /// A peer without a link that anybody would use.
    #[cfg(test)]
    pub fn for_tests(key: PeerKey) -> Peer {
        let config = crate::Config::default();
        let silences = Default::default();
        Peer::new(
            key,
            [0; 16],
            0,
            0,
            Vec::new(),
            Link::new(&config, silences, Default::default()),
        )
    }

    /// A peer without connections that nobody claims.
    pub fn new(
        key: PeerKey,
        token: [u8; 16],
        port: u16,
        home: usize,
        addresses: Vec<IpAddr>,
        link: Link,
    ) -> Peer {
        Peer {
            key,
            token,
            port,
            home,
            addresses: Mutex::new(addresses),
            claims: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            under_way: Default::default(),
            took: Latencies::default(),
            placement: Placement::default(),
            link: Mutex::new(link),
        }
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
    /// Who is at the other; known for as long as the comm is.
    pub peer: Claim,
    /// The requests.
    pub slots: Slots,
    /// The bit of its worker's bell.
    pub bit: AtomicUsize,
    /// The worker knows it.
    pub registered: AtomicBool,
    /// No worker will use its requests' memory any more.
    pub released: AtomicBool,
    /// The peer's answer.
    pub opened: AtomicUsize,
    failed: AtomicBool,
    why: Mutex<Option<Why>>,
}

impl Comm {
    /// A comm that no worker knows yet.
    pub fn new(id: u64, side: Side, peer: Claim) -> Arc<Comm> {
        Arc::new(Comm {
            id,
            side,
            bit: AtomicUsize::new(0),
            peer,
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

    /// Whether its worker knows it.
    pub fn is_registered(&self) -> bool {
        self.registered.load(Ordering::Acquire)
    }
}
