//! Anything a peer may say. A lane hears frames that no rule allows in this order, between calls of
//! its own side, and must neither panic, nor grow without bound, nor finish a message twice or name
//! memory that was not posted.
//!
//! 256 cases in `cargo test`; more by `PROPTEST_CASES=1000000 cargo test --release -p evener-proto
//! --test fuzz`, which is the fuzz target of this crate.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashSet;
use std::time::Duration;

use evener_proto::path::Report;
use evener_proto::wire::HEADER;
use evener_proto::{Event, Frame, Lane, LaneConfig, PathId, Place, Side};
use proptest::prelude::*;

/// Numbers near what exists, and some that are far from it.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..4, 1 => 60u64..70, 1 => any::<u64>()]
}

fn frame() -> impl Strategy<Value = Frame> {
    let length = prop_oneof![0u32..5, 1000u32..1030, Just(1 << 20)];
    prop_oneof![
        (number(), number()).prop_map(|(comm, listener)| Frame::Open { comm, listener }),
        (number(), any::<bool>()).prop_map(|(comm, accepted)| Frame::Opened { comm, accepted }),
        (
            (number(), number(), number(), length.clone(), number()),
            (any::<u32>(), any::<u32>())
        )
            .prop_map(|((comm, message, offset, length, more), (stamp, heard))| {
                Frame::Chunk {
                    comm,
                    message,
                    offset,
                    length,
                    total: offset
                        .saturating_add(u64::from(length))
                        .saturating_add(more),
                    stamp,
                    heard,
                }
            }),
        any::<u32>().prop_map(|heard| Frame::Heard { heard }),
        (number(), number(), number()).prop_map(|(comm, message, room)| Frame::Credit {
            comm,
            message,
            room
        }),
        (number(), number(), any::<u64>()).prop_map(|(comm, floor, beyond)| Frame::Ack {
            comm,
            floor,
            beyond
        }),
        (number(), number(), number(), number()).prop_map(|(comm, message, total, room)| {
            Frame::Refuse {
                comm,
                message,
                total,
                room,
            }
        }),
        number().prop_map(|comm| Frame::CloseSend { comm }),
        number().prop_map(|comm| Frame::CloseReceive { comm }),
        (number(), any::<bool>()).prop_map(|(comm, of_send)| Frame::Closed { comm, of_send }),
        any::<u64>().prop_map(|stamp| Frame::Ping { stamp }),
        any::<u64>().prop_map(|stamp| Frame::Pong { stamp }),
        number().prop_map(|path| Frame::Gone { path }),
    ]
}

#[derive(Debug, Clone)]
enum Act {
    Hear(u64, Frame),
    /// The bytes of a header, some of them changed.
    HearBroken(u64, Frame, Vec<(usize, u8)>),
    Send(u64, u64),
    Post(u64, u64),
    Open(u64),
    Up(u64),
    Down(u64),
    Report(u64, bool, u64),
    Pull(u64),
    Close(u64, bool),
    Wait(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let small = 0u64..4;
    prop_oneof![
        12 => (small.clone(), frame()).prop_map(|(path, frame)| Act::Hear(path, frame)),
        2 => (small.clone(), frame(), prop::collection::vec((0..HEADER, any::<u8>()), 1..4))
            .prop_map(|(path, frame, changes)| Act::HearBroken(path, frame, changes)),
        3 => (small.clone(), 0u64..3000).prop_map(|(comm, length)| Act::Send(comm, length)),
        3 => (small.clone(), 0u64..3000).prop_map(|(comm, room)| Act::Post(comm, room)),
        1 => small.clone().prop_map(Act::Open),
        2 => small.clone().prop_map(Act::Up),
        1 => small.clone().prop_map(Act::Down),
        2 => (small.clone(), any::<bool>(), any::<u64>())
            .prop_map(|(path, unconfirmed, bytes)| Act::Report(path, unconfirmed, bytes)),
        4 => small.clone().prop_map(Act::Pull),
        1 => (small, any::<bool>()).prop_map(|(comm, send)| Act::Close(comm, send)),
        2 => (0u64..3000).prop_map(Act::Wait),
    ]
}

/// A lane and what its own side knows.
struct Node {
    lane: Lane,
    now: Duration,
    posted: HashSet<(u64, u64)>,
    finished: HashSet<(bool, u64, u64)>,
    /// Numbers of comms are never used twice.
    used: HashSet<(bool, u64)>,
}

impl Node {
    fn hear(&mut self, path: u64, frame: &Frame) {
        let heard = self.lane.receive(PathId(path), frame, self.now, self.now);
        if let Frame::Chunk {
            comm,
            message,
            offset,
            length,
            ..
        } = *frame
            && heard.is_ok()
        {
            if self.lane.place(comm, message) == Place::Buffer {
                assert!(self.posted.contains(&(comm, message)), "{comm} {message}");
            }
            self.events();
            self.lane.filled(comm, message, offset, length);
        }
        self.events();
    }

    fn events(&mut self) {
        while let Some(event) = self.lane.event() {
            let once = match event {
                Event::Sent { comm, message, .. } => (true, comm, message),
                Event::Received { comm, message, .. } | Event::Deliver { comm, message, .. } => {
                    assert!(self.posted.contains(&(comm, message)));
                    (false, comm, message)
                }
                Event::Failed { comm, side, .. } => {
                    self.lane.close(comm, side);
                    continue;
                }
                Event::Open { comm, listener } => {
                    if listener == 0 && self.used.insert((false, comm)) {
                        self.lane.add_receive(comm, self.now);
                        self.lane.accept(comm);
                    } else {
                        self.lane.decline(comm);
                    }
                    continue;
                }
                _ => continue,
            };
            assert!(self.finished.insert(once), "twice: {once:?}");
        }
    }

    fn perform(&mut self, act: Act) {
        match act {
            Act::Hear(path, frame) => self.hear(path, &frame),
            Act::HearBroken(path, frame, changes) => {
                let mut bytes = frame.emit();
                for (at, value) in changes {
                    bytes[at] = value;
                }
                // Most are refused by their check; what is not is a frame like any other.
                if let Ok(frame) = Frame::parse(&bytes) {
                    self.hear(path, &frame);
                }
            }
            Act::Send(comm, length) => {
                self.lane.send(comm, length);
            }
            Act::Post(comm, room) => {
                if let Some(message) = self.lane.post(comm, room) {
                    self.posted.insert((comm, message));
                }
                // An eager message may have been waiting for it: it is told after the post.
            }
            Act::Open(comm) => {
                if self.used.insert((true, comm)) {
                    self.lane.add_send(comm, Some(0), self.now);
                }
            }
            Act::Up(path) => self.lane.path_up(PathId(path), self.now),
            Act::Down(path) => self.lane.path_down(PathId(path), self.now),
            Act::Report(path, unconfirmed, bytes) => {
                let report = Report {
                    unconfirmed,
                    advanced: bytes % 2 == 0,
                    lossy: false,
                    rtt: Some(Duration::from_micros(bytes % 100_000)),
                    rate: Some(bytes as f64),
                };
                self.lane.report(PathId(path), &report, self.now);
                self.lane.delivered(PathId(path), bytes, self.now);
                let _ = self.lane.fill(PathId(path), bytes);
            }
            Act::Pull(path) => {
                // What there is to say is bounded: messages, credits and answers of four comms.
                for _ in 0..4000 {
                    if self.lane.transmit(PathId(path), self.now).is_none() {
                        return;
                    }
                }
                panic!("a path pulls without end");
            }
            Act::Close(comm, send) => {
                let side = if send { Side::Send } else { Side::Receive };
                self.lane.close(comm, side);
            }
            Act::Wait(milliseconds) => {
                self.now += Duration::from_millis(milliseconds);
                self.lane.on_time(self.now);
                let _ = self.lane.deadline();
            }
        }
        self.events();
    }
}

proptest! {
    #[test]
    fn a_lane_hears_anything(acts in prop::collection::vec(act(), 1..200)) {
        let config = LaneConfig {
            eager_slots: 2,
            eager_bytes: 1024,
            patience: Duration::from_secs(5),
        };
        let mut node = Node {
            lane: Lane::new(config, Duration::ZERO),
            now: Duration::ZERO,
            posted: HashSet::new(),
            finished: HashSet::new(),
            used: HashSet::new(),
        };
        node.lane.path_up(PathId(0), Duration::ZERO);
        for comm in 0..2 {
            node.lane.add_receive(comm, Duration::ZERO);
            node.used.insert((false, comm));
            node.lane.add_send(comm, None, Duration::ZERO);
            node.used.insert((true, comm));
        }
        for act in acts {
            node.perform(act);
        }
    }
}
