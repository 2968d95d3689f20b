//! Which of two carriers, TCP or packets, goes between two processes: measured once, by one of them, and
//! taken by both.
//!
//! The process with the smaller number *leads*: it measures when either of the two wants to know, and
//! tells the other. The other one *follows*: it asks, and waits. So nothing is measured twice, and both
//! take the same. A job must start whatever happens: who hears nothing until its deadline takes TCP, and
//! so does who could not measure. A follower that has given up and is told later takes what it was told,
//! for what it connects from then on. Either carrier is always received, so for as long as the two
//! differ nothing is lost but speed.
//!
//! As everywhere in this crate there is no clock and no socket here: who drives it measures, asks and
//! tells, and says what happened.

use std::fmt;
use std::time::Duration;

/// What carries bytes between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Carrier {
    /// Streams.
    Tcp,
    /// Packets over UDP.
    Udp,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Carrier::Tcp => "tcp",
            Carrier::Udp => "udp",
        })
    }
}

/// What was measured of one carrier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Bytes per second in bulk.
    pub rate: f64,
    /// The median time of a message of 64 KiB, alone.
    pub small: Duration,
    /// Packets that went again.
    pub again: u64,
}

/// Packets must be so much faster to be taken, as they cost more processor time ...
const FASTER: f64 = 1.15;
/// ... or about as fast, and small messages must take so much less time.
const EQUAL: f64 = 0.95;
const SOONER: f64 = 0.5;

/// The better carrier by these figures. TCP where they are close: it takes less of the processors.
pub fn better(tcp: &Measured, udp: &Measured) -> Carrier {
    let sooner = udp.small.as_secs_f64() < tcp.small.as_secs_f64() * SOONER;
    let faster = udp.rate > tcp.rate * FASTER;
    if faster || (sooner && udp.rate > tcp.rate * EQUAL) {
        Carrier::Udp
    } else {
        Carrier::Tcp
    }
}

/// Why a carrier was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// By this process's measurement.
    Measured,
    /// The other one said so.
    Told,
    /// The other one has not answered in time.
    NoAnswer,
    /// The measurement failed.
    NotMeasured,
}

/// What has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Do {
    /// Measure both carriers, and say what came of it.
    Measure,
    /// Ask the other process to measure.
    Ask,
    /// Tell the other process.
    Tell(Carrier),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    /// Until this time.
    Waits(Duration),
    Settled(Carrier, Reason),
}

/// One process's part of it.
#[derive(Debug, Clone)]
pub struct Accord {
    leads: bool,
    patience: Duration,
    stage: Stage,
    /// The other process has asked and was not told.
    asked: bool,
}

impl Accord {
    /// `leads`: this process has the smaller number. `patience`: for so long a carrier is waited for.
    pub fn new(leads: bool, patience: Duration) -> Self {
        Accord {
            leads,
            patience,
            stage: Stage::Idle,
            asked: false,
        }
    }

    /// What was taken and why; `None`: it is not known yet.
    pub fn settled(&self) -> Option<(Carrier, Reason)> {
        match self.stage {
            Stage::Settled(carrier, reason) => Some((carrier, reason)),
            Stage::Idle | Stage::Waits(_) => None,
        }
    }

    /// When it is given up.
    pub fn deadline(&self) -> Option<Duration> {
        match self.stage {
            Stage::Waits(until) => Some(until),
            Stage::Idle | Stage::Settled(..) => None,
        }
    }

    /// A caller of this process wants to connect.
    pub fn want(&mut self, now: Duration) -> Option<Do> {
        if self.stage != Stage::Idle {
            return None;
        }
        self.stage = Stage::Waits(now + self.patience);
        Some(if self.leads { Do::Measure } else { Do::Ask })
    }

    /// The other process asks.
    pub fn asked(&mut self, now: Duration) -> Option<Do> {
        // Who follows does not measure: the other one counts differently, and will give up.
        if !self.leads {
            return None;
        }
        self.asked = true;
        match self.stage {
            Stage::Idle => self.want(now),
            Stage::Waits(_) => None,
            Stage::Settled(..) => self.tell(),
        }
    }

    /// This process has measured; `None`: it could not.
    pub fn measured(&mut self, carrier: Option<Carrier>) -> Option<Do> {
        if !self.leads || !matches!(self.stage, Stage::Waits(_)) {
            return None;
        }
        self.stage = match carrier {
            Some(carrier) => Stage::Settled(carrier, Reason::Measured),
            None => Stage::Settled(Carrier::Tcp, Reason::NotMeasured),
        };
        self.tell()
    }

    fn tell(&mut self) -> Option<Do> {
        let (carrier, _) = self.settled()?;
        std::mem::take(&mut self.asked).then_some(Do::Tell(carrier))
    }

    /// The other process has told.
    pub fn told(&mut self, carrier: Carrier) {
        if !self.leads {
            self.stage = Stage::Settled(carrier, Reason::Told);
        }
    }

    /// It is that late.
    pub fn on_time(&mut self, now: Duration) -> Option<Do> {
        if !matches!(self.stage, Stage::Waits(until) if now >= until) {
            return None;
        }
        let reason = if self.leads {
            Reason::NotMeasured
        } else {
            Reason::NoAnswer
        };
        self.stage = Stage::Settled(Carrier::Tcp, reason);
        self.tell()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PATIENCE: Duration = Duration::from_millis(100);

    /// What is on its way from one to the other.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Word {
        Ask,
        Tell(Carrier),
        /// The measurement that this process has begun ends.
        Done,
    }

    /// Two processes, words that take a time each or are lost, and a measurement that may fail.
    struct World {
        both: [Accord; 2],
        /// When, to whom, what.
        due: Vec<(Duration, usize, Word)>,
        delays: Vec<Option<u64>>,
        outcome: Option<Carrier>,
        /// What a word took of the list of delays.
        used: usize,
        measured: u32,
        lost: bool,
    }

    impl World {
        fn act(&mut self, who: usize, what: Option<Do>, now: Duration) {
            let Some(what) = what else {
                return;
            };
            let (to, word) = match what {
                Do::Measure => {
                    self.measured += 1;
                    (who, Word::Done)
                }
                Do::Ask => (1 - who, Word::Ask),
                Do::Tell(carrier) => (1 - who, Word::Tell(carrier)),
            };
            let delay = self.delays[self.used % self.delays.len()];
            self.used += 1;
            match delay {
                Some(delay) => self
                    .due
                    .push((now + Duration::from_millis(delay), to, word)),
                None => self.lost = true,
            }
        }

        fn run(&mut self, wants: &[(u64, usize)]) {
            for millis in 0..1000 {
                let now = Duration::from_millis(millis);
                for (_, who) in wants.iter().filter(|(at, _)| *at == millis) {
                    let what = self.both[*who].want(now);
                    self.act(*who, what, now);
                }
                let mut rest = Vec::new();
                for (at, to, word) in std::mem::take(&mut self.due) {
                    if at > now {
                        rest.push((at, to, word));
                        continue;
                    }
                    let what = match word {
                        Word::Ask => self.both[to].asked(now),
                        Word::Tell(carrier) => {
                            self.both[to].told(carrier);
                            None
                        }
                        Word::Done => self.both[to].measured(self.outcome),
                    };
                    self.act(to, what, now);
                }
                self.due.extend(rest);
                for who in 0..2 {
                    let what = self.both[who].on_time(now);
                    self.act(who, what, now);
                }
            }
        }
    }

    fn carrier() -> impl Strategy<Value = Carrier> {
        prop_oneof![Just(Carrier::Tcp), Just(Carrier::Udp)]
    }

    proptest! {
        /// Whoever wants, whenever, and however long words take: who wants to know has a carrier when
        /// its patience ends; UDP is never taken that was not measured; it is measured once at most; and
        /// where no word is lost both have the same in the end.
        #[test]
        fn both_take_the_same(
            wants in prop::collection::vec((0u64..300, 0usize..2), 1..6),
            delays in prop::collection::vec(prop_oneof![9 => (0u64..150).prop_map(Some), 1 => Just(None)], 1..9),
            outcome in prop::option::of(carrier()),
        ) {
            let mut world = World {
                both: [Accord::new(true, PATIENCE), Accord::new(false, PATIENCE)],
                due: Vec::new(), delays, outcome, used: 0, measured: 0, lost: false,
            };
            world.run(&wants);
            prop_assert!(world.measured <= 1);
            for (_, who) in &wants {
                prop_assert!(world.both[*who].settled().is_some(), "{who} waits for ever");
            }
            for one in &world.both {
                prop_assert_eq!(one.deadline(), None);
                let (carrier, reason) = one.settled().unwrap_or((Carrier::Tcp, Reason::NoAnswer));
                let measured = matches!(reason, Reason::Measured | Reason::Told);
                prop_assert!(carrier == Carrier::Tcp || (measured && outcome == Some(Carrier::Udp)));
            }
            let wanted = |who| wants.iter().any(|(_, one)| *one == who);
            if !world.lost && wanted(1) {
                let both = world.both.each_ref().map(|one| one.settled().map(|(carrier, _)| carrier));
                prop_assert_eq!(both[0], both[1]);
            }
        }
    }

    #[test]
    fn tcp_is_kept_where_packets_bring_little() {
        let of = |rate, millis| Measured {
            rate,
            small: Duration::from_millis(millis),
            again: 0,
        };
        let tcp = of(100e6, 10);
        assert_eq!(better(&tcp, &of(110e6, 9)), Carrier::Tcp);
        assert_eq!(better(&tcp, &of(120e6, 20)), Carrier::Udp);
        assert_eq!(better(&tcp, &of(98e6, 4)), Carrier::Udp);
        assert_eq!(better(&tcp, &of(90e6, 1)), Carrier::Tcp);
        assert_eq!(better(&of(0.0, 900), &of(1e6, 900)), Carrier::Udp);
        assert_eq!(better(&tcp, &of(0.0, 900)), Carrier::Tcp);
    }

    #[test]
    fn a_follower_that_gave_up_takes_what_it_is_told_later() {
        let mut follower = Accord::new(false, PATIENCE);
        assert_eq!(follower.want(Duration::ZERO), Some(Do::Ask));
        assert_eq!(follower.want(Duration::ZERO), None);
        assert_eq!(follower.deadline(), Some(PATIENCE));
        assert_eq!(follower.on_time(PATIENCE), None);
        assert_eq!(follower.settled(), Some((Carrier::Tcp, Reason::NoAnswer)));
        follower.told(Carrier::Udp);
        assert_eq!(follower.settled(), Some((Carrier::Udp, Reason::Told)));
    }
}
