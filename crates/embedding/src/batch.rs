//! What threads share of a batch.

use crate::arena::prefetch;
use std::marker::PhantomData;

/// The rows of an output that several threads write, each its own.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    start: *mut T,
    rows: usize,
    width: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: only `row` gives access, and its caller promises that no two threads take the same row.
unsafe impl<T: Send> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// `out` as rows of `width`.
    pub fn new(out: &'a mut [T], width: usize) -> Rows<'a, T> {
        Rows {
            rows: out.len() / width,
            start: out.as_mut_ptr(),
            width,
            life: PhantomData,
        }
    }

    /// Row `at`.
    ///
    /// # Safety
    /// No other slice of this row is in use.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "each row has one writer")]
    pub unsafe fn row(&self, at: usize) -> &'a mut [T] {
        assert!(at < self.rows);
        // SAFETY: inside of `out`, which is borrowed for 'a; exclusive as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at * self.width), self.width) }
    }

    /// Asks the processor for the first line of row `at`, which will be written.
    #[inline(always)]
    pub fn prefetch(&self, at: usize) {
        prefetch(self.start.wrapping_add(at * self.width).cast());
    }

    /// Rows `at` and the next, `rows` of them.
    ///
    /// # Safety
    /// As for [`Rows::row`].
    #[allow(clippy::mut_from_ref, reason = "each row has one writer")]
    pub unsafe fn span(&self, at: usize, rows: usize) -> &'a mut [T] {
        assert!(at + rows <= self.rows);
        // SAFETY: as above.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(at * self.width), rows * self.width)
        }
    }
}

/// The keys of a batch by shard: in each shard in their order. They are copied, so that a shard reads
/// its own one after another.
#[derive(Debug)]
pub struct Parts {
    keys: Vec<i64>,
    positions: Vec<u32>,
    ends: Vec<u32>,
}

/// What a shard has of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Keys, in the order of the batch.
    pub keys: &'a [i64],
    /// Where in the batch each is.
    pub positions: &'a [u32],
}

impl Parts {
    /// Sorts keys, each with its position, by `shard(key)`, which is below `shards`.
    pub fn new(
        batch: impl Iterator<Item = (u32, i64)> + Clone,
        shards: usize,
        shard: impl Fn(i64) -> usize,
    ) -> Parts {
        let mut ends = vec![0u32; shards];
        let homes: Vec<u16> = batch
            .clone()
            .map(|(_, key)| {
                let home = shard(key);
                ends[home] += 1;
                home as u16
            })
            .collect();
        let mut sum = 0;
        for end in &mut ends {
            let count = *end;
            *end = sum;
            sum += count;
        }
        let mut positions = vec![0u32; homes.len()];
        let mut keys = vec![0; homes.len()];
        for ((position, key), &home) in batch.zip(&homes) {
            let at = &mut ends[usize::from(home)];
            positions[*at as usize] = position;
            keys[*at as usize] = key;
            *at += 1;
        }
        Parts {
            keys,
            positions,
            ends,
        }
    }

    /// What a shard has.
    pub fn of(&self, shard: usize) -> Part<'_> {
        let start = match shard {
            0 => 0,
            _ => self.ends[shard - 1],
        };
        let part = start as usize..self.ends[shard] as usize;
        Part {
            keys: &self.keys[part.clone()],
            positions: &self.positions[part],
        }
    }
}
