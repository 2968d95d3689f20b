//! Whether the requests of all members fit together.
//!
//! The error texts are those that scripts and tests of Horovod match (facts: its
//! `horovod/common/controller.cc`, ConstructResponse).

use crate::wire::{Answer, Kind, Meta, Request};

/// Names of the element types, by number; and their sizes in bytes.
pub const DTYPES: [(&str, u64); 11] = [
    ("uint8", 1),
    ("int8", 1),
    ("uint16", 2),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bool", 1),
    ("bfloat16", 2),
];

fn dtype(number: u8) -> &'static str {
    DTYPES.get(usize::from(number)).map_or("unknown", |d| d.0)
}

/// Bytes of one element.
#[must_use]
pub fn element_bytes(number: u8) -> u64 {
    DTYPES.get(usize::from(number)).map_or(1, |d| d.1)
}

/// A factor as C++ streams print it: six digits, no trailing zeros.
fn factor(value: f64) -> String {
    let text = format!("{value:.6}");
    if !(1e-4..1e6).contains(&value.abs()) && value != 0.0 {
        return format!("{value:e}");
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The answer to the members' requests, in member order. `joined`: whether a member has joined and
/// so is not among them. Its `value` is left at 0.
///
/// # Panics
/// Where `requests` is empty.
#[must_use]
pub fn answer(requests: &[&Request], joined: bool) -> Answer {
    let first = requests[0];
    let error = mismatch(requests, joined).err().unwrap_or_default();
    let rows = match first.kind {
        Kind::Allgather if error.is_empty() => requests
            .iter()
            .map(|r| r.tensors.iter().map(|t| t.shape[0]).collect())
            .collect(),
        Kind::Alltoall => requests.iter().map(|r| r.splits.clone()).collect(),
        _ => Vec::new(),
    };
    Answer {
        request: first.clone(),
        rows,
        value: 0,
        error,
    }
}

fn mismatch(requests: &[&Request], joined: bool) -> Result<(), String> {
    let first = requests[0];
    let name = first.kind.name();
    for other in &requests[1..] {
        for (a, b) in first.tensors.iter().zip(&other.tensors) {
            if a.dtype != b.dtype {
                return Err(format!(
                    "Mismatched data types: One rank had type {}, but another rank had type {}.{}",
                    dtype(a.dtype),
                    dtype(b.dtype),
                    label(a)
                ));
            }
        }
    }
    for other in &requests[1..] {
        if first.kind != other.kind {
            return Err(format!(
                "Mismatched operations: One rank did an {name}, but another rank did an {}.",
                other.kind.name()
            ));
        }
    }
    for other in &requests[1..] {
        if first.tensors.len() != other.tensors.len() {
            return Err(format!(
                "Mismatched {name} groups: One rank sent {} tensors, but another rank sent {}.",
                first.tensors.len(),
                other.tensors.len()
            ));
        }
        for (a, b) in first.tensors.iter().zip(&other.tensors) {
            if a.label != b.label {
                return Err(format!(
                    "Mismatched {name} tensor names: One rank sent {:?}, but another rank sent \
                     {:?} at the same place.",
                    a.label, b.label
                ));
            }
        }
    }
    match first.kind {
        Kind::Allreduce | Kind::Adasum => {
            same_shapes(requests)?;
            same_factors(requests)?;
            same_op(requests)?;
        }
        Kind::Broadcast => {
            same_shapes(requests)?;
            no_join(joined, "Broadcast is not supported with Join at this time.")?;
            if let Some(other) = requests.iter().find(|r| r.root != first.root) {
                return Err(format!(
                    "Mismatched {name} root ranks: One rank specified root rank {}, but another \
                     rank specified root rank {}.",
                    first.root, other.root
                ));
            }
        }
        Kind::Reducescatter => {
            same_shapes(requests)?;
            same_factors(requests)?;
            same_op(requests)?;
            no_join(
                joined,
                "Reducescatter is not supported with Join at this time.",
            )?;
            no_scalar(first)?;
        }
        Kind::Allgather => {
            no_join(
                joined,
                "Allgather is not supported with Join at this time. Specify sparse_to_dense=True \
                 if using DistributedOptimizer",
            )?;
            same_but_first(requests)?;
        }
        Kind::Alltoall => {
            no_join(joined, "Alltoall is not supported with Join at this time.")?;
            same_but_first(requests)?;
        }
        Kind::AddSet => {
            if let Some(other) = requests.iter().find(|r| r.splits != first.splits) {
                return Err(format!(
                    "Mismatched process sets: One rank adds ranks {:?}, but another rank adds \
                     ranks {:?}.",
                    first.splits, other.splits
                ));
            }
        }
        Kind::RemoveSet => {
            if let Some(other) = requests.iter().find(|r| r.root != first.root) {
                return Err(format!(
                    "Mismatched process sets: One rank removes set {}, but another rank removes \
                     set {}.",
                    first.root, other.root
                ));
            }
        }
        Kind::Barrier | Kind::Join => {}
    }
    if let Some(other) = requests.iter().find(|r| r.gpu != first.gpu) {
        let device = |gpu| if gpu { "GPU" } else { "CPU" };
        return Err(format!(
            "Mismatched {name} CPU/GPU device selection: One rank specified device {}, but another \
             rank specified device {}.",
            device(first.gpu),
            device(other.gpu)
        ));
    }
    Ok(())
}

fn label(meta: &Meta) -> String {
    if meta.label.is_empty() {
        String::new()
    } else {
        format!(" (tensor {:?})", meta.label)
    }
}

fn no_join(joined: bool, text: &str) -> Result<(), String> {
    if joined {
        return Err(text.to_owned());
    }
    Ok(())
}

fn no_scalar(first: &Request) -> Result<(), String> {
    if first.tensors.iter().any(|t| t.shape.is_empty()) {
        return Err(format!(
            "Process-set rank zero tried to {} a rank-zero tensor.",
            first.kind.name()
        ));
    }
    Ok(())
}

fn same_shapes(requests: &[&Request]) -> Result<(), String> {
    let first = requests[0];
    for other in &requests[1..] {
        for (a, b) in first.tensors.iter().zip(&other.tensors) {
            if a.shape != b.shape {
                return Err(format!(
                    "Mismatched {} tensor shapes: One rank sent a tensor of shape {:?}, but \
                     another rank sent a tensor of shape {:?}.{}",
                    first.kind.name(),
                    a.shape,
                    b.shape,
                    label(a)
                ));
            }
        }
    }
    Ok(())
}

fn same_factors(requests: &[&Request]) -> Result<(), String> {
    let first = requests[0].factors;
    if let Some(other) = requests.iter().find(|r| r.factors != first) {
        return Err(format!(
            "Mismatched prescale and/or postscale factors: One rank sent factors ({}, {}), but \
             another rank sent factors ({}, {}).",
            factor(first.0),
            factor(first.1),
            factor(other.factors.0),
            factor(other.factors.1)
        ));
    }
    Ok(())
}

fn same_op(requests: &[&Request]) -> Result<(), String> {
    let first = requests[0].op;
    if let Some(other) = requests.iter().find(|r| r.op != first) {
        return Err(format!(
            "Mismatched reduction operation: One rank sent reduction op {first}, but another rank \
             sent reduction op {}.",
            other.op
        ));
    }
    Ok(())
}

fn same_but_first(requests: &[&Request]) -> Result<(), String> {
    let first = requests[0];
    let name = first.kind.name();
    no_scalar(first)?;
    for other in &requests[1..] {
        for (a, b) in first.tensors.iter().zip(&other.tensors) {
            if a.shape.len() != b.shape.len() {
                return Err(format!(
                    "Mismatched {name} tensor shapes: One rank sent a tensor of rank {}, but \
                     another rank sent a tensor of rank {}.",
                    a.shape.len(),
                    b.shape.len()
                ));
            }
            for dim in 1..a.shape.len() {
                if a.shape[dim] != b.shape[dim] {
                    return Err(format!(
                        "Mismatched {name} tensor shapes: One rank sent a tensor with dimension \
                         {dim} equal to {}, but another rank sent a tensor with dimension {dim} \
                         equal to {}.",
                        a.shape[dim], b.shape[dim]
                    ));
                }
            }
        }
    }
    Ok(())
}
