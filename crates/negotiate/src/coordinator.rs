//! The one that decides: counts who announced what, answers when all have, in one order.
//!
//! Sans-IO: messages go in with [`Coordinator::receive`], time with [`Coordinator::tick`], and what
//! is to be sent to *every* rank comes out of [`Coordinator::take`].
//!
//! Beside it: the answers it remembers (`answers`), which of them are launched together (`fusion`), and
//! when the last launches become a schedule (`history`).

use crate::answers::{Answers, Key};
use crate::check;
use crate::fusion;
use crate::history::History;
use crate::wire::{Answer, Down, Kind, Part, Request, Up};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// What a coordinator goes by. Times are in microseconds.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Bytes up to which answers of one sort are launched together; 0: each by itself.
    pub fusion: u64,
    /// Answers that are remembered; 0: none, and nothing is frozen.
    pub cache: usize,
    /// How often a sequence must have come in a row before it is frozen; 0: never.
    pub repeats: usize,
    /// A step of more bytes is never frozen: agreement costs it nothing.
    pub frozen_bytes: u64,
    /// After this a warning names who is missing; 0: never.
    pub stall_warn: u64,
    /// After this everything is aborted; 0: never.
    pub stall_abort: u64,
    /// Whether to record [`Event`]s.
    pub record: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            fusion: 128 << 20,
            cache: 1024,
            repeats: 4,
            frozen_bytes: 1 << 20,
            stall_warn: 60_000_000,
            stall_abort: 0,
            record: false,
        }
    }
}

/// The name of the launch by which all ranks learn that a first one has joined.
pub const JOINING: &str = "joining";

/// A moment of a negotiation, for the timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When, in microseconds.
    pub at: u64,
    /// The request's name; empty for a cycle.
    pub name: String,
    /// What is negotiated.
    pub kind: Kind,
    /// Which moment.
    pub moment: Moment,
}

/// See [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The first rank has announced it.
    Start,
    /// This rank has.
    Ready(u32),
    /// All have.
    End,
    /// Answers are given out.
    Cycle,
}

struct Entry {
    /// By member.
    requests: BTreeMap<u32, Arc<Request>>,
    since: u64,
    warned: bool,
}

/// See the module's text.
pub struct Coordinator {
    policy: Policy,
    size: u32,
    now: u64,
    epoch: u32,
    frozen: bool,
    sets: BTreeMap<u32, Vec<u32>>,
    next_set: u32,
    table: HashMap<Key, Entry>,
    joined: BTreeSet<u32>,
    last_joined: u32,
    /// Ranks that have ended well. What needs them is an error; the rest goes on.
    left: BTreeSet<u32>,
    answers: Answers,
    history: History,
    out: Vec<Down>,
    events: Vec<Event>,
    warnings: Vec<String>,
    ended: bool,
}

impl Coordinator {
    /// For `size` ranks. `sets`: the process sets that exist from the start, numbered from 1.
    #[must_use]
    pub fn new(size: u32, sets: &[Vec<u32>], policy: Policy) -> Self {
        let mut all = BTreeMap::from([(0, (0..size).collect::<Vec<_>>())]);
        for (index, ranks) in sets.iter().enumerate() {
            all.insert(index as u32 + 1, ranks.clone());
        }
        Self {
            answers: Answers::new(policy.cache),
            history: History::new(policy.repeats, policy.frozen_bytes),
            next_set: all.len() as u32,
            policy,
            size,
            now: 0,
            epoch: 0,
            frozen: false,
            sets: all,
            table: HashMap::new(),
            joined: BTreeSet::new(),
            last_joined: 0,
            left: BTreeSet::new(),
            out: Vec::new(),
            events: Vec::new(),
            warnings: Vec::new(),
            ended: false,
        }
    }

    /// What every rank must be told, in this order.
    pub fn take(&mut self) -> Vec<Down> {
        std::mem::take(&mut self.out)
    }

    /// What happened since the last call, if it is recorded.
    pub fn events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Warnings since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Record events from now on, or no longer.
    pub fn record(&mut self, on: bool) {
        self.policy.record = on;
    }

    fn event(&mut self, name: &str, kind: Kind, moment: Moment) {
        if self.policy.record {
            self.events.push(Event {
                at: self.now,
                name: name.to_owned(),
                kind,
                moment,
            });
        }
    }

    /// A message of `rank`, at `now` microseconds.
    pub fn receive(&mut self, rank: u32, message: Up, now: u64) {
        self.now = now;
        if self.ended {
            return;
        }
        match message {
            Up::Shutdown(epoch) => {
                if self.holds(epoch) {
                    self.out.push(Down::Shutdown(rank));
                    self.leaves(rank);
                }
            }
            Up::Failed(reason) => {
                self.abort(format!("rank {rank} of {} has failed: {reason}", self.size));
            }
            Up::Thaw(epoch) => {
                if self.frozen && epoch == self.epoch {
                    self.out.push(Down::Thaw(epoch));
                }
            }
            Up::Announce {
                epoch,
                hits,
                requests,
            } => {
                if !self.holds(epoch) {
                    return;
                }
                let known: Vec<_> = hits
                    .iter()
                    .filter_map(|hit| self.answers.get(*hit).map(|a| self.own(rank, a)))
                    .collect();
                let new = requests.into_iter().map(Arc::new);
                let mut ready = Vec::new();
                for request in known.into_iter().chain(new) {
                    self.announce(rank, request, &mut ready);
                }
                self.give(ready);
            }
        }
    }

    /// Whether what a rank says in `epoch` counts. If that has ended, it says it anew.
    fn holds(&mut self, epoch: u32) -> bool {
        if epoch < self.epoch || (epoch == self.epoch && self.frozen) {
            return false;
        }
        if epoch > self.epoch {
            self.thawed(epoch);
        }
        true
    }

    /// `rank` has ended well: what waits for it is an error on all ranks.
    fn leaves(&mut self, rank: u32) {
        self.left.insert(rank);
        self.history.clear();
        let needs = |key: &Key| self.sets.get(&key.0).is_some_and(|set| set.contains(&rank));
        let mut waiting: Vec<(u64, Key)> = self
            .table
            .iter()
            .filter(|(key, _)| needs(key))
            .map(|(key, entry)| (entry.since, key.clone()))
            .collect();
        waiting.sort();
        for (_, key) in waiting {
            let request = self
                .table
                .remove(&key)
                .and_then(|entry| entry.requests.into_values().next());
            if let Some(request) = request {
                self.refuse(&request, gone(rank));
            }
        }
        if self.left.len() == self.size as usize {
            self.ended = true;
        }
    }

    /// Whether nobody needs this coordinator any more.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    fn refuse(&mut self, request: &Request, error: String) {
        let answer = Answer {
            request: request.clone(),
            rows: Vec::new(),
            value: 0,
            error,
        };
        self.out
            .push(Down::Launch(vec![Part::New(0, Arc::new(answer))]));
    }

    /// A rank has gone without a word.
    pub fn lost(&mut self, rank: u32, why: &str) {
        if !self.ended && !self.left.contains(&rank) {
            self.abort(format!("rank {rank} of {} has gone: {why}", self.size));
        }
    }

    fn abort(&mut self, reason: String) {
        self.ended = true;
        self.table.clear();
        self.out.push(Down::Abort(reason));
    }

    fn thawed(&mut self, epoch: u32) {
        self.epoch = epoch;
        self.frozen = false;
        self.history.thawed();
    }

    /// What `rank` must have requested to get this answer.
    fn own(&self, rank: u32, answer: &Answer) -> Arc<Request> {
        let mut request = answer.request.clone();
        if let Some(place) = self.place(request.set, rank)
            && let Some(row) = answer.rows.get(place)
        {
            if request.kind == Kind::Alltoall {
                request.splits.clone_from(row);
            } else {
                for (tensor, rows) in request.tensors.iter_mut().zip(row) {
                    tensor.shape[0] = *rows;
                }
            }
        }
        Arc::new(request)
    }

    fn place(&self, set: u32, rank: u32) -> Option<usize> {
        self.sets.get(&set)?.iter().position(|r| *r == rank)
    }

    fn announce(&mut self, rank: u32, request: Arc<Request>, ready: &mut Vec<Key>) {
        let key = (request.set, request.name.clone());
        let Some(members) = self.sets.get(&request.set) else {
            let error = format!("process set {} does not exist", request.set);
            return self.refuse(&request, error);
        };
        if !members.contains(&rank) {
            return; // refused by the rank itself; a stray message changes nothing
        }
        if let Some(other) = members.iter().find(|other| self.left.contains(other)) {
            let error = gone(*other);
            return self.refuse(&request, error);
        }
        let kind = request.kind;
        let entry = self.table.entry(key.clone()).or_insert_with(|| Entry {
            requests: BTreeMap::new(),
            since: self.now,
            warned: false,
        });
        let first = entry.requests.is_empty();
        entry.requests.insert(rank, request);
        if first {
            self.event(&key.1, kind, Moment::Start);
        }
        self.event(&key.1, kind, Moment::Ready(rank));
        if kind == Kind::Join {
            if self.joined.is_empty() {
                self.tell_of_join(&key);
            }
            self.joined.insert(rank);
            self.last_joined = rank;
            // One rank less to wait for, in everything.
            let mut waiting: Vec<_> = self.table.iter().map(|(k, e)| (e.since, k)).collect();
            waiting.sort();
            let now_ready = waiting
                .into_iter()
                .filter(|(_, k)| !ready.contains(k) && self.complete(k))
                .map(|(_, k)| k.clone())
                .collect::<Vec<_>>();
            ready.extend(now_ready);
        } else if self.complete(&key) && !ready.contains(&key) {
            ready.push(key);
        }
    }

    /// The first rank has joined. What the others do beside the negotiation, it must do too: they
    /// are told, with what the rank has said of it in its request's splits.
    fn tell_of_join(&mut self, key: &Key) {
        let joins = self.table.get(key).map(|entry| entry.requests.values());
        let Some(join) = joins.and_then(|mut requests| requests.next()) else {
            return;
        };
        let request = Request {
            name: JOINING.to_owned(),
            kind: Kind::Barrier,
            ..(**join).clone()
        };
        let answer = Answer {
            request,
            rows: Vec::new(),
            value: 0,
            error: String::new(),
        };
        self.out
            .push(Down::Launch(vec![Part::New(0, Arc::new(answer))]));
    }

    fn complete(&self, key: &Key) -> bool {
        let (Some(entry), Some(members)) = (self.table.get(key), self.sets.get(&key.0)) else {
            return false;
        };
        let join = entry.requests.values().any(|r| r.kind == Kind::Join);
        members.iter().all(|rank| {
            entry.requests.contains_key(rank) || (!join && key.0 == 0 && self.joined.contains(rank))
        })
    }

    /// Answers what is ready, fused.
    fn give(&mut self, ready: Vec<Key>) {
        if ready.is_empty() {
            return;
        }
        self.event("", Kind::Barrier, Moment::Cycle);
        let mut answers: VecDeque<Part> = VecDeque::new();
        for key in ready {
            if let Some(part) = self.conclude(&key) {
                answers.push_back(part);
            }
        }
        while let Some(first) = answers.pop_front() {
            let mut parts = vec![first];
            fusion::fuse(&mut parts, &mut answers, &self.answers, self.policy.fusion);
            self.history.note(&parts, &self.answers);
            self.out.push(Down::Launch(parts));
        }
        if self.answers.evict(|key| self.table.contains_key(key)) {
            self.history.clear();
        }
        let evicted = self.answers.take_evicted();
        if !evicted.is_empty() {
            // After the launches: by then nobody waits for an answer under these numbers.
            self.out.push(Down::Evict(evicted));
        }
        self.freeze();
    }

    /// Takes `key` out of the table and answers it.
    fn conclude(&mut self, key: &Key) -> Option<Part> {
        let entry = self.table.remove(key)?;
        let requests: Vec<&Request> = entry.requests.values().map(AsRef::as_ref).collect();
        let kind = requests[0].kind;
        self.event(&key.1, kind, Moment::End);
        let partial = requests.len() < self.sets.get(&key.0)?.len();
        let number = self.answers.number(key);
        // All of them repeat what is cached?
        if let Some(number) = number
            && !partial
            && let Some(answer) = self.answers.get(number).cloned()
        {
            let repeated = entry
                .requests
                .iter()
                .all(|(rank, request)| *self.own(*rank, &answer) == **request);
            if repeated {
                self.answers.used(number);
                return Some(Part::Known(number));
            }
        }
        let mut answer = check::answer(&requests, partial && kind != Kind::Join);
        if answer.error.is_empty() {
            self.act(&mut answer);
        }
        if let Some(number) = number
            && self.answers.forget(number)
        {
            self.history.clear();
        }
        let keeps = matches!(
            kind,
            Kind::Allreduce
                | Kind::Adasum
                | Kind::Allgather
                | Kind::Alltoall
                | Kind::Broadcast
                | Kind::Reducescatter
        );
        let answer = Arc::new(answer);
        let number = if keeps && answer.error.is_empty() && !partial {
            self.answers.keep(key, &answer)
        } else {
            0
        };
        Some(Part::New(number, answer))
    }

    /// The effect of an answer on the coordinator itself.
    fn act(&mut self, answer: &mut Answer) {
        match answer.request.kind {
            Kind::Join => {
                answer.value = i64::from(self.last_joined);
                self.joined.clear();
            }
            Kind::AddSet => {
                let ranks: Vec<u32> = answer.request.splits.iter().map(|r| *r as u32).collect();
                answer.value = -1;
                if !self.sets.values().any(|set| *set == ranks) {
                    answer.value = i64::from(self.next_set);
                    self.sets.insert(self.next_set, ranks);
                    self.next_set += 1;
                }
            }
            Kind::RemoveSet => {
                let set = answer.request.root;
                answer.value = if set != 0 && self.sets.remove(&set).is_some() {
                    i64::from(set)
                } else {
                    -1
                };
                self.table.retain(|key, _| key.0 != set || set == 0);
                if set != 0 && self.answers.forget_set(set) {
                    self.history.clear();
                }
            }
            _ => {}
        }
    }

    /// Freezes where the last launches are one sequence.
    fn freeze(&mut self) {
        if self.frozen || !self.joined.is_empty() || !self.left.is_empty() {
            return;
        }
        if let Some(schedule) = self.history.schedule() {
            self.epoch += 1;
            self.frozen = true;
            // What was announced for the old epoch is announced again.
            self.table.clear();
            self.out.push(Down::Freeze(self.epoch, schedule));
        }
    }

    /// Time passes: warns of, and in the end aborts, what waits for a rank too long.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        if self.ended {
            return;
        }
        let mut stalled: BTreeMap<Vec<u32>, Vec<String>> = BTreeMap::new();
        let mut fatal = None;
        for (key, entry) in &mut self.table {
            let waited = now.saturating_sub(entry.since);
            let Some(members) = self.sets.get(&key.0) else {
                continue;
            };
            // Who has joined early waits for the others by design.
            if entry.requests.values().any(|r| r.kind == Kind::Join) {
                continue;
            }
            let missing = || {
                members
                    .iter()
                    .filter(|rank| !entry.requests.contains_key(rank))
                    .filter(|rank| key.0 != 0 || !self.joined.contains(rank))
                    .copied()
                    .collect::<Vec<_>>()
            };
            if self.policy.stall_abort > 0 && waited >= self.policy.stall_abort {
                fatal = Some((key.1.clone(), missing(), waited));
            } else if self.policy.stall_warn > 0
                && waited >= self.policy.stall_warn
                && !entry.warned
            {
                stalled.entry(missing()).or_default().push(key.1.clone());
                entry.warned = true;
            }
        }
        for (ranks, mut names) in stalled {
            names.sort();
            self.warnings.push(format!(
                "stalled for more than {} s, waiting for {}: {}",
                self.policy.stall_warn / 1_000_000,
                ranks_text(&ranks),
                names.join(", ")
            ));
        }
        if let Some((name, ranks, waited)) = fatal {
            self.abort(format!(
                "{name} waited {} s for {}",
                waited / 1_000_000,
                ranks_text(&ranks)
            ));
        }
    }
}

fn gone(rank: u32) -> String {
    format!("Horovod has been shut down: rank {rank} called shutdown, or ended")
}

fn ranks_text(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!(
        "rank{} {}",
        if ranks.len() == 1 { "" } else { "s" },
        list.join(", ")
    )
}
