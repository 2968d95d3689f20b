//! Packets on their way out: gathered for one call to the kernel, or handed to a card.

use std::net::SocketAddr;

use super::cards::Cards;
use super::ports::{LARGEST, MOST, Port};

/// Packets of one path and one size (the last may be shorter) that wait for one call.
pub struct Batch {
    bytes: Vec<u8>,
    filled: usize,
    segment: usize,
    path: usize,
    /// Ways past the kernel.
    pub(super) cards: Option<Cards>,
}

impl Default for Batch {
    fn default() -> Self {
        Batch {
            bytes: vec![0; MOST + LARGEST],
            filled: 0,
            segment: 0,
            path: 0,
            cards: None,
        }
    }
}

impl Batch {
    /// Where the next packet is to be written.
    pub fn place(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..self.filled + LARGEST]
    }

    /// A packet of `length` bytes was written there: it goes by this card, where there is a way. `false`: it has
    /// to be added.
    pub(super) fn by_card(
        &mut self,
        card: Option<usize>,
        from: u16,
        to: SocketAddr,
        length: usize,
    ) -> bool {
        let packet = self.bytes.get(self.filled..self.filled + length);
        match (&mut self.cards, card, packet) {
            (Some(cards), Some(card), Some(packet)) => cards.send(card, from, to, packet),
            _ => false,
        }
    }

    /// Sends what the cards have, if it is as much as should go at once. Whether it did.
    pub(super) fn send_run(&mut self) -> bool {
        self.cards.as_mut().is_some_and(Cards::send_run)
    }

    /// A packet of `length` bytes for this path was written there. What waited and does not go with it
    /// goes before it: `send` gets path, bytes and the size of a packet.
    pub fn add(
        &mut self,
        path: usize,
        length: usize,
        port: Option<&Port>,
        mut send: impl FnMut(usize, &[u8], usize),
    ) {
        let most = port.map_or(1, Port::segments);
        let full = self.filled + length > MOST || self.filled >= self.segment * most;
        let ended = self.segment > 0 && !self.filled.is_multiple_of(self.segment);
        if self.filled > 0 && (path != self.path || full || ended || length > self.segment) {
            send(self.path, &self.bytes[..self.filled], self.segment);
            self.bytes.copy_within(self.filled..self.filled + length, 0);
            self.filled = 0;
        }
        if self.filled == 0 {
            (self.path, self.segment) = (path, length);
        }
        self.filled += length;
    }

    /// What waits goes.
    pub fn flush(&mut self, mut send: impl FnMut(usize, &[u8], usize)) {
        if self.filled > 0 {
            send(self.path, &self.bytes[..self.filled], self.segment);
            self.filled = 0;
        }
    }
}
