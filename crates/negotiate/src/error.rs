//! Why ranks could not be connected.

use std::io;

use thiserror::Error;

/// The ranks could not be connected.
#[derive(Debug, Error)]
pub enum LinkError {
    /// A socket said so.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Nobody came.
    #[error("rank {0} did not connect in {1} s")]
    Missing(String, f64),
}
