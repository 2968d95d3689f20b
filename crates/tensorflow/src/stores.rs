//! Which store a kernel works on.
//!
//! An op names its store; stores live in a registry of the process. Two places can hold that
//! registry. In Python it is `evener._native`, so that TensorFlow, PyTorch and `evener.embedding`
//! see the same stores: [`bind`] is called right after the library is loaded. A process without
//! Evener's Python package (a model server) uses the store that is linked into this library.
//!
//! An op also carries the store's options. Where the process has no store of that name, the first
//! kernel that needs it makes it: a worker of a TF1 cluster, or a server, runs graphs that were built
//! elsewhere.

use crate::capi::Code;
use crate::kernel::{Node, Result};
use evener_embedding::abi::{self, Remote, Status, Table};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

static BOUND: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

/// Changes when a name may mean another store than before, so that kernels look again.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// Uses the registry behind `table` from now on.
pub fn bind(table: &'static Table) {
    BOUND.store(std::ptr::from_ref(table).cast_mut(), Ordering::Release);
    GENERATION.fetch_add(1, Ordering::AcqRel);
}

/// Lets every kernel look its store up again. A store that was closed (or all, without a name) starts
/// with no steps.
pub fn forget(name: Option<&str>) {
    if let Some(states) = STATES.get() {
        let states = states.lock().unwrap_or_else(PoisonError::into_inner);
        for (of, state) in &*states {
            if name.is_none_or(|name| name == of) {
                state.clock.store(0, Ordering::Release);
                state.trained.store(false, Ordering::Release);
            }
        }
    }
    GENERATION.fetch_add(1, Ordering::AcqRel);
}

fn table() -> &'static Table {
    // SAFETY: only `bind` writes it, with a table that lives for ever.
    unsafe { BOUND.load(Ordering::Acquire).as_ref() }.unwrap_or_else(|| abi::table())
}

/// What this side knows of a store by its name, shared by all kernels.
#[derive(Default)]
pub struct State {
    /// The step of training that the store is in. A step's lookups come before its update, and
    /// nobody tells them the step: the last update does.
    pub clock: AtomicU32,
    /// Whether an op of this process has updated it.
    pub trained: AtomicBool,
}

static STATES: OnceLock<Mutex<HashMap<String, Arc<State>>>> = OnceLock::new();

/// The state of a name, made at first need.
pub fn state(name: &str) -> Arc<State> {
    let mut states = STATES
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Arc::clone(states.entry(name.to_owned()).or_default())
}

/// The step after the last that a store has done, by its statistics (JSON).
fn next_step(statistics: &str) -> u32 {
    let number = |name| {
        let found = serde_json::from_str::<serde_json::Value>(statistics).ok()?;
        u32::try_from(found.get(name)?.as_u64()?).ok()
    };
    // No step at all is another thing than one step, number 0.
    match number("steps") {
        Some(0) | None => 0,
        Some(_) => number("step").unwrap_or(0).saturating_add(1),
    }
}

/// The store that an op names.
pub struct Named {
    name: String,
    options: String,
    state: Arc<State>,
    found: RwLock<Option<(u64, Arc<Remote>)>>,
}

impl Named {
    /// From the attributes of a node.
    pub fn of(node: &Node) -> Result<Self> {
        let name = node.string(c"store")?;
        if name.is_empty() {
            return Err((Code::InvalidArgument, "the store has no name".to_owned()));
        }
        Ok(Self {
            options: node.string(c"options")?,
            state: state(&name),
            name,
            found: RwLock::default(),
        })
    }

    /// The store, made now if the process has none of this name.
    pub fn get(&self) -> Result<Arc<Remote>> {
        let generation = GENERATION.load(Ordering::Acquire);
        {
            let found = self.found.read().unwrap_or_else(PoisonError::into_inner);
            if let Some((of, remote)) = &*found
                && *of == generation
            {
                return Ok(Arc::clone(remote));
            }
        }
        let remote = match Remote::find(table(), &self.name) {
            Err(error) if error.status == Status::NotFound && !self.options.is_empty() => {
                Remote::open(table(), &self.name, &self.options)
            }
            other => other,
        };
        let remote = Arc::new(self.named(remote)?);
        // A store that was restored, or trained by others, goes on behind its last step.
        let next = next_step(&self.named(remote.stats())?);
        self.state.clock.fetch_max(next, Ordering::AcqRel);
        *self.found.write().unwrap_or_else(PoisonError::into_inner) =
            Some((generation, Arc::clone(&remote)));
        Ok(remote)
    }

    /// The step that lookups are in.
    pub fn step(&self) -> u32 {
        self.state.clock.load(Ordering::Acquire)
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether an op of this process has updated it.
    pub fn trained(&self) -> bool {
        self.state.trained.load(Ordering::Acquire)
    }

    /// Goes on behind the last step of a restored store, by its statistics (JSON).
    pub fn at(&self, statistics: &str) {
        self.state
            .clock
            .store(next_step(statistics), Ordering::Release);
    }

    /// The step of an update: as the caller counts (0 or more), or one more than the last.
    pub fn tick(&self, given: i64) -> Result<u32> {
        let step = if given < 0 {
            self.step()
        } else {
            u32::try_from(given).map_err(|_| {
                (
                    Code::InvalidArgument,
                    format!("step {given} cannot be: at most {}", u32::MAX),
                )
            })?
        };
        Ok(step)
    }

    /// An update of this step is done: lookups from now on are in the next one.
    pub fn tock(&self, step: u32) {
        self.state.trained.store(true, Ordering::Release);
        self.state
            .clock
            .fetch_max(step.saturating_add(1), Ordering::AcqRel);
    }

    /// The store's error with its name, as TensorFlow's.
    pub fn named<T>(&self, outcome: std::result::Result<T, abi::Failed>) -> Result<T> {
        outcome.map_err(|error| {
            let code = match error.status {
                Status::Ok | Status::Internal => Code::Internal,
                Status::Invalid => Code::InvalidArgument,
                Status::NotFound => Code::NotFound,
                Status::Io => Code::Unavailable,
                Status::Corrupt => Code::DataLoss,
                Status::Exhausted => Code::ResourceExhausted,
            };
            (
                code,
                format!("embedding '{}': {}", self.name, error.message),
            )
        })
    }

    /// Refuses an input for what it is.
    pub fn refuse<T>(&self, problem: impl std::fmt::Display) -> Result<T> {
        Err((
            Code::InvalidArgument,
            format!("embedding '{}': {problem}", self.name),
        ))
    }
}
