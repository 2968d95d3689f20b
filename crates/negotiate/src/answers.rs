//! Answers that are remembered, so that ranks who want the same again say a number.
//!
//! Numbers begin at 1, and none is used twice. So an announcement of an answer that was evicted is
//! recognised: it is ignored, and its rank, which learns of the eviction in the stream of answers,
//! announces in full. An answer is evicted only while no rank's announcement of its name is counted,
//! so the second announcement cannot be counted twice.

use crate::wire::{Answer, Part};
use std::collections::HashMap;
use std::sync::Arc;

/// A process set, and a request's name in it.
pub(crate) type Key = (u32, String);

struct Cached {
    answer: Arc<Answer>,
    used: u64,
}

/// See the module's text.
pub(crate) struct Answers {
    /// How many are remembered.
    limit: usize,
    kept: HashMap<u32, Cached>,
    numbers: HashMap<Key, u32>,
    next: u32,
    uses: u64,
    /// Forgotten, and the ranks are not told yet.
    evicted: Vec<u32>,
}

impl Answers {
    /// Remembers up to `limit`; 0: none.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            kept: HashMap::new(),
            numbers: HashMap::new(),
            next: 1,
            uses: 0,
            evicted: Vec::new(),
        }
    }

    /// The answer of that number, while it is remembered.
    pub(crate) fn get(&self, number: u32) -> Option<&Arc<Answer>> {
        self.kept.get(&number).map(|cached| &cached.answer)
    }

    /// The answer that `part` means.
    pub(crate) fn of(&self, part: &Part) -> Option<Arc<Answer>> {
        match part {
            Part::New(_, answer) => Some(answer.clone()),
            Part::Known(number) => self.get(*number).cloned(),
        }
    }

    /// The number under which `key` was answered last.
    pub(crate) fn number(&self, key: &Key) -> Option<u32> {
        self.numbers.get(key).copied()
    }

    /// It was given out again.
    pub(crate) fn used(&mut self, number: u32) {
        self.uses += 1;
        if let Some(cached) = self.kept.get_mut(&number) {
            cached.used = self.uses;
        }
    }

    /// Remembers `answer`. Gives its number; 0 where nothing is remembered.
    pub(crate) fn keep(&mut self, key: &Key, answer: &Arc<Answer>) -> u32 {
        if self.limit == 0 {
            return 0;
        }
        let number = self.next;
        self.next += 1;
        self.uses += 1;
        self.numbers.insert(key.clone(), number);
        let cached = Cached {
            answer: answer.clone(),
            used: self.uses,
        };
        self.kept.insert(number, cached);
        number
    }

    /// Forgets one. Whether it was there.
    pub(crate) fn forget(&mut self, number: u32) -> bool {
        let Some(cached) = self.kept.remove(&number) else {
            return false;
        };
        let request = &cached.answer.request;
        self.numbers.remove(&(request.set, request.name.clone()));
        self.evicted.push(number);
        true
    }

    /// Forgets those of a process set. Whether there were any.
    pub(crate) fn forget_set(&mut self, set: u32) -> bool {
        let of_set = self.numbers.iter().filter(|(key, _)| key.0 == set);
        let numbers: Vec<u32> = of_set.map(|(_, number)| *number).collect();
        for number in &numbers {
            self.forget(*number);
        }
        !numbers.is_empty()
    }

    /// Forgets those least recently used, down to the limit; not what is `announced`. Whether there
    /// were any.
    pub(crate) fn evict(&mut self, announced: impl Fn(&Key) -> bool) -> bool {
        let mut excess = self.kept.len().saturating_sub(self.limit);
        if excess == 0 {
            return false;
        }
        let mut by_use: Vec<(u64, u32)> = self.kept.iter().map(|(n, c)| (c.used, *n)).collect();
        by_use.sort_unstable();
        let before = excess;
        for (_, number) in by_use {
            if excess == 0 {
                break;
            }
            let request = &self.kept[&number].answer.request;
            if !announced(&(request.set, request.name.clone())) {
                self.forget(number);
                excess -= 1;
            }
        }
        excess < before
    }

    /// What the ranks must be told to forget.
    pub(crate) fn take_evicted(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.evicted)
    }
}
