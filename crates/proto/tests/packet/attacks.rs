//! What attackers send: nothing of it is taken, nothing is lost, all is counted.

use std::time::Duration;

use evener_proto::packet::format::{Frames, Greeting, HEADER, Header, PLAIN};
use evener_proto::packet::{
    Accepted, Arrival, Config, Connection, Dropped, Event, JobKey, Over, Own, Place, accept,
};
use proptest::prelude::*;

use super::host::Host;
use super::model::{Body, End, random};
use super::scenario::{MILLI, bulk, flows, pair};

/// A switch says that its queue is long.
const MARKED: Arrival = Arrival {
    marked: true,
    waited: Duration::ZERO,
};
const KEY: [u8; 16] = [7; 16];
const OTHER: [u8; 16] = [8; 16];

fn own(number: u32) -> Own {
    Own {
        connection: number,
        random: u64::from(number) << 32 | 77,
    }
}

fn nowhere(_: Place<'_>) {}

pub(super) fn next(connection: &mut Connection, now: Duration) -> Option<Vec<u8>> {
    let mut out = [0; 9000];
    let sent = connection.transmit(now, &mut out, &mut |_, to| to.fill(1))?;
    Some(out[..sent.length].to_vec())
}

/// Two connections that know each other, with a buffer posted on each side.
pub(super) fn opened() -> (Connection, Connection) {
    let (config, now) = (Config::default(), Duration::ZERO);
    let key = JobKey::new(KEY);
    let mut one = Connection::connect(config.clone(), key, own(1), now);
    let hello = next(&mut one, now).unwrap();
    let Ok(Accepted::Connection(mut other)) = accept(config, key, own(2), &hello, now) else {
        panic!("not accepted");
    };
    let welcome = next(&mut other, now).unwrap();
    one.receive(&welcome, Arrival::default(), now, &mut nowhere)
        .unwrap();
    let proof = next(&mut one, now).unwrap();
    other
        .receive(&proof, Arrival::default(), now, &mut nowhere)
        .unwrap();
    assert_eq!(other.event(), Some(Event::Connected));
    one.post(1, 5000);
    other.post(1, 5000);
    (one, *other)
}

/// Everything that two sides say to each other for a while.
fn talk(one: &mut Connection, other: &mut Connection) -> Vec<Vec<u8>> {
    let mut said = Vec::new();
    for step in 0..30 {
        let now = Duration::from_millis(step);
        for turn in 0..2 {
            let (from, to) = if turn == 0 {
                (&mut *one, &mut *other)
            } else {
                (&mut *other, &mut *one)
            };
            from.on_time(now);
            while let Some(packet) = next(from, now) {
                let _ = to.receive(&packet, Arrival::default(), now, &mut |_| {});
                said.push(packet);
            }
        }
    }
    said
}

#[test]
fn no_byte_is_sent_to_one_who_has_not_proved_himself() {
    let (config, key, now) = (Config::default(), JobKey::new(KEY), Duration::ZERO);
    let mut one = Connection::connect(config.clone(), key, own(1), now);
    let hello = next(&mut one, now).unwrap();
    // The same hello, recorded, and sent again to a responder with fresh random numbers.
    let Ok(Accepted::Connection(mut other)) = accept(config.clone(), key, own(3), &hello, now)
    else {
        panic!("not accepted");
    };
    other.post(1, 100);
    assert_eq!(
        next(&mut other, now).map(|welcome| welcome.len()),
        Some(hello.len())
    );
    assert_eq!(next(&mut other, now), None);
    let foreign = accept(config.clone(), JobKey::new(OTHER), own(3), &hello, now);
    assert_eq!(foreign.err(), Some(Dropped::Forged));
    other.on_time(now + config.patience);
    assert_eq!(other.event(), Some(Event::Over(Over::Silent)));
}

#[test]
fn versions_are_agreed_on_or_both_are_told() {
    let (key, now) = (JobKey::new(KEY), Duration::ZERO);
    let spoken = |versions| Config {
        versions,
        ..Config::default()
    };
    for (mine, theirs, works) in [
        ((1, 1), (1, 4), true),
        ((1, 3), (1, 1), true),
        ((2, 3), (1, 1), false),
    ] {
        let mut one = Connection::connect(spoken(mine), key, own(1), now);
        let hello = next(&mut one, now).unwrap();
        match accept(spoken(theirs), key, own(2), &hello, now) {
            Ok(Accepted::Connection(mut other)) => {
                assert!(works);
                let welcome = next(&mut other, now).unwrap();
                one.receive(&welcome, Arrival::default(), now, &mut |_| {})
                    .unwrap();
                assert_eq!(one.event(), Some(Event::Connected));
            }
            Ok(Accepted::Reply(reply)) => {
                assert!(!works);
                one.receive(&reply, Arrival::default(), now, &mut |_| {})
                    .unwrap();
                assert_eq!(
                    one.event(),
                    Some(Event::Over(Over::Version(theirs.0, theirs.1)))
                );
            }
            Err(dropped) => panic!("{dropped}"),
        }
    }
}

/// A third host on the network sends what it recorded, from both directions, changed and unchanged,
/// and what it makes up: bulk goes on, right to the byte.
#[test]
fn spoofed_and_replayed_packets_are_dropped_and_counted() {
    let mut net = pair(&[1e9], &Config::default(), 11);
    net.end::<Host>(0).memory = Some(Default::default());
    net.end::<Host>(1).memory = Some(Default::default());
    net.end::<Host>(0).record = true;
    net.end::<Host>(1).record = true;
    flows(&mut net, 0, 1, bulk(1, 300_000));
    let mut seed = 5;
    for step in 1..60u32 {
        net.run_until(step * MILLI);
        for from in 0..2 {
            let mut heard = std::mem::take(&mut net.end::<Host>(from).recorded);
            for packet in heard.iter_mut().step_by(3) {
                let kind = random(&mut seed) % 4;
                if kind == 1 {
                    let at = random(&mut seed) as usize % packet.len();
                    packet[at] ^= 1 << (random(&mut seed) % 8);
                } else if kind == 2 {
                    packet[8..12].copy_from_slice(&(random(&mut seed) as u32).to_le_bytes());
                }
                // Kind 3 goes back to where it came from.
                let to = if kind == 3 { 1 - from } else { from };
                let now = net.now;
                net.end::<Host>(to)
                    .hear(Body::Datagram(packet.clone()), now);
            }
            net.end::<Host>(from).recorded.clear();
        }
    }
    net.run_until(100 * MILLI);
    let received = net.end::<Host>(1);
    assert_eq!(received.wrong, 0);
    let got = received
        .events
        .iter()
        .filter(|event| matches!(event, Event::Received { .. }))
        .count();
    // 1 Gb/s carries 400 of them a second.
    assert!(got > 30, "{got}");
    for end in 0..2 {
        let stats = net.end::<Host>(end).stats();
        assert!(stats.forged > 20 && stats.replayed > 20, "{stats:?}");
        assert_eq!((stats.not_posted, stats.late), (0, 0), "{stats:?}");
    }
}

proptest! {
    /// 256 cases in `cargo test`; `PROPTEST_CASES=1000000 cargo test --release -p evener-proto --test
    /// packet fuzz` is the fuzz target. No bytes panic, and none without the key are taken.
    #[test]
    fn fuzz_bytes(packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..120), 1..20)) {
        let (mut one, mut other) = opened();
        for mut packet in packets {
            for connection in [&mut one, &mut other] {
                prop_assert!(connection.receive(&packet, Arrival::default(), MILLI, &mut nowhere).is_err());
            }
            prop_assert!(accept(Config::default(), JobKey::new(KEY), own(4), &packet, MILLI).is_err());
            // The same with a header that is nearly right.
            if packet.len() >= 16 {
                (packet[0], packet[1], packet[2]) = (0xe7, 1, 1 + packet[2] % 4);
                packet[4..8].copy_from_slice(&1u32.to_le_bytes());
                let _ = Header::parse(&packet).map(|(_, body)| (Frames::new(body).count(), Greeting::parse(body)));
                prop_assert!(one.receive(&packet, MARKED, MILLI, &mut nowhere).is_err());
            }
        }
        prop_assert_eq!(one.event(), Some(Event::Connected));
        prop_assert_eq!((one.event(), other.event()), (None, None));
    }

    /// What was said, with bytes changed, cut, twice, and on another connection.
    #[test]
    fn fuzz_changed_packets(changes in prop::collection::vec((any::<u16>(), any::<u16>(), 1u8..255), 1..40)) {
        let (mut one, mut other) = opened();
        one.send(1, 5000);
        other.send(1, 3000);
        let said = talk(&mut one, &mut other);
        let (mut stranger, mut victim) = opened();
        for (which, at, by) in changes {
            let mut packet = said[usize::from(which) % said.len()].clone();
            for connection in [&mut one, &mut other] {
                prop_assert!(connection.receive(&packet, Arrival::default(), 40 * MILLI, &mut nowhere).is_err());
            }
            let at = usize::from(at) % packet.len();
            packet[at] ^= by;
            for connection in [&mut one, &mut other, &mut stranger, &mut victim] {
                prop_assert!(connection.receive(&packet, Arrival::default(), 40 * MILLI, &mut nowhere).is_err());
            }
            packet.truncate(at);
            prop_assert!(one.receive(&packet, Arrival::default(), 40 * MILLI, &mut nowhere).is_err());
        }
    }

    /// One who has the key says what no rule allows: no panic, no growth, no place that was not posted.
    #[test]
    fn fuzz_a_lying_peer(bodies in prop::collection::vec(
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..80),
            // Frames with small numbers: near what exists.
            prop::collection::vec((1u8..9, prop::collection::vec(0u8..4, 4..20)), 1..4).prop_map(|frames| {
                frames.into_iter().flat_map(|(kind, rest)| std::iter::once(kind).chain(rest)).collect()
            }),
        ], 1..60)) {
        let (mut one, mut other) = opened();
        one.send(1, 5000);
        talk(&mut one, &mut other);
        one.post(1, 300);
        one.send(1, 700);
        let (_, key) = JobKey::new(KEY).session(own(1).random, own(2).random);
        for (number, body) in bodies.into_iter().enumerate() {
            let number = 10_000 + number as u64;
            let mut packet = vec![0; HEADER];
            let header = Header {
                version: evener_proto::packet::format::VERSION, kind: evener_proto::packet::format::Kind::Data, haste: evener_proto::packet::format::Haste::Soon, path: 3,
                connection: 1, number: number as u32, stamp: 5, tag: 0,
            };
            header.emit(&mut packet);
            packet.extend(body);
            key.seal(&mut packet, number);
            prop_assert!(packet[PLAIN..HEADER] != [0; 8]);
            let now = Duration::from_millis(number);
            let mut inside = true;
            let result = one.receive(&packet, Arrival::default(), now, &mut |place: Place<'_>| {
                let room = if place.message == 0 { 5000 } else { 300 };
                inside &= place.channel == 1 && place.message < 2
                    && place.offset + place.bytes.len() as u64 <= room;
            });
            prop_assert!(inside);
            prop_assert!(!matches!(result, Err(Dropped::Forged | Dropped::Replayed)));
            one.on_time(now);
            for _ in 0..200 {
                if next(&mut one, now).is_none() {
                    break;
                }
            }
            let _ = one.deadline();
            while one.event().is_some() {}
        }
    }
}
