//! The host arena for Python: `evener.zero` makes tensors of its runs and keeps it alive.

use evener_memory::arena::{Arena, ArenaError};
use evener_memory::pages::Run;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Host memory in pages; see `evener_memory::arena`.
#[pyclass(frozen, weakref)]
pub struct HostArena(Mutex<Arena>);

fn raise(error: ArenaError) -> PyErr {
    match error {
        ArenaError::PageSize(_) => PyValueError::new_err(error.to_string()),
        _ => PyMemoryError::new_err(error.to_string()),
    }
}

impl HostArena {
    fn lock(&self) -> MutexGuard<'_, Arena> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl HostArena {
    #[new]
    fn new(py: Python<'_>, size: usize, page: usize, threads: usize) -> PyResult<HostArena> {
        py.detach(|| Arena::new(size, page, threads))
            .map(|arena| HostArena(Mutex::new(arena)))
            .map_err(raise)
    }

    /// Where it begins.
    #[getter]
    fn address(&self) -> usize {
        self.lock().address()
    }

    /// Bytes of a page.
    #[getter]
    fn page(&self) -> usize {
        self.lock().page()
    }

    /// Bytes in all, in use, and the most that were in use.
    fn usage(&self) -> (usize, usize, usize) {
        let arena = self.lock();
        let (page, pages) = (arena.page(), arena.pages());
        (
            pages.total() * page,
            pages.used() * page,
            pages.peak() * page,
        )
    }

    /// A run of pages that holds `size` bytes: its offset and its length in bytes.
    fn take(&self, size: usize) -> PyResult<(usize, usize)> {
        let mut arena = self.lock();
        let run = arena.take(size).map_err(raise)?;
        Ok((run.first * arena.page(), run.pages * arena.page()))
    }

    /// Takes a run back.
    fn give_back(&self, offset: usize, length: usize) -> PyResult<()> {
        let mut arena = self.lock();
        let page = arena.page();
        let run = Run {
            first: offset / page,
            pages: length / page,
        };
        arena.give_back(run).map_err(raise)
    }
}
