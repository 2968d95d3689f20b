//! `Negotiator`: the agreement of ranks on the order of collectives, for Python.
//!
//! `evener.horovod.engine` is the only caller. No method holds the GIL while it waits or works.

use evener_negotiate::coordinator::Moment;
use evener_negotiate::link::{Node, Quick};
use evener_negotiate::{Action, Answer, Kind, Meta, Policy, Request};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

type Tensor = (u8, Vec<u64>, String);

/// What was agreed; equal on all ranks. See `evener_negotiate::Answer`. A burst brings many, of
/// which little is looked at: so each field is made when it is asked for.
#[pyclass(frozen, name = "Answer")]
pub struct Agreed(Arc<Answer>);

#[pymethods]
impl Agreed {
    #[getter]
    fn kind(&self) -> u8 {
        self.0.request.kind as u8
    }
    #[getter]
    fn name(&self) -> &str {
        &self.0.request.name
    }
    #[getter]
    fn set(&self) -> u32 {
        self.0.request.set
    }
    /// dtype, shape, label of each.
    #[getter]
    fn tensors(&self) -> Vec<Tensor> {
        let tensor = |meta: &Meta| (meta.dtype, meta.shape.clone(), meta.label.clone());
        self.0.request.tensors.iter().map(tensor).collect()
    }
    #[getter]
    fn gpu(&self) -> bool {
        self.0.request.gpu
    }
    #[getter]
    fn op(&self) -> u8 {
        self.0.request.op
    }
    #[getter]
    fn root(&self) -> u32 {
        self.0.request.root
    }
    /// Before and after the reduction.
    #[getter]
    fn factors(&self) -> (f64, f64) {
        self.0.request.factors
    }
    #[getter]
    fn splits(&self) -> Vec<u64> {
        self.0.request.splits.clone()
    }
    #[getter]
    fn rows(&self) -> Vec<Vec<u64>> {
        self.0.rows.clone()
    }
    #[getter]
    fn value(&self) -> i64 {
        self.0.value
    }
    /// Empty where there is none.
    #[getter]
    fn error(&self) -> &str {
        &self.0.error
    }
}

/// One process's part; see `evener_negotiate::link::Node`. Times are in seconds.
#[pyclass(frozen)]
pub struct Negotiator {
    node: Node,
}

#[pymethods]
impl Negotiator {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "one a field of the policy")]
    fn new(
        rank: u32,
        size: u32,
        sets: Vec<Vec<u32>>,
        fusion: u64,
        cache: usize,
        repeats: usize,
        frozen_bytes: u64,
        stall_warn: f64,
        stall_abort: f64,
        cycle: f64,
        timeout: f64,
    ) -> PyResult<Self> {
        let micros = |seconds: f64| (seconds.clamp(0.0, 1e9) * 1e6) as u64;
        let policy = Policy {
            fusion,
            cache,
            repeats,
            frozen_bytes,
            stall_warn: micros(stall_warn),
            stall_abort: micros(stall_abort),
            record: false,
        };
        let node = Node::new(
            rank,
            size,
            &sets,
            policy,
            Duration::from_micros(micros(cycle)),
            Duration::from_micros(micros(timeout)),
        )
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Self { node })
    }

    /// Rank 0's port; 0 elsewhere.
    #[getter]
    fn port(&self) -> u16 {
        self.node.port()
    }

    /// Connect all ranks: rank 0 waits for them, the others reach it at one of `addresses`.
    fn connect(
        &self,
        py: Python<'_>,
        addresses: Vec<String>,
        port: u16,
        token: &str,
    ) -> PyResult<()> {
        py.detach(|| {
            self.node
                .connect(&addresses, port, token)
                .map_err(|error| PyRuntimeError::new_err(error.to_string()))
        })
    }

    /// Submit a request; False where its name is in flight. `urgent`: announce it at once.
    /// `drives`: the caller calls `next` itself, until `undrive`.
    #[allow(clippy::too_many_arguments, reason = "one a field of the request")]
    fn submit(
        &self,
        py: Python<'_>,
        kind: u8,
        name: String,
        set: u32,
        tensors: Vec<Tensor>,
        gpu: bool,
        op: u8,
        root: u32,
        factors: (f64, f64),
        splits: Vec<u64>,
        urgent: bool,
        drives: bool,
    ) -> PyResult<bool> {
        let kind = Kind::from_number(kind)
            .ok_or_else(|| PyValueError::new_err(format!("kind {kind} is unknown")))?;
        let meta = |(dtype, shape, label)| Meta {
            dtype,
            shape,
            label,
        };
        let request = Request {
            name,
            set,
            kind,
            tensors: tensors.into_iter().map(meta).collect(),
            gpu,
            op,
            root,
            factors,
            splits,
        };
        Ok(py.detach(|| self.node.submit(request, urgent, drives)))
    }

    /// Map the file `path`, for the frozen schedule's flag where all ranks share this machine.
    fn open_gate(&self, path: std::path::PathBuf) -> PyResult<()> {
        let file = std::fs::File::options().read(true).write(true).open(path)?;
        self.node
            .open_gate(&file)
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// All ranks have opened the gate: use it.
    fn use_gate(&self) {
        self.node.use_gate();
    }

    /// Bytes that the gate's file must have for this many ranks.
    #[staticmethod]
    fn gate_bytes(size: usize) -> usize {
        evener_negotiate::gate::Gate::bytes(size)
    }

    /// Reduce the flag of the frozen step that `next` gave last: whether any rank's is up. None
    /// where all has ended.
    fn exchange(&self, py: Python<'_>, flag: bool) -> Option<bool> {
        py.detach(|| self.node.exchange(flag))
    }

    /// An all-reduce of one tensor over all ranks, submitted and waited for by who drives: 1 where
    /// all ranks launch it now, and it alone; 2 where it is submitted and the caller drives on; 0
    /// where nothing was done.
    #[allow(clippy::too_many_arguments, reason = "one a field of the request")]
    fn quick(
        &self,
        py: Python<'_>,
        name: String,
        dtype: u8,
        shape: Vec<u64>,
        gpu: bool,
        op: u8,
        factors: (f64, f64),
    ) -> u8 {
        let label = String::new();
        let request = Request {
            name,
            set: 0,
            kind: Kind::Allreduce,
            tensors: vec![Meta {
                dtype,
                shape,
                label,
            }],
            gpu,
            op,
            root: 0,
            factors,
            splits: Vec::new(),
        };
        py.detach(|| match self.node.quick(request) {
            Quick::No => 0,
            Quick::Launch => 1,
            Quick::Submitted => 2,
        })
    }

    /// Announce what is submitted: a caller waits. `drives`: and calls `next` itself from now on,
    /// until `undrive`.
    fn flush(&self, py: Python<'_>, drives: bool) {
        py.detach(|| self.node.flush(drives));
    }

    /// Wait until `next` has something and nobody drives; False after `timeout`.
    fn await_work(&self, py: Python<'_>, timeout: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout.clamp(0.0, 1e6));
        py.detach(|| self.node.await_work(timeout))
    }

    /// The caller calls `next` itself from now on.
    fn drive(&self, py: Python<'_>) {
        py.detach(|| self.node.drive());
    }

    /// It does no longer.
    fn undrive(&self, py: Python<'_>) {
        py.detach(|| self.node.undrive());
    }

    /// The next thing to do, None after `timeout`: (answers, frozen, real, why it ended).
    #[allow(clippy::type_complexity, reason = "a tuple for Python")]
    fn next(
        &self,
        py: Python<'_>,
        timeout: f64,
    ) -> Option<(Vec<Agreed>, bool, bool, Option<String>)> {
        let timeout = Duration::from_secs_f64(timeout.clamp(0.0, 1e6));
        let action = py.detach(|| self.node.next(timeout))?;
        let all = |answers: Vec<Arc<Answer>>| answers.into_iter().map(Agreed).collect();
        Some(match action {
            Action::Launch(answers) => (all(answers), false, true, None),
            Action::Frozen { answers, real } => (all(answers), true, real, None),
            Action::End(reason) => (Vec::new(), false, false, Some(reason)),
        })
    }

    /// The frozen launch that `next` gave last has ended; `flagged`: a rank raised its flag.
    fn finished(&self, py: Python<'_>, flagged: bool) {
        py.detach(|| self.node.finished(flagged));
    }

    /// Why nothing more can be launched; None while it can.
    fn ended(&self) -> Option<String> {
        self.node.ended()
    }

    /// Whether a frozen schedule holds, and how many launches it has made.
    fn frozen(&self) -> (bool, u64) {
        self.node.frozen()
    }

    /// Seconds on the clock of `news`.
    fn now(&self) -> f64 {
        self.node.now() as f64 / 1e6
    }

    /// Record timeline events, on rank 0.
    fn record(&self, on: bool) {
        self.node.record(on);
    }

    /// Events (seconds, name, kind, moment, rank) and warnings since the last call, on rank 0.
    /// Moments: 0 the first rank announced it, 1 a rank did, 2 all have, 3 a cycle.
    #[allow(clippy::type_complexity, reason = "a tuple for Python")]
    fn news(&self) -> (Vec<(f64, String, u8, u8, u32)>, Vec<String>) {
        let (events, warnings) = self.node.news();
        let event = |event: evener_negotiate::coordinator::Event| {
            let (moment, rank) = match event.moment {
                Moment::Start => (0, 0),
                Moment::Ready(rank) => (1, rank),
                Moment::End => (2, 0),
                Moment::Cycle => (3, 0),
            };
            let at = event.at as f64 / 1e6;
            (at, event.name, event.kind as u8, moment, rank)
        };
        (events.into_iter().map(event).collect(), warnings)
    }

    /// Tell all ranks that this one ends. They go on; what needs this one is an error.
    fn shutdown(&self, py: Python<'_>) {
        py.detach(|| self.node.shutdown());
    }

    /// Tell all ranks that this one cannot go on, and why: nobody launches anything after it.
    fn fail(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.node.fail(reason));
    }

    /// Close the connections, waiting for the peers for `linger` seconds at most. False on rank 0
    /// where others go on: nothing is closed then.
    fn close(&self, py: Python<'_>, linger: f64) -> bool {
        py.detach(|| {
            self.node
                .close(Duration::from_secs_f64(linger.clamp(0.0, 60.0)))
        })
    }
}
