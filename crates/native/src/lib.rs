//! `evener._native`: the Rust crates as one Python module, built against the stable ABI so that one
//! wheel serves every CPython from 3.10 on.
//!
//! Tensors come in as addresses (`tensor.data_ptr()`) and lengths: the stable ABI of 3.10 has no
//! buffer protocol, and numpy has no bfloat16. `evener.base.kernels` is the only caller; it checks
//! device, dtype and contiguity first. Every function gives up the GIL while it works.

#![allow(
    unsafe_code,
    reason = "addresses come from Python; each use says why it holds"
)]

mod arena;
mod compress;
mod delay;
mod embedding;
mod launch;
mod negotiate;
mod optimizer;
mod ssd;
mod staging;

use evener_drive::bench::{self, Pattern, Scenario};
use evener_kernels::topk;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// An address and a length in elements, as Python hands them over.
#[derive(Clone, Copy)]
struct Span {
    address: usize,
    length: usize,
}

impl Span {
    /// # Safety
    /// `address` is that of `length` initialised values of `T` that live, and are not written by
    /// anyone else, for as long as the slice is used.
    unsafe fn read<'a, T>(self) -> &'a [T] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.length) }
    }

    /// # Safety
    /// As for [`Span::read`], and nobody else reads them either.
    unsafe fn write<'a, T>(self) -> &'a mut [T] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.length) }
    }
}

/// Adds a gradient to a residual and takes the k largest entries out of it; see
/// `evener_kernels::topk::select_with_feedback`. All arguments are addresses of contiguous CPU
/// memory: f32 gradient and residual of `elements`, f32 values and i32 indices of `k`.
#[pyfunction]
fn topk_with_feedback(
    py: Python<'_>,
    gradient: usize,
    residual: usize,
    elements: usize,
    values: usize,
    indices: usize,
    k: usize,
) -> PyResult<()> {
    let span = |address, length| Span { address, length };
    py.detach(|| {
        // SAFETY: `evener.base.kernels` passes four distinct live tensors of these dtypes and lengths,
        // and holds references to them until this returns.
        unsafe {
            topk::select_with_feedback(
                span(gradient, elements).read(),
                span(residual, elements).write(),
                span(values, k).write(),
                span(indices, k).write(),
            )
        }
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// One side of a network measurement; see `evener_drive::bench`. For each size the fields of its
/// `Run`: (bytes, messages, seconds, bytes per second, microseconds, processor seconds, longest stall
/// in seconds, fairness). `pattern`: "steady" or "ring". An empty `plugin` measures plain TCP
/// streams, `streams` a comm. With `until` a steady run lasts until this file is there.
#[pyfunction]
#[allow(
    clippy::too_many_arguments,
    clippy::type_complexity,
    reason = "one a field of the scenario and of a run"
)]
fn net_bench(
    py: Python<'_>,
    rank: u32,
    control: String,
    plugin: String,
    streams: usize,
    pattern: &str,
    comms: usize,
    depth: usize,
    sizes: Vec<usize>,
    seconds: f64,
    verify: bool,
    until: String,
) -> PyResult<Vec<(usize, usize, f64, f64, f64, f64, f64, Option<f64>)>> {
    let scenario = Scenario {
        rank,
        control,
        plugin: (!plugin.is_empty()).then(|| plugin.into()),
        streams: streams.max(1),
        version: 11,
        pattern: match pattern {
            "steady" => Pattern::Steady,
            "ring" => Pattern::Ring,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "no pattern {pattern:?}: steady or ring"
                )));
            }
        },
        comms: comms.max(1),
        depth: depth.clamp(1, 32),
        sizes,
        seconds,
        verify,
        until: (!until.is_empty()).then(|| until.into()),
    };
    let runs = py
        .detach(|| bench::run(&scenario))
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let row = |run: bench::Run| {
        (
            run.size,
            run.messages,
            run.seconds,
            run.bandwidth,
            run.latency_us,
            run.cpu_seconds,
            run.stall,
            run.fairness,
        )
    };
    Ok(runs.into_iter().map(row).collect())
}

/// The commit that a wheel was built from (scripts/wheel.sh says it; empty in a checkout), and
/// whether it was built with optimizations.
#[pyfunction]
fn build() -> (&'static str, &'static str) {
    let profile = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    (option_env!("EVENER_BUILD").unwrap_or(""), profile)
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::arena::HostArena;
    #[pymodule_export]
    use super::build;
    #[pymodule_export]
    use super::compress::{
        cast_narrow, cast_widen, chunks_add, chunks_select, differences_plan, differences_read,
        differences_write, int8_dequantize_sum, int8_quantize,
    };
    #[pymodule_export]
    use super::delay::delay_lines;
    #[pymodule_export]
    use super::embedding::{
        EmbeddingStore, embedding_forget, embedding_names, embedding_slots, embedding_table,
    };
    #[pymodule_export]
    use super::launch::{Launcher, Streams};
    #[pymodule_export]
    use super::negotiate::{Agreed, Negotiator};
    #[pymodule_export]
    use super::net_bench;
    #[pymodule_export]
    use super::optimizer::{
        adam_step, instruction_sets, lion_step, optimizer_threads, sgd_step, sum_of_squares,
    };
    #[pymodule_export]
    use super::ssd::SsdStore;
    #[pymodule_export]
    use super::staging::StagedExchange;
    #[pymodule_export]
    use super::topk_with_feedback;
}
