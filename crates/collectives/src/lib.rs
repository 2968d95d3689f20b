//! Collectives between processes over TCP, for frameworks that bring none of their own.
//!
//! torch has Gloo; a TensorFlow process has nothing, and must not import torch for it. So here are
//! the collectives that Horovod's operations need, and what drives them:
//!
//! - [`number`]: element types and reductions, in place on bytes.
//! - [`mesh`]: a connection between each two ranks; sending and receiving at the same time, with a
//!   limit of time and errors that name the peer.
//! - [`algorithms`]: all-reduce, all-gather, broadcast, all-to-all and reduce-scatter on a mesh.
//! - [`adasum`]: the Adasum rule.
//! - [`light`]: all-reduces in two levels, and gradients of which the largest entries are sent.
//! - [`engine`]: takes requests with their data, has them agreed on (`evener-negotiate`), and runs
//!   them in the agreed order on a thread of its own.
//!
//! Every rank runs the same collectives in the same order, because the negotiation says so. So a
//! collective has no header: its bytes follow those of the one before.

pub mod adasum;
pub mod algorithms;
pub mod engine;
pub mod light;
pub mod mesh;
pub mod number;
mod sys;

pub use engine::{Engine, Failure, Job, Outcome};
pub use mesh::{Lost, Mesh};
