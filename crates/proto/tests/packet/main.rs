//! The packet protocol in virtual time: all bytes arrive once and in place whatever the network does,
//! and nothing is taken from one who has not the key. How fast it is: `--example packet_table`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    dead_code,
    reason = "a test may panic"
)]

mod attacks;
mod beside;
mod cubic;
mod dark;
mod endings;
mod fabrics;
mod host;
mod model;
mod scenario;

use std::rc::Rc;
use std::time::Duration;

use evener_proto::packet::trace::{Cause, Note, What};
use evener_proto::packet::{Config, Event, Over};
use proptest::prelude::*;

use beside::Beside;
use host::{Flow, Host};
use model::{Link, Net};
use scenario::{MILLI, flows, pair};

/// What a network does to packets.
#[derive(Debug, Clone)]
struct Weather {
    bits: f64,
    delay: u64,
    loss: f64,
    duplicates: f64,
    overtaken: f64,
    hold: u64,
    queue: f64,
}

fn weather() -> impl Strategy<Value = Weather> {
    let rate = prop_oneof![Just(5e7), Just(1e9), Just(1e10)];
    let share = || prop_oneof![Just(0.0), 0.0..0.1];
    (
        rate,
        1u64..2000,
        share(),
        share(),
        share(),
        1u64..3000,
        6_000.0..400_000.0,
    )
        .prop_map(
            |(bits, delay, loss, duplicates, overtaken, hold, queue)| Weather {
                bits,
                delay,
                loss,
                duplicates,
                overtaken,
                hold,
                queue,
            },
        )
}

fn apply(link: &mut Link, weather: &Weather) {
    link.rate = weather.bits / 8.0;
    link.delay = Duration::from_micros(weather.delay);
    (link.loss, link.duplicates) = (weather.loss, weather.duplicates);
    (link.overtaken, link.hold) = (weather.overtaken, Duration::from_micros(weather.hold));
    link.queue = weather.queue;
}

/// What happens at a time, in milliseconds.
#[derive(Debug, Clone)]
enum Fault {
    Dead(usize, u64),
    Delay(usize, u64),
    /// A process stops for so long.
    Sleep(usize, u64),
    /// A clock jumps forward, as a suspended machine's does.
    Jump(usize, u64),
}

fn fault() -> impl Strategy<Value = (u64, Fault)> {
    let what = prop_oneof![
        (0usize..6, 1u64..100).prop_map(|(link, time)| Fault::Dead(link, time)),
        (0usize..6, 0u64..5000).prop_map(|(link, micros)| Fault::Delay(link, micros)),
        (0usize..2, 1u64..100).prop_map(|(end, time)| Fault::Sleep(end, time)),
        (0usize..2, 1u64..900).prop_map(|(end, time)| Fault::Jump(end, time)),
    ];
    (0u64..60, what)
}

fn count(net: &mut Net, end: usize, want: impl Fn(&Event) -> bool) -> usize {
    net.end::<Host>(end)
        .events
        .iter()
        .filter(|event| want(event))
        .count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    /// Three paths each way, of any kind, with any faults: each message arrives once, its bytes are
    /// those that went, and its sender is told once.
    #[test]
    fn all_bytes_arrive_once_and_in_place(
        weathers in prop::collection::vec(weather(), 6),
        lengths in prop::collection::vec((0u64..200_000, 1u64..6), 1..4),
        back in 0u64..50_000, faults in prop::collection::vec(fault(), 0..5), seed in any::<u64>(),
        used in 1usize..20, wraps in any::<bool>(),
    ) {
        let first_number = if wraps { u64::from(u32::MAX) - 20 } else { 0 };
        let config = Config { used, paths: used + 8, first_number, ..Config::default() };
        let mut net = pair(&[1e9; 3], &config, seed);
        for (link, weather) in net.links.iter_mut().zip(&weathers) {
            apply(link, weather);
        }
        let mut messages = 0;
        for (channel, (length, left)) in lengths.iter().enumerate() {
            let flow = Flow { channel: channel as u32, length: *length, ahead: 2, every: None, left: *left };
            flows(&mut net, 0, 1, flow);
            messages += *left as usize;
        }
        flows(&mut net, 1, 0, Flow { channel: 9, length: back, ahead: 2, every: None, left: 3 });
        net.end::<Host>(0).memory = Some(Default::default());
        net.end::<Host>(1).memory = Some(Default::default());
        let mut faults = faults;
        faults.sort_by_key(|(at, _)| *at);
        let mut healing = Vec::new();
        for (at, fault) in faults {
            net.run_until((at as u32 * MILLI).max(net.now));
            match fault {
                Fault::Dead(link, time) => {
                    net.links[link].dead = true;
                    healing.push((net.now + time as u32 * MILLI, link));
                }
                Fault::Delay(link, micros) => net.links[link].delay = Duration::from_micros(micros),
                Fault::Sleep(end, time) => net.end::<Host>(end).asleep = net.now + time as u32 * MILLI,
                Fault::Jump(end, time) => net.end::<Host>(end).clock += time as u32 * MILLI,
            }
        }
        healing.sort();
        for (at, link) in healing {
            net.run_until(at.max(net.now));
            net.links[link].dead = false;
        }
        let received = |event: &Event| matches!(event, Event::Received { .. });
        let sent = |event: &Event| matches!(event, Event::Sent { .. });
        let end = net.now + 20_000 * MILLI;
        while net.now < end && (count(&mut net, 0, sent) < messages || count(&mut net, 1, sent) < 3) {
            net.run_until(net.now + 20 * MILLI);
        }
        net.run_until(net.now + 50 * MILLI);
        prop_assert_eq!(count(&mut net, 0, sent), messages, "at {:?}", net.now);
        prop_assert_eq!(count(&mut net, 1, received), messages);
        prop_assert_eq!((count(&mut net, 1, sent), count(&mut net, 0, received)), (3, 3));
        for end in 0..2 {
            let host = net.end::<Host>(end);
            prop_assert_eq!(host.wrong, 0);
            let stats = host.stats();
            // Who has heard no packet before the wrap (all were lost) cannot know of it: the next ones are
            // refused, and go again. Connections begin at 0; only these tests begin just before a wrap.
            let forged = if wraps { 0 } else { stats.forged };
            prop_assert_eq!((forged, stats.malformed, stats.not_posted), (0, 0, 0), "{:?}", stats);
        }
    }
}

/// Numbers pass 2^32 in the middle of a transfer with losses.
#[test]
fn packet_numbers_wrap() {
    let config = Config {
        first_number: u64::from(u32::MAX) - 300,
        ..Config::default()
    };
    let mut net = pair(&[1e9], &config, 3);
    net.links[0].loss = 0.02;
    net.end::<Host>(0).memory = Some(Default::default());
    net.end::<Host>(1).memory = Some(Default::default());
    flows(
        &mut net,
        0,
        1,
        Flow {
            channel: 1,
            length: 1 << 20,
            ahead: 2,
            every: None,
            left: 4,
        },
    );
    net.run_until(200 * MILLI);
    assert_eq!(
        count(&mut net, 0, |event| matches!(event, Event::Sent { .. })),
        4
    );
    assert_eq!(net.end::<Host>(1).wrong, 0);
}

/// A message that is longer than its buffer fails on both sides, and the next ones go.
#[test]
fn a_message_that_is_too_long_is_refused() {
    let mut net = pair(&[1e9], &Config::default(), 3);
    net.end::<Host>(0).memory = Some(Default::default());
    net.end::<Host>(1).memory = Some(Default::default());
    let flow = |channel, length| Flow {
        channel,
        length,
        ahead: 1,
        every: None,
        left: 1,
    };
    net.end::<Host>(0).sends = vec![flow(1, 5000), flow(2, 5000)];
    net.end::<Host>(1).posts = vec![flow(1, 4999), flow(2, 6000)];
    net.run_until(50 * MILLI);
    let refused = Event::TooLong {
        channel: 1,
        message: 0,
        length: 5000,
        room: 4999,
    };
    for end in 0..2 {
        assert_eq!(count(&mut net, end, |event| *event == refused), 1);
    }
    let got = Event::Received {
        channel: 2,
        message: 0,
        length: 5000,
    };
    assert_eq!(count(&mut net, 1, |event| *event == got), 1);
}

/// Larger packets are found where they come through, and small ones stay where they do not.
#[test]
fn the_mtu_of_a_path_is_found() {
    for (mtu, want) in [(1500, 1472), (3498, 3470), (9000, 8972)] {
        let config = Config {
            datagram: 1372,
            most_datagram: 8972,
            ..Config::default()
        };
        let mut net = pair(&[1e10], &config, 1);
        net.links.iter_mut().for_each(|link| link.mtu = mtu);
        flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
        net.run_until(100 * MILLI);
        assert_eq!(
            net.end::<Host>(0).connection.as_ref().unwrap().datagram(),
            want
        );
    }
}

/// Where large packets begin to vanish and small ones come through, small ones carry.
#[test]
fn packets_become_smaller_where_large_ones_vanish() {
    let mut net = pair(&[1e9; 4], &Config::default(), 1);
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    net.run_until(50 * MILLI);
    net.links.iter_mut().for_each(|link| link.mtu = 1300);
    net.run_until(1000 * MILLI);
    let size = |net: &mut Net| net.end::<Host>(0).connection.as_ref().unwrap().datagram();
    assert_eq!(size(&mut net), evener_proto::packet::mtu::LEAST);
    let before = net.end::<Host>(1).placed;
    net.run_until(1100 * MILLI);
    assert!(net.end::<Host>(1).placed - before > 10 << 20);
}

/// A silent peer ends the connection after its patience and not before; so does a close, at once.
#[test]
fn silence_and_close_end_a_connection() {
    let config = Config {
        patience: 500 * MILLI,
        ..Config::default()
    };
    let mut net = pair(&[1e9; 2], &config, 5);
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    net.run_until(50 * MILLI);
    net.links.iter_mut().for_each(|link| link.dead = true);
    net.run_until(540 * MILLI);
    assert_eq!(net.end::<Host>(0).connection.as_ref().unwrap().over(), None);
    net.run_until(700 * MILLI);
    for end in 0..2 {
        let over = Event::Over(Over::Silent);
        assert_eq!(count(&mut net, end, |event| *event == over), 1, "{end}");
    }
    let mut net = pair(&[1e9], &Config::default(), 5);
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    net.run_until(50 * MILLI);
    net.end::<Host>(0).connection.as_mut().unwrap().close();
    net.poke(0);
    net.run_until(60 * MILLI);
    let over = Event::Over(Over::ByPeer);
    assert_eq!(count(&mut net, 1, |event| *event == over), 1);
}

/// A busy connection with nothing in flight wakes nobody: it has no deadline but the one that keeps a
/// waiting receiver alive.
#[test]
fn an_idle_connection_sleeps() {
    let mut net = pair(&[1e9], &Config::default(), 5);
    flows(
        &mut net,
        0,
        1,
        Flow {
            channel: 1,
            length: 1 << 20,
            ahead: 1,
            every: None,
            left: 2,
        },
    );
    net.run_until(500 * MILLI);
    let before = net.end::<Host>(0).stats().sent + net.end::<Host>(1).stats().sent;
    net.run_until(10_000 * MILLI);
    let after = net.end::<Host>(0).stats().sent + net.end::<Host>(1).stats().sent;
    assert!(after - before < 3, "{before} {after}");
    assert_eq!(
        net.end::<Host>(0).connection.as_mut().unwrap().deadline(),
        None
    );
}

/// What the issue asks of black holes, in virtual time; the rest of the table takes longer.
#[test]
fn a_black_hole_costs_less_than_50_ms() {
    for seed in 0..4 {
        let (longest, gap) = scenario::black_hole(2.5e8, &Config::default(), seed);
        assert!(
            longest < 50 * MILLI && gap < 50 * MILLI,
            "{seed}: {longest:?} {gap:?}"
        );
    }
    let healed = scenario::outage(2.5e8, &Config::default(), 1, 300 * MILLI);
    assert!(healed < 50 * MILLI, "{healed:?}");
}

/// Where a packet takes half a millisecond, and where a sender's part is less than one in flight.
#[test]
fn slow_links_are_filled() {
    let config = Config::default();
    let share = scenario::goodput(&[2.5e7; 4], 0.0, &config, 1, false);
    assert!(share > 0.95, "{share}");
    let (share, ..) = scenario::incast(8, 1e8, &config, 4);
    assert!(share > 0.9, "{share}");
}

/// Those of the twenty-four networks that cost little. All of them: `--example packet_fabrics`.
#[test]
fn networks_of_any_delay_are_filled() {
    for (at, fabric) in fabrics::all().iter().enumerate() {
        if !fabric.quick {
            continue;
        }
        let name = &fabric.name;
        let reached = fabrics::run(fabric, at as u64, Config::default()).expect(name);
        assert!(reached.share >= 0.92, "{name}: {reached:?}");
        assert!(reached.late < 0.01, "{name}: {reached:?}");
        if let Some(part) = reached.part {
            assert!((0.33..=0.67).contains(&part), "{name}: {reached:?}");
        }
    }
}

/// An all-reduce is always both ways: acknowledgements stand behind the other direction's packets. Over
/// one connection, and over one each way as the engine has it.
#[test]
fn both_ways_are_filled() {
    let config = Config::default();
    let share = scenario::goodput(&[1e9], 0.0, &config, 1, true);
    assert!(share > 0.95, "{share}");
    let (share, _) = scenario::threads(1e9, &config, 1, (Duration::ZERO, Duration::ZERO));
    assert!(share > 0.95, "{share}");
}

/// The second of two jobs takes the first one's queue for the length of the way, until they drain
/// together; at 100 Mb/s they take each other for TCP as well.
#[test]
fn two_jobs_find_the_same_way() {
    let config = Config::default();
    let starts = [100, 137, 174, 211, 248, 285];
    let parts = starts.map(|later| scenario::two_jobs(1e8, &config, 5, MILLI * later).0);
    let apart: f64 = parts.iter().map(|part| (part - 0.5).abs() / 6.0).sum();
    assert!(apart < 0.06, "{parts:?}");
}

/// Cubic keeps queues of five milliseconds around the target here, and one of ten times that never empty.
#[test]
fn beside_cubic_it_has_its_part() {
    for (queue, count, cubic_first) in [(0.25, 4, true), (0.25, 4, false), (1.0, 1, true)] {
        let cell = Beside {
            bits: 1e8,
            round_trip: MILLI * 20,
            queue,
            count,
            cubic_first,
            control: false,
        };
        let (part, least, link) = beside::beside(&cell, Config::default(), 6, cell.time());
        let all = (count + 1) as f64;
        assert!((0.5..2.0).contains(&(part * all)), "{cell:?}: {part}");
        assert!(
            least * all >= 0.5 && link >= 0.92,
            "{cell:?}: {least}, {link}"
        );
    }
}

/// One of two ways back is dead, and all ways there are sound: acknowledgements leave it. As long as they do
/// not, what only waits for one looks lost, and its path silent.
#[test]
fn acknowledgements_leave_a_way_back_that_is_dead() {
    for seed in 0..4 {
        let mut net = pair(&[1e8; 2], &Config::default(), seed);
        flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
        net.run_until(100 * MILLI);
        net.links[3].dead = true;
        net.run_until(300 * MILLI);
        let before = net.end::<Host>(0).stats();
        net.run_until(1300 * MILLI);
        let after = net.end::<Host>(0).stats();
        let silences = after.silences - before.silences;
        assert!(silences < 10, "{seed}: {silences}");
    }
}

/// Where each thread runs for 0.3 ms and waits 5 ms for a processor, that is no queue of the network's: the
/// windows are for what the network holds, whatever the threads do. 20 messages there and 20 back, one at a time,
/// and 20 each way at once took 30 s, and take 13.
#[test]
fn threads_that_wait_for_processors_do_not_shrink_windows() {
    let config = Config::default();
    let busy = scenario::Busy {
        runs: MILLI * 3 / 10,
        waits: 5 * MILLI,
    };
    for seed in 0..4 {
        let limit = Duration::from_secs(100);
        let took = scenario::exchange(&[2.5e7; 4], &config, busy, seed, (20, 20), limit);
        let (alone, together, longest) = took.expect("it ends");
        let all = alone + together;
        assert!(
            all < Duration::from_secs(17),
            "{seed}: {alone:?} {together:?}"
        );
        assert!(longest < 500 * MILLI, "{seed}: {longest:?}");
    }
}

/// What one of these paths carries of what it can, after faults at these times (milliseconds): links there
/// that are dead from then on, and as many back.
fn carried_after(bits: &[f64], faults: &[(u32, &[usize])], at: usize, seed: u64) -> f64 {
    let mut net = pair(bits, &Config::default(), seed);
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    for (time, dead) in faults {
        net.run_until(*time * MILLI);
        for (place, link) in net.links.iter_mut().enumerate() {
            link.dead = dead.contains(&(place % bits.len()));
        }
    }
    // By then it was asked again, and its windows have grown.
    net.run_until(net.now + 4000 * MILLI);
    let before = net.links[at].carried;
    net.run_until(net.now + 500 * MILLI);
    assert_eq!(net.end::<Host>(1).wrong, 0);
    (net.links[at].carried - before) as f64 / (bits[at] / 8.0 * 0.5)
}

/// Its ports take back their places from those that stood in for them.
#[test]
fn a_path_that_is_repaired_is_used_again() {
    for seed in 0..5 {
        let all: (u32, &[usize]) = (300, &[0, 1]);
        let share = carried_after(&[2e7; 2], &[all, (1300, &[1]), (2300, &[])], 1, seed);
        assert!(
            share > 0.7,
            "both dead, one back, then both: {share}, seed {seed}"
        );
        let share = carried_after(&[2e7; 4], &[(300, &[2]), (2300, &[])], 2, seed);
        assert!(share > 0.7, "one of four: {share}, seed {seed}");
    }
}

/// A card that comes later: half of the paths led nowhere from the start, and then they have another way. The
/// part of that link that is used, if the connection is told of it or not.
fn carried_by_a_link_that_comes(told: bool, seed: u64) -> f64 {
    let config = Config::default();
    let link = || Link::new(2e7, MILLI);
    let mut net = Net::new(vec![link(), link(), link()], seed);
    let there = |port: u8| Rc::from([usize::from(port % 2)]);
    net.add(Box::new(Host::new(true, config.clone(), seed, 1, there)));
    net.add(Box::new(Host::new(false, config, seed + 1, 0, |_| {
        Rc::from([2])
    })));
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    net.links[1].dead = true;
    net.run_until(2000 * MILLI);
    net.links[1].dead = false;
    let now = net.now;
    if told {
        let connection = net.end::<Host>(0).connection.as_mut().expect("it is open");
        connection.renewed((1..=u8::MAX).step_by(2), now);
    }
    net.run_until(now + 4000 * MILLI);
    let before = net.links[1].carried;
    net.run_until(net.now + 500 * MILLI);
    assert_eq!(net.end::<Host>(1).wrong, 0);
    (net.links[1].carried - before) as f64 / (2e7 / 8.0 * 0.5)
}

#[test]
fn paths_with_another_way_are_used() {
    for seed in 0..5 {
        let share = carried_by_a_link_that_comes(true, seed);
        assert!(share > 0.7, "{share}, seed {seed}");
        let share = carried_by_a_link_that_comes(false, seed);
        assert!(share < 0.1, "nobody has said it: {share}, seed {seed}");
    }
}

/// A peer that has no processor for 5 ms says nothing over any path. What is on its way to it has arrived: almost
/// nothing goes again.
#[test]
fn a_peer_without_a_processor_is_no_dead_network() {
    for bits in [1e8, 1e9, 1e10] {
        let mut net = pair(&[bits / 4.0; 4], &Config::default(), 4);
        flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
        net.run_until(300 * MILLI);
        let before = net.end::<Host>(0).stats();
        for sleep in 0..20 {
            let now = net.now;
            net.end::<Host>(1).nap(now, 5 * MILLI);
            net.run_until((330 + 30 * sleep) * MILLI);
        }
        let after = net.end::<Host>(0).stats();
        let again = after.timed_out - before.timed_out;
        assert!(again <= 2 * 20, "{bits}: {again}");
    }
}

#[test]
fn losses_do_not_slow_it() {
    let config = Config::default();
    let clean = scenario::goodput(&[2e8], 0.0, &config, 1, false);
    assert!(clean > 0.95, "{clean}");
    for (loss, want) in [(0.001, 0.9), (0.01, 0.75)] {
        let share = scenario::goodput(&[2e8], loss, &config, 2, false) / clean;
        assert!(share > want, "{loss}: {share}");
    }
}

/// The last packets of a run over one path have nothing later of their path behind them: other paths'
/// packets tell that they are lost, and the path has not to be silent for that.
#[test]
fn what_is_lost_at_the_end_of_a_run_is_told_by_other_paths() {
    let mut net = pair(&[1e10], &Config::default(), 2);
    net.links[0].loss = 0.01;
    flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
    net.run_until(100 * MILLI);
    let stats = net.end::<Host>(0).stats();
    assert!(stats.lost > 500, "{stats:?}");
    assert!(stats.timed_out * 200 < stats.lost, "{stats:?}");
}

/// Paths of lengths from 25 us to 1 ms, whose packets overtake each other: almost none is taken for lost.
#[test]
fn packets_that_are_only_late_are_not_sent_again() {
    for bits in [1e8, 1e9, 1e10] {
        let mut net = pair(&[bits / 4.0; 4], &Config::default(), 3);
        for (link, delay) in net.links.iter_mut().zip([25, 300, 1000, 25].repeat(2)) {
            link.delay = Duration::from_micros(delay);
            (link.overtaken, link.hold) = (0.05, Duration::from_micros(100));
        }
        flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
        net.run_until(300 * MILLI);
        let stats = net.end::<Host>(0).stats();
        assert!(stats.late * 200 < stats.sent, "{bits}: {stats:?}");
    }
}

/// What a trace says is what was counted, and who looks changes nothing.
#[test]
fn a_trace_says_what_was_counted_and_changes_nothing() {
    let run = |traced: bool| {
        let mut net = pair(&[2e8; 3], &Config::default(), 5);
        net.links.iter_mut().for_each(|link| link.loss = 0.01);
        net.end::<Host>(0).notes = traced.then(Default::default);
        flows(&mut net, 0, 1, scenario::bulk(1, 1 << 20));
        net.run_until(60 * MILLI);
        net.links[1].dead = true;
        net.run_until(200 * MILLI);
        let end = net.end::<Host>(0);
        (end.stats(), end.notes.take().unwrap_or_default())
    };
    let (stats, (notes, missed)) = run(true);
    assert_eq!((stats, missed), (run(false).0, 0));
    assert!(notes.is_sorted_by_key(|note| note.at));
    let count =
        |want: fn(&What) -> bool| notes.iter().filter(|note| want(&note.what)).count() as u64;
    let by_order = count(|what| {
        matches!(
            what,
            What::Lost {
                cause: Cause::Order,
                ..
            }
        )
    });
    assert_eq!(by_order, stats.lost);
    let by_silence = count(|what| {
        matches!(
            what,
            What::Lost {
                cause: Cause::Silence,
                ..
            }
        )
    });
    assert!(by_silence >= stats.timed_out && by_silence > 0);
    assert_eq!(
        count(|what| matches!(what, What::Silent { .. })),
        stats.silences
    );
    assert_eq!(
        count(|what| matches!(what, What::Replaced { .. })),
        stats.replaced
    );
    assert_eq!(
        count(|what| matches!(what, What::Arrived { late: true, .. })),
        stats.late
    );
    assert!(count(|what| matches!(what, What::Decided { .. })) > 0 && stats.replaced > 0);
    assert!(count(|what| matches!(what, What::Arrived { trip: Some(_), .. })) > 100);
    // Bytes that were confirmed are no more than were sent.
    let bytes = |note: &Note| match note.what {
        What::Arrived { size, .. } => u64::from(size),
        _ => 0,
    };
    let arrived: u64 = notes.iter().map(bytes).sum();
    assert!(arrived > stats.sent_bytes / 2 && arrived <= stats.sent_bytes);
}
