//! The fused optimizers for Python. `evener.base.optimizers` is the only caller; it has checked devices,
//! dtypes, contiguity and that no two tensors share memory.
//!
//! A tensor is a pair (format, address); formats are "f32", "bf16", "f16" and "none". A moment has a
//! second address: that of its scales, where its format is "int8".

use crate::Span;
use evener_kernels::adam::Adam;
use evener_kernels::formats;
use evener_kernels::isa::Isa;
use evener_kernels::lion::Lion;
use evener_kernels::pool::{Optimizer, Pool};
use evener_kernels::sgd::Sgd;
use evener_kernels::state::{Gradient, Master, Moment, Noise, Output, Tensors};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The pools of this process by their number of threads. A child of a fork has none of the threads:
/// it gets pools of its own.
static POOLS: Mutex<Option<(u32, Pools)>> = Mutex::new(None);

type Pools = HashMap<usize, Arc<Pool>>;

fn pool(threads: usize) -> PyResult<Arc<Pool>> {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, stale)) = pools.take_if(|(owner, _)| *owner != process) {
        // Dropping a pool would wait for threads that are not here.
        let _ = owner;
        std::mem::forget(stale);
    }
    let (_, pools) = pools.get_or_insert_with(|| (process, HashMap::new()));
    if let Some(found) = pools.get(&threads) {
        return Ok(found.clone());
    }
    let made = Pool::new(threads)
        .map_err(|error| PyOSError::new_err(format!("no threads for the optimizer: {error}")))?;
    Ok(pools.entry(threads).or_insert(Arc::new(made)).clone())
}

fn instructions(name: Option<&str>) -> PyResult<Isa> {
    match name {
        None => Ok(Isa::detect()),
        Some(name) => Isa::available()
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| PyValueError::new_err(format!("this machine has no {name}"))),
    }
}

type Address<'a> = (&'a str, usize);
type Pair<'a> = (&'a str, usize, usize);

fn unknown(what: &str, format: &str) -> PyErr {
    PyValueError::new_err(format!("{what} cannot be {format:?}"))
}

/// The tensors of a step.
///
/// # Safety
/// Addresses are those of distinct live tensors of `n` elements in these formats, which nobody else
/// touches for as long as the result is used; `gradient` may be read by others.
unsafe fn tensors<'a>(
    n: usize,
    master: Pair<'_>,
    gradient: Address<'_>,
    moments: [Pair<'_>; 2],
    output: Address<'_>,
) -> PyResult<Tensors<'a>> {
    let span = |address| Span { address, length: n };
    let moment = |(format, address, scales): Pair<'_>| match format {
        // SAFETY: promised by the caller.
        "f32" => Ok(Moment::F32(unsafe { span(address).write() })),
        // SAFETY: promised by the caller.
        "bf16" => Ok(Moment::Bf16(unsafe { span(address).write() })),
        // SAFETY: promised by the caller, of scales for as many blocks as these elements are.
        "int8" => Ok(unsafe {
            let length = n.div_ceil(formats::BLOCK);
            Moment::Int8 {
                codes: span(address).write(),
                scales: Span {
                    address: scales,
                    length,
                }
                .write(),
            }
        }),
        "none" => Ok(Moment::Absent),
        other => Err(unknown("a moment", other)),
    };
    // SAFETY: promised by the caller.
    let (master, gradient, output) = unsafe {
        let master = match master {
            ("f32", address, _) => Master::F32(span(address).write()),
            ("bf16", address, _) => Master::Bf16(span(address).write()),
            ("split", upper, lower) => Master::Split {
                upper: span(upper).write(),
                lower: span(lower).write(),
            },
            (other, ..) => return Err(unknown("master weights", other)),
        };
        let output = match output {
            ("bf16", address) => Output::Bf16(span(address).write()),
            ("f16", address) => Output::F16(span(address).write()),
            ("none", _) => Output::Absent,
            (other, _) => return Err(unknown("the output", other)),
        };
        (master, read_gradient(n, gradient)?, output)
    };
    let [first, second] = moments;
    Ok(Tensors {
        master,
        gradient,
        first: moment(first)?,
        second: moment(second)?,
        output,
    })
}

/// # Safety
/// As for [`tensors`].
unsafe fn read_gradient<'a>(n: usize, (format, address): Address<'_>) -> PyResult<Gradient<'a>> {
    let span = Span { address, length: n };
    // SAFETY: promised by the caller.
    unsafe {
        match format {
            "f32" => Ok(Gradient::F32(span.read())),
            "bf16" => Ok(Gradient::Bf16(span.read())),
            "f16" => Ok(Gradient::F16(span.read())),
            other => Err(unknown("a gradient", other)),
        }
    }
}

/// Where a step runs, and its random bits: threads, instructions, seed, stream, offset.
#[derive(FromPyObject)]
pub struct How(usize, Option<String>, u64, u32, u32);

fn step(
    py: Python<'_>,
    optimizer: &impl Optimizer,
    number: u64,
    tensors: Tensors<'_>,
    how: &How,
) -> PyResult<()> {
    let How(threads, wanted, seed, stream, offset) = how;
    let isa = instructions(wanted.as_deref())?;
    let pool = pool(*threads)?;
    let noise = Noise {
        key: formats::key(*seed, number, *stream),
        offset: *offset,
    };
    py.detach(|| pool.step(optimizer, isa, tensors, noise))
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// One step of AdamW or Adam; see `evener_kernels::adam`. `hyper`: lr, beta1, beta2, epsilon,
/// weight decay, scale.
#[pyfunction]
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of a step, and nothing else"
)]
pub fn adam_step(
    py: Python<'_>,
    elements: usize,
    master: (String, usize, usize),
    gradient: (String, usize),
    first: (String, usize, usize),
    second: (String, usize, usize),
    output: (String, usize),
    hyper: [f64; 6],
    decoupled: bool,
    number: u64,
    how: How,
) -> PyResult<()> {
    let [lr, beta1, beta2, epsilon, weight_decay, scale] = hyper;
    let adam = Adam {
        lr,
        beta1,
        beta2,
        epsilon,
        weight_decay,
        decoupled,
        scale,
        step: number,
    };
    // SAFETY: `evener.base.kernels` passes distinct live tensors and holds them until this returns.
    let tensors = unsafe {
        tensors(
            elements,
            (&master.0, master.1, master.2),
            (&gradient.0, gradient.1),
            [
                (&first.0, first.1, first.2),
                (&second.0, second.1, second.2),
            ],
            (&output.0, output.1),
        )?
    };
    step(py, &adam, number, tensors, &how)
}

/// One step of SGD; see `evener_kernels::sgd`. `hyper`: lr, momentum, dampening, weight decay,
/// scale.
#[pyfunction]
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of a step, and nothing else"
)]
pub fn sgd_step(
    py: Python<'_>,
    elements: usize,
    master: (String, usize, usize),
    gradient: (String, usize),
    first: (String, usize, usize),
    output: (String, usize),
    hyper: [f64; 5],
    nesterov: bool,
    number: u64,
    how: How,
) -> PyResult<()> {
    let [lr, momentum, dampening, weight_decay, scale] = hyper;
    let sgd = Sgd {
        lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        scale,
        step: number,
    };
    // SAFETY: `evener.base.kernels` passes distinct live tensors and holds them until this returns.
    let tensors = unsafe {
        tensors(
            elements,
            (&master.0, master.1, master.2),
            (&gradient.0, gradient.1),
            [(&first.0, first.1, first.2), ("none", 0, 0)],
            (&output.0, output.1),
        )?
    };
    step(py, &sgd, number, tensors, &how)
}

/// One step of Lion; see `evener_kernels::lion`. `hyper`: lr, beta1, beta2, weight decay, scale.
#[pyfunction]
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of a step, and nothing else"
)]
pub fn lion_step(
    py: Python<'_>,
    elements: usize,
    master: (String, usize, usize),
    gradient: (String, usize),
    first: (String, usize, usize),
    output: (String, usize),
    hyper: [f64; 5],
    number: u64,
    how: How,
) -> PyResult<()> {
    let [lr, beta1, beta2, weight_decay, scale] = hyper;
    let lion = Lion {
        lr,
        beta1,
        beta2,
        weight_decay,
        scale,
    };
    // SAFETY: `evener.base.kernels` passes distinct live tensors and holds them until this returns.
    let tensors = unsafe {
        tensors(
            elements,
            (&master.0, master.1, master.2),
            (&gradient.0, gradient.1),
            [(&first.0, first.1, first.2), ("none", 0, 0)],
            (&output.0, output.1),
        )?
    };
    step(py, &lion, number, tensors, &how)
}

/// The sum of squares of a gradient, in f64; see `evener_kernels::norm`.
#[pyfunction]
pub fn sum_of_squares(
    py: Python<'_>,
    elements: usize,
    gradient: (String, usize),
    threads: usize,
) -> PyResult<f64> {
    let pool = pool(threads)?;
    // SAFETY: `evener.base.kernels` passes a live tensor and holds it until this returns.
    let gradient = unsafe { read_gradient(elements, (&gradient.0, gradient.1))? };
    Ok(py.detach(|| pool.squares(Isa::detect(), gradient)))
}

/// The instruction sets that this machine has, best first.
#[pyfunction]
pub fn instruction_sets() -> Vec<&'static str> {
    Isa::available().into_iter().map(Isa::name).collect()
}

/// Threads of the default pool.
#[pyfunction]
pub fn optimizer_threads() -> PyResult<usize> {
    Ok(pool(0)?.threads())
}
