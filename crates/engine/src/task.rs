//! What other threads ask of a worker of TCP, or of an instance of UDP.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use evener_proto::PathId;

use crate::comm::Comm;
use crate::conn::Conn;
use crate::peer::Peer;
use crate::peers::Claim;
use crate::stats::PathStats;

/// What either does.
#[derive(Debug)]
pub enum Task {
    /// A comm begins; with a listener, the peer is asked to open it.
    Begin(Arc<Comm>, Option<u64>),
    /// The receiving end of a comm that the peer asked for has begun.
    Accept(Arc<Comm>),
    /// There is no such listener.
    Decline(Arc<Peer>, u64),
    /// A comm ends.
    Release(Arc<Comm>),
    /// A path is not worth keeping, or dead.
    Drop(Arc<Peer>, PathId, &'static str),
    /// The end.
    Stop,
}

/// What workers of TCP do besides, for their connections.
#[derive(Debug)]
pub enum StreamTask {
    /// A connection was greeted and answered.
    Connect {
        /// With whom: kept until the connection counts.
        peer: Claim,
        /// The socket.
        fd: OwnedFd,
        /// Its number.
        path: PathId,
        /// Index of the interface.
        interface: u32,
        /// Its counters.
        stats: Arc<PathStats>,
    },
    /// Another worker's connection, which is now this one's.
    Adopt(Arc<Peer>, Box<Conn>),
    /// Messages have ended, and connections may have parts of them queued.
    Detach(Arc<Peer>),
    /// Half of this worker's connections to a peer are to be another's: for tests.
    Give(Arc<Peer>, usize),
    /// A peer's process has ended.
    Ended(Arc<Peer>),
    /// Connections of an interface are dead, and why.
    InterfaceDown(u32, &'static str),
}

/// What instances of UDP do besides: a peer that has this process' token wants a connection.
#[derive(Debug)]
pub struct Hello {
    /// Its random number.
    pub random: u64,
    /// What it said.
    pub packet: Vec<u8>,
    /// From where.
    pub from: SocketAddr,
}

/// A task of either kind, or of this kind alone.
#[derive(Debug)]
pub enum Asked<Own> {
    /// Of either.
    Any(Task),
    /// Of this one.
    Own(Own),
}
