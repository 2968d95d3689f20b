//! The work of a store: shards behind locks, and batches over them. [`crate::Store`] is its public face
//! and says what each call means.
//!
//! A lookup holds every shard's lock for reading and cuts the batch into runs of positions, one thread
//! each; nothing is sorted. What has no row is taken up after, shard by shard, with the lock held for
//! writing. Updates are sorted by shard first: a shard's part of the batch is done by one thread, in
//! the order of the batch, so that results depend neither on threads nor on the number of shards.

use crate::arena::Arena;
use crate::batch::{Parts, Rows};
use crate::error::{Result, invalid};
use crate::hash;
use crate::index::Bucket;
use crate::options::{Admission, Eviction, Keys, Optimizer, Options};
use crate::pool::Threads;
use crate::row::Layout;
use crate::shard::{Core, Counts, Record, Shard};
use crate::snapshot::Saver;
use crate::strings::Strings;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Keys of a batch that one thread takes at a time, at least.
const TASK: usize = 2048;
/// Batches up to this size lock only the shards that they need.
const SMALL: usize = 24;
/// How many keys a lookup is ahead with each of its stages.
const AHEAD: usize = 32;

/// Keys of a lookup on their way.
struct Block<'a> {
    hashes: [u64; AHEAD],
    lines: [Option<&'a Bucket>; AHEAD],
    ids: [u32; AHEAD],
}

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
    /// Of that, rows with slots and metadata.
    pub row_bytes: u64,
    /// Of that, the indexes.
    pub index_bytes: u64,
    /// Of that, admission.
    pub admission_bytes: u64,
    /// Of that, strings.
    pub string_bytes: u64,
    /// Rows that were given back and wait for a key; they are in `row_bytes`.
    pub free_rows: u64,
    /// Shards whose index is growing.
    pub growing: u64,
    /// Keys that were looked up.
    pub lookups: u64,
    /// Of those, keys without a row.
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

/// Whole rows of a shard.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exported {
    /// Whose.
    pub keys: Vec<i64>,
    /// Values and slots as f32, row by row.
    pub rows: Vec<f32>,
    /// Updates of each.
    pub frequencies: Vec<u32>,
    /// Step of the last update of each.
    pub versions: Vec<u32>,
}

/// The steps that were applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The last.
    pub step: Option<u32>,
    /// How many different ones: `t` of Adam's bias correction.
    pub count: u64,
    /// When eviction ran by itself.
    pub evicted: u32,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Table {
    pub(crate) core: Core,
    pub(crate) shards: Box<[RwLock<Shard>]>,
    pub(crate) threads: Threads,
    pub(crate) clock: Mutex<Clock>,
    pub(crate) strings: Strings,
    pub(crate) counters: Counters,
    /// The last snapshot or delta; held while one is written.
    pub(crate) saver: Mutex<Saver>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn reading(shard: &RwLock<Shard>) -> RwLockReadGuard<'_, Shard> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn writing(shard: &RwLock<Shard>) -> RwLockWriteGuard<'_, Shard> {
    shard.write().unwrap_or_else(PoisonError::into_inner)
}

fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Table {
    /// An empty store.
    ///
    /// # Errors
    /// Options that cannot be, or no memory.
    pub fn new(options: Options) -> Result<Table> {
        options.check()?;
        let bits = options.shards.trailing_zeros();
        let layout = Layout::of(&options);
        let pool = Arc::default();
        let shards = (0..options.shards as usize)
            .map(|number| Shard::new(&options, bits, number, &pool).map(RwLock::new))
            .collect::<Result<_>>()?;
        Ok(Table {
            threads: Threads::new(options.threads as usize),
            core: Core {
                arena: Arena::new(layout.stride()),
                layout,
                pool,
                bits,
                options,
                epoch: AtomicU8::new(1),
                tracking: AtomicBool::new(false),
            },
            shards,
            clock: Mutex::default(),
            strings: Strings::default(),
            counters: Counters::default(),
            saver: Mutex::default(),
        })
    }

    /// What it was made with.
    pub fn options(&self) -> &Options {
        &self.core.options
    }

    /// Values per row.
    pub fn dim(&self) -> usize {
        self.core.layout.dim
    }

    /// Rows.
    pub fn len(&self) -> u64 {
        self.shards.iter().map(|s| reading(s).len() as u64).sum()
    }

    pub(crate) fn home(&self, key: i64) -> usize {
        hash::shard(hash::mix(key), self.core.bits)
    }

    fn parts(&self, keys: &[i64]) -> Parts {
        Parts::new(keys.len(), self.shards.len(), |i| self.home(keys[i]))
    }

    fn fits(&self, what: &str, keys: &[i64], values: usize) -> Result<()> {
        let (n, dim) = (keys.len(), self.dim());
        if n > (u32::MAX / 2) as usize {
            return invalid(format!(
                "a batch of {n} keys is too large: at most 2147483647"
            ));
        }
        if values != n * dim {
            return invalid(format!(
                "{n} keys of dim {dim} need {} {what}, got {values}",
                n * dim
            ));
        }
        Ok(())
    }

    /// Reads what is there into `out`; gives `absent` every position without a row.
    fn gather(
        &self,
        shards: &[&Shard],
        keys: &[i64],
        out: &mut [f32],
        mut absent: impl FnMut(usize, &mut [f32]),
    ) {
        let core = &self.core;
        let (dim, bits) = (core.layout.dim, core.bits);
        let bytes = core.layout.value_bytes();
        // Three stages, a block of keys apart: the line of the index, the row that it names, the copy.
        let mut ring = [(); 3].map(|()| Block {
            hashes: [0; AHEAD],
            lines: [None; AHEAD],
            ids: [0; AHEAD],
        });
        let blocks = keys.len().div_ceil(AHEAD);
        let part = |turn: usize| turn * AHEAD..keys.len().min((turn + 1) * AHEAD);
        for turn in 0..blocks + 2 {
            if turn < blocks {
                let block = &mut ring[turn % 3];
                for (i, &key) in keys[part(turn)].iter().enumerate() {
                    let hash = hash::mix(key);
                    block.hashes[i] = hash;
                    block.lines[i] = shards[hash::shard(hash, bits)].map().line(hash);
                }
            }
            if let Some(turn) = turn.checked_sub(1).filter(|&turn| turn < blocks) {
                let block = &mut ring[turn % 3];
                for (i, &key) in keys[part(turn)].iter().enumerate() {
                    let hash = block.hashes[i];
                    let map = shards[hash::shard(hash, bits)].map();
                    let id = map.find_from(block.lines[i], hash, key);
                    if id != 0 {
                        core.arena.prefetch(id, bytes.min(1024));
                    }
                    block.ids[i] = id;
                }
            }
            if let Some(turn) = turn.checked_sub(2) {
                let block = &ring[turn % 3];
                for (i, at) in part(turn).enumerate() {
                    let row = &mut out[at * dim..(at + 1) * dim];
                    match block.ids[i] {
                        0 => absent(at, row),
                        id => shards[0].read(core, id, row),
                    }
                }
            }
        }
    }

    fn all(&self) -> Vec<RwLockReadGuard<'_, Shard>> {
        self.shards.iter().map(reading).collect()
    }

    fn task(&self, n: usize) -> usize {
        n.div_ceil(self.threads.count() * 4).max(TASK)
    }

    /// The same rows with fresh slots of another optimizer.
    pub fn with_optimizer(&self, optimizer: Optimizer) -> Result<Table> {
        let options = Options {
            optimizer,
            ..self.core.options.clone()
        };
        options.check()?;
        let same = std::mem::discriminant(&optimizer)
            == std::mem::discriminant(&self.core.options.optimizer);
        let clock = *lock(&self.clock);
        if !same && clock.count > 0 {
            let kind = |optimizer: &Optimizer| {
                let value = serde_json::to_value(optimizer).unwrap_or_default();
                value["kind"].as_str().unwrap_or_default().to_owned()
            };
            return invalid(format!(
                "rows of this embedding have slots of {:?} after {} steps: it cannot go on with {:?}",
                kind(&self.core.options.optimizer),
                clock.count,
                kind(&optimizer)
            ));
        }
        let table = Table::new(options)?;
        let mut bytes = vec![0; table.core.layout.bytes()];
        let mut whole = vec![0.0; table.core.layout.width()];
        let dim = self.dim();
        for shard in &self.shards {
            let shard = reading(shard);
            let mut failed = Ok(());
            shard.scan(&self.core, |key, id, meta| {
                if failed.is_err() {
                    return;
                }
                if same {
                    shard.whole(&self.core, id, &mut whole);
                } else {
                    let (values, slots) = whole.split_at_mut(dim);
                    shard.read(&self.core, id, values);
                    optimizer.start(values, slots);
                }
                table.core.layout.pack(&whole, &mut bytes);
                let record = Record {
                    key,
                    version: meta.version,
                    frequency: meta.frequency(),
                    row: &bytes,
                };
                failed = writing(&table.shards[table.home(key)]).put(&table.core, &record);
            });
            failed?;
            for (key, n) in shard.filter.counts() {
                writing(&table.shards[table.home(key)]).filter.set(key, n)?;
            }
        }
        *lock(&table.clock) = clock;
        self.strings.each(|id, name| table.strings.put(id, name));
        // Every row is marked as changed: the next delta has them all, after what it had to say before.
        lock(&table.saver).follow(&lock(&self.saver));
        for (new, old) in table.shards.iter().zip(&self.shards) {
            writing(new).removed.clone_from(&reading(old).removed);
        }
        let tracking = self.core.tracking.load(Ordering::Relaxed);
        table.core.tracking.store(tracking, Ordering::Relaxed);
        Ok(table)
    }

    /// See [`crate::Store::lookup`].
    pub fn lookup(&self, keys: &[i64], step: u32, out: &mut [f32]) -> Result<()> {
        self.fits("values of room", keys, out.len())?;
        let (core, dim) = (&self.core, self.dim());
        let mut missing: Vec<u32> = Vec::new();
        if keys.len() <= SMALL {
            for (i, (&key, row)) in keys.iter().zip(out.chunks_exact_mut(dim)).enumerate() {
                let shard = reading(&self.shards[self.home(key)]);
                match shard.find(hash::mix(key), key) {
                    Some(id) => shard.read(core, id, row),
                    None => missing.push(i as u32),
                }
            }
        } else {
            let guards = self.all();
            let shards: Vec<&Shard> = guards.iter().map(|guard| &**guard).collect();
            let task = self.task(keys.len());
            let rows = Rows::new(out, dim);
            let found: Mutex<Vec<(usize, Vec<u32>)>> = Mutex::default();
            self.threads.run(keys.len().div_ceil(task), |i| {
                let start = i * task;
                let keys = &keys[start..keys.len().min(start + task)];
                // SAFETY: tasks have positions of their own.
                let out = unsafe { rows.span(start, keys.len()) };
                let mut misses = Vec::new();
                self.gather(&shards, keys, out, |at, _| misses.push((start + at) as u32));
                if !misses.is_empty() {
                    lock(&found).push((i, misses));
                }
                Ok(())
            })?;
            let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
            found.sort_unstable_by_key(|(task, _)| *task);
            missing = found.into_iter().flat_map(|(_, misses)| misses).collect();
        }
        add(&self.counters.lookups, keys.len());
        if !missing.is_empty() {
            self.admit(keys, step, out, &missing)?;
        }
        Ok(())
    }

    /// The second half of [`crate::Store::lookup`]: what had no row.
    fn admit(&self, keys: &[i64], step: u32, out: &mut [f32], missing: &[u32]) -> Result<()> {
        let core = &self.core;
        let parts = Parts::new(missing.len(), self.shards.len(), |i| {
            self.home(keys[missing[i] as usize])
        });
        let rows = Rows::new(out, self.dim());
        self.threads.run(self.tasks(missing.len()), |task| {
            for number in self.share(task, missing.len()) {
                let part = parts.of(number);
                if part.is_empty() {
                    continue;
                }
                let (mut inserted, mut refused) = (0, 0);
                let mut shard = writing(&self.shards[number]);
                for (i, &at) in part.iter().enumerate() {
                    if let Some(&next) = part.get(i + AHEAD / 2) {
                        shard.prefetch(hash::mix(keys[missing[next as usize] as usize]));
                    }
                    let position = missing[at as usize] as usize;
                    let key = keys[position];
                    // SAFETY: each position is in one part once.
                    let row = unsafe { rows.row(position) };
                    match shard.find_or_admit(core, hash::mix(key), key, step)? {
                        (Some(id), fresh) => {
                            inserted += usize::from(fresh);
                            shard.read(core, id, row);
                        }
                        (None, _) => {
                            refused += 1;
                            core.absent(key, row);
                        }
                    }
                }
                add(&self.counters.inserted, inserted);
                add(&self.counters.refused, refused);
                add(&self.counters.missing, inserted + refused);
            }
            Ok(())
        })
    }

    /// How many tasks a batch of `n` keys that is sorted by shard makes.
    fn tasks(&self, n: usize) -> usize {
        match n <= TASK / 4 {
            true => 1,
            false => self.shards.len(),
        }
    }

    /// The shards of a task.
    fn share(&self, task: usize, n: usize) -> std::ops::Range<usize> {
        match self.tasks(n) {
            1 => 0..self.shards.len(),
            _ => task..task + 1,
        }
    }

    /// See [`crate::Store::lookup_infer`].
    pub fn lookup_infer(
        &self,
        keys: &[i64],
        out: &mut [f32],
        found: Option<&mut [u8]>,
    ) -> Result<()> {
        self.fits("values of room", keys, out.len())?;
        if let Some(found) = &found
            && found.len() != keys.len()
        {
            return invalid(format!(
                "{} keys need as many places for `found`, got {}",
                keys.len(),
                found.len()
            ));
        }
        let (core, dim) = (&self.core, self.dim());
        let mut unused = Vec::new();
        let found = match found {
            Some(found) => found,
            None => {
                unused.resize(keys.len(), 0);
                &mut unused
            }
        };
        found.fill(1);
        if keys.len() <= SMALL {
            for ((&key, row), found) in keys.iter().zip(out.chunks_exact_mut(dim)).zip(&mut *found)
            {
                let shard = reading(&self.shards[self.home(key)]);
                match shard.find(hash::mix(key), key) {
                    Some(id) => shard.read(core, id, row),
                    None => {
                        *found = 0;
                        core.absent(key, row);
                    }
                }
            }
        } else {
            let guards = self.all();
            let shards: Vec<&Shard> = guards.iter().map(|guard| &**guard).collect();
            let task = self.task(keys.len());
            let (rows, flags) = (Rows::new(out, dim), Rows::new(&mut *found, 1));
            self.threads.run(keys.len().div_ceil(task), |i| {
                let start = i * task;
                let keys = &keys[start..keys.len().min(start + task)];
                // SAFETY: tasks have positions of their own.
                let (out, flags) =
                    unsafe { (rows.span(start, keys.len()), flags.span(start, keys.len())) };
                self.gather(&shards, keys, out, |at, row| {
                    flags[at] = 0;
                    core.absent(keys[at], row);
                });
                Ok(())
            })?;
        }
        let missing = found.iter().filter(|&&found| found == 0).count();
        add(&self.counters.lookups, keys.len());
        add(&self.counters.missing, missing);
        Ok(())
    }

    /// See [`crate::Store::apply`].
    pub fn apply(&self, keys: &[i64], gradients: &[f32], step: u32, lr: Option<f32>) -> Result<()> {
        self.fits("gradients", keys, gradients.len())?;
        self.finite("gradient", keys, gradients, self.dim())?;
        let lr = lr.unwrap_or(self.core.options.optimizer.lr());
        if !lr.is_finite() || lr < 0.0 {
            return invalid(format!("learning rate {lr} cannot be: finite, at least 0"));
        }
        let t = {
            let mut clock = lock(&self.clock);
            if clock.step != Some(step) {
                clock.step = Some(step);
                clock.count += 1;
            }
            clock.count
        };
        let plan = self.core.options.optimizer.step(t, lr);
        let admits = self.core.options.admission == Admission::None;
        let parts = self.parts(keys);
        let total: Mutex<Counts> = Mutex::default();
        self.threads.run(self.tasks(keys.len()), |task| {
            for number in self.share(task, keys.len()) {
                let positions = parts.of(number);
                if positions.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                let batch = (keys, gradients);
                let counts = shard.apply(&self.core, &plan, step, batch, positions, admits)?;
                drop(shard);
                let mut total = lock(&total);
                total.updated += counts.updated;
                total.inserted += counts.inserted;
                total.dropped += counts.dropped;
            }
            Ok(())
        })?;
        let total = *lock(&total);
        add(&self.counters.updated, total.updated as usize);
        add(&self.counters.inserted, total.inserted as usize);
        add(&self.counters.dropped, total.dropped as usize);
        self.evict_if_due(step)
    }

    fn finite(&self, what: &str, keys: &[i64], values: &[f32], width: usize) -> Result<()> {
        // A block at a time: no branch inside, so that it runs at the speed of memory.
        let bad = |part: &[f32]| {
            part.iter()
                .fold(0u32, |worst, v| worst.max(v.to_bits() & 0x7fff_ffff))
                >= 0x7f80_0000
        };
        let block = 4096 * width;
        for (i, part) in values.chunks(block).enumerate() {
            if bad(part)
                && let Some(at) = part.iter().position(|v| !v.is_finite())
            {
                let at = i * block + at;
                let row = at / width;
                return invalid(format!(
                    "the {what} of key {} (row {row}, column {}) is {}: nothing was changed",
                    keys[row],
                    at % width,
                    values[at]
                ));
            }
        }
        Ok(())
    }

    /// See [`crate::Store::upsert`].
    pub fn upsert(&self, keys: &[i64], values: &[f32], step: u32) -> Result<()> {
        self.fits("values", keys, values.len())?;
        self.finite("value", keys, values, self.dim())?;
        let (parts, dim) = (self.parts(keys), self.dim());
        self.threads.run(self.tasks(keys.len()), |task| {
            for number in self.share(task, keys.len()) {
                let positions = parts.of(number);
                if positions.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                let mut inserted = 0;
                for (i, &at) in positions.iter().enumerate() {
                    if let Some(&next) = positions.get(i + AHEAD / 2) {
                        shard.prefetch(hash::mix(keys[next as usize]));
                    }
                    let at = at as usize;
                    let values = &values[at * dim..(at + 1) * dim];
                    inserted += usize::from(shard.set(&self.core, keys[at], values, step)?);
                }
                add(&self.counters.inserted, inserted);
            }
            Ok(())
        })
    }

    /// See [`crate::Store::remove`].
    pub fn remove(&self, keys: &[i64]) -> u64 {
        let parts = self.parts(keys);
        let mut gone = 0;
        for (number, shard) in self.shards.iter().enumerate() {
            let positions = parts.of(number);
            if positions.is_empty() {
                continue;
            }
            let mut shard = writing(shard);
            for &at in positions {
                let key = keys[at as usize];
                gone += u64::from(shard.remove(&self.core, hash::mix(key), key));
            }
        }
        self.counters.removed.fetch_add(gone, Ordering::Relaxed);
        gone
    }

    /// See [`crate::Store::clear`].
    pub fn clear(&self) -> Result<()> {
        let mut guards: Vec<_> = self.shards.iter().map(writing).collect();
        for (number, shard) in guards.iter_mut().enumerate() {
            shard.clear(&self.core, number)?;
        }
        // SAFETY: every shard is locked for writing and has no row.
        unsafe { self.core.arena.reset() };
        *lock(&self.clock) = Clock::default();
        self.strings.clear();
        Ok(())
    }

    /// See [`crate::Store::export`].
    pub fn export(&self, mut each: impl FnMut(i64, &[f32], u32, u32)) {
        for shard in &self.shards {
            reading(shard).export(&self.core, |key, values, meta| {
                each(key, values, meta.frequency(), meta.version);
            });
        }
    }

    /// Whole rows, as they are: `rows` [n, dim * (1 + slots)], the values (widened to f32) and then each
    /// slot. Keys without a row get one as in [`crate::Store::lookup`]; those that are not let in give their
    /// first values and slots, and 0 in `admitted`.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit, with nothing changed; no memory.
    pub fn take_rows(
        &self,
        keys: &[i64],
        step: u32,
        rows: &mut [f32],
        meta: (&mut [u32], &mut [u32]),
        admitted: &mut [u8],
    ) -> Result<()> {
        let core = &self.core;
        let width = core.layout.width();
        let (frequencies, versions) = meta;
        let n = keys.len();
        if rows.len() != n * width
            || frequencies.len() != n
            || versions.len() != n
            || admitted.len() != n
        {
            return invalid(format!(
                "{n} whole rows need {} values and {n} of each other, got {}, {}, {}, {}",
                n * width,
                rows.len(),
                frequencies.len(),
                versions.len(),
                admitted.len()
            ));
        }
        let parts = self.parts(keys);
        let (rows, frequencies) = (Rows::new(rows, width), Rows::new(frequencies, 1));
        let (versions, admitted) = (Rows::new(versions, 1), Rows::new(admitted, 1));
        self.threads.run(self.tasks(n), |task| {
            for number in self.share(task, n) {
                let positions = parts.of(number);
                if positions.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                let (mut inserted, mut refused) = (0, 0);
                for (i, &at) in positions.iter().enumerate() {
                    if let Some(&next) = positions.get(i + AHEAD / 2) {
                        shard.prefetch(hash::mix(keys[next as usize]));
                    }
                    let at = at as usize;
                    let key = keys[at];
                    // SAFETY: each position is in one part once.
                    let (row, f, v, a) = unsafe {
                        (
                            rows.row(at),
                            frequencies.row(at),
                            versions.row(at),
                            admitted.row(at),
                        )
                    };
                    let (id, fresh) = shard.find_or_admit(core, hash::mix(key), key, step)?;
                    inserted += usize::from(fresh);
                    a[0] = u8::from(id.is_some());
                    match id {
                        Some(id) => {
                            let meta = shard.meta(core, id);
                            (f[0], v[0]) = (meta.frequency(), meta.version);
                            shard.whole(core, id, row);
                        }
                        None => {
                            refused += 1;
                            (f[0], v[0]) = (0, step);
                            let (values, slots) = row.split_at_mut(core.layout.dim);
                            core.absent(key, values);
                            core.options.optimizer.start(values, slots);
                        }
                    }
                }
                add(&self.counters.lookups, positions.len());
                add(&self.counters.missing, inserted + refused);
                add(&self.counters.inserted, inserted);
                add(&self.counters.refused, refused);
            }
            Ok(())
        })
    }

    /// Writes whole rows back, with their frequencies and versions; rows that are not there are made.
    /// Values of 16 bits are rounded: what [`crate::Store::take_rows`] gave comes back as it was.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit or a value is not finite, with nothing
    /// changed; no memory.
    pub fn put_rows(
        &self,
        keys: &[i64],
        rows: &[f32],
        frequencies: &[u32],
        versions: &[u32],
    ) -> Result<()> {
        let core = &self.core;
        let width = core.layout.width();
        let n = keys.len();
        if rows.len() != n * width || frequencies.len() != n || versions.len() != n {
            return invalid(format!(
                "{n} whole rows need {} values and {n} of each other, got {}, {}, {}",
                n * width,
                rows.len(),
                frequencies.len(),
                versions.len()
            ));
        }
        self.finite("row", keys, rows, width)?;
        let parts = self.parts(keys);
        self.threads.run(self.tasks(n), |task| {
            let mut bytes = vec![0u8; core.layout.bytes()];
            for number in self.share(task, n) {
                let positions = parts.of(number);
                if positions.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                for &at in positions {
                    let at = at as usize;
                    core.layout
                        .pack(&rows[at * width..(at + 1) * width], &mut bytes);
                    shard.put(
                        core,
                        &Record {
                            key: keys[at],
                            version: versions[at],
                            frequency: frequencies[at],
                            row: &bytes,
                        },
                    )?;
                }
            }
            Ok(())
        })
    }

    /// See [`crate::Store::export_shard`].
    pub fn export_shard(&self, number: usize) -> Result<Exported> {
        let Some(shard) = self.shards.get(number) else {
            return invalid(format!(
                "there are {} shards, not {number}",
                self.shards.len()
            ));
        };
        let shard = reading(shard);
        let mut out = Exported::default();
        let width = self.core.layout.width();
        shard.scan(&self.core, |key, id, meta| {
            out.keys.push(key);
            out.frequencies.push(meta.frequency());
            out.versions.push(meta.version);
            let start = out.rows.len();
            out.rows.resize(start + width, 0.0);
            shard.whole(&self.core, id, &mut out.rows[start..]);
        });
        Ok(out)
    }

    /// See [`crate::Store::meta`].
    pub fn meta(&self, keys: &[i64]) -> Vec<Option<(u32, u32)>> {
        let meta = |&key: &i64| {
            let shard = reading(&self.shards[self.home(key)]);
            let id = shard.find(hash::mix(key), key)?;
            let meta = shard.meta(&self.core, id);
            Some((meta.frequency(), meta.version))
        };
        keys.iter().map(meta).collect()
    }

    /// See [`crate::Store::intern`].
    pub fn intern(
        &self,
        bytes: &[u8],
        offsets: &[u64],
        insert: bool,
        out: &mut [i64],
    ) -> Result<()> {
        if self.core.options.keys != Keys::String {
            return invalid("keys of this embedding are int64: make it with keys=\"string\"");
        }
        if offsets.len() != out.len() + 1 {
            return invalid(format!(
                "{} strings need {} offsets, got {}",
                out.len(),
                out.len() + 1,
                offsets.len()
            ));
        }
        if offsets.windows(2).any(|pair| pair[0] > pair[1])
            || offsets.last().is_some_and(|&end| end > bytes.len() as u64)
        {
            return invalid("offsets of strings must rise and end inside the bytes");
        }
        for (id, pair) in out.iter_mut().zip(offsets.windows(2)) {
            *id = self
                .strings
                .intern(&bytes[pair[0] as usize..pair[1] as usize], insert);
        }
        Ok(())
    }

    /// See [`crate::Store::name`].
    pub fn name(&self, key: i64) -> Option<Box<[u8]>> {
        self.strings.name(key)
    }

    fn evict_if_due(&self, step: u32) -> Result<()> {
        let every = self.core.options.evict_every;
        if every == 0 || self.core.options.eviction == Eviction::None {
            return Ok(());
        }
        {
            let mut clock = lock(&self.clock);
            if step / every <= clock.evicted / every {
                return Ok(());
            }
            clock.evicted = step;
        }
        self.evict(step).map(|_| ())
    }

    /// See [`crate::Store::evict`].
    pub fn evict(&self, step: u32) -> Result<u64> {
        let policy = self.core.options.eviction;
        let gone = match policy {
            Eviction::None => 0,
            Eviction::Ttl { .. } | Eviction::L2 { .. } => {
                let gone = AtomicU64::new(0);
                self.threads.run(self.shards.len(), |number| {
                    let keys = writing(&self.shards[number]).evict(&self.core, policy, step);
                    add(&gone, keys.len());
                    Ok(())
                })?;
                gone.into_inner()
            }
            Eviction::Lru { rows } => self.keep_most(rows, |frequency, version| {
                u64::from(version) << 32 | u64::from(frequency)
            }),
            Eviction::Lfu { rows } => self.keep_most(rows, |frequency, version| {
                u64::from(frequency) << 32 | u64::from(version)
            }),
        };
        self.counters.evicted.fetch_add(gone, Ordering::Relaxed);
        self.threads.run(self.shards.len(), |number| {
            writing(&self.shards[number]).tidy()
        })?;
        if self.core.options.keys == Keys::String {
            self.strings.forget(|key| {
                reading(&self.shards[self.home(key)])
                    .find(hash::mix(key), key)
                    .is_some()
            });
        }
        Ok(gone)
    }

    /// Leaves the `rows` rows of the highest worth. What is worth the same goes in the order of its
    /// hash, so that the choice does not depend on the number of shards.
    fn keep_most(&self, rows: u64, worth: impl Fn(u32, u32) -> u64 + Sync) -> u64 {
        let mut count: HashMap<u64, u64> = HashMap::new();
        for shard in &self.shards {
            reading(shard).scan(&self.core, |_, _, meta| {
                *count
                    .entry(worth(meta.frequency(), meta.version))
                    .or_default() += 1;
            });
        }
        let total: u64 = count.values().sum();
        let Some(mut surplus) = total.checked_sub(rows).filter(|&n| n > 0) else {
            return 0;
        };
        let mut levels: Vec<(u64, u64)> = count.into_iter().collect();
        levels.sort_unstable();
        // All below `bound` go, and `surplus` of those at it.
        let mut bound = 0;
        for (level, n) in levels {
            bound = level;
            if n >= surplus {
                break;
            }
            surplus -= n;
        }
        let mut ties: Vec<u64> = Vec::new();
        let mut gone: Vec<(usize, Vec<i64>)> = Vec::new();
        for (number, shard) in self.shards.iter().enumerate() {
            let mut keys = Vec::new();
            reading(shard).scan(&self.core, |key, _, meta| {
                let worth = worth(meta.frequency(), meta.version);
                if worth < bound {
                    keys.push(key);
                } else if worth == bound {
                    ties.push(hash::mix(key));
                }
            });
            gone.push((number, keys));
        }
        ties.sort_unstable();
        let last = ties
            .get((surplus as usize).min(ties.len()).wrapping_sub(1))
            .copied();
        let mut n = 0;
        for (number, keys) in gone {
            let mut shard = writing(&self.shards[number]);
            let mut keys = keys;
            if let Some(last) = last {
                shard.scan(&self.core, |key, _, meta| {
                    if worth(meta.frequency(), meta.version) == bound && hash::mix(key) <= last {
                        keys.push(key);
                    }
                });
            }
            for key in keys {
                n += u64::from(shard.remove(&self.core, hash::mix(key), key));
            }
        }
        n
    }

    /// See [`crate::Store::stats`].
    pub fn stats(&self) -> Stats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let clock = *lock(&self.clock);
        let (strings, string_bytes) = self.strings.size();
        let (mut rows, mut index, mut admission) = (0, 0, 0);
        let (mut pending, mut free, mut growing) = (0, 0, 0);
        for shard in &self.shards {
            let shard = reading(shard);
            rows += shard.len() as u64;
            index += shard.index_bytes() as u64;
            admission += shard.filter.bytes() as u64;
            pending += shard.filter.pending() as u64;
            free += shard.free() as u64;
            growing += u64::from(shard.grows());
        }
        let row_bytes = self.core.arena.bytes();
        let (lookups, missing) = (get(&self.counters.lookups), get(&self.counters.missing));
        Stats {
            rows,
            pending,
            strings,
            bytes: row_bytes + index + admission + string_bytes,
            row_bytes,
            index_bytes: index,
            admission_bytes: admission,
            string_bytes,
            free_rows: free,
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
