//! What threads share of a batch.

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

/// Positions of a batch by shard: in each shard in their order.
#[derive(Debug)]
pub struct Parts {
    positions: Vec<u32>,
    ends: Vec<u32>,
}

impl Parts {
    /// Sorts positions `0..n` by `shard(position)`, which is below `shards`.
    pub fn new(n: usize, shards: usize, shard: impl Fn(usize) -> usize) -> Parts {
        let mut ends = vec![0u32; shards];
        let homes: Vec<u16> = (0..n)
            .map(|i| {
                let home = shard(i);
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
        let mut positions = vec![0u32; n];
        for (i, &home) in homes.iter().enumerate() {
            let at = &mut ends[usize::from(home)];
            positions[*at as usize] = i as u32;
            *at += 1;
        }
        Parts { positions, ends }
    }

    /// The positions of a shard.
    pub fn of(&self, shard: usize) -> &[u32] {
        let start = match shard {
            0 => 0,
            _ => self.ends[shard - 1],
        };
        &self.positions[start as usize..self.ends[shard] as usize]
    }
}
