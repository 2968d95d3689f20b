//! One connection: the parts of this folder put together. It decides nothing that a part could decide.
//!
//! Whoever drives it does, in this order: hand in all datagrams that are there
//! ([`Connection::receive`]), then the time ([`Connection::on_time`]), then take datagrams until there
//! are none ([`Connection::transmit`]), then events; and comes back at [`Connection::deadline`]. The
//! order matters after a sleep: acknowledgements that lay in the socket are heard before the clock
//! says that they are late.
//!
//! Hearing is in `receive.rs`, what is taken for lost in `recovery.rs`, and what goes out in
//! `transmit.rs`.

mod receive;
mod recovery;
mod transmit;

use std::collections::VecDeque;
use std::time::Duration;

use super::ack::Received;
use super::auth::{JobKey, Key};
use super::congestion::Congestion;
use super::credit::Incoming;
use super::dropped::Dropped;
use super::format::{Greeting, Header, Kind, VERSION};
use super::greeting::{self, Own};
use super::loss::{Content, Reordering, Run, Unconfirmed};
use super::mtu::Mtu;
use super::outgoing::{Met, Outgoing};
use super::paths::Paths;
use super::replay::Replay;
use super::rtt::RoundTrip;
use super::stats::Stats;
use super::trace::{Note, Notes, What};
use recovery::Quiet;

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
    /// Its host says that it is not there any more.
    #[error("the peer's process has ended")]
    Ended,
    /// No version is common.
    #[error("the peer speaks versions {0} to {1} of the packet protocol, this side does not")]
    Version(u8, u8),
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

/// What is known of how a datagram came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Arrival {
    /// A switch says that its queue is long.
    pub marked: bool,
    /// How long it was here before it was looked at: that is no queue of the network's.
    pub waited: Duration,
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
    /// The path of the last packet, when its run began, and the run.
    last: (u8, Duration, Run),
    /// Bytes in flight over all paths.
    flying: u64,
    /// When the newest packet that has arrived was sent.
    confirmed: Duration,
    /// When something was last held back by the windows.
    filled: Duration,
    paths: Paths,
    congestion: Congestion,
    reordering: Reordering,
    trip: RoundTrip,
    mtu: Mtu,
    replay: Replay,
    received: Received,
    outgoing: Outgoing,
    incoming: Incoming,
    unsaid: VecDeque<Content>,
    events: VecDeque<Event>,
    /// Ranges of the last acknowledgement: what it said need not be looked at again.
    known: Vec<(u64, u64)>,
    /// Silences since anything was acknowledged.
    outage: u32,
    /// Since when nothing was confirmed over any path, and what was done about it.
    quiet: Quiet,
    heard: Duration,
    kept_alive: Duration,
    /// From when until when this end's thread had no processor, for the last time.
    away: (Duration, Duration),
    stats: Stats,
    /// How many round trips took less than 2^place microseconds, and not less than half of that.
    round_trips: [u64; ROUND_TRIPS],
    notes: Notes,
}

/// Places of [`Connection::round_trips`].
pub const ROUND_TRIPS: usize = 24;

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
            last: (0, Duration::ZERO, Run::default()),
            flying: 0,
            confirmed: Duration::ZERO,
            filled: Duration::ZERO,
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
            unsaid: VecDeque::new(),
            events: VecDeque::new(),
            known: Vec::new(),
            outage: 0,
            quiet: Quiet::default(),
            heard: now,
            kept_alive: now,
            away: (now, now),
            stats: Stats::default(),
            round_trips: [0; ROUND_TRIPS],
            notes: Notes::default(),
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
        self.unsaid
            .push_back(Content::Credit(channel, message, room));
        message
    }

    /// Ends a channel at this side: none of its bytes are asked for or written any more, and nothing more
    /// is said of its messages. The peer does not hear of it: that is the driver's to say.
    pub fn forget(&mut self, channel: u32) {
        self.outgoing.forget(channel);
        self.incoming.forget(channel);
        self.events.retain(|event| match event {
            Event::Sent { channel: of, .. }
            | Event::Received { channel: of, .. }
            | Event::TooLong { channel: of, .. } => *of != channel,
            Event::Connected | Event::Over(_) => true,
        });
    }

    fn met(&mut self, channel: u32, message: u64, length: u64, met: Met) {
        if let Met::TooLong { room } = met {
            self.unsaid
                .push_back(Content::TooLong(channel, message, length));
            self.events.push_back(Event::TooLong {
                channel,
                message,
                length,
                room,
            });
        }
    }

    /// The thread that drives this end had no processor for this time, or had nothing to do. What lay in
    /// its sockets meanwhile stood in no queue of the network's, and the thread is not too slow either.
    pub fn away(&mut self, from: Duration, until: Duration) {
        self.away = (from, until);
    }

    /// These paths have another way from now on: their ports, or where they send to, are others. Those in
    /// use are judged by what happens; others are asked whether they carry now.
    pub fn renewed(&mut self, paths: impl IntoIterator<Item = u8>, now: Duration) {
        for path in paths {
            self.paths.renew(path, now);
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

    /// How many round trips took so long: place `n` counts those of less than 2^n microseconds that are
    /// in no earlier one; the last counts all longer ones.
    pub fn round_trips(&self) -> &[u64; ROUND_TRIPS] {
        &self.round_trips
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

    /// The number that this side writes into its packets; 0 before it is known.
    pub fn peer_number(&self) -> u32 {
        self.peer.0
    }

    /// What happens is noted from here on: [`Connection::notes`].
    pub fn trace(&mut self) {
        self.notes.start();
        self.congestion.notes.start();
    }

    /// What happened since the last look, in order of time, and how much was left out.
    pub fn notes(&mut self) -> (Vec<Note>, u64) {
        let (mut notes, missed) = self.notes.take();
        let (decided, more) = self.congestion.notes.take();
        let (total, flying, _) = self.window();
        let all = |note: Note| Note {
            total,
            flying,
            ..note
        };
        let any = !decided.is_empty();
        notes.extend(decided.into_iter().map(all));
        if any {
            notes.sort_by_key(|note| note.at);
        }
        (notes, missed + more)
    }

    fn note(&mut self, at: Duration, path: u8, what: What) {
        if self.notes.on() {
            self.notes.add(at, path, what);
            let total = self.congestion.total() as u64;
            self.notes.of(total, self.flying);
        }
    }

    /// Whether the peer has proved itself, and it is not over.
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
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

    /// For how long nothing was heard of the peer.
    pub fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard)
    }

    /// The driver knows that the peer is not there any more.
    pub fn peer_ended(&mut self) {
        self.end(Over::Ended);
    }

    fn end(&mut self, why: Over) {
        if self.over().is_none() {
            self.stage = Stage::Over(why);
            self.events.push_back(Event::Over(why));
        }
    }
}
