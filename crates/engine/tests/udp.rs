//! The packet protocol over UDP sockets of this machine: bytes both ways, and a stranger at the port.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use evener_engine::udp::{Bytes, Driver};
use evener_proto::packet::{Config, Event, JobKey, Over, Place, Span};

const LENGTH: usize = 700_001;

struct Buffer {
    out: Vec<u8>,
    into: Vec<u8>,
    events: Vec<Event>,
}

impl Bytes for Buffer {
    fn read(&mut self, span: &Span, to: &mut [u8]) {
        let at = span.offset as usize;
        to.copy_from_slice(&self.out[at..at + to.len()]);
    }

    fn place(&mut self, place: Place<'_>) {
        let at = place.offset as usize;
        self.into[at..at + place.bytes.len()].copy_from_slice(place.bytes);
    }
}

struct Side {
    driver: Driver,
    memory: Buffer,
}

impl Side {
    fn new(driver: Driver, salt: usize) -> Side {
        let out = (0..LENGTH).map(|at| (at * salt % 253) as u8).collect();
        let memory = Buffer {
            out,
            into: vec![0; LENGTH],
            events: Vec::new(),
        };
        Side { driver, memory }
    }

    fn turn(&mut self) {
        self.driver.turn(&mut self.memory);
        while let Some(event) = self.driver.event() {
            if event == Event::Connected {
                self.driver.post(1, LENGTH as u64);
                self.driver.send(1, LENGTH as u64);
            }
            self.memory.events.push(event);
        }
    }

    fn has(&self, what: fn(&Event) -> bool) -> bool {
        self.memory.events.iter().any(what)
    }
}

fn config() -> Config {
    Config {
        paths: 8,
        used: 4,
        ..Config::default()
    }
}

#[test]
fn bytes_go_both_ways_and_a_stranger_changes_nothing() {
    let any = "127.0.0.1:0".parse().unwrap();
    let listener = Driver::listen(any, config(), JobKey::new([1; 16])).unwrap();
    let to = listener.address().unwrap();
    let mut other = Side::new(listener, 7);
    let mut stranger = Side::new(
        Driver::connect(to, config(), JobKey::new([2; 16])).unwrap(),
        5,
    );
    let mut one = Side::new(
        Driver::connect(to, config(), JobKey::new([1; 16])).unwrap(),
        3,
    );
    let noise = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let done = |side: &Side| {
        side.has(|event| matches!(event, Event::Sent { .. }))
            && side.has(|event| matches!(event, Event::Received { .. }))
    };
    while !(done(&one) && done(&other)) && Instant::now() < end {
        stranger.turn();
        noise.send_to(&[0xe7; 60], to).unwrap();
        one.turn();
        other.turn();
    }
    assert!(one.memory.into == other.memory.out && other.memory.into == one.memory.out);
    assert!(!stranger.has(|event| *event == Event::Connected));
    let stats = other.driver.stats();
    assert!(
        stats.forged + stats.stray + stats.malformed > 0,
        "{stats:?}"
    );
    one.driver.close(&mut one.memory);
    while !other.has(|event| *event == Event::Over(Over::ByPeer)) && Instant::now() < end {
        other.turn();
    }
    assert!(other.has(|event| *event == Event::Over(Over::ByPeer)));
}
