//! A thread of the UDP engine: its own connections, comms and sockets, run to completion. Other threads
//! reach it by its [`Inbox`](crate::inbox) alone; nothing of the data path is shared with them.
//!
//! The first instance has the port that handles name. Hellos come there; each new connection is given to
//! the instances in turn, and answers from a port of its own, which is where the peer sends from then on.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_proto::Side;
use evener_proto::packet::format::{Header, Kind};
use evener_proto::packet::{Accepted, Arrival, Connection, JobKey, accept, greeting};

use super::association::{Association, Effect};
use super::away::Away;
use super::batch::Batch;
use super::cards::Cards;
use super::ports::{Came, Port, Reader};
use super::{config, own};
use crate::comm::Comm;
use crate::config::Choice;
use crate::doorbell::BITS;
use crate::inbox::taken;
use crate::lock::lock;
use crate::log::Level;
use crate::peer::{Peer, PeerKey, Transport};
use crate::peers::Claim;
use crate::shared::Shared;
use crate::sys::{self, Epoll, Ready};
use crate::task::{Asked, Hello, Task};
use crate::trace::Ring;

/// Idle for this long, it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// And for this long while a request waits, where there are processors enough.
const SPIN_WAITED: Duration = Duration::from_micros(300);
const ROOMY: usize = 8;
/// A connection without comms is closed by the side that opened it after this.
const IDLE: Duration = Duration::from_secs(5);
/// A hello may be said again for so long.
const HELLOS: Duration = Duration::from_secs(30);
/// Between two looks at what is over.
const SWEEP: Duration = Duration::from_millis(100);
const WAKER: u64 = u64::MAX;
const RECEPTION: u64 = u64::MAX - 1;
/// With the place of a card in its low bits.
const CARD: u64 = 1 << 63;

/// Where hellos arrive, and which instance has got which.
pub struct Reception {
    port: Port,
    known: HashMap<u64, (usize, Duration)>,
    next: usize,
}

impl Reception {
    /// At this port of all addresses.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn open(v6: bool, number: u16) -> std::io::Result<Reception> {
        let any = if v6 {
            IpAddr::from([0u16; 8])
        } else {
            IpAddr::from([0u8; 4])
        };
        Ok(Reception {
            port: Port::bind(SocketAddr::new(any, number), None)?,
            known: HashMap::new(),
            next: 0,
        })
    }
}

/// See the module.
pub struct Instance {
    index: usize,
    shared: Arc<Shared>,
    epoll: Epoll,
    reception: Option<Reception>,
    associations: Vec<Option<Association>>,
    /// Which comms share a bit of the bell.
    bits: Vec<Vec<(Arc<Peer>, u64)>>,
    next_bit: usize,
    reader: Reader,
    batch: Batch,
    /// Peers that are to be forgotten when nothing claims them.
    leaving: Vec<Arc<Peer>>,
    ring: Option<Ring>,
    away: Away,
    stopped: bool,
}

impl Instance {
    /// The instance whose [`Inbox`](crate::inbox) has this place; the first one has the reception.
    /// With a `ring` it is traced.
    ///
    /// # Errors
    /// Errors of epoll.
    pub fn new(
        index: usize,
        shared: Arc<Shared>,
        reception: Option<Reception>,
        ring: Option<Ring>,
    ) -> std::io::Result<Instance> {
        let epoll = Epoll::new()?;
        epoll.add_readable(shared.instances[index].waker.fd(), WAKER)?;
        if let Some(reception) = &reception {
            epoll.add_readable(reception.port.fd(), RECEPTION)?;
        }
        let mut batch = Batch::default();
        if shared.config.engine == Choice::Xdp {
            batch.cards = Cards::open(&shared);
        }
        for (place, fd) in batch.cards.iter().flat_map(Cards::fds).enumerate() {
            epoll.add_readable(fd, CARD | place as u64)?;
        }
        Ok(Instance {
            index,
            shared,
            epoll,
            reception,
            associations: Vec::new(),
            bits: vec![Vec::new(); BITS],
            next_bit: 0,
            reader: Reader::new(),
            batch,
            leaving: Vec::new(),
            ring,
            away: Away::default(),
            stopped: false,
        })
    }

    fn now(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Runs until it is told to stop.
    pub fn run(mut self) {
        let shared = self.shared.clone();
        let inbox = &shared.instances[self.index];
        let roomy = sys::processors() >= ROOMY;
        let mut ready: Vec<Ready> = Vec::new();
        let (mut idle_since, mut swept) = (self.now(), Duration::ZERO);
        let mut turn = idle_since;
        while !self.stopped {
            let mut active = false;
            if taken(&inbox.has_tasks) {
                for task in inbox.take() {
                    match task {
                        Asked::Any(task) => self.perform(task),
                        Asked::Own(hello) => {
                            self.hello(hello.random, &hello.packet, hello.from);
                        }
                    }
                }
                active = true;
            }
            if inbox.bell.rung() {
                inbox.bell.drain(|bit| self.poll_bit(bit));
                active = true;
            }
            if self.epoll.wait(&mut ready, Some(Duration::ZERO)).is_ok() {
                active |= self.read(&ready) > 0;
            }
            self.turn();
            if let Some(cards) = &mut self.batch.cards
                && cards.left()
            {
                cards.flush();
                active = true;
            }
            let now = self.now();
            inbox.counts.turn(now - turn, active, false);
            turn = now;
            if now >= swept + SWEEP {
                swept = now;
                self.sweep(now);
                inbox.counts.used(sys::processor_time());
            }
            if active {
                idle_since = now;
            }
            let spin = if roomy && self.waited() {
                SPIN_WAITED
            } else {
                SPIN
            };
            if !active && now - idle_since >= spin {
                let mut until = now + SWEEP;
                for one in self.associations.iter_mut().flatten() {
                    until = until.min(one.deadline().unwrap_or(until));
                }
                inbox.bell.sleep();
                if !inbox.has_news() {
                    let timeout = until.saturating_sub(self.now());
                    if self.epoll.wait_exactly(&mut ready, timeout).is_ok() {
                        self.read(&ready);
                    }
                }
                inbox.bell.awake();
                if ready.iter().any(|one| one.token == WAKER) {
                    inbox.waker.clear();
                }
                idle_since = self.now();
                inbox.counts.slept(idle_since - turn);
                turn = idle_since;
            }
        }
        let now = self.now();
        for mut one in std::mem::take(&mut self.associations).into_iter().flatten() {
            one.close(&mut self.batch, &shared, &inbox.counts, now);
            one.bury("the engine has stopped", &shared);
        }
        if let Some(cards) = &self.batch.cards {
            shared.log(Level::Info, &cards.summary());
        }
    }

    /// Whether any request waits.
    fn waited(&self) -> bool {
        let all = self.associations.iter().flatten();
        all.map(|one| &one.peer.traffic.under_way).any(|bytes| {
            bytes
                .iter()
                .any(|bytes| bytes.load(std::sync::atomic::Ordering::Relaxed) > 0)
        })
    }

    // ---- packets ----

    fn read(&mut self, ready: &[Ready]) -> usize {
        let mut came = 0;
        let used = || sys::processor_time().iter().sum();
        if let Some((from, until)) = self.away.look(self.now(), used) {
            for one in self.associations.iter_mut().flatten() {
                one.away(from, until);
            }
        }
        for one in ready {
            match one.token {
                WAKER => {}
                RECEPTION => came += self.greet(),
                token if token & CARD != 0 => came += self.read_card((token & !CARD) as usize),
                token => {
                    let (place, path) = ((token >> 16) as usize, (token & 0xffff) as usize);
                    let began = Instant::now();
                    if let Some(Some(one)) = self.associations.get_mut(place) {
                        let clock = || self.shared.started.elapsed();
                        came += one.read(path, &mut self.reader, clock);
                    }
                    self.shared.instances[self.index]
                        .counts
                        .read(0, began.elapsed());
                }
            }
        }
        came
    }

    /// Reads what a card has. How many packets came.
    fn read_card(&mut self, card: usize) -> usize {
        let (began, started) = (Instant::now(), self.shared.started);
        let all = &mut self.associations;
        let Some(cards) = &mut self.batch.cards else {
            return 0;
        };
        let came = cards.receive(card, |(place, path), number, came, seen| {
            if let Some(one) = all.get_mut(place).and_then(Option::as_mut) {
                one.hear_card(path, number, came, seen.saturating_duration_since(started));
            }
        });
        let counts = &self.shared.instances[self.index].counts;
        counts.read(0, began.elapsed());
        came
    }

    fn turn(&mut self) {
        // Borrowed: all instances would write one cache line in each turn, if each counted itself as a user.
        let shared = &*self.shared;
        let counts = &shared.instances[self.index].counts;
        for (place, one) in self.associations.iter_mut().enumerate() {
            let Some(one) = one else {
                continue;
            };
            one.turn(&mut self.batch, shared, counts);
            for effect in one.effects() {
                match effect {
                    Effect::Watch { path } => {
                        let token = (place as u64) << 16 | path as u64;
                        if let (Some(cards), Some(number)) =
                            (&mut self.batch.cards, one.number(path))
                        {
                            cards.own(number, (place, path));
                        }
                        if let Some(fd) = one.fd(path)
                            && let Err(error) = self.epoll.add_readable(fd, token)
                        {
                            shared.log(Level::Warn, &format!("epoll: {error}"));
                        }
                    }
                    Effect::Offer { comm, listener } => {
                        let claim = Claim::of(&one.peer);
                        if let Err(claim) = shared.offer(listener, claim, comm) {
                            shared.decline(&claim, comm);
                        }
                    }
                }
            }
        }
    }

    /// Hears hellos: each goes to the instance that has its connection, or will.
    fn greet(&mut self) -> usize {
        let (Some(mut reception), now) = (self.reception.take(), self.now()) else {
            return 0;
        };
        let instances = self.shared.instances.len();
        let key = JobKey::new(self.shared.token);
        let mut hellos = Vec::new();
        let clock = || now;
        let came = self
            .reader
            .read(&reception.port, clock, |came: &Came<'_>, _| {
                let hello = Header::parse(came.packet).ok().and_then(|(header, _)| {
                    let is_hello = header.kind == Kind::Hello;
                    is_hello.then(|| greeting::open(came.packet, &header, &key).ok())?
                });
                // Whoever has not the token hears nothing.
                if let Some(hello) = hello {
                    hellos.push((hello.initiator, came.packet.to_vec(), came.from));
                } else {
                    self.shared.packets.stranger();
                }
            });
        for (random, packet, from) in hellos {
            let (to, at) = reception.known.entry(random).or_insert_with(|| {
                // From the last one: connections of our own begin at the first, so each has a thread for itself
                // where there are enough.
                let place = instances - 1 - reception.next % instances;
                reception.next += 1;
                (place, now)
            });
            *at = now;
            if *to == self.index {
                self.hello(random, &packet, from);
            } else {
                self.shared.instances[*to].ask_own(Hello {
                    random,
                    packet,
                    from,
                });
            }
        }
        reception.known.retain(|_, (_, at)| now < *at + HELLOS);
        self.reception = Some(reception);
        came.unwrap_or(0)
    }

    fn hello(&mut self, random: u64, packet: &[u8], from: SocketAddr) {
        let now = self.now();
        let came = Came {
            packet,
            from,
            to: None,
            arrival: Arrival::default(),
        };
        let mut all = self.associations.iter_mut().flatten();
        if let Some(known) = all.find(|one| one.peer.key.mirror && one.random == random) {
            let _ = known.hear(&came, now);
            return;
        }
        let Ok(own) = own() else {
            return;
        };
        let key = JobKey::new(self.shared.token);
        match accept(config(&self.shared), key, own, packet, now) {
            Ok(Accepted::Connection(connection)) => {
                let mut process = [0; 16];
                process[..8].copy_from_slice(&random.to_le_bytes());
                process[8..].copy_from_slice(&own.random.to_le_bytes());
                let key = PeerKey {
                    process,
                    mirror: true,
                    transport: Transport::Udp,
                    connection: 0,
                };
                let shared = self.shared.clone();
                let addresses = [from.ip()];
                let claim = shared.peer(key, [0; 16], from.port(), &addresses, Some(self.index));
                self.add(&claim, random, connection, false, vec![from]);
            }
            Ok(Accepted::Reply(reply)) => {
                // From any port: it names the initiator's random number.
                if let Some(reception) = &self.reception {
                    reception.port.send(from, &reply, reply.len());
                } else if let Ok(reception) = Reception::open(from.is_ipv6(), 0) {
                    reception.port.send(from, &reply, reply.len());
                }
            }
            // The tag was right: something else is not, and no answer is needed.
            Err(_) => {}
        }
    }

    fn add(
        &mut self,
        peer: &Arc<Peer>,
        random: u64,
        connection: Box<Connection>,
        initiates: bool,
        remotes: Vec<SocketAddr>,
    ) -> usize {
        let now = self.now();
        let ring = self.ring.clone();
        let end = (random, connection, initiates);
        let nics = self.shared.nics();
        let one = Association::new(peer.clone(), end, (&nics, remotes), ring, now);
        match self.associations.iter().position(Option::is_none) {
            Some(place) => {
                self.associations[place] = Some(one);
                place
            }
            None => {
                self.associations.push(Some(one));
                self.associations.len() - 1
            }
        }
    }

    fn of(&mut self, peer: &Arc<Peer>) -> Option<&mut Association> {
        let mut all = self.associations.iter_mut().flatten();
        all.find(|one| Arc::ptr_eq(&one.peer, peer))
    }

    /// The connection to a peer, opened where there is none.
    fn connection_to(&mut self, peer: &Arc<Peer>) -> std::io::Result<&mut Association> {
        let known = self.associations.iter().position(|one| {
            one.as_ref()
                .is_some_and(|one| Arc::ptr_eq(&one.peer, peer) && one.is_alive())
        });
        let place = match known {
            Some(place) => place,
            None => {
                let own = own()?;
                let (key, now) = (JobKey::new(peer.token), self.now());
                let connection = Connection::connect(config(&self.shared), key, own, now);
                let addresses = lock(&peer.addresses).list.clone();
                let port = peer.port;
                let nics = self.shared.nics();
                let reaches =
                    |ip: &&IpAddr| nics.iter().any(|nic| nic.address.is_ipv4() == ip.is_ipv4());
                let remotes = addresses.iter().filter(reaches);
                let remotes = remotes.map(|ip| SocketAddr::new(*ip, port)).collect();
                self.add(peer, own.random, Box::new(connection), true, remotes)
            }
        };
        let one = self.associations.get_mut(place).and_then(Option::as_mut);
        one.ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    // ---- tasks ----

    fn perform(&mut self, task: Task) {
        match task {
            Task::Begin(comm, listener) => self.begin(&comm, listener),
            Task::Accept(comm) => {
                if let Some(one) = self.of(&comm.peer) {
                    one.answer(comm.id, true);
                }
            }
            Task::Decline(peer, comm) => {
                if let Some(one) = self.of(&peer) {
                    one.answer(comm, false);
                }
            }
            Task::Release(comm) => {
                let bit = comm.bit.load(std::sync::atomic::Ordering::Relaxed);
                self.bits[bit]
                    .retain(|(peer, id)| !(Arc::ptr_eq(peer, &comm.peer) && *id == comm.id));
                let now = self.now();
                let mut all = self.associations.iter_mut().flatten();
                // Its connection may be over, and another to the same peer here.
                match all.find(|one| Arc::ptr_eq(&one.peer, &comm.peer) && one.has(&comm.requests))
                {
                    Some(one) => one.release(&comm.requests, now),
                    None => comm.requests.let_go(),
                }
            }
            Task::Drop(peer, path, why) => {
                let shared = self.shared.clone();
                if let Some(one) = self.of(&peer) {
                    one.cut(path, why, &shared);
                }
            }
            Task::Stop => self.stopped = true,
        }
    }

    fn begin(&mut self, comm: &Arc<Comm>, listener: Option<u64>) {
        let bit = self.next_bit;
        self.next_bit = (self.next_bit + 1) % BITS;
        self.bits[bit].push((comm.peer.clone(), comm.id));
        comm.bit.store(bit, std::sync::atomic::Ordering::Relaxed);
        match (comm.side, listener) {
            (Side::Send, Some(listener)) => match self.connection_to(&comm.peer) {
                Ok(one) => one.open(&comm.requests, listener),
                Err(error) => {
                    let text = format!("no random numbers for a connection: {error}");
                    self.shared.log(Level::Error, &text);
                    comm.requests.fail(evener_proto::Why::PeerClosed);
                }
            },
            _ => match self.of(&comm.peer) {
                Some(one) => one.take(&comm.requests),
                None => {
                    comm.requests.fail(evener_proto::Why::PeerClosed);
                    comm.requests.register();
                }
            },
        }
    }

    fn poll_bit(&mut self, bit: usize) {
        let now = self.now();
        for (peer, id) in &self.bits[bit] {
            let mut all = self.associations.iter_mut().flatten();
            if let Some(one) = all.find(|one| Arc::ptr_eq(&one.peer, peer) && one.carries(*id)) {
                one.poll(*id, now);
            }
        }
    }

    /// Looks for connections that are over, or that nobody uses.
    fn sweep(&mut self, now: Duration) {
        let shared = &*self.shared;
        let counts = &shared.instances[self.index].counts;
        let nics = shared.nics();
        for place in &mut self.associations {
            let Some(one) = place else {
                continue;
            };
            one.have(&nics, shared, now);
            one.measure(shared);
            one.fail_with_others(shared);
            if one.is_idle() && one.initiates() && now >= one.idle + IDLE {
                one.close(&mut self.batch, shared, counts, now);
            }
            if one.is_over() {
                one.bury("the connection is over", shared);
                self.leaving.push(one.peer.clone());
                *place = None;
            }
        }
        self.leaving.retain(|peer| !shared.peers.forget(peer));
        if let Some(cards) = &mut self.batch.cards {
            cards.sweep(&self.epoll);
        }
    }
}
