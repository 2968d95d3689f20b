//! Sizes and counts of a store.

use super::{Table, lock, reading};
use crate::cold::Disk;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a store did, counted since it was made.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) lookups: AtomicU64,
    pub(crate) missing: AtomicU64,
    pub(crate) inserted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) updated: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) removed: AtomicU64,
}

/// The size of a store and what it did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stats {
    /// Rows.
    pub rows: u64,
    /// Keys that admission counts one by one.
    pub pending: u64,
    /// Strings, where keys are strings.
    pub strings: u64,
    /// All memory.
    pub bytes: u64,
    /// The part for rows with slots and metadata.
    pub row_bytes: u64,
    /// The part for the indexes.
    pub index_bytes: u64,
    /// The part for admission.
    pub admission_bytes: u64,
    /// The part for strings.
    pub string_bytes: u64,
    /// Rows that were given back and wait for a key; they are in `row_bytes`.
    pub free_rows: u64,
    /// Rows that are in the second tier; they are in `rows`.
    pub cold_rows: u64,
    /// Bytes of the file of cold rows; `bytes` is memory alone.
    pub cold_bytes: u64,
    /// The part of `bytes` for cold rows that are not in the file yet.
    pub cold_buffer_bytes: u64,
    /// Rows that went to the file.
    pub cooled: u64,
    /// Rows that came back from it.
    pub warmed: u64,
    /// Shards whose index is growing.
    pub growing: u64,
    /// Keys that were looked up.
    pub lookups: u64,
    /// How many of those had no row.
    pub missing: u64,
    /// The share of looked up keys that had a row; 0 before the first.
    pub hit_rate: f64,
    /// Rows that were made.
    pub inserted: u64,
    /// Lookups of keys that admission did not let in.
    pub refused: u64,
    /// Rows that steps updated.
    pub updated: u64,
    /// Gradients of keys without a row.
    pub dropped: u64,
    /// Rows that eviction took.
    pub evicted: u64,
    /// Rows that were removed by name.
    pub removed: u64,
    /// The last step.
    pub step: u32,
    /// How many different steps were applied.
    pub steps: u64,
}

impl Table {
    /// See [`crate::Store::stats`].
    pub fn stats(&self) -> Stats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let clock = *lock(&self.clock);
        let (strings, string_bytes) = self.strings.size();
        let (mut rows, mut index, mut admission) = (0, 0, 0);
        let (mut pending, mut free, mut growing) = (0, 0, 0);
        let (mut cold_rows, mut buffer, mut cooled, mut warmed) = (0, 0, 0, 0);
        for shard in &self.shards {
            let shard = reading(shard);
            rows += shard.len() as u64;
            index += shard.index_bytes() as u64;
            admission += shard.filter.bytes() as u64;
            pending += shard.filter.pending() as u64;
            free += shard.free() as u64;
            growing += u64::from(shard.grows());
            cold_rows += shard.cold().rows() as u64;
            buffer += shard.cold().bytes() as u64;
            cooled += shard.went;
            warmed += shard.came;
        }
        let row_bytes = self.core.arena.bytes();
        let (lookups, missing) = (get(&self.counters.lookups), get(&self.counters.missing));
        Stats {
            rows,
            pending,
            strings,
            bytes: row_bytes + index + admission + string_bytes + buffer,
            row_bytes,
            index_bytes: index,
            admission_bytes: admission,
            string_bytes,
            free_rows: free,
            cold_rows,
            cold_bytes: self.core.disk.as_ref().map_or(0, Disk::bytes),
            cold_buffer_bytes: buffer,
            cooled,
            warmed,
            growing,
            lookups,
            missing,
            hit_rate: match lookups {
                0 => 0.0,
                n => 1.0 - missing as f64 / n as f64,
            },
            inserted: get(&self.counters.inserted),
            refused: get(&self.counters.refused),
            updated: get(&self.counters.updated),
            dropped: get(&self.counters.dropped),
            evicted: get(&self.counters.evicted),
            removed: get(&self.counters.removed),
            step: clock.step.unwrap_or(0),
            steps: clock.count,
        }
    }
}
