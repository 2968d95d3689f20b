//! Engines with AF_XDP in two namespaces that a veth pair joins; skipped where namespaces are not allowed.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};

use common::{finish, pair, until};
use evener_engine::comm::Comm;
use evener_engine::{Choice, Config, Engine, Memory, Slot};
use nodes::{Node, pair as namespaces};

mod common;
#[path = "../../xdp/tests/nodes/mod.rs"]
mod nodes;

type Said = Arc<Mutex<Vec<String>>>;

/// An engine in a namespace, and what it logs.
fn engine(node: &Node, name: &'static str, choice: Choice) -> (Engine, Said) {
    let said = Said::default();
    let log = said.clone();
    let engine = node.run(move || {
        let config = Config {
            engine: choice,
            interfaces: Some(name.into()),
            workers: 1,
            flows: 4,
            most_flows: 8,
            ..Config::default()
        };
        let log = move |_, text: &str| log.lock().unwrap().push(text.to_string());
        Engine::start(config, Box::new(log)).unwrap()
    });
    (engine, said)
}

fn post<'a>(engine: &Engine, comm: &'a Comm, bytes: &mut [u8]) -> &'a Slot {
    // SAFETY: the buffers are kept until the request is finished.
    until(|| unsafe { engine.post(comm, Memory::of(bytes)) }.unwrap())
}

/// Messages of many sizes, compared.
fn exchange(a: &Engine, b: &Engine) {
    for (from, to) in [(a, b), (b, a)] {
        let (send, receive) = pair(from, to);
        for length in [0, 1, 1431, 1432, 65_536, 300_000, 4 << 20] {
            let mut bytes: Vec<u8> = (0..length)
                .map(|at: usize| (at * 31 + length) as u8)
                .collect();
            let mut into = vec![0xee; length];
            let posted = post(to, &receive, &mut into);
            let sent = post(from, &send, &mut bytes);
            assert_eq!((finish(posted), finish(sent)), (length, length));
            assert!(bytes == into, "{length} bytes");
        }
        from.release(&send);
        to.release(&receive);
    }
}

/// Packets that a card sent, as its engine says at its end.
fn sent(said: &Said) -> Option<u64> {
    let lines = said.lock().unwrap();
    lines.iter().find_map(|line| {
        let (before, _) = line.split_once(" packets sent past the kernel")?;
        before.strip_prefix("xdp: ")?.parse().ok()
    })
}

#[test]
fn messages_arrive_past_the_kernel() {
    let Some((a, b)) = namespaces(1500) else {
        return;
    };
    let (one, at_a) = engine(&a, "va", Choice::Xdp);
    let (other, at_b) = engine(&b, "vb", Choice::Xdp);
    exchange(&one, &other);
    one.stop();
    other.stop();
    for said_here in [at_a, at_b] {
        let sent = sent(&said_here);
        // Each side sends 4.4 MiB in datagrams of 1500 bytes.
        assert!(
            sent.is_some_and(|sent| sent > 3000),
            "{sent:?} {said_here:?}"
        );
        let lines = said_here.lock().unwrap();
        assert!(
            lines.iter().any(|line| line.contains("native copy taken")),
            "{lines:?}"
        );
    }
}

#[test]
fn a_job_may_mix_engines() {
    let Some((a, b)) = namespaces(1500) else {
        return;
    };
    let (one, _) = engine(&a, "va", Choice::Xdp);
    for choice in [Choice::Udp, Choice::Tcp] {
        let (other, _) = engine(&b, "vb", choice);
        exchange(&one, &other);
        other.stop();
    }
}

#[test]
fn where_the_card_is_taken_udp_goes_on_and_it_is_said() {
    let Some((a, b)) = namespaces(1500) else {
        return;
    };
    let (first, _) = engine(&a, "va", Choice::Xdp);
    let (second, at_second) = engine(&a, "va", Choice::Xdp);
    let (other, _) = engine(&b, "vb", Choice::Xdp);
    exchange(&second, &other);
    exchange(&first, &other);
    let lines = at_second.lock().unwrap();
    let why =
        |line: &&String| line.contains("another XDP program") && line.ends_with("UDP is taken");
    assert_eq!(lines.iter().filter(why).count(), 1, "{lines:?}");
}

#[test]
fn paths_that_are_cut_cost_nothing_but_time_and_their_numbers_are_used_again() {
    let Some((a, b)) = namespaces(1500) else {
        return;
    };
    let (one, _) = engine(&a, "va", Choice::Xdp);
    let (other, _) = engine(&b, "vb", Choice::Xdp);
    let (send, receive) = pair(&one, &other);
    for round in 0..20usize {
        let mut bytes = vec![round as u8 + 1; 1 << 20];
        let mut into = vec![0; 1 << 20];
        let posted = post(&other, &receive, &mut into);
        let sent = post(&one, &send, &mut bytes);
        one.cut_paths(8);
        assert_eq!((finish(posted), finish(sent)), (1 << 20, 1 << 20));
        assert!(bytes == into);
    }
}
