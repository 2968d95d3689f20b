//! Evener's message protocol, sans-IO: no system call, no thread, no clock of its own. Whoever drives
//! it hands in frames, times and news of paths, and takes out frames, events and deadlines.
//!
//! # The pieces
//! Two processes share one **association**. It has a fixed number of **lanes**; a lane belongs to one
//! worker thread on either side, so nothing in it is shared. A lane has **paths** (for TCP: one
//! connection each) and carries **comms**, one-directional queues of messages. Message `n` of a comm
//! goes from the `n`-th send to the `n`-th receive.
//!
//! # A message
//! 1. The receiver posts a buffer: a *credit* goes to the sender.
//! 2. The sender's message and the credit meet. Whichever path has room *pulls* the next chunk
//!    ([`Lane::transmit`]); nothing is dealt out in advance, so a slow path holds up one chunk. How
//!    much a path may have on its way, its window, follows from how long its chunks wait ([`Lane::fill`]).
//! 3. A chunk names message, offset and length, and goes into the posted buffer, in any order over any
//!    path ([`Lane::place`]). NCCL reads what is there already, so chunks end where [`line`]s do.
//!    Intervals ([`ranges`]) say when all of it is there.
//! 4. The receiver acknowledges the message; only then is the send complete. The kernel's word that
//!    bytes were sent says nothing about the peer.
//!
//! A small message need not wait for its credit: each comm has a few *eager* slots at the receiver,
//! allocated beforehand; the sender counts them, so an eager message always finds room.
//!
//! # When a path dies
//! Its unacknowledged chunks go again over others. What the receiver may have heard twice is
//! harmless: a chunk of a complete message is read into nowhere, a chunk of a live one writes the
//! same bytes again. Credits, acknowledgements, opens and closes are *states*, not events: all of
//! them are said again over the paths that are left ([`Lane`] calls that a resync), and hearing
//! one twice changes nothing. So no path needs a log, and a path may vanish with anything in it.
//!
//! A path is *suspect* when something was sent on it and nothing was confirmed for a while
//! ([`path`]): its chunks are offered to others, but it may come back. Suspect for too long is dead.
//! Dialling again, where, and how long to wait before it, is [`dial`]'s.
//!
//! # For packets
//! Nothing here assumes that a path is ordered or reliable, except that a path's *loss* is reported
//! by its death or suspicion. [`packet`] is a protocol of its own for datagrams, with loss recovery,
//! authentication and congestion control; it does without lanes.

pub mod ahead;
pub mod dial;
pub mod faults;
pub mod lane;
pub mod line;
pub mod packet;
pub mod path;
pub mod ranges;
pub mod receive;
pub mod send;
mod window;
pub mod wire;

pub use lane::{Event, Lane, LaneConfig, Side, Transmit, Why};
pub use path::{PathId, PathState};
pub use receive::Place;
pub use wire::{Frame, WireError};
