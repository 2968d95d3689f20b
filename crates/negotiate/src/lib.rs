//! Which collective comes next: agreement of all ranks, in whatever order each of them submits.
//!
//! A collective library wants the same calls in the same order on every rank; a program submits
//! gradients in the order in which they happen to be ready. So ranks announce what they have, and a
//! [`Coordinator`] (it lives in rank 0's process) says what is launched next, to all, in one total
//! order. Because every rank launches that sequence and nothing else, no rank can launch a
//! collective that another does not.
//!
//! - [`wire`]: what is said, and its bytes.
//! - [`check`]: whether the ranks' requests fit together; the error text where they do not.
//! - [`coordinator`]: counts announcements and answers. It uses `answers` (those it remembers),
//!   `fusion` (which are launched together) and `history` (when they become a schedule).
//! - [`worker`]: one rank: what it has submitted, what it must launch, the frozen schedule.
//! - [`link`]: threads and sockets that carry the messages. It alone does I/O, with `stream`.
//! - [`meet`]: how ranks get connections; `evener-collectives` uses it too.
//! - `stream`: how a connection begins, and where a message on it ends.
//! - [`gather`]: how long submissions are gathered before anything is done with them.
//! - [`gate`]: the frozen schedule's flag, where all ranks share a machine.
//!
//! # The cache
//! An answer that can be repeated gets a number. A rank whose request is the same as last time
//! announces the number instead of the request, and the answer is that number too.
//!
//! # The frozen schedule
//! When the same sequence of cached answers has come several times over, the coordinator declares it
//! the schedule. From then on nothing is announced: a rank that has submitted all tensors of the
//! next step launches it, and with it a flag is reduced: inside the collective itself, as one more
//! element, or where all ranks share a machine in its memory, just before it. A rank that wants
//! anything else launches the next step of the schedule all the same, with zeros and the flag raised
//! (a *dummy*; with shared memory nothing but the flag). All ranks see the flag in that one step,
//! discard its result (or do not begin it), and announce what they have anew, in the next *epoch*.
//!
//! Safety: in a frozen epoch each rank launches steps of one agreed sequence, one at a time, and ends
//! the epoch at the first step whose flag is up. That is the same step for all, because the flag is
//! part of the reduction. Liveness: a rank that raises the flag says so to all through the
//! coordinator, and a rank that has nothing to launch then launches a dummy too. An announcement
//! carries its epoch; one of an ended epoch is dropped, and its rank makes it again in the new one.

mod answers;
pub mod check;
pub mod coordinator;
mod error;
mod fusion;
pub mod gate;
pub mod gather;
mod history;
pub mod link;
mod lobby;
pub mod meet;
mod stream;
mod sys;
mod threads;
pub mod wire;
pub mod worker;

pub use coordinator::{Coordinator, Policy};
pub use wire::{Answer, Down, Kind, Meta, Part, Request, Up, WireError};
pub use worker::{Action, Worker};
