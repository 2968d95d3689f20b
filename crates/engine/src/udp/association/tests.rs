//! A comm in virtual time: any loss and any order of packets, a connection that is over, and an end that
//! closes in the middle. No sockets and no threads: each side is called as its thread would call it.

mod addresses;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use proptest::prelude::*;

use super::packets::fill;
use super::*;
use crate::nics::Nics;
use crate::slots::Status;
use crate::udp::hostile;
use crate::udp::ports::Came;

const COMM: u64 = 5;
const LISTENER: u64 = 3;
const STEP: Duration = Duration::from_micros(200);
const SWEEP: u64 = 500;
const SEND: usize = 0;
const RECEIVE: usize = 1;
/// Messages on their way at a time.
const AHEAD: usize = 8;

#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    /// This side ends the connection.
    Over(usize),
    /// This side closes the comm.
    Close(usize),
}

/// A request: its memory, and how it ended. A receiving one keeps the bytes at that time.
struct Request {
    bytes: Vec<u8>,
    ended: Option<(Status, Vec<u8>)>,
}

struct World {
    sides: [Association; 2],
    requests: [Arc<Requests>; 2],
    posted: [Vec<Request>; 2],
    offered: bool,
    shared: Shared,
    step: u64,
    /// When it arrives, a number, at which side, and the packet.
    #[allow(clippy::type_complexity, reason = "one heap")]
    flying: BinaryHeap<Reverse<(u64, u64, usize, Vec<u8>)>>,
    seed: u64,
    loss: u64,
    delay: u64,
}

fn pattern(message: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (message * 31 + at * 7) as u8)
        .collect()
}

impl World {
    fn new(seed: u64, loss: u64, delay: u64) -> World {
        let from = "127.0.0.1:9".parse().expect("an address");
        let (caller, responder, _) = hostile::met().expect("two honest ends meet");
        let sides =
            [(Box::new(caller), true), (responder, false)].map(|(connection, initiates)| {
                let end = (1, connection, initiates);
                Association::new(
                    hostile::peer(),
                    end,
                    (&Nics::default(), vec![from]),
                    None,
                    Duration::ZERO,
                )
            });
        World {
            sides,
            requests: [Side::Send, Side::Receive].map(|side| Requests::new(COMM, side)),
            posted: [Vec::new(), Vec::new()],
            offered: false,
            shared: Shared::for_tests(),
            step: 0,
            flying: BinaryHeap::new(),
            seed,
            loss,
            delay,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (self.seed >> 33) % below
    }

    fn now(&self) -> Duration {
        STEP * self.step as u32
    }

    /// Posts the next request of this side.
    fn post(&mut self, side: usize, mut bytes: Vec<u8>) {
        let number = self.posted[side].len() as u64;
        let (requests, now) = (self.requests[side].clone(), self.now());
        requests.slots.post(number, Memory::of(&mut bytes));
        self.posted[side].push(Request { bytes, ended: None });
        self.sides[side].poll(COMM, now);
    }

    /// All threads have a turn.
    fn turn(&mut self) {
        self.step += 1;
        let now = self.now();
        while let Some(Reverse((at, ..))) = self.flying.peek()
            && *at <= self.step
        {
            let Some(Reverse((_, _, side, packet))) = self.flying.pop() else {
                break;
            };
            let came = Came {
                packet: &packet,
                from: "127.0.0.1:9".parse().expect("an address"),
                to: None,
                arrival: Default::default(),
            };
            let _ = self.sides[side].hear(&came, now);
        }
        for side in [SEND, RECEIVE] {
            let one = &mut self.sides[side];
            one.connection.on_time(now);
            let mut sent = Vec::new();
            let mut out = [0; 1500];
            loop {
                let (ends, signals, counted) = (&one.ends, &one.signals, &mut one.counted);
                let read = &mut |span: &_, to: &mut [u8]| fill(ends, signals, counted, span, to);
                let Some(packet) = one.connection.transmit(now, &mut out, read) else {
                    break;
                };
                sent.push(out[..packet.length].to_vec());
            }
            one.digest(&self.shared, now);
            if self.step.is_multiple_of(SWEEP) {
                one.fail_with_others(&self.shared);
            }
            let offers = |effect: &Effect| matches!(effect, Effect::Offer { .. });
            self.offered |= one.effects().iter().any(offers);
            for packet in sent {
                for _ in 0..1 + u64::from(self.random(20) == 0) {
                    if self.random(100) >= self.loss {
                        let at = self.step + 1 + self.random(self.delay + 1);
                        let number = self.flying.len() as u64 + (self.step << 20);
                        self.flying
                            .push(Reverse((at, number, 1 - side, packet.clone())));
                    }
                }
            }
        }
        for side in [SEND, RECEIVE] {
            let slots = &self.requests[side].slots;
            for (number, request) in self.posted[side].iter_mut().enumerate() {
                if request.ended.is_none() {
                    let status = slots.at(number as u64).test();
                    if status != Status::Pending {
                        request.ended = Some((status, request.bytes.clone()));
                    }
                }
            }
        }
    }

    fn ended(&self, side: usize) -> usize {
        self.posted[side]
            .iter()
            .take_while(|one| one.ended.is_some())
            .count()
    }

    fn open(&mut self) {
        let requests = self.requests.clone();
        self.sides[SEND].open(&requests[SEND], LISTENER);
        while !self.offered {
            assert!(self.step < 100_000, "it is not offered");
            self.turn();
        }
        self.sides[RECEIVE].take(&requests[RECEIVE]);
        self.sides[RECEIVE].answer(COMM, true);
    }

    /// Sends these messages; the fault comes after some steps.
    fn run(&mut self, lengths: &[usize], fault: (u64, Fault)) {
        self.open();
        let begun = self.step;
        let longest = lengths.iter().max().copied().unwrap_or(0);
        loop {
            let done = [SEND, RECEIVE].map(|side| self.ended(side));
            let failed = [SEND, RECEIVE].map(|side| self.requests[side].failure().is_some());
            for side in [SEND, RECEIVE] {
                while !failed[side]
                    && self.posted[side].len() < lengths.len().min(done[side] + AHEAD)
                {
                    let number = self.posted[side].len();
                    let bytes = match side {
                        SEND => pattern(number, lengths[number]),
                        _ => vec![0xaa; longest],
                    };
                    self.post(side, bytes);
                }
            }
            let after = self.step - begun;
            match fault.1 {
                Fault::Over(side) if after == fault.0 => self.sides[side].connection.close(),
                Fault::Close(side) if after == fault.0 => {
                    let (requests, now) = (self.requests[side].clone(), self.now());
                    requests.fail(Why::PeerClosed);
                    self.sides[side].release(&requests, now);
                }
                _ => {}
            }
            self.turn();
            let all = |side: usize| {
                let posted = self.posted[side].len();
                let over = posted == lengths.len() || self.requests[side].failure().is_some();
                over && self.ended(side) == posted
            };
            let after = self.step - begun;
            if all(SEND) && all(RECEIVE) && after > fault.0 + 1 {
                break;
            }
            assert!(after < 200_000, "requests wait for ever");
        }
        // What comes late finds nothing to write to.
        for _ in 0..100 {
            self.turn();
        }
    }
}

fn fault() -> impl Strategy<Value = (u64, Fault)> {
    let what = prop_oneof![
        Just(Fault::Nothing),
        (0..2usize).prop_map(Fault::Over),
        (0..2usize).prop_map(Fault::Close),
    ];
    (0u64..400, what)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Message `n` comes into buffer `n`, whatever its packets meet; after a fault each request of both
    /// ends ends, no memory is written to after that, and nothing counts as under way.
    #[test]
    fn messages_keep_their_order_and_none_waits_for_ever(
        lengths in prop::collection::vec(0usize..60_000, 1..80),
        fault in fault(), seed in any::<u64>(), loss in prop_oneof![Just(0u64), 0u64..15],
        delay in 0u64..20,
    ) {
        let mut world = World::new(seed, loss, delay);
        world.run(&lengths, fault);
        let whole = matches!(fault.1, Fault::Nothing);
        for side in [SEND, RECEIVE] {
            if whole {
                prop_assert_eq!(world.posted[side].len(), lengths.len());
            }
            for (number, request) in world.posted[side].iter().enumerate() {
                let Some((status, then)) = &request.ended else {
                    return Err(TestCaseError::fail("a request that has not ended"));
                };
                prop_assert!(*then == request.bytes, "memory is used after its request");
                match status {
                    Status::Done(length) => {
                        prop_assert_eq!(*length, lengths[number]);
                        prop_assert!(request.bytes[..*length] == pattern(number, *length));
                    }
                    _ => prop_assert!(!whole, "request {} of side {} failed", number, side),
                }
            }
            let bytes = &world.sides[side].peer.traffic.under_way;
            prop_assert_eq!(bytes[0].load(Ordering::Relaxed), 0);
            prop_assert_eq!(bytes[1].load(Ordering::Relaxed), 0);
        }
    }
}
