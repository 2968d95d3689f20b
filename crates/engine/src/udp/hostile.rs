//! An association whose peer has the key and lies: for the fuzz target and for a test with random
//! bytes. No sockets, no threads, no clock.
//!
//! The memory of its comm lies between two fences. The bytes of the input say what the peer says: packets with right
//! tags and any frames, signals in any order, bytes into any place.

use std::sync::Arc;
use std::time::Duration;

use evener_proto::Side;
use evener_proto::packet::auth::Key;
use evener_proto::packet::format::{HEADER, Haste, Header, Kind, VERSION};
use evener_proto::packet::{Accepted, Arrival, Config, Connection, JobKey, Own, accept};

use super::association::Association;
use super::ports::Came;
use crate::link::Link;
use crate::nics::Nics;
use crate::peer::{Peer, PeerKey, Transport};
use crate::requests::Requests;
use crate::shared::Shared;
use crate::sys::Memory;

const KEY: [u8; 16] = [7; 16];
const FENCE: usize = 64;
const ROOM: usize = 600;
const FENCE_BYTE: u8 = 0xa5;
const COMM: u64 = 5;

/// What the side with this number says of itself.
pub fn own(number: u32) -> Own {
    Own {
        connection: number,
        random: u64::from(number) << 32 | 77,
    }
}

/// The next packet of a connection, whose messages are ones.
pub fn next(connection: &mut Connection, now: Duration) -> Option<Vec<u8>> {
    let mut out = [0; 1500];
    let sent = connection.transmit(now, &mut out, &mut |_, to| to.fill(1))?;
    Some(out[..sent.length].to_vec())
}

/// Who calls, who has accepted that (its number is 2), and the key of what the first one says. The second
/// has not heard a packet with that key yet.
pub fn met() -> Option<(Connection, Box<Connection>, Key)> {
    let (config, now) = (Config::default(), Duration::ZERO);
    let key = JobKey::new(KEY);
    let mut caller = Connection::connect(config.clone(), key, own(1), now);
    let hello = next(&mut caller, now)?;
    let Ok(Accepted::Connection(victim)) = accept(config, key, own(2), &hello, now) else {
        return None;
    };
    let (session, _) = key.session(own(1).random, own(2).random);
    Some((caller, victim, session))
}

/// A packet to the second of them, with any frames. Without a `key` it has no tag.
pub fn packet(
    kind: Kind,
    flags: (u8, bool),
    number: u64,
    body: &[u8],
    key: Option<&Key>,
) -> Vec<u8> {
    let mut packet = vec![0; HEADER];
    let header = Header {
        version: VERSION,
        kind,
        haste: if flags.1 { Haste::Now } else { Haste::Soon },
        path: flags.0,
        connection: 2,
        number: number as u32,
        stamp: number as u32,
        tag: 0,
    };
    header.emit(&mut packet);
    packet.extend(body);
    if let Some(key) = key {
        key.seal(&mut packet, number);
    }
    packet
}

/// A peer that nobody knows.
pub(crate) fn peer() -> Arc<Peer> {
    let key = PeerKey {
        process: [1; 16],
        mirror: true,
        transport: Transport::Udp,
        connection: 0,
    };
    let config = crate::Config::default();
    let link = Link::new(&config, Arc::default(), Duration::ZERO);
    Arc::new(Peer::new(key, [0; 16], 9, 0, Vec::new(), link))
}

/// Says all of this; panics if a fence falls, or something else does that must not.
pub fn run(data: &[u8]) {
    let _ = talk(data);
}

fn talk(data: &[u8]) -> Option<Vec<u8>> {
    let (_, victim, session) = met()?;
    let now = Duration::ZERO;
    let from = "127.0.0.1:9".parse().ok()?;
    let end = (own(1).random, victim, false);
    let mut victim = Association::new(peer(), end, (&Nics::default(), vec![from]), None, now);
    let shared = Shared::for_tests();
    let mut memory = vec![FENCE_BYTE; FENCE + 3 * ROOM + FENCE];
    let requests = Requests::new(COMM, Side::Receive);
    victim.begin(1, &requests);
    for place in 0..3 {
        let memory = Memory::of(&mut memory[FENCE + place * ROOM..FENCE + (place + 1) * ROOM]);
        requests.slots.post(place as u64, memory);
    }
    victim.poll(COMM, now);
    let mut number = 0u64;
    let mut rest = data;
    while let Some((what, more)) = rest.split_first() {
        let (length, more) = more.split_first()?;
        let (body, after) = more.split_at(usize::from(*length).min(more.len()));
        rest = after;
        number += 1 + u64::from(what / 250) * 5000;
        let kind = match what % 64 {
            63 => Kind::Hello,
            _ => Kind::Data,
        };
        let key = (what % 32 != 31).then_some(&session);
        let packet = packet(kind, (*what, what & 1 != 0), number, body, key);
        let came = Came {
            packet: &packet,
            from,
            to: None,
            arrival: Arrival {
                marked: what & 2 != 0,
                waited: Duration::from_micros(u64::from(what & 4) * 1000),
            },
        };
        let at = Duration::from_millis(number);
        let _ = victim.hear(&came, at);
        victim.digest(&shared, Duration::from_millis(number));
        let (before, after) = (&memory[..FENCE], &memory[FENCE + 3 * ROOM..]);
        let whole = before.iter().chain(after).all(|byte| *byte == FENCE_BYTE);
        assert!(whole, "bytes beyond the posted memory");
    }
    Some(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use evener_proto::packet::format::Writer;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_that_a_lying_peer_says_does_harm(
            said in prop::collection::vec(
                (any::<u8>(), 1u8..9, prop::collection::vec(0u8..4, 0..60)), 0..40),
        ) {
            let mut data = Vec::new();
            for (what, kind, body) in said {
                data.extend([what, body.len() as u8 + 1, kind]);
                data.extend(body);
            }
            run(&data);
        }
    }

    /// That the harness does reach memory: bytes of an honest chunk arrive.
    #[test]
    fn an_honest_chunk_arrives() {
        let mut body = [0; 100];
        let mut writer = Writer::new(&mut body);
        let place = writer.chunk((1, 0), 10, 3, true).expect("there is room");
        place.copy_from_slice(b"abc");
        let written = writer.written();
        let mut data = vec![0, written as u8];
        data.extend(&body[..written]);
        let memory = talk(&data).expect("all of it is said");
        assert_eq!(&memory[FENCE + 10..FENCE + 13], b"abc");
    }
}
