//! NCCL's ring of two ranks, and its tree, over a network of first-in-first-out queues, in virtual
//! time: what is lost between their steps.
//!
//! Each direction of each connection takes one of the paths by chance. A path serves what comes to it
//! in order, 64 KiB at a time, as a kernel hands it out (where flows are capped, it serves them in turn:
//! see [`capped`]); both directions are full, so the kernel's acknowledgements and what a receiver says
//! stand in the queue of the way back. A connection sends no more than its congestion window, which
//! starts small and shrinks where a queue overflows; the rest waits in its socket ([`fabric`]). A rank
//! has some workers, each with connections of its own, and each looks at them only now and then (it
//! copies, naps, or is not scheduled): reads what has come, pulls what may go ([`ring`]). The GPU is a
//! clock, as in `evener bench net --pattern ring`, which drives the same pattern over real sockets: two
//! channels or four, each with four slices of 1 MiB in flight (or eight of 512 KiB: see [`nccl`]), a
//! pause between all-reduces.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod capped;
mod fabric;
mod nccl;
mod ring;

use std::time::Duration;

use fabric::Network;
use nccl::Algorithm;
use ring::Ring;

/// The share of the network's sum that all-reduces of this size get, after some to warm up: enough
/// for windows to grow as far as they will.
fn share(network: Network, bytes: u64, seed: u64) -> f64 {
    let mut ring = Ring::new(network, seed);
    for _ in 0..12 {
        ring.all_reduce(64 << 20);
    }
    let count = (256 << 20) / bytes;
    let speed: f64 = (0..count).map(|_| ring.all_reduce(bytes)).sum::<f64>() / count as f64;
    speed / (network.rate * network.paths as f64)
}

const ONE: Network = Network {
    paths: 1,
    rate: 25e9 / 8.0,
    cap: f64::MAX,
    flows: 16,
    workers: 4,
    turn: Duration::from_micros(50),
    algorithm: Algorithm::Ring,
    channels: 2,
};
const FOUR: Network = Network {
    paths: 4,
    rate: 6.25e9 / 8.0,
    ..ONE
};

/// The shares of all-reduces of 64 MiB and of 256 MiB, over some hash seeds, as a ring and as a tree,
/// with two channels and four: the least of each size.
fn least(network: Network, seeds: u64) -> [f64; 2] {
    let mut least = [1.0f64; 2];
    for algorithm in [Algorithm::Ring, Algorithm::Tree] {
        for channels in [2, 4] {
            let network = Network {
                algorithm,
                channels,
                ..network
            };
            for (least, size) in least.iter_mut().zip([64 << 20, 256 << 20]) {
                let shares: Vec<f64> = (1..=seeds).map(|seed| share(network, size, seed)).collect();
                println!(
                    "{algorithm:?} of {channels}, {} MiB: {shares:.3?}",
                    size >> 20
                );
                *least = shares.iter().copied().fold(*least, f64::min);
            }
        }
    }
    least
}

fn at_least(network: Network, seeds: u64, small: f64, large: f64) {
    let found = least(network, seeds);
    assert!(found[0] > small && found[1] > large, "{found:?}");
}

#[test]
fn four_hidden_paths_are_full_whatever_the_hash_did() {
    at_least(FOUR, 4, 0.94, 0.96);
}

#[test]
fn two_hidden_paths_are_full() {
    let two = Network {
        paths: 2,
        rate: 12.5e9 / 8.0,
        ..ONE
    };
    at_least(two, 2, 0.95, 0.97);
}

#[test]
fn one_path_is_full_and_a_slower_one() {
    at_least(ONE, 2, 0.95, 0.97);
    let slower = Network {
        rate: 10e9 / 8.0,
        ..ONE
    };
    at_least(slower, 2, 0.93, 0.95);
}

/// There a chunk is on its way for longer than it may wait where networks are quick.
#[test]
fn two_slow_paths_are_full() {
    let slow = Network {
        paths: 2,
        rate: 1e9 / 8.0,
        workers: 2,
        ..ONE
    };
    at_least(slow, 2, 0.95, 0.97);
}

#[test]
fn caps_a_flow_do_not_cap_the_sum() {
    for flows in [16, 24, 32] {
        let capped = Network {
            cap: 5e9 / 8.0,
            flows,
            ..ONE
        };
        at_least(capped, 2, 0.93, 0.94);
    }
}

/// Workers that look more seldom see less of the queues, and let them run dry more often.
#[test]
fn more_workers_that_look_more_seldom_fill_them_too() {
    let seldom = |paths: Network, turn: u64| Network {
        workers: 8,
        turn: Duration::from_micros(turn),
        ..paths
    };
    at_least(seldom(FOUR, 150), 2, 0.93, 0.95);
    at_least(seldom(FOUR, 300), 2, 0.9, 0.93);
    at_least(seldom(ONE, 300), 2, 0.92, 0.95);
}
