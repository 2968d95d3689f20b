//! The feature store for Python. `evener.embedding` is the only caller; it has checked dtypes, shapes,
//! contiguity and devices, and keeps the arrays alive.

use crate::Span;
use evener_embedding::{Error, Optimizer, Options, Store, abi, registry};
use pyo3::exceptions::{PyKeyError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;
use std::sync::Arc;

fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Invalid(_) => PyValueError::new_err(message),
        Error::NotFound(_) => PyKeyError::new_err(message),
        Error::Io { source, .. } => match source.raw_os_error() {
            // With its number Python makes the right class of it, and tests can tell.
            Some(number) => PyOSError::new_err((number, message)),
            None => PyOSError::new_err(message),
        },
        Error::Corrupt { .. } => PyRuntimeError::new_err(message),
        Error::Exhausted(_) => PyOSError::new_err(message),
    }
}

fn span(address: usize, length: usize) -> Span {
    Span { address, length }
}

/// The address of the table of functions through which another shared object of this process uses
/// these stores; see `evener_embedding::abi`.
#[pyfunction]
pub fn embedding_table() -> usize {
    std::ptr::from_ref(abi::table()) as usize
}

/// The names of all stores of this process.
#[pyfunction]
pub fn embedding_names() -> Vec<String> {
    registry::names()
}

/// Takes a name away; the store goes with its last holder.
#[pyfunction]
pub fn embedding_forget(name: &str) -> bool {
    registry::forget(name)
}

/// Values that the optimizer keeps for a row with these options (JSON).
#[pyfunction]
pub fn embedding_slots(options: &str) -> PyResult<usize> {
    let options = Options::parse(options).map_err(raise)?;
    Ok(options.optimizer.slots(options.dim as usize))
}

/// A store. Keys are addresses of int64, values of float32, counts of uint32, flags of uint8.
#[pyclass(frozen)]
pub struct EmbeddingStore(Arc<Store>);

#[pymethods]
impl EmbeddingStore {
    /// By name; with options (JSON) it is made if there is none.
    #[staticmethod]
    #[pyo3(signature = (name, options=None))]
    fn open(name: &str, options: Option<&str>) -> PyResult<EmbeddingStore> {
        match options {
            None => registry::find(name),
            Some(json) => Options::parse(json).and_then(|options| registry::open(name, options)),
        }
        .map(EmbeddingStore)
        .map_err(raise)
    }

    fn options(&self) -> String {
        self.0.options().to_json()
    }

    fn size(&self) -> u64 {
        self.0.len()
    }

    /// As JSON.
    fn stats(&self) -> PyResult<String> {
        serde_json::to_string(&self.0.stats())
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    fn lookup(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        step: u32,
        out: usize,
        room: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: `evener.embedding` holds arrays of these lengths until this returns; nobody
            // writes the keys, nobody else uses the output.
            let (keys, out) = unsafe { (span(keys, n).read(), span(out, room).write()) };
            self.0.lookup(keys, step, out)
        })
        .map_err(raise)
    }

    /// `found` may be 0.
    fn lookup_infer(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        out: usize,
        room: usize,
        found: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `lookup`; `found` is 0 or n long.
            let (keys, out) = unsafe { (span(keys, n).read(), span(out, room).write()) };
            // SAFETY: as above.
            let found = (found != 0).then(|| unsafe { span(found, n).write() });
            self.0.lookup_infer(keys, out, found)
        })
        .map_err(raise)
    }

    #[allow(clippy::too_many_arguments, reason = "addresses come with lengths")]
    fn apply(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        gradients: usize,
        length: usize,
        step: u32,
        lr: Option<f32>,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `lookup`.
            let (keys, gradients) =
                unsafe { (span(keys, n).read(), span(gradients, length).read()) };
            self.0.apply(keys, gradients, step, lr)
        })
        .map_err(raise)
    }

    fn upsert(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        values: usize,
        length: usize,
        step: u32,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `lookup`.
            let (keys, values) = unsafe { (span(keys, n).read(), span(values, length).read()) };
            self.0.upsert(keys, values, step)
        })
        .map_err(raise)
    }

    fn remove(&self, py: Python<'_>, keys: usize, n: usize) -> u64 {
        // SAFETY: as in `lookup`.
        py.detach(|| self.0.remove(unsafe { span(keys, n).read() }))
    }

    /// Whether another is the same store: a name may have been given to a new one.
    fn same(&self, other: &EmbeddingStore) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Keys without a row, and what admission has counted of them, as bytes.
    fn counts<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>) {
        let (keys, counts) = py.detach(|| self.0.counts());
        (
            PyBytes::new(py, bytes_of(&keys)),
            PyBytes::new(py, bytes_of(&counts)),
        )
    }

    fn set_counts(&self, py: Python<'_>, keys: usize, counts: usize, n: usize) -> PyResult<()> {
        // SAFETY: as in `lookup`; there are as many counts as keys.
        py.detach(|| unsafe {
            self.0
                .set_counts(span(keys, n).read(), span(counts, n).read())
        })
        .map_err(raise)
    }

    /// The counters of a Bloom filter.
    fn counters<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.counters()))
    }

    fn raise_counters(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        py.detach(|| self.0.raise_counters(bytes)).map_err(raise)
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.clear()).map_err(raise)
    }

    fn evict(&self, py: Python<'_>, step: u32) -> PyResult<u64> {
        py.detach(|| self.0.evict(step)).map_err(raise)
    }

    #[allow(clippy::too_many_arguments, reason = "addresses come with lengths")]
    fn take_rows(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        step: u32,
        rows: usize,
        room: usize,
        frequencies: usize,
        versions: usize,
        admitted: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `lookup`; frequencies, versions and flags are n long.
            unsafe {
                let meta = (span(frequencies, n).write(), span(versions, n).write());
                self.0.take_rows(
                    span(keys, n).read(),
                    step,
                    span(rows, room).write(),
                    meta,
                    span(admitted, n).write(),
                )
            }
        })
        .map_err(raise)
    }

    #[allow(clippy::too_many_arguments, reason = "addresses come with lengths")]
    fn put_rows(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        rows: usize,
        length: usize,
        frequencies: usize,
        versions: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `lookup`; frequencies and versions are n long.
            unsafe {
                self.0.put_rows(
                    span(keys, n).read(),
                    span(rows, length).read(),
                    span(frequencies, n).read(),
                    span(versions, n).read(),
                )
            }
        })
        .map_err(raise)
    }

    /// Keys, whole rows, frequencies and versions of a shard, as bytes.
    #[allow(clippy::type_complexity, reason = "four arrays")]
    fn export_shard<'py>(
        &self,
        py: Python<'py>,
        shard: usize,
    ) -> PyResult<(
        Bound<'py, PyBytes>,
        Bound<'py, PyBytes>,
        Bound<'py, PyBytes>,
        Bound<'py, PyBytes>,
    )> {
        let out = py.detach(|| self.0.export_shard(shard)).map_err(raise)?;
        Ok((
            PyBytes::new(py, bytes_of(&out.keys)),
            PyBytes::new(py, bytes_of(&out.rows)),
            PyBytes::new(py, bytes_of(&out.frequencies)),
            PyBytes::new(py, bytes_of(&out.versions)),
        ))
    }

    /// Another optimizer (JSON).
    fn set_optimizer(&self, py: Python<'_>, json: &str) -> PyResult<()> {
        py.detach(|| Optimizer::parse(json).and_then(|optimizer| self.0.set_optimizer(optimizer)))
            .map_err(raise)
    }

    fn freeze(&self, frozen: bool) {
        self.0.freeze(frozen);
    }

    fn frozen(&self) -> bool {
        self.0.frozen()
    }

    /// "snapshot" and "delta" to a folder, "save" to a file, "restore" from either, "apply_delta" from
    /// a file; what was written or read as JSON.
    fn file(&self, py: Python<'_>, call: &str, path: PathBuf) -> PyResult<String> {
        let saved = py
            .detach(|| match call {
                "snapshot" => self.0.snapshot(&path),
                "delta" => self.0.delta(&path),
                "save" => self.0.save(&path),
                "restore" => self.0.restore(&path),
                "apply_delta" => self.0.apply_delta(&path),
                other => Err(Error::Invalid(format!("there is no call {other:?}"))),
            })
            .map_err(raise)?;
        serde_json::to_string(&saved).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    fn save_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.0.save_bytes()).map_err(raise)?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn restore_bytes(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        py.detach(|| self.0.restore_bytes(bytes)).map_err(raise)?;
        Ok(())
    }

    /// Frequencies and versions; 0xFFFFFFFF in both for a key without a row.
    fn meta(
        &self,
        py: Python<'_>,
        keys: usize,
        n: usize,
        frequencies: usize,
        versions: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: as in `take_rows`.
            let (keys, f, v) = unsafe {
                (
                    span(keys, n).read(),
                    span(frequencies, n).write(),
                    span(versions, n).write(),
                )
            };
            for (i, meta) in self.0.meta(keys)?.into_iter().enumerate() {
                (f[i], v[i]) = meta.unwrap_or((u32::MAX, u32::MAX));
            }
            Ok(())
        })
        .map_err(raise)
    }

    /// Numbers of strings, written to n int64.
    fn intern(
        &self,
        py: Python<'_>,
        strings: Vec<Vec<u8>>,
        insert: bool,
        out: usize,
    ) -> PyResult<()> {
        let mut offsets = vec![0u64];
        let bytes = strings.concat();
        for string in &strings {
            offsets.push(offsets.last().copied().unwrap_or(0) + string.len() as u64);
        }
        py.detach(|| {
            // SAFETY: as in `lookup`; the output is as long as the list.
            let out = unsafe { span(out, strings.len()).write() };
            self.0.intern(&bytes, &offsets, insert, out)
        })
        .map_err(raise)
    }

    /// The string of a number.
    fn name<'py>(&self, py: Python<'py>, key: i64) -> Option<Bound<'py, PyBytes>> {
        self.0.name(key).map(|name| PyBytes::new(py, &name))
    }
}

fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: the values are numbers without padding; any byte may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
