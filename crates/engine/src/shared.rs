//! What all threads of an engine see.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::arrivals::Arrivals;
use crate::choosing::{self, Choosing};
use crate::comm::{Comm, MOST_LANES};
use crate::config::Config;
use crate::crew::Crew;
use crate::frames::Frames;
use crate::hello::ProcessId;
use crate::inbox::Inbox;
use crate::link::Link;
use crate::lock::lock;
use crate::log::{Level, Log};
use crate::news::News;
use crate::nics::Nic;
use crate::packets::Packets;
use crate::paths::Paths;
use crate::peer::{Peer, PeerKey, Transport};
use crate::peers::{Claim, Peers};
use crate::stats::Silences;
use crate::sys;
use crate::task::Task;

/// See the module.
pub struct Shared {
    pub(crate) config: Config,
    pub(crate) process: ProcessId,
    pub(crate) token: [u8; 16],
    pub(crate) nics: Vec<Nic>,
    pub(crate) port: u16,
    pub(crate) congestion: Option<String>,
    /// Workers of TCP, and behind them the instances of UDP.
    pub(crate) workers: Vec<Inbox>,
    /// How many of them are TCP's.
    pub(crate) streams: usize,
    pub(crate) crew: Mutex<Crew>,
    pub(crate) waker: sys::Waker,
    pub(crate) news: Mutex<Vec<News>>,
    pub(crate) peers: Peers,
    pub(crate) listeners: Mutex<HashMap<u64, Arc<Mailbox>>>,
    pub(crate) arrivals: Arrivals,
    pub(crate) pending: Mutex<HashMap<u64, Arc<Comm>>>,
    pub(crate) paths: Mutex<Paths>,
    pub(crate) next: AtomicU64,
    pub(crate) next_home: AtomicUsize,
    pub(crate) started: Instant,
    pub(crate) silences: Arc<Silences>,
    pub(crate) broken: AtomicBool,
    pub(crate) choosing: Choosing,
    pub(crate) packets: Packets,
    /// For callers, where there are cards and they are wanted.
    pub(crate) frames: OnceLock<Arc<Frames>>,
    pub(crate) log: Log,
}

/// Where the comms of a listener arrive.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// Comms that peers want to open.
    pub(crate) offers: Mutex<VecDeque<(Vec<Claim>, u64)>>,
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
            nics: Vec::new(),
            port: 0,
            congestion: None,
            workers: Vec::new(),
            streams: 0,
            crew: Mutex::new(Crew::new(0)),
            waker,
            news: Mutex::new(Vec::new()),
            peers: Peers::default(),
            listeners: Mutex::default(),
            arrivals: Arrivals::default(),
            pending: Mutex::default(),
            paths: Mutex::default(),
            next: AtomicU64::new(1),
            next_home: AtomicUsize::new(0),
            started: Instant::now(),
            silences: Arc::default(),
            broken: AtomicBool::new(false),
            choosing: Choosing::default(),
            packets: Packets::default(),
            frames: OnceLock::new(),
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

    pub(crate) fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        match getrandom::fill(&mut bytes) {
            Ok(()) => u64::from_le_bytes(bytes),
            // It must differ, no more: tokens are not made here.
            Err(_) => self.next.fetch_add(1, Ordering::Relaxed) ^ 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// The places of the instances of UDP.
    pub(crate) fn instances(&self) -> Range<usize> {
        self.streams..self.workers.len()
    }

    /// Most connections that a comm over UDP has.
    pub(crate) fn lanes(&self) -> usize {
        let most = self.instances().len().min(MOST_LANES);
        self.config.lanes.min(most).max(1)
    }

    /// A peer wants to open a comm, whose lanes are all there: it is declined where there is no such
    /// listener.
    pub(crate) fn offer_all(&self, listener: u64, lanes: Vec<Claim>, comm: u64) {
        if let Err(lanes) = self.offer(listener, lanes, comm) {
            self.decline(&lanes, comm);
        }
    }

    /// Tells the peer that nobody takes a comm, whose lanes these are.
    pub(crate) fn decline(&self, lanes: &[Claim], comm: u64) {
        for peer in lanes {
            self.workers[peer.home].ask(Task::Decline(Arc::clone(peer), comm));
        }
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
                let places = match key.transport {
                    Transport::Tcp => 0..self.streams,
                    Transport::Udp => self.instances(),
                };
                let next = self.next_home.fetch_add(1, Ordering::Relaxed);
                places.start + next % places.len().max(1)
            });
            let silences = self.silences.clone();
            let link = Link::new(&self.config, silences, self.started.elapsed());
            Peer::new(key, token, port, home, addresses.to_vec(), link)
        })
    }

    /// A peer wants to open a comm, whose lanes these are; they come back where there is no such listener.
    pub(crate) fn offer(
        &self,
        listener: u64,
        lanes: Vec<Claim>,
        comm: u64,
    ) -> Result<(), Vec<Claim>> {
        let Some(mailbox) = lock(&self.listeners).get(&listener).cloned() else {
            return Err(lanes);
        };
        lock(&mailbox.offers).push_back((lanes, comm));
        if listener == choosing::LISTENER {
            self.choosing.offered();
        }
        Ok(())
    }
}
