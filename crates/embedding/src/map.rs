//! An [`Index`] that grows in steps: a new one is made a quarter larger, and with each key that is
//! added a few buckets of the old one move over. Nothing waits for the whole of it; rows do not move
//! at all.

use crate::error::Result;
use crate::hash;
use crate::index::Index;

/// Buckets that move with each key that is added. The new index has room for as many keys more as the
/// old one has buckets, so one would do.
const MOVED: usize = 2;

/// A key to a number that is not 0.
#[derive(Debug)]
pub struct Map {
    index: Index,
    old: Option<(Index, usize)>,
    bits: u32,
}

impl Map {
    /// With `buckets` buckets of five places at first.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(buckets: usize, bits: u32) -> Result<Map> {
        Ok(Map {
            index: Index::new(buckets, bits)?,
            old: None,
            bits,
        })
    }

    /// Keys.
    pub fn len(&self) -> usize {
        self.index.len() + self.old.as_ref().map_or(0, |(old, _)| old.len())
    }

    /// Bytes of the index, or of both while it grows.
    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.old.as_ref().map_or(0, |(old, _)| old.bytes())
    }

    /// Whether keys are still moving.
    pub fn grows(&self) -> bool {
        self.old.is_some()
    }

    /// Asks the processor for the lines in which a key of this hash would be.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        self.index.prefetch(hash);
        if let Some((old, _)) = &self.old {
            old.prefetch(hash);
        }
    }

    /// The number of a key.
    #[inline(always)]
    pub fn find(&self, hash: u64, key: i64) -> Option<u32> {
        match (self.index.find(hash, key), &self.old) {
            (None, Some((old, _))) => old.find(hash, key),
            (found, _) => found,
        }
    }

    /// Another number for a key that is there; the number that it had.
    pub fn replace(&mut self, hash: u64, key: i64, id: u32) -> Option<u32> {
        match (self.index.replace(hash, key, id), &mut self.old) {
            (None, Some((old, _))) => old.replace(hash, key, id),
            (found, _) => found,
        }
    }

    /// Adds a key that is not there.
    ///
    /// # Errors
    /// Where the system has no memory to grow; nothing has changed then.
    pub fn insert(&mut self, hash: u64, key: i64, id: u32) -> Result<()> {
        if self.len() >= self.index.limit() {
            let larger = Index::new(self.index.buckets() * 5 / 4 + 2, self.bits)?;
            self.advance(usize::MAX);
            self.old = Some((std::mem::replace(&mut self.index, larger), 0));
        }
        self.advance(MOVED);
        self.index.insert(hash, key, id);
        Ok(())
    }

    /// Takes a key out.
    pub fn remove(&mut self, hash: u64, key: i64) -> Option<u32> {
        match (self.index.remove(hash, key), &mut self.old) {
            (None, Some((old, _))) => old.remove(hash, key),
            (found, _) => found,
        }
    }

    fn advance(&mut self, buckets: usize) {
        let Some((old, cursor)) = &mut self.old else {
            return;
        };
        let end = cursor.saturating_add(buckets).min(old.buckets());
        for bucket in *cursor..end {
            old.drain(bucket, |key, id| self.index.insert(hash::mix(key), key, id));
        }
        *cursor = end;
        if end == old.buckets() {
            self.old = None;
        }
    }

    /// Makes the index small where most keys went.
    ///
    /// # Errors
    /// Where the system has no memory; nothing has changed then.
    pub fn shrink(&mut self) -> Result<()> {
        let wanted = self.len() / 4 + 16;
        if wanted * 2 < self.index.buckets() {
            let smaller = Index::new(wanted, self.bits)?;
            self.advance(usize::MAX);
            self.old = Some((std::mem::replace(&mut self.index, smaller), 0));
            self.advance(usize::MAX);
        }
        Ok(())
    }

    /// All keys and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (i64, u32)> + '_ {
        self.index.iter().chain(
            self.old
                .iter()
                .flat_map(|(old, cursor)| (*cursor..old.buckets()).flat_map(|b| old.entries(b))),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[derive(Debug, Clone)]
    enum Action {
        Put(i64, u32),
        Take(i64),
        Get(i64),
        Shrink,
    }

    fn action() -> impl Strategy<Value = Action> {
        let key = prop_oneof![
            4 => -40i64..40,
            1 => prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(0), Just(-1)],
            4 => any::<i64>(),
        ];
        prop_oneof![
            6 => (key.clone(), 1u32..).prop_map(|(key, id)| Action::Put(key, id)),
            3 => key.clone().prop_map(Action::Take),
            2 => key.prop_map(Action::Get),
            1 => Just(Action::Shrink),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 60 }))]
        #[test]
        fn it_is_a_map(actions in prop::collection::vec(action(), 1..600), bits in 0u32..7) {
            let mut map = Map::new(2, bits).unwrap();
            let mut model = HashMap::new();
            for action in actions {
                match action {
                    Action::Put(key, id) => {
                        let hash = hash::mix(key);
                        if map.replace(hash, key, id).is_none() {
                            map.insert(hash, key, id).unwrap();
                        }
                        model.insert(key, id);
                    }
                    Action::Take(key) => {
                        prop_assert_eq!(map.remove(hash::mix(key), key), model.remove(&key));
                    }
                    Action::Get(key) => {
                        prop_assert_eq!(map.find(hash::mix(key), key), model.get(&key).copied());
                    }
                    Action::Shrink => map.shrink().unwrap(),
                }
                prop_assert_eq!(map.len(), model.len());
            }
            prop_assert_eq!(map.iter().collect::<HashMap<_, _>>(), model);
        }
    }

    #[test]
    fn a_hundred_thousand_keys_come_and_go() {
        let mut map = Map::new(2, 0).unwrap();
        let n = if cfg!(miri) { 200 } else { 100_000 };
        for key in 0..n {
            map.insert(hash::mix(key * 3), key * 3, key as u32 + 1)
                .unwrap();
        }
        for key in 0..n {
            assert_eq!(map.find(hash::mix(key * 3), key * 3), Some(key as u32 + 1));
            assert_eq!(map.find(hash::mix(key * 3 + 1), key * 3 + 1), None);
        }
        assert!(map.bytes() < 24 * n as usize + 8192, "{}", map.bytes());
        for key in 0..n {
            assert_eq!(
                map.remove(hash::mix(key * 3), key * 3),
                Some(key as u32 + 1)
            );
        }
        map.shrink().unwrap();
        assert_eq!((map.len(), map.iter().count()), (0, 0));
        assert!(map.bytes() <= 4096);
    }
}
