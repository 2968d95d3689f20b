//! One connection to a process: its sockets, and the comms that it carries.
//!
//! Bytes go from the side that connects to the side that accepts, as NCCL's comms do, so two processes
//! that send to each other have two. A comm is a channel of the connection; request `n` of a comm is
//! message `n` of its channel.
//!
//! # Why a caller's memory is safe
//! Only the thread that has the association reads and writes the memory of requests, while one call
//! of [`Association::hear`] or [`Association::transmit`] runs; the kernel gets copies. It is the same
//! thread that finishes requests and releases comms. So no memory needs a pin, as those of
//! [`link`](crate::link) do.
//!
//! # Paths
//! A path is a source port. Those of the connecting side are dealt out over its NICs, and each goes to
//! an address of the peer that the same place in the peer's list has. The answering side takes the
//! routes that the kernel has, to the addresses from which it has heard.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use evener_proto::packet::{Connection, Dropped, Event, Over, Place, Span};
use evener_proto::{PathId, Side, Why};

use super::ports::{Batch, Came, LARGEST, Port, Reader};
use super::signals::{self, SIGNAL, Signal, Signals, WINDOW};
use crate::link::{OVERSIZE, REMOTE};
use crate::lock::lock;
use crate::log::Level;
use crate::peer::Peer;
use crate::requests::{ACCEPTED, DECLINED, Requests};
use crate::shared::Shared;
use crate::slots::SLOTS;
use crate::stats::{PathStats, WorkerStats};
use crate::sys::{self, Memory};

/// Most addresses of the peer that packets are sent to.
const MOST_REMOTES: usize = 16;

/// One end of a comm.
struct End {
    requests: Arc<Requests>,
    /// Number of the next request to take.
    next: u64,
    /// When each request was taken.
    taken: [Duration; SLOTS],
}

/// A socket of ours, and what it did.
struct Own {
    port: Port,
    path: PathId,
    stats: Arc<PathStats>,
    /// The peer sends to it.
    heard: bool,
}

/// What has to be done by the thread that has the association.
pub enum Effect {
    /// The peer wants to open a comm.
    Offer {
        /// By its number.
        comm: u64,
        /// At this listener.
        listener: u64,
    },
    /// Watch this new socket.
    Watch {
        /// Its place.
        path: usize,
    },
}

/// See the module.
pub struct Association {
    /// Who is at the other end.
    pub peer: Arc<Peer>,
    /// The initiator's random number: it tells hellos of the same connection.
    pub random: u64,
    connection: Box<Connection>,
    initiates: bool,
    ports: Vec<Option<Own>>,
    remotes: Vec<SocketAddr>,
    ends: HashMap<u32, End>,
    /// Channels of comms, by the sending process' numbers.
    channels: HashMap<u64, u32>,
    next_channel: u32,
    signals: Signals,
    effects: Vec<Effect>,
    /// Since when no comm has been here.
    pub idle: Duration,
}

fn code(why: Why) -> usize {
    match why {
        Why::Oversize { .. } => OVERSIZE,
        Why::PeerClosed | Why::NoPath(_) => REMOTE,
    }
}

/// Bytes of a message that is taken and not finished.
fn memory(end: Option<&End>, message: u64, offset: u64, length: usize) -> Option<Memory> {
    end?.requests.slots.memory(message)?.part(offset, length)
}

impl Association {
    /// Around a new connection.
    pub fn new(
        peer: Arc<Peer>,
        random: u64,
        connection: Box<Connection>,
        initiates: bool,
        remotes: Vec<SocketAddr>,
        now: Duration,
    ) -> Association {
        peer.connections.fetch_add(1, Ordering::Relaxed);
        let mut new = Association {
            peer,
            random,
            connection,
            initiates,
            ports: Vec::new(),
            remotes,
            ends: HashMap::new(),
            channels: HashMap::new(),
            next_channel: signals::CHANNEL + 1,
            signals: Signals::default(),
            effects: Vec::new(),
            idle: now,
        };
        for _ in 0..WINDOW {
            new.connection.post(signals::CHANNEL, SIGNAL as u64);
        }
        new
    }

    fn side(&self) -> Side {
        if self.initiates {
            Side::Send
        } else {
            Side::Receive
        }
    }

    /// What is to be done.
    pub fn effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// When something is due without a packet.
    pub fn deadline(&mut self) -> Option<Duration> {
        self.connection.deadline()
    }

    /// Whether nothing is left to do here.
    pub fn is_over(&self) -> bool {
        self.ends.is_empty() && self.connection.over().is_some()
    }

    /// Whether it is not over.
    pub fn is_alive(&self) -> bool {
        self.connection.over().is_none()
    }

    /// Whether this side has opened it.
    pub fn initiates(&self) -> bool {
        self.initiates
    }

    /// Whether it has an end with these requests.
    pub fn has(&self, requests: &Arc<Requests>) -> bool {
        let end = self
            .channels
            .get(&requests.id)
            .and_then(|channel| self.ends.get(channel));
        end.is_some_and(|end| Arc::ptr_eq(&end.requests, requests))
    }

    /// Whether a comm with this number is here.
    pub fn carries(&self, comm: u64) -> bool {
        self.channels.contains_key(&comm)
    }

    /// What others may know of its paths.
    pub fn measure(&self) {
        let (window, _, _) = self.connection.window();
        let trip = self.connection.round_trip();
        let stats = self.connection.stats();
        for own in self.ports.iter().flatten() {
            own.stats.steered(window, Duration::ZERO);
            own.stats
                .measured(trip.smoothed(), stats.lost + stats.timed_out);
        }
    }

    /// Whether it carries no comm and has nothing to say.
    pub fn is_idle(&self) -> bool {
        self.ends.is_empty() && self.signals.is_idle()
    }

    /// A socket, to be watched.
    pub fn fd(&self, path: usize) -> Option<i32> {
        Some(self.ports.get(path)?.as_ref()?.port.fd())
    }

    // ---- comms ----

    fn say(&mut self, signal: Signal) {
        let number = self.connection.send(signals::CHANNEL, SIGNAL as u64);
        self.signals.say(number, signal);
    }

    fn begin(&mut self, channel: u32, requests: &Arc<Requests>) {
        let end = End {
            requests: requests.clone(),
            next: 0,
            taken: [Duration::ZERO; SLOTS],
        };
        self.ends.insert(channel, end);
        self.channels.insert(requests.id, channel);
        requests.registered.store(true, Ordering::Release);
    }

    /// Adds a sending end, and asks the peer to open it at its listener.
    pub fn open(&mut self, requests: &Arc<Requests>, listener: u64) {
        let channel = self.next_channel;
        self.next_channel += 1;
        self.begin(channel, requests);
        self.say(Signal::Open {
            channel,
            comm: requests.id,
            listener,
        });
    }

    /// Adds the receiving end of a comm that the peer has offered. Of one that is gone it fails.
    pub fn take(&mut self, requests: &Arc<Requests>) {
        match self.channels.get(&requests.id).copied() {
            Some(channel) => self.begin(channel, requests),
            None => {
                requests.fail(Why::PeerClosed);
                requests.registered.store(true, Ordering::Release);
            }
        }
    }

    /// The caller has accepted an offer, or there is nobody who will.
    pub fn answer(&mut self, comm: u64, accepted: bool) {
        if let Some(channel) = self.channels.get(&comm).copied() {
            if accepted {
                self.say(Signal::Opened(channel));
            } else {
                self.channels.remove(&comm);
                self.say(Signal::Declined(channel));
            }
        }
    }

    /// The caller has closed a comm: no memory of it is used from here on.
    pub fn release(&mut self, requests: &Requests, now: Duration) {
        if let Some(channel) = self.channels.remove(&requests.id) {
            self.connection.forget(channel);
            if let Some(end) = self.ends.remove(&channel) {
                self.settle(&end, REMOTE);
            }
            self.say(Signal::Closed(channel));
        }
        self.idle = now;
        requests.released.store(true, Ordering::Release);
    }

    fn settle(&self, end: &End, code: usize) {
        let less = end.requests.slots.under_way();
        end.requests.slots.fail(code, |_| true);
        self.less(less);
    }

    fn less(&self, bytes: u64) {
        self.peer.traffic.under_way[self.side() as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Nothing of a comm will complete any more.
    fn fail(&mut self, channel: u32, why: Why, shared: &Shared) {
        let Some(end) = self.ends.get(&channel) else {
            return;
        };
        if end.requests.failure().is_none() {
            let level = match why {
                Why::PeerClosed => Level::Debug,
                Why::Oversize { .. } | Why::NoPath(_) => Level::Warn,
            };
            let text = format!("comm {} with {}: {why}", end.requests.id, self.peer.name());
            shared.log(level, &text);
        }
        end.requests.fail(why);
        self.settle(end, code(why));
        self.connection.forget(channel);
    }

    /// Takes the requests that a comm's caller has posted.
    pub fn poll(&mut self, comm: u64, now: Duration) {
        let Some(channel) = self.channels.get(&comm).copied() else {
            return;
        };
        let side = self.side();
        let Some(end) = self.ends.get_mut(&channel) else {
            return;
        };
        if let Some(why) = end.requests.failure() {
            end.requests.slots.fail(code(why), |_| true);
            return;
        }
        while let Some(length) = end.requests.slots.take(end.next) {
            end.taken[end.next as usize % SLOTS] = now;
            end.next += 1;
            self.peer.traffic.under_way[side as usize].fetch_add(length as u64, Ordering::Relaxed);
            match side {
                Side::Send => self.connection.send(channel, length as u64),
                Side::Receive => self.connection.post(channel, length as u64),
            };
        }
    }

    // ---- packets ----

    /// Reads what a socket has. How many packets came.
    pub fn read(&mut self, path: usize, reader: &mut Reader, now: Duration) -> usize {
        let Some(mut own) = self.ports.get_mut(path).and_then(Option::take) else {
            return 0;
        };
        let mut bytes = 0;
        let came = reader.read(&own.port, |came| {
            bytes += came.packet.len();
            // Counted by the connection.
            let _ = self.hear(&came, now);
        });
        own.stats.received(bytes as u64);
        own.heard = true;
        self.ports[path] = Some(own);
        came.unwrap_or(0)
    }

    /// Hears a packet; its bytes go where they belong.
    ///
    /// # Errors
    /// [`Dropped`].
    pub fn hear(&mut self, came: &Came<'_>, now: Duration) -> Result<(), Dropped> {
        let was_open = self.connection.is_open();
        let (ends, signals) = (&self.ends, &mut self.signals);
        let mut place = |place: Place<'_>| {
            if place.channel == signals::CHANNEL {
                signals.place(place.message, place.offset, place.bytes);
                return;
            }
            let end = ends.get(&place.channel);
            if let Some(to) = memory(end, place.message, place.offset, place.bytes.len()) {
                // SAFETY: the request is taken and not finished, and only this thread finishes it; `part`
                // has checked that the bytes are inside of it; a packet is no caller's memory.
                #[allow(unsafe_code, reason = "bytes are placed")]
                unsafe {
                    sys::copy(Memory::read_only(place.bytes), to);
                }
            }
        };
        self.connection
            .receive(came.packet, came.marked, now, &mut place)?;
        // From here on it is known to come from the peer.
        if !self.initiates {
            // Answers go back to where packets came from last: that way is open.
            let ip = came.from.ip();
            let known = self.remotes.iter().position(|known| known.ip() == ip);
            match known {
                Some(place) => self.remotes[place].set_port(came.from.port()),
                None if self.remotes.len() < MOST_REMOTES => self.remotes.push(came.from),
                None => {}
            }
        } else if !was_open && self.connection.is_open() {
            // The welcome names the port of the thread that has the other end.
            for remote in &mut self.remotes {
                remote.set_port(came.from.port());
            }
        }
        Ok(())
    }

    /// Does what is due by the clock, sends what may go, and acts on what happened.
    pub fn turn(
        &mut self,
        batch: &mut Batch,
        shared: &Shared,
        counts: &WorkerStats,
        now: Duration,
    ) {
        self.connection.on_time(now);
        self.transmit(batch, shared, counts, now);
        let mut more = false;
        while let Some(event) = self.connection.event() {
            self.act(event, shared, now);
            more = true;
        }
        if more {
            // What was answered just now.
            self.transmit(batch, shared, counts, now);
        }
    }

    fn transmit(
        &mut self,
        batch: &mut Batch,
        shared: &Shared,
        counts: &WorkerStats,
        now: Duration,
    ) {
        loop {
            let (ends, signals) = (&self.ends, &self.signals);
            let mut read = |span: &Span, to: &mut [u8]| {
                if span.channel == signals::CHANNEL {
                    signals.read(span.message, span.offset, to);
                    return;
                }
                let end = ends.get(&span.channel);
                let length = span.length as usize;
                if let Some(from) = memory(end, span.message, span.offset, length) {
                    // SAFETY: as in `hear`; `to` is in a batch, and as long as the span.
                    #[allow(unsafe_code, reason = "bytes are read")]
                    unsafe {
                        sys::copy(from, Memory::of(to));
                    }
                }
            };
            let Some(sent) = self.connection.transmit(now, batch.place(), &mut read) else {
                break;
            };
            let path = usize::from(sent.path);
            if self.ports.get(path).is_none_or(Option::is_none)
                && let Err(error) = self.open_port(path, shared)
            {
                // As if the network had lost it: the path turns suspect, and another is taken.
                let text = format!("no UDP socket to {}: {error}", self.peer.name());
                shared.log(Level::Debug, &text);
                continue;
            }
            let port = self.ports.get(path).and_then(Option::as_ref);
            let (ports, remotes) = (&self.ports, &self.remotes);
            batch.add(
                path,
                sent.length,
                port.map(|own| &own.port),
                |path, packets, segment| {
                    send(ports, remotes, counts, path, packets, segment);
                },
            );
        }
        batch.flush(|path, packets, segment| {
            send(&self.ports, &self.remotes, counts, path, packets, segment);
        });
    }

    fn open_port(&mut self, path: usize, shared: &Shared) -> io::Result<()> {
        let none = || io::Error::from(io::ErrorKind::AddrNotAvailable);
        let remote = *remote(&self.remotes, path).ok_or_else(none)?;
        let matching = |v4: bool| {
            let nics = shared.nics.iter();
            nics.filter(move |nic| nic.address.is_ipv4() == v4)
        };
        let nics: Vec<_> = matching(remote.is_ipv4()).collect();
        let nic = *nics.get(path % nics.len().max(1)).ok_or_else(none)?;
        let (address, device) = if self.initiates {
            let several = shared.nics.len() > 1 && !remote.ip().is_loopback();
            (nic.address, several.then_some(nic.name.as_str()))
        } else if remote.is_ipv4() {
            (IpAddr::from([0; 4]), None)
        } else {
            (IpAddr::from([0u16; 8]), None)
        };
        let port = Port::bind(SocketAddr::new(address, 0), device)?;
        let number = port.address()?.port();
        let stats = Arc::new(PathStats::new(nic.name.clone(), number, self.peer.name()));
        let id = PathId(shared.random());
        lock(&shared.paths).insert(self.peer.key.mirror, id, stats.clone());
        self.ports
            .resize_with(self.ports.len().max(path + 1), || None);
        self.ports[path] = Some(Own {
            port,
            path: id,
            stats,
            heard: false,
        });
        self.effects.push(Effect::Watch { path });
        Ok(())
    }

    /// Closes a socket, as a network that cuts a path would; the path gets another when it is used. The
    /// one that the peer sends to is no path but an address: it stays.
    pub fn cut(&mut self, path: PathId, why: &str, shared: &Shared) {
        for place in &mut self.ports {
            let cuts = |own: &Own| own.path == path && (self.initiates || !own.heard);
            if place.as_ref().is_some_and(cuts) {
                *place = None;
                lock(&shared.paths).end(self.peer.key.mirror, path, why);
            }
        }
    }

    // ---- events ----

    fn act(&mut self, event: Event, shared: &Shared, now: Duration) {
        match event {
            Event::Connected => {
                let text = format!(
                    "UDP connection with {}: datagrams of {} bytes at first",
                    self.peer.name(),
                    self.connection.datagram().min(LARGEST)
                );
                shared.log(Level::Info, &text);
            }
            Event::Sent { channel, message } => {
                if channel == signals::CHANNEL {
                    self.signals.sent(message);
                    return;
                }
                let Some(end) = self.ends.get(&channel) else {
                    return;
                };
                let since = end.taken[message as usize % SLOTS];
                self.peer.traffic.took.count(now.saturating_sub(since));
                if let Some(memory) = end.requests.slots.memory(message) {
                    self.less(memory.length as u64);
                    end.requests.slots.finish(message, memory.length);
                }
            }
            Event::Received {
                channel,
                message,
                length,
            } => {
                if channel == signals::CHANNEL {
                    for _ in 0..self.signals.received(message) {
                        self.connection.post(channel, SIGNAL as u64);
                    }
                    while let Some(signal) = self.signals.hear() {
                        self.obey(signal, shared);
                    }
                } else if let Some(end) = self.ends.get(&channel)
                    && let Some(memory) = end.requests.slots.memory(message)
                {
                    self.less(memory.length as u64);
                    end.requests.slots.finish(message, length as usize);
                }
            }
            Event::TooLong {
                channel,
                length,
                room,
                ..
            } => self.fail(
                channel,
                Why::Oversize {
                    total: length,
                    room,
                },
                shared,
            ),
            Event::Over(why) => {
                let of_comms = match why {
                    Over::Closed | Over::ByPeer => Why::PeerClosed,
                    Over::Silent | Over::Version(..) => Why::NoPath(shared.config.timeout),
                };
                let level = match why {
                    Over::Closed | Over::ByPeer => Level::Debug,
                    Over::Silent | Over::Version(..) => Level::Warn,
                };
                shared.log(
                    level,
                    &format!("UDP connection with {}: {why}", self.peer.name()),
                );
                let all: Vec<u32> = self.ends.keys().copied().collect();
                for channel in all {
                    self.fail(channel, of_comms, shared);
                }
            }
        }
    }

    fn obey(&mut self, signal: Signal, shared: &Shared) {
        match signal {
            Signal::Open {
                channel,
                comm,
                listener,
            } => {
                self.channels.insert(comm, channel);
                self.effects.push(Effect::Offer { comm, listener });
            }
            Signal::Opened(channel) | Signal::Declined(channel) => {
                if let Some(end) = self.ends.get(&channel) {
                    let opened = matches!(signal, Signal::Opened(_));
                    let answer = if opened { ACCEPTED } else { DECLINED };
                    end.requests.opened.store(answer, Ordering::Release);
                }
            }
            Signal::Closed(channel) => {
                self.fail(channel, Why::PeerClosed, shared);
                // An offer that nobody has taken yet.
                if !self.ends.contains_key(&channel) {
                    self.channels.retain(|_, of| *of != channel);
                }
            }
        }
    }

    /// Ends it, and tells the peer.
    pub fn close(
        &mut self,
        batch: &mut Batch,
        shared: &Shared,
        counts: &WorkerStats,
        now: Duration,
    ) {
        self.connection.close();
        self.transmit(batch, shared, counts, now);
        for end in self.ends.values() {
            self.settle(end, REMOTE);
            end.requests.released.store(true, Ordering::Release);
        }
        self.ends.clear();
    }

    /// It is not there any more.
    pub fn bury(&mut self, why: &str, shared: &Shared) {
        let mut paths = lock(&shared.paths);
        for own in self.ports.drain(..).flatten() {
            paths.end(self.peer.key.mirror, own.path, why);
        }
        self.peer.connections.fetch_sub(1, Ordering::Release);
    }
}

fn remote(remotes: &[SocketAddr], path: usize) -> Option<&SocketAddr> {
    remotes.get(path % remotes.len().max(1))
}

fn send(
    ports: &[Option<Own>],
    remotes: &[SocketAddr],
    counts: &WorkerStats,
    path: usize,
    packets: &[u8],
    segment: usize,
) {
    let (Some(Some(own)), Some(to)) = (ports.get(path), remote(remotes, path)) else {
        return;
    };
    // What the kernel has no room for is lost, as in the network, and goes again.
    let began = std::time::Instant::now();
    if own.port.send(*to, packets, segment) {
        own.stats.sent(packets.len() as u64);
        counts.wrote(packets.len(), began.elapsed());
    }
}
