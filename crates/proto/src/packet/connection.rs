//! One connection: the parts of this folder put together. It decides nothing that a part could decide.
//!
//! Whoever drives it does, in this order: hand in all datagrams that are there
//! ([`Connection::receive`]), then the time ([`Connection::on_time`]), then take datagrams until there
//! are none ([`Connection::transmit`]), then events; and comes back at [`Connection::deadline`]. The
//! order matters after a sleep: acknowledgements that lay in the socket are heard before the clock
//! says that they are late.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::ack::{EVERY, Received};
use super::auth::{JobKey, Key};
use super::congestion::Congestion;
use super::credit::{Incoming, Verdict};
use super::format::FormatError;
use super::format::{Ack, CHUNK, Frame, Frames, Greeting, HEADER, Header, Kind, VERSION, Writer};
use super::greeting::{self, Own};
use super::loss::{Content, Fate, Reordering, Sent, Unconfirmed};
use super::mtu::Mtu;
use super::number::{expand, low};
use super::outgoing::{Met, Outgoing, Span};
use super::paths::{Paths, State};
use super::replay::Replay;
use super::rtt::{self, RoundTrip};
use super::stats::Stats;

/// Every this many packets the sender says what it does not care for any more ...
const FLOOR_EVERY: u64 = 64;
/// ... and every this many acknowledgements ask for one themselves: else no end would see that their
/// path is dead.
const PING_EVERY: u64 = 16;
/// After silence while something is expected.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
/// Times that a path is silent before it is dropped.
const SILENCES: u32 = 2;
/// The floor of patience grows to this if packets are late and not lost.
const WIDEST_FLOOR: Duration = Duration::from_millis(5);
/// Packets that say that the connection is over.
const FAREWELLS: u8 = 3;

/// What is fixed for a connection's life.
#[derive(Debug, Clone)]
pub struct Config {
    /// Source ports, 256 at most ...
    pub paths: usize,
    /// ... and how many of them are in use at a time.
    pub used: usize,
    /// Bytes of a datagram that are known to arrive.
    pub datagram: usize,
    /// Bytes of a datagram that the card takes: larger ones are looked for up to it.
    pub most_datagram: usize,
    /// The shortest silence that counts: 1 to 5 ms.
    pub floor: Duration,
    /// The longest silence of the peer while something is expected of it.
    pub patience: Duration,
    /// Most bytes in flight.
    pub in_flight: u64,
    /// Versions that are spoken: oldest, newest.
    pub versions: (u8, u8),
    /// The first packet's number.
    pub first_number: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            paths: 64,
            used: 16,
            datagram: 1472,
            most_datagram: 1472,
            floor: Duration::from_millis(2),
            patience: Duration::from_secs(60),
            in_flight: 64 << 20,
            versions: (VERSION, VERSION),
            first_number: 0,
        }
    }
}

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Over {
    /// This side closed it.
    #[error("closed")]
    Closed,
    /// The peer did.
    #[error("the peer closed the connection")]
    ByPeer,
    /// Nothing was heard for [`Config::patience`].
    #[error("the peer is silent")]
    Silent,
    /// No version is common.
    #[error("the peer speaks versions {0} to {1} of the packet protocol, this side does not")]
    Version(u8, u8),
}

/// Why a datagram was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    /// Not a packet, or frames that cannot be.
    #[error("malformed: {0}")]
    Malformed(FormatError),
    /// Not of one who has the job key.
    #[error("the tag is wrong")]
    Forged,
    /// Seen before, or too old to know.
    #[error("seen before")]
    Replayed,
    /// It breaks the rule of credits.
    #[error("for a buffer that was not posted")]
    NotPosted,
    /// Of another connection, or before there is one.
    #[error("not of this connection")]
    Stray,
    /// A credit or an acknowledgement that makes no sense.
    #[error("a {0} that cannot be")]
    Nonsense(&'static str),
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer is there and has the job key.
    Connected,
    /// All bytes of a message have arrived at the peer: its memory is free.
    Sent {
        /// Queue of messages.
        channel: u32,
        /// Number in it.
        message: u64,
    },
    /// All bytes of a message are in its buffer.
    Received {
        /// Queue of messages.
        channel: u32,
        /// Number in it.
        message: u64,
        /// Its length.
        length: u64,
    },
    /// A message has more bytes than its buffer: it will not come. Both sides are told.
    TooLong {
        /// Queue of messages.
        channel: u32,
        /// Number in it.
        message: u64,
        /// Its length.
        length: u64,
        /// Bytes of the buffer.
        room: u64,
    },
    /// The connection is over; nothing else will happen.
    Over(Over),
}

/// Bytes and where they belong.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Queue of messages.
    pub channel: u32,
    /// Number in it.
    pub message: u64,
    /// Where in the posted buffer; always inside of it.
    pub offset: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A datagram that is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// From which source port, by its place in the list.
    pub path: u8,
    /// Its bytes, from the start of `out`.
    pub length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    /// The initiator has sent this many hellos; the next goes then.
    Calling(u32, Duration),
    /// The responder has not heard its own random number back.
    Unproven,
    Open,
    Over(Over),
}

/// What a responder does about a hello.
#[derive(Debug)]
pub enum Accepted {
    /// A connection; its welcome is the first that it transmits.
    Connection(Box<Connection>),
    /// No common version: this datagram tells the initiator.
    Reply(Vec<u8>),
}

/// See the module.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    job: JobKey,
    own: Own,
    /// The peer's number for this connection and its random number.
    peer: (u32, u64),
    initiates: bool,
    version: u8,
    stage: Stage,
    welcome: bool,
    farewells: u8,
    /// For what goes out and for what comes in.
    keys: Option<(Key, Key)>,
    unconfirmed: Unconfirmed,
    /// Bytes in flight over all paths.
    flying: u64,
    paths: Paths,
    congestion: Congestion,
    reordering: Reordering,
    trip: RoundTrip,
    mtu: Mtu,
    replay: Replay,
    received: Received,
    outgoing: Outgoing,
    incoming: Incoming,
    control: VecDeque<Content>,
    events: VecDeque<Event>,
    /// Ranges of the last acknowledgement: what it said need not be looked at again.
    known: Vec<(u64, u64)>,
    /// Silences since anything was acknowledged.
    outage: u32,
    heard: Duration,
    kept_alive: Duration,
    stats: Stats,
}

fn micros(now: Duration) -> u32 {
    (now.as_micros() & u128::from(u32::MAX)) as u32
}

/// What to do about a hello that came to a socket which waits for them.
///
/// # Errors
/// [`Dropped`] for anything but a hello by one who has the job key.
pub fn accept(
    config: Config,
    job: JobKey,
    own: Own,
    packet: &[u8],
    now: Duration,
) -> Result<Accepted, Dropped> {
    let (header, _) = Header::parse(packet).map_err(Dropped::Malformed)?;
    if header.kind != Kind::Hello {
        return Err(Dropped::Stray);
    }
    let hello = greeting::open(packet, &header, &job)?;
    let Some(version) = greeting::agree(config.versions, (hello.oldest, hello.newest)) else {
        let says = Greeting {
            oldest: config.versions.0,
            newest: config.versions.1,
            ..hello
        };
        let mut reply = vec![0; greeting::PACKET];
        greeting::emit(
            &mut reply,
            Kind::Versions,
            hello.connection,
            header.path,
            &says,
            &job,
        );
        return Ok(Accepted::Reply(reply));
    };
    let mut connection = Connection::new(config, job, own, now);
    connection.peer = (hello.connection, hello.initiator);
    connection.version = version;
    let (to_responder, to_initiator) = job.session(hello.initiator, own.random);
    connection.keys = Some((to_initiator, to_responder));
    (connection.stage, connection.welcome) = (Stage::Unproven, true);
    Ok(Accepted::Connection(Box::new(connection)))
}

impl Connection {
    /// The initiator's side; its hello is the first that it transmits.
    pub fn connect(config: Config, job: JobKey, own: Own, now: Duration) -> Connection {
        let mut connection = Connection::new(config, job, own, now);
        connection.initiates = true;
        connection
    }

    fn new(config: Config, job: JobKey, own: Own, now: Duration) -> Connection {
        let paths = Paths::new(config.used, config.paths);
        let used = paths.used().len();
        Connection {
            job,
            own,
            peer: (0, 0),
            initiates: false,
            version: VERSION,
            stage: Stage::Calling(0, now),
            welcome: false,
            farewells: 0,
            keys: None,
            unconfirmed: Unconfirmed::new(config.first_number),
            flying: 0,
            congestion: Congestion::new(
                paths.count(),
                used,
                config.datagram,
                config.in_flight,
                now,
            ),
            paths,
            reordering: Reordering::default(),
            trip: RoundTrip::default(),
            mtu: Mtu::new(config.datagram, config.most_datagram),
            replay: Replay::default(),
            received: Received::default(),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            control: VecDeque::new(),
            events: VecDeque::new(),
            known: Vec::new(),
            outage: 0,
            heard: now,
            kept_alive: now,
            stats: Stats::default(),
            config,
        }
    }

    /// Queues a message of this many bytes; its number in the channel. They are asked for, some of them
    /// more than once, until [`Event::Sent`].
    pub fn send(&mut self, channel: u32, length: u64) -> u64 {
        let (message, met) = self.outgoing.send(channel, length);
        self.met(channel, message, length, met);
        message
    }

    /// Posts a buffer of this many bytes; the number of the message that comes into it. It is written to
    /// until [`Event::Received`].
    pub fn post(&mut self, channel: u32, room: u64) -> u64 {
        let message = self.incoming.post(channel, room);
        self.control
            .push_back(Content::Credit(channel, message, room));
        message
    }

    fn met(&mut self, channel: u32, message: u64, length: u64, met: Met) {
        if let Met::TooLong { room } = met {
            self.control
                .push_back(Content::TooLong(channel, message, length));
            self.events.push_back(Event::TooLong {
                channel,
                message,
                length,
                room,
            });
        }
    }

    /// The next thing that happened.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What was counted.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Round trips.
    pub fn round_trip(&self) -> &RoundTrip {
        &self.trip
    }

    /// Bytes that may be in flight, that are, and how many paths compete with TCP.
    pub fn window(&self) -> (u64, u64, usize) {
        let competing = self.congestion.competing(self.paths.used());
        (self.congestion.total() as u64, self.flying, competing)
    }

    /// Bytes of a datagram, as found.
    pub fn datagram(&self) -> usize {
        self.mtu.size()
    }

    /// The number that the peer writes into its packets.
    pub fn number(&self) -> u32 {
        self.own.connection
    }

    /// Why it is over, if it is.
    pub fn over(&self) -> Option<Over> {
        match self.stage {
            Stage::Over(why) => Some(why),
            _ => None,
        }
    }

    /// Ends it. What is not complete never will be.
    pub fn close(&mut self) {
        if self.keys.is_some() && self.over().is_none() {
            self.farewells = FAREWELLS;
        }
        self.end(Over::Closed);
    }

    fn end(&mut self, why: Over) {
        if self.over().is_none() {
            self.stage = Stage::Over(why);
            self.events.push_back(Event::Over(why));
        }
    }

    /// Hears a datagram. `marked`: a switch says that its queue is long. `place` gets bytes and where
    /// they belong, before they are acknowledged.
    ///
    /// # Errors
    /// [`Dropped`]: nothing has changed but a count.
    pub fn receive(
        &mut self,
        packet: &[u8],
        marked: bool,
        now: Duration,
        place: &mut dyn FnMut(Place<'_>),
    ) -> Result<(), Dropped> {
        let result = self.hear(packet, marked, now, place);
        match result {
            Ok(()) => self.stats.received += 1,
            Err(Dropped::Malformed(_) | Dropped::Nonsense(_)) => self.stats.malformed += 1,
            Err(Dropped::Forged) => self.stats.forged += 1,
            Err(Dropped::Replayed) => self.stats.replayed += 1,
            Err(Dropped::NotPosted) => self.stats.not_posted += 1,
            Err(Dropped::Stray) => self.stats.stray += 1,
        }
        result
    }

    fn hear(
        &mut self,
        packet: &[u8],
        marked: bool,
        now: Duration,
        place: &mut dyn FnMut(Place<'_>),
    ) -> Result<(), Dropped> {
        let (header, body) = Header::parse(packet).map_err(Dropped::Malformed)?;
        if header.kind != Kind::Data {
            return self.greeted(packet, &header, now);
        }
        if header.connection != self.own.connection || self.over().is_some() {
            return Err(Dropped::Stray);
        }
        if header.version != self.version {
            return Err(Dropped::Malformed(FormatError::Version(header.version)));
        }
        let Some((_, key)) = &self.keys else {
            return Err(Dropped::Stray);
        };
        let number = expand(header.number, self.replay.next());
        if !self.replay.is_new(number) {
            return Err(Dropped::Replayed);
        }
        if !key.verify(packet, number, header.tag) {
            return Err(Dropped::Forged);
        }
        // All of it makes sense, or nothing is done.
        let mut wants = false;
        for frame in Frames::new(body) {
            let frame = frame.map_err(Dropped::Malformed)?;
            wants |= !matches!(frame, Frame::Ack(_) | Frame::Floor(_) | Frame::Close);
            self.judge(&frame)?;
        }
        self.replay.mark(number);
        self.heard = now;
        if matches!(self.stage, Stage::Unproven) {
            self.stage = Stage::Open;
            self.welcome = false;
            self.events.push_back(Event::Connected);
        }
        self.received.insert(number, wants, header.ack_now, now);
        if wants {
            let delay = micros(now).wrapping_sub(header.stamp);
            self.received.heard(header.path, delay, marked);
            self.stats.marked += u64::from(marked);
        }
        for frame in Frames::new(body).flatten() {
            self.act(&frame, number, now, place);
        }
        Ok(())
    }

    /// Whether a frame of a peer with the right key breaks a rule.
    fn judge(&self, frame: &Frame<'_>) -> Result<(), Dropped> {
        match frame {
            Frame::Chunk(chunk) if self.incoming.judge(chunk) == Verdict::NotPosted => {
                Err(Dropped::NotPosted)
            }
            Frame::Ack(ack) => {
                let next = self.unconfirmed.next();
                if expand(ack.largest, next) >= next {
                    return Err(Dropped::Nonsense("acknowledgement"));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn act(
        &mut self,
        frame: &Frame<'_>,
        number: u64,
        now: Duration,
        place: &mut dyn FnMut(Place<'_>),
    ) {
        match *frame {
            Frame::Chunk(chunk) => match self.incoming.judge(&chunk) {
                Verdict::Place(message) => {
                    place(Place {
                        channel: chunk.channel,
                        message,
                        offset: chunk.offset,
                        bytes: chunk.payload,
                    });
                    if let Some(length) = self.incoming.placed(message, &chunk) {
                        self.events.push_back(Event::Received {
                            channel: chunk.channel,
                            message,
                            length,
                        });
                    }
                }
                _ => self.stats.echoes += chunk.payload.len() as u64,
            },
            Frame::Ack(ack) => self.acknowledged(&ack, now),
            Frame::Credit {
                channel,
                message,
                room,
            } => {
                let message = expand(message, self.outgoing.next(channel));
                let length = self.outgoing.waiting(channel, message);
                match self.outgoing.credit(channel, message, room) {
                    Some(met) => self.met(channel, message, length, met),
                    // 65,536 credits without a message: more than any peer has a use for.
                    None => self.end(Over::ByPeer),
                }
            }
            Frame::TooLong {
                channel,
                message,
                total,
            } => {
                let message = self.incoming.number(channel, message);
                if let Some(room) = self.incoming.refused(channel, message) {
                    self.events.push_back(Event::TooLong {
                        channel,
                        message,
                        length: total,
                        room,
                    });
                }
            }
            Frame::Floor(floor) => self.received.forget_below(expand(floor, number)),
            Frame::Ping => {}
            Frame::Close => self.end(Over::ByPeer),
        }
    }

    fn greeted(&mut self, packet: &[u8], header: &Header, now: Duration) -> Result<(), Dropped> {
        let says = greeting::open(packet, header, &self.job)?;
        match (header.kind, self.stage) {
            (Kind::Hello, Stage::Unproven) if says.initiator == self.peer.1 => {
                self.welcome = true;
                Ok(())
            }
            (Kind::Welcome, Stage::Calling(..))
                if says.initiator == self.own.random
                    && header.connection == self.own.connection
                    && greeting::agree(self.config.versions, (says.newest, says.newest))
                        .is_some() =>
            {
                self.peer = (says.connection, says.responder);
                self.version = says.newest;
                self.keys = Some(self.job.session(self.own.random, says.responder));
                (self.stage, self.heard) = (Stage::Open, now);
                self.events.push_back(Event::Connected);
                // The responder is silent until it hears a packet with the session's key.
                if let Some(path) = self.paths.get_mut(header.path) {
                    path.probe = true;
                }
                Ok(())
            }
            (Kind::Versions, Stage::Calling(..)) if says.initiator == self.own.random => {
                self.end(Over::Version(says.oldest, says.newest));
                Ok(())
            }
            _ => Err(Dropped::Stray),
        }
    }

    fn acknowledged(&mut self, ack: &Ack<'_>, now: Duration) {
        let high = expand(ack.largest, self.unconfirmed.next());
        let mut part = (high.saturating_sub(u64::from(ack.first)), high);
        let mut parts: Vec<(u64, u64)> = vec![part];
        for (gap, more) in ack.ranges() {
            let Some(high) = part.0.checked_sub(u64::from(gap) + 1) else {
                break;
            };
            part = (high.saturating_sub(u64::from(more)), high);
            parts.push(part);
        }
        let mut fresh: SmallVec<[u64; 16]> = smallvec![];
        let mut known = std::mem::take(&mut self.known).into_iter().peekable();
        for (low, high) in &parts {
            // Downwards, over what the last acknowledgement said already.
            let mut above = *high + 1;
            while known.next_if(|old| old.0 >= above).is_some() {}
            while above > *low {
                match known.peek().copied().filter(|old| old.1 >= *low) {
                    Some(old) => {
                        self.newly((old.1 + 1).max(*low)..above, &mut fresh);
                        above = old.0.min(above);
                        if old.0 >= *low {
                            known.next();
                        }
                    }
                    None => {
                        self.newly(*low..above, &mut fresh);
                        above = *low;
                    }
                }
            }
        }
        self.known = parts;
        self.arrived(ack, &fresh, now);
    }

    /// Those of these numbers that were not known to have arrived.
    fn newly(&self, numbers: std::ops::Range<u64>, fresh: &mut SmallVec<[u64; 16]>) {
        for number in numbers.start.max(self.unconfirmed.first())..numbers.end {
            if self
                .unconfirmed
                .get(number)
                .is_some_and(|sent| matches!(sent.fate, Fate::Flying | Fate::Lost))
            {
                fresh.push(number);
            }
        }
    }

    fn arrived(&mut self, ack: &Ack<'_>, fresh: &[u64], now: Duration) {
        if let Some(newest) = fresh
            .iter()
            .max()
            .and_then(|number| self.unconfirmed.get(*number))
        {
            self.outage = 0;
            let held = Duration::from_micros(u64::from(ack.held));
            // Of one that was taken for lost as well: numbers are never used twice, so it is exact, and
            // it is what makes patience longer where processes wait for processors.
            self.trip.sample(now.saturating_sub(newest.at), held);
        }
        for heard in ack.heard() {
            let marked = heard.marked > 0;
            self.congestion
                .delay(heard.path, heard.delay, marked, &self.trip, now);
        }
        let mut touched: SmallVec<[u8; 16]> = smallvec![];
        for number in fresh {
            let Some(sent) = self.unconfirmed.get_mut(*number) else {
                continue;
            };
            let before = std::mem::replace(&mut sent.fate, Fate::Arrived);
            let (at, size, path) = (sent.at, u64::from(sent.size), sent.path);
            let limited = sent.limited;
            let content = std::mem::take(&mut sent.content);
            self.mtu.arrived(size as usize);
            self.paths.answered(path);
            if let Some(path) = self.paths.get_mut(path) {
                path.newest = path.newest.max(Some((*number, at)));
                if before == Fate::Flying {
                    path.flying = path.flying.saturating_sub(size);
                    self.flying = self.flying.saturating_sub(size);
                }
            }
            if before == Fate::Lost {
                self.stats.late += 1;
                self.reordering.was_late();
                let wider = self.config.floor + self.config.floor / 8;
                self.config.floor = wider.min(WIDEST_FLOOR.max(self.config.floor));
            } else {
                self.congestion
                    .arrived(path, size, (at, limited), &self.trip, now);
            }
            if !touched.contains(&path) {
                touched.push(path);
            }
            for content in content {
                if let Content::Bytes(span) = content
                    && self.outgoing.arrived(&span)
                {
                    self.events.push_back(Event::Sent {
                        channel: span.channel,
                        message: span.message,
                    });
                }
            }
        }
        for path in touched {
            self.find_lost(path, now);
        }
        self.congestion.set_packet(self.mtu.size());
        let before = now.saturating_sub(self.trip.patience(self.config.floor) * 2);
        self.unconfirmed.forget(before);
    }

    /// What of a path is lost by order or age.
    fn find_lost(&mut self, at: u8, now: Duration) {
        let trip = self.trip.smoothed().max(self.trip.latest());
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        let (lost, due) = self.reordering.find(path, &self.unconfirmed, trip, now);
        path.due = due;
        let mut count = 0;
        for number in lost {
            count += u32::from(self.lose(number));
            self.stats.lost += 1;
        }
        if count > 0 {
            self.congestion
                .lost(at, count, self.paths.used(), &self.trip, now);
        }
    }

    /// Takes a packet for lost: what it held goes again. `false`: it was but a probe.
    fn lose(&mut self, number: u64) -> bool {
        let Some(sent) = self.unconfirmed.get_mut(number) else {
            return false;
        };
        if sent.fate != Fate::Flying {
            return false;
        }
        sent.fate = Fate::Lost;
        let size = u64::from(sent.size);
        self.flying = self.flying.saturating_sub(size);
        if let Some(path) = self.paths.get_mut(sent.path) {
            path.flying = path.flying.saturating_sub(size);
        }
        // It stays with the packet: should this be only late, it counts.
        for content in &sent.content {
            match content {
                Content::Bytes(span) => self.outgoing.lost(span),
                other => self.control.push_back(*other),
            }
        }
        !sent.probe
    }

    /// For how long the oldest packet of a path may be silent.
    fn patience(&self, silences: u32) -> Duration {
        let rounds = silences + self.outage / self.paths.used().len().max(1) as u32;
        let patience = self.trip.patience(self.config.floor);
        (patience * 2u32.pow(rounds.min(5))).min(rtt::LONGEST.max(patience))
    }

    fn oldest(&mut self, at: u8) -> Option<Duration> {
        let path = self.paths.get_mut(at)?;
        while let Some(number) = path.order.front() {
            match self.unconfirmed.get(*number) {
                Some(sent) if sent.fate == Fate::Flying => return Some(sent.at),
                _ => path.order.pop_front(),
            };
        }
        None
    }

    /// When something is due without a datagram.
    pub fn deadline(&mut self) -> Option<Duration> {
        match self.stage {
            Stage::Calling(_, at) => return Some(at.min(self.heard + self.config.patience)),
            Stage::Unproven => return Some(self.heard + self.config.patience),
            Stage::Over(_) => return None,
            Stage::Open => {}
        }
        let mut due = self.received.deadline();
        let mut at_most = |at: Duration| due = Some(due.map_or(at, |least| least.min(at)));
        for place in 0..self.paths.used().len() {
            let at = self.paths.used()[place];
            if let Some(oldest) = self.oldest(at) {
                let (silences, age) = self
                    .paths
                    .get(at)
                    .map_or((0, None), |path| (path.silences, path.due));
                at_most(oldest + self.patience(silences));
                age.into_iter().for_each(&mut at_most);
            }
        }
        self.mtu.deadline().into_iter().for_each(&mut at_most);
        if self.flying > 0 {
            at_most(self.congestion.deadline());
        }
        if self.expects() {
            at_most(self.heard.max(self.kept_alive) + KEEP_ALIVE);
            at_most(self.heard + self.config.patience);
        }
        due
    }

    fn expects(&self) -> bool {
        self.incoming.waits() || !self.outgoing.is_idle()
    }

    /// It is that late.
    pub fn on_time(&mut self, now: Duration) {
        if self.over().is_some() {
            return;
        }
        let silence = now.saturating_sub(self.heard);
        if silence >= self.config.patience && (self.stage != Stage::Open || self.expects()) {
            self.end(Over::Silent);
            return;
        }
        if self.stage != Stage::Open {
            return;
        }
        for place in 0..self.paths.used().len() {
            let at = self.paths.used()[place];
            let path = self.paths.get(at);
            let (silences, due) = path.map_or((0, None), |path| (path.silences, path.due));
            if due.is_some_and(|due| due <= now) {
                self.find_lost(at, now);
            }
            if let Some(oldest) = self.oldest(at)
                && now >= oldest + self.patience(silences)
            {
                self.silent(at, now);
            }
        }
        self.congestion.on_time(self.paths.used(), &self.trip, now);
        if silence >= KEEP_ALIVE
            && now.saturating_sub(self.kept_alive) >= KEEP_ALIVE
            && self.expects()
        {
            self.kept_alive = now;
            let path = self.paths.any();
            if let Some(path) = self.paths.get_mut(path) {
                path.probe = true;
            }
        }
    }

    /// Nothing of a path was confirmed for too long: others take over.
    fn silent(&mut self, at: u8, now: Duration) {
        let Some(path) = self.paths.get_mut(at) else {
            return;
        };
        (path.state, path.probe, path.due) = (State::Suspect, true, None);
        path.silences += 1;
        let silences = path.silences;
        let order = std::mem::take(&mut path.order);
        for number in order {
            let size = self
                .unconfirmed
                .get(number)
                .map_or(0, |sent| sent.size as usize);
            if self.lose(number) {
                self.stats.timed_out += 1;
                if self.mtu.vanished(size, now) {
                    self.congestion.set_packet(self.mtu.size());
                }
            }
        }
        self.stats.silences += 1;
        self.outage = self.outage.saturating_add(1);
        self.congestion.silent(at, self.paths.used());
        if silences >= SILENCES
            && let Some(fresh) = self.paths.replace(at)
        {
            self.stats.replaced += 1;
            self.congestion.replaced(at, fresh, self.paths.used());
        }
    }

    /// The next datagram, written into `out`; `None`: nothing is to be sent now. `read` fills in bytes
    /// of messages.
    pub fn transmit(
        &mut self,
        now: Duration,
        out: &mut [u8],
        read: &mut dyn FnMut(&Span, &mut [u8]),
    ) -> Option<Transmit> {
        if self.stage != Stage::Open {
            return self.transmit_greeting(now, out);
        }
        let probed = self.paths.used().iter().copied();
        let probed = probed
            .into_iter()
            .find(|at| self.paths.get(*at).is_some_and(|path| path.probe));
        if let Some(at) = probed {
            if let Some(path) = self.paths.get_mut(at) {
                path.probe = false;
            }
            return self.build(at, Purpose::Probe(0), now, out, read);
        }
        if let Some(size) = self.mtu.probe(now)
            && out.len() >= size
        {
            let path = self.paths.any();
            return self.build(path, Purpose::Probe(size), now, out, read);
        }
        let size = self.mtu.size();
        if self.outgoing.has_work() && (self.flying + size as u64) as f64 <= self.congestion.total()
            || self.outgoing.has_work() && self.flying == 0
        {
            let congestion = &self.congestion;
            let path = self.paths.choose(size as u64, |at| congestion.window(at));
            if let Some(path) = path {
                return self.build(path, Purpose::Bytes, now, out, read);
            }
        }
        if !self.control.is_empty() || self.received.deadline().is_some_and(|at| at <= now) {
            let path = self.paths.any();
            return self.build(path, Purpose::Control, now, out, read);
        }
        None
    }

    fn transmit_greeting(&mut self, now: Duration, out: &mut [u8]) -> Option<Transmit> {
        let mut says = Greeting {
            initiator: self.own.random,
            responder: 0,
            connection: self.own.connection,
            oldest: self.config.versions.0,
            newest: self.config.versions.1,
        };
        let kind = match self.stage {
            Stage::Calling(times, at) if self.initiates && now >= at => {
                let wait = greeting::FIRST * 2u32.pow(times.min(8));
                self.stage = Stage::Calling(times + 1, now + wait.min(greeting::LONGEST));
                Kind::Hello
            }
            Stage::Unproven if self.welcome => {
                self.welcome = false;
                (says.initiator, says.responder) = (self.peer.1, self.own.random);
                (says.oldest, says.newest) = (self.version, self.version);
                Kind::Welcome
            }
            Stage::Over(_) if self.farewells > 0 => {
                self.farewells -= 1;
                let path = self.paths.any();
                return self.build(path, Purpose::Farewell, now, out, &mut |_, _| {});
            }
            _ => return None,
        };
        // Each from another port: one of them may be dead.
        let path = self.paths.any();
        if !greeting::emit(out, kind, self.peer.0, path, &says, &self.job) {
            return None;
        }
        self.stats.sent += 1;
        self.stats.sent_bytes += greeting::PACKET as u64;
        Some(Transmit {
            path,
            length: greeting::PACKET,
        })
    }

    fn build(
        &mut self,
        at: u8,
        purpose: Purpose,
        now: Duration,
        out: &mut [u8],
        read: &mut dyn FnMut(&Span, &mut [u8]),
    ) -> Option<Transmit> {
        let limit = match purpose {
            Purpose::Probe(size) => size.max(self.mtu.size()),
            _ => self.mtu.size(),
        };
        let limit = limit.min(out.len());
        let number = self.unconfirmed.next();
        let mut content: SmallVec<[Content; 2]> = smallvec![];
        let mut writer = Writer::new(out.get_mut(HEADER..limit)?);
        let mut pings = false;
        let due = self.received.deadline().is_some_and(|at| at <= now);
        if due && self.received.emit(&mut writer, now) {
            self.stats.acks += 1;
            pings = purpose == Purpose::Control && self.stats.acks.is_multiple_of(PING_EVERY);
        }
        if number.is_multiple_of(FLOOR_EVERY) {
            writer.floor(low(self.unconfirmed.first()));
        }
        while let Some(control) = self.control.front() {
            let said = match *control {
                Content::Credit(channel, message, room) => {
                    writer.credit(channel, low(message), room)
                }
                Content::TooLong(channel, message, total) => {
                    writer.too_long(channel, low(message), total)
                }
                Content::Bytes(_) => true,
            };
            if !said {
                break;
            }
            content.push(*control);
            self.control.pop_front();
        }
        if purpose == Purpose::Bytes {
            while writer.room() > CHUNK
                && let Some(span) = self.outgoing.pull(writer.room())
            {
                let key = (span.channel, low(span.message));
                let length = span.length as usize;
                let Some(place) = writer.chunk(key, span.offset, length, span.last) else {
                    self.outgoing.lost(&span);
                    break;
                };
                read(&span, place);
                self.stats.payload += u64::from(span.length);
                content.push(Content::Bytes(span));
            }
        }
        let probe = matches!(purpose, Purpose::Probe(_));
        if probe || pings {
            writer.ping();
        }
        match purpose {
            Purpose::Farewell => {
                writer.close();
            }
            Purpose::Probe(size) if size > 0 => writer.pad(),
            _ => {}
        }
        let length = HEADER + writer.written();
        let wants = probe || pings || !content.is_empty();
        if length == HEADER {
            return None;
        }
        let more = self.outgoing.has_work();
        // A small window waits for nothing; a large one is acknowledged on its way.
        let total = self.congestion.total();
        let small = total < (2 * EVERY as usize * length) as f64;
        let full = small && (self.flying + 2 * length as u64) as f64 > total;
        let header = Header {
            version: self.version,
            kind: Kind::Data,
            ack_now: probe || !more || full,
            path: at,
            connection: self.peer.0,
            number: low(number),
            stamp: micros(now),
            tag: 0,
        };
        let packet = out.get_mut(..length)?;
        header.emit(packet);
        if let Some((key, _)) = &self.keys {
            key.seal(packet, number);
        }
        self.unconfirmed.push(Sent {
            at: now,
            size: length as u32,
            path: at,
            fate: if wants { Fate::Flying } else { Fate::Mute },
            probe,
            limited: more,
            content,
        });
        if wants {
            self.flying += length as u64;
            if let Some(path) = self.paths.get_mut(at) {
                path.flying += length as u64;
                path.order.push_back(number);
            }
        }
        self.stats.sent += 1;
        self.stats.sent_bytes += length as u64;
        Some(Transmit { path: at, length })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Does the path answer, with packets of this size (0: any)?
    Probe(usize),
    Bytes,
    /// Credits, refusals, acknowledgements.
    Control,
    Farewell,
}
