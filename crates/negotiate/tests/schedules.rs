//! Any order of events: every rank launches the same sequence, and everything ends.
//!
//! A world of workers and a coordinator in virtual time. What happens next (a message arrives, a rank
//! submits, an executor launches, the clock ticks) is drawn at random. A collective blocks the rank
//! that launched it until all members have launched theirs, and must be the same for all: that is
//! what NCCL and Gloo ask for, and here a difference is a failed test, not a hang.

use evener_negotiate::coordinator::JOINING;
use evener_negotiate::{Action, Coordinator, Down, Kind, Meta, Policy, Request, Up, Worker};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug, Clone)]
struct Plan {
    ranks: u32,
    /// Each round: names, and for each rank the order in which it submits them.
    rounds: Vec<(Vec<usize>, Vec<u64>)>,
    repeats: usize,
    cache: usize,
    fusion: u64,
    /// Ranks, and the number of rounds after which each joins.
    leaves: Vec<(u32, usize)>,
    /// A rank that changes a shape in a round, so that all get an error there.
    wrong: Option<(u32, usize)>,
    /// Ranks, and the number of rounds after which each ends, while the others go on. Where there are any, all ranks end
    /// by saying so.
    finishes: Vec<(u32, usize)>,
    /// Whether a rank submits all of a round at once and then waits; else anything may come between.
    bursts: bool,
    seed: u64,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n.max(1)
    }
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

struct Rank {
    worker: Worker,
    inbox: VecDeque<Down>,
    outbox: VecDeque<Up>,
    round: usize,
    to_submit: Vec<Request>,
    open: BTreeSet<String>,
    /// A launch that blocks, as (set, index in the set's log, action).
    running: Option<(u32, usize, Action)>,
    joined: bool,
    finishing: bool,
    done: bool,
    errors: usize,
}

type Log = Vec<BTreeMap<u32, (String, bool)>>;

struct World {
    plan: Plan,
    random: Random,
    coordinator: Coordinator,
    ranks: Vec<Rank>,
    logs: BTreeMap<u32, Log>,
    now: u64,
}

fn request(name: &str, set: u32, elements: u64) -> Request {
    Request {
        name: name.to_owned(),
        set,
        kind: Kind::Allreduce,
        tensors: vec![Meta {
            dtype: 7,
            shape: vec![elements],
            label: String::new(),
        }],
        gpu: false,
        op: 1,
        root: 0,
        factors: (1.0, 1.0),
        splits: Vec::new(),
    }
}

/// Names from 100 on belong to the process set of ranks 0 and 1.
fn set_of(name: usize) -> u32 {
    u32::from(name >= 100)
}

impl World {
    fn new(plan: Plan) -> Self {
        let policy = Policy {
            repeats: plan.repeats,
            cache: plan.cache,
            fusion: plan.fusion,
            stall_warn: 0,
            ..Policy::default()
        };
        let rank = |rank| Rank {
            worker: Worker::new(rank, 5000),
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            round: 0,
            to_submit: Vec::new(),
            open: BTreeSet::new(),
            running: None,
            joined: false,
            finishing: false,
            done: false,
            errors: 0,
        };
        Self {
            random: Random(plan.seed),
            coordinator: Coordinator::new(plan.ranks, &[vec![0, 1]], policy),
            ranks: (0..plan.ranks).map(rank).collect(),
            logs: BTreeMap::new(),
            now: 0,
            plan,
        }
    }

    fn members(&self, set: u32) -> Vec<u32> {
        if set == 0 {
            (0..self.plan.ranks).collect()
        } else {
            vec![0, 1]
        }
    }

    /// One event somewhere. False where this rank had nothing to do.
    fn event(&mut self, rank: u32, what: usize) -> bool {
        let r = rank as usize;
        match what {
            0 => self.submits(rank),
            1 => {
                let me = &mut self.ranks[r];
                if !me.worker.unflushed() {
                    return false;
                }
                me.worker.flush();
                true
            }
            2 => {
                let messages = self.ranks[r].worker.take();
                let any = !messages.is_empty();
                // Through bytes, as on a wire.
                let coded = messages
                    .iter()
                    .map(|m| Up::decode(&m.encode()).expect("a message"));
                self.ranks[r].outbox.extend(coded);
                any
            }
            3 => {
                let Some(message) = self.ranks[r].outbox.pop_front() else {
                    return false;
                };
                self.coordinator.receive(rank, message, self.now);
                for message in self.coordinator.take() {
                    let coded = Down::decode(&message.encode()).expect("a message");
                    assert_eq!(coded, message);
                    for other in &mut self.ranks {
                        other.inbox.push_back(coded.clone());
                    }
                }
                true
            }
            4 => {
                let Some(message) = self.ranks[r].inbox.pop_front() else {
                    return false;
                };
                self.ranks[r].worker.receive(message, self.now);
                true
            }
            _ => self.executes(rank),
        }
    }

    fn submits(&mut self, rank: u32) -> bool {
        let now = self.now;
        let me = &mut self.ranks[rank as usize];
        if me.joined || me.finishing || me.done {
            return false;
        }
        if !me.to_submit.is_empty() {
            let count = if self.plan.bursts {
                me.to_submit.len()
            } else {
                1
            };
            for request in me.to_submit.drain(..count) {
                me.open.insert(request.name.clone());
                assert!(me.worker.submit(request, now));
            }
            if self.plan.bursts {
                me.worker.flush();
            }
            return true;
        }
        if !me.open.is_empty() {
            return false;
        }
        let leaves = self
            .plan
            .leaves
            .iter()
            .any(|(r, at)| *r == rank && me.round >= *at);
        if leaves || (me.round == self.plan.rounds.len() && !self.plan.leaves.is_empty()) {
            me.joined = true;
            let mut join = request("join", 0, 1);
            join.kind = Kind::Join;
            join.tensors.clear();
            assert!(me.worker.submit(join, now));
            return true;
        }
        let finishes = |(r, at): &(u32, usize)| *r == rank && me.round >= *at;
        let last = me.round == self.plan.rounds.len();
        if self.plan.finishes.iter().any(finishes) || (last && !self.plan.finishes.is_empty()) {
            me.finishing = true;
            me.worker.shutdown(now);
            return true;
        }
        if last {
            me.done = true;
            return true;
        }
        let (names, orders) = &self.plan.rounds[me.round];
        let mut mine: Vec<usize> = names.clone();
        mine.retain(|name| set_of(*name) == 0 || (rank < 2 && self.plan.leaves.is_empty()));
        Random(orders[rank as usize % orders.len()]).shuffle(&mut mine);
        let wrong = self.plan.wrong == Some((rank, me.round));
        me.to_submit = mine
            .iter()
            .map(|n| request(&format!("t{n}"), set_of(*n), 4 + u64::from(wrong)))
            .collect();
        me.round += 1;
        true
    }

    fn executes(&mut self, rank: u32) -> bool {
        let r = rank as usize;
        if self.ranks[r].running.is_none() {
            let Some(action) = self.ranks[r].worker.take_action() else {
                return false;
            };
            let (answers, real) = match &action {
                Action::Launch(answers) => (answers, true),
                Action::Frozen { answers, real } => (answers, *real),
                Action::End(reason) => {
                    assert!(self.ranks[r].finishing, "ended: {reason}");
                    self.ranks[r].done = true;
                    return true;
                }
            };
            let set = answers[0].request.set;
            if !self.members(set).contains(&rank) {
                return true;
            }
            if answers[0].error.contains("called shutdown") {
                // Nothing is launched: each rank learns it by itself.
                assert!(
                    self.members(set)
                        .iter()
                        .any(|m| self.ranks[*m as usize].finishing),
                    "an error of a set whose ranks all go on"
                );
                for answer in answers {
                    assert!(
                        self.ranks[r].open.remove(&answer.request.name),
                        "not submitted"
                    );
                }
                self.ranks[r].errors += 1;
                return true;
            }
            let frozen = matches!(action, Action::Frozen { .. });
            let names: Vec<_> = answers
                .iter()
                .map(|a| (&a.request.name, &a.error))
                .collect();
            let what = format!("{frozen} {names:?}");
            let log = self.logs.entry(set).or_default();
            let index = log.iter().take_while(|l| l.contains_key(&rank)).count();
            if index == log.len() {
                log.push(BTreeMap::new());
            }
            if let Some((_, (other, _))) = log[index].first_key_value() {
                assert_eq!(*other, what, "ranks launch different collectives");
            }
            log[index].insert(rank, (what, real));
            self.ranks[r].running = Some((set, index, action));
            return true;
        }
        let Some((set, index, action)) = self.ranks[r].running.take() else {
            return false;
        };
        let launched = &self.logs[&set][index];
        if launched.len() < self.members(set).len() {
            self.ranks[r].running = Some((set, index, action));
            return false;
        }
        let flagged = launched.values().any(|(_, real)| !real);
        let now = self.now;
        let me = &mut self.ranks[r];
        let answers = match action {
            Action::Frozen { answers, real } => {
                me.worker.finished(flagged, now);
                if flagged {
                    Vec::new()
                } else {
                    assert!(real);
                    answers
                }
            }
            Action::Launch(answers) => answers,
            Action::End(_) => unreachable!(),
        };
        for answer in answers {
            if answer.request.kind == Kind::Join {
                me.done = true;
            } else if answer.request.name == JOINING {
                // Nobody asked for it: the order above is what counts.
            } else if !me.joined {
                assert!(me.open.remove(&answer.request.name), "not submitted");
            } else {
                me.open.remove(&answer.request.name);
            }
            me.errors += usize::from(!answer.error.is_empty());
        }
        true
    }

    /// Until all are done; gives the number of frozen launches of rank 0.
    fn run(&mut self) -> u64 {
        for _ in 0..400_000 {
            if self.ranks.iter().all(|r| r.done) {
                return self.ranks[0].worker.frozen().1;
            }
            let rank = self.random.below(self.ranks.len()) as u32;
            let what = self.random.below(6);
            let moved = self.event(rank, what);
            self.now += 10;
            if !moved && self.random.below(50) == 0 {
                self.now += self.random.below(4000) as u64;
                for rank in &mut self.ranks {
                    rank.worker.tick(self.now);
                }
                self.coordinator.tick(self.now);
            }
        }
        let left: Vec<_> = self
            .ranks
            .iter()
            .map(|r| (r.round, &r.open, r.joined))
            .collect();
        panic!("not done: {left:?}");
    }
}

fn plans() -> impl Strategy<Value = Plan> {
    let round = (
        prop_oneof![
            5 => Just(vec![0, 1, 2]),
            2 => Just(vec![0]),
            1 => prop::collection::btree_set(prop_oneof![0..6usize, 100..102usize], 1..5)
                .prop_map(|s| s.into_iter().collect()),
        ],
        prop::collection::vec(any::<u64>(), 4),
        1..14usize,
    );
    (
        2..5u32,
        prop::collection::vec(round, 1..6),
        0..4usize,
        prop_oneof![Just(0usize), Just(2), Just(1024)],
        prop_oneof![Just(0u64), Just(40), Just(1 << 20)],
        prop::option::of((0..4u32, 0..20usize)),
        prop::option::of((0..4u32, 0..20usize)),
        any::<u64>(),
    )
        .prop_map(
            |(ranks, rounds, repeats, cache, fusion, leave, wrong, seed)| {
                let rounds: Vec<_> = rounds
                    .into_iter()
                    .flat_map(|(names, orders, times)| vec![(names, orders); times])
                    .collect();
                Plan {
                    ranks,
                    leaves: leave.iter().map(|(r, at)| (r % ranks, *at)).collect(),
                    wrong: wrong
                        .filter(|_| leave.is_none())
                        .map(|(r, at)| (r % ranks, at)),
                    finishes: Vec::new(),
                    bursts: false,
                    rounds,
                    repeats,
                    cache,
                    fusion,
                    seed,
                }
            },
        )
}

/// Rounds of many names, in an order of its own on each rank, each round some times in a row.
fn bursts() -> impl Strategy<Value = Plan> {
    let round = (
        prop::collection::btree_set(0..48usize, 1..40),
        prop::collection::vec(any::<u64>(), 4),
        1..8usize,
    );
    let rounds = prop::collection::vec(round, 1..5);
    (2..5u32, rounds, 0..4usize, any::<bool>(), any::<u64>()).prop_map(
        |(ranks, rounds, repeats, cached, seed)| {
            let several = |(names, orders, times): (BTreeSet<_>, _, usize)| {
                vec![(names.into_iter().collect(), orders); times]
            };
            Plan {
                ranks,
                rounds: rounds.into_iter().flat_map(several).collect(),
                repeats,
                cache: if cached { 1024 } else { 0 },
                fusion: 1 << 20,
                leaves: Vec::new(),
                wrong: None,
                finishes: Vec::new(),
                bursts: true,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_launch_one_sequence_and_all_of_it_ends(plan in plans()) {
        World::new(plan).run();
    }

    /// Operations of process sets whose ranks all go on succeed, whatever else fails.
    #[test]
    fn a_rank_that_ends_fails_what_needs_it_and_nothing_else(
        mut plan in plans(),
        finishes in prop::collection::vec((0..4u32, 0..20usize), 1..3),
    ) {
        plan.finishes = finishes.iter().map(|(r, at)| (r % plan.ranks, *at)).collect();
        plan.leaves.clear();
        plan.wrong = None;
        let mut world = World::new(plan);
        world.run();
        assert!(world.coordinator.ended());
    }

    /// Negotiated, frozen, and where a frozen schedule is left.
    #[test]
    fn a_burst_is_one_launch(plan in bursts()) {
        let mut world = World::new(plan);
        world.run();
        let kept = world.logs[&0].iter().filter(|ranks| ranks.values().all(|(_, real)| *real));
        assert_eq!(kept.count(), world.plan.rounds.len());
    }
}

fn steady(ranks: u32, rounds: usize) -> Plan {
    Plan {
        ranks,
        rounds: vec![(vec![0, 1], vec![1]); rounds],
        repeats: 3,
        cache: 64,
        fusion: 1 << 20,
        leaves: Vec::new(),
        wrong: None,
        finishes: Vec::new(),
        bursts: false,
        seed: 7,
    }
}

#[test]
fn a_steady_program_is_frozen() {
    let mut world = World::new(steady(3, 200));
    assert!(world.run() > 20);
}

#[test]
fn an_error_reaches_every_rank_also_out_of_a_frozen_schedule() {
    let mut plan = steady(3, 100);
    plan.wrong = Some((2, 80));
    let mut world = World::new(plan);
    world.run();
    assert!(world.ranks.iter().all(|r| r.errors == 2));
}

#[test]
fn steady_bursts_are_frozen_and_their_submissions_may_come_in_any_order() {
    let mut plan = steady(3, 100);
    plan.rounds = (0..100)
        .map(|round| {
            (
                (0..32).collect(),
                vec![9 * round, 9 * round + 1, 9 * round + 2],
            )
        })
        .collect();
    plan.bursts = true;
    let mut world = World::new(plan);
    let frozen = world.run();
    assert!(frozen > 80, "{frozen}");
    assert_eq!(world.logs[&0].len(), 100);
}

/// All ranks submit the frozen step first, and then what is in no step.
#[test]
fn a_burst_that_begins_with_a_frozen_step_is_one_launch() {
    for seed in 0..20 {
        let mut plan = steady(3, 10);
        plan.rounds = vec![(vec![0], vec![0]); 10];
        plan.rounds.push((vec![0, 1, 2], vec![seed]));
        plan.bursts = true;
        plan.seed = seed;
        let mut world = World::new(plan);
        assert!(world.run() >= 6);
        let real = |ranks: &&BTreeMap<_, (_, bool)>| ranks.values().all(|(_, real)| *real);
        assert_eq!(world.logs[&0].iter().filter(real).count(), 11);
    }
}

/// Ranks 0 and 1 have a set of their own, and rank 2 ends out of a frozen schedule.
#[test]
fn a_set_goes_on_without_a_rank_that_is_not_in_it() {
    let mut plan = steady(3, 100);
    plan.rounds[60..].fill((vec![0, 100], vec![1]));
    plan.finishes = vec![(2, 60)];
    let mut world = World::new(plan);
    world.run();
    assert_eq!(world.logs[&1].len(), 40);
    assert_eq!([0, 1].map(|r| world.ranks[r].errors >= 40), [true; 2]);
}
