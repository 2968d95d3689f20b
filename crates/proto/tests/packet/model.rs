//! A network in virtual time: links with rate, delay, a queue that drops at its end, loss, duplicates,
//! packets that overtake, and death; and ends that send and receive over them. Nothing sleeps, and a
//! seed gives the same run each time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::rc::Rc;
use std::time::Duration;

/// Bytes of IPv4 and UDP headers.
pub const BELOW: u64 = 28;

/// splitmix64.
pub fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Links that a packet crosses, one after the other.
pub type Route = Rc<[usize]>;

/// A one-way link with a queue before it.
#[derive(Debug, Clone)]
pub struct Link {
    /// Bytes per second.
    pub rate: f64,
    pub delay: Duration,
    /// Bytes that wait at most.
    pub queue: f64,
    /// Shares of packets.
    pub loss: f64,
    pub duplicates: f64,
    /// These are held back by up to `hold`.
    pub overtaken: f64,
    pub hold: Duration,
    pub dead: bool,
    /// Larger packets vanish.
    pub mtu: u64,
    free: Duration,
    pub dropped: u64,
    pub carried: u64,
}

impl Link {
    /// A link of this many bit/s and a queue of 2 ms of them.
    pub fn new(bits: f64, delay: Duration) -> Link {
        Link {
            rate: bits / 8.0,
            delay,
            queue: bits / 8.0 * 2e-3,
            loss: 0.0,
            duplicates: 0.0,
            overtaken: 0.0,
            hold: Duration::ZERO,
            dead: false,
            mtu: 9000,
            free: Duration::ZERO,
            dropped: 0,
            carried: 0,
        }
    }
}

/// What a packet holds.
#[derive(Debug, Clone)]
pub enum Body {
    Datagram(Vec<u8>),
    /// TCP: the first byte's place in the stream and the number of bytes.
    Segment(u64, u32),
    /// TCP: all below the first has arrived, and the second is what made this.
    Told(u64, u64),
}

/// On its way.
#[derive(Debug, Clone)]
pub struct Packet {
    pub to: usize,
    pub size: u64,
    pub route: Route,
    pub body: Body,
}

/// Something that sends and hears. `now` is the network's; an end with another clock adds to it.
pub trait End {
    fn hear(&mut self, body: Body, now: Duration);
    /// Gives what is to be sent now, and when it wants to be called again.
    fn run(&mut self, now: Duration, out: &mut Vec<Packet>) -> Option<Duration>;
    fn as_any(&mut self) -> &mut dyn std::any::Any;
}

enum Due {
    Hop(usize, Packet),
    Wake(usize),
}

/// See the module.
pub struct Net {
    pub now: Duration,
    pub links: Vec<Link>,
    pub ends: Vec<Box<dyn End>>,
    due: BinaryHeap<Reverse<(Duration, u64)>>,
    what: HashMap<u64, Due>,
    count: u64,
    wakes: Vec<Option<Duration>>,
    seed: u64,
}

impl Net {
    pub fn new(links: Vec<Link>, seed: u64) -> Net {
        Net {
            now: Duration::ZERO,
            links,
            ends: Vec::new(),
            due: BinaryHeap::new(),
            what: HashMap::new(),
            count: 0,
            wakes: Vec::new(),
            seed,
        }
    }

    pub fn add(&mut self, end: Box<dyn End>) -> usize {
        self.ends.push(end);
        self.wakes.push(None);
        let at = self.ends.len() - 1;
        self.wake(at, self.now);
        at
    }

    pub fn end<T: 'static>(&mut self, at: usize) -> &mut T {
        self.ends[at].as_any().downcast_mut().unwrap()
    }

    fn push(&mut self, at: Duration, due: Due) {
        self.count += 1;
        self.what.insert(self.count, due);
        self.due.push(Reverse((at, self.count)));
    }

    fn wake(&mut self, end: usize, at: Duration) {
        if self.wakes[end].is_none_or(|other| at < other || other <= self.now) {
            self.wakes[end] = Some(at);
            self.push(at, Due::Wake(end));
        }
    }

    /// After something was asked of an end from outside.
    pub fn poke(&mut self, end: usize) {
        let mut out = Vec::new();
        let next = self.ends[end].run(self.now, &mut out);
        for packet in out {
            self.hop(0, packet);
        }
        if let Some(at) = next {
            self.wake(end, at.max(self.now + Duration::from_nanos(1)));
        }
    }

    fn chance(&mut self, share: f64) -> bool {
        share > 0.0 && ((random(&mut self.seed) >> 11) as f64 / (1u64 << 53) as f64) < share
    }

    fn hop(&mut self, at: usize, packet: Packet) {
        let Some(link) = packet.route.get(at).copied() else {
            let (to, body) = (packet.to, packet.body);
            self.ends[to].hear(body, self.now);
            // At most one run an instant.
            self.wake(to, self.now);
            return;
        };
        let (loss, twice, late) = {
            let link = &self.links[link];
            (link.loss, link.duplicates, link.overtaken)
        };
        let (loss, twice, late) = (self.chance(loss), self.chance(twice), self.chance(late));
        let extra = random(&mut self.seed) % 1024;
        let now = self.now;
        let link = &mut self.links[link];
        let waits = link.free.saturating_sub(now).as_secs_f64() * link.rate;
        if loss || link.dead || packet.size > link.mtu || waits + packet.size as f64 > link.queue {
            link.dropped += 1;
            return;
        }
        let takes = Duration::from_secs_f64(packet.size as f64 / link.rate);
        link.free = link.free.max(now) + takes;
        link.carried += packet.size;
        let mut arrives = link.free + link.delay;
        if late {
            arrives += link.hold * extra as u32 / 1024;
        }
        if twice {
            self.push(
                arrives + Duration::from_micros(extra),
                Due::Hop(at + 1, packet.clone()),
            );
        }
        self.push(arrives, Due::Hop(at + 1, packet));
    }

    /// Goes on up to that time.
    pub fn run_until(&mut self, until: Duration) {
        while let Some(Reverse((at, _))) = self.due.peek()
            && *at <= until
        {
            let Some(Reverse((at, number))) = self.due.pop() else {
                break;
            };
            self.now = self.now.max(at);
            match self.what.remove(&number) {
                Some(Due::Hop(hop, packet)) => self.hop(hop, packet),
                Some(Due::Wake(end)) if self.wakes[end] == Some(at) => {
                    self.wakes[end] = None;
                    self.poke(end);
                }
                _ => {}
            }
        }
        self.now = until;
    }
}
