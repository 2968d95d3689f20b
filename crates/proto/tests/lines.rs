//! Whoever reads a posted buffer while it fills finds lines whole: every piece of every message begins
//! at a line and ends at one, or at the message's end. And these tests find it where that does not hold.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    dead_code,
    reason = "a test may panic"
)]

#[path = "packet/cubic.rs"]
mod cubic;
#[path = "packet/host.rs"]
mod host;
#[path = "packet/model.rs"]
mod model;
#[path = "packet/scenario.rs"]
mod scenario;
mod sim;

use std::sync::{Mutex, MutexGuard, PoisonError};

use evener_proto::faults::{self, Fault};
use evener_proto::packet::Config;
use proptest::prelude::*;

use host::{Flow, Host};
use scenario::{MILLI, flows, pair};
use sim::World;

/// Faults are those of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone(made: &[Fault]) -> MutexGuard<'static, ()> {
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    faults::put(made);
    guard
}

/// Pieces of chunks that were cut within a line: messages over paths of one rate and another of which
/// one is reset, in virtual time.
fn torn_chunks(sizes: &[u64], paths: usize, rates: (f64, f64), reset: u32) -> u64 {
    let mut world = World::new(paths, MILLI / 50, rates.0);
    world.connect(MILLI / 5, rates.1);
    world.redial = Some(MILLI);
    world.reports = true;
    world.comm(1);
    for size in sizes {
        world.post(1, *size).unwrap();
        world.send(1, *size).unwrap();
    }
    world.run(MILLI * reset / 10, |_| false);
    if let Some(victim) = world.wires.keys().next().copied() {
        world.reset(victim);
    }
    assert!(world.run(MILLI * 60_000, |w| w.sent.len() == sizes.len()));
    world.torn
}

/// The same of packets, over three ports of one loss and sizes up to `most`.
fn torn_packets(sizes: &[u64], loss: f64, (first, most): (usize, usize), seed: u64) -> u64 {
    let config = Config {
        datagram: first,
        most_datagram: most,
        ..Config::default()
    };
    let mut net = pair(&[1e9, 3e8, 1e8], &config, seed);
    for link in &mut net.links {
        link.loss = loss;
    }
    for (channel, length) in sizes.iter().enumerate() {
        let flow = Flow {
            channel: channel as u32,
            length: *length,
            ahead: 2,
            every: None,
            left: 3,
        };
        flows(&mut net, 0, 1, flow);
    }
    for end in 0..2 {
        net.end::<Host>(end).memory = Some(Default::default());
    }
    net.run_until(300 * MILLI);
    let torn = net.end::<Host>(0).torn;
    assert_eq!(net.end::<Host>(1).wrong, 0);
    torn
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn chunks_are_cut_between_lines(
        sizes in prop::collection::vec(0u64..3_000_000, 1..12), paths in 1usize..5,
        rates in (1e7..1e10, 1e6..1e9), reset in 1u32..50,
    ) {
        let _alone = alone(&[]);
        prop_assert_eq!(torn_chunks(&sizes, paths, rates, reset), 0);
    }

    #[test]
    fn packets_are_cut_between_lines(
        sizes in prop::collection::vec(0u64..200_000, 1..6),
        loss in prop_oneof![Just(0.0), 0.0..0.2],
        datagrams in (1232usize..1500, 1232usize..9000), seed in any::<u64>(),
    ) {
        let _alone = alone(&[]);
        prop_assert_eq!(torn_packets(&sizes, loss, datagrams, seed), 0);
    }
}

#[test]
fn cuts_at_any_byte_are_found() {
    let _alone = alone(&[Fault::AnyCut]);
    assert!(torn_chunks(&[1_000_007], 2, (3.3e8, 1.1e8), 10) > 0);
    assert!(torn_packets(&[100_000], 0.0, (1472, 1472), 1) > 0);
    faults::put(&[]);
}
