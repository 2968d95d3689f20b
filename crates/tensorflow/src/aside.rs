//! Gradients of lookups inside of branches and loops, until the gradient of the whole is taken.
//!
//! TensorFlow makes the gradients that leave a branch or a loop dense, and keys reach over all of int64.
//! So they are put aside in there, and what leaves is a count. A token stands for one run of the forward
//! pass: runs of several threads do not see each other's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Runs that may wait at once. A backward pass that leaves the table out never asks for what it put
/// aside: the oldest go.
const RUNS: usize = 256;

static NEXT: AtomicI64 = AtomicI64::new(1);
static ASIDE: Mutex<BTreeMap<i64, Aside>> = Mutex::new(BTreeMap::new());

/// What one run put aside.
#[derive(Debug, Default)]
pub struct Aside {
    /// How often.
    pub count: usize,
    /// The keys, one after the other.
    pub keys: Vec<i64>,
    /// Their gradients, row by row.
    pub gradients: Vec<f32>,
}

/// The token of a new run.
pub fn token() -> i64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Puts gradients aside.
pub fn put(token: i64, keys: &[i64], gradients: &[f32]) {
    let mut runs = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    let aside = runs.entry(token).or_default();
    aside.count += 1;
    aside.keys.extend_from_slice(keys);
    aside.gradients.extend_from_slice(gradients);
    while runs.len() > RUNS {
        runs.pop_first();
    }
}

/// Takes all that was put aside.
pub fn take(token: i64) -> Aside {
    let mut runs = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    runs.remove(&token).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_aside_is_taken_once() {
        let (one, other) = (token(), token());
        put(one, &[1, 2], &[0.5, 1.5]);
        put(other, &[7], &[9.0]);
        put(one, &[1], &[2.5]);
        let found = take(one);
        assert_eq!(found.count, 2);
        assert_eq!(found.keys, [1, 2, 1]);
        assert_eq!(found.gradients, [0.5, 1.5, 2.5]);
        assert_eq!(take(one).count, 0);
        assert_eq!(take(other).keys, [7]);
    }
}
