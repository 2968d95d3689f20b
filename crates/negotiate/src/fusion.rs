//! Which answers are launched together.

use crate::answers::Answers;
use crate::check;
use crate::wire::{Answer, Kind, Part, Request};
use std::collections::VecDeque;

/// Moves from `others` to `parts` what can be launched together with its first. Others may be
/// passed over for it, up to the threshold.
pub(crate) fn fuse(
    parts: &mut Vec<Part>,
    others: &mut VecDeque<Part>,
    answers: &Answers,
    threshold: u64,
) {
    let Some(first) = answers.of(&parts[0]) else {
        return;
    };
    let Some(dtype) = fusible(&first) else {
        return;
    };
    let mut bytes = bytes_of(&first.request);
    let mut passed = 0;
    let mut index = 0;
    while index < others.len() && bytes + passed <= threshold {
        let Some(other) = answers.of(&others[index]) else {
            return;
        };
        let (a, b) = (&first.request, &other.request);
        let size = bytes_of(b);
        let fits = fusible(&other) == Some(dtype)
            && (a.set, a.op, a.gpu, a.factors) == (b.set, b.op, b.gpu, b.factors)
            && bytes + size <= threshold;
        if fits {
            bytes += size;
            parts.extend(others.remove(index));
        } else {
            passed += size;
            index += 1;
        }
    }
}

/// What a request's tensors take.
pub(crate) fn bytes_of(request: &Request) -> u64 {
    let sizes = request.tensors.iter();
    sizes
        .map(|t| t.elements() * check::element_bytes(t.dtype))
        .sum()
}

/// The dtype in which this answer can be launched together with others.
pub(crate) fn fusible(answer: &Answer) -> Option<u8> {
    let tensors = &answer.request.tensors;
    let first = tensors.first()?;
    (answer.request.kind == Kind::Allreduce
        && answer.error.is_empty()
        && tensors.iter().all(|t| t.dtype == first.dtype))
    .then_some(first.dtype)
}
