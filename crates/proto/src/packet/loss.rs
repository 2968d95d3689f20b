//! What is unconfirmed, and what of it is lost.
//!
//! Packets of one path stay in order, those of different paths do not. So loss is told *per path*: a
//! packet is lost when [`REORDER`] later ones of its own path were acknowledged (RFC 9002, section
//! 6.1.1), or one later one, and it is older than 9/8 of a round trip (section 6.1.2, as RACK, RFC
//! 8985). A global order would take every packet on a slow path for lost.
//!
//! The end of a run over one path has nothing later of its path before the next run, a turn of all
//! paths away. There packets of *other* paths tell, by time (RACK again): where one that was sent later
//! was acknowledged, and this one is older than packets of its path ever are when they are
//! acknowledged ([`RoundTrip::age`](super::rtt::RoundTrip::age) of the path),
//! it is lost. It may also be the path that is dead, so the path gets a probe and no bytes until that is
//! answered.
//!
//! Where nothing later was acknowledged at all, time alone tells: the oldest packet of a path may be
//! silent for the patience of the connection, 1 to 5 ms at least. Its bytes then go over another path.
//! This is the tail-loss probe (RFC 8985, section 7) and what notices black holes, at once: the probe
//! carries the bytes that are missing. Where no path says anything it may be the peer's thread that has no
//! processor: there one packet goes again, twice, before all are taken for lost.
//!
//! A packet that was taken for lost and is acknowledged after all was only late: it is counted, and
//! the bounds by which it was lost become wider ([`Reordering`], or the floor of silence). Those of order and age
//! become narrower again where losses are real, as RACK's window does with what duplicates tell (section 6.2).

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use super::outgoing::Span;
use super::paths::Path;
use super::trace::Cause;

/// Later packets that prove a loss, if the network keeps the order.
pub const REORDER: u64 = 3;
const MOST_REORDER: u64 = 64;
/// Losses of which none was only late, until bounds become narrower (RFC 8985, section 6.2, step 4).
const PERSIST: u32 = 16;

/// What a packet held that must arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Bytes of a message.
    Bytes(Span),
    /// A posted buffer: channel, message, room.
    Credit(u32, u64, u64),
    /// A message that is too long: channel, message, length.
    TooLong(u32, u64, u64),
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nothing is known.
    Flying,
    /// It has arrived.
    Arrived,
    /// It has not, as it seems by this.
    Lost(Cause),
    /// It asked for no acknowledgement.
    Mute,
    /// It asks whether a path answers again that was dropped: nobody waits for it.
    Asking,
}

/// Packets that went over one path at once, up to one of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Run {
    /// The number of the first one.
    pub first: u64,
    /// Bytes, this one's included.
    pub bytes: u32,
}

/// A packet that was sent.
#[derive(Debug)]
pub struct Sent {
    /// When.
    pub at: Duration,
    /// Bytes of the datagram.
    pub size: u32,
    /// Over which path.
    pub path: u8,
    /// What became of it.
    pub fate: Fate,
    /// Its run: what went over its path at once.
    pub run: Run,
    /// It only asked whether its size, or its path, carries.
    pub probe: bool,
    /// The window was full: more would have gone.
    pub limited: bool,
    /// What must go again if it is lost.
    pub content: SmallVec<[Content; 1]>,
}

/// All packets from the oldest that matters to the newest.
#[derive(Debug, Default)]
pub struct Unconfirmed {
    first: u64,
    packets: VecDeque<Sent>,
}

impl Unconfirmed {
    /// Numbers start here.
    pub fn new(first: u64) -> Self {
        Unconfirmed {
            first,
            packets: VecDeque::new(),
        }
    }

    /// The number of the next packet.
    pub fn next(&self) -> u64 {
        self.first + self.packets.len() as u64
    }

    /// The lowest number that matters.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The next packet was sent.
    pub fn push(&mut self, sent: Sent) {
        self.packets.push_back(sent);
    }

    /// A packet, if it still matters.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Sent> {
        let at = number.checked_sub(self.first)?;
        self.packets.get_mut(usize::try_from(at).ok()?)
    }

    /// The same, to look at.
    pub fn get(&self, number: u64) -> Option<&Sent> {
        let at = number.checked_sub(self.first)?;
        self.packets.get(usize::try_from(at).ok()?)
    }

    /// Forgets from the front what is decided. Lost ones stay for a while: they may be only late.
    pub fn forget(&mut self, before: Duration) {
        while let Some(sent) = self.packets.front() {
            match sent.fate {
                Fate::Flying => break,
                Fate::Lost(_) | Fate::Asking if sent.at > before => break,
                _ => {}
            }
            self.packets.pop_front();
            self.first += 1;
        }
    }
}

/// How far packets of one path overtake each other.
#[derive(Debug, Clone, Copy)]
pub struct Reordering {
    packets: u64,
    /// Added to a round trip, in eighths.
    eighths: u32,
    /// Losses since one was only late.
    losses: u32,
}

impl Default for Reordering {
    fn default() -> Self {
        Reordering {
            packets: REORDER,
            eighths: 1,
            losses: 0,
        }
    }
}

impl Reordering {
    /// One that was taken for lost has arrived.
    pub fn was_late(&mut self) {
        self.packets = (self.packets + 1 + self.packets / 4).min(MOST_REORDER);
        self.eighths = (self.eighths + 1).min(16);
        self.losses = 0;
    }

    /// One was taken for lost.
    pub fn was_lost(&mut self) {
        self.losses += 1;
    }

    /// Where [`PERSIST`] in a row were lost, the network keeps its order better than it did. On its own, for all
    /// paths go by the same bounds while they are looked at.
    pub fn settle(&mut self) {
        if self.losses >= PERSIST {
            self.packets = (self.packets - self.packets / 4).max(REORDER);
            self.eighths = (self.eighths - (self.eighths / 4).max(1)).max(1);
            self.losses = 0;
        }
    }

    /// How old a packet with nothing later of its path may become. That is the path's own patience: a
    /// short path must not judge a long one.
    pub fn tail(&self, path: &Path) -> Duration {
        let trip = &path.trip;
        trip.age() + trip.smoothed() / 8 * (self.eighths - 1)
    }

    /// Takes out of a path's order what is decided, and gives what is lost by order or by age. When
    /// the next would be lost by its age comes as well.
    pub fn find(
        &self,
        path: &mut Path,
        unconfirmed: &Unconfirmed,
        now: Duration,
    ) -> (SmallVec<[u64; 4]>, Option<Duration>) {
        let mut lost = SmallVec::new();
        let is_flying = |number: &u64| {
            unconfirmed
                .get(*number)
                .is_some_and(|sent| sent.fate == Fate::Flying)
        };
        while path.order.front().is_some_and(|number| !is_flying(number)) {
            path.order.pop_front();
        }
        let Some((newest, _)) = path.newest else {
            return (lost, None);
        };
        let last = path.order.partition_point(|number| *number < newest);
        let round_trip = path.trip.smoothed().max(path.trip.latest());
        let age = round_trip + round_trip / 8 * self.eighths;
        let (mut later, mut next) = (0, None::<Duration>);
        // From the newest down: how many later ones of this path were acknowledged.
        for at in (0..last).rev() {
            let number = path.order[at];
            let Some(sent) = unconfirmed.get(number) else {
                continue;
            };
            if sent.fate != Fate::Flying {
                later += 1;
                continue;
            }
            let due = sent.at + age;
            // The newest itself is one.
            if later + 1 >= self.packets || now >= due {
                lost.push(number);
            } else {
                next = Some(next.map_or(due, |least| least.min(due)));
            }
        }
        lost.reverse();
        (lost, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::paths::Paths;
    use proptest::prelude::*;
    use smallvec::smallvec;

    fn sent(at: u64) -> Sent {
        Sent {
            at: Duration::from_micros(at),
            size: 1000,
            path: 0,
            fate: Fate::Flying,
            run: Run {
                first: 0,
                bytes: 1000,
            },
            probe: false,
            limited: false,
            content: smallvec![],
        }
    }

    /// Packets 0..count of one path, of which these have arrived: what is lost at `now`.
    fn lost(count: u64, arrived: &[u64], now: u64) -> (Vec<u64>, Option<Duration>) {
        let mut paths = Paths::new(1, 1);
        let mut unconfirmed = Unconfirmed::default();
        let path = paths.get_mut(0).unwrap();
        for number in 0..count {
            unconfirmed.push(sent(if count == 2 { 0 } else { number }));
            path.order.push_back(number);
        }
        for number in arrived {
            let packet = unconfirmed.get_mut(*number).unwrap();
            packet.fate = Fate::Arrived;
            path.newest = path.newest.max(Some((*number, packet.at)));
        }
        path.trip.sample(Duration::from_micros(80), Duration::ZERO);
        let (lost, next) =
            Reordering::default().find(path, &unconfirmed, Duration::from_micros(now));
        (lost.to_vec(), next)
    }

    #[test]
    fn three_later_ones_or_age_prove_a_loss() {
        assert_eq!(lost(9, &[], 1000), (vec![], None));
        assert_eq!(lost(9, &[0, 1], 50), (vec![], None));
        let due = Some(Duration::from_micros(2 + 90));
        assert_eq!(lost(9, &[0, 1, 3, 4], 50), (vec![], due));
        assert_eq!(lost(9, &[0, 1, 3, 4, 5], 50), (vec![2], None));
        assert_eq!(lost(9, &[0, 1, 3], 92), (vec![2], None));
        // Sent in the same instant as the newest: age counts all the same.
        assert_eq!(lost(2, &[1], 1000), (vec![0], None));
        assert_eq!(lost(9, &[8], 20).0, Vec::<u64>::new());
        assert_eq!(lost(9, &[6, 7, 8], 20).0, vec![0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_late_one_widens_the_bounds() {
        let mut bounds = Reordering::default();
        for _ in 0..100 {
            bounds.was_late();
        }
        assert_eq!((bounds.packets, bounds.eighths), (MOST_REORDER, 16));
        // Real losses make them narrow again, and not one less than many of them.
        let lose = |count: u32, bounds: &mut Reordering| {
            (0..count).for_each(|_| {
                bounds.was_lost();
                bounds.settle();
            });
        };
        lose(PERSIST - 1, &mut bounds);
        assert_eq!((bounds.packets, bounds.eighths), (MOST_REORDER, 16));
        lose(20 * PERSIST, &mut bounds);
        assert_eq!((bounds.packets, bounds.eighths), (REORDER, 1));
    }

    proptest! {
        /// Whatever is lost and late, bounds stay between the narrowest and the widest, a late one never makes them
        /// narrower, and they become narrow again where everything is lost.
        #[test]
        fn bounds_are_kept(late in prop::collection::vec(any::<bool>(), 0..300)) {
            let mut bounds = Reordering::default();
            for late in late {
                let before = (bounds.packets, bounds.eighths);
                if late {
                    bounds.was_late();
                    prop_assert!(bounds.packets >= before.0 && bounds.eighths >= before.1);
                } else {
                    bounds.was_lost();
                    bounds.settle();
                }
                prop_assert!((REORDER..=MOST_REORDER).contains(&bounds.packets));
                prop_assert!((1..=16).contains(&bounds.eighths));
            }
            for _ in 0..30 * PERSIST {
                bounds.was_lost();
                bounds.settle();
            }
            prop_assert_eq!((bounds.packets, bounds.eighths), (REORDER, 1));
        }
    }

    #[test]
    fn what_is_decided_is_forgotten_in_order() {
        let mut unconfirmed = Unconfirmed::new(1 << 32);
        for at in 10..14 {
            unconfirmed.push(sent(at));
        }
        unconfirmed.get_mut((1 << 32) + 1).unwrap().fate = Fate::Arrived;
        unconfirmed.forget(Duration::from_secs(1));
        assert_eq!(unconfirmed.first(), 1 << 32);
        unconfirmed.get_mut(1 << 32).unwrap().fate = Fate::Lost(Cause::Order);
        unconfirmed.forget(Duration::ZERO);
        assert_eq!(unconfirmed.first(), (1 << 32));
        unconfirmed.forget(Duration::from_secs(1));
        assert_eq!(unconfirmed.first(), (1 << 32) + 2);
        assert_eq!(unconfirmed.next(), (1 << 32) + 4);
        assert!(unconfirmed.get_mut(5).is_none());
    }
}
