//! One part of a store: its index, the rows it owns, what it knows of keys without a row.
//!
//! A shard is only reached through its lock, so `&Shard` means that the lock is held and `&mut Shard`
//! that it is held for writing. Ids in its map are ids of rows that it took from the arena and that no
//! other shard has. These two facts are the safety argument of every unsafe block here.
//!
//! Where a store has a second tier, numbers of the map may also be those of cold rows (`cold`). What
//! changes a row first brings it back to memory; `warm.rs` says when rows go.
//!
//! While a snapshot is being written, a row that belongs to it and is about to change is copied aside
//! first ([`Saving`]): the snapshot is of one instant, and training does not wait for it.

mod warm;

use crate::admission::Filter;
use crate::arena::{Arena, Meta, RUN};
use crate::cold::{COLD, Cold, Disk, Wanted};
use crate::error::{Error, Result, invalid};
use crate::hash;
use crate::index::Pool;
use crate::map::Map;
use crate::optimizer::Step;
use crate::options::{Eviction, Missing, Options};
use crate::philox;
use crate::row::Layout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// How many keys a batch looks ahead.
const AHEAD: usize = 24;

/// What all shards of a store share.
#[derive(Debug)]
pub struct Core {
    /// As the store was made.
    pub options: Options,
    /// Of its rows.
    pub layout: Layout,
    /// Their memory.
    pub arena: Arena,
    /// Memory of the indexes.
    pub pool: Arc<Pool>,
    /// The file of cold rows, where there is a second tier.
    pub disk: Option<Disk>,
    /// `1 << bits` shards.
    pub bits: u32,
    /// What rows that change now are marked with; 1 to 255.
    pub epoch: AtomicU8,
    /// Whether removed keys are written down, for deltas.
    pub tracking: AtomicBool,
}

impl Core {
    /// Writes what a key without a row gives.
    #[inline]
    pub fn absent(&self, key: i64, out: &mut [f32]) {
        match self.options.missing {
            Missing::Zeros => out.fill(0.0),
            Missing::Initial => philox::fill(&self.options.init, self.options.seed, key, out),
        }
    }

    /// Rows of a shard that may be in memory.
    fn share(&self) -> usize {
        let rows = self.options.tier.as_ref().map_or(u64::MAX, |t| t.rows);
        ((rows >> self.bits) as usize).max(1)
    }

    fn epoch(&self) -> u8 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Bytes of a record: key, version, frequency, row.
    pub fn record(&self) -> usize {
        16 + self.layout.bytes()
    }
}

/// A snapshot that has not come to this shard yet.
#[derive(Debug)]
pub struct Saving {
    /// Rows with a mark above this changed since the snapshot before; -1 for all rows.
    pub since: i16,
    /// Rows with a mark above this changed after the snapshot's instant.
    pub cut: u8,
    /// Records of rows as they were at that instant.
    pub before: Vec<u8>,
    /// A cold row that went could not be read: the snapshot cannot be whole.
    pub failed: Option<Error>,
}

impl Saving {
    fn has(&self, meta: Meta) -> bool {
        i16::from(meta.mark()) > self.since && meta.mark() <= self.cut
    }
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Rows that were updated.
    pub updated: u64,
    /// Rows that were made.
    pub inserted: u64,
    /// Keys whose gradient was dropped, because they have no row.
    pub dropped: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Shard {
    map: Map,
    free: Vec<u32>,
    next: u32,
    end: u32,
    cold: Cold,
    /// Rows that went to the file, and that came back from it.
    pub went: u64,
    /// See `went`.
    pub came: u64,
    /// Of keys without a row.
    pub filter: Filter,
    /// Keys that were removed since the last snapshot or delta.
    pub removed: Vec<i64>,
    /// Set while a snapshot waits to read this shard.
    pub saving: Option<Saving>,
}

/// A key of a batch whose gradients are added up.
struct Unique {
    id: u32,
    first: u32,
    count: u32,
    sum: u32,
}

const NONE: u32 = u32::MAX;

impl Shard {
    /// Shard `number`. The first indexes differ in size between shards, so that they do not all grow
    /// at the same time.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(options: &Options, bits: u32, number: usize, pool: &Arc<Pool>) -> Result<Shard> {
        let rows = options.reserve as f64 / f64::from(1u32 << bits);
        let least = (rows * 1.05 / 4.5).max(48.0);
        let spread = 1.25f64.powf(number as f64 / f64::from(1u32 << bits));
        let buckets = if options.reserve > 0 {
            least
        } else {
            least * spread
        };
        Ok(Shard {
            map: Map::new(buckets as usize, bits, pool)?,
            free: Vec::new(),
            next: 0,
            end: 0,
            cold: Cold::default(),
            went: 0,
            came: 0,
            filter: Filter::new(options.admission, options.seed, bits, pool)?,
            removed: Vec::new(),
            saving: None,
        })
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Of those, cold ones.
    pub fn cold(&self) -> &Cold {
        &self.cold
    }

    /// Bytes of the index.
    pub fn index_bytes(&self) -> usize {
        self.map.bytes()
    }

    /// Rows that were given back and wait for a key.
    pub fn free(&self) -> usize {
        self.free.len() + (self.end - self.next) as usize
    }

    /// Whether the index is growing.
    pub fn grows(&self) -> bool {
        self.map.grows()
    }

    /// Asks the processor for the index line of a key.
    #[inline(always)]
    pub fn prefetch(&self, hash: u64) {
        self.map.prefetch(hash);
    }

    /// Its index.
    #[inline(always)]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// The row of a key: an id of the arena, or the number of a cold row.
    #[inline(always)]
    pub fn find(&self, hash: u64, key: i64) -> Option<u32> {
        self.map.find(hash, key)
    }

    /// Reads the values of a row.
    #[inline(always)]
    pub fn read(&self, core: &Core, id: u32, out: &mut [f32]) {
        // SAFETY: see the head of this file.
        core.layout.read(unsafe { core.arena.row(id) }, out);
    }

    /// Reads values and slots as f32.
    pub fn whole(&self, core: &Core, id: u32, out: &mut [f32]) {
        // SAFETY: see the head of this file.
        core.layout.unpack(unsafe { core.arena.row(id) }, out);
    }

    /// The metadata of a row.
    #[inline(always)]
    pub fn meta(&self, core: &Core, id: u32) -> Meta {
        // SAFETY: see the head of this file.
        unsafe { core.arena.meta(id) }
    }

    fn take(&mut self, core: &Core) -> Result<u32> {
        if let Some(id) = self.free.pop() {
            return Ok(id);
        }
        if self.next == self.end {
            self.next = core.arena.take()?;
            self.end = self.next + RUN;
        }
        self.next += 1;
        Ok(self.next - 1)
    }

    /// Gives a key that has none a row with its initial values.
    ///
    /// # Errors
    /// Where the system has no memory, or the store is full; nothing has changed then.
    pub fn insert(&mut self, core: &Core, hash: u64, key: i64, step: u32) -> Result<u32> {
        let id = self.take(core)?;
        if let Err(error) = self.map.insert(hash, key, id) {
            self.free.push(id);
            return Err(error);
        }
        // SAFETY: see the head of this file; the row is new.
        let row = unsafe { core.arena.row_mut(id) };
        let options = &core.options;
        let mut wide = vec![
            0.0;
            if core.layout.value_bytes() == core.layout.dim * 4 {
                0
            } else {
                core.layout.dim
            }
        ];
        core.layout.change(row, &mut wide, |values, slots| {
            philox::fill(&options.init, options.seed, key, values);
            options.optimizer.start(values, slots);
        });
        // SAFETY: as above.
        unsafe { core.arena.set_meta(id, Meta::new(step, 0, core.epoch())) };
        Ok(id)
    }

    /// The row of a key, made if there is none and admission lets it in.
    ///
    /// # Errors
    /// As [`Shard::insert`].
    pub fn find_or_admit(
        &mut self,
        core: &Core,
        hash: u64,
        key: i64,
        step: u32,
    ) -> Result<(Option<u32>, bool)> {
        if let Some(id) = self.find_warm(core, hash, key)? {
            return Ok((Some(id), false));
        }
        if !self.filter.admit(hash, key, step)? {
            return Ok((None, false));
        }
        self.insert(core, hash, key, step)
            .map(|id| (Some(id), true))
    }

    /// Before a row changes or goes: a copy for the snapshot that is being written, if it is in it.
    fn keep(&mut self, core: &Core, id: u32, key: i64) {
        if let Some(saving) = &mut self.saving {
            if let (Some(disk), true) = (&core.disk, id & COLD != 0) {
                let read = self.cold.read(disk, &[id], |_, found| {
                    if saving.has(found.meta) {
                        push(&mut saving.before, key, found.meta, found.row);
                    }
                    Ok(())
                });
                if let Err(error) = read {
                    saving.failed = Some(error);
                }
                return;
            }
            // SAFETY: see the head of this file.
            let meta = unsafe { core.arena.meta(id) };
            if saving.has(meta) {
                // SAFETY: as above.
                let row = unsafe { core.arena.row(id) };
                push(&mut saving.before, key, meta, &row[..core.layout.bytes()]);
            }
        }
    }

    /// Takes a key's row away.
    pub fn remove(&mut self, core: &Core, hash: u64, key: i64) -> bool {
        let Some(id) = self.find(hash, key) else {
            return false;
        };
        self.keep(core, id, key);
        self.map.remove(hash, key);
        match &core.disk {
            Some(disk) if id & COLD != 0 => self.cold.forget(disk, id),
            _ => self.free.push(id),
        }
        if core.tracking.load(Ordering::Relaxed) {
            self.removed.push(key);
        }
        true
    }

    /// Takes all rows away. The caller gives the arena back once all shards are empty.
    ///
    /// # Errors
    /// Where the system has no memory; nothing has changed then.
    pub fn clear(&mut self, core: &Core, number: usize) -> Result<()> {
        let empty = Shard::new(&core.options, core.bits, number, &core.pool)?;
        if self.saving.is_some() || core.tracking.load(Ordering::Relaxed) {
            let all: Vec<(i64, u32)> = self.map.iter().collect();
            for (key, id) in all {
                self.keep(core, id, key);
                if core.tracking.load(Ordering::Relaxed) {
                    self.removed.push(key);
                }
            }
        }
        self.map = empty.map;
        self.filter = empty.filter;
        self.free = Vec::new();
        if let Some(disk) = &core.disk {
            self.cold.clear(disk);
        }
        (self.next, self.end) = (0, 0);
        Ok(())
    }

    /// Sets the values of a key; its slots stay, or start if the row is new.
    ///
    /// # Errors
    /// As [`Shard::insert`].
    pub fn set(&mut self, core: &Core, key: i64, values: &[f32], step: u32) -> Result<bool> {
        let hash = hash::mix(key);
        self.cool(core, 1)?;
        let (id, fresh) = match self.find_warm(core, hash, key)? {
            Some(id) => {
                self.keep(core, id, key);
                (id, false)
            }
            None => (self.insert(core, hash, key, step)?, true),
        };
        // SAFETY: see the head of this file.
        let (row, meta) = unsafe { (core.arena.row_mut(id), core.arena.meta(id)) };
        core.layout.write(row, values);
        if fresh {
            let (kept, slots) = row.split_at_mut(core.layout.value_bytes());
            let _ = kept;
            let slots = &mut slots[..core.layout.slots * core.layout.dim * 4];
            core.options
                .optimizer
                .start(values, crate::arena::floats_mut(slots));
        }
        let meta = Meta::new(step, meta.frequency().saturating_add(1), core.epoch());
        // SAFETY: as above.
        unsafe { core.arena.set_meta(id, meta) };
        Ok(fresh)
    }

    /// Puts a record of a snapshot in, over what the key has now.
    ///
    /// # Errors
    /// As [`Shard::insert`].
    pub fn put(&mut self, core: &Core, record: &Record<'_>) -> Result<()> {
        let hash = hash::mix(record.key);
        self.cool(core, 1)?;
        let id = match self.find_warm(core, hash, record.key)? {
            Some(id) => {
                self.keep(core, id, record.key);
                id
            }
            None => {
                let id = self.take(core)?;
                if let Err(error) = self.map.insert(hash, record.key, id) {
                    self.free.push(id);
                    return Err(error);
                }
                id
            }
        };
        // SAFETY: see the head of this file.
        unsafe {
            core.arena.row_mut(id)[..record.row.len()].copy_from_slice(record.row);
            core.arena.set_meta(
                id,
                Meta::new(record.version, record.frequency, core.epoch()),
            );
        }
        Ok(())
    }

    /// One optimizer step for the positions of a batch that are this shard's.
    ///
    /// # Errors
    /// As [`Shard::insert`]; rows of a part of the keys may have been made then, none updated.
    pub fn apply(
        &mut self,
        core: &Core,
        step: &Step,
        number: u32,
        batch: (&[i64], &[f32]),
        positions: &[u32],
        admits: bool,
    ) -> Result<Counts> {
        let (keys, gradients) = batch;
        let dim = core.layout.dim;
        let gradient = |at: u32| &gradients[at as usize * dim..(at as usize + 1) * dim];
        let mut counts = Counts::default();
        // What the lookup of this batch brought back stays, even where that is more than the share.
        if self.len() - self.cold.rows() > positions.len().saturating_add(core.share()) {
            self.cool(core, 0)?;
        }

        // The keys of the batch once each, in the order in which they first come, and the sums of
        // what comes more than once, added in the order of the batch.
        let room = (positions.len() * 2).next_power_of_two();
        let mut places = vec![NONE; room];
        let mut uniques: Vec<Unique> = Vec::with_capacity(positions.len());
        let mut sums: Vec<f32> = Vec::new();
        for (i, &position) in positions.iter().enumerate() {
            if let Some(&next) = positions.get(i + AHEAD) {
                self.prefetch(hash::mix(keys[next as usize]));
            }
            let key = keys[position as usize];
            let hash = hash::mix(key);
            let id = match self.find_warm(core, hash, key)? {
                Some(id) => id,
                None if admits => {
                    counts.inserted += 1;
                    self.insert(core, hash, key, number)?
                }
                None => {
                    counts.dropped += 1;
                    continue;
                }
            };
            let mut place = (id.wrapping_mul(0x9e37_79b1) >> 7) as usize & (room - 1);
            loop {
                match places[place] {
                    NONE => {
                        places[place] = uniques.len() as u32;
                        uniques.push(Unique {
                            id,
                            first: position,
                            count: 1,
                            sum: NONE,
                        });
                        break;
                    }
                    at if uniques[at as usize].id == id => {
                        let unique = &mut uniques[at as usize];
                        if unique.sum == NONE {
                            unique.sum = (sums.len() / dim) as u32;
                            sums.extend_from_slice(gradient(unique.first));
                        }
                        unique.count += 1;
                        let start = unique.sum as usize * dim;
                        for (sum, g) in sums[start..start + dim].iter_mut().zip(gradient(position))
                        {
                            *sum += g;
                        }
                        break;
                    }
                    _ => place = (place + 1) & (room - 1),
                }
            }
        }

        let bytes = core.layout.bytes();
        let mut wide = vec![0.0; dim];
        let epoch = core.epoch();
        for (i, unique) in uniques.iter().enumerate() {
            if let Some(next) = uniques.get(i + AHEAD / 2) {
                core.arena.prefetch(next.id, bytes.min(512));
                core.arena.prefetch_meta(next.id);
            }
            if self.saving.is_some() {
                self.keep(core, unique.id, keys[unique.first as usize]);
            }
            // SAFETY: see the head of this file.
            let (row, meta) =
                unsafe { (core.arena.row_mut(unique.id), core.arena.meta(unique.id)) };
            let g = match unique.sum {
                NONE => gradient(unique.first),
                sum => &sums[sum as usize * dim..(sum as usize + 1) * dim],
            };
            let absent = number.saturating_sub(meta.version).saturating_sub(1);
            core.layout.change(row, &mut wide, |values, slots| {
                step.update(values, slots, g, u64::from(absent));
            });
            let frequency = meta.frequency().saturating_add(unique.count);
            // SAFETY: as above.
            unsafe {
                core.arena
                    .set_meta(unique.id, Meta::new(number, frequency, epoch));
            };
        }
        counts.updated = uniques.len() as u64;
        Ok(counts)
    }

    /// Each row once: key, metadata, values and slots. Cold rows that are not `wanted` may be left out.
    ///
    /// # Errors
    /// Where cold rows cannot be read.
    pub fn scan(
        &self,
        core: &Core,
        wanted: Wanted,
        mut each: impl FnMut(i64, Meta, &[u8]),
    ) -> Result<()> {
        let warm = |&(_, id): &(i64, u32)| id & COLD == 0;
        let all: Vec<(i64, u32)> = self.map.iter().filter(warm).collect();
        for (i, &(key, id)) in all.iter().enumerate() {
            if let Some(&(_, next)) = all.get(i + AHEAD) {
                core.arena.prefetch_meta(next);
            }
            // SAFETY: see the head of this file.
            let row = unsafe { core.arena.row(id) };
            each(key, self.meta(core, id), &row[..core.layout.bytes()]);
        }
        let Some(disk) = &core.disk else {
            return Ok(());
        };
        self.cold.each(disk, wanted, |id, found| {
            if self.find(hash::mix(found.key), found.key) == Some(id) {
                each(found.key, found.meta, found.row);
            }
        })
    }

    /// Each row once, with its values.
    ///
    /// # Errors
    /// As [`Shard::scan`].
    pub fn export(&self, core: &Core, mut each: impl FnMut(i64, &[f32], Meta)) -> Result<()> {
        let mut values = vec![0.0; core.layout.dim];
        self.scan(core, Wanted::All, |key, meta, row| {
            core.layout.read(row, &mut values);
            each(key, &values, meta);
        })
    }

    /// Takes away the rows that a policy of one row at a time names.
    ///
    /// # Errors
    /// As [`Shard::scan`]; nothing has gone then.
    pub fn evict(&mut self, core: &Core, policy: Eviction, step: u32) -> Result<Vec<i64>> {
        let mut gone = Vec::new();
        match policy {
            Eviction::Ttl { steps } => {
                let until = step.saturating_sub(steps).saturating_sub(1);
                self.scan(core, Wanted::Until(until), |key, meta, _| {
                    if step.saturating_sub(meta.version) > steps {
                        gone.push(key);
                    }
                })?;
            }
            Eviction::L2 { norm } => self.export(core, |key, values, _| {
                let square: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                if square < f64::from(norm) * f64::from(norm) {
                    gone.push(key);
                }
            })?,
            Eviction::None | Eviction::Lru { .. } | Eviction::Lfu { .. } => {}
        }
        for &key in &gone {
            self.remove(core, hash::mix(key), key);
        }
        Ok(gone)
    }

    /// After many rows went; `ages`: counts of admission that rested go too.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn tidy(&mut self, ages: bool) -> Result<()> {
        if ages {
            self.filter.age()?;
        }
        self.map.shrink()
    }

    /// Sets every mark: 0 for rows that `saved` has, 1 for the others.
    pub fn remark(&mut self, core: &Core, saved: u8) {
        let all: Vec<u32> = self.map.iter().map(|(_, id)| id).collect();
        self.cold.remark(saved);
        for id in all.into_iter().filter(|id| id & COLD == 0) {
            // SAFETY: see the head of this file.
            unsafe {
                let meta = core.arena.meta(id);
                let mark = u8::from(meta.mark() > saved);
                core.arena
                    .set_meta(id, Meta::new(meta.version, meta.frequency(), mark));
            }
        }
    }

    /// Records of the rows of the snapshot that is being written: what was kept aside and what has not
    /// changed since its instant.
    ///
    /// # Errors
    /// Where cold rows cannot be read.
    pub fn save(&self, core: &Core, out: &mut Vec<u8>) -> Result<()> {
        let Some(saving) = &self.saving else {
            return Ok(());
        };
        if let Some(error) = &saving.failed {
            return invalid(error.to_string());
        }
        out.extend_from_slice(&saving.before);
        self.scan(core, Wanted::Above(saving.since), |key, meta, row| {
            if saving.has(meta) {
                push(out, key, meta, row);
            }
        })
    }
}

/// A row as snapshots have it.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Whose.
    pub key: i64,
    /// Step of the last update.
    pub version: u32,
    /// How many updates.
    pub frequency: u32,
    /// Values and slots.
    pub row: &'a [u8],
}

impl<'a> Record<'a> {
    /// Of the bytes of a record.
    pub fn parse(bytes: &'a [u8]) -> Option<Record<'a>> {
        let (key, rest) = bytes.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let (frequency, row) = rest.split_first_chunk()?;
        Some(Record {
            key: i64::from_le_bytes(*key),
            version: u32::from_le_bytes(*version),
            frequency: u32::from_le_bytes(*frequency),
            row,
        })
    }
}

fn push(out: &mut Vec<u8>, key: i64, meta: Meta, row: &[u8]) {
    out.extend_from_slice(&key.to_le_bytes());
    out.extend_from_slice(&meta.version.to_le_bytes());
    out.extend_from_slice(&meta.frequency().to_le_bytes());
    out.extend_from_slice(row);
}
