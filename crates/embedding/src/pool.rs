//! Threads for batches. The calling thread works too. A child of a fork has none of its parent's
//! threads: it gets its own.

use crate::error::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Helpers of one process, by their number.
static POOLS: Mutex<Vec<(u32, usize, Arc<rayon::ThreadPool>)>> = Mutex::new(Vec::new());

/// How many threads a store uses.
#[derive(Debug, Clone, Copy)]
pub struct Threads(usize);

/// The tasks of one batch. A helper that comes late finds none left and touches nothing: whoever
/// waits for a batch waits only for tasks that were begun, never for a helper that is held up by the
/// lock of another batch. (A lookup holds locks for reading while it waits.)
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    left: Mutex<usize>,
    done: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` may be called from any thread, and is called only while its owner waits (`drain`).
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// The caller calls [`Job::wait`] before `work` goes.
    fn new(work: &(dyn Fn(usize) + Sync), tasks: usize) -> Job {
        // SAFETY: only the lifetime changes; `drain` says why nobody outlives it.
        let work: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
        Job {
            work,
            tasks,
            next: AtomicUsize::new(0),
            left: Mutex::new(tasks),
            done: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    /// Does tasks until none is left to begin. A panic is kept for the caller.
    fn drain(&self) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks {
                return;
            }
            // SAFETY: this task is not done, so the caller is still in `wait` and `work` is there.
            let work = unsafe { &*self.work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(task))) {
                let mut kept = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                *kept = Some(panic);
            }
            let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
            *left -= 1;
            if *left == 0 {
                self.done.notify_all();
            }
        }
    }

    /// Until every task is done. A panic of one goes on here.
    fn wait(&self) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        while *left > 0 {
            left = self.done.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
        drop(left);
        let mut kept = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = kept.take() {
            drop(kept);
            resume_unwind(panic);
        }
    }
}

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
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let work = |task: usize| {
            if let Err(error) = work(task) {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|(first, _)| task < *first) {
                    *failed = Some((task, error));
                }
            }
        };
        let helpers = self.helpers()?;
        let job = Arc::new(Job::new(&work, tasks));
        for _ in 1..self.0.min(tasks) {
            let job = job.clone();
            helpers.spawn(move || job.drain());
        }
        job.drain();
        job.wait();
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::RwLock;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;

    /// A lookup holds a lock for reading while its tasks run; the only helper is held up by that very
    /// lock, in a task of another batch. The lookup must end all the same.
    #[test]
    fn nobody_waits_for_a_helper_that_waits_for_him() {
        let threads = Threads::new(2);
        let shard = Arc::new(RwLock::new(()));
        let (begun, written) = (Arc::new(AtomicBool::new(false)), shard.clone());
        let (done, ended) = channel();
        let held = shard.read().unwrap();
        let flag = begun.clone();
        let writer = std::thread::spawn(move || {
            threads
                .run(2, |_| {
                    flag.store(true, Ordering::Relaxed);
                    drop(written.write().unwrap());
                    Ok(())
                })
                .unwrap();
            done.send(()).unwrap();
        });
        while !begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let count = AtomicUsize::new(0);
        let count = std::thread::scope(|scope| {
            let (count, done) = (&count, channel());
            scope.spawn(move || {
                let ran = threads.run(64, |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                });
                done.0.send(ran.is_ok()).unwrap();
            });
            let limit = std::time::Duration::from_secs(30);
            let Ok(true) = done.1.recv_timeout(limit) else {
                eprintln!("the batch waits for a helper that waits for a lock");
                std::process::abort(); // the threads would be waited for without end
            };
            count.load(Ordering::Relaxed)
        });
        assert_eq!(count, 64);
        drop(held);
        ended.recv().unwrap();
        writer.join().unwrap();
    }

    #[test]
    fn a_panic_and_the_first_error_come_back() {
        let threads = Threads::new(3);
        let error = threads.run(9, |task| match task {
            4 | 7 => crate::error::invalid(format!("task {task}")),
            _ => Ok(()),
        });
        assert_eq!(error.unwrap_err().to_string(), "task 4");
        let panic = catch_unwind(|| {
            let _ = threads.run(9, |task| {
                assert!(task != 5, "five");
                Ok(())
            });
        });
        assert!(panic.is_err());
        threads.run(9, |_| Ok(())).unwrap();
    }
}
