//! A packet port that goes past the kernel's stack: UDP datagrams between one queue of a network card
//! and this process, by AF_XDP. Raw system calls only: no libbpf, no compiler of programs.
//!
//! - [`program`]: which packets are ours. All others go on to the kernel as ever.
//! - [`umem`]: memory that the kernel and this process share, cut into frames.
//! - [`ring`]: queues of descriptors in shared memory, without locks.
//! - [`socket`]: a socket on one queue: its memory, its four rings, its mode.
//! - [`frames`]: Ethernet, IPv4 and UDP headers.
//! - [`hops`]: where frames to an address go, as the kernel's tables say.
//! - [`port`]: what callers use: [`Card`] and [`Port`].
//!
//! A [`Card`] is tried with zero copy, then with native copies, then with generic ones; why a mode was
//! refused is kept. Where none works the error says so, and the caller's UDP sockets do the work.
//!
//! Nothing outlives the process: the program is attached by a link, which the kernel takes away with
//! its last descriptor, also after `kill -9`.
//!
//! Unsafe code is in [`sys`](self), `ring.rs` and `umem.rs` alone.

#![deny(unsafe_code)]

pub mod frames;
pub mod hops;
mod netlink;
pub mod port;
pub mod program;
pub mod ring;
pub mod socket;
mod sys;
pub mod umem;

pub use port::{Came, Card, Counts, Port, Refused, Rule, Wanted};
pub use socket::Mode;
