//! Engines with AF_XDP in two namespaces that a veth pair joins; skipped where namespaces are not allowed.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};

use common::{finish, pair, until};
use evener_engine::comm::Comm;
use evener_engine::frames::{Framed, LENT_HEADERS, Lease, Wanted};
use evener_engine::{Choice, Config, Engine, Memory, Slot};
use nodes::{Node, pair as namespaces};

mod common;
#[path = "../../xdp/tests/nodes/mod.rs"]
mod nodes;

type Said = Arc<Mutex<Vec<String>>>;

/// An engine in a namespace, and what it logs.
fn engine(node: &Node, name: &'static str, choice: Choice) -> (Engine, Said) {
    framed_engine(node, name, choice, None)
}

/// The same with frames for callers.
fn framed_engine(
    node: &Node,
    name: &'static str,
    choice: Choice,
    frames: Option<Wanted>,
) -> (Engine, Said) {
    let said = Said::default();
    let log = said.clone();
    let engine = node.run(move || {
        let config = Config {
            engine: choice,
            frames,
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

/// Frames of one end's comm, of which each message takes a run.
struct Ends {
    lease: Lease,
    table: Vec<usize>,
    unit: usize,
}

const RUN: u32 = 300;
/// Payload of a frame: whole lines of 128 bytes, at an MTU of 1500.
const UNIT: usize = 1408;

impl Ends {
    fn new(engine: &Engine, comm: &Comm) -> Ends {
        let frames = engine.frames().unwrap();
        let unit = frames.unit();
        assert_eq!(usize::from(unit), UNIT);
        let lease = frames.lease(RUN, RUN).unwrap();
        assert!(engine.frame(comm, Framed { frames, unit }));
        Ends {
            lease,
            table: vec![0; RUN as usize],
            unit: unit.into(),
        }
    }

    /// Puts a message into the frames, as a device would.
    fn fill(&self, bytes: &[u8]) {
        for (at, part) in bytes.chunks(self.unit).enumerate() {
            let to = (self.lease.at(at) + LENT_HEADERS) as *mut u8;
            // SAFETY: the frames are this end's, and hold a unit each.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
        }
    }

    /// What the table names, of a message that has come; the frames are given back.
    fn gather(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for at in &self.table[..length.div_ceil(self.unit)] {
            let part = self.unit.min(length - bytes.len());
            // SAFETY: the engine said that this many bytes are there, in a frame that is this end's.
            bytes.extend(unsafe { std::slice::from_raw_parts(*at as *const u8, part) });
        }
        let table = self.table.iter_mut().map(std::mem::take);
        self.lease
            .frames()
            .give_back(table.filter(|at| *at != 0).collect::<Vec<_>>());
        bytes
    }

    fn memory(&mut self, side: usize, length: usize) -> Memory {
        let table = self.table.as_mut_ptr().cast();
        let start = [self.lease.at(0) as *mut u8, table][side];
        Memory { start, length }
    }
}

/// Sends messages in frames; after each `fault` may do something to the engines.
fn through_frames(a: &Engine, b: &Engine, rounds: usize, mut fault: impl FnMut(usize)) {
    let (send, receive) = pair(a, b);
    let (mut from, mut to) = (Ends::new(a, &send), Ends::new(b, &receive));
    for round in 0..rounds {
        for length in [1, UNIT, UNIT + 1, 65_536, 300 * UNIT, 0, 400_000] {
            let bytes: Vec<u8> = (0..length)
                .map(|at: usize| (at * 31 + length + round * 7) as u8)
                .collect();
            from.fill(&bytes);
            let (out, into) = (from.memory(0, length), to.memory(1, length));
            // SAFETY: frames and table live until the request is finished.
            let posted = until(|| unsafe { b.post(&receive, into) }.unwrap());
            // SAFETY: as above.
            let sent = until(|| unsafe { a.post(&send, out) }.unwrap());
            fault(round);
            assert_eq!((finish(posted), finish(sent)), (length, length));
            assert!(to.gather(length) == bytes, "{length} bytes");
        }
    }
    a.release(&send);
    b.release(&receive);
}

fn framed_pair() -> Option<((Node, Node), (Engine, Engine))> {
    let wanted = Some(Wanted {
        send: RUN + 50,
        receive: RUN,
    });
    let (a, b) = namespaces(1500)?;
    let [one, other] = [(&a, "va"), (&b, "vb")].map(|(node, name)| {
        let (engine, said) = framed_engine(node, name, Choice::Xdp, wanted);
        assert!(engine.frames().is_some(), "{:?}", said.lock().unwrap());
        engine
    });
    Some(((a, b), (one, other)))
}

/// Not one byte of payload is copied by this process, in many times as many packets as there are frames.
#[test]
fn payload_stays_in_frames_from_end_to_end() {
    let Some((_nodes, (one, other))) = framed_pair() else {
        return;
    };
    through_frames(&one, &other, 12, |_| {});
    through_frames(&other, &one, 12, |_| {});
    let payload: usize = [1, UNIT, UNIT + 1, 65_536, 300 * UNIT, 400_000]
        .iter()
        .sum();
    let payload = payload as u64;
    for engine in [&one, &other] {
        engine.stop();
        let [[out, back], copied] = engine.bare();
        assert_eq!(copied, [0, 0]);
        assert!(out >= 12 * payload, "{out} of {payload}");
        assert_eq!(back, 12 * payload, "what came twice was not kept");
    }
}

/// Paths that die while frames are on their way: all bytes arrive, and frames come back.
#[test]
fn frames_outlive_their_paths() {
    let Some((_nodes, (one, other))) = framed_pair() else {
        return;
    };
    through_frames(&one, &other, 12, |round| {
        if round % 2 == 0 {
            one.cut_paths(3);
        }
    });
    through_frames(&one, &other, 2, |_| {});
    assert_eq!(other.bare()[1][1], 0);
}

/// A comm that ends in the middle gives back the frames of what had come.
#[test]
fn what_came_of_a_comm_that_ends_is_given_back() {
    let Some((_nodes, (one, other))) = framed_pair() else {
        return;
    };
    for _ in 0..30 {
        let (send, receive) = pair(&one, &other);
        let (mut from, mut to) = (Ends::new(&one, &send), Ends::new(&other, &receive));
        let (out, into) = (from.memory(0, 300 * UNIT), to.memory(1, 300 * UNIT));
        // SAFETY: frames and table live until both comms are released.
        until(|| unsafe { other.post(&receive, into) }.unwrap());
        // SAFETY: as above.
        until(|| unsafe { one.post(&send, out) }.unwrap());
        until(|| (to.table[20] != 0).then_some(()));
        other.release(&receive);
        one.release(&send);
        if let Some(at) = to.table.iter().find(|at| **at != 0) {
            // It had come whole, and is the caller's.
            assert!(to.table.iter().all(|at| *at != 0), "{at}");
            to.gather(300 * UNIT);
        }
    }
    // There are still as many as ever.
    through_frames(&one, &other, 20, |_| {});
    assert_eq!(other.bare()[1][1], 0);
}
