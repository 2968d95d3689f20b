//! Memory for the frames of several sockets, of which the first ones are lent to callers.
//!
//! A caller, or a device, fills the payload of a lent frame; a [`Port`](crate::Port) writes headers in front
//! of it and has the card send both from there. So no processor copies the payload.
//!
//! ```text
//! frame   [ room for headers: LENT_HEADERS ][ payload: the caller's ]
//! pool    [ lent frames ][ card 0: receiving, sending ][ card 1: receiving, sending ] ...
//! ```
//!
//! # Who may touch a lent frame
//! The payload is the caller's, always: the kernel only reads it, and what it sends while a caller writes is
//! of a message that nobody waits for any more. The room for headers is that of who has *claimed* the
//! frame: a socket claims it before it writes headers, and lets go when the kernel has given it back.
//! Claims are atomics, so sockets of several threads may use one pool.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::Mapping;

const HUGE: usize = 2 << 20;
/// Bytes of a lent frame before its payload: more than all headers need, and where copies are quick.
pub const LENT_HEADERS: usize = 128;

#[derive(Debug)]
struct Inner {
    mapping: Mapping,
    size: usize,
    claimed: Box<[AtomicBool]>,
    /// Why there are no huge pages, by the system's number.
    not_huge: Option<i32>,
    receiving: u32,
    sending: u32,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Inner>);

/// The frames of one socket in a pool.
#[derive(Debug, Clone)]
pub struct Part {
    /// Where they are.
    pub pool: Pool,
    /// Which socket it is.
    pub place: u32,
}

/// Memory of our own, in huge pages where the kernel has them free; why not, if not.
pub(crate) fn map(length: usize) -> io::Result<(Mapping, Option<io::Error>)> {
    let length = length.next_multiple_of(HUGE);
    Ok(match Mapping::own(length, true) {
        Ok(mapping) => (mapping, None),
        Err(error) => (Mapping::own(length, false)?, Some(error)),
    })
}

impl Pool {
    /// `lent` frames of `size` bytes, and for each of `sockets` these numbers for receiving and for sending.
    ///
    /// # Errors
    /// Errors of mmap(2).
    pub fn new(
        size: usize,
        lent: u32,
        sockets: u32,
        (receiving, sending): (u32, u32),
    ) -> io::Result<Pool> {
        let all = lent + sockets * (receiving + sending);
        let (mapping, not_huge) = map(size * all as usize)?;
        Ok(Pool(Arc::new(Inner {
            mapping,
            size,
            claimed: (0..lent).map(|_| AtomicBool::new(false)).collect(),
            not_huge: not_huge.and_then(|error| error.raw_os_error()),
            receiving,
            sending,
        })))
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0.mapping
    }

    /// Where it begins.
    pub fn start(&self) -> usize {
        self.0.mapping.start().as_ptr() as usize
    }

    /// Its bytes.
    pub fn length(&self) -> usize {
        self.0.mapping.length()
    }

    /// Bytes of a frame.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Frames that are lent.
    pub fn lent(&self) -> u32 {
        self.0.claimed.len() as u32
    }

    pub(crate) fn not_huge(&self) -> Option<io::Error> {
        self.0.not_huge.map(io::Error::from_raw_os_error)
    }

    pub(crate) fn receiving(&self) -> u32 {
        self.0.receiving
    }

    pub(crate) fn sending(&self) -> u32 {
        self.0.sending
    }

    /// Makes a lent frame this caller's to write headers into. `false`: the kernel has it, or it is none.
    pub(crate) fn claim(&self, frame: u32) -> bool {
        let claimed = self.0.claimed.get(frame as usize);
        claimed.is_some_and(|claimed| !claimed.swap(true, Ordering::Acquire))
    }

    pub(crate) fn let_go(&self, frame: u32) {
        if let Some(claimed) = self.0.claimed.get(frame as usize) {
            claimed.store(false, Ordering::Release);
        }
    }
}
