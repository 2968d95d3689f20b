//! Optimizer steps and norms on several threads. The work is elementwise, or added up in a fixed
//! order, so the number of threads changes nothing but the time.
//!
//! By default there is one thread for each CPU that this process may use: the affinity mask, and the
//! cgroup's CPU quota where it is smaller (`std::thread::available_parallelism` reads both).

use crate::adam::Adam;
use crate::formats::BLOCK;
use crate::isa::Isa;
use crate::lion::Lion;
use crate::norm;
use crate::sgd::Sgd;
use crate::state::{Gradient, Noise, StateError, Tensors};
use rayon::prelude::*;

/// Elements that one thread takes at a time: a few hundred kilobytes of states.
const TASK: usize = 64 * BLOCK;

/// An optimizer whose step is elementwise.
pub trait Optimizer: Sync {
    /// One step on one thread.
    ///
    /// # Errors
    /// Where lengths or hyper-parameters do not fit; nothing has been written then.
    fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError>;
}

impl Optimizer for Adam {
    fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        Adam::step(self, isa, tensors, noise)
    }
}

impl Optimizer for Lion {
    fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        Lion::step(self, isa, tensors, noise)
    }
}

impl Optimizer for Sgd {
    fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        Sgd::step(self, isa, tensors, noise)
    }
}

/// Threads that wait for optimizer steps.
#[derive(Debug)]
pub struct Pool(rayon::ThreadPool);

impl Pool {
    /// `threads` of them; 0: as many as this process may use CPUs.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub fn new(threads: usize) -> Result<Pool, rayon::ThreadPoolBuildError> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            given => given,
        };
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("evener-cpu-{i}"))
            .build()
            .map(Pool)
    }

    /// How many there are.
    pub fn threads(&self) -> usize {
        self.0.current_num_threads()
    }

    /// One step of `optimizer`.
    ///
    /// # Errors
    /// Where lengths or hyper-parameters do not fit; nothing has been written then.
    pub fn step(
        &self,
        optimizer: &impl Optimizer,
        isa: Isa,
        tensors: Tensors<'_>,
        noise: Noise,
    ) -> Result<(), StateError> {
        tensors.check()?;
        // An empty step checks the hyper-parameters before any thread writes.
        let (nothing, mut rest) = tensors.split_at(0);
        optimizer.step(isa, nothing, noise)?;
        let mut tasks = Vec::with_capacity(rest.len() / TASK + 1);
        let mut offset = noise.offset;
        while !rest.is_empty() {
            let length = TASK.min(rest.len());
            let (task, after) = rest.split_at(length);
            tasks.push((
                task,
                Noise {
                    key: noise.key,
                    offset,
                },
            ));
            offset = offset.wrapping_add(length as u32);
            rest = after;
        }
        self.0.install(|| {
            tasks
                .into_par_iter()
                .try_for_each(|(task, noise)| optimizer.step(isa, task, noise))
        })
    }

    /// The sum of squares of `gradient`.
    pub fn squares(&self, isa: Isa, gradient: Gradient<'_>) -> f64 {
        let spans: Vec<Gradient<'_>> = match gradient {
            Gradient::F32(x) => x.chunks(norm::SPAN).map(Gradient::F32).collect(),
            Gradient::Bf16(x) => x.chunks(norm::SPAN).map(Gradient::Bf16).collect(),
            Gradient::F16(x) => x.chunks(norm::SPAN).map(Gradient::F16).collect(),
        };
        let sums: Vec<f64> = self.0.install(|| {
            spans
                .into_par_iter()
                .filter_map(|span| norm::squares(isa, span))
                .collect()
        });
        sums.iter().sum()
    }
}
