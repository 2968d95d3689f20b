//! What two instances say about comms: 24 bytes each, as messages of channel 0, acted on in the order
//! in which they were said.
//!
//! | bytes | what |
//! |---|---|
//! | 0 | 1 open, 2 opened, 3 declined, 4 closed, 5 an address |
//! | 1 | address: 4 or 6, of IPv4 or IPv6 |
//! | 2, 3 | address: its place in the list of all, and how many they are |
//! | 4..8 | channel: the initiator chooses it; of an address the list's edition |
//! | 8..16 | open: the comm, by the sending process' number |
//! | 16..24 | open: the listener |
//! | 8..24 | address |
//!
//! An end whose list of addresses has changed says all of it, from its first place to its last. A peer
//! that does not know a signal passes it over.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use crate::addresses::{Addresses, MOST};

/// Bytes of a signal.
pub const SIGNAL: usize = 24;
/// Signals that may be on their way to one end.
pub const WINDOW: usize = 64;
/// The channel of signals.
pub const CHANNEL: u32 = 0;

/// One signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The initiator wants to open a comm at a listener.
    Open {
        /// Its channel from now on.
        channel: u32,
        /// The sending process' number of it.
        comm: u64,
        /// Which listener.
        listener: u64,
    },
    /// It is open.
    Opened(u32),
    /// There is no such listener.
    Declined(u32),
    /// An end has closed it.
    Closed(u32),
    /// One of the addresses that an end has from now on.
    Address {
        /// Of the list.
        edition: u32,
        /// Its place in the list, and how many there are.
        place: (u8, u8),
        /// The address.
        address: IpAddr,
    },
}

impl Signal {
    fn emit(self) -> [u8; SIGNAL] {
        let mut bytes = [0; SIGNAL];
        let (kind, word) = match self {
            Signal::Open {
                channel,
                comm,
                listener,
            } => {
                bytes[8..16].copy_from_slice(&comm.to_le_bytes());
                bytes[16..24].copy_from_slice(&listener.to_le_bytes());
                (1, channel)
            }
            Signal::Opened(channel) => (2, channel),
            Signal::Declined(channel) => (3, channel),
            Signal::Closed(channel) => (4, channel),
            Signal::Address {
                edition,
                place,
                address,
            } => {
                (bytes[2], bytes[3]) = place;
                match address {
                    IpAddr::V4(v4) => {
                        bytes[1] = 4;
                        bytes[8..12].copy_from_slice(&v4.octets());
                    }
                    IpAddr::V6(v6) => {
                        bytes[1] = 6;
                        bytes[8..24].copy_from_slice(&v6.octets());
                    }
                }
                (5, edition)
            }
        };
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(word));
        bytes
    }

    fn parse(bytes: &[u8; SIGNAL]) -> Option<Signal> {
        let word = |at: usize| {
            bytes[at..]
                .first_chunk()
                .map(|part| u64::from_le_bytes(*part))
        };
        let channel = u32::from_le_bytes(*bytes[4..].first_chunk()?);
        match bytes[0] {
            1 => Some(Signal::Open {
                channel,
                comm: word(8)?,
                listener: word(16)?,
            }),
            2 => Some(Signal::Opened(channel)),
            3 => Some(Signal::Declined(channel)),
            4 => Some(Signal::Closed(channel)),
            5 => Some(Signal::Address {
                edition: channel,
                place: (bytes[2], bytes[3]),
                address: match bytes[1] {
                    4 => IpAddr::from(*bytes[8..].first_chunk::<4>()?),
                    6 => IpAddr::from(*bytes[8..].first_chunk::<16>()?),
                    _ => return None,
                },
            }),
            _ => None,
        }
    }
}

/// Addresses of the peer, as they are said one after the other.
#[derive(Debug, Default)]
pub struct Told(Addresses);

impl Told {
    /// The next one: the whole list, where it was the last of it.
    pub fn hear(&mut self, edition: u32, place: (u8, u8), address: IpAddr) -> Option<Addresses> {
        let (place, count) = (usize::from(place.0), usize::from(place.1));
        let Told(said) = self;
        if place == 0 {
            (said.edition, said.list) = (edition, Vec::new());
        }
        // Out of turn: of no list.
        if edition != said.edition || place != said.list.len() || place >= count.min(MOST) {
            said.list.clear();
            return None;
        }
        said.list.push(address);
        (said.list.len() == count).then(|| said.clone())
    }
}

/// The signals of one connection, both ways.
#[derive(Debug)]
pub struct Signals {
    /// Said and not known to have arrived.
    out: HashMap<u64, [u8; SIGNAL]>,
    /// Buffers for the next ones; message `n` has place `n % WINDOW`.
    buffers: [[u8; SIGNAL]; WINDOW],
    arrived: [bool; WINDOW],
    next: u64,
    heard: VecDeque<Signal>,
}

impl Default for Signals {
    fn default() -> Self {
        Signals {
            out: HashMap::new(),
            buffers: [[0; SIGNAL]; WINDOW],
            arrived: [false; WINDOW],
            next: 0,
            heard: VecDeque::new(),
        }
    }
}

impl Signals {
    /// `signal` is message `number` of the channel.
    pub fn say(&mut self, number: u64, signal: Signal) {
        self.out.insert(number, signal.emit());
    }

    /// Bytes of a signal that is on its way.
    pub fn read(&self, number: u64, offset: u64, to: &mut [u8]) {
        let from = self
            .out
            .get(&number)
            .and_then(|bytes| bytes.get(offset as usize..));
        if let Some(from) = from.and_then(|from| from.get(..to.len())) {
            to.copy_from_slice(from);
        }
    }

    /// Message `number` has arrived at the peer.
    pub fn sent(&mut self, number: u64) {
        self.out.remove(&number);
    }

    /// Whether all that was said has arrived.
    pub fn is_idle(&self) -> bool {
        self.out.is_empty()
    }

    /// Bytes of message `number` came.
    pub fn place(&mut self, number: u64, offset: u64, bytes: &[u8]) {
        let buffer = &mut self.buffers[number as usize % WINDOW];
        if let Some(to) = buffer.get_mut(offset as usize..)
            && let Some(to) = to.get_mut(..bytes.len())
        {
            to.copy_from_slice(bytes);
        }
    }

    /// All of message `number` is there: how many buffers are free again, and to be posted.
    pub fn received(&mut self, number: u64) -> usize {
        self.arrived[number as usize % WINDOW] = true;
        let mut free = 0;
        loop {
            let place = self.next as usize % WINDOW;
            if !std::mem::take(&mut self.arrived[place]) {
                return free;
            }
            // What this version does not know it does not act on.
            self.heard.extend(Signal::parse(&self.buffers[place]));
            self.next += 1;
            free += 1;
        }
    }

    /// The next signal of the peer's.
    pub fn hear(&mut self) -> Option<Signal> {
        self.heard.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_heard_in_the_order_in_which_they_were_said() {
        let (mut one, mut other) = (Signals::default(), Signals::default());
        let open = Signal::Open {
            channel: 7,
            comm: 1 << 40,
            listener: 9,
        };
        let whole = Signal::Open {
            channel: 8,
            comm: 3,
            listener: 9,
        };
        let address = |place, address| Signal::Address {
            edition: 3,
            place: (place, 2),
            address,
        };
        let said = [
            open,
            whole,
            Signal::Opened(7),
            Signal::Declined(8),
            Signal::Closed(7),
            address(0, IpAddr::from([10, 0, 0, 200])),
            address(1, IpAddr::from([0xfd01, 2, 3, 4, 5, 6, 7, 8])),
        ];
        let count = said.len() as u64;
        for round in 0..100u64 {
            for (at, signal) in said.iter().enumerate() {
                one.say(round * count + at as u64, *signal);
            }
            for at in (0..count).rev() {
                let number = round * count + at;
                for (from, to) in [(10, SIGNAL), (0, 10)] {
                    let mut part = vec![0; to - from];
                    one.read(number, from as u64, &mut part);
                    other.place(number, from as u64, &part);
                }
                let free = if at == 0 { said.len() } else { 0 };
                assert_eq!(other.received(number), free);
                one.sent(number);
            }
            let heard: Vec<_> = std::iter::from_fn(|| other.hear()).collect();
            assert_eq!(heard, said);
        }
        assert!(one.is_idle());
    }

    #[test]
    fn a_list_of_addresses_is_heard_when_it_is_whole() {
        let at = |host| IpAddr::from([10, 0, 0, host]);
        let mut told = Told::default();
        for edition in 1..4 {
            assert_eq!(told.hear(edition, (0, 3), at(1)), None);
            assert_eq!(told.hear(edition, (1, 3), at(2)), None);
            let list = vec![at(1), at(2), at(3)];
            let whole = Some(Addresses { edition, list });
            assert_eq!(told.hear(edition, (2, 3), at(3)), whole);
        }
        // One is missing; one is of another list; there are more than there can be.
        told.hear(4, (0, 3), at(1));
        assert_eq!(told.hear(4, (2, 3), at(3)), None);
        assert_eq!(told.hear(4, (1, 3), at(2)), None);
        told.hear(5, (0, 2), at(1));
        assert_eq!(told.hear(6, (1, 2), at(2)), None);
        let many = |place| told.hear(7, (place, 255), at(place));
        assert_eq!((0..255).find_map(many), None);
        assert_eq!(told.hear(8, (0, 0), at(1)), None);
    }

    #[test]
    fn what_is_no_signal_is_passed_over() {
        let mut signals = Signals::default();
        signals.place(0, 0, &[99; SIGNAL]);
        signals.place(0, 20, &[0; SIGNAL]);
        assert_eq!(signals.received(0), 1);
        assert_eq!(signals.hear(), None);
    }
}
