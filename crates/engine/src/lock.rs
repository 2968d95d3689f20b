//! Taking a lock that is held for very short times.

use std::hint::spin_loop;
use std::sync::{Mutex, PoisonError, TryLockError};

/// Doublings of the time between two tries of [`lock`]; together a few microseconds.
const TRIES: u32 = 7;

/// Locks, and goes on where another thread panicked: every state behind these locks is whole at
/// all times.
///
/// What these locks guard is looked at for well under a microsecond, and a thread that sleeps and is
/// woken has lost ten: so it looks on for a while, where std's lock sleeps at once as soon as another
/// does.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    for doubling in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => (0..1 << doubling).for_each(|_| spin_loop()),
        }
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
