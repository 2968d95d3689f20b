//! An association's packets: what its sockets bring and where it goes, what goes out from which of them.
//!
//! This is the way of bytes: no lock is on it but for a socket that is opened.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use evener_proto::packet::format::BARE;
use evener_proto::packet::{Dropped, Place, Span};
use evener_proto::{PathId, Side, Why};

use rustc_hash::FxHashMap;

use super::{Association, Effect, End, Own, memory};
use crate::frames::{Framed, LENT_HEADERS};
use crate::lock::lock;
use crate::log::Level;
use crate::packets::Counted;
use crate::shared::Shared;
use crate::stats::{PathStats, WorkerStats};
use crate::sys::{self, Memory};
use crate::trace::Record;
use crate::udp::cards::Cards;
use crate::udp::ports::{Batch, Came, Port, Reader};
use crate::udp::signals::{self, Signals};

/// After a socket could not be opened no other is for so long.
const OPEN_AGAIN: Duration = Duration::from_secs(1);
/// A peer has ended when it was silent for this long, and this many packets to it were refused.
const MISSED: (Duration, u32) = (Duration::from_secs(2), 2);
/// Most addresses of the peer that packets are sent to.
const MOST_REMOTES: usize = 16;

impl Association {
    /// Reads what a socket has. How many packets came. `cards` have frames for what must be in one.
    pub fn read(
        &mut self,
        path: usize,
        reader: &mut Reader,
        cards: &mut Option<Cards>,
        clock: impl Fn() -> Duration,
    ) -> usize {
        let Some(mut own) = self.ports.get_mut(path).and_then(Option::take) else {
            return 0;
        };
        let mut bytes = 0;
        let came = reader.read(&own.port, clock, |came, now| {
            bytes += came.packet.len();
            // Counted by the connection.
            let mut copy = |bytes: &[u8]| cards.as_mut()?.copy_in(bytes);
            let result = self.hear_or_keep(came, now, false, &mut copy).map(|_| ());
            if let Some(ring) = &self.ring {
                let ip = came.to.unwrap_or(own.at.ip());
                let to = SocketAddr::new(ip, own.at.port());
                ring.packet(now, (came.from, to), came.packet, Some(result));
            }
        });
        own.stats.received(bytes as u64);
        own.heard = true;
        self.ports[path] = Some(own);
        came.unwrap_or(0)
    }

    /// Hears a packet that a card has for this path, at this port number. Whether its frame is kept, which it may be
    /// if it `stays`.
    pub fn hear_card(
        &mut self,
        path: usize,
        number: u16,
        (came, stays): (&Came<'_>, bool),
        now: Duration,
    ) -> bool {
        let own = self.ports.get_mut(path).and_then(Option::as_mut);
        let Some(own) = own.filter(|own| own.at.port() == number) else {
            return false;
        };
        own.stats.received(came.packet.len() as u64);
        own.heard = true;
        let ip = came.to.unwrap_or(own.at.ip());
        // One of several frames, which does not stay, is larger than any of ours.
        let result = self.hear_or_keep(came, now, stays, &mut |_| None);
        if let Some(ring) = &self.ring {
            let to = SocketAddr::new(ip, number);
            ring.packet(now, (came.from, to), came.packet, Some(result.map(|_| ())));
        }
        result == Ok(true)
    }

    /// Hears a packet; its bytes go where they belong.
    ///
    /// # Errors
    /// [`Dropped`].
    #[cfg(test)]
    pub fn hear(&mut self, came: &Came<'_>, now: Duration) -> Result<(), Dropped> {
        self.hear_or_keep(came, now, false, &mut |_| None)
            .map(|_| ())
    }

    /// The same, and whether the packet stays where it is, because a caller gets it there. `stays`: it can. `copy` puts
    /// bytes into a frame of a card's, for a caller that wants them in one.
    ///
    /// # Errors
    /// [`Dropped`].
    pub fn hear_or_keep(
        &mut self,
        came: &Came<'_>,
        now: Duration,
        stays: bool,
        copy: &mut dyn FnMut(&[u8]) -> Option<usize>,
    ) -> Result<bool, Dropped> {
        let mut kept = false;
        let starved = &mut self.starved;
        let was_open = self.connection.is_open();
        let (ends, signals) = (&self.ends, &mut self.signals);
        let counted = &mut self.counted;
        let mut place = |place: Place<'_>| {
            if place.channel == signals::CHANNEL {
                signals.place(place.message, place.offset, place.bytes);
                return;
            }
            let end = ends.get(&place.channel);
            if place.bare {
                let length = place.bytes.len();
                let Some(word) = word(end, &place) else {
                    return;
                };
                let at = if stays {
                    kept = true;
                    Some(place.bytes.as_ptr() as usize)
                } else {
                    counted.copied_in(length);
                    copy(place.bytes)
                };
                counted.bare(!stays, Side::Receive, length);
                match at {
                    // SAFETY: the request is taken and not finished, and only this thread finishes it; `word` has
                    // checked that it is one of its table, as `Callers::frame` has asked for.
                    #[allow(unsafe_code, reason = "a place is told")]
                    Some(at) => unsafe { word.write(at) },
                    // It is acknowledged, so the message must not be taken for whole.
                    None => starved.push(place.channel),
                }
                return;
            }
            if let Some(to) = memory(end, place.message, place.offset, place.bytes.len()) {
                counted.copied_in(to.length);
                // SAFETY: the request is taken and not finished, and only this thread finishes it; `part`
                // has checked that the bytes are inside of it; a packet is no caller's memory.
                #[allow(unsafe_code, reason = "bytes are placed")]
                unsafe {
                    sys::publish(Memory::read_only(place.bytes), to);
                }
            }
        };
        let heard = self
            .connection
            .receive(came.packet, came.arrival, now, &mut place);
        let touched = if kept { BARE } else { came.packet.len() };
        self.counted.copied_in(touched);
        heard?;
        // From here on it is known to come from the peer.
        if !self.initiates {
            // Answers go back to where packets came from last: that way is open.
            if self.heard_from == Some(came.from) {
                return Ok(kept);
            }
            self.heard_from = Some(came.from);
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
        Ok(kept)
    }

    /// Does what is due by the clock, sends what may go, and acts on what happened.
    pub fn turn(&mut self, batch: &mut Batch, shared: &Shared, counts: &WorkerStats) {
        let now = shared.started.elapsed();
        for channel in std::mem::take(&mut self.starved) {
            let text = "no frame was free for what came: more was posted than frames were reserved \
                        for, a bug in Evener";
            shared.log(Level::Error, text);
            self.fail(channel, Why::PeerClosed, shared);
        }
        self.miss_peer(now);
        self.connection.on_time(now);
        let now = self.transmit(batch, shared, counts, now);
        if self.digest(shared, now) {
            // What was answered just now.
            self.transmit(batch, shared, counts, now);
        }
        self.trace_notes();
    }

    /// Ends the connection where the peer is silent and its host says that nobody has its ports: the process
    /// has ended. One of its ports may go while it lives, so silence alone counts, and that is no silence of a
    /// network which is cut: it refuses nothing.
    fn miss_peer(&mut self, now: Duration) {
        let ports = self.ports.iter().flatten();
        self.refused += ports.map(|own| own.port.refusals()).sum::<u32>();
        let silence = self.connection.silence(now);
        if silence < MISSED.0 / 2 {
            self.refused = 0;
        } else if silence >= MISSED.0 && self.refused >= MISSED.1 {
            self.connection.peer_ended();
        }
    }

    /// Hands over what the connection has noted, if it is traced.
    pub(super) fn trace_notes(&mut self) {
        let Some(ring) = &self.ring else {
            return;
        };
        let connection = self.connection.number();
        let (notes, missed) = self.connection.notes();
        for note in notes {
            ring.add(Record::Note { connection, note });
        }
        if missed > 0 {
            ring.missed(missed);
        }
    }

    /// Sends what may go. The time after it: packets are stamped when they go, and not when a long
    /// turn began, for the difference would look like a queue.
    pub(super) fn transmit(
        &mut self,
        batch: &mut Batch,
        shared: &Shared,
        counts: &WorkerStats,
        mut now: Duration,
    ) -> Duration {
        loop {
            let (ends, signals) = (&self.ends, &self.signals);
            let counted = &mut self.counted;
            let mut read = |span: &Span, to: &mut [u8]| fill(ends, signals, counted, span, to);
            let Some(sent) = self.connection.transmit(now, batch.place(), &mut read) else {
                break;
            };
            self.counted.copied_out(sent.length);
            let Some(path) = self.port_of(usize::from(sent.path), shared, batch, now) else {
                // As if the network had lost it: the path turns suspect, and another is taken.
                continue;
            };
            let mut length = sent.length;
            let port = self.ports.get(path).and_then(Option::as_ref);
            if let Some(span) = &sent.bare {
                // Of a comm that has failed it is not there: as if the network had lost the packet.
                let Some((framed, frame)) = lent(&self.ends, span) else {
                    continue;
                };
                let payload = span.length as usize;
                let way = port.zip(remote(&self.remotes, path));
                let goes = way.is_some_and(|(own, to)| {
                    let head = sent.length;
                    let number = framed.frames.number(frame);
                    number.is_some_and(|number| {
                        batch.lent_by_card(own.card, (own.at.port(), *to), head, (number, payload))
                    })
                });
                self.counted.bare(!goes, Side::Send, payload);
                if let (true, Some(own)) = (goes, port) {
                    own.stats.sent((length + payload) as u64);
                    counts.wrote(length + payload, Duration::ZERO);
                    if batch.send_run() {
                        now = shared.started.elapsed();
                    }
                    continue;
                }
                let Some(place) = batch.place().get_mut(length..length + payload) else {
                    continue;
                };
                // SAFETY: the request is taken and not finished; a lent frame holds a unit behind its headers, and
                // what is read is no longer (`Framed::lent`). It is the caller's, who leaves it alone until
                // the request is finished; the place is in a packet.
                #[allow(unsafe_code, reason = "bytes are read")]
                unsafe {
                    let start = (frame + LENT_HEADERS) as *mut u8;
                    sys::copy(
                        Memory {
                            start,
                            length: payload,
                        },
                        Memory::of(place),
                    );
                }
                length += payload;
                self.counted.copied_out(2 * payload);
            }
            let (ports, remotes) = (&self.ports, &self.remotes);
            if let (Some(ring), Some(own)) = (&self.ring, port)
                && let Some(to) = remote(remotes, path)
            {
                let packet = &batch.place()[..length];
                ring.packet(now, (own.at, *to), packet, None);
            }
            if let (Some(own), Some(to)) = (port, remote(remotes, path))
                && batch.by_card(own.card, own.at.port(), *to, length)
            {
                own.stats.sent(length as u64);
                counts.wrote(length, Duration::ZERO);
                if batch.send_run() {
                    now = shared.started.elapsed();
                }
                continue;
            }
            batch.add(
                path,
                length,
                port.map(|own| &own.port),
                |path, packets, segment| {
                    send(ports, remotes, counts, path, packets, segment);
                    now = shared.started.elapsed();
                },
            );
        }
        batch.flush(|path, packets, segment| {
            send(&self.ports, &self.remotes, counts, path, packets, segment);
        });
        if let Some(cards) = &mut batch.cards {
            cards.flush();
        }
        now
    }

    /// The place of the socket for a path, which is opened if need be. Where there can be no more of them,
    /// one of those that there are: the process may be short of descriptors, and messages go on.
    fn port_of(
        &mut self,
        path: usize,
        shared: &Shared,
        batch: &mut Batch,
        now: Duration,
    ) -> Option<usize> {
        if self.ports.get(path).is_some_and(Option::is_some) {
            return Some(path);
        }
        if now >= self.opens_again {
            let Err(error) = self.open_port(path, shared, batch) else {
                return Some(path);
            };
            let first = self.opens_again.is_zero();
            self.opens_again = now + OPEN_AGAIN;
            let text = format!(
                "no UDP socket more to {}: {error}; those that there are carry all of it. \
                 fix: raise the limit of open files (ulimit -n)",
                self.peer.name()
            );
            let level = if first { Level::Warn } else { Level::Debug };
            shared.log(level, &text);
        }
        let open = self.ports.iter().enumerate();
        let mut open = open.filter_map(|(place, own)| own.as_ref().map(|_| place));
        let count = open.clone().count();
        open.nth(path.checked_rem(count)?)
    }

    fn open_port(&mut self, path: usize, shared: &Shared, batch: &mut Batch) -> io::Result<()> {
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
        let card = batch
            .cards
            .as_mut()
            .and_then(|cards| Some((cards.of(nic.index)?, cards.port()?)));
        let (card, port) = match card {
            Some((card, port)) => {
                port.leave_by(device);
                (Some(card), port)
            }
            None => (None, Port::bind(SocketAddr::new(address, 0), device)?),
        };
        let at = SocketAddr::new(address, port.address()?.port());
        let stats = Arc::new(PathStats::new(
            nic.name.clone(),
            at.port(),
            self.peer.name(),
        ));
        let id = PathId(shared.random());
        lock(&shared.paths).insert(self.peer.key.mirror, id, stats.clone());
        self.ports
            .resize_with(self.ports.len().max(path + 1), || None);
        self.ports[path] = Some(Own {
            port,
            at,
            path: id,
            stats,
            card,
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
}

/// The lent frame in which bytes of a message lie.
fn lent<'a>(ends: &'a FxHashMap<u32, End>, span: &Span) -> Option<(&'a Framed, usize)> {
    let end = ends.get(&span.channel)?;
    let framed = end.requests.framed()?;
    let memory = end.requests.slots.memory(end.request(span.message))?;
    let frame = framed.lent(&memory, span.offset, span.length as usize)?;
    Some((framed, frame))
}

/// Where it is to be said in which frame bytes lie.
fn word(end: Option<&End>, place: &Place<'_>) -> Option<*mut usize> {
    let end = end?;
    let framed = end.requests.framed()?;
    let memory = end.requests.slots.memory(end.request(place.message))?;
    framed.word(&memory, place.offset, place.bytes.len())
}

/// Gives back the frames that a table names, of a request that is taken and will not be finished.
pub(super) fn give_back(framed: &Framed, table: &Memory) {
    let taken = framed.words(table).filter_map(|word| {
        // SAFETY: the words are those of the request's table, as `Callers::frame` has asked for; it is not finished,
        // so they are this thread's.
        #[allow(unsafe_code, reason = "a table is read")]
        let at = unsafe { word.replace(0) };
        (at != 0).then_some(at)
    });
    framed.frames.give_back(taken);
}

/// Copies bytes of a message into a packet.
pub(super) fn fill(
    ends: &FxHashMap<u32, End>,
    signals: &Signals,
    counted: &mut Counted,
    span: &Span,
    to: &mut [u8],
) {
    if span.channel == signals::CHANNEL {
        signals.read(span.message, span.offset, to);
        return;
    }
    let end = ends.get(&span.channel);
    if let Some(from) = memory(end, span.message, span.offset, to.len()) {
        counted.copied_out(to.len());
        // SAFETY: as in `hear`; `to` is in a packet, and as long as what is read.
        #[allow(unsafe_code, reason = "bytes are read")]
        unsafe {
            sys::copy(from, Memory::of(to));
        }
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
