//! Paths that die, go black, stall and come back: every message arrives exactly once.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sim;

use std::time::Duration;

use evener_proto::Side;
use proptest::prelude::*;
use sim::World;

const MS: Duration = Duration::from_millis(1);
const GB: f64 = 1e9;

fn load(world: &mut World, messages: usize, length: u64) {
    world.comm(1);
    for _ in 0..messages {
        world.post(1, length).unwrap();
        world.send(1, length).unwrap();
    }
}

#[test]
fn a_reset_path_gives_its_chunks_to_the_others_at_once() {
    let mut world = World::new(4, MS / 50, GB);
    load(&mut world, 32, 1 << 20);
    world.run(2 * MS, |_| false);
    let victim = *world.wires.keys().next().unwrap();
    world.reset(victim);
    assert!(world.run(MS * 1000, |w| w.sent.len() == 32));
    assert!(world.now < 16 * MS, "{:?}", world.now);
}

#[test]
fn a_black_path_is_suspected_and_its_chunks_go_again_within_100_ms() {
    let mut world = World::new(4, MS / 50, GB);
    load(&mut world, 32, 1 << 20);
    world.run(2 * MS, |_| false);
    world.wires.values_mut().next().unwrap().black = true;
    assert!(world.run(MS * 1000, |w| w.sent.len() == 32));
    assert!(world.now < 100 * MS, "{:?}", world.now);
    assert!(world.suspected >= 1 && world.died.is_empty());
    // And in the end it is given up.
    world.run(MS * 3000, |_| false);
    assert_eq!(world.wires.len(), 3);
}

#[test]
fn a_path_that_comes_back_in_time_carries_again() {
    let mut world = World::new(2, MS / 50, GB);
    load(&mut world, 8, 1 << 20);
    world.run(2 * MS, |_| false);
    let victim = *world.wires.keys().next().unwrap();
    world.wires.get_mut(&victim).unwrap().black = true;
    world.run(MS * 200, |_| false);
    assert_eq!(world.sent.len(), 8);
    world.wires.get_mut(&victim).unwrap().black = false;
    world.run(MS * 100, |_| false);
    assert_eq!(
        world.lanes[0].path_state(victim),
        Some(evener_proto::PathState::Live)
    );
}

/// Two cards, of 100 and of 5 Mb/s, with eight connections over each.
#[test]
fn no_message_waits_for_a_card_that_is_much_slower_than_the_other() {
    let mut world = World::new(8, MS / 50, 12.5e6 / 8.0);
    for _ in 0..8 {
        world.connect(MS / 50, 0.6e6 / 8.0);
    }
    world.reports = true;
    load(&mut world, 8, 256 << 10);
    assert!(world.run(MS * 2000, |w| w.sent.len() == 8));
    // The quick card alone takes 168 ms; a piece on the slow one 820.
    assert!(world.now < 450 * MS, "{:?}", world.now);
    // And those rest that kept it waiting.
    let now = world.now;
    let awake = |id: &u64| world.lanes[0].is_awake(evener_proto::PathId(*id), now);
    assert!((9..=16).filter(awake).count() < (1..=8).filter(awake).count());
}

#[test]
fn a_goodbye_is_over_when_the_peer_has_heard_it() {
    let mut world = World::new(2, MS / 50, 1e6);
    load(&mut world, 4, 1 << 20);
    world.run(2 * MS, |_| false);
    assert!(world.lanes[0].is_parted());
    world.lanes[0].close(1, Side::Send);
    assert!(!world.lanes[0].is_parted());
    // The path that took it ends: it is said again over the other.
    world.run(MS, |_| false);
    let victim = *world.wires.keys().next().unwrap();
    world.reset(victim);
    assert!(!world.lanes[0].is_parted());
    assert!(world.run(MS * 1000, |w| w.lanes[0].is_parted()));
    assert_eq!(world.failed, [(1, 1, Side::Receive)]);
    // Nobody can be told where there is no path.
    world.comm(2);
    world.lanes[0].close(2, Side::Send);
    let last = *world.wires.keys().next().unwrap();
    world.reset(last);
    assert!(world.lanes[0].is_parted());
}

#[test]
fn with_no_path_for_too_long_both_ends_fail() {
    let mut world = World::new(2, MS / 50, GB);
    load(&mut world, 4, 4 << 20);
    world.run(2 * MS, |_| false);
    for wire in world.wires.values_mut() {
        wire.black = true;
    }
    world.run(MS * 19_000, |_| false);
    assert!(world.failed.is_empty());
    world.run(MS * 5_000, |_| false);
    let mut ends: Vec<usize> = world.failed.iter().map(|one| one.0).collect();
    ends.sort_unstable();
    assert_eq!(ends, [0, 1]);
}

#[test]
fn a_new_path_takes_up_what_all_lost_ones_left() {
    let mut world = World::new(2, MS / 50, GB);
    world.redial = Some(300 * MS);
    load(&mut world, 16, 1 << 20);
    world.run(3 * MS, |_| false);
    let all: Vec<_> = world.wires.keys().copied().collect();
    for id in all {
        world.reset(id);
    }
    assert!(world.run(MS * 1000, |w| w.sent.len() == 16));
}

#[derive(Debug, Clone)]
enum Step {
    Send(u64, u64),
    Post(u64, u64),
    Run(u32),
    Reset(usize),
    Black(usize, bool),
    Connect,
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![Just(0u64), 1..1025u64, 1025..70_000u64, 70_000..900_000u64];
    prop_oneof![
        5 => (0u64..3, length).prop_map(|(comm, length)| Step::Send(comm, length)),
        5 => (0u64..3, 0u64..2).prop_map(|(comm, more)| Step::Post(comm, more)),
        4 => (0u32..80_000).prop_map(Step::Run),
        1 => (0usize..8).prop_map(Step::Reset),
        1 => (0usize..8, any::<bool>()).prop_map(|(path, black)| Step::Black(path, black)),
        1 => Just(Step::Connect),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn nothing_is_lost_and_nothing_comes_twice(
        steps in prop::collection::vec(step(), 1..80),
        paths in 1usize..5,
    ) {
        let mut world = World::new(paths, MS / 20, GB / 4.0);
        world.redial = Some(30 * MS);
        for comm in 0..3 {
            world.comm(comm);
        }
        let (mut sends, mut posts) = ([0u64; 3], [0u64; 3]);
        for step in steps {
            match step {
                Step::Send(comm, length) => {
                    sends[comm as usize] += u64::from(world.send(comm, length).is_some());
                }
                Step::Post(comm, more) => {
                    let posted = world.post(comm, 900_000 + more);
                    posts[comm as usize] += u64::from(posted.is_some());
                }
                Step::Run(us) => {
                    world.run(Duration::from_micros(us.into()), |_| false);
                }
                Step::Reset(path) => {
                    if let Some(id) = world.wires.keys().nth(path).copied() {
                        world.reset(id);
                    }
                }
                Step::Black(path, black) => {
                    if let Some(wire) = world.wires.values_mut().nth(path) {
                        wire.black = black;
                    }
                }
                Step::Connect => {
                    if world.wires.len() < 8 {
                        world.connect(MS / 10, GB / 8.0);
                    }
                }
            }
        }
        // Heal, and let both sides catch up: every message that has a buffer must arrive.
        for wire in world.wires.values_mut() {
            wire.black = false;
        }
        for comm in 0..3 {
            while posts[comm] < sends[comm] {
                match world.post(comm as u64, 900_000) {
                    Some(_) => posts[comm] += 1,
                    None => {
                        world.run(MS * 500, |_| false);
                    }
                }
            }
        }
        let want: u64 = sends.iter().sum();
        let done = world.run(MS * 15_000, |w| w.sent.len() as u64 == want);
        prop_assert!(done, "{} of {want}; {:?}", world.sent.len(), world.states(0));
        prop_assert_eq!(world.received.len() as u64, want);
        prop_assert!(world.failed.is_empty());
    }
}
