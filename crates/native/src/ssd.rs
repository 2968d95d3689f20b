//! The SSD tier for Python: `evener.zero.ssd` makes tensors of its buffers and keeps it alive.

use evener_memory::ssd::SsdError;
use evener_memory::ssd::measure::measure;
use evener_memory::ssd::requests::Span;
use evener_memory::ssd::store::{Store, Way};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A file with buffers; see `evener_memory::ssd::store`.
#[pyclass(frozen, weakref)]
pub struct SsdStore(Mutex<Store>);

/// OSError(errno, text), or ValueError for a request that cannot be.
fn raise(error: SsdError) -> PyErr {
    match error {
        SsdError::Misuse(text) => PyValueError::new_err(text),
        _ => PyOSError::new_err((error.code(), error.to_string())),
    }
}

impl SsdStore {
    fn lock(&self) -> MutexGuard<'_, Store> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SsdStore {
    /// `way`: "auto", "io_uring" or "threads".
    #[new]
    #[allow(clippy::too_many_arguments, reason = "one a property of the store")]
    fn new(
        py: Python<'_>,
        folder: String,
        size: u64,
        count: usize,
        room: usize,
        depth: usize,
        patience: f64,
        way: &str,
    ) -> PyResult<SsdStore> {
        let way = match way {
            "auto" => Way::Auto,
            "io_uring" => Way::Uring,
            "threads" => Way::Threads,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "no way {way:?}: auto, io_uring or threads"
                )));
            }
        };
        let patience = Duration::try_from_secs_f64(patience)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        py.detach(|| Store::new(Path::new(&folder), size, count, room, depth, patience, way))
            .map(|store| SsdStore(Mutex::new(store)))
            .map_err(raise)
    }

    /// The same file with buffers of its own.
    fn beside(
        &self,
        py: Python<'_>,
        count: usize,
        room: usize,
        depth: usize,
    ) -> PyResult<SsdStore> {
        py.detach(|| self.lock().beside(count, room, depth))
            .map(|store| SsdStore(Mutex::new(store)))
            .map_err(raise)
    }

    /// Where a buffer begins.
    fn address(&self, buffer: usize) -> usize {
        self.lock().buffers().address(buffer)
    }

    /// Bytes of each buffer.
    #[getter]
    fn room(&self) -> usize {
        self.lock().buffers().room()
    }

    /// Who moves the bytes and how.
    fn describe(&self) -> String {
        self.lock().describe()
    }

    /// Asks for a read (or a write) of `length` bytes at `offset`; gives a ticket.
    fn submit(
        &self,
        py: Python<'_>,
        write: bool,
        buffer: usize,
        offset: u64,
        length: usize,
    ) -> PyResult<u64> {
        let span = Span {
            buffer,
            offset,
            length,
        };
        py.detach(|| self.lock().submit(write, span)).map_err(raise)
    }

    /// Until a request has ended.
    fn wait(&self, py: Python<'_>, ticket: u64) -> PyResult<()> {
        py.detach(|| self.lock().wait(ticket)).map_err(raise)
    }

    /// Whether it has ended; it is then taken back.
    fn poll(&self, py: Python<'_>, ticket: u64) -> PyResult<bool> {
        py.detach(|| self.lock().poll(ticket)).map_err(raise)
    }

    /// Bytes read and written until now.
    fn moved(&self) -> (u64, u64) {
        let moved = self.lock().moved();
        (moved.read, moved.written)
    }

    /// Bytes/s of reads, of writes, and of both at once; what was in the file's first `size` bytes
    /// is lost.
    fn measure(&self, py: Python<'_>, size: u64, seconds: f64) -> PyResult<(f64, f64, f64)> {
        let rates = py
            .detach(|| measure(&mut self.lock(), size, seconds))
            .map_err(raise)?;
        Ok((rates.read, rates.write, rates.both))
    }
}
