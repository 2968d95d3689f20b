//! The work of a store: shards behind locks, and batches over them. [`crate::Store`] is its public face
//! and says what each call means.
//!
//! A lookup holds every shard's lock for reading and cuts the batch into runs of positions, one thread
//! each; nothing is sorted. What has no row is taken up after, shard by shard, with the lock held for
//! writing. Updates are sorted by shard first: a shard's part of the batch is done by one thread, in
//! the order of the batch, so that results depend neither on threads nor on the number of shards.

mod eviction;
mod lookup;
mod stats;
mod whole;

pub use stats::Stats;
pub use whole::Exported;

use crate::arena::Arena;
use crate::batch::{Part, Parts};
use crate::cold::{COLD, Disk, Wanted};
use crate::error::{Result, invalid};
use crate::hash;
use crate::options::{Admission, Keys, Optimizer, Options};
use crate::pool::Threads;
use crate::row::Layout;
use crate::saver::Saver;
use crate::shard::{Core, Counts, Record, Shard};
use crate::strings::Strings;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Keys of a batch that one thread takes at a time, at least.
const TASK: usize = 2048;
/// Batches up to this size lock only the shards that they need.
const SMALL: usize = 24;
/// The steps that were applied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The last.
    pub step: Option<u32>,
    /// How many different ones: `t` of Adam's bias correction.
    pub count: u64,
    /// When eviction ran by itself.
    pub evicted: u32,
    /// When counts of admission that rested were forgotten.
    pub aged: u32,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Table {
    pub(crate) core: Core,
    pub(crate) shards: Box<[RwLock<Shard>]>,
    pub(crate) threads: Threads,
    pub(crate) clock: Mutex<Clock>,
    pub(crate) strings: Strings,
    pub(crate) counters: stats::Counters,
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
                disk: match &options.tier {
                    Some(tier) => Some(Disk::new(&tier.path, layout.bytes())?),
                    None => None,
                },
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
            counters: stats::Counters::default(),
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
        let batch = keys.iter().enumerate().map(|(i, &key)| (i as u32, key));
        Parts::new(batch, self.shards.len(), |key| self.home(key))
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
            shard.scan(&self.core, Wanted::All, |key, meta, row| {
                if failed.is_err() {
                    return;
                }
                if same {
                    self.core.layout.unpack(row, &mut whole);
                } else {
                    let (values, slots) = whole.split_at_mut(dim);
                    self.core.layout.read(row, values);
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
            })?;
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
            let (mut new, old) = (writing(new), reading(old));
            new.removed.clone_from(&old.removed);
            new.untold = old.untold;
        }
        let tracking = self.core.tracking.load(Ordering::Relaxed);
        table.core.tracking.store(tracking, Ordering::Relaxed);
        Ok(table)
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
                let part = parts.of(number);
                if part.keys.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                let counts = shard.apply(&self.core, &plan, step, part, gradients, admits)?;
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
                let Part { keys, positions } = parts.of(number);
                if keys.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                let mut inserted = 0;
                for (i, (&key, &at)) in keys.iter().zip(positions).enumerate() {
                    shard.prefetch_two(keys, i);
                    let at = at as usize;
                    let values = &values[at * dim..(at + 1) * dim];
                    inserted += usize::from(shard.set(&self.core, key, values, step)?);
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
            let keys = parts.of(number).keys;
            if keys.is_empty() {
                continue;
            }
            let mut shard = writing(shard);
            for &key in keys {
                gone += u64::from(shard.remove(&self.core, hash::mix(key), key));
            }
        }
        self.counters.removed.fetch_add(gone, Ordering::Relaxed);
        gone
    }

    /// See [`crate::Store::counts`].
    pub fn counts(&self) -> (Vec<i64>, Vec<u32>) {
        self.shards
            .iter()
            .flat_map(|shard| reading(shard).filter.counts())
            .unzip()
    }

    /// See [`crate::Store::set_counts`].
    pub fn set_counts(&self, keys: &[i64], counts: &[u32]) -> Result<()> {
        if keys.len() != counts.len() {
            return invalid(format!("{} counts for {} keys", counts.len(), keys.len()));
        }
        for (&key, &n) in keys.iter().zip(counts) {
            writing(&self.shards[self.home(key)]).filter.set(key, n)?;
        }
        Ok(())
    }

    /// See [`crate::Store::counters`].
    pub fn counters(&self) -> Vec<u8> {
        self.shards
            .iter()
            .flat_map(|shard| reading(shard).filter.counters().to_vec())
            .collect()
    }

    /// See [`crate::Store::raise_counters`].
    pub fn raise_counters(&self, bytes: &[u8]) -> Result<()> {
        let each = reading(&self.shards[0]).filter.counters().len();
        if bytes.len() != each * self.shards.len() {
            return invalid(format!(
                "{} counters do not fit {}",
                bytes.len(),
                each * self.shards.len()
            ));
        }
        for (shard, part) in self.shards.iter().zip(bytes.chunks(each.max(1))) {
            writing(shard).filter.raise_counters(part);
        }
        Ok(())
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
    pub fn export(&self, mut each: impl FnMut(i64, &[f32], u32, u32)) -> Result<()> {
        for shard in &self.shards {
            reading(shard).export(&self.core, |key, values, meta| {
                each(key, values, meta.frequency(), meta.version);
            })?;
        }
        Ok(())
    }

    /// See [`crate::Store::meta`].
    pub fn meta(&self, keys: &[i64]) -> Result<Vec<Option<(u32, u32)>>> {
        let meta = |&key: &i64| {
            let shard = reading(&self.shards[self.home(key)]);
            let Some(id) = shard.find(hash::mix(key), key) else {
                return Ok(None);
            };
            let mut found = None;
            match &self.core.disk {
                Some(disk) if id & COLD != 0 => shard.cold().read(disk, &[id], |_, row| {
                    found = Some(row.meta);
                    Ok(())
                })?,
                _ => found = Some(shard.meta(&self.core, id)),
            }
            Ok(found.map(|meta| (meta.frequency(), meta.version)))
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
}
