//! From a key to the id of its row: open addressing in buckets of one cache line, five entries each.
//!
//! A bucket also counts how many entries did not fit in it and went on to the next: where the count is
//! 0 a search ends, so nothing has to mark a place as deleted, and no key is reserved (a place is empty
//! where its id is 0). At the highest load, 0.85, a search reads 1.1 lines on average.

use crate::arena::prefetch;
use crate::error::{Result, io};
use crate::hash;
use memmap2::{Advice, MmapMut};

const WIDTH: usize = 5;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    keys: [i64; WIDTH],
    ids: [u32; WIDTH],
    passed: u32,
}

impl Bucket {
    #[inline(always)]
    fn find(&self, key: i64) -> Option<usize> {
        let mut hit = 0u32;
        for i in 0..WIDTH {
            hit |= u32::from(self.keys[i] == key && self.ids[i] != 0) << i;
        }
        (hit != 0).then(|| hit.trailing_zeros() as usize)
    }
}

/// The index of one shard.
#[derive(Debug)]
pub struct Index {
    map: MmapMut,
    buckets: usize,
    bits: u32,
    len: usize,
}

impl Index {
    /// With room for `buckets` buckets; `bits` of the hash chose the shard.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(buckets: usize, bits: u32) -> Result<Index> {
        let buckets = buckets.max(2);
        let bytes = buckets * size_of::<Bucket>();
        let map = MmapMut::map_anon(bytes)
            .map_err(io(format!("{bytes} bytes for the index of an embedding")))?;
        if bytes >= 4 << 20 {
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Index {
            map,
            buckets,
            bits,
            len: 0,
        })
    }

    #[inline(always)]
    fn all(&self) -> &[Bucket] {
        // SAFETY: the map has `buckets` times 64 bytes, begins on a page, and every bit pattern is a
        // bucket.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.buckets) }
    }

    #[inline(always)]
    fn all_mut(&mut self) -> &mut [Bucket] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.buckets) }
    }

    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        hash::bucket(hash, self.bits, self.buckets)
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Buckets.
    pub fn buckets(&self) -> usize {
        self.buckets
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// How many entries it should hold at most.
    pub fn limit(&self) -> usize {
        self.buckets * WIDTH * 85 / 100
    }

    /// Asks the processor for the line in which a key of this hash would be.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        let line = self
            .map
            .as_ptr()
            .wrapping_add(self.home(hash) * size_of::<Bucket>());
        prefetch(line);
    }

    /// The id of a key.
    #[inline(always)]
    pub fn find(&self, hash: u64, key: i64) -> Option<u32> {
        let all = self.all();
        let mut at = self.home(hash);
        for _ in 0..all.len() {
            let bucket = &all[at];
            if let Some(place) = bucket.find(key) {
                return Some(bucket.ids[place]);
            }
            if bucket.passed == 0 {
                return None;
            }
            at = if at + 1 == all.len() { 0 } else { at + 1 };
        }
        None
    }

    /// Puts another id in the place of a key that is there.
    pub fn replace(&mut self, hash: u64, key: i64, id: u32) -> Option<u32> {
        let mut at = self.home(hash);
        let all = self.all_mut();
        for _ in 0..all.len() {
            let count = all.len();
            let bucket = &mut all[at];
            if let Some(place) = bucket.find(key) {
                return Some(std::mem::replace(&mut bucket.ids[place], id));
            }
            if bucket.passed == 0 {
                return None;
            }
            at = if at + 1 == count { 0 } else { at + 1 };
        }
        None
    }

    /// Adds a key that is not there. The caller keeps [`Index::len`] below the number of places.
    pub fn insert(&mut self, hash: u64, key: i64, id: u32) {
        debug_assert!(id != 0 && self.len < self.buckets * WIDTH);
        let mut at = self.home(hash);
        let all = self.all_mut();
        loop {
            let count = all.len();
            let bucket = &mut all[at];
            if let Some(place) = bucket.ids.iter().position(|&id| id == 0) {
                bucket.keys[place] = key;
                bucket.ids[place] = id;
                break;
            }
            bucket.passed += 1;
            at = if at + 1 == count { 0 } else { at + 1 };
        }
        self.len += 1;
    }

    /// Takes a key out.
    pub fn remove(&mut self, hash: u64, key: i64) -> Option<u32> {
        let home = self.home(hash);
        let all = self.all_mut();
        let count = all.len();
        let mut at = home;
        for steps in 0..count {
            if let Some(place) = all[at].find(key) {
                let id = std::mem::take(&mut all[at].ids[place]);
                let mut back = home;
                for _ in 0..steps {
                    all[back].passed -= 1;
                    back = if back + 1 == count { 0 } else { back + 1 };
                }
                self.len -= 1;
                return Some(id);
            }
            if all[at].passed == 0 {
                return None;
            }
            at = if at + 1 == count { 0 } else { at + 1 };
        }
        None
    }

    /// Takes out what lies in one bucket; the counts of other buckets stay, which costs a search in a
    /// table that is being emptied a line more.
    pub fn drain(&mut self, bucket: usize, mut each: impl FnMut(i64, u32)) {
        let bucket = &mut self.all_mut()[bucket];
        let mut gone = 0;
        for place in 0..WIDTH {
            let id = std::mem::take(&mut bucket.ids[place]);
            if id != 0 {
                each(bucket.keys[place], id);
                gone += 1;
            }
        }
        self.len -= gone;
    }

    /// The entries of one bucket.
    pub fn entries(&self, bucket: usize) -> impl Iterator<Item = (i64, u32)> + '_ {
        let bucket = &self.all()[bucket];
        (0..WIDTH)
            .filter(|&place| bucket.ids[place] != 0)
            .map(|place| (bucket.keys[place], bucket.ids[place]))
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (i64, u32)> + '_ {
        (0..self.buckets).flat_map(|bucket| self.entries(bucket))
    }
}
