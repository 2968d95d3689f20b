//! Messages over healthy paths: credits, eager slots, order, sizes, closing.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sim;

use std::time::Duration;

use evener_proto::{Lane, Side};
use proptest::prelude::*;
use sim::{EAGER_BYTES, World};

const US: Duration = Duration::from_micros(1);
const GB: f64 = 1e9;

#[test]
fn a_message_goes_where_it_was_posted() {
    let mut world = World::new(4, 20 * US, GB);
    world.comm(1);
    world.post(1, 4 << 20).unwrap();
    world.send(1, 3 << 20).unwrap();
    assert!(world.run(Duration::from_secs(1), |w| !w.sent.is_empty()));
    assert_eq!(world.received[&(1, 1, 0)], 3 << 20);
    assert_eq!(world.sent[&(0, 1, 0)], 3 << 20);
    // Four paths of 1 GB/s: 3 MiB take 0.79 ms and some latency, not 3.1 ms.
    assert!(world.now < 1100 * US, "{:?}", world.now);
}

#[test]
fn a_slow_path_carries_what_it_can_and_no_more() {
    let mut world = World::new(3, 20 * US, GB);
    world.connect(20 * US, GB / 50.0);
    world.comm(1);
    for _ in 0..32 {
        world.post(1, 1 << 20).unwrap();
        world.send(1, 1 << 20).unwrap();
    }
    assert!(world.run(Duration::from_secs(1), |w| w.sent.len() == 32));
    // 32 MiB at 3.02 GB/s are 11.1 ms; an even split over four would take 420.
    assert!(world.now < 20_000 * US, "{:?}", world.now);
}

#[test]
fn small_messages_do_not_wait_for_a_credit() {
    let mut world = World::new(1, 100 * US, GB);
    world.comm(1);
    world.send(1, 100).unwrap();
    world.send(1, 0).unwrap();
    world.run(150 * US, |_| false);
    // They are there already; the third has no slot and waits.
    world.send(1, 100).unwrap();
    for room in [200, 0, 100] {
        world.post(1, room).unwrap();
    }
    assert!(world.received.contains_key(&(1, 1, 0)) && world.received.contains_key(&(1, 1, 1)));
    assert!(world.run(Duration::from_secs(1), |w| w.sent.len() == 3));
}

#[test]
fn nothing_large_is_sent_without_a_buffer() {
    let mut world = World::new(2, 10 * US, GB);
    world.comm(1);
    world.send(1, EAGER_BYTES + 1).unwrap();
    world.run(Duration::from_millis(50), |_| false);
    assert_eq!(world.chunk_bytes, 0);
    world.post(1, EAGER_BYTES + 1).unwrap();
    assert!(world.run(Duration::from_secs(1), |w| w.sent.len() == 1));
}

#[test]
fn a_message_that_is_too_long_fails_on_both_ends_and_writes_nothing() {
    for length in [200, 2 << 20] {
        let mut world = World::new(2, 10 * US, GB);
        world.comm(1);
        world.post(1, 100).unwrap();
        world.send(1, length).unwrap();
        world.run(Duration::from_millis(50), |_| false);
        assert_eq!(world.failed.len(), 2, "{:?}", world.failed);
        assert!(world.sent.is_empty() && world.received.is_empty());
    }
}

#[test]
fn opening_is_answered() {
    let mut world = World::new(2, 10 * US, GB);
    world.lanes[0].add_send(5, Some(7), world.now);
    world.lanes[0].add_send(6, Some(8), world.now);
    assert!(world.run(Duration::from_secs(1), |w| w.opened.len() == 2));
    world.opened.sort_unstable();
    assert_eq!(world.opened, [(0, 5, true), (0, 6, false)]);
}

#[test]
fn closing_one_comm_leaves_the_others() {
    let mut world = World::new(2, 10 * US, GB);
    for comm in [1, 2] {
        world.comm(comm);
        world.post(comm, 8 << 20).unwrap();
        world.send(comm, 8 << 20).unwrap();
    }
    world.run(500 * US, |_| false);
    world.lanes[0].close(1, Side::Send);
    assert!(world.run(Duration::from_secs(1), |w| w.sent.len() == 1
        && !w.failed.is_empty()));
    assert_eq!(world.failed, [(1, 1, Side::Receive)]);
    world.lanes[1].close(1, Side::Receive);
    world.lanes[1].close(2, Side::Receive);
    world.lanes[0].close(2, Side::Send);
    world.run(Duration::from_millis(50), |_| false);
    assert!(world.lanes.iter().all(Lane::is_idle));
}

#[test]
fn idle_lanes_are_quiet() {
    let mut world = World::new(8, 10 * US, GB);
    world.comm(1);
    world.run(Duration::from_millis(1500), |_| false);
    let mut wakes = 0;
    world.run(Duration::from_secs(10), |_| {
        wakes += 1;
        false
    });
    // Pings and pongs once a second a path and end, not a hundred times.
    assert!(wakes < 10 * 8 * 2 * 6, "{wakes}");
    assert!(world.died.is_empty() && world.suspected == 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_mix_of_sizes_and_orders_arrives(
        sizes in prop::collection::vec((0u64..200_000, 0u64..5_000, any::<bool>(), 0u64..3), 1..60),
        paths in 1usize..5,
        latency in 1u32..2000,
    ) {
        let mut world = World::new(paths, US * latency, GB);
        for comm in 0..3 {
            world.comm(comm);
        }
        let count = sizes.len();
        for (length, spare, send_first, comm) in sizes {
            // Half of the sizes are small, so that eager slots are used and run out.
            let length = if spare % 2 == 0 { length } else { length % 1500 };
            if send_first {
                world.send(comm, length).unwrap();
                world.run(US * (spare as u32 % 300), |_| false);
                world.post(comm, length + spare).unwrap();
            } else {
                world.post(comm, length + spare).unwrap();
                world.run(US * (spare as u32 % 300), |_| false);
                world.send(comm, length).unwrap();
            }
        }
        prop_assert!(world.run(Duration::from_secs(5), |w| w.sent.len() == count));
        prop_assert_eq!(world.received.len(), count);
        prop_assert!(world.failed.is_empty());
    }
}
