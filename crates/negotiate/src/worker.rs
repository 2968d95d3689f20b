//! One rank's side: what it has submitted, what it announced, what it must launch.
//!
//! Sans-IO: [`Worker::submit`], [`Worker::receive`] and [`Worker::tick`] go in; messages for the
//! coordinator come out of [`Worker::take`], launches out of [`Worker::take_action`]. After a launch of the
//! frozen schedule the executor says with [`Worker::finished`] whether the flag was up.

use crate::wire::{Answer, Down, Part, Request, Up};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// What the executor has to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Launch these together, as agreed.
    Launch(Vec<Arc<Answer>>),
    /// Launch this step of the schedule with a flag; down where `real`, else up and with zeros. Then
    /// call [`Worker::finished`].
    Frozen {
        /// The step's answers.
        answers: Vec<Arc<Answer>>,
        /// Whether this rank has the data.
        real: bool,
    },
    /// Nothing more can be launched, and why.
    End(String),
}

type Key = (u32, String);

#[derive(Clone, Copy, PartialEq)]
enum Announced {
    No,
    Full,
    Hit(u32),
}

/// Where something that is submitted belongs.
#[derive(Clone, Copy, PartialEq)]
enum Scheduled {
    /// Into the frozen schedule's step at hand.
    InStep,
    /// Into another step of it.
    Later,
    /// Into none, or not as it is.
    No,
}

struct Pending {
    request: Arc<Request>,
    announced: Announced,
    since: u64,
}

struct Cached {
    answer: Arc<Answer>,
    /// This rank's own request; none where it had joined.
    request: Option<Arc<Request>>,
}

struct Schedule {
    steps: Vec<Vec<u32>>,
    at: usize,
    launched: bool,
    thaw: bool,
    said: bool,
    /// Since when the step at hand is launched.
    since: u64,
    /// How many were submitted in the step at hand. Kept, so that a burst of submissions costs its
    /// length and not its square.
    here: usize,
}

/// See the module's text.
pub struct Worker {
    rank: u32,
    epoch: u32,
    schedule: Option<Schedule>,
    pending: HashMap<Key, Pending>,
    order: VecDeque<Key>,
    cache: HashMap<u32, Cached>,
    numbers: HashMap<Key, u32>,
    /// Each with the time since when it is there.
    actions: VecDeque<(u64, Action)>,
    out: Vec<Up>,
    now: u64,
    patience: u64,
    /// This rank ends, and has to say so.
    ending: bool,
    /// It ends, and perhaps has said so.
    leaving: bool,
    ended: Option<String>,
    frozen_launches: u64,
}

impl Worker {
    /// The worker of `rank`. `patience`: microseconds that a frozen schedule may keep a submitted tensor waiting for
    /// others of its step.
    #[must_use]
    pub fn new(rank: u32, patience: u64) -> Self {
        Self {
            rank,
            epoch: 0,
            schedule: None,
            pending: HashMap::new(),
            order: VecDeque::new(),
            cache: HashMap::new(),
            numbers: HashMap::new(),
            actions: VecDeque::new(),
            out: Vec::new(),
            now: 0,
            patience,
            ending: false,
            leaving: false,
            ended: None,
            frozen_launches: 0,
        }
    }

    /// Messages for the coordinator. Announcements of what was submitted are among them only after
    /// [`Worker::flush`].
    pub fn take(&mut self) -> Vec<Up> {
        std::mem::take(&mut self.out)
    }

    /// What to do next.
    pub fn take_action(&mut self) -> Option<Action> {
        self.actions.pop_front().map(|(_, action)| action)
    }

    /// It is the next thing to do again.
    pub fn put_back(&mut self, action: Action) {
        self.actions.push_front((self.now, action));
    }

    /// Whether [`Worker::take_action`] has something.
    #[must_use]
    pub fn has_next(&self) -> bool {
        !self.actions.is_empty()
    }

    /// Since when it has; none where it has nothing.
    #[must_use]
    pub fn next_since(&self) -> Option<u64> {
        self.actions.front().map(|(since, _)| *since)
    }

    /// Why nothing more can be launched.
    #[must_use]
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Whether something was submitted that is not announced yet.
    #[must_use]
    pub fn unflushed(&self) -> bool {
        self.schedule.is_none() && !self.order.is_empty()
    }

    /// Whether a frozen schedule keeps something waiting, so that [`Worker::tick`] must be called.
    #[must_use]
    pub fn waits(&self) -> bool {
        let idle = |schedule: &Schedule| !schedule.launched && !self.pending.is_empty();
        self.schedule.as_ref().is_some_and(idle)
    }

    /// Whether the frozen schedule holds, and how many launches it has made so far.
    #[must_use]
    pub fn frozen(&self) -> (bool, u64) {
        (self.schedule.is_some(), self.frozen_launches)
    }

    /// This rank wants `request` done. Its name must not be in flight in its set; a second one is
    /// refused with `false`.
    pub fn submit(&mut self, request: Request, now: u64) -> bool {
        self.now = now;
        let key = (request.set, request.name.clone());
        if self.pending.contains_key(&key) {
            return false;
        }
        let pending = Pending {
            request: Arc::new(request),
            announced: Announced::No,
            since: now,
        };
        let new = self.look(&key, &pending);
        self.pending.insert(key.clone(), pending);
        self.order.push_back(key);
        if let Some(schedule) = &mut self.schedule {
            schedule.here += usize::from(new == Scheduled::InStep);
            schedule.thaw |= new == Scheduled::No;
            if new == Scheduled::No {
                self.withdraw();
            }
            self.advance();
        }
        true
    }

    /// The step that waits to be launched was only the beginning of a burst, which is in no step as a
    /// whole. The launch raises its flag then, and the whole burst is negotiated: two launches, where
    /// the step, the flag after it and the rest of the burst were three.
    fn withdraw(&mut self) {
        for (_, action) in &mut self.actions {
            if let Action::Frozen { real, .. } = action {
                *real = false;
            }
        }
    }

    /// Where in the frozen schedule it belongs.
    fn look(&self, key: &Key, pending: &Pending) -> Scheduled {
        let Some(schedule) = &self.schedule else {
            return Scheduled::No;
        };
        let Some(number) = self.numbers.get(key) else {
            return Scheduled::No;
        };
        let own = self.cache.get(number).and_then(|c| c.request.as_ref());
        if own.is_none_or(|own| **own != *pending.request) {
            Scheduled::No
        } else if schedule.steps[schedule.at].contains(number) {
            Scheduled::InStep
        } else if schedule.steps.iter().any(|step| step.contains(number)) {
            Scheduled::Later
        } else {
            Scheduled::No
        }
    }

    /// Looks at all that is submitted: the schedule, its step or the time is another than before.
    fn review(&mut self) {
        let Some(schedule) = &self.schedule else {
            return;
        };
        let mut deviates = self.ending;
        let mut here = 0;
        for (key, pending) in &self.pending {
            let found = self.look(key, pending);
            let waited = self.now.saturating_sub(pending.since.max(schedule.since));
            deviates |= found == Scheduled::No;
            deviates |= waited > self.patience && !schedule.launched;
            here += usize::from(found == Scheduled::InStep);
        }
        // Another rank has submitted nothing of the step for long: it may be elsewhere.
        deviates |= schedule.launched
            && self.now.saturating_sub(schedule.since) > self.patience.max(1_000_000);
        if let Some(schedule) = &mut self.schedule {
            schedule.here = here;
            schedule.thaw |= deviates;
        }
        self.advance();
    }

    /// Whether to submit `request` would launch the frozen schedule's step at once.
    #[must_use]
    pub fn is_next(&self, request: &Request) -> bool {
        let Some(schedule) = &self.schedule else {
            return false;
        };
        let [number] = schedule.steps[schedule.at][..] else {
            return false;
        };
        let idle = !schedule.launched && !schedule.thaw && !self.ending;
        let own = self.cache.get(&number).and_then(|c| c.request.as_deref());
        idle && self.pending.is_empty() && self.actions.is_empty() && own == Some(request)
    }

    /// Announce what is not announced yet.
    pub fn flush(&mut self) {
        if self.schedule.is_some() || self.ended.is_some() {
            return;
        }
        let mut hits = Vec::new();
        let mut requests = Vec::new();
        for key in std::mem::take(&mut self.order) {
            let Some(pending) = self.pending.get_mut(&key) else {
                continue;
            };
            if pending.announced != Announced::No {
                continue;
            }
            let number = self.numbers.get(&key).copied();
            let own = number.and_then(|n| self.cache.get(&n)?.request.as_ref());
            match (number, own) {
                (Some(number), Some(own)) if **own == *pending.request => {
                    pending.announced = Announced::Hit(number);
                    hits.push(number);
                }
                _ => {
                    pending.announced = Announced::Full;
                    requests.push((*pending.request).clone());
                }
            }
        }
        if !hits.is_empty() || !requests.is_empty() {
            self.out.push(Up::Announce {
                epoch: self.epoch,
                hits,
                requests,
            });
        }
        if self.ending {
            self.ending = false;
            self.out.push(Up::Shutdown(self.epoch));
        }
    }

    /// This rank submits nothing more; the others are told.
    pub fn shutdown(&mut self, now: u64) {
        self.now = now;
        self.ending = true;
        self.leaving = true;
        self.review();
        self.flush();
    }

    /// This rank cannot go on; the others are told, so that they do not wait for it.
    pub fn fail(&mut self, reason: &str, now: u64) {
        self.now = now;
        if self.ended.is_none() {
            self.out.push(Up::Failed(reason.to_owned()));
        }
    }

    /// Time passes. A frozen schedule that keeps a tensor waiting is left.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        self.review();
    }

    /// A message of the coordinator.
    pub fn receive(&mut self, message: Down, now: u64) {
        self.now = now;
        if self.ended.is_some() {
            return;
        }
        match message {
            Down::Launch(parts) => self.launch(parts),
            Down::Evict(numbers) => self.evict(&numbers),
            Down::Freeze(epoch, steps) => {
                self.epoch = epoch;
                self.schedule = Some(Schedule {
                    steps,
                    at: 0,
                    launched: false,
                    thaw: false,
                    said: false,
                    since: now,
                    here: 0,
                });
                self.forget_announcements();
                self.ending = self.leaving;
                self.review();
            }
            Down::Thaw(epoch) => {
                if epoch == self.epoch
                    && let Some(schedule) = &mut self.schedule
                {
                    schedule.thaw = true;
                    schedule.said = true;
                    self.advance();
                }
            }
            Down::Shutdown(rank) if rank == self.rank => {
                self.end(format!("rank {rank} called shutdown"));
            }
            // That another one ended does not matter here: the coordinator refuses what would need it.
            Down::Shutdown(_) => {}
            Down::Abort(reason) => self.end(reason),
        }
    }

    fn end(&mut self, reason: String) {
        self.ended = Some(reason.clone());
        self.schedule = None;
        self.pending.clear();
        self.order.clear();
        self.actions.push_back((self.now, Action::End(reason)));
    }

    fn forget_announcements(&mut self) {
        let mut keys: Vec<(u64, Key)> = Vec::new();
        for (key, pending) in &mut self.pending {
            pending.announced = Announced::No;
            keys.push((pending.since, key.clone()));
        }
        keys.sort();
        self.order = keys.into_iter().map(|(_, key)| key).collect();
    }

    fn launch(&mut self, parts: Vec<Part>) {
        let mut answers = Vec::with_capacity(parts.len());
        for part in parts {
            let (number, answer) = match part {
                Part::New(number, answer) => (number, answer),
                Part::Known(number) => match self.cache.get(&number) {
                    Some(cached) => (0, cached.answer.clone()),
                    None => return self.end(format!("answer {number} is not known: a defect")),
                },
            };
            let key = (answer.request.set, answer.request.name.clone());
            let own = self.pending.remove(&key).map(|pending| pending.request);
            if !answer.error.is_empty() && own.is_none() {
                // Refused to another rank. By the time it is looked at, this one may have submitted
                // the same, which gets an answer of its own.
                continue;
            }
            if number != 0 {
                self.numbers.insert(key, number);
                let cached = Cached {
                    answer: answer.clone(),
                    request: own,
                };
                self.cache.insert(number, cached);
            }
            answers.push(answer);
        }
        if !answers.is_empty() {
            self.actions.push_back((self.now, Action::Launch(answers)));
        }
    }

    fn evict(&mut self, numbers: &[u32]) {
        for number in numbers {
            let Some(cached) = self.cache.remove(number) else {
                continue;
            };
            let request = &cached.answer.request;
            let key = (request.set, request.name.clone());
            if self.numbers.get(&key) == Some(number) {
                self.numbers.remove(&key);
            }
            if let Some(pending) = self.pending.get_mut(&key)
                && pending.announced == Announced::Hit(*number)
            {
                // The coordinator has ignored it, or will.
                pending.announced = Announced::No;
                self.order.push_back(key);
            }
        }
        self.flush();
    }

    /// Launches the schedule's step if this rank can, or must.
    fn advance(&mut self) {
        let Some(schedule) = &mut self.schedule else {
            return;
        };
        if schedule.thaw && !schedule.said {
            schedule.said = true;
            self.out.push(Up::Thaw(self.epoch));
        }
        if schedule.launched {
            return;
        }
        let step = &schedule.steps[schedule.at];
        let real = schedule.here == step.len() && !schedule.thaw;
        if !real && !schedule.thaw {
            return;
        }
        let answers = step
            .iter()
            .filter_map(|n| self.cache.get(n).map(|c| c.answer.clone()))
            .collect();
        schedule.launched = true;
        schedule.since = self.now;
        let action = Action::Frozen { answers, real };
        self.actions.push_back((self.now, action));
    }

    /// The step that was launched last has ended. `flagged`: some rank raised its flag.
    pub fn finished(&mut self, flagged: bool, now: u64) {
        self.now = now;
        let Some(schedule) = &mut self.schedule else {
            return;
        };
        if flagged {
            self.schedule = None;
            self.epoch += 1;
            self.forget_announcements();
            return self.flush();
        }
        self.frozen_launches += 1;
        for number in &schedule.steps[schedule.at] {
            if let Some(cached) = self.cache.get(number) {
                let request = &cached.answer.request;
                self.pending.remove(&(request.set, request.name.clone()));
            }
        }
        schedule.at = (schedule.at + 1) % schedule.steps.len();
        schedule.launched = false;
        schedule.since = now;
        // In a frozen epoch nothing is announced, so the list of what is not only grows.
        self.order.clear();
        self.review();
    }
}
