//! Threads for batches. The calling thread works too. A child of a fork has none of its parent's
//! threads: it gets its own.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Helpers of one process, by their number.
static POOLS: Mutex<Vec<(u32, usize, Arc<rayon::ThreadPool>)>> = Mutex::new(Vec::new());

/// How many threads a store uses.
#[derive(Debug, Clone, Copy)]
pub struct Threads(usize);

impl Threads {
    /// `count`; 0: as many as this process may use CPUs.
    pub fn new(count: usize) -> Threads {
        Threads(match count {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            given => given.min(256),
        })
    }

    /// How many.
    pub fn count(self) -> usize {
        self.0
    }

    fn helpers(self) -> Result<Arc<rayon::ThreadPool>> {
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((_, _, pool)) = pools
            .iter()
            .find(|(owner, count, _)| *owner == process && *count == self.0)
        {
            return Ok(pool.clone());
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.0 - 1)
            .thread_name(|i| format!("evener-embed-{i}"))
            .build()
            .map_err(|error| Error::Exhausted(format!("no threads for an embedding: {error}")))?;
        let pool = Arc::new(pool);
        // Pools of a parent stay in the list: to drop one would wait for threads that are not here.
        pools.push((process, self.0, pool.clone()));
        Ok(pool)
    }

    /// Does tasks 0 to `tasks`, in any order, on up to as many threads; the first error of the lowest
    /// task, after all are done.
    ///
    /// # Errors
    /// What a task gives, or where there are no threads.
    pub fn run(self, tasks: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        if tasks <= 1 || self.0 <= 1 {
            return (0..tasks).try_for_each(work);
        }
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let drain = || {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                if let Err(error) = work(task) {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| task < *first) {
                        *failed = Some((task, error));
                    }
                }
            }
        };
        self.helpers()?.in_place_scope(|scope| {
            for _ in 1..self.0.min(tasks) {
                scope.spawn(|_| drain());
            }
            drain();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }
}
