//! The control thread: everything that is rare. It accepts and greets, dials and redials, watches
//! links, measures flows and writes statistics. No message passes through it.
//!
//! # Strangers
//! The listening socket is open to the network. Whatever connects gets two seconds and 100 bytes of
//! memory to say a greeting with this process' token; otherwise it is closed without an answer.
//! There are at most [`MOST_GREETINGS`] of them at a time; the oldest goes first. A job's own peers
//! send their greeting at once, and dial again if they were the oldest in a storm.
//!
//! # Who dials
//! Of two processes the one with the lower number keeps the flows between them. The other dials one
//! to make itself known, more when what *it* sends needs them ([`evener_proto::dial`]), and as many
//! as the first when there has been no path for [`UNSERVED`]: a firewall may let connections through
//! in one direction only.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use evener_proto::PathId;
use evener_proto::dial::{Delivered, Dialer, Order, Route};
use socket2::{Domain, Protocol, Socket, Type};

use crate::comm::{Peer, PeerKey, lock};
use crate::fds;
use crate::hello::{ANSWER, Answer, GREETING, Greeting, MOST_ADDRESSES};
use crate::stats::PathStats;
use crate::sys::{self, Epoll, LinkWatch, Memory, Ready};
use crate::worker::Task;
use crate::{Level, Shared, records};

/// Greetings that may be unfinished at a time.
pub const MOST_GREETINGS: usize = 256;
const GREETING_TIME: Duration = Duration::from_secs(2);
/// A dial is given up after this long; later ones of the same flow after twice, thrice, ...
const DIAL_TIME: Duration = Duration::from_millis(500);
const UNSERVED: Duration = Duration::from_secs(2);
/// Between two looks at what the paths delivered.
const MEASURE: Duration = Duration::from_millis(100);
/// A peer without comms is dialled for this long after it was first heard of.
const FRESH: Duration = Duration::from_secs(5);
/// Unsent bytes in the kernel under which a new connection has room; its worker adapts it.
const LOW_WATER: u32 = 64 << 10;
const PORTS: std::ops::Range<u64> = 20_000..60_000;

const WAKER: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;
const LINKS: u64 = u64::MAX - 2;

/// What others tell the control thread.
#[derive(Debug)]
pub enum News {
    /// A comm needs this peer.
    Want(PeerKey),
    /// A path is gone.
    Lost(PeerKey, PathId),
    /// A path is suspect.
    Suspected(PeerKey, PathId),
    /// The end.
    Stop,
}

struct PeerState {
    peer: Arc<Peer>,
    dialer: Dialer,
    /// Whether this side keeps the flows.
    keeps: bool,
    since: Duration,
    unserved: Option<Duration>,
    last: HashMap<PathId, (u64, u64)>,
    measured: Duration,
}

enum Kind {
    Incoming,
    Outgoing {
        peer: PeerKey,
        flow: u64,
        path: PathId,
        route: Route,
        greeted: bool,
    },
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
                "the kernel refuses news of links: a lost carrier is found by silence",
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
                    News::Lost(key, path) | News::Suspected(key, path) => {
                        let now = self.now();
                        if let Some(state) = self.peers.get_mut(&key) {
                            state.dialer.down(path, now);
                            state.last.remove(&path);
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
        let comms = state.peer.comms.load(Relaxed);
        comms > 0 || self.now() < state.since + FRESH
    }

    // ---- peers ----

    fn routes(&self, peer: &Peer) -> Vec<Route> {
        let remotes = lock(&peer.addresses).clone();
        let nics = &self.shared.nics;
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
        let config = &self.shared.config;
        // At least one a route, and as many on each.
        let parts = routes.len().max(1);
        let first = config.flows.next_multiple_of(parts);
        let most = config.most_flows.max(first);
        Dialer::new(&routes, if keeps { first } else { 1 }, most, seed)
    }

    /// The state of a peer that a comm or a greeting asks for.
    fn want(&mut self, key: PeerKey) {
        if self.peers.contains_key(&key) {
            return;
        }
        let Some(peer) = lock(&self.shared.peers).get(&key).cloned() else {
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
            last: HashMap::new(),
            measured: self.now(),
        };
        self.peers.insert(key, state);
    }

    fn housekeeping(&mut self) {
        let now = self.now();
        for index in 0..self.handshakes.len() {
            if let Some(shake) = &self.handshakes[index]
                && shake.until <= now
            {
                self.give_up(index, "no answer in time");
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
            let mut peers = lock(&self.shared.peers);
            // Under the lock nobody can begin a comm with it.
            if state.peer.comms.load(Relaxed) == 0 {
                peers.remove(&key);
                drop(peers);
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
                    self.shared.workers[state.peer.home].ask(task);
                }
            }
            Order::Dial {
                flow,
                route,
                entropy,
            } => {
                if let Err(error) = self.dial(key, flow, route, entropy) {
                    let text = format!("a connection could not be opened: {error}");
                    self.shared.log(Level::Debug, &text);
                    let now = self.now();
                    if let Some(state) = self.peers.get_mut(&key) {
                        state.dialer.failed(flow, now);
                    }
                }
            }
        }
    }

    // ---- dialling ----

    fn dial(&mut self, key: PeerKey, flow: u64, route: Route, entropy: u64) -> std::io::Result<()> {
        let none = || std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
        let state = self.peers.get(&key).ok_or_else(none)?;
        let nic = self.shared.nics.get(route.local).ok_or_else(none)?;
        let remote = lock(&state.peer.addresses)
            .get(route.remote)
            .copied()
            .ok_or_else(none)?;
        let to = SocketAddr::new(remote, state.peer.port);
        let mut entropy = entropy;
        let mut tries = 0;
        let socket = loop {
            let socket = new_socket(&remote)?;
            self.prepare(&socket, Some(&nic.name), &remote);
            // Ports in a row hash badly on some fabrics; these are all over the range.
            let span = PORTS.end - PORTS.start;
            let port = (PORTS.start + entropy % span) as u16;
            socket.set_reuse_address(true)?;
            let from = SocketAddr::new(nic.address, port);
            let result = socket
                .bind(&from.into())
                .and_then(|()| socket.connect(&to.into()));
            match result {
                Ok(()) => break socket,
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => break socket,
                Err(error)
                    if tries < 16
                        && matches!(
                            error.kind(),
                            std::io::ErrorKind::AddrInUse | std::io::ErrorKind::AddrNotAvailable
                        ) =>
                {
                    tries += 1;
                    entropy = entropy.rotate_left(16) ^ 0x9e37_79b9;
                }
                Err(error) => return Err(error),
            }
        };
        let kind = Kind::Outgoing {
            peer: key,
            flow,
            path: PathId(self.shared.random()),
            route,
            greeted: false,
        };
        self.watch(socket, kind, DIAL_TIME * 2)
    }

    fn prepare(&self, socket: &Socket, nic: Option<&str>, peer: &IpAddr) {
        // Each of these makes things better where the kernel has it; none is needed.
        let _ = socket.set_tcp_nodelay(true);
        let fd = socket.as_raw_fd();
        let _ = sys::set_unsent_low_water(fd, LOW_WATER);
        if let Some(name) = &self.shared.congestion {
            let _ = sys::set_congestion(fd, name);
        }
        if self.shared.nics.len() > 1
            && !peer.is_loopback()
            && let Some(nic) = nic
        {
            // Two NICs in one subnet: the routing table alone would send all through the first.
            let _ = socket.bind_device(Some(nic.as_bytes()));
        }
    }

    fn watch(&mut self, socket: Socket, kind: Kind, time: Duration) -> std::io::Result<()> {
        let now = self.now();
        let index = match self.handshakes.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.handshakes.push(None);
                self.handshakes.len() - 1
            }
        };
        self.epoll.add_edge(socket.as_raw_fd(), index as u64)?;
        self.handshakes[index] = Some(Handshake {
            socket,
            kind,
            bytes: Vec::new(),
            until: now + time,
            began: now,
        });
        // What came before it was watched raises no edge.
        self.step(index);
        Ok(())
    }

    fn accept(&mut self) {
        loop {
            let Ok((socket, _)) = self.listener.accept() else {
                return;
            };
            let incoming = |shake: &Option<Handshake>| {
                shake
                    .as_ref()
                    .is_some_and(|shake| matches!(shake.kind, Kind::Incoming))
            };
            let count = self.handshakes.iter().filter(|one| incoming(one)).count();
            if count >= MOST_GREETINGS {
                let oldest = (0..self.handshakes.len())
                    .filter(|index| incoming(&self.handshakes[*index]))
                    .min_by_key(|index| self.handshakes[*index].as_ref().map(|shake| shake.began));
                if let Some(oldest) = oldest {
                    self.handshakes[oldest] = None;
                }
            }
            if socket.set_nonblocking(true).is_ok() {
                let _ = self.watch(socket, Kind::Incoming, GREETING_TIME);
            }
        }
    }

    fn give_up(&mut self, index: usize, why: &str) {
        let Some(shake) = self.handshakes.get_mut(index).and_then(Option::take) else {
            return;
        };
        if let Kind::Outgoing {
            peer, flow, route, ..
        } = shake.kind
        {
            let now = self.now();
            if let Some(state) = self.peers.get_mut(&peer) {
                state.dialer.failed(flow, now);
                let nic = self.shared.nics.get(route.local);
                let nic = nic.map_or("?", |nic| nic.name.as_str());
                let name = state.peer.name();
                let text = format!("no connection from {nic} to {name}: {why}; trying again");
                self.shared.log(Level::Debug, &text);
            }
        }
    }

    /// Goes on with a handshake as far as it goes.
    fn step(&mut self, index: usize) {
        match self.try_step(index) {
            Ok(()) => {}
            Err(error) => self.give_up(index, &error.to_string()),
        }
    }

    fn try_step(&mut self, index: usize) -> std::io::Result<()> {
        let refuse = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let addresses: Vec<IpAddr> = self.shared.nics.iter().map(|nic| nic.address).collect();
        let Some(Some(shake)) = self.handshakes.get_mut(index) else {
            return Ok(());
        };
        if let Kind::Outgoing {
            peer,
            path,
            route,
            greeted,
            ..
        } = &mut shake.kind
            && !*greeted
        {
            if let Some(error) = shake.socket.take_error()? {
                return Err(error);
            }
            if shake.socket.peer_addr().is_err() {
                return Ok(()); // Not connected yet.
            }
            let state = self.peers.get(peer).ok_or_else(refuse)?;
            let greeting = Greeting {
                token: state.peer.token,
                to: peer.process,
                from: self.shared.process,
                from_token: self.shared.token,
                port: self.shared.port,
                path: path.0,
                local: route.local as u8,
                remote: route.remote as u8,
                addresses,
            };
            let bytes = greeting.emit();
            if shake.socket.send(&bytes)? != bytes.len() {
                return Err(refuse());
            }
            *greeted = true;
        }
        let incoming = matches!(shake.kind, Kind::Incoming);
        let head = if incoming { GREETING } else { ANSWER };
        let length = |bytes: &[u8]| -> Option<usize> {
            if bytes.len() < head {
                Some(head)
            } else if incoming {
                Greeting::length(bytes.first_chunk()?)
            } else {
                Answer::length(bytes.first_chunk()?)
            }
        };
        loop {
            let want = length(&shake.bytes).ok_or_else(refuse)?;
            if shake.bytes.len() == want && want >= head && {
                // Without addresses the head is all.
                length(&shake.bytes) == Some(shake.bytes.len())
            } {
                break;
            }
            let mut part = [0u8; GREETING + 17 * MOST_ADDRESSES];
            let mut memory = Memory::of(&mut part);
            memory.length = want - shake.bytes.len();
            // SAFETY: `part` is ours, and `want` is at most its size.
            #[allow(unsafe_code, reason = "reads into a buffer of this function")]
            let got = unsafe { sys::receive(shake.socket.as_raw_fd(), &[memory]) };
            match got {
                Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => shake.bytes.extend_from_slice(&part[..got]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let Some(shake) = self.handshakes[index].take() else {
            return Ok(());
        };
        match shake.kind {
            Kind::Incoming => {
                let greeting = Greeting::parse(&shake.bytes).ok_or_else(refuse)?;
                self.greeted(shake.socket, &greeting)
            }
            Kind::Outgoing {
                peer,
                flow,
                path,
                route,
                ..
            } => {
                let answer = Answer::parse(&shake.bytes);
                let now = self.now();
                let Some(state) = self.peers.get_mut(&peer) else {
                    return Ok(());
                };
                let Some(answer) = answer else {
                    state.dialer.failed(flow, now);
                    return Ok(());
                };
                state.dialer.connected(flow, path);
                let peer = state.peer.clone();
                {
                    let mut known = lock(&peer.addresses);
                    if answer.addresses.len() > known.len() {
                        *known = answer.addresses;
                    }
                }
                let nic = self.shared.nics.get(route.local);
                let nic = nic.map(|nic| (nic.name.clone(), nic.index));
                self.hand_over(shake.socket, peer, path, nic, true);
                Ok(())
            }
        }
    }

    /// A greeting came: it is one of ours, or it is dropped.
    fn greeted(&mut self, socket: Socket, greeting: &Greeting) -> std::io::Result<()> {
        let shared = self.shared.clone();
        if greeting.token != shared.token || greeting.to != shared.process {
            shared.log(Level::Debug, "a stranger's greeting was dropped");
            return Ok(());
        }
        let key = PeerKey {
            process: greeting.from,
            mirror: greeting.from == shared.process,
        };
        let peer = shared.peer(key, greeting.from_token, greeting.port, &greeting.addresses);
        let path = PathId(greeting.path);
        {
            let mut known = lock(&peer.addresses);
            if greeting.addresses.len() > known.len() {
                known.clone_from(&greeting.addresses);
            }
        }
        self.want(key);
        let nic = shared.nics.get(usize::from(greeting.remote));
        let nic = nic.map(|nic| (nic.name.clone(), nic.index));
        let from = socket.peer_addr()?.as_socket();
        let ip = from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip());
        self.prepare(&socket, nic.as_ref().map(|nic| nic.0.as_str()), &ip);
        let answer = Answer {
            addresses: shared.nics.iter().map(|nic| nic.address).collect(),
        };
        let bytes = answer.emit();
        if socket.send(&bytes)? == bytes.len() {
            self.hand_over(socket, peer, path, nic, false);
        }
        Ok(())
    }

    fn hand_over(
        &self,
        socket: Socket,
        peer: Arc<Peer>,
        path: PathId,
        nic: Option<(String, u32)>,
        dialled: bool,
    ) {
        // The side that dialled has chosen it: it tells the flow on both.
        let address = if dialled {
            socket.local_addr()
        } else {
            socket.peer_addr()
        };
        let port = address
            .ok()
            .and_then(|address| address.as_socket())
            .map_or(0, |address| address.port());
        let (name, interface) = nic.unwrap_or_default();
        let stats = Arc::new(PathStats::new(name, port, peer.name()));
        let fd = OwnedFd::from(socket);
        self.shared.workers[peer.home].ask(Task::Connect {
            peer,
            fd,
            path,
            interface,
            stats,
        });
    }

    // ---- links ----

    fn links_changed(&mut self) {
        let Some(changes) = self.links.as_ref().map(LinkWatch::changes) else {
            return;
        };
        // Too many to be told: whatever is gone will be found by silence.
        let mut back = changes.is_none();
        for (interface, up) in changes.unwrap_or_default() {
            let Some(nic) = self.shared.nics.iter().find(|nic| nic.index == interface) else {
                continue;
            };
            if up {
                back = true;
            } else {
                let text = format!("{} lost its carrier: its paths are given up", nic.name);
                self.shared.log(Level::Info, &text);
                for worker in &self.shared.workers {
                    worker.ask(Task::InterfaceDown(interface));
                }
            }
        }
        if back {
            let now = self.now();
            for state in self.peers.values_mut() {
                state.dialer.hurry(now);
            }
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
    let name = lock(&shared.peers).get(&key).map(|peer| peer.name());
    let mut all = Vec::new();
    for ((mirror, path), stats) in lock(&shared.paths).iter() {
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
        });
    }
    all
}

fn new_socket(remote: &IpAddr) -> std::io::Result<Socket> {
    let domain = if remote.is_ipv4() {
        Domain::IPV4
    } else {
        Domain::IPV6
    };
    let socket = Socket::new(domain, Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    Ok(socket)
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
