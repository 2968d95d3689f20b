//! An [`Index`] that grows in steps: a new one is made a quarter larger, and with each key that is
//! added a few buckets of the old one move over. Nothing waits for the whole of it; rows do not move
//! at all.

use crate::error::Result;
use crate::hash;
use crate::index::{Bucket, Index, Pool};
use std::sync::Arc;

/// Buckets that move with each key that is added. The new index has room for as many keys more as the
/// old one has buckets, so one would do; with more, a shard seldom has two indexes.
const MOVED: usize = if cfg!(loom) { 1 } else { 8 };

/// Where [`Map::glance`] cannot say; no number is so large.
pub const OPEN: u32 = u32::MAX;

/// A key to a number that is not 0.
#[derive(Debug)]
pub struct Map {
    index: Index,
    old: Option<Index>,
    bits: u32,
}

impl Map {
    /// With `buckets` buckets of five places at first.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(buckets: usize, bits: u32, pool: &Arc<Pool>) -> Result<Map> {
        Ok(Map {
            index: Index::new(buckets, bits, pool)?,
            old: None,
            bits,
        })
    }

    /// Keys.
    pub fn len(&self) -> usize {
        self.index.len() + self.old.as_ref().map_or(0, Index::len)
    }

    /// Bytes of the index, or of both while it grows.
    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.old.as_ref().map_or(0, Index::bytes)
    }

    /// Whether keys are still moving.
    pub fn grows(&self) -> bool {
        self.old.is_some()
    }

    /// Asks the processor for the lines in which a key of this hash would be.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        self.index.line(hash);
        if let Some(old) = &self.old {
            old.line(hash);
        }
    }

    /// After [`Map::prefetch`], once those lines have come: asks for the lines after them where the key
    /// may be there.
    #[inline(always)]
    pub fn prefetch_second(&self, hash: u64, key: i64) {
        self.index.prefetch_second(hash, key);
        if let Some(old) = &self.old {
            old.prefetch_second(hash, key);
        }
    }

    /// The bucket in which a search begins, after [`Map::prefetch`].
    #[inline(always)]
    pub fn line(&self, hash: u64) -> Option<&Bucket> {
        if let Some(old) = &self.old {
            old.line(hash);
        }
        self.index.line(hash)
    }

    /// [`Map::find`] as far as the first bucket says: 0 for none, [`OPEN`] where another has to be
    /// read, which the processor is asked for.
    #[inline(always)]
    pub fn glance(&self, line: Option<&Bucket>, hash: u64, key: i64) -> u32 {
        match line.map_or((0, true), |line| line.look(key)) {
            (0, false) if self.old.is_none() => 0,
            (0, more) => {
                if more {
                    self.index.prefetch_next(hash);
                }
                OPEN
            }
            (id, _) => id,
        }
    }

    /// The number of a key.
    #[inline(always)]
    pub fn find(&self, hash: u64, key: i64) -> Option<u32> {
        match (self.index.find(hash, key), &self.old) {
            (None, Some(old)) => old.find(hash, key),
            (found, _) => found,
        }
    }

    /// Another number for a key that is there; the number that it had.
    pub fn replace(&mut self, hash: u64, key: i64, id: u32) -> Option<u32> {
        match (self.index.replace(hash, key, id), &mut self.old) {
            (None, Some(old)) => old.replace(hash, key, id),
            (found, _) => found,
        }
    }

    /// Adds a key that is not there.
    ///
    /// # Errors
    /// Where the system has no memory to grow; nothing has changed then.
    pub fn insert(&mut self, hash: u64, key: i64, id: u32) -> Result<()> {
        if self.len() >= self.index.limit() {
            let larger = self.index.buckets() * 5 / 4 + 2;
            let larger = Index::new(larger, self.bits, self.index.pool())?;
            self.advance(usize::MAX);
            self.old = Some(std::mem::replace(&mut self.index, larger));
        }
        self.advance(MOVED);
        self.index.insert(hash, key, id);
        Ok(())
    }

    /// Takes a key out.
    pub fn remove(&mut self, hash: u64, key: i64) -> Option<u32> {
        match (self.index.remove(hash, key), &mut self.old) {
            (None, Some(old)) => old.remove(hash, key),
            (found, _) => found,
        }
    }

    fn advance(&mut self, buckets: usize) {
        let Some(old) = &mut self.old else {
            return;
        };
        if buckets == MOVED {
            old.prefetch_drain(2 * MOVED..3 * MOVED, &self.index);
        }
        for _ in 0..buckets {
            let index = &mut self.index;
            if !old.drain(|key, id| index.insert(hash::mix(key), key, id)) {
                self.old = None;
                return;
            }
        }
    }

    /// Makes the index small where most keys went.
    ///
    /// # Errors
    /// Where the system has no memory; nothing has changed then.
    pub fn shrink(&mut self) -> Result<()> {
        let wanted = self.len() / 4 + 16;
        if wanted * 2 < self.index.buckets() {
            let smaller = Index::new(wanted, self.bits, self.index.pool())?;
            self.advance(usize::MAX);
            self.old = Some(std::mem::replace(&mut self.index, smaller));
            self.advance(usize::MAX);
        }
        Ok(())
    }

    /// All keys and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (i64, u32)> + '_ {
        self.index
            .iter()
            .chain(self.old.iter().flat_map(Index::iter))
    }
}

#[cfg(all(test, not(loom)))]
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
        fn it_is_a_map(actions in prop::collection::vec(action(), 1..if cfg!(miri) { 80 } else { 600 }), bits in 0u32..7) {
            let mut map = Map::new(2, bits, &Arc::default()).unwrap();
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
    fn no_key_is_out_of_sight_while_a_full_index_moves() {
        // Full and small, so that keys of the last bucket go on past the first: after each bucket that
        // moves, every key must be found, and once.
        for seed in 0..if cfg!(miri) { 2 } else { 400 } {
            let pool = Arc::default();
            let mut index = Index::new(4, 0, &pool).unwrap();
            let keys: Vec<i64> = (0..19).map(|i| hash::mix(seed * 31 + i) as i64).collect();
            for &key in &keys {
                index.insert(hash::mix(key), key, 7);
            }
            let mut map = Map {
                index: Index::new(9, 0, &pool).unwrap(),
                old: Some(index),
                bits: 0,
            };
            while map.grows() {
                for &key in &keys {
                    assert_eq!(map.find(hash::mix(key), key), Some(7));
                }
                assert_eq!(map.len(), keys.len());
                map.advance(1);
            }
            assert!(
                keys.iter()
                    .all(|&key| map.remove(hash::mix(key), key) == Some(7))
            );
        }
    }

    #[test]
    fn a_hundred_thousand_keys_come_and_go() {
        let mut map = Map::new(2, 0, &Arc::default()).unwrap();
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

/// Every interleaving of one that adds keys and one that looks them up, while the index grows and rows
/// come from new memory: `RUSTFLAGS="--cfg loom" cargo test -p evener-embedding --release --lib loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::arena::{Arena, Meta, RUN};
    use loom::sync::RwLock;

    #[test]
    fn loom_a_row_is_whole_and_in_sight_while_the_index_grows() {
        loom::model(|| {
            // Two buckets hold nine keys: the tenth begins to move them, one bucket per key.
            let map = Map::new(2, 0, &Arc::default()).unwrap();
            let shared = loom::sync::Arc::new((RwLock::new((map, 0)), Arena::new(16)));
            let add = |shared: &(RwLock<(Map, u32)>, Arena), key: i64| {
                let mut locked = shared.0.write().unwrap();
                if locked.1 % RUN == 0 {
                    locked.1 = shared.1.take().unwrap();
                }
                let id = locked.1;
                locked.1 += 1;
                // SAFETY: the row is new and the lock is held for writing.
                unsafe {
                    shared.1.row_mut(id).fill(key as u8);
                    shared.1.set_meta(id, Meta::new(key as u32, 0, 1));
                }
                locked.0.insert(hash::mix(key), key, id).unwrap();
            };
            (1..=8).for_each(|key| add(&shared, key));
            let writer = {
                let shared = shared.clone();
                loom::thread::spawn(move || (9..=11).for_each(|key| add(&shared, key)))
            };
            for key in [1, 8, 10] {
                let locked = shared.0.read().unwrap();
                match locked.0.find(hash::mix(key), key) {
                    None => assert_eq!(key, 10),
                    // SAFETY: the lock is held for reading.
                    Some(id) => unsafe {
                        assert!(shared.1.row(id).iter().all(|&byte| byte == key as u8));
                        assert_eq!(shared.1.meta(id).version, key as u32);
                    },
                }
            }
            writer.join().unwrap();
            let locked = shared.0.read().unwrap();
            assert!((1..=11).all(|key| locked.0.find(hash::mix(key), key).is_some()));
        });
    }
}
