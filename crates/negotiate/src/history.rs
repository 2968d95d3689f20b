//! When what was given out becomes a schedule: one sequence of launches, often enough in a row.

use crate::answers::Answers;
use crate::check;
use crate::fusion::{bytes_of, fusible};
use crate::wire::{Answer, Part};
use std::collections::VecDeque;

/// The longest schedule, in steps.
const LONGEST: usize = 16;
/// The most repeats that are asked for, however often a schedule was left.
const MOST_REPEATS: usize = 64;

/// The steps given out lately, as numbers of answers. Whatever cannot be repeated clears it.
pub(crate) struct History {
    steps: VecDeque<Vec<u32>>,
    /// Repeats that are needed now; 0: nothing is ever frozen.
    needed: usize,
    /// A step of more bytes is never frozen.
    most_bytes: u64,
}

impl History {
    pub(crate) fn new(repeats: usize, most_bytes: u64) -> Self {
        Self {
            steps: VecDeque::new(),
            needed: repeats,
            most_bytes,
        }
    }

    /// Something came that cannot be repeated.
    pub(crate) fn clear(&mut self) {
        self.steps.clear();
    }

    /// A schedule was left: the next needs more repeats, so that a bad one costs little.
    pub(crate) fn thawed(&mut self) {
        self.clear();
        self.needed = (self.needed * 2).min(MOST_REPEATS);
    }

    /// Notes a launch.
    pub(crate) fn note(&mut self, parts: &[Part], answers: &Answers) {
        let mut step = Vec::with_capacity(parts.len());
        let mut bytes = 0;
        for part in parts {
            match (part, answers.of(part)) {
                (Part::Known(number), Some(answer))
                    if answer.request.set == 0 && freezable(&answer) =>
                {
                    bytes += bytes_of(&answer.request);
                    step.push(*number);
                }
                _ => return self.clear(),
            }
        }
        if bytes > self.most_bytes {
            return self.clear();
        }
        // The order within a launch is the last announcement's, and means nothing.
        step.sort_unstable();
        self.steps.push_back(step);
        if self.steps.len() > LONGEST * self.needed {
            self.steps.pop_front();
        }
    }

    /// The schedule, where the last steps are one sequence, often enough in a row. It is given once.
    pub(crate) fn schedule(&mut self) -> Option<Vec<Vec<u32>>> {
        if self.needed == 0 {
            return None;
        }
        let steps = self.steps.make_contiguous();
        for period in 1..=LONGEST.min(steps.len() / self.needed) {
            let tail = &steps[steps.len() - period * self.needed..];
            if tail[period..] == tail[..tail.len() - period] {
                let schedule = tail[..period].to_vec();
                self.clear();
                return Some(schedule);
            }
        }
        None
    }
}

/// Whether a flag can travel with it: the sum of some flags must not wrap around to nothing.
fn freezable(answer: &Answer) -> bool {
    fusible(answer).is_some_and(|dtype| {
        let name = check::DTYPES[usize::from(dtype)].0;
        name.contains("float") || name == "int32" || name == "int64"
    }) && answer.request.tensors.iter().any(|t| t.elements() > 0)
}
