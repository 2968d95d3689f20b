//! An end that speaks the protocol: a connection, its messages, and whether what comes is what went.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use evener_proto::line::LINE;
use evener_proto::packet::{
    Accepted, Arrival, Config, Connection, Event, JobKey, Own, Place, Span, Stats, accept,
};

use evener_proto::packet::trace::Note;

use super::model::{BELOW, Body, End, Packet, Route, random};

/// Packets that a busy thread hands to the kernel at once.
const CALL: usize = 40;

/// A stream of messages, each as soon as one before it is through.
#[derive(Debug, Clone)]
pub struct Flow {
    pub channel: u32,
    pub length: u64,
    /// Messages at a time.
    pub ahead: u64,
    /// Between two messages, if it is not as many as possible.
    pub every: Option<Duration>,
    pub left: u64,
}

pub struct Host {
    pub connection: Option<Box<Connection>>,
    initiates: bool,
    config: Config,
    own: Own,
    key: JobKey,
    peer: usize,
    routes: Box<dyn Fn(u8) -> Route>,
    /// This end's clock less the network's.
    pub clock: Duration,
    /// It does nothing before that time (a process that is stopped).
    pub asleep: Duration,
    /// A packet that goes or comes takes its thread so long; 0: it takes no time.
    pub cost: Duration,
    /// Until when its thread is busy, if it shares one with other ends.
    pub thread: Option<Rc<Cell<Duration>>>,
    /// With when each came.
    inbox: Vec<(Vec<u8>, Duration)>,
    pub sends: Vec<Flow>,
    pub posts: Vec<Flow>,
    next: Vec<Duration>,
    started: HashMap<(u32, u64), Duration>,
    /// Time from send to the last byte at the receiver's end is the sender's less a way back.
    pub took: Vec<(Duration, u32, Duration)>,
    pub events: Vec<Event>,
    /// All events are kept, those of messages too.
    pub keeps: bool,
    /// Bytes that were placed.
    pub placed: u64,
    pub last_placed: Duration,
    pub longest_gap: Duration,
    /// What came, if it is kept: a buffer and how often each byte was written.
    pub memory: Option<HashMap<(u32, u64), Vec<u8>>>,
    pub wrong: u64,
    /// Which lines of messages on their way were written, if that is kept. Then lines begin with a mark of their own,
    /// and a line counts as placed once.
    pub lines: Option<HashMap<(u32, u64), Vec<bool>>>,
    /// Messages that it began to send.
    pub begun: u64,
    /// Pieces that it cut within a line.
    pub torn: u64,
    started_flows: bool,
    pub recorded: Vec<Vec<u8>>,
    pub record: bool,
    /// Calls to the kernel that the packets it sent would take: what goes over one path at once is one.
    pub calls: u64,
    /// What happened, if the connection notes it; and what was left out.
    pub notes: Option<(Vec<Note>, u64)>,
}

/// What byte of a message this is.
pub fn byte(channel: u32, message: u64, offset: u64) -> u8 {
    let mut seed = u64::from(channel) << 40 ^ message << 20 ^ (offset / 8);
    (random(&mut seed) >> (offset % 8 * 8)) as u8
}

/// What the line of a message at this offset begins with.
fn mark(channel: u32, message: u64, offset: u64) -> [u8; 8] {
    random(&mut (u64::from(channel) << 56 ^ message << 28 ^ offset)).to_le_bytes()
}

/// Notes the lines of a piece: how many of its bytes are new. A line with another's mark is wrong, and so is one of a
/// message that nobody waits for.
fn write(lines: &mut HashMap<(u32, u64), Vec<bool>>, place: &Place<'_>, wrong: &mut u64) -> u64 {
    let mut fresh = 0;
    let Some(written) = lines.get_mut(&(place.channel, place.message)) else {
        *wrong += 1;
        return 0;
    };
    for (at, line) in place.bytes.chunks(LINE as usize).enumerate() {
        let offset = place.offset + at as u64 * LINE;
        *wrong += u64::from(line[..8] != mark(place.channel, place.message, offset));
        let before = std::mem::replace(&mut written[(offset / LINE) as usize], true);
        fresh += if before { 0 } else { line.len() as u64 };
    }
    fresh
}

impl Host {
    pub fn new(
        initiates: bool,
        config: Config,
        seed: u64,
        peer: usize,
        routes: impl Fn(u8) -> Route + 'static,
    ) -> Host {
        let key = JobKey::new([7; 16]);
        let mut seed = seed;
        let own = Own {
            connection: (random(&mut seed) as u32) | 1,
            random: random(&mut seed),
        };
        Host {
            connection: None,
            initiates,
            config,
            own,
            key,
            peer,
            routes: Box::new(routes),
            clock: Duration::ZERO,
            asleep: Duration::ZERO,
            cost: Duration::ZERO,
            thread: None,
            inbox: Vec::new(),
            sends: Vec::new(),
            posts: Vec::new(),
            next: Vec::new(),
            started: HashMap::new(),
            took: Vec::new(),
            events: Vec::new(),
            keeps: false,
            placed: 0,
            last_placed: Duration::ZERO,
            longest_gap: Duration::ZERO,
            memory: None,
            wrong: 0,
            lines: None,
            begun: 0,
            torn: 0,
            started_flows: false,
            recorded: Vec::new(),
            record: false,
            calls: 0,
            notes: None,
        }
    }

    /// Its thread has no processor from now on, for so long, and it knows that when it wakes.
    pub fn nap(&mut self, now: Duration, time: Duration) {
        self.asleep = self.asleep.max(now + time);
        if let Some(connection) = &mut self.connection {
            connection.away(now + self.clock, now + self.clock + time);
        }
    }

    /// Flows were added.
    pub fn again(&mut self) {
        self.started_flows = false;
    }

    pub fn stats(&self) -> Stats {
        self.connection
            .as_ref()
            .map(|c| c.stats())
            .unwrap_or_default()
    }

    fn send(&mut self, at: usize, now: Duration) {
        let (Some(connection), flow) = (&mut self.connection, &mut self.sends[at]) else {
            return;
        };
        if flow.left > 0 {
            flow.left -= 1;
            let message = connection.send(flow.channel, flow.length);
            self.begun += 1;
            self.started.insert((flow.channel, message), now);
        }
    }

    fn post(&mut self, at: usize) {
        let (Some(connection), flow) = (&mut self.connection, &mut self.posts[at]) else {
            return;
        };
        if flow.left > 0 {
            flow.left -= 1;
            let message = connection.post(flow.channel, flow.length);
            if let Some(memory) = &mut self.memory {
                memory.insert((flow.channel, message), vec![0; flow.length as usize]);
            }
            if let Some(lines) = &mut self.lines {
                let count = flow.length.div_ceil(LINE) as usize;
                lines.insert((flow.channel, message), vec![false; count]);
            }
        }
    }

    fn begin(&mut self, now: Duration) {
        self.started_flows = true;
        for at in 0..self.posts.len() {
            for _ in 0..self.posts[at].ahead {
                self.post(at);
            }
        }
        for at in 0..self.sends.len() {
            self.next.push(now);
            if self.sends[at].every.is_none() {
                for _ in 0..self.sends[at].ahead {
                    self.send(at, now);
                }
            }
        }
    }

    fn events(&mut self, now: Duration) {
        while let Some(event) = self.connection.as_mut().and_then(|c| c.event()) {
            match event {
                Event::Sent { channel, message } => {
                    if let Some(at) = self.started.remove(&(channel, message)) {
                        self.took.push((at, channel, now - at));
                    }
                    let of = self.sends.iter().position(|flow| flow.channel == channel);
                    if let Some(at) = of
                        && self.sends[at].every.is_none()
                    {
                        self.send(at, now);
                    }
                }
                Event::Received {
                    channel,
                    message,
                    length,
                } => {
                    if let Some(memory) = &mut self.memory
                        && let Some(got) = memory.remove(&(channel, message))
                    {
                        let same =
                            |(at, got): (usize, &u8)| *got == byte(channel, message, at as u64);
                        let right = got.iter().take(length as usize).enumerate().all(same);
                        self.wrong += u64::from(!right);
                    }
                    if let Some(lines) = &mut self.lines {
                        let lines = lines.remove(&(channel, message));
                        let whole = lines.is_some_and(|lines| lines.iter().all(|line| *line));
                        self.wrong += u64::from(!whole);
                    }
                    let of = self.posts.iter().position(|flow| flow.channel == channel);
                    if let Some(at) = of {
                        self.post(at);
                    }
                }
                _ => {}
            }
            if self.memory.is_some()
                || self.keeps
                || !matches!(event, Event::Sent { .. } | Event::Received { .. })
            {
                self.events.push(event);
            }
        }
    }
}

impl End for Host {
    fn hear(&mut self, body: Body, now: Duration) {
        if let Body::Datagram(bytes) = body {
            if self.record {
                self.recorded.push(bytes.clone());
            }
            self.inbox.push((bytes, now));
        }
    }

    fn run(&mut self, real: Duration, out: &mut Vec<Packet>) -> Option<Duration> {
        if let Some(thread) = &self.thread {
            self.asleep = self.asleep.max(thread.get());
        }
        if real < self.asleep {
            return Some(self.asleep);
        }
        let now = real + self.clock;
        if self.initiates && self.connection.is_none() {
            let connection = Connection::connect(self.config.clone(), self.key, self.own, now);
            self.connection = Some(Box::new(connection));
        }
        let placed = &mut self.placed;
        let memory = &mut self.memory;
        let (lines, wrong) = (&mut self.lines, &mut self.wrong);
        let (last, gap) = (&mut self.last_placed, &mut self.longest_gap);
        let mut handled = self.inbox.len() as u32;
        for (packet, came) in self.inbox.drain(..) {
            let Some(connection) = &mut self.connection else {
                let accepted = accept(self.config.clone(), self.key, self.own, &packet, now);
                if let Ok(Accepted::Connection(connection)) = accepted {
                    self.connection = Some(connection);
                }
                continue;
            };
            let arrival = Arrival {
                waited: real.saturating_sub(came),
                ..Arrival::default()
            };
            let _ = connection.receive(&packet, arrival, now, &mut |place: Place<'_>| {
                *placed += match lines {
                    Some(lines) => write(lines, &place, wrong),
                    None => place.bytes.len() as u64,
                };
                *gap = (*gap).max(real.saturating_sub(*last));
                *last = real;
                if let Some(memory) = memory {
                    let to = memory
                        .get_mut(&(place.channel, place.message))
                        .expect("posted");
                    let at = place.offset as usize;
                    to[at..at + place.bytes.len()].copy_from_slice(place.bytes);
                }
            });
        }
        self.connection.as_ref()?;
        self.events(now);
        if !self.started_flows {
            self.begin(now);
        }
        let mut due: Option<Duration> = None;
        for at in 0..self.sends.len() {
            if let Some(every) = self.sends[at].every {
                while self.next[at] <= now {
                    self.send(at, now);
                    self.next[at] += every;
                }
                let next = self.next[at];
                due = Some(due.map_or(next, |least| least.min(next)));
            }
        }
        let connection = self.connection.as_mut()?;
        if self.notes.is_some() {
            connection.trace();
        }
        connection.on_time(now);
        let mut buffer = [0; 9000];
        let (fills, marks) = (self.memory.is_some(), self.lines.is_some());
        let torn = &mut self.torn;
        let mut read = |span: &Span, to: &mut [u8]| {
            let end = span.offset + to.len() as u64;
            let whole = span.last || end.is_multiple_of(LINE);
            *torn += u64::from(!whole || !span.offset.is_multiple_of(LINE));
            if marks {
                for (at, line) in to.chunks_mut(LINE as usize).enumerate() {
                    let offset = span.offset + at as u64 * LINE;
                    line[..8].copy_from_slice(&mark(span.channel, span.message, offset));
                }
            }
            if fills {
                for (at, to) in to.iter_mut().enumerate() {
                    *to = byte(span.channel, span.message, span.offset + at as u64);
                }
            }
        };
        let (mut more, mut path) = (false, None);
        while let Some(sent) = connection.transmit(now, &mut buffer, &mut read) {
            handled += 1;
            self.calls += u64::from(path.replace(sent.path) != Some(sent.path));
            // As many as one call to the kernel: what comes after them is stamped later.
            more = !self.cost.is_zero() && out.len() >= CALL;
            out.push(Packet {
                to: self.peer,
                size: sent.length as u64 + BELOW,
                route: (self.routes)(sent.path),
                body: Body::Datagram(buffer[..sent.length].to_vec()),
            });
            if more {
                break;
            }
        }
        if let Some((notes, missed)) = &mut self.notes {
            let (more, less) = connection.notes();
            notes.extend(more);
            *missed += less;
        }
        self.asleep = self.asleep.max(real + self.cost * handled);
        if let Some(thread) = &self.thread {
            thread.set(self.asleep);
        }
        if more {
            self.events(now);
            return Some(self.asleep);
        }
        if let Some(next) = connection.deadline() {
            assert!(next > now, "a deadline in the past: {next:?} at {now:?}");
            due = Some(due.map_or(next, |least| least.min(next)));
        }
        self.events(now);
        due.map(|due| due.saturating_sub(self.clock))
    }

    fn as_any(&mut self) -> &mut dyn std::any::Any {
        self
    }
}
