//! The control thread: everything that is rare. It accepts and greets, dials and redials, watches
//! links, measures flows and writes statistics. No message passes through it.
//!
//! # Strangers
//! The listening socket is open to the network. Whatever connects gets two seconds and 100 bytes of
//! memory to say a greeting of who has this process' key; otherwise it is closed without an answer.
//! There are at most [`MOST_GREETINGS`] of them at a time; the oldest goes first. A job's own peers
//! send their greeting at once, and dial again if they were the oldest in a storm.
//!
//! # Who dials
//! The process with the lower number keeps the flows between the two. The other dials one
//! to make itself known, more when what *it* sends needs them ([`evener_proto::dial`]), and as many
//! as the first when there has been no path for [`UNSERVED`]: a firewall may let connections through
//! in one direction only.
//!
//! # Addresses that come later
//! [`addresses`] takes cards that come up while the job runs, and tells peers of them.

mod addresses;
mod handshake;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use evener_proto::PathId;
use evener_proto::dial::{Delivered, Dialer, Order, Route};
use socket2::{Domain, Protocol, Socket, Type};

use crate::fds;
use crate::hello::{Greeting, Met, TAG};
use crate::lock::lock;
use crate::log::Level;
use crate::news::News;
use crate::peer::{Peer, PeerKey};
use crate::records;
use crate::shared::Shared;
use crate::sys::{Epoll, LinkWatch, Ready};
use crate::task::{StreamTask, Task};

/// Greetings that may be unfinished at a time.
pub const MOST_GREETINGS: usize = 256;
const GREETING_TIME: Duration = Duration::from_secs(2);
/// A dial of a port that was used before is given up after this long, another after twice as long.
const DIAL_TIME: Duration = Duration::from_millis(750);
/// Out of descriptors, peers are not accepted for this long.
const DEAF: Duration = Duration::from_millis(200);
const UNSERVED: Duration = Duration::from_secs(2);
/// A process has ended when its host has refused every dial for this long, and this many of them, while
/// no path was left: it listens from its start to its end. A network that is cut refuses nothing.
const ENDED: (Duration, u32) = (Duration::from_millis(500), 3);
/// Between two looks at what the paths delivered.
const MEASURE: Duration = Duration::from_millis(100);
/// A peer without comms is dialled for this long after it was first heard of.
const FRESH: Duration = Duration::from_secs(5);
/// After this many paths in a row that carried nothing but small packets, the network may swallow large
/// ones without a word: new connections have segments that every network carries.
const FRUITLESS: u32 = 3;
/// Bytes of those: the least MTU of IPv6, 1280, less the headers of IPv6 and TCP.
const SMALL: u32 = 1200;
/// Unsent bytes in the kernel under which a new connection has room; its worker adapts it.
const LOW_WATER: u32 = 64 << 10;
const PORTS: std::ops::Range<u64> = 20_000..60_000;

const WAKER: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;
const LINKS: u64 = u64::MAX - 2;

struct PeerState {
    peer: Arc<Peer>,
    dialer: Dialer,
    /// Whether this side keeps the flows.
    keeps: bool,
    since: Duration,
    unserved: Option<Duration>,
    /// Since when every dial was refused, and how many.
    refused: Option<(Duration, u32)>,
    /// How many paths in a row have ended and carried nothing but small packets.
    fruitless: u32,
    last: HashMap<PathId, (u64, u64)>,
    measured: Duration,
}

enum Kind {
    /// With the greeting that was challenged.
    Incoming(Option<(Greeting, Met)>),
    Outgoing {
        peer: PeerKey,
        flow: u64,
        path: PathId,
        route: Route,
        said: Said,
    },
}

/// How far the side that dialled is: what it said last.
enum Said {
    Nothing,
    Greeting([u8; TAG]),
    Proof(Met),
}

/// A connection before frames flow on it.
struct Handshake {
    socket: Socket,
    kind: Kind,
    bytes: Vec<u8>,
    until: Duration,
    began: Duration,
}

/// See the module.
pub struct Control {
    shared: Arc<Shared>,
    epoll: Epoll,
    listener: Socket,
    links: Option<LinkWatch>,
    started: Instant,
    peers: HashMap<PeerKey, PeerState>,
    handshakes: Vec<Option<Handshake>>,
    recorded: Duration,
    /// Since when the listener is not watched, because the process is out of descriptors.
    deaf: Option<Duration>,
    /// Whether that was said.
    short: bool,
    /// Whether it was said that a peer has another version.
    mixed: bool,
}

impl Drop for Control {
    fn drop(&mut self) {
        fds::forget(self.listener.as_raw_fd());
    }
}

impl Control {
    /// A control thread's state.
    pub fn new(shared: Arc<Shared>, listener: Socket) -> std::io::Result<Control> {
        let epoll = Epoll::new()?;
        epoll.add_readable(shared.control_fd(), WAKER)?;
        epoll.add_readable(listener.as_raw_fd(), LISTENER)?;
        fds::note(listener.as_raw_fd());
        let links = LinkWatch::new().ok();
        if let Some(links) = &links {
            epoll.add_readable(links.fd(), LINKS)?;
        } else {
            shared.log(
                Level::Warn,
                "the kernel refuses news of links: a lost carrier is found by silence, and cards that \
                 come later are not used",
            );
        }
        Ok(Control {
            shared,
            epoll,
            listener,
            links,
            started: Instant::now(),
            peers: HashMap::new(),
            handshakes: Vec::new(),
            recorded: Duration::ZERO,
            deaf: None,
            short: false,
            mixed: false,
        })
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let mut ready: Vec<Ready> = Vec::new();
        loop {
            let timeout = self.timeout();
            if self.epoll.wait(&mut ready, Some(timeout)).is_err() {
                continue;
            }
            for one in &ready {
                match one.token {
                    WAKER => {}
                    LISTENER => self.accept(),
                    LINKS => self.links_changed(),
                    token => self.step(token as usize),
                }
            }
            for news in self.shared.take_news() {
                match news {
                    News::Want(key) => self.want(key),
                    News::Lost(key, path)
                    | News::Fruitless(key, path)
                    | News::Suspected(key, path) => {
                        let now = self.now();
                        if let Some(state) = self.peers.get_mut(&key) {
                            match news {
                                News::Fruitless(..) => state.fruitless += 1,
                                News::Lost(..) if state.fruitless < FRUITLESS => {
                                    state.fruitless = 0
                                }
                                _ => {}
                            }
                            state.dialer.down(path, now);
                            state.last.remove(&path);
                        }
                    }
                    News::Recovered(key, path) => {
                        let now = self.now();
                        if let Some(state) = self.peers.get_mut(&key) {
                            state.dialer.recovered(path, now);
                        }
                    }
                    News::Stop => {
                        self.record(true);
                        return;
                    }
                }
            }
            self.housekeeping();
        }
    }

    fn timeout(&self) -> Duration {
        let now = self.now();
        let mut next = now + Duration::from_secs(1);
        if !self.peers.is_empty() {
            next = next.min(now + MEASURE);
        }
        for shake in self.handshakes.iter().flatten() {
            next = next.min(shake.until);
        }
        if let Some(since) = self.deaf {
            next = next.min(since + DEAF);
        }
        for state in self.peers.values() {
            if let Some(at) = state.dialer.deadline()
                && self.wanted(state)
            {
                next = next.min(at);
            }
        }
        next.saturating_sub(now)
    }

    fn wanted(&self, state: &PeerState) -> bool {
        let claims = state.peer.claims.load(Relaxed);
        claims > 0 || self.now() < state.since + FRESH
    }

    // ---- peers ----

    fn routes(&self, peer: &Peer) -> Vec<Route> {
        let remotes = lock(&peer.addresses).list.clone();
        let nics = self.shared.nics();
        let count = nics.len().max(remotes.len());
        let mut routes = Vec::new();
        for index in 0..count {
            let local = index % nics.len().max(1);
            let same = |remote: &usize| remotes[*remote].is_ipv4() == nics[local].address.is_ipv4();
            let first = index % remotes.len().max(1);
            let remote = (0..remotes.len())
                .map(|step| (first + step) % remotes.len())
                .find(same);
            if let Some(remote) = remote {
                let route = Route { local, remote };
                if !routes.contains(&route) {
                    routes.push(route);
                }
            }
        }
        routes
    }

    fn dialer(&self, peer: &Peer, keeps: bool) -> Dialer {
        let routes = self.routes(peer);
        let seed = self.shared.random();
        let (first, most) = self.flows(routes.len());
        Dialer::new(&routes, if keeps { first } else { 1 }, most, seed)
    }

    /// How many flows there are at the start and at most: at least one a route, and as many on each.
    fn flows(&self, routes: usize) -> (usize, usize) {
        let config = &self.shared.config;
        let first = config.flows.next_multiple_of(routes.max(1));
        (first, config.most_flows.max(first))
    }

    /// The state of a peer that a comm or a greeting asks for.
    fn want(&mut self, key: PeerKey) {
        if self.peers.contains_key(&key) {
            return;
        }
        let Some(peer) = self.shared.peers.get(&key) else {
            return;
        };
        let own = self.shared.process;
        let keeps = !key.mirror && own <= key.process;
        let dialer = if key.mirror {
            Dialer::new(&[], 0, 0, 0)
        } else {
            self.dialer(&peer, keeps)
        };
        let state = PeerState {
            peer,
            dialer,
            keeps,
            since: self.now(),
            unserved: None,
            refused: None,
            fruitless: 0,
            last: HashMap::new(),
            measured: self.now(),
        };
        self.peers.insert(key, state);
    }

    fn housekeeping(&mut self) {
        let now = self.now();
        if self.deaf.is_some_and(|since| since + DEAF <= now) {
            self.listen_again();
        }
        for index in 0..self.handshakes.len() {
            if let Some(shake) = &self.handshakes[index]
                && shake.until <= now
            {
                let error = std::io::Error::new(ErrorKind::TimedOut, "no answer in time");
                self.give_up(index, &error);
            }
        }
        let keys: Vec<PeerKey> = self.peers.keys().copied().collect();
        for key in keys {
            self.serve(key, now);
        }
        if now >= self.recorded + Duration::from_secs(1) {
            self.recorded = now;
            self.record(false);
        }
    }

    fn serve(&mut self, key: PeerKey, now: Duration) {
        let Some(state) = self.peers.get(&key) else {
            return;
        };
        let wanted = self.wanted(state);
        if !wanted && state.peer.connections.load(Relaxed) == 0 {
            if self.shared.peers.forget(&state.peer) {
                self.peers.remove(&key);
            }
            return;
        }
        if !wanted {
            return;
        }
        let lacks = state.peer.connections.load(Relaxed) == 0;
        let unserved = if lacks {
            Some(state.unserved.unwrap_or(now))
        } else {
            None
        };
        let overdue = unserved.is_some_and(|since| now >= since + UNSERVED);
        let promote = overdue && !state.keeps && !key.mirror;
        let dialer = promote.then(|| self.dialer(&state.peer.clone(), true));
        let Some(state) = self.peers.get_mut(&key) else {
            return;
        };
        state.unserved = unserved;
        if let Some(dialer) = dialer {
            state.dialer = dialer;
            state.keeps = true;
        }
        let mut orders = state.dialer.orders(now);
        if !key.mirror && now >= state.measured + MEASURE {
            let passed = (now - state.measured).as_secs_f64();
            state.measured = now;
            let delivered = delivered(&self.shared, key, &mut state.last, passed);
            for one in delivered.iter().filter(|one| one.rate > 1e6) {
                state.dialer.proven(one.path);
                // Large packets come through: paths that ended did so for another reason.
                if state.fruitless < FRUITLESS {
                    state.fruitless = 0;
                }
            }
            orders.extend(state.dialer.measure(&delivered, now));
            let (trials, placement) = (state.dialer.trials(), &state.peer.placement);
            placement.trials.store(trials.all, Relaxed);
            placement.gains.store(trials.gains, Relaxed);
            placement.rerolls.store(trials.rerolls, Relaxed);
            let sum: f64 = delivered.iter().map(|one| one.rate).sum();
            placement.best.fetch_max(sum as u64, Relaxed);
        }
        for order in orders {
            self.follow(key, order);
        }
    }

    fn follow(&mut self, key: PeerKey, order: Order) {
        match order {
            Order::Close(path) => {
                if let Some(state) = self.peers.get(&key) {
                    let task = Task::Drop(state.peer.clone(), path, "not worth keeping");
                    self.shared.ask(&state.peer, task);
                }
            }
            Order::Dial {
                flow,
                route,
                entropy,
                again,
            } => {
                if let Err(error) = self.dial(key, (flow, route), entropy, again) {
                    let text = format!("a connection could not be opened: {error}");
                    self.shared.log(Level::Debug, &text);
                    let now = self.now();
                    if let Some(state) = self.peers.get_mut(&key) {
                        state.dialer.failed(flow, now);
                    }
                    self.answered(key, error.kind() == ErrorKind::ConnectionRefused);
                }
            }
        }
    }

    /// A peer's host has refused a dial, or something else came of it.
    fn answered(&mut self, key: PeerKey, refused: bool) {
        let now = self.now();
        let Some(state) = self.peers.get_mut(&key) else {
            return;
        };
        if !refused || state.peer.connections.load(Relaxed) > 0 {
            state.refused = None;
            return;
        }
        let (since, times) = state.refused.unwrap_or((now, 0));
        state.refused = Some((since, times + 1));
        if times + 1 >= ENDED.1 && now >= since + ENDED.0 {
            state.refused = None;
            let task = StreamTask::Ended(state.peer.clone());
            self.shared.workers[state.peer.home].ask_own(task);
        }
    }

    // ---- records ----

    fn record(&self, last: bool) {
        if let Some(directory) = &self.shared.config.stats_dir
            && let Err(error) = records::write(&self.shared, directory)
            && last
        {
            let text = format!("statistics could not be written: {error}");
            self.shared.log(Level::Warn, &text);
        }
    }
}

fn delivered(
    shared: &Shared,
    key: PeerKey,
    last: &mut HashMap<PathId, (u64, u64)>,
    passed: f64,
) -> Vec<Delivered> {
    let name = shared.peers.get(&key).map(|peer| peer.name().to_owned());
    let mut all = Vec::new();
    for ((mirror, path), stats) in lock(&shared.paths).live() {
        if *mirror != key.mirror || Some(&stats.peer) != name.as_ref() {
            continue;
        }
        let report = stats.report();
        let bytes = report.sent;
        let before = last.insert(*path, (bytes, report.busy_us));
        let Some((bytes_before, busy_before)) = before else {
            continue;
        };
        let busy = (report.busy_us.saturating_sub(busy_before)) as f64 / 1e6 / passed;
        all.push(Delivered {
            path: *path,
            rate: bytes.saturating_sub(bytes_before) as f64 / passed,
            busy: busy.min(1.0),
            trip: Duration::from_micros(report.rtt_us),
        });
    }
    all
}

/// The socket that all of a process' peers connect to, and its port.
pub fn listen(v6: bool) -> std::io::Result<(Socket, u16)> {
    let (domain, any) = if v6 {
        (Domain::IPV6, IpAddr::from([0u16; 8]))
    } else {
        (Domain::IPV4, IpAddr::from([0u8; 4]))
    };
    let socket = Socket::new(domain, Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if v6 {
        socket.set_only_v6(false)?;
    }
    socket.bind(&SocketAddr::new(any, 0).into())?;
    socket.listen(1024)?;
    let port = socket
        .local_addr()?
        .as_socket()
        .map_or(0, |address| address.port());
    Ok((socket, port))
}
