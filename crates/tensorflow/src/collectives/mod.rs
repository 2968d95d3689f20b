//! Horovod's operations as TensorFlow ops.
//!
//! A kernel does not wait: it submits what it has to the engine of this process
//! (`evener-collectives`), which runs it when all ranks have submitted it, and tells TensorFlow. So a
//! graph may have more collectives under way than TensorFlow has threads, in another order on each
//! rank.
//!
//! [`ops`] are the ops, [`job`] is one run of one of them, [`done`] TensorFlow's callback, [`control`]
//! what Python calls (`evener.horovod.tensorflow`).

mod control;
mod done;
mod job;
mod ops;

pub use ops::register;

use evener_collectives::Engine;
use std::sync::{Arc, PoisonError, RwLock};

/// The engine between `hvd.init()` and `hvd.shutdown()`, and this process's place.
#[derive(Clone)]
struct World {
    engine: Arc<Engine>,
    place: control::Seat,
}

static WORLD: RwLock<Option<World>> = RwLock::new(None);

fn world() -> Option<World> {
    WORLD.read().unwrap_or_else(PoisonError::into_inner).clone()
}
