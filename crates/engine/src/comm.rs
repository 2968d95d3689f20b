//! A comm as callers hold it: the requests of one end, and the peer at the other.
//!
//! # Lanes
//! A comm goes over one or several connections, its lanes: one thread moves all packets of a connection,
//! and a comm on one connection has one thread. Request `n` belongs to lane `n % lanes`, at both ends, so
//! each request has one thread, and nobody has to say which.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use evener_proto::Side;

use crate::peers::Claim;
use crate::requests::Requests;

/// Most lanes of a comm.
pub const MOST_LANES: usize = 8;

/// One connection of a comm.
#[derive(Debug)]
pub struct Lane {
    /// Who is at the other end; known for as long as the comm is.
    pub peer: Claim,
    /// The bit of its worker's bell.
    pub bit: AtomicUsize,
}

/// See the module.
#[derive(Debug)]
pub struct Comm {
    /// What its workers need of it.
    pub requests: Arc<Requests>,
    /// Its connections: one at least.
    pub lanes: Vec<Lane>,
}

impl Comm {
    /// A comm that no worker knows yet, over these connections.
    pub fn new(id: u64, side: Side, peers: Vec<Claim>) -> Arc<Comm> {
        let lane = |peer| Lane {
            peer,
            bit: AtomicUsize::new(0),
        };
        Arc::new(Comm {
            requests: Requests::new(id, side, peers.len()),
            lanes: peers.into_iter().map(lane).collect(),
        })
    }

    /// The connection of request `number`.
    pub fn lane_of(&self, number: u64) -> &Lane {
        &self.lanes[number as usize % self.lanes.len()]
    }

    /// The first connection.
    pub fn first(&self) -> &Lane {
        &self.lanes[0]
    }
}

impl Deref for Comm {
    type Target = Requests;

    fn deref(&self) -> &Requests {
        &self.requests
    }
}
