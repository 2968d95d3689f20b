//! What all threads of an engine see.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::comm::Comm;
use crate::config::Config;
use crate::crew::Crew;
use crate::hello::ProcessId;
use crate::inbox::Inbox;
use crate::link::Link;
use crate::lock::lock;
use crate::log::{Level, Log};
use crate::news::News;
use crate::nics::{self, Nics};
use crate::packets::Packets;
use crate::paths::Paths;
use crate::peer::{Peer, PeerKey, Transport};
use crate::peers::{Claim, Peers};
use crate::stats::{Silences, WorkerStats};
use crate::sys;
use crate::task::{Hello, StreamTask, Task};

/// See the module.
pub struct Shared {
    pub(crate) config: Config,
    pub(crate) process: ProcessId,
    pub(crate) token: [u8; 16],
    pub(crate) nics: Mutex<Arc<Nics>>,
    pub(crate) port: u16,
    pub(crate) congestion: Option<String>,
    /// Of the workers of TCP.
    pub(crate) workers: Vec<Inbox<StreamTask>>,
    /// Of the instances of UDP.
    pub(crate) instances: Vec<Inbox<Hello>>,
    pub(crate) crew: Mutex<Crew>,
    pub(crate) waker: sys::Waker,
    pub(crate) news: Mutex<Vec<News>>,
    pub(crate) peers: Peers,
    pub(crate) listeners: Mutex<HashMap<u64, Arc<Mailbox>>>,
    pub(crate) pending: Mutex<HashMap<u64, Arc<Comm>>>,
    pub(crate) paths: Mutex<Paths>,
    pub(crate) next: AtomicU64,
    pub(crate) next_home: AtomicUsize,
    pub(crate) started: Instant,
    pub(crate) silences: Arc<Silences>,
    pub(crate) broken: AtomicBool,
    pub(crate) packets: Packets,
    pub(crate) log: Log,
}

/// Where the comms of a listener arrive.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// Comms that peers want to open.
    pub(crate) offers: Mutex<VecDeque<(Claim, u64)>>,
    /// Those that no worker knows yet.
    pub(crate) beginning: Mutex<VecDeque<Arc<Comm>>>,
}

impl Shared {
    /// Shared state of an engine without threads, interfaces and words. `waker`: of the control thread.
    pub(crate) fn bare(waker: sys::Waker) -> Shared {
        Shared {
            config: Config::default(),
            process: [0; 16],
            token: [0; 16],
            nics: Mutex::default(),
            port: 0,
            congestion: None,
            workers: Vec::new(),
            instances: Vec::new(),
            crew: Mutex::new(Crew::new(0)),
            waker,
            news: Mutex::new(Vec::new()),
            peers: Peers::default(),
            listeners: Mutex::default(),
            pending: Mutex::default(),
            paths: Mutex::default(),
            next: AtomicU64::new(1),
            next_home: AtomicUsize::new(0),
            started: Instant::now(),
            silences: Arc::default(),
            broken: AtomicBool::new(false),
            packets: Packets::default(),
            log: Box::new(|_, _| {}),
        }
    }

    /// `bare`, for tests.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn for_tests() -> Shared {
        Self::bare(sys::Waker::new().expect("the system has an eventfd"))
    }

    pub(crate) fn log(&self, level: Level, text: &str) {
        (self.log)(level, text);
    }

    /// The NICs of now.
    pub(crate) fn nics(&self) -> Arc<Nics> {
        lock(&self.nics).clone()
    }

    /// Warns where sockets cannot be bound to each of several NICs.
    pub(crate) fn say_unsteered(&self, nics: &Nics) {
        if let Some((nic, error)) = nics::unsteered(nics) {
            let text = format!(
                "no socket can be bound to {} ({error}): NICs of one subnet all send by the one that \
                 the routing table names",
                nic.name
            );
            self.log(Level::Warn, &text);
        }
    }

    /// Whether a thread has died, or all have stopped.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    pub(crate) fn news(&self, news: News) {
        lock(&self.news).push(news);
        self.waker.wake();
    }

    pub(crate) fn take_news(&self) -> Vec<News> {
        self.waker.clear();
        std::mem::take(&mut lock(&self.news))
    }

    pub(crate) fn control_fd(&self) -> i32 {
        self.waker.fd()
    }

    /// Never the same twice.
    pub(crate) fn nonce(&self) -> [u8; 16] {
        let words = [self.random(), self.random()];
        let mut bytes = [0; 16];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        match getrandom::fill(&mut bytes) {
            Ok(()) => u64::from_le_bytes(bytes),
            // It must differ, no more: tokens are not made here.
            Err(_) => self.next.fetch_add(1, Ordering::Relaxed) ^ 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Asks whoever moves this peer's bytes.
    pub(crate) fn ask(&self, peer: &Peer, task: Task) {
        match peer.key.transport {
            Transport::Tcp => self.workers[peer.home].ask(task),
            Transport::Udp => self.instances[peer.home].ask(task),
        }
    }

    /// Rings for a posted request of a comm with this peer.
    pub(crate) fn ring(&self, peer: &Peer, bit: usize) {
        match peer.key.transport {
            Transport::Tcp => self.workers[peer.home].ring(bit),
            Transport::Udp => self.instances[peer.home].ring(bit),
        }
    }

    /// What each thread that moves bytes has counted: TCP's, then UDP's.
    pub(crate) fn counts(&self) -> impl Iterator<Item = &WorkerStats> {
        let streams = self.workers.iter().map(|inbox| &inbox.counts);
        streams.chain(self.instances.iter().map(|inbox| &inbox.counts))
    }

    /// Tells the peer that nobody takes a comm.
    pub(crate) fn decline(&self, peer: &Claim, comm: u64) {
        self.ask(peer, Task::Decline(Arc::clone(peer), comm));
    }

    /// A claim on the peer with this key, made where it is new; `home`: the worker that has it, if that is
    /// known.
    pub(crate) fn peer(
        &self,
        key: PeerKey,
        token: [u8; 16],
        port: u16,
        addresses: &[IpAddr],
        home: Option<usize>,
    ) -> Claim {
        self.peers.claim(key, || {
            let home = home.unwrap_or_else(|| {
                let count = match key.transport {
                    Transport::Tcp => self.workers.len(),
                    Transport::Udp => self.instances.len(),
                };
                self.next_home.fetch_add(1, Ordering::Relaxed) % count.max(1)
            });
            let silences = self.silences.clone();
            let link = Link::new(&self.config, silences, self.started.elapsed());
            Peer::new(key, token, port, home, addresses.to_vec(), link)
        })
    }

    /// A peer wants to open a comm; its claim comes back where there is no such listener.
    pub(crate) fn offer(&self, listener: u64, peer: Claim, comm: u64) -> Result<(), Claim> {
        let Some(mailbox) = lock(&self.listeners).get(&listener).cloned() else {
            return Err(peer);
        };
        lock(&mailbox.offers).push_back((peer, comm));
        Ok(())
    }
}
