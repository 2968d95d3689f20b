//! Keys that are strings: each gets an int64 of its own, its hash where that is free and the next free
//! number otherwise. The bytes are kept and compared, so two strings never share a number.

use crate::hash;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

const BITS: u32 = 4;
const LOW: i64 = i64::MAX >> (BITS - 1);

#[derive(Debug, Default)]
struct Part {
    names: HashMap<i64, (Box<[u8]>, u32)>,
    round: u32,
}

/// Strings and their numbers.
#[derive(Debug, Default)]
pub struct Strings {
    parts: [Mutex<Part>; 1 << BITS],
    #[cfg(test)]
    weak: bool,
}

impl Strings {
    fn part(&self, id: i64) -> MutexGuard<'_, Part> {
        let at = (id as u64 >> (64 - BITS)) as usize;
        self.parts[at]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn hash(&self, bytes: &[u8]) -> i64 {
        #[cfg(test)]
        if self.weak {
            return hash::text(bytes) & 3;
        }
        hash::text(bytes)
    }

    /// The number of a string. Without `insert` a string that is not known gets a number that no known
    /// string has.
    pub fn intern(&self, bytes: &[u8], insert: bool) -> i64 {
        let mut id = self.hash(bytes);
        let mut part = self.part(id);
        let round = part.round;
        loop {
            match part.names.get_mut(&id) {
                None => break,
                Some((known, seen)) if **known == *bytes => {
                    *seen = round;
                    return id;
                }
                Some(_) => id = (id & !LOW) | (id.wrapping_add(1) & LOW),
            }
        }
        if insert {
            part.names.insert(id, (bytes.into(), round));
        }
        id
    }

    /// Puts a string back under the number that it had.
    pub fn put(&self, id: i64, bytes: &[u8]) {
        let mut part = self.part(id);
        let round = part.round;
        part.names.insert(id, (bytes.into(), round));
    }

    /// The string of a number.
    pub fn name(&self, id: i64) -> Option<Box<[u8]>> {
        self.part(id).names.get(&id).map(|(bytes, _)| bytes.clone())
    }

    /// Forgets strings without a row that nobody asked for since the call before last.
    pub fn forget(&self, has_row: impl Fn(i64) -> bool) {
        for part in &self.parts {
            let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
            let round = part.round;
            let stale: Vec<i64> = part
                .names
                .iter()
                .filter(|(id, (_, seen))| seen.wrapping_add(1) < round && !has_row(**id))
                .map(|(id, _)| *id)
                .collect();
            for id in stale {
                // One that stands where another may have had to step over it stays.
                let next = (id & !LOW) | (id.wrapping_add(1) & LOW);
                if !part.names.contains_key(&next) {
                    part.names.remove(&id);
                }
            }
            part.round += 1;
        }
    }

    /// Each string with its number.
    pub fn each(&self, mut each: impl FnMut(i64, &[u8])) {
        for part in &self.parts {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            part.names
                .iter()
                .for_each(|(id, (name, _))| each(*id, name));
        }
    }

    /// Forgets all.
    pub fn clear(&self) {
        for part in &self.parts {
            *part.lock().unwrap_or_else(PoisonError::into_inner) = Part::default();
        }
    }

    /// How many, and how many bytes they have.
    pub fn size(&self) -> (u64, u64) {
        self.parts.iter().fold((0, 0), |(n, bytes), part| {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            let sum: usize = part.names.values().map(|(name, _)| name.len() + 56).sum();
            (n + part.names.len() as u64, bytes + sum as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_whose_hashes_collide_keep_apart() {
        let strings = Strings {
            weak: true,
            ..Strings::default()
        };
        let names: Vec<Vec<u8>> = (0..200).map(|i| format!("feature {i}").into()).collect();
        let ids: Vec<i64> = names.iter().map(|n| strings.intern(n, true)).collect();
        let different: std::collections::HashSet<i64> = ids.iter().copied().collect();
        assert_eq!(different.len(), names.len());
        for (name, id) in names.iter().zip(&ids) {
            assert_eq!(strings.intern(name, false), *id);
            assert_eq!(strings.name(*id).as_deref(), Some(name.as_slice()));
        }
        assert!(!different.contains(&strings.intern(b"unknown", false)));
        assert_eq!(strings.size().0, 200);
        // Only the last may go without cutting the way to others.
        (0..3).for_each(|_| strings.forget(|_| true));
        assert_eq!(strings.size().0, 200);
        (0..3).for_each(|_| strings.forget(|id| id != ids[7]));
        for (name, id) in names.iter().zip(&ids).filter(|(_, id)| **id != ids[7]) {
            assert_eq!(strings.intern(name, false), *id);
        }
    }

    #[test]
    fn a_string_without_a_row_is_forgotten() {
        let strings = Strings::default();
        strings.intern(b"gone", true);
        (0..3).for_each(|_| strings.forget(|_| false));
        assert_eq!(strings.size(), (0, 0));
    }
}
