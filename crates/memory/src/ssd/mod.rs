//! A file as memory: blocks of states that are brought, updated and taken back.
//!
//! # The parts
//! - [`requests`]: what was asked for and how far it is; pure bookkeeping, no system call.
//! - [`backend`]: who moves the bytes. [`uring`] asks the kernel by io_uring, with the buffers
//!   registered; [`threads`] is a pool that calls pread and pwrite, where io_uring is refused.
//! - [`file`]: the file: opened past the page cache, all its room taken before anything is written.
//! - [`buffers`]: the memory that blocks are brought to.
//! - [`store`]: these put together: [`store::Store`] is what others use.
//! - [`measure`]: bytes per second of a file, with the operations that a store makes.
//!
//! # Hazards
//! A read of bytes whose write is still on its way waits for it, and so does a write (in
//! [`requests`]): who writes behind and reads ahead need not think of it.
//!
//! # Nothing waits for ever
//! Whoever waits says for how long. A disk that does not answer in that time is an error, and the
//! buffers that the kernel may still write to are then never given back.

pub mod backend;
pub mod buffers;
pub mod file;
pub mod measure;
pub mod requests;
pub mod store;
mod threads;
#[cfg(target_os = "linux")]
mod uring;

use std::io;
use std::path::PathBuf;

/// What places and lengths in the file, and buffers, are multiples of: what O_DIRECT asks for on
/// any disk.
pub const ALIGN: usize = 4096;

/// Why the tier cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SsdError {
    /// The file cannot be made.
    #[error("a file in {} cannot be opened: {source}", folder.display())]
    Open {
        /// Where.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is not enough room.
    #[error("{} has no room for {wanted} bytes ({free} are free): {source}", folder.display())]
    Full {
        /// Where.
        folder: PathBuf,
        /// Asked for.
        wanted: u64,
        /// What the file system says is free.
        free: u64,
        /// Why.
        source: io::Error,
    },
    /// A read or a write failed.
    #[error("{verb} {length} bytes at {offset} of the file in {}: {source}", folder.display())]
    Io {
        /// Where.
        folder: PathBuf,
        /// "reading" or "writing".
        verb: &'static str,
        /// Place in the file.
        offset: u64,
        /// How many.
        length: usize,
        /// Why.
        source: io::Error,
    },
    /// The disk does not answer.
    #[error("the file in {} has not answered for {seconds:.0} s", folder.display())]
    Stalled {
        /// Where.
        folder: PathBuf,
        /// How long.
        seconds: f64,
    },
    /// There is no memory for buffers.
    #[error("{bytes} bytes of buffers cannot be mapped: {source}")]
    Buffers {
        /// Asked for.
        bytes: usize,
        /// Why.
        source: io::Error,
    },
    /// A request that cannot be.
    #[error("{0}")]
    Misuse(String),
}

impl SsdError {
    /// The system's number of the error; `ETIMEDOUT` for a disk that does not answer.
    pub fn code(&self) -> i32 {
        match self {
            SsdError::Open { source, .. }
            | SsdError::Full { source, .. }
            | SsdError::Io { source, .. }
            | SsdError::Buffers { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            SsdError::Stalled { .. } => libc::ETIMEDOUT,
            SsdError::Misuse(_) => libc::EINVAL,
        }
    }
}
