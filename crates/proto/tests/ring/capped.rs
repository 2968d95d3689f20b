//! A link on which each flow is capped, as the lab builds it: hierarchical token buckets (Linux's HTB).
//!
//! Each flow has one of 64 classes by chance. What a class sends it takes from its own tokens (a 64th
//! of the link's), from those of its cap and from the link's. One that has tokens of its own comes
//! first; the others borrow the link's, and send 32 KiB each in turn, in whole packets. So flows do not
//! stand in one queue, and a packet waits for all flows that have something, not for all bytes.

use std::collections::VecDeque;
use std::time::Duration;

use super::fabric::{Network, Segment, random};

const CLASSES: usize = 64;
/// Tokens that a bucket holds.
const BURST: f64 = 131_072.0;
const QUANTUM: f64 = 32_768.0;

#[derive(Default)]
struct Class {
    queue: VecDeque<Segment>,
    own: f64,
    cap: f64,
    deficit: f64,
}

impl Class {
    fn is_ready(&self) -> bool {
        !self.queue.is_empty() && self.cap >= 0.0
    }

    fn queued(&self) -> f64 {
        self.queue.iter().map(|one| one.bytes).sum()
    }
}

/// One direction of the link.
pub struct Capped {
    network: Network,
    tokens: f64,
    classes: Vec<Class>,
    /// Class of each flow.
    class: Vec<usize>,
    /// Whose turn it is.
    turn: usize,
}

impl Capped {
    pub fn new(network: Network, seed: &mut u64) -> Capped {
        let class = |_| Class {
            own: BURST,
            cap: BURST,
            ..Class::default()
        };
        Capped {
            network,
            tokens: BURST,
            classes: (0..CLASSES).map(class).collect(),
            class: (0..network.flows)
                .map(|_| random(seed) as usize % CLASSES)
                .collect(),
            turn: 0,
        }
    }

    pub fn push(&mut self, segment: Segment) {
        self.classes[self.class[segment.flow]]
            .queue
            .push_back(segment);
    }

    /// About how long what a flow sends now waits here.
    pub fn wait(&self, flow: usize) -> Duration {
        let Network { rate, cap, .. } = self.network;
        let class = &self.classes[self.class[flow]];
        let busy = self.classes.iter().filter(|one| !one.queue.is_empty());
        let share = (rate / busy.count().max(1) as f64).min(cap);
        let capped = (class.queued() - class.cap) / cap;
        Duration::from_secs_f64((class.queued() / share).max(capped).max(0.0))
    }

    /// What the link carries in this many seconds.
    pub fn carry(&mut self, seconds: f64) -> Vec<Segment> {
        let Network { rate, cap, .. } = self.network;
        self.tokens = (self.tokens + rate * seconds).min(BURST);
        for class in &mut self.classes {
            let own = class.own + rate / CLASSES as f64 * seconds;
            class.own = own.clamp(-BURST, BURST);
            class.cap = (class.cap + cap * seconds).min(BURST);
        }
        let mut sent = Vec::new();
        loop {
            let rich = |class: &Class| class.is_ready() && class.own >= 0.0;
            let any_rich = self.classes.iter().any(rich);
            let may = |class: &Class| {
                if any_rich {
                    rich(class)
                } else {
                    class.is_ready() && self.tokens >= 0.0
                }
            };
            let next = (0..CLASSES).map(|step| (self.turn + step) % CLASSES);
            let Some(index) = next.into_iter().find(|one| may(&self.classes[*one])) else {
                return sent;
            };
            let class = &mut self.classes[index];
            self.turn = index;
            if class.deficit <= 0.0 {
                class.deficit += QUANTUM;
            }
            if class.deficit > 0.0
                && let Some(segment) = class.queue.pop_front()
            {
                class.own -= segment.bytes;
                class.cap -= segment.bytes;
                class.deficit -= segment.bytes;
                self.tokens -= segment.bytes;
                sent.push(segment);
            }
            if class.deficit <= 0.0 || class.queue.is_empty() {
                self.turn += 1;
            }
        }
    }
}
