//! Rows that never move: values, optimizer slots and 8 bytes of metadata, in chunks of up to 32 MiB
//! on huge pages. A shard takes runs of [`RUN`] rows, so that little is left over however many shards
//! there are, and rows that were made one after another lie side by side.
//!
//! The arena gives addresses and knows nothing of locks. Each row belongs to one shard; whoever
//! holds that shard's lock may read it, and may write it with the lock held for writing. That is the
//! contract of every unsafe function here.

use crate::error::{Error, Result};
use crate::huge;
#[cfg(loom)]
use loom::sync::atomic::AtomicPtr;
use memmap2::MmapMut;
#[cfg(not(loom))]
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

/// Rows that a shard takes at a time.
pub const RUN: u32 = 256;
/// Row 0 is never handed out: in the index 0 is an empty place.
const FIRST: u32 = RUN;
/// Ids above this mean something else (see `tier.rs`).
pub const LAST: u32 = (1 << 31) - 1;
const CHUNK_BYTES: usize = 32 << 20;
const CHUNKS: usize = if cfg!(loom) { 1 } else { 65_536 };

/// What is known of a row beside its values.
///
/// `version` is the step of the last update. `packed` is the number of updates (24 bits, which stay
/// at their top) and the mark (8 bits): the epoch of the last change, which snapshots compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Meta {
    /// Step of the last update.
    pub version: u32,
    packed: u32,
}

impl Meta {
    /// A row of `frequency` updates, last at `version`, changed in epoch `mark`.
    pub fn new(version: u32, frequency: u32, mark: u8) -> Meta {
        Meta {
            version,
            packed: frequency.min(0x00ff_ffff) << 8 | u32::from(mark),
        }
    }

    /// How often it was updated, at most 16,777,215.
    pub fn frequency(self) -> u32 {
        self.packed >> 8
    }

    /// The epoch of the last change.
    pub fn mark(self) -> u8 {
        self.packed as u8
    }
}

/// Memory of rows.
#[derive(Debug)]
pub struct Arena {
    stride: usize,
    shift: u32,
    chunks: Box<[AtomicPtr<u8>]>,
    taken: Mutex<Taken>,
}

#[derive(Debug)]
struct Taken {
    next: u32,
    maps: Vec<MmapMut>,
}

impl Arena {
    /// For rows of `stride` bytes, a multiple of 4.
    pub fn new(stride: usize) -> Arena {
        let fit = (CHUNK_BYTES / (stride + size_of::<Meta>())).max(RUN as usize);
        let shift = fit.ilog2().min(20);
        let chunks = ((LAST as usize + 1) >> shift).min(CHUNKS);
        Arena {
            stride,
            shift,
            chunks: (0..chunks)
                .map(|_| AtomicPtr::new(std::ptr::null_mut()))
                .collect(),
            taken: Mutex::new(Taken {
                next: FIRST,
                maps: Vec::new(),
            }),
        }
    }

    /// The first of [`RUN`] new rows; their bytes are zero.
    ///
    /// # Errors
    /// [`Error::Exhausted`] where all ids are taken, [`Error::Io`] where the system has no memory.
    pub fn take(&self) -> Result<u32> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let first = taken.next;
        let chunk = (first >> self.shift) as usize;
        if first > LAST - RUN || chunk >= self.chunks.len() {
            return Err(Error::Exhausted(format!(
                "the store is full: {first} rows of {} bytes",
                self.stride
            )));
        }
        if self.chunks[chunk].load(Ordering::Acquire).is_null() {
            let rows = 1usize << self.shift;
            let bytes = rows * (self.stride + size_of::<Meta>());
            // The first chunk stays with small pages, for models with many small tables.
            let (map, start) = huge::map(bytes, "rows of an embedding", chunk > 0)?;
            self.chunks[chunk].store(start, Ordering::Release);
            taken.maps.push(map);
        }
        taken.next += RUN;
        Ok(first)
    }

    /// Gives all memory back.
    ///
    /// # Safety
    /// Nobody uses a row, or keeps the id of one: every shard is locked for writing and empty.
    pub unsafe fn reset(&self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in &self.chunks {
            chunk.store(std::ptr::null_mut(), Ordering::Release);
        }
        taken.next = FIRST;
        taken.maps.clear();
    }

    /// Bytes that rows have taken.
    pub fn bytes(&self) -> u64 {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        u64::from(taken.next - FIRST) * (self.stride + size_of::<Meta>()) as u64
    }

    #[inline(always)]
    fn base(&self, id: u32) -> (*mut u8, usize) {
        let chunk = self.chunks[(id >> self.shift) as usize].load(Ordering::Relaxed);
        debug_assert!(!chunk.is_null());
        (chunk, (id & ((1 << self.shift) - 1)) as usize)
    }

    /// Asks the processor for the first `bytes` of a row.
    #[inline(always)]
    pub fn prefetch(&self, id: u32, bytes: usize) {
        let (base, at) = self.base(id);
        let start = base.wrapping_add(at * self.stride);
        let mut offset = 0;
        while offset < bytes {
            prefetch(start.wrapping_add(offset));
            offset += 64;
        }
    }

    /// Asks the processor for the metadata of a row.
    #[inline(always)]
    pub fn prefetch_meta(&self, id: u32) {
        let (base, at) = self.base(id);
        prefetch(base.wrapping_add((self.stride << self.shift) + at * size_of::<Meta>()));
    }

    /// The bytes of a row.
    ///
    /// # Safety
    /// `id` was handed out and the lock of its shard is held for as long as the slice is used.
    #[inline(always)]
    pub unsafe fn row(&self, id: u32) -> &[u8] {
        let (base, at) = self.base(id);
        // SAFETY: the chunk has `1 << shift` rows of `stride` bytes; the lock keeps writers away.
        unsafe { std::slice::from_raw_parts(base.add(at * self.stride), self.stride) }
    }

    /// The bytes of a row, to be written.
    ///
    /// # Safety
    /// As for [`Arena::row`], the lock is held for writing, and no other slice of this row is in use.
    #[inline(always)]
    #[allow(
        clippy::mut_from_ref,
        reason = "the shard's lock is what makes it exclusive"
    )]
    pub unsafe fn row_mut(&self, id: u32) -> &mut [u8] {
        let (base, at) = self.base(id);
        // SAFETY: as above; the lock is held for writing.
        unsafe { std::slice::from_raw_parts_mut(base.add(at * self.stride), self.stride) }
    }

    /// The metadata of a row.
    ///
    /// # Safety
    /// As for [`Arena::row`].
    #[inline(always)]
    pub unsafe fn meta(&self, id: u32) -> Meta {
        let (base, at) = self.base(id);
        // SAFETY: metadata lies behind the rows of a chunk; `stride` is a multiple of 4.
        unsafe {
            base.add(self.stride << self.shift)
                .cast::<Meta>()
                .add(at)
                .read()
        }
    }

    /// Writes the metadata of a row.
    ///
    /// # Safety
    /// As for [`Arena::row_mut`].
    #[inline(always)]
    pub unsafe fn set_meta(&self, id: u32, meta: Meta) {
        let (base, at) = self.base(id);
        // SAFETY: as above.
        unsafe {
            base.add(self.stride << self.shift)
                .cast::<Meta>()
                .add(at)
                .write(meta)
        }
    }
}

/// Asks the processor for the cache line of an address; a hint, which no address makes wrong.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing that the program can see, and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}

/// Copies the values of a row. The usual sizes are copied without a call.
///
/// # Panics
/// Where lengths differ.
#[inline(always)]
pub fn copy_floats(bytes: &[u8], out: &mut [f32]) {
    assert!(bytes.len() == size_of_val(out));
    let (from, to) = (bytes.as_ptr(), out.as_mut_ptr().cast::<u8>());
    // SAFETY: both have this length, and `out` is borrowed alone; every bit pattern is an f32.
    unsafe {
        match bytes.len() {
            32 => to.copy_from_nonoverlapping(from, 32),
            64 => to.copy_from_nonoverlapping(from, 64),
            128 => to.copy_from_nonoverlapping(from, 128),
            256 => to.copy_from_nonoverlapping(from, 256),
            n => to.copy_from_nonoverlapping(from, n),
        }
    }
}

/// Bytes of a row as f32.
///
/// # Panics
/// Where they do not lie on 4 bytes: rows and their parts do.
#[inline(always)]
pub fn floats(bytes: &[u8]) -> &[f32] {
    // SAFETY: every bit pattern is an f32.
    let (before, floats, after) = unsafe { bytes.align_to::<f32>() };
    assert!(before.is_empty() && after.is_empty());
    floats
}

/// Bytes of a row as f32, to be written.
///
/// # Panics
/// As [`floats`].
#[inline(always)]
pub fn floats_mut(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: as above.
    let (before, floats, after) = unsafe { bytes.align_to_mut::<f32>() };
    assert!(before.is_empty() && after.is_empty());
    floats
}
