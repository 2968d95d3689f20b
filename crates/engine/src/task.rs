//! What other threads ask of a worker.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use evener_proto::PathId;

use crate::comm::Comm;
use crate::conn::Conn;
use crate::peer::Peer;
use crate::peers::Claim;
use crate::stats::PathStats;

/// See the module.
#[derive(Debug)]
pub enum Task {
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
    /// A lane of a comm begins; with a listener, the peer is asked to open it.
    Begin(Arc<Comm>, usize, Option<u64>),
    /// The receiving end of a comm that the peer asked for has begun.
    Accept(Arc<Comm>),
    /// There is no such listener.
    Decline(Arc<Peer>, u64),
    /// A lane of a comm ends.
    Release(Arc<Comm>, usize),
    /// A path is not worth keeping, or dead.
    Drop(Arc<Peer>, PathId, &'static str),
    /// A path is suspect: it is closed if the kernel may still read memory for it (it may for long).
    Reclaim(Arc<Peer>, PathId),
    /// Messages have ended, and connections may have parts of them queued.
    Detach(Arc<Peer>),
    /// Half of this worker's connections to a peer are to be another's: for tests.
    Give(Arc<Peer>, usize),
    /// A peer that has this process' token wants a UDP connection.
    Hello {
        /// Its random number.
        random: u64,
        /// What it said.
        packet: Vec<u8>,
        /// From where.
        from: SocketAddr,
    },
    /// A peer's process has ended.
    Ended(Arc<Peer>),
    /// An interface lost its carrier.
    InterfaceDown(u32),
    /// The end.
    Stop,
}
