//! The sockets of this process, so that the child of a fork can let go of them.
//!
//! A child that neither execs nor ends keeps its copies open: a peer would hear of the parent's death
//! by silence only, and the parent's port would stay taken. Descriptors are close-on-exec; for the
//! rest the child closes what is noted here. Atomics only: after a fork nothing else is safe.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::sys;

const MOST: usize = 4096;
static OPEN: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];

/// Notes a descriptor, where there is room.
pub fn note(fd: RawFd) {
    let take =
        |slot: &AtomicI32| slot.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed);
    let _ = OPEN.iter().any(|slot| take(slot).is_ok());
}

/// It is about to be closed here.
pub fn forget(fd: RawFd) {
    let drop =
        |slot: &AtomicI32| slot.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
    let _ = OPEN.iter().any(|slot| drop(slot).is_ok());
}

/// In the child of a fork: closes the child's copies.
pub fn close_all() {
    let noted = OPEN.iter().map(|slot| slot.swap(-1, Ordering::AcqRel));
    sys::close_in_child(noted.filter(|fd| *fd >= 0));
}
