//! A comm as callers hold it: the requests of one end, and the peer at the other.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use evener_proto::Side;

use crate::peers::Claim;
use crate::requests::Requests;

/// See the module.
#[derive(Debug)]
pub struct Comm {
    /// What its worker needs of it.
    pub requests: Arc<Requests>,
    /// Who is at the other end; known for as long as the comm is.
    pub peer: Claim,
    /// The bit of its worker's bell.
    pub bit: AtomicUsize,
}

impl Comm {
    /// A comm that no worker knows yet.
    pub fn new(id: u64, side: Side, peer: Claim) -> Arc<Comm> {
        Arc::new(Comm {
            requests: Requests::new(id, side),
            peer,
            bit: AtomicUsize::new(0),
        })
    }
}

impl Deref for Comm {
    type Target = Requests;

    fn deref(&self) -> &Requests {
        &self.requests
    }
}
