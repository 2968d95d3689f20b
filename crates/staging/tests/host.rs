//! Ranks of one process over loopback: everything but the device is real.

#![allow(unsafe_code, reason = "memory is lent to the exchange")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use evener_engine::{Config, Engine};
use evener_staging::{Exchange, Kind, Room, WORDS};

const SLOT: usize = 512 << 10;
const SLOTS: u32 = 3;

/// A rank's memory, and its exchange.
struct Rank {
    exchange: Exchange,
    memory: Vec<u64>,
}

fn rank(rank: u32, size: u32, patience: Duration) -> Rank {
    let config = Config {
        interfaces: Some("lo".into()),
        flows: 2,
        most_flows: 4,
        workers: 1,
        ..Config::default()
    };
    let engine = Engine::start(config, Box::new(|_, _| {})).unwrap();
    let each = SLOT * SLOTS as usize;
    let memory = vec![0u64; (2 * each + WORDS) / 8];
    let base = memory.as_ptr() as usize;
    let room = Room {
        send: base,
        receive: base + each,
        words: base + 2 * each,
        slot: SLOT,
        slots: SLOTS,
    };
    // SAFETY: the memory lives as long as the exchange, which is dropped first.
    let exchange = unsafe { Exchange::listen(Arc::new(engine), rank, size, room, patience) };
    Rank {
        exchange: exchange.unwrap(),
        memory,
    }
}

fn world(size: u32, patience: Duration) -> Vec<Rank> {
    let ranks: Vec<Rank> = (0..size).map(|one| rank(one, size, patience)).collect();
    let handles: Vec<Vec<u8>> = ranks
        .iter()
        .map(|one| one.exchange.handle().to_vec())
        .collect();
    std::thread::scope(|scope| {
        for one in &ranks {
            let handles = &handles;
            scope.spawn(move || {
                one.exchange
                    .connect(handles, Duration::from_secs(20))
                    .unwrap()
            });
        }
    });
    ranks
}

fn bytes(seed: usize, length: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    (0..length)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        })
        .collect()
}

fn run(
    one: &Rank,
    kind: Kind,
    each: usize,
    payload: &[u8],
    received: &mut [u8],
) -> Result<(), String> {
    let (from, to) = (payload.as_ptr() as usize, received.as_mut_ptr() as usize);
    // SAFETY: two slices of the lengths that the kind demands.
    unsafe { one.exchange.run_on_host(kind, each, from, to) }.map_err(|error| error.to_string())
}

/// Pieces that a rank has put into slots, and that its peers have.
fn left(one: &Rank) -> [u32; 2] {
    let words = one.memory.as_ptr() as usize + 2 * SLOT * SLOTS as usize;
    // SAFETY: the first two words of the room, which all use as atomics.
    [0, 64].map(|at| unsafe { AtomicU32::from_ptr((words + at) as *mut u32) }.load(Acquire))
}

#[test]
fn all_sizes_arrive_whole_in_both_forms() {
    for size in [2, 3] {
        let ranks = world(size, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for (index, one) in ranks.iter().enumerate() {
                scope.spawn(move || {
                    let peers = size as usize;
                    for (turn, each) in [1, 0, 4096, 300_000, 5_000_001].into_iter().enumerate() {
                        let payload = bytes(100 * turn + index, each);
                        let mut received = vec![0; each * peers];
                        run(one, Kind::Gather, each, &payload, &mut received).unwrap();
                        for from in 0..peers {
                            assert!(
                                received[from * each..][..each] == bytes(100 * turn + from, each)
                            );
                        }
                        // From `index` to `to`: told by both numbers.
                        let payload: Vec<u8> = (0..peers)
                            .flat_map(|to| bytes(1000 + 10 * index + to, each))
                            .collect();
                        run(one, Kind::Parts, each, &payload, &mut received).unwrap();
                        for from in 0..peers {
                            let expected = bytes(1000 + 10 * from + index, each);
                            assert!(received[from * each..][..each] == expected);
                        }
                        // The process may end now.
                        let [ready, sent] = left(one);
                        assert_eq!(ready, sent);
                    }
                });
            }
        });
    }
}

#[test]
fn a_peer_that_is_gone_is_an_error_and_not_a_hang() {
    let mut ranks = world(2, Duration::from_millis(700));
    let left = ranks.pop().unwrap();
    drop(left);
    let one = &ranks[0];
    let payload = vec![1; 100_000];
    let mut received = vec![0; 200_000];
    let why = run(one, Kind::Gather, payload.len(), &payload, &mut received).unwrap_err();
    assert!(why.contains("rank") || why.contains("peer"), "{why}");
    assert!(one.exchange.failure().is_some());
    run(one, Kind::Gather, payload.len(), &payload, &mut received).unwrap_err();
    one.exchange.close();
    // A device that runs on finds NaN.
    let slots = SLOT * SLOTS as usize / 8;
    assert!(
        one.memory[slots..2 * slots]
            .iter()
            .all(|word| *word == u64::MAX)
    );
}

#[test]
fn a_peer_that_never_comes_is_told() {
    let one = rank(0, 2, Duration::from_secs(1));
    let other = rank(1, 2, Duration::from_secs(1));
    let handles = [
        one.exchange.handle().to_vec(),
        other.exchange.handle().to_vec(),
    ];
    let error = one.exchange.connect(&handles, Duration::from_millis(300));
    assert!(error.unwrap_err().to_string().contains("did not connect"));
    let error = other
        .exchange
        .connect(&handles[..1], Duration::from_millis(300));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("handles of 2 ranks")
    );
}
