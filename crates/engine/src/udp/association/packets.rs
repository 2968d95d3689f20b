//! An association's packets: what its sockets bring and where it goes, what goes out from which of them.
//!
//! This is the way of bytes: no lock is on it but for a socket that is opened.

use std::net::SocketAddr;
use std::time::Duration;

use evener_proto::packet::{Dropped, Place, Span};
use rustc_hash::FxHashMap;

use super::{Association, End, memory};
use crate::packets::Counted;
use crate::shared::Shared;
use crate::stats::WorkerStats;
use crate::sys::{self, Memory};
use crate::trace::Record;
use crate::udp::batch::Batch;
use crate::udp::ports::{Came, Reader};
use crate::udp::signals::{self, Signals};

/// A peer has ended when it was silent for this long, and this many packets to it were refused.
const MISSED: (Duration, u32) = (Duration::from_secs(2), 2);

impl Association {
    /// Reads what a socket has. How many packets came.
    pub fn read(
        &mut self,
        path: usize,
        reader: &mut Reader,
        clock: impl Fn() -> Duration,
    ) -> usize {
        let Some(mut own) = self.sockets.lend(path) else {
            return 0;
        };
        let mut bytes = 0;
        let came = reader.read(&own.port, clock, |came, now| {
            bytes += came.packet.len();
            // Counted by the connection.
            let result = self.hear(came, now);
            if let Some(ring) = &self.ring {
                let ip = came.to.unwrap_or(own.at.ip());
                let to = SocketAddr::new(ip, own.at.port());
                ring.packet(now, (came.from, to), came.packet, Some(result));
            }
        });
        own.stats.received(bytes as u64);
        own.heard = true;
        self.sockets.give_back(path, own);
        came.unwrap_or(0)
    }

    /// Hears a packet that a card has for this path, at this port number.
    pub fn hear_card(&mut self, path: usize, number: u16, came: &Came<'_>, now: Duration) {
        let own = self.sockets.get_mut(path);
        let Some(own) = own.filter(|own| own.at.port() == number) else {
            return;
        };
        own.stats.received(came.packet.len() as u64);
        own.heard = true;
        let ip = came.to.unwrap_or(own.at.ip());
        let result = self.hear(came, now);
        if let Some(ring) = &self.ring {
            let to = SocketAddr::new(ip, number);
            ring.packet(now, (came.from, to), came.packet, Some(result));
        }
    }

    /// Hears a packet; its bytes go where they belong.
    ///
    /// # Errors
    /// [`Dropped`].
    pub fn hear(&mut self, came: &Came<'_>, now: Duration) -> Result<(), Dropped> {
        let was_open = self.connection.is_open();
        let (ends, signals) = (&self.ends, &mut self.signals);
        let counted = &mut self.counted;
        let mut place = |place: Place<'_>| {
            if place.channel == signals::CHANNEL {
                signals.place(place.message, place.offset, place.bytes);
                return;
            }
            let end = ends.get(&place.channel);
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
        self.counted.copied_in(came.packet.len());
        heard?;
        // From here on it is known to come from the peer.
        if !self.initiates {
            self.sockets.answer_to(came.from);
        } else if !was_open && self.connection.is_open() {
            self.sockets.welcomed_by(came.from.port());
        }
        Ok(())
    }

    /// Does what is due by the clock, sends what may go, and acts on what happened.
    pub fn turn(&mut self, batch: &mut Batch, shared: &Shared, counts: &WorkerStats) {
        let now = shared.started.elapsed();
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
        let silence = self.connection.silence(now);
        let refused = self.sockets.refused(silence < MISSED.0 / 2);
        if silence >= MISSED.0 && refused >= MISSED.1 {
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
            let wanted = usize::from(sent.path);
            let sockets = &mut self.sockets;
            let Some(path) = sockets.place_of(wanted, shared, batch, now, &mut self.effects) else {
                // As if the network had lost it: the path turns suspect, and another is taken.
                continue;
            };
            let length = sent.length;
            let port = self.sockets.get(path);
            let sockets = &self.sockets;
            if let (Some(ring), Some(own)) = (&self.ring, port)
                && let Some(to) = sockets.remote(path)
            {
                let packet = &batch.place()[..length];
                ring.packet(now, (own.at, *to), packet, None);
            }
            if let (Some(own), Some(to)) = (port, sockets.remote(path))
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
                    sockets.send(counts, path, packets, segment);
                    now = shared.started.elapsed();
                },
            );
        }
        batch.flush(|path, packets, segment| {
            self.sockets.send(counts, path, packets, segment);
        });
        if let Some(cards) = &mut batch.cards {
            cards.flush();
        }
        now
    }
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
