//! A connection whose peer has the job key and lies, while an honest peer, a clock and its own user go
//! on. Each byte of the input says what happens next. Bytes come only into what was posted, and no
//! message ends twice.
#![no_main]

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use evener_engine::udp::hostile::{met, next, packet};
use evener_proto::packet::auth::Key;
use evener_proto::packet::format::Kind;
use evener_proto::packet::{Arrival, Connection, Event, Place};
use libfuzzer_sys::fuzz_target;

/// Packets that are kept to be said again.
const KEPT: usize = 8;
const STEPS: usize = 300;

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.byte()?).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        Some(bytes)
    }
}

/// What its user knows of the victim.
#[derive(Default)]
struct User {
    posted: HashMap<(u32, u64), u64>,
    received: HashSet<(u32, u64)>,
    sent: HashSet<(u32, u64)>,
}

impl User {
    fn hear(&mut self, victim: &mut Connection, packet: &[u8], now: Duration) {
        let posted = &self.posted;
        let _ = victim.receive(packet, Arrival::default(), now, &mut |place: Place<'_>| {
            let room = posted[&(place.channel, place.message)];
            let end = place.offset + place.bytes.len() as u64;
            assert!(end <= room, "beyond a buffer");
        });
        while let Some(event) = victim.event() {
            match event {
                Event::Received {
                    channel, message, ..
                } => assert!(self.received.insert((channel, message)), "received twice"),
                Event::Sent { channel, message } => {
                    assert!(self.sent.insert((channel, message)), "sent twice");
                }
                Event::Connected | Event::TooLong { .. } | Event::Over(_) => {}
            }
        }
    }
}

fn opened() -> Option<(Connection, Connection, Key)> {
    let (now, (mut honest, mut victim, key)) = (Duration::ZERO, met()?);
    let welcome = next(&mut victim, now)?;
    honest
        .receive(&welcome, Arrival::default(), now, &mut |_| {})
        .ok()?;
    let proof = next(&mut honest, now)?;
    victim
        .receive(&proof, Arrival::default(), now, &mut |_| {})
        .ok()?;
    Some((honest, *victim, key))
}

fn run(data: &[u8]) -> Option<()> {
    let (mut honest, mut victim, key) = opened()?;
    let (mut user, mut input) = (User::default(), Input(data));
    let mut now = Duration::from_millis(1);
    let mut number = 10_000u64;
    let mut kept: Vec<Vec<u8>> = Vec::new();
    for _ in 0..STEPS {
        let what = input.byte()?;
        match what % 12 {
            0..=4 => {
                let body = input.bytes()?;
                number += 1 + u64::from(what / 200) * 3000;
                let flags = (what, what & 16 != 0);
                let packet = packet(Kind::Data, flags, number, body, Some(&key));
                user.hear(&mut victim, &packet, now);
                kept.push(packet);
            }
            5 => user.hear(&mut victim, input.bytes()?, now),
            6 => {
                if let Some(packet) = kept.get(usize::from(what) % KEPT) {
                    user.hear(&mut victim, packet, now);
                }
            }
            7 => {
                let (channel, room) = (u32::from(what >> 4) % 3, u64::from(input.byte()?) * 40);
                let message = victim.post(channel, room);
                user.posted.insert((channel, message), room);
            }
            8 => {
                let length = u64::from(input.byte()?) * 40;
                victim.send(u32::from(what >> 4) % 3, length);
            }
            9 => {
                let channel = u32::from(what >> 4) % 3;
                victim.forget(channel);
            }
            10 => now += Duration::from_micros(u64::from(input.byte()?) * 100),
            _ => {
                // The honest end answers too; its numbers are below the liar's.
                if what & 16 != 0 {
                    let room = u64::from(input.byte()?) * 40;
                    honest.post(u32::from(what >> 5) % 3, room);
                }
                honest.on_time(now);
                while let Some(packet) = next(&mut honest, now) {
                    user.hear(&mut victim, &packet, now);
                }
            }
        }
        if kept.len() > KEPT {
            kept.remove(0);
        }
        victim.on_time(now);
        for _ in 0..200 {
            let Some(packet) = next(&mut victim, now) else {
                break;
            };
            let _ = honest.receive(&packet, Arrival::default(), now, &mut |_| {});
        }
        if let Some(due) = victim.deadline() {
            let _ = due;
        }
    }
    Some(())
}

fuzz_target!(|data: &[u8]| {
    run(data);
});
