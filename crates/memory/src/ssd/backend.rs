//! Who moves the bytes between the file and the buffers.

use crate::ssd::requests::Op;
use std::io;
use std::time::Duration;

/// What became of an operation.
#[derive(Debug)]
pub struct Done {
    /// Ticket of the operation.
    pub ticket: u64,
    /// Bytes that were moved, or why none were.
    pub result: io::Result<usize>,
}

/// See the head of this file. One thread at a time calls it.
pub trait Backend: Send {
    /// Begins an operation.
    ///
    /// # Errors
    /// Where it cannot be begun; it is then not running.
    fn begin(&mut self, op: Op) -> io::Result<()>;

    /// Collects what has ended, waiting up to `wait` for the first one.
    ///
    /// # Errors
    /// Where that cannot be asked for. That nothing has ended is no error.
    fn collect(&mut self, wait: Duration, into: &mut Vec<Done>) -> io::Result<()>;

    /// For people: what it is.
    fn name(&self) -> &'static str;
}
