//! One part of a store: its index, the rows it owns, what it knows of keys without a row.
//!
//! A shard is only reached through its lock, so `&Shard` means that the lock is held and `&mut Shard`
//! that it is held for writing. Ids in its map are ids of rows that it took from the arena and that no
//! other shard has. These two facts are the safety argument of every unsafe block here.
//!
//! Where a store has a second tier, numbers of the map may also be those of cold rows (`cold`). What
//! changes a row first brings it back to memory; `warm.rs` says when rows go.
//!
//! `step.rs` is the optimizer's step; `passes.rs` is what looks at all rows: snapshots, export, eviction.

mod passes;
mod step;
mod warm;

pub use passes::{Record, Saving};
pub use step::Counts;

use crate::admission::Filter;
use crate::arena::{Arena, Meta, RUN};
use crate::cold::{COLD, Cold, Disk};
use crate::error::Result;
use crate::hash;
use crate::index::Pool;
use crate::map::Map;
use crate::options::{Missing, Options};
use crate::philox;
use crate::row::Layout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Keys that went which a shard writes down in any case.
const LISTED: usize = 1024;
/// How many keys a batch looks ahead.
const AHEAD: usize = 24;

/// What all shards of a store share.
#[derive(Debug)]
pub struct Core {
    /// As the store was made.
    pub options: Options,
    /// Layout of its rows.
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
    /// Filter of keys without a row.
    pub filter: Filter,
    /// Keys that were removed since the last file of the chain.
    pub removed: Vec<i64>,
    /// There were more than writing all rows would cost: `removed` is given up.
    pub untold: bool,
    /// Set while a snapshot waits to read this shard.
    pub saving: Option<Saving>,
}

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
            untold: false,
            saving: None,
        })
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// The cold ones of those.
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

    /// Asks the processor for what the keys after `keys[i]` need of the index: for the first line of one,
    /// and for the second of another whose first has come.
    #[inline(always)]
    pub fn prefetch_two(&self, keys: &[i64], i: usize) {
        if let Some(&key) = keys.get(i + AHEAD) {
            self.map.prefetch(hash::mix(key));
        }
        if let Some(&key) = keys.get(i + AHEAD / 2) {
            self.map.prefetch_second(hash::mix(key), key);
        }
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
        self.tell(core, key);
        true
    }

    /// Writes down that a key went, for the next delta. Keys come and go without end where nobody asks for
    /// deltas: a list that is longer than the rows that are left is given up, and that delta has them all.
    fn tell(&mut self, core: &Core, key: i64) {
        if self.untold || !core.tracking.load(Ordering::Relaxed) {
            return;
        }
        self.removed.push(key);
        if self.removed.len() > LISTED + self.map.len() * core.record() / size_of::<i64>() {
            self.removed = Vec::new();
            self.untold = true;
        }
    }

    /// Takes all rows away. The caller gives the arena back once all shards are empty.
    ///
    /// # Errors
    /// Where the system has no memory; nothing has changed then.
    pub fn clear(&mut self, core: &Core, number: usize) -> Result<()> {
        let empty = Shard::new(&core.options, core.bits, number, &core.pool)?;
        let all: Vec<(i64, u32)> =
            match self.saving.is_some() || core.tracking.load(Ordering::Relaxed) {
                true => self.map.iter().collect(),
                false => Vec::new(),
            };
        for &(key, id) in &all {
            self.keep(core, id, key);
        }
        self.map = empty.map;
        for (key, _) in all {
            self.tell(core, key);
        }
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
            let slots = &mut slots[..core.layout.slots * 4];
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
}
