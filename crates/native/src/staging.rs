//! `StagedExchange`: collectives between nodes through host memory, for `evener.comm.staged`.
//!
//! All exchanges of a process share one engine, and so its connections. No method holds the GIL
//! while it works or waits.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use evener_engine::settings::{Process, Settings};
use evener_engine::{Engine, Level};
use evener_staging::cuda::Streams;
use evener_staging::{Error, Exchange, Kind, Room, WORDS};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The process' engine and the process: a fork has none.
static ENGINE: Mutex<Option<(u32, Arc<Engine>)>> = Mutex::new(None);

fn engine() -> Result<Arc<Engine>, Error> {
    let mut engine = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, engine)) = &*engine
        && *owner == process
        && !engine.is_broken()
    {
        return Ok(engine.clone());
    }
    let mut config = Settings::read(&Process)?.config;
    config.label = "-staged";
    let log = |level, text: &str| {
        if matches!(level, Level::Error | Level::Warn) {
            eprintln!("evener: {text}");
        }
    };
    let made = Arc::new(Engine::start(config, Box::new(log))?);
    if let Some(old) = engine.replace((process, made.clone())) {
        // Its threads are the parent's, or dead: nothing to join.
        std::mem::forget(old);
    }
    Ok(made)
}

fn raise(error: Error) -> PyErr {
    match error {
        Error::Handles(_) | Error::Shape(_) => PyValueError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

fn kind(parts: bool) -> Kind {
    if parts { Kind::Parts } else { Kind::Gather }
}

/// One rank's part; see `evener_staging::Exchange`. Addresses are of tensors that
/// `evener.comm.staged` keeps until `close`. Times are in seconds.
#[pyclass(frozen)]
pub struct StagedExchange {
    exchange: Exchange,
}

fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value.clamp(0.0, 1e9))
}

#[pymethods]
impl StagedExchange {
    #[new]
    #[allow(clippy::too_many_arguments, reason = "one a field of the room")]
    fn new(
        py: Python<'_>,
        rank: u32,
        size: u32,
        send: usize,
        receive: usize,
        words: usize,
        slot: usize,
        slots: u32,
        patience: f64,
    ) -> PyResult<Self> {
        let room = Room {
            send,
            receive,
            words,
            slot,
            slots,
        };
        py.detach(|| {
            // SAFETY: `evener.comm.staged` gives three tensors of these sizes, which it keeps until
            // after `close`, and uses none of them itself.
            unsafe { Exchange::listen(engine()?, rank, size, room, seconds(patience)) }
        })
        .map(|exchange| StagedExchange { exchange })
        .map_err(raise)
    }

    /// Bytes that the words need.
    #[classattr]
    const WORDS: usize = WORDS;

    /// What the others need to connect.
    fn handle(&self) -> std::borrow::Cow<'_, [u8]> {
        self.exchange.handle().into()
    }

    /// Connects to all; `handles` by rank.
    fn connect(&self, py: Python<'_>, handles: Vec<Vec<u8>>, limit: f64) -> PyResult<()> {
        py.detach(|| self.exchange.connect(&handles, seconds(limit)))
            .map_err(raise)
    }

    /// Raises RuntimeError where the driver cannot do what is needed.
    fn try_device(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        py.detach(|| self.exchange.try_device(stream))
            .map_err(|error| raise(error.into()))
    }

    /// Enqueues a collective of device memory: copies run on two streams, and `current` waits.
    #[allow(clippy::too_many_arguments, reason = "all of one call")]
    fn enqueue(
        &self,
        py: Python<'_>,
        parts: bool,
        bytes: usize,
        payload: usize,
        received: usize,
        current: usize,
        out: usize,
        back: usize,
    ) -> PyResult<()> {
        let streams = Streams { current, out, back };
        py.detach(|| {
            // SAFETY: `evener.comm.staged` passes live tensors and streams of the current device;
            // the current one is where they are used.
            unsafe {
                self.exchange
                    .enqueue(kind(parts), bytes, payload, received, streams)
            }
        })
        .map_err(raise)
    }

    /// Does a collective of host memory; blocks.
    fn run_on_host(
        &self,
        py: Python<'_>,
        parts: bool,
        bytes: usize,
        payload: usize,
        received: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: two live tensors of these sizes, which the caller holds until this returns.
            unsafe {
                self.exchange
                    .run_on_host(kind(parts), bytes, payload, received)
            }
        })
        .map_err(raise)
    }

    /// Why nothing moves any more, if so.
    fn failure(&self) -> Option<String> {
        self.exchange.failure()
    }

    /// Ends it; the memory is not used any more when this returns.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.exchange.close());
    }
}
