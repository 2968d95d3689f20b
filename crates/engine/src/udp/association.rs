//! One connection to a process: its sockets ([`sockets`]), what goes through them ([`packets`]), and the
//! comms that it carries.
//!
//! Bytes go from the side that connects to the side that accepts, as NCCL's comms do, so two processes
//! that send to each other have two. A comm is a channel of one connection, and request `n` is message `n`
//! of that channel.
//!
//! # Why a caller's memory is safe
//! Only the thread that has the association reads and writes the memory of requests, while one call
//! of [`Association::hear`] or [`Association::transmit`] runs; the kernel gets copies. It is the same
//! thread that finishes requests and releases comms. So no memory needs a pin, as those of
//! [`link`](crate::link) do.
//!

mod packets;
mod sockets;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use evener_proto::packet::{Connection, Event, Over};
use evener_proto::{PathId, Side, Why};
use rustc_hash::FxHashMap;

use super::batch::Batch;
use super::ports::LARGEST;
use super::signals::{self, SIGNAL, Signal, Signals, Told, WINDOW};
use crate::addresses::Addresses;
use crate::link::{OVERSIZE, REMOTE};
use crate::lock::lock;
use crate::log::Level;
use crate::nics::Nics;
use crate::packets::Counted;
use crate::peer::Peer;
use crate::requests::{ACCEPTED, DECLINED, Requests};
use crate::shared::Shared;
use crate::slots::SLOTS;
use crate::stats::WorkerStats;
use crate::sys::Memory;
use crate::trace::{Record, Ring};
use sockets::Sockets;

/// One end of a comm.
struct End {
    requests: Arc<Requests>,
    /// Number of the next request to take.
    next: u64,
    /// When each request was taken.
    taken: [Duration; SLOTS],
    /// Nothing of it completes any more.
    failed: bool,
}

impl End {
    /// Fails what is not finished; bytes of what was taken.
    fn settle(&self, code: usize) -> u64 {
        let slots = &self.requests.slots;
        let bytes = slots.under_way(|_| true);
        slots.fail(code, |_| true);
        bytes
    }
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
    sockets: Sockets,
    ends: FxHashMap<u32, End>,
    /// Channels of comms, by the sending process' numbers.
    channels: FxHashMap<u64, u32>,
    next_channel: u32,
    signals: Signals,
    /// The edition of this host's addresses that the peer knows.
    edition: u32,
    /// What the peer says of its own.
    told: Told,
    effects: Vec<Effect>,
    counted: Counted,
    /// Where what happens is noted.
    ring: Option<Ring>,
    /// Since when no comm has been here.
    pub idle: Duration,
}

fn code(why: Why) -> usize {
    match why {
        Why::Oversize { .. } => OVERSIZE,
        Why::PeerClosed | Why::NoPath(_) | Why::PeerEnded => REMOTE,
    }
}

/// Bytes of a message that is taken and not finished.
fn memory(end: Option<&End>, message: u64, offset: u64, length: usize) -> Option<Memory> {
    let end = end?;
    let memory = end.requests.slots.memory(message)?;
    memory.part(offset, length)
}

impl Association {
    /// Around a new connection: the initiator's random number, and whether this side has opened it.
    /// It goes over `nics`. With a `ring` it is traced.
    pub fn new(
        peer: Arc<Peer>,
        (random, mut connection, initiates): (u64, Box<Connection>, bool),
        (nics, remotes): (&Nics, Vec<SocketAddr>),
        ring: Option<Ring>,
        now: Duration,
    ) -> Association {
        peer.connections.fetch_add(1, Ordering::Relaxed);
        let sockets = Sockets::new(peer.clone(), initiates, nics, remotes);
        if ring.is_some() {
            connection.trace();
        }
        let mut new = Association {
            peer,
            random,
            connection,
            initiates,
            sockets,
            ends: FxHashMap::default(),
            channels: FxHashMap::default(),
            next_channel: signals::CHANNEL + 1,
            signals: Signals::default(),
            // Who was dialled has been so by a handle, which may be old. Who dials is seen.
            edition: if initiates { nics.edition() } else { 0 },
            told: Told::default(),
            effects: Vec::new(),
            counted: Counted::default(),
            ring,
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

    /// This thread had no processor for that time, or nothing to do.
    pub fn away(&mut self, from: Duration, until: Duration) {
        self.connection.away(from, until);
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
    pub fn measure(&mut self, shared: &Shared) {
        self.counted.bring(&self.connection, &shared.packets);
        let (window, _, _) = self.connection.window();
        let trip = self.connection.round_trip();
        let stats = self.connection.stats();
        for own in self.sockets.iter() {
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
        Some(self.sockets.get(path)?.port.fd())
    }

    /// The port number of a path.
    pub fn number(&self, path: usize) -> Option<u16> {
        Some(self.sockets.get(path)?.at.port())
    }

    /// Closes the socket of a path ([`Sockets::cut`]).
    pub fn cut(&mut self, path: PathId, why: &str, shared: &Shared) {
        self.sockets.cut(path, why, shared);
    }

    /// Uses these NICs from now on, and tells the peer, where they are others than before.
    pub fn have(&mut self, nics: &Nics, shared: &Shared, now: Duration) {
        if nics.edition() == self.edition {
            return;
        }
        self.edition = nics.edition();
        self.deal(now, |sockets| sockets.have(nics, shared));
        let Addresses { edition, list } = nics.addresses();
        for (place, address) in list.iter().enumerate() {
            self.say(Signal::Address {
                edition,
                place: (place as u8, list.len() as u8),
                address: *address,
            });
        }
    }

    /// Changes the ways of paths.
    fn deal(&mut self, now: Duration, change: impl FnOnce(&mut Sockets)) {
        let before = self.sockets.ways();
        change(&mut self.sockets);
        let ways = before.zip(self.sockets.ways()).zip(0..=u8::MAX);
        let others = ways.filter(|((before, after), _)| before != after);
        self.connection.renewed(others.map(|(_, path)| path), now);
    }

    // ---- comms ----

    fn say(&mut self, signal: Signal) {
        let number = self.connection.send(signals::CHANNEL, SIGNAL as u64);
        self.signals.say(number, signal);
    }

    pub(super) fn begin(&mut self, channel: u32, requests: &Arc<Requests>) {
        let end = End {
            requests: requests.clone(),
            next: 0,
            taken: [Duration::ZERO; SLOTS],
            failed: false,
        };
        self.ends.insert(channel, end);
        self.channels.insert(requests.id, channel);
        requests.register();
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

    /// Adds the receiving end of a comm that the peer has offered. It fails for one that is gone.
    pub fn take(&mut self, requests: &Arc<Requests>) {
        match self.channels.get(&requests.id).copied() {
            Some(channel) => self.begin(channel, requests),
            None => {
                requests.fail(Why::PeerClosed);
                requests.register();
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
                self.less(end.settle(REMOTE));
            }
            self.say(Signal::Closed(channel));
        }
        self.idle = now;
        requests.let_go();
    }

    fn less(&self, bytes: u64) {
        self.peer.traffic.under_way[self.side() as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Ends what is here of comms that have failed, where the caller has found it.
    pub fn fail_with_others(&mut self, shared: &Shared) {
        let failed = self.ends.iter().filter(|(_, end)| !end.failed);
        let failed = failed.filter_map(|(channel, end)| Some((*channel, end.requests.failure()?)));
        let failed: Vec<(u32, Why)> = failed.collect();
        for (channel, why) in failed {
            self.fail(channel, why, shared);
        }
    }

    /// Nothing of a comm will complete any more.
    fn fail(&mut self, channel: u32, why: Why, shared: &Shared) {
        let Some(end) = self.ends.get_mut(&channel) else {
            return;
        };
        end.failed = true;
        if end.requests.failure().is_none() {
            let level = match why {
                Why::PeerClosed => Level::Debug,
                Why::Oversize { .. } | Why::NoPath(_) | Why::PeerEnded => Level::Warn,
            };
            let text = format!("comm {} with {}: {why}", end.requests.id, self.peer.name());
            shared.log(level, &text);
        }
        end.requests.fail(why);
        let less = end.settle(code(why));
        self.less(less);
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
            // What was taken before the caller found it is settled as well.
            let less = end.settle(code(why));
            self.less(less);
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

    // ---- events ----

    /// Acts on all that happened; whether anything did.
    pub(super) fn digest(&mut self, shared: &Shared, now: Duration) -> bool {
        let mut any = false;
        while let Some(event) = self.connection.event() {
            self.act(event, shared, now);
            any = true;
        }
        any
    }

    fn trace_event(&self, event: &Event, at: Duration) {
        let Some(ring) = &self.ring else {
            return;
        };
        let own = self.connection.number();
        match event {
            Event::Connected => ring.add(Record::Opened {
                at,
                connection: (own, self.connection.peer_number()),
                peer: self.peer.name().to_owned(),
            }),
            Event::Over(why) => ring.add(Record::Over {
                at,
                connection: own,
                why: why.to_string(),
            }),
            Event::Sent { .. } | Event::Received { .. } | Event::TooLong { .. } => {}
        }
    }

    fn act(&mut self, event: Event, shared: &Shared, now: Duration) {
        self.trace_event(&event, now);
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
                        self.obey(signal, shared, now);
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
                    Over::Ended => Why::PeerEnded,
                    Over::Silent | Over::Version(..) => Why::NoPath(shared.config.timeout),
                };
                let level = match why {
                    Over::Closed | Over::ByPeer => Level::Debug,
                    Over::Silent | Over::Ended | Over::Version(..) => Level::Warn,
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

    fn obey(&mut self, signal: Signal, shared: &Shared, now: Duration) {
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
            Signal::Address {
                edition,
                place,
                address,
            } => {
                if let Some(said) = self.told.hear(edition, place, address) {
                    let (name, count) = (self.peer.name(), said.list.len());
                    shared.log(Level::Debug, &format!("{name} has {count} address(es)"));
                    self.deal(now, |sockets| sockets.peer_has(&said.list, shared));
                    // For the next connection.
                    lock(&self.peer.addresses).learn(&said);
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
            self.less(end.settle(REMOTE));
            end.requests.let_go();
        }
        self.ends.clear();
    }

    /// It is not there any more.
    pub fn bury(&mut self, why: &str, shared: &Shared) {
        self.counted.bring(&self.connection, &shared.packets);
        self.trace_notes();
        self.sockets.close(why, shared);
        self.peer.connections.fetch_sub(1, Ordering::Release);
    }
}
