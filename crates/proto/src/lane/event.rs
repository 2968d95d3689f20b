//! What a lane is told at the start, and what it tells.

use std::time::Duration;

use crate::path::PathId;

/// What both sides of a lane must agree on, and how patient it is.
#[derive(Debug, Clone, Copy)]
pub struct LaneConfig {
    /// Eager slots a comm has in this lane.
    pub eager_slots: usize,
    /// Bytes of an eager slot.
    pub eager_bytes: u64,
    /// With no path for this long, comms fail.
    pub patience: Duration,
}

/// Which end of a comm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    /// The one that sends.
    Send,
    /// The one that receives.
    Receive,
}

/// Why a comm can carry nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// A message was longer than the buffer posted for it.
    #[error("a message of {total} bytes came for a buffer of {room}")]
    Oversize {
        /// The message's length.
        total: u64,
        /// The buffer's.
        room: u64,
    },
    /// The peer closed its end.
    #[error("the peer closed the comm")]
    PeerClosed,
    /// No path led to the peer for longer than the lane is patient.
    #[error("no path to the peer for {} ms", .0.as_millis())]
    NoPath(Duration),
    /// The peer's process has ended: its host says that nobody is there.
    #[error("the peer's process has ended: its host refuses what is sent to it")]
    PeerEnded,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The peer wants to open a comm: answer with [`Lane::accept`] or [`Lane::decline`].
    Open {
        /// The sender's number.
        comm: u64,
        /// Which listener it wants.
        listener: u64,
    },
    /// The peer's answer.
    Opened {
        /// Our number.
        comm: u64,
        /// Whether it took the comm.
        accepted: bool,
    },
    /// The peer has all of a message.
    Sent {
        /// Our number.
        comm: u64,
        /// Which message.
        message: u64,
        /// Its bytes.
        length: u64,
    },
    /// All of a message is in the buffer posted for it.
    Received {
        /// The sender's number.
        comm: u64,
        /// Which message.
        message: u64,
        /// Its bytes.
        length: u64,
    },
    /// All of a message is in an eager slot: copy it to the buffer now, before the next call.
    Deliver {
        /// The sender's number.
        comm: u64,
        /// Which message.
        message: u64,
        /// The slot.
        slot: usize,
        /// Its bytes.
        length: u64,
    },
    /// The comm is over; none of its unfinished messages will complete.
    Failed {
        /// The sender's number.
        comm: u64,
        /// Which end failed here.
        side: Side,
        /// Why.
        why: Why,
    },
    /// The path has had something unconfirmed for too long; its chunks were offered to others.
    Suspected(PathId),
    /// It has confirmed something after all.
    Recovered(PathId),
    /// Close it: it is no longer part of the lane.
    Died(PathId),
}
