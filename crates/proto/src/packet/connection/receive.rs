//! What a datagram that came does: checked as a whole, then acted on frame by frame.

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::Over;
use super::recovery::Quiet;
use super::{Arrival, Connection, Dropped, Event, Place, ROUND_TRIPS, Stage, micros};
use crate::packet::congestion::Took;
use crate::packet::credit::Verdict;
use crate::packet::format::{Ack, Chunk, FormatError, Frame, Frames, Header, Kind};
use crate::packet::greeting;
use crate::packet::loss::{Content, Fate};
use crate::packet::number::expand;
use crate::packet::trace::What;

/// A wait for this process is no queue, up to this. What is longer is more than one turn of a busy
/// thread: the thread is too slow, and the sender has to know.
const OVERLOOKED: Duration = Duration::from_millis(1);

impl Connection {
    /// Hears a datagram. `place` gets bytes and where they belong, before they are acknowledged.
    ///
    /// # Errors
    /// [`Dropped`]: nothing has changed but a count.
    pub fn receive(
        &mut self,
        packet: &[u8],
        arrival: Arrival,
        now: Duration,
        place: &mut dyn FnMut(Place<'_>),
    ) -> Result<(), Dropped> {
        let result = self.hear(packet, arrival, now, place);
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
        arrival: Arrival,
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
        if let Some(chunk) = &Chunk::alone(body) {
            let verdict = self.incoming.judge(chunk);
            if verdict == Verdict::NotPosted {
                return Err(Dropped::NotPosted);
            }
            self.taken(&header, number, true, arrival, now);
            self.place(chunk, verdict, place);
            return Ok(());
        }
        // All of it makes sense, or nothing is done.
        let mut wants = false;
        for frame in Frames::new(body) {
            let frame = frame.map_err(Dropped::Malformed)?;
            wants |= !matches!(frame, Frame::Ack(_) | Frame::Floor(_) | Frame::Close);
            self.judge(&frame)?;
        }
        self.taken(&header, number, wants, arrival, now);
        for frame in Frames::new(body).flatten() {
            self.act(&frame, number, now, place);
        }
        Ok(())
    }

    /// A packet is the peer's, and makes sense. `wants`: to be acknowledged.
    fn taken(
        &mut self,
        header: &Header,
        number: u64,
        wants: bool,
        arrival: Arrival,
        now: Duration,
    ) {
        self.replay.mark(number);
        self.heard = now;
        if matches!(self.stage, Stage::Unproven) {
            self.stage = Stage::Open;
            self.welcome = false;
            self.events.push_back(Event::Connected);
        }
        self.received.insert(number, wants, header.haste, now);
        if wants {
            let at = now.saturating_sub(self.overlooked(arrival.waited, now));
            let delay = micros(at).wrapping_sub(header.stamp);
            self.received.heard(header.path, delay, arrival.marked);
            self.stats.marked += u64::from(arrival.marked);
        }
    }

    /// What of a packet's wait for this end is no queue's.
    fn overlooked(&self, waited: Duration, now: Duration) -> Duration {
        let (from, until) = self.away;
        let came = now.saturating_sub(waited);
        let slept = until.min(now).saturating_sub(from.max(came));
        slept + waited.saturating_sub(slept).min(OVERLOOKED)
    }

    /// Bytes go where they belong.
    fn place(&mut self, chunk: &Chunk<'_>, verdict: Verdict, place: &mut dyn FnMut(Place<'_>)) {
        let Verdict::Place(message) = verdict else {
            self.stats.echoes += chunk.payload.len() as u64;
            return;
        };
        place(Place {
            channel: chunk.channel,
            message,
            offset: chunk.offset,
            bytes: chunk.payload,
        });
        if let Some(length) = self.incoming.placed(message, chunk) {
            self.events.push_back(Event::Received {
                channel: chunk.channel,
                message,
                length,
            });
        }
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
            Frame::Chunk(chunk) => {
                // Anew: a chunk before it in the packet may have been the same.
                let verdict = self.incoming.judge(&chunk);
                self.place(&chunk, verdict, place);
            }
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
                self.paths.ask(header.path);
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
            if self.unconfirmed.get(number).is_some_and(|sent| {
                matches!(sent.fate, Fate::Flying | Fate::Lost(_) | Fate::Asking)
            }) {
                fresh.push(number);
            }
        }
    }

    /// Of each path the newest of these packets: the one whose time the peer tells.
    fn told(&self, fresh: &[u64]) -> SmallVec<[(u8, u64); 16]> {
        let mut all: SmallVec<[(u8, u64); 16]> = smallvec![];
        for number in fresh {
            let Some(sent) = self.unconfirmed.get(*number) else {
                continue;
            };
            match all.iter_mut().find(|(path, _)| *path == sent.path) {
                Some(one) => one.1 = one.1.max(*number),
                None => all.push((sent.path, *number)),
            }
        }
        all
    }

    fn arrived(&mut self, ack: &Ack<'_>, fresh: &[u64], now: Duration) {
        let newest = fresh.iter().copied().max();
        if let Some(newest) = newest.and_then(|number| self.unconfirmed.get(number)) {
            self.outage = 0;
            self.quiet = Quiet::over(now);
            self.confirmed = self.confirmed.max(newest.at);
            let held = Duration::from_micros(u64::from(ack.held));
            // Of one that was taken for lost as well: numbers are never used twice, so it is exact, and
            // it is what makes patience longer where processes wait for processors.
            self.trip.sample(now.saturating_sub(newest.at), held);
            let micros = self.trip.latest().as_micros() as u64;
            let place = (u64::BITS - micros.leading_zeros()) as usize;
            self.round_trips[place.min(ROUND_TRIPS - 1)] += 1;
        }
        // One that a later one has overtaken says how long the queues were, not how long they are.
        let overtaken = newest.is_none();
        let told = self.told(fresh);
        for heard in ack.heard().filter(|_| !overtaken) {
            let Some(path) = self.paths.get(heard.path) else {
                continue;
            };
            let sent = told.iter().find(|(path, _)| *path == heard.path);
            let sent = sent.and_then(|(_, number)| self.unconfirmed.get(*number));
            let took = Took {
                delay: heard.delay,
                marked: heard.marked > 0,
                of: sent.map(|sent| (micros(sent.at), sent.run)),
            };
            let trips = (&self.trip, &path.trip);
            self.congestion.delay(heard.path, took, trips, now);
        }
        let mut touched: SmallVec<[u8; 16]> = smallvec![];
        for number in fresh {
            let Some(sent) = self.unconfirmed.get_mut(*number) else {
                continue;
            };
            let before = std::mem::replace(&mut sent.fate, Fate::Arrived);
            let (at, size, path) = (sent.at, u64::from(sent.size), sent.path);
            // A thread that is slower than its window must not widen it.
            let limited = sent.limited && self.filled >= at;
            let content = std::mem::take(&mut sent.content);
            self.mtu.arrived(size as usize);
            self.paths.answered(path, before == Fate::Asking);
            let first = told.contains(&(path, *number));
            if let Some(path) = self.paths.get_mut(path) {
                let passed = now.saturating_sub(at);
                match before {
                    Fate::Lost(_) if path.trip.known() => {
                        // Perhaps its acknowledgement was lost as well, and this is how long the network was dead.
                        let most = path.trip.patience(self.config.floor) * 2;
                        if first {
                            path.trip.sample(passed.min(most), Duration::ZERO);
                        }
                    }
                    _ => path.trip.sample(passed, Duration::ZERO),
                }
                path.newest = path.newest.max(Some((*number, at)));
                if before == Fate::Flying {
                    path.flying = path.flying.saturating_sub(size);
                    self.flying = self.flying.saturating_sub(size);
                }
            }
            match before {
                Fate::Lost(cause) => {
                    self.stats.late += 1;
                    self.was_late(cause);
                }
                Fate::Asking => {}
                Fate::Flying | Fate::Arrived | Fate::Mute => {
                    self.congestion
                        .arrived(path, size, (at, limited), &self.trip, now)
                }
            }
            let what = What::Arrived {
                number: *number,
                size: size as u32,
                took: now.saturating_sub(at),
                trip: (newest == Some(*number)).then(|| self.trip.latest()),
                late: matches!(before, Fate::Lost(_)),
            };
            self.note(now, path, what);
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
        if self.flying == 0 && !self.outgoing.has_work() {
            self.congestion.rest();
        }
        self.congestion.set_packet(self.mtu.size());
        let before = now.saturating_sub(self.trip.patience(self.config.floor) * 2);
        self.unconfirmed.forget(before);
    }
}
