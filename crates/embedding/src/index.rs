//! From a key to the id of its row: open addressing in buckets of one cache line, five entries each.
//!
//! A bucket also counts how many entries did not fit in it and went on to the next: where the count is
//! 0 a search ends, so nothing has to mark a place as deleted, and no key is reserved (a place is empty
//! where its id is 0). At the highest load, 0.9, most searches read one line.
//!
//! The buckets of an index lie in segments of 64 KiB out of a [`Pool`] that all shards of a store share:
//! huge pages serve many small indexes, and an index that is being emptied into a larger one gives its
//! segments back as it goes, so that the two together take little more than one.

use crate::arena::prefetch;
use crate::error::Result;
use crate::{hash, huge};
use memmap2::MmapMut;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

const WIDTH: usize = 5;
/// Buckets of a segment: 64 KiB.
const SEGMENT: usize = 1 << 10;
const SEGMENT_BYTES: usize = SEGMENT * size_of::<Bucket>();
const FIRST_CHUNK: usize = 4 << 20;
const CHUNK: usize = 32 << 20;

/// Five entries and the count of those that went on.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Bucket {
    keys: [i64; WIDTH],
    ids: [u32; WIDTH],
    passed: u32,
}

impl Bucket {
    #[inline(always)]
    fn place(&self, key: i64) -> Option<usize> {
        let mut hit = 0u32;
        for i in 0..WIDTH {
            hit |= u32::from((self.keys[i] == key) & (self.ids[i] != 0)) << i;
        }
        (hit != 0).then(|| hit.trailing_zeros() as usize)
    }

    /// The id of a key, 0 if it is not in this bucket; and whether it may be in a later one.
    #[inline(always)]
    pub fn look(&self, key: i64) -> (u32, bool) {
        let mut found = 0u32;
        for i in 0..WIDTH {
            found |= if self.keys[i] == key { self.ids[i] } else { 0 };
        }
        (found, self.passed != 0)
    }
}

/// Segments for the indexes of one store.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Chunks>);

#[derive(Debug, Default)]
struct Chunks {
    maps: Vec<MmapMut>,
    /// Where the last map begins.
    last: Segment,
    /// Offset and end of what was not handed out of it.
    rest: (usize, usize),
    free: Vec<Segment>,
}

/// 64 KiB that one index owns.
#[derive(Debug)]
struct Segment(*mut Bucket);

impl Default for Segment {
    fn default() -> Segment {
        Segment(std::ptr::null_mut())
    }
}

// SAFETY: it is the address of memory with one owner, an index.
unsafe impl Send for Segment {}
// SAFETY: as above; it is read through `&Index` only, and written through `&mut Index`.
unsafe impl Sync for Segment {}

impl Pool {
    /// A segment full of zeros.
    fn take(&self) -> Result<Segment> {
        let mut chunks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(segment) = chunks.free.pop() {
            // SAFETY: whoever gave it back has no part in it any more; zeros are empty buckets.
            unsafe { segment.0.write_bytes(0, SEGMENT) };
            return Ok(segment);
        }
        if chunks.rest.0 == chunks.rest.1 {
            // The first chunk stays with small pages, for models with many small tables.
            let bytes = if chunks.maps.is_empty() {
                FIRST_CHUNK
            } else {
                CHUNK
            };
            let (map, start) = huge::map(bytes, "the index of an embedding", bytes == CHUNK)?;
            chunks.last = Segment(start.cast());
            chunks.rest = (0, bytes);
            chunks.maps.push(map);
        }
        let at = chunks.rest.0;
        chunks.rest.0 += SEGMENT_BYTES;
        Ok(Segment(chunks.last.0.wrapping_byte_add(at)))
    }

    fn give(&self, segments: impl Iterator<Item = Segment>) {
        let mut chunks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        chunks.free.extend(segments);
    }
}

/// The index of one shard.
#[derive(Debug)]
pub struct Index {
    /// Those of buckets below `gone` may have been given back: null.
    segments: Vec<Segment>,
    buckets: usize,
    bits: u32,
    len: usize,
    /// Buckets below this were drained and are not looked at.
    gone: usize,
    pool: Arc<Pool>,
}

impl Drop for Index {
    fn drop(&mut self) {
        let left = self
            .segments
            .drain(..)
            .filter(|segment| !segment.0.is_null());
        self.pool.give(left);
    }
}

impl Index {
    /// With room for `buckets` buckets; `bits` of the hash chose the shard.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(buckets: usize, bits: u32, pool: &Arc<Pool>) -> Result<Index> {
        let buckets = buckets.max(2);
        let mut index = Index {
            segments: Vec::with_capacity(buckets.div_ceil(SEGMENT)),
            buckets,
            bits,
            len: 0,
            gone: 0,
            pool: pool.clone(),
        };
        for _ in 0..buckets.div_ceil(SEGMENT) {
            index.segments.push(pool.take()?);
        }
        Ok(index)
    }

    /// The pool that its segments are from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    #[inline(always)]
    fn at(&self, bucket: usize) -> *mut Bucket {
        self.segments[bucket / SEGMENT]
            .0
            .wrapping_add(bucket % SEGMENT)
    }

    #[inline(always)]
    fn bucket(&self, bucket: usize) -> &Bucket {
        debug_assert!((self.gone..self.buckets).contains(&bucket));
        // SAFETY: buckets from `gone` on lie in segments that are this index's own, and `&mut self` is
        // needed to write them.
        unsafe { &*self.at(bucket) }
    }

    #[inline(always)]
    fn bucket_mut(&mut self, bucket: usize) -> &mut Bucket {
        debug_assert!((self.gone..self.buckets).contains(&bucket));
        // SAFETY: as above.
        unsafe { &mut *self.at(bucket) }
    }

    /// Where a search begins: the bucket of the hash, or the first that was not drained, to which a key
    /// of a drained bucket may have gone on.
    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        hash::bucket(hash, self.bits, self.buckets).max(self.gone)
    }

    /// The bucket after one: from the last a search goes on to the first that was not drained.
    #[inline(always)]
    fn after(&self, bucket: usize) -> usize {
        match bucket + 1 == self.buckets {
            false => bucket + 1,
            true => self.gone,
        }
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Buckets.
    pub fn buckets(&self) -> usize {
        self.buckets
    }

    /// Bytes that it keeps.
    pub fn bytes(&self) -> usize {
        match self.segments.len() {
            // Of a segment that is not full, only the pages that are used count.
            1 => (self.buckets * size_of::<Bucket>()).next_multiple_of(4096),
            n => (n - self.gone / SEGMENT) * SEGMENT_BYTES,
        }
    }

    /// How many entries it should hold at most.
    pub fn limit(&self) -> usize {
        self.buckets * WIDTH * 9 / 10
    }

    /// The bucket in which a search for this hash begins; asks the processor for it.
    #[inline(always)]
    pub fn line(&self, hash: u64) -> Option<&Bucket> {
        let home = self.home(hash);
        if home >= self.buckets {
            return None;
        }
        prefetch(self.at(home).cast());
        Some(self.bucket(home))
    }

    /// Asks the processor for the bucket after the one in which a search for this hash begins.
    #[inline(always)]
    pub fn prefetch_next(&self, hash: u64) {
        let home = self.home(hash);
        if home < self.buckets {
            prefetch(self.at(self.after(home)).cast());
        }
    }

    /// [`Index::prefetch_next`] where the first bucket does not say what a search for this key finds.
    #[inline(always)]
    pub fn prefetch_second(&self, hash: u64, key: i64) {
        let home = self.home(hash);
        if home < self.buckets && self.bucket(home).look(key) == (0, true) {
            prefetch(self.at(self.after(home)).cast());
        }
    }

    /// Asks the processor for buckets that [`Index::drain`] comes to later, and for those of the larger
    /// index to which their entries go.
    #[inline(always)]
    pub fn prefetch_drain(&self, later: Range<usize>, larger: &Index) {
        let part = self.gone + later.start..(self.gone + later.end).min(self.buckets);
        // Both indexes are in the order of the hash.
        let there = |bucket: usize| bucket * larger.buckets / self.buckets;
        for bucket in there(part.start)..there(part.end).min(larger.buckets) {
            prefetch(larger.at(bucket).cast());
        }
        for bucket in part {
            prefetch(self.at(bucket).cast());
        }
    }

    fn search(&self, hash: u64, key: i64) -> Option<(usize, usize, usize)> {
        let mut at = self.home(hash);
        if at >= self.buckets {
            return None;
        }
        for steps in 0..self.buckets {
            let bucket = self.bucket(at);
            if let Some(place) = bucket.place(key) {
                return Some((at, place, steps));
            }
            if bucket.passed == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// The id of a key.
    #[inline(always)]
    pub fn find(&self, hash: u64, key: i64) -> Option<u32> {
        let home = self.home(hash);
        if home >= self.buckets {
            return None;
        }
        match self.bucket(home).look(key) {
            (0, false) => None,
            (0, true) => {
                let (at, place, _) = self.search(hash, key)?;
                Some(self.bucket(at).ids[place])
            }
            (id, _) => Some(id),
        }
    }

    /// Puts another id in the place of a key that is there.
    pub fn replace(&mut self, hash: u64, key: i64, id: u32) -> Option<u32> {
        let (at, place, _) = self.search(hash, key)?;
        Some(std::mem::replace(&mut self.bucket_mut(at).ids[place], id))
    }

    /// Adds a key that is not there. The caller keeps [`Index::len`] below the number of places.
    pub fn insert(&mut self, hash: u64, key: i64, id: u32) {
        debug_assert!(id != 0 && self.gone == 0 && self.len < self.buckets * WIDTH);
        let mut at = self.home(hash);
        loop {
            let bucket = self.bucket_mut(at);
            if let Some(place) = bucket.ids.iter().position(|&id| id == 0) {
                bucket.keys[place] = key;
                bucket.ids[place] = id;
                break;
            }
            bucket.passed += 1;
            at = if at + 1 == self.buckets { 0 } else { at + 1 };
        }
        self.len += 1;
    }

    /// Takes a key out.
    pub fn remove(&mut self, hash: u64, key: i64) -> Option<u32> {
        let (at, place, steps) = self.search(hash, key)?;
        let id = std::mem::take(&mut self.bucket_mut(at).ids[place]);
        // In an index that is being emptied the counts may stay: a search reads a line more.
        if self.gone == 0 {
            let mut back = self.home(hash);
            for _ in 0..steps {
                self.bucket_mut(back).passed -= 1;
                back = if back + 1 == self.buckets {
                    0
                } else {
                    back + 1
                };
            }
        }
        self.len -= 1;
        Some(id)
    }

    /// Takes out what lies in the first bucket that was not drained, and gives its segment back if it
    /// was the last in it; false once there is none.
    pub fn drain(&mut self, mut each: impl FnMut(i64, u32)) -> bool {
        if self.gone == self.buckets {
            return false;
        }
        let bucket = *self.bucket(self.gone);
        for place in 0..WIDTH {
            if bucket.ids[place] != 0 {
                each(bucket.keys[place], bucket.ids[place]);
                self.len -= 1;
            }
        }
        self.gone += 1;
        if self.gone.is_multiple_of(SEGMENT) || self.gone == self.buckets {
            let last = &mut self.segments[(self.gone - 1) / SEGMENT];
            let segment = Segment(std::mem::replace(&mut last.0, std::ptr::null_mut()));
            self.pool.give(std::iter::once(segment));
        }
        true
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (i64, u32)> + '_ {
        (self.gone..self.buckets).flat_map(|at| {
            let bucket = self.bucket(at);
            (0..WIDTH)
                .filter(|&place| bucket.ids[place] != 0)
                .map(|place| (bucket.keys[place], bucket.ids[place]))
        })
    }
}
