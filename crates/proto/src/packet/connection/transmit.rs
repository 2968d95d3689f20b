//! What goes out next, over which path, and how its packet is put together.

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::{Connection, Stage, Transmit, micros};
use crate::packet::ack::EVERY;
use crate::packet::format::{CHUNK, Greeting, HEADER, Haste, Header, Kind, Writer};
use crate::packet::greeting;
use crate::packet::loss::{Content, Fate, Run, Sent};
use crate::packet::number::low;
use crate::packet::outgoing::Span;
use crate::packet::paths::{Share, State};

/// Every this many packets the sender says what it does not care for any more.
const FLOOR_EVERY: u64 = 64;

/// Packets of one path that go within this time are a run.
const AT_ONCE: Duration = Duration::from_micros(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Does the path answer, with packets of this size (0: any)?
    Probe(usize),
    Bytes,
    /// Credits, refusals, acknowledgements. Whether they ask for an acknowledgement.
    Statements(bool),
    Farewell,
}

impl Connection {
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
        if let Some(at) = self.paths.asked() {
            return self.build(at, Purpose::Probe(0), now, out, read);
        }
        if let Some(size) = self.mtu.probe(now)
            && out.len() >= size
        {
            let path = self.paths.any();
            return self.build(path, Purpose::Probe(size), now, out, read);
        }
        let size = self.mtu.size();
        let total = self.congestion.total();
        if self.outgoing.has_next() {
            let ready = self.congestion.ready(&self.trip, now);
            let congestion = &self.congestion;
            let share = Share {
                total,
                flying: self.flying,
                run: congestion.run(self.flying),
                burst: congestion.burst(),
            };
            let window = |at| congestion.window(at);
            let fits = self.flying == 0 || (self.flying + size as u64) as f64 <= total;
            let path = (fits && ready).then(|| self.paths.choose(size as u64, share, window));
            if let Some(path) = path.flatten() {
                self.congestion.sent(&self.trip, now);
                return self.build(path, Purpose::Bytes, now, out, read);
            }
            // Held back by the pace, it is the pace that bounds what is in flight: windows have nothing to grow for.
            if ready {
                self.filled = now;
            }
        }
        if !self.unsaid.is_empty() || self.received.deadline().is_some_and(|at| at <= now) {
            return self.state(now, out, read);
        }
        None
    }

    /// What is to be said besides bytes.
    fn state(
        &mut self,
        now: Duration,
        out: &mut [u8],
        read: &mut dyn FnMut(&Span, &mut [u8]),
    ) -> Option<Transmit> {
        let due = self.received.deadline().is_some_and(|at| at <= now);
        let number = self.stats.acks + 1;
        let asked = due.then(|| self.paths.asks_back(number)).flatten();
        let path = asked.unwrap_or_else(|| self.paths.any());
        let purpose = Purpose::Statements(asked.is_some());
        self.build(path, purpose, now, out, read)
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
        let mut content: SmallVec<[Content; 1]> = smallvec![];
        let mut writer = Writer::new(out.get_mut(HEADER..limit)?);
        let pings = purpose == Purpose::Statements(true);
        // Over a path that was dropped and is asked again: it is likely to be lost.
        let bare = self
            .paths
            .get(at)
            .is_some_and(|path| path.state == State::Spare);
        let due = self.received.deadline().is_some_and(|at| at <= now);
        if due && !bare && self.received.emit(&mut writer, now) {
            self.stats.acks += 1;
        }
        if number.is_multiple_of(FLOOR_EVERY) {
            writer.floor(low(self.unconfirmed.first()));
        }
        while let Some(statement) = self.unsaid.front().filter(|_| !bare) {
            let said = match *statement {
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
            content.push(*statement);
            self.unsaid.pop_front();
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
        let wants = !bare && (probe || pings || !content.is_empty());
        if length == HEADER {
            return None;
        }
        let packet = out.get_mut(..length)?;
        self.launch(at, packet, content, (probe, wants), now);
        Some(Transmit { path: at, length })
    }

    /// Writes header and tag of a packet, and notes that it is on its way. `wants`: it asks for an
    /// acknowledgement.
    fn launch(
        &mut self,
        at: u8,
        packet: &mut [u8],
        content: SmallVec<[Content; 1]>,
        (probe, wants): (bool, bool),
        now: Duration,
    ) {
        let length = packet.len();
        let number = self.unconfirmed.next();
        let more = self.outgoing.has_work();
        // A small window waits for nothing; a large one is acknowledged on its way.
        let total = self.congestion.total();
        let small = total < (2 * EVERY as usize * length) as f64;
        let full = small && (self.flying + 2 * length as u64) as f64 > total;
        let haste = if probe || !more || full {
            Haste::Now
        } else if self.congestion.is_roomy(self.flying) {
            Haste::Patient
        } else {
            Haste::Soon
        };
        let header = Header {
            version: self.version,
            kind: Kind::Data,
            haste,
            path: at,
            connection: self.peer.0,
            number: low(number),
            stamp: micros(now),
            tag: 0,
        };
        header.emit(packet);
        if let Some((key, _)) = &self.keys {
            key.seal(packet, number);
        }
        let (path, began, mut run) = self.last;
        if path != at || now.saturating_sub(began) > AT_ONCE {
            run = Run {
                first: number,
                bytes: 0,
            };
            self.last.1 = now;
        }
        run.bytes += length as u32;
        (self.last.0, self.last.2) = (at, run);
        self.unconfirmed.push(Sent {
            at: now,
            run,
            size: length as u32,
            path: at,
            fate: match (wants, probe) {
                (true, _) => Fate::Flying,
                (false, true) => Fate::Asking,
                (false, false) => Fate::Mute,
            },
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
    }
}
