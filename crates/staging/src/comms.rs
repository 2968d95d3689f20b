//! The comms to and from all ranks.

use std::sync::Arc;

use evener_engine::Engine;
use evener_engine::comm::Comm;

/// A comm in each direction, by rank.
pub(crate) struct Comms {
    pub(crate) send: Vec<Option<Arc<Comm>>>,
    pub(crate) receive: Vec<Option<Arc<Comm>>>,
}

impl Comms {
    pub(crate) fn new(size: u32) -> Comms {
        Comms {
            send: vec![None; size as usize],
            receive: vec![None; size as usize],
        }
    }

    pub(crate) fn release(&self, engine: &Engine) {
        for comm in self.send.iter().chain(&self.receive).flatten() {
            engine.release(comm);
        }
    }
}
