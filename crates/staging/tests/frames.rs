//! Ranks in two namespaces, over AF_XDP: slots are frames of the card's memory, and a thread stands for the device.
//! Skipped where namespaces are not allowed.

#![allow(unsafe_code, reason = "memory is lent to the exchange")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use evener_engine::frames::Wanted;
use evener_engine::{Choice, Config, Engine};
use evener_staging::framing::FRAMES;
use evener_staging::{Exchange, Kind, Room, WORDS};
use nodes::{Node, ip, pair};

#[path = "../../xdp/tests/nodes/mod.rs"]
mod nodes;

const SLOT: usize = 512 << 10;
const SLOTS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(20);

/// A rank's memory, its exchange, and what its engine says.
struct Rank {
    exchange: Exchange,
    engine: Arc<Engine>,
    said: Arc<Mutex<Vec<String>>>,
    _memory: Vec<u64>,
}

fn rank(node: &Node, name: &'static str, rank: u32, choice: Choice, frames: u32) -> Rank {
    patient_rank(node, name, rank, (choice, frames), PATIENCE)
}

fn patient_rank(
    node: &Node,
    name: &'static str,
    rank: u32,
    (choice, frames): (Choice, u32),
    patience: Duration,
) -> Rank {
    let said: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = said.clone();
    let engine = node.run(move || {
        let config = Config {
            engine: choice,
            interfaces: Some(name.into()),
            flows: 4,
            most_flows: 8,
            workers: 1,
            frames: Some(Wanted {
                send: frames,
                receive: frames,
            }),
            ..Config::default()
        };
        let log = move |_, text: &str| log.lock().unwrap().push(text.to_string());
        Arc::new(Engine::start(config, Box::new(log)).unwrap())
    });
    exchange(engine, said, rank, patience)
}

fn exchange(
    engine: Arc<Engine>,
    said: Arc<Mutex<Vec<String>>>,
    rank: u32,
    patience: Duration,
) -> Rank {
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
    let exchange = unsafe { Exchange::listen(engine.clone(), rank, 2, room, patience) };
    Rank {
        exchange: exchange.unwrap(),
        engine,
        said,
        _memory: memory,
    }
}

fn connect(ranks: &[Rank]) {
    let handles: Vec<Vec<u8>> = ranks.iter().map(|one| one.exchange.handle()).collect();
    std::thread::scope(|scope| {
        for one in ranks {
            let handles = &handles;
            scope.spawn(move || one.exchange.connect(handles, PATIENCE).unwrap());
        }
    });
}

fn bytes(seed: usize, length: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as u8
    };
    (0..length).map(next).collect()
}

fn run(one: &Rank, kind: Kind, each: usize, payload: &[u8], received: &mut [u8]) {
    let (from, to) = (payload.as_ptr() as usize, received.as_mut_ptr() as usize);
    // SAFETY: two slices of the lengths that the kind demands.
    unsafe { one.exchange.run_on_host(kind, each, from, to) }.unwrap();
}

/// Both collectives in many sizes; `fault` may do something to a rank before each.
fn exchanges(ranks: &[Rank], sizes: &[usize], fault: impl Fn(&Rank, usize) + Sync) {
    std::thread::scope(|scope| {
        for (index, one) in ranks.iter().enumerate() {
            let fault = &fault;
            scope.spawn(move || {
                for (turn, each) in sizes.iter().copied().enumerate() {
                    fault(one, turn);
                    let payload = bytes(100 * turn + index, each);
                    let mut received = vec![0; each * 2];
                    run(one, Kind::Gather, each, &payload, &mut received);
                    for from in 0..2 {
                        assert!(received[from * each..][..each] == bytes(100 * turn + from, each));
                    }
                    let payload: Vec<u8> = (0..2)
                        .flat_map(|to| bytes(1000 + 10 * index + to, each))
                        .collect();
                    run(one, Kind::Parts, each, &payload, &mut received);
                    for from in 0..2 {
                        let expected = bytes(1000 + 10 * from + index, each);
                        assert!(received[from * each..][..each] == expected);
                    }
                }
            });
        }
    });
}

fn framed() -> Option<((Node, Node), Vec<Rank>)> {
    let (a, b) = pair(1500)?;
    let ranks = vec![
        rank(&a, "va", 0, Choice::Xdp, FRAMES),
        rank(&b, "vb", 1, Choice::Xdp, FRAMES),
    ];
    connect(&ranks);
    Some(((a, b), ranks))
}

const SIZES: [usize; 8] = [1, 0, 1408, 1409, 300_000, 5_000_001, 1, 20_000_000];

#[test]
fn no_byte_of_payload_is_copied_by_the_engine() {
    let Some((_nodes, ranks)) = framed() else {
        return;
    };
    exchanges(&ranks, &SIZES, |_, _| {});
    for one in &ranks {
        let [pieces, copies] = one.exchange.gathered().unwrap();
        assert!(pieces >= 40 && copies >= pieces, "{pieces} in {copies}");
        one.exchange.close();
        one.engine.stop();
        let [[out, back], copied] = one.engine.bare();
        // To the other rank, once by each collective; and one packet that has tried the way.
        let payload: u64 = 1408 + SIZES.iter().map(|size| 2 * *size as u64).sum::<u64>();
        assert_eq!(copied, [0, 0]);
        assert_eq!(back, payload);
        assert!(out >= payload, "{out}");
    }
}

#[test]
fn paths_that_die_are_healed() {
    let Some((_nodes, ranks)) = framed() else {
        return;
    };
    exchanges(&ranks, &[3_000_000; 6], |one, turn| {
        if turn % 2 == 1 {
            one.engine.cut_paths(3);
        }
    });
    assert!(ranks.iter().all(|one| one.exchange.failure().is_none()));
}

/// One rank over plain UDP has no frames: both take the copying way, and the other says why.
#[test]
fn where_a_rank_has_none_slots_are_memory_and_it_is_said() {
    let Some((a, b)) = pair(1500) else {
        return;
    };
    let ranks = vec![
        rank(&a, "va", 0, Choice::Xdp, FRAMES),
        rank(&b, "vb", 1, Choice::Udp, FRAMES),
    ];
    let handles: Vec<Vec<u8>> = ranks.iter().map(|one| one.exchange.handle()).collect();
    assert!(!ranks[0].exchange.agrees(&handles).unwrap());
    connect(&ranks);
    exchanges(&ranks, &[1, 3_000_000], |_, _| {});
    assert!(ranks[0].exchange.gathered().is_none());
    assert_eq!(ranks[0].engine.bare(), [[0; 2]; 2]);
    let lines = ranks[0].said.lock().unwrap();
    let why = |line: &&String| line.contains("staged:") && line.contains("copied");
    assert_eq!(lines.iter().filter(why).count(), 1, "{lines:?}");
}

/// Frames are leased, and free again when an exchange is gone: with what came and was not taken out.
#[test]
fn exchanges_one_after_the_other_have_the_same_frames() {
    let Some(((_a, _b), mut ranks)) = framed() else {
        return;
    };
    for _ in 0..4 {
        exchanges(&ranks, &[2_000_000], |_, _| {});
        let engines: Vec<_> = ranks
            .drain(..)
            .map(|one| {
                one.exchange.close();
                (one.engine.clone(), one.said.clone())
            })
            .collect();
        for (index, (engine, said)) in engines.into_iter().enumerate() {
            ranks.push(exchange(engine, said, index as u32, PATIENCE));
        }
        connect(&ranks);
        assert!(ranks.iter().all(|one| one.exchange.gathered().is_some()));
    }
}

/// A link on the way that takes smaller packets only, from the start or later: an error in words, and not a hang.
#[test]
fn packets_that_do_not_pass_are_an_error() {
    let Some((a, b)) = pair(1500) else {
        return;
    };
    let (frames, patience) = ((Choice::Xdp, FRAMES), Duration::from_secs(2));
    let ranks = || {
        vec![
            patient_rank(&a, "va", 0, frames, patience),
            patient_rank(&b, "vb", 1, frames, patience),
        ]
    };
    let made = ranks();
    connect(&made);
    assert!(b.run(|| ip("link set vb mtu 1300")));
    let payload = bytes(1, 3_000_000);
    let mut received = vec![0; 6_000_000];
    let (from, to) = (payload.as_ptr() as usize, received.as_mut_ptr() as usize);
    // SAFETY: two slices of the lengths that the kind demands.
    let result = unsafe {
        made[0]
            .exchange
            .run_on_host(Kind::Gather, payload.len(), from, to)
    };
    let why = result.unwrap_err().to_string();
    assert!(why.contains("packets of 1482 bytes"), "{why}");
    drop(made);
    // Engines that have seen the large MTU.
    assert!(b.run(|| ip("link set vb mtu 1500")));
    let made = ranks();
    assert!(b.run(|| ip("link set vb mtu 1300")));
    let handles: Vec<Vec<u8>> = made.iter().map(|one| one.exchange.handle()).collect();
    std::thread::scope(|scope| {
        for one in &made {
            let handles = &handles;
            scope.spawn(move || {
                let why = one.exchange.connect(handles, PATIENCE).unwrap_err();
                let why = why.to_string();
                assert!(why.contains("packets of 1482 bytes"), "{why}");
            });
        }
    });
}
