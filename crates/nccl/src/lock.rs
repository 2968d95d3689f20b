//! A lock that a thread which died does not keep.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lock, also where a thread has died that held it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
