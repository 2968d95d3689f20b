//! Two links and what they say to each other, without sockets: a chunk's bytes are a vector.

use super::*;
use crate::slots::Status;
use evener_proto::Frame;

const COMM: u64 = 7;
const LISTENER: u64 = 3;
const PATHS: [PathId; 2] = [PathId(1), PathId(2)];

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn link() -> Link {
    Link::new(&Config::default(), Arc::default(), at(0))
}

/// A chunk that a connection holds: pinned at the sender until it is written.
struct Held {
    path: PathId,
    frame: Frame,
    pinned: bool,
}

/// A sender, a receiver, and two paths between them.
struct Pair {
    a: Link,
    b: Link,
    send: Arc<Requests>,
    receive: Arc<Requests>,
}

impl Pair {
    fn new() -> Pair {
        let mut pair = Pair {
            a: link(),
            b: link(),
            send: Requests::new(COMM, Side::Send),
            receive: Requests::new(COMM, Side::Receive),
        };
        for path in PATHS {
            pair.a.lane.path_up(path, at(0));
            pair.b.lane.path_up(path, at(0));
        }
        pair.a.begin(&pair.send, Some(LISTENER), at(0));
        let offers = pair.talk(PATHS[0], at(0));
        let offer = Effect::Offer {
            comm: COMM,
            listener: LISTENER,
        };
        assert_eq!(offers.1, [offer]);
        pair.b.begin(&pair.receive, None, at(0));
        pair.b.lane.accept(COMM);
        pair.talk(PATHS[0], at(0));
        assert_eq!(pair.send.opened.load(Ordering::Relaxed), ACCEPTED);
        pair
    }

    /// Posts memory at one end, and has its link take it.
    fn post(&mut self, side: Side, bytes: &mut [u8], now: Duration) -> u64 {
        let (link, requests) = match side {
            Side::Send => (&mut self.a, &self.send),
            Side::Receive => (&mut self.b, &self.receive),
        };
        let number = requests.slots.vacant().expect("a free slot");
        requests.slots.post(number, Memory::of(bytes));
        link.poll(side, COMM, now);
        number
    }

    /// The next frame that the sender has for a path, as a connection would hold it.
    fn pull(&mut self, path: PathId, now: Duration) -> Option<Held> {
        let frame = self.a.lane.transmit(path, now)?;
        let pinned = match frame {
            Frame::Chunk { comm, message, .. } => self.a.pin(Side::Send, comm, message).is_some(),
            _ => false,
        };
        Some(Held {
            path,
            frame,
            pinned,
        })
    }

    /// The peer reads a held frame; the bytes of its chunk go where they belong.
    fn deliver(&mut self, held: &Held, now: Duration) {
        let (path, frame) = (held.path, held.frame);
        self.b
            .lane
            .receive(path, &frame, now, now)
            .expect("it is allowed");
        self.b.events(now);
        if let Frame::Chunk {
            comm,
            message,
            offset,
            length,
            ..
        } = frame
        {
            let bytes = vec![0x5a; length as usize];
            let target = self.b.place(comm, message, offset, bytes.len());
            if let Target::Pinned(memory) | Target::Eager(memory) = target {
                // SAFETY: the memory is the test's, and as long as the bytes.
                #[allow(unsafe_code, reason = "a test places bytes as a connection does")]
                unsafe {
                    sys::copy(Memory::read_only(&bytes), memory);
                }
            }
            if let Target::Pinned(_) = target {
                self.b.unpin(Side::Receive, comm, message);
            }
            self.b.lane.filled(comm, message, offset, length);
            self.b.events(now);
        }
    }

    /// The kernel has taken a held chunk.
    fn written(&mut self, held: &Held) {
        if let Frame::Chunk { comm, message, .. } = held.frame
            && held.pinned
        {
            self.a.unpin(Side::Send, comm, message);
        }
    }

    /// Everything that can be said over a path is said; what is to be done at either end.
    fn talk(&mut self, path: PathId, now: Duration) -> (Vec<Effect>, Vec<Effect>) {
        let mut any = true;
        while std::mem::take(&mut any) {
            while let Some(held) = self.pull(path, now) {
                self.deliver(&held, now);
                self.written(&held);
                any = true;
            }
            while let Some(frame) = self.b.lane.transmit(path, now) {
                self.a
                    .lane
                    .receive(path, &frame, now, now)
                    .expect("it is allowed");
                self.a.events(now);
                any = true;
            }
        }
        (self.a.effects(), self.b.effects())
    }

    fn sent(&self) -> bool {
        self.send.slots.memory(0).is_none()
    }
}

fn big() -> (Vec<u8>, Vec<u8>) {
    (vec![0x5a; 300_000], vec![0; 300_000])
}

#[test]
fn a_message_goes_and_both_requests_are_done() {
    let mut pair = Pair::new();
    let (mut from, mut to) = big();
    pair.post(Side::Receive, &mut to, at(1));
    pair.post(Side::Send, &mut from, at(1));
    assert_eq!(
        pair.a.traffic().under_way[Side::Send as usize].load(Ordering::Relaxed),
        300_000
    );
    let effects = pair.talk(PATHS[1], at(1));
    assert_eq!(effects, (vec![], vec![]));
    assert_eq!(to, from);
    assert!(pair.sent() && pair.receive.slots.memory(0).is_none());
    assert_eq!(
        pair.a.traffic().under_way[Side::Send as usize].load(Ordering::Relaxed),
        0
    );
}

#[test]
fn an_eager_message_waits_for_its_buffer() {
    let mut pair = Pair::new();
    let (mut from, mut to) = (vec![0x5a; 100], vec![0; 100]);
    pair.post(Side::Send, &mut from, at(1));
    pair.talk(PATHS[0], at(1));
    assert!(!pair.sent());
    pair.post(Side::Receive, &mut to, at(2));
    pair.talk(PATHS[0], at(2));
    assert!(pair.sent());
    assert_eq!(to, from);
}

/// The first path dies with a chunk that the kernel still has; the second carries everything.
fn fail_over(pair: &mut Pair) -> Held {
    let stuck = pair.pull(PATHS[0], at(1)).expect("a chunk");
    assert!(stuck.pinned);
    pair.a.own(PATHS[0], None);
    pair.a.lane.path_down(PATHS[0], at(2));
    pair.b.lane.path_down(PATHS[0], at(2));
    pair.a.events(at(2));
    pair.b.events(at(2));
    stuck
}

#[test]
fn a_request_is_done_with_its_last_pin() {
    let mut pair = Pair::new();
    let (mut from, mut to) = big();
    pair.post(Side::Receive, &mut to, at(1));
    pair.talk(PATHS[0], at(1));
    pair.post(Side::Send, &mut from, at(1));
    let stuck = fail_over(&mut pair);
    let (effects, _) = pair.talk(PATHS[1], at(3));
    // All of it has arrived; but a connection may still read the memory, and is asked to copy.
    assert_eq!(to, from);
    assert_eq!(effects, [Effect::Detach]);
    assert!(!pair.sent() && pair.a.is_over(COMM, 0));
    // It can be pinned no more.
    assert!(pair.a.pin(Side::Send, COMM, 0).is_none());
    pair.written(&stuck);
    assert!(pair.sent());
}

#[test]
fn a_comm_is_released_with_its_last_pin() {
    let mut pair = Pair::new();
    let (mut from, mut to) = big();
    pair.post(Side::Receive, &mut to, at(1));
    pair.talk(PATHS[0], at(1));
    pair.post(Side::Send, &mut from, at(1));
    let held = pair.pull(PATHS[0], at(1)).expect("a chunk");
    let send = pair.send.clone();
    pair.a.release(&send);
    pair.a.events(at(1));
    assert_eq!(pair.a.effects(), [Effect::Detach]);
    assert!(!send.is_released());
    assert!(pair.a.is_over(COMM, 0));
    pair.written(&held);
    assert!(send.is_released() && pair.a.is_idle());
    // The other end is told.
    let (_, effects) = pair.talk(PATHS[1], at(2));
    let why = Why::PeerClosed;
    assert_eq!(effects, [Effect::Failed { comm: COMM, why }]);
    assert_eq!(pair.receive.failure(), Some(why));
}

#[test]
fn what_the_peer_writes_to_a_released_buffer_goes_nowhere() {
    let mut pair = Pair::new();
    let (mut from, mut to) = big();
    pair.post(Side::Receive, &mut to, at(1));
    pair.talk(PATHS[0], at(1));
    pair.post(Side::Send, &mut from, at(1));
    let held = pair.pull(PATHS[0], at(1)).expect("a chunk");
    let receive = pair.receive.clone();
    pair.b.release(&receive);
    assert!(receive.is_released());
    pair.deliver(&held, at(2));
    assert!(to.iter().all(|byte| *byte == 0));
}

#[test]
fn a_message_that_is_too_long_fails_both_ends() {
    let mut pair = Pair::new();
    let (mut from, mut to) = (vec![0x5a; 300_000], vec![0; 1000]);
    pair.post(Side::Receive, &mut to, at(1));
    pair.talk(PATHS[0], at(1));
    let number = pair.post(Side::Send, &mut from, at(1));
    pair.talk(PATHS[0], at(1));
    for requests in [&pair.send, &pair.receive] {
        assert!(matches!(
            requests.failure(),
            Some(Why::Oversize {
                total: 300_000,
                room: 1000
            })
        ));
    }
    // Posted after the failure: it fails with the same code.
    assert_eq!(number, 0);
    let next = pair.send.slots.vacant().expect("a free slot");
    let slot = pair.send.slots.post(next, Memory::of(&mut from));
    pair.a.poll(Side::Send, COMM, at(2));
    assert_eq!(slot.test(), Status::Failed(OVERSIZE));
}

#[test]
fn without_a_path_for_long_everything_fails_and_is_told() {
    let mut pair = Pair::new();
    let (mut from, mut to) = big();
    pair.post(Side::Receive, &mut to, at(1));
    pair.post(Side::Send, &mut from, at(1));
    for path in PATHS {
        pair.a.lane.path_down(path, at(10));
    }
    let patience = Config::default().timeout;
    pair.a.lane.on_time(at(9) + patience);
    pair.a.events(at(9) + patience);
    assert_eq!(pair.a.effects(), []);
    let late = at(11) + patience;
    pair.a.lane.on_time(late);
    pair.a.events(late);
    let effects = pair.a.effects();
    assert!(
        matches!(
            effects[..],
            [Effect::Failed {
                why: Why::NoPath(_),
                ..
            }]
        ),
        "{effects:?}"
    );
    assert!(pair.sent() && pair.send.failure().is_some());
}

#[test]
fn a_worker_has_a_path_until_it_hands_it_on() {
    let mut link = link();
    link.own(PATHS[0], Some(0));
    link.own(PATHS[1], Some(0));
    link.own(PATHS[1], Some(2));
    assert_eq!(
        (link.owner(PATHS[0]), link.owner(PATHS[1])),
        (Some(0), Some(2))
    );
    assert_eq!(link.workers().collect::<Vec<_>>(), [0, 2]);
    link.own(PATHS[0], None);
    assert_eq!(link.workers().collect::<Vec<_>>(), [2]);
}
