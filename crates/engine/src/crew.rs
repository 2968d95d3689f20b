//! Which worker has which connection. One core copies as much as most networks carry, and one thread
//! that is awake costs less and answers sooner than four; so a peer's connections start on its home
//! worker, and move to others when that has no time left. Where workers have time to spare they
//! gather on fewer: each costs processor time for itself (it looks, naps, wakes), and one that has
//! little to do at a time makes many small calls of it.
//!
//! Time left is measured while a worker is awake: NCCL waits for the oldest message, so a worker that
//! copies without a pause while there is something to copy holds it up, however long it sleeps
//! afterwards. Naps count as time left, because they are taken only where a network is what limits.
//! Where none is (or where it cannot be seen, because the traffic only comes in), sleep counts as time
//! left too: who sleeps there has had nothing to do.
//!
//! How much a worker could take besides is not seen from its time: the less there is to do, the less
//! it does at once, and the more time a byte takes. So for gathering a worker's load is what it moves,
//! against the most that any of them moved in the same time of work.

use std::time::Duration;

/// A turn that moved less, where the network is the limit, was not worth it ...
pub(crate) const LIGHT: usize = 128 << 10;
/// ... and there will be more to move after a nap of this, or as long as so much takes to come: the
/// longer, the slower the network. What is on its way ([`evener_proto::ahead`]) lasts for several.
const NAP: Duration = Duration::from_micros(25);
const NAP_MOST: Duration = Duration::from_micros(75);
/// Between two looks, sleep left aside. An all-reduce of NCCL's takes a few to a hundred milliseconds.
pub(crate) const EVERY: Duration = Duration::from_millis(2);
/// Above this part of its time a worker has too much to do where the network is the limit, ...
const FULL: f64 = 0.9;
/// and above this where it is not: then NCCL waits for workers, and for a busy one longer ...
const BUSY: f64 = 0.6;
/// The network is the limit if it was for this part of the time, of this many looks: between two
/// all-reduces it never is.
const LIMITED: f64 = 0.3;
const LIMITED_LOOKS: f64 = 8.0;
/// ... and one that is less busy than this part of it can take more.
const SPARE: f64 = 0.5;
/// This many looks in a row must say that a worker is full.
const FULL_LOOKS: u32 = 2;
/// What two workers have to do is enough for one if it is less than this part of the most.
const TOGETHER: f64 = 0.75;
/// This many looks in a row must say so.
const CALM_LOOKS: u32 = 8;
/// What a worker has said of itself is not true any more after this.
const STALE: Duration = Duration::from_millis(20);
/// Between two times that workers gather: they must first see what the last one has brought.
const SETTLE: Duration = Duration::from_millis(10);
/// Where that was wrong (one was full at once), so long it is not tried again; each time longer.
const HOLD: Duration = Duration::from_millis(100);
const HOLD_MOST: Duration = Duration::from_secs(5);
/// The most that a worker moved is forgotten by so much with each look: networks change.
const FORGET: f64 = 0.9995;

/// What a worker did since its last look.
#[derive(Debug, Default)]
pub(crate) struct Load {
    busy: Duration,
    pub(crate) awake: Duration,
    /// For so long of that the network was the limit.
    limited: Duration,
    asleep: Duration,
    moved: u64,
    /// Processor time of the thread at the last look.
    used: Duration,
    /// How long a turn's worth of bytes takes to come.
    pause: Duration,
}

impl Load {
    /// A turn of the loop, or a nap, has taken `time`. `limited`: there was more to send than may be
    /// on its way.
    pub(crate) fn count(&mut self, time: Duration, active: bool, limited: bool, moved: usize) {
        self.awake += time;
        if limited {
            self.limited += time;
        }
        self.moved += moved as u64;
        if active {
            self.busy += time;
        }
    }

    /// It has slept for `time`.
    pub(crate) fn sleep(&mut self, time: Duration) {
        self.asleep += time;
    }

    /// How long a nap should be.
    pub(crate) fn nap(&self) -> Duration {
        self.pause.clamp(NAP, NAP_MOST)
    }

    /// What was counted since the last look, where the thread has used so much processor time by now.
    /// One that waits for a processor is not full: another would wait as well.
    pub(crate) fn take(&mut self, used: Duration) -> Load {
        let turns = self.moved as f64 / LIGHT as f64;
        let next = Load {
            used,
            pause: self.awake.div_f64(turns.max(0.01)),
            ..Load::default()
        };
        let mut load = std::mem::replace(self, next);
        load.busy = load.busy.min(used.saturating_sub(load.used));
        load
    }
}

/// What a worker said of itself at its last look.
#[derive(Debug, Clone, Copy, Default)]
struct Member {
    /// How much of its time it works.
    busy: f64,
    /// For which part of the last looks' time the network was the limit.
    limited: f64,
    /// Bytes per second that it moves while it is awake.
    moves: f64,
    at: Duration,
    full: u32,
    calm: u32,
}

/// What a worker should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    Stay,
    /// Give half of its connections to this worker.
    Half(usize),
    /// Give all to this one.
    All(usize),
}

/// What the workers of an engine know of each other's load.
#[derive(Debug, Default)]
pub struct Crew {
    members: Vec<Member>,
    /// The most bytes that one of them moved in a second of work.
    most: f64,
    /// When they gathered last, and until when they may not again.
    gathered: Option<Duration>,
    until: Duration,
    hold: Duration,
}

impl Crew {
    /// The number of workers.
    pub fn new(workers: usize) -> Crew {
        Crew {
            members: vec![Member::default(); workers],
            hold: HOLD,
            ..Crew::default()
        }
    }

    /// Worker `me` has looked at its load. `home`: it may not give all away. `mates`: the others that
    /// have connections to the same peer, in the order in which they should take its own.
    pub(crate) fn look(
        &mut self,
        me: usize,
        load: &Load,
        home: bool,
        mates: &[usize],
        now: Duration,
    ) -> Advice {
        let awake = load.awake.as_secs_f64().max(1e-9);
        let busy = load.busy.as_secs_f64();
        if busy > awake / 2.0 {
            self.most = self.most.max(load.moved as f64 / busy);
        }
        self.most *= FORGET;
        let limited = load.limited.as_secs_f64() / awake;
        let member = &mut self.members[me];
        member.limited += (limited - member.limited) / LIMITED_LOOKS;
        let limited = member.limited >= LIMITED;
        let asleep = if limited {
            0.0
        } else {
            load.asleep.as_secs_f64()
        };
        (member.busy, member.moves) = (busy / (awake + asleep), load.moved as f64 / awake);
        member.at = now;
        let full = member.busy >= if limited { FULL } else { BUSY };
        member.full = if full { member.full + 1 } else { 0 };
        if member.full >= FULL_LOOKS {
            (member.full, member.calm) = (0, 0);
            return self.spread(me, now);
        }
        let to = if home || full || !limited || now < self.until {
            None
        } else {
            let fits = |to: &&usize| {
                let sum = self.moves(me, now) + self.moves(**to, now);
                sum < self.most * TOGETHER
            };
            mates.iter().find(fits).copied()
        };
        let member = &mut self.members[me];
        member.calm = if to.is_some() { member.calm + 1 } else { 0 };
        match to {
            Some(to) if member.calm >= CALM_LOOKS => {
                let moves = member.moves;
                *member = Member {
                    limited: member.limited,
                    ..Member::default()
                };
                self.members[to].moves += moves;
                self.gathered = Some(now);
                self.until = now + SETTLE;
                Advice::All(to)
            }
            _ => Advice::Stay,
        }
    }

    /// One that is full gives half to the one with most time, if there is one.
    fn spread(&mut self, me: usize, now: Duration) -> Advice {
        let others = (0..self.members.len()).filter(|one| *one != me);
        let least = others.min_by(|a, b| self.busy(*a, now).total_cmp(&self.busy(*b, now)));
        let spare = self.members[me].busy * SPARE;
        let Some(to) = least.filter(|to| self.busy(*to, now) < spare) else {
            return Advice::Stay;
        };
        // Nobody else gives to it before it has counted what this brings.
        let half = self.members[me].moves / 2.0;
        self.members[me].moves = half;
        self.members[to] = Member {
            busy: FULL,
            limited: self.members[me].limited,
            moves: self.moves(to, now) + half,
            at: now,
            ..Member::default()
        };
        if self.gathered.is_some_and(|at| now < at + HOLD) {
            self.hold = (self.hold * 2).min(HOLD_MOST);
        }
        self.until = now + self.hold;
        Advice::Half(to)
    }

    fn busy(&self, worker: usize, now: Duration) -> f64 {
        self.fresh(worker, now).map_or(0.0, |member| member.busy)
    }

    fn moves(&self, worker: usize, now: Duration) -> f64 {
        self.fresh(worker, now).map_or(0.0, |member| member.moves)
    }

    fn fresh(&self, worker: usize, now: Duration) -> Option<&Member> {
        let member = self.members.get(worker)?;
        (now < member.at + STALE).then_some(member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a worker does in two milliseconds of a network that is the limit and gives it this: bytes
    /// a second of the work that is its own, where a turn costs something besides its bytes.
    fn load(wanted: f64) -> Load {
        const MOST: f64 = 4e9;
        let busy = (wanted / MOST * 1.1 + 0.1).min(1.0);
        Load {
            busy: EVERY.mul_f64(busy),
            awake: EVERY,
            limited: EVERY,
            asleep: Duration::ZERO,
            moved: (wanted.min(MOST * busy) * EVERY.as_secs_f64()) as u64,
            used: Duration::ZERO,
            pause: Duration::ZERO,
        }
    }

    /// Lets this many bytes per second be shared by the connections that each worker has, for a while:
    /// how many have any in the end, and how often some moved.
    fn settle(
        crew: &mut Crew,
        conns: &mut [usize],
        total: f64,
        from: f64,
        to: f64,
    ) -> (usize, u32) {
        let all: usize = conns.iter().sum();
        let (mut now, mut moves) = (from, 0);
        while now < to {
            now += EVERY.as_secs_f64();
            for me in 0..conns.len() {
                if conns[me] == 0 {
                    continue;
                }
                let mates: Vec<usize> = (0..conns.len())
                    .filter(|one| *one != me && conns[*one] > 0)
                    .collect();
                let load = load(total * conns[me] as f64 / all as f64);
                let at = Duration::from_secs_f64(now);
                let (going, other) = match crew.look(me, &load, me == 0, &mates, at) {
                    Advice::Stay => continue,
                    Advice::Half(other) => (conns[me] / 2, other),
                    Advice::All(other) => (conns[me], other),
                };
                moves += 1;
                conns[me] -= going;
                conns[other] += going;
            }
        }
        (conns.iter().filter(|count| **count > 0).count(), moves)
    }

    #[test]
    fn workers_are_as_many_as_there_is_work_for() {
        let mut crew = Crew::new(8);
        let mut conns = [16, 0, 0, 0, 0, 0, 0, 0];
        // One core's worth, then much more, then little.
        assert_eq!(settle(&mut crew, &mut conns, 2e9, 0.0, 0.5).0, 1);
        let (many, _) = settle(&mut crew, &mut conns, 16e9, 0.5, 1.0);
        assert!(many > 4, "{many}");
        let (few, _) = settle(&mut crew, &mut conns, 2e9, 1.0, 8.0);
        assert_eq!(few, 1);
        assert_eq!(conns[0], 16);
    }

    #[test]
    fn what_does_not_fit_together_is_not_tried_for_ever() {
        for total in [3.4e9, 5e9, 7e9, 10e9] {
            let mut crew = Crew::new(8);
            let mut conns = [16, 0, 0, 0, 0, 0, 0, 0];
            settle(&mut crew, &mut conns, total, 0.0, 10.0);
            let (_, moves) = settle(&mut crew, &mut conns, total, 10.0, 20.0);
            assert!(moves <= 8, "{total}: {moves}");
        }
    }

    #[test]
    fn where_the_network_is_not_the_limit_they_spread_early_and_stay() {
        let mut crew = Crew::new(2);
        let free = |wanted| Load {
            limited: Duration::ZERO,
            ..load(wanted)
        };
        let look = |crew: &mut Crew, me: usize, load: &Load, step: u32| {
            crew.look(me, load, me == 0, &[1 - me], EVERY * step)
        };
        // Three quarters of what a worker could do; now and then the network is not the limit.
        for step in 1..500 {
            let load = if step % 50 < 2 {
                free(2.4e9)
            } else {
                load(2.4e9)
            };
            let advice = look(&mut crew, 0, &load, step);
            assert!(step < 10 || advice == Advice::Stay, "{step}");
        }
        let mut crew = Crew::new(2);
        assert_eq!(look(&mut crew, 0, &free(2.4e9), 3), Advice::Stay);
        assert_eq!(look(&mut crew, 0, &free(2.4e9), 4), Advice::Half(1));
        for step in 5..500 {
            for me in 0..2 {
                assert_eq!(look(&mut crew, me, &free(0.8e9), step), Advice::Stay);
            }
        }
        let gathers = |step| look(&mut crew, 1, &load(0.8e9), step) == Advice::All(0);
        assert!((500..600).any(gathers));
    }

    #[test]
    fn one_that_sleeps_now_and_then_is_not_busy_where_no_network_limits_it() {
        let mut crew = Crew::new(2);
        let seldom = Load {
            limited: Duration::ZERO,
            asleep: EVERY / 2,
            ..load(2.4e9)
        };
        for step in 1..100 {
            let advice = crew.look(0, &seldom, true, &[1], EVERY * step);
            assert_eq!(advice, Advice::Stay);
        }
    }

    #[test]
    fn one_that_has_just_slept_is_free() {
        let mut crew = Crew::new(2);
        let at = |ms: u64| Duration::from_millis(ms);
        for step in 0..3 {
            crew.look(1, &load(9e9), false, &[0], at(step));
            assert_eq!(crew.look(0, &load(1e9), true, &[1], at(step)), Advice::Stay);
        }
        let mut last = Advice::Stay;
        for step in 30..34 {
            last = crew.look(0, &load(9e9), true, &[1], at(step));
            if last != Advice::Stay {
                break;
            }
        }
        assert_eq!(last, Advice::Half(1));
    }
}
