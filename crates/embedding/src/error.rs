//! What the store refuses, and why. Whatever is refused has changed nothing.

use std::path::PathBuf;

/// Why a call did not happen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option, a length or a value that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// No such store, or no such snapshot.
    #[error("{0}")]
    NotFound(String),
    /// The system refused: a file, memory, a thread.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A file that is not whole, or not what it says it is.
    #[error("{path}: {what}", path = path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong in it, and where.
        what: String,
    },
    /// No room for another row.
    #[error("{0}")]
    Exhausted(String),
}

/// What calls of the store give back.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn invalid<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Invalid(what.into()))
}

pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}
