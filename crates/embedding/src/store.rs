//! A store: the public face of a [`Table`]. The table is behind a lock that every call holds for
//! reading; what replaces the whole of it (a restored snapshot, another optimizer) is made beside it and
//! put in its place, so that a call sees the old or the new one, and a failure changes nothing.

use crate::error::{Result, invalid};
use crate::options::{Optimizer, Options};
use crate::snapshot::{self, Kind, Saved};
use crate::table::{Exported, Stats, Table};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// An embedding table that grows. Every call may come from any thread.
#[derive(Debug)]
pub struct Store {
    table: RwLock<Table>,
    frozen: AtomicBool,
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// Options that cannot be, or no memory.
    pub fn new(options: Options) -> Result<Store> {
        Ok(Store {
            table: RwLock::new(Table::new(options)?),
            frozen: AtomicBool::new(false),
        })
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, make: impl FnOnce(&Table) -> Result<Option<Table>>) -> Result<()> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = make(&table)? {
            *table = made;
        }
        Ok(())
    }

    fn thawed(&self) -> Result<()> {
        match self.frozen.load(Ordering::Relaxed) {
            false => Ok(()),
            true => invalid("this embedding is frozen, and cannot change: it serves a saved model"),
        }
    }

    /// What it was made with.
    pub fn options(&self) -> Options {
        self.table().options().clone()
    }

    /// Values per row.
    pub fn dim(&self) -> usize {
        self.table().dim()
    }

    /// Rows.
    pub fn len(&self) -> u64 {
        self.table().len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// From now on (or no longer) lookups insert nothing, and everything else that changes rows is
    /// refused. Deltas and snapshots may still be read.
    pub fn freeze(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }

    /// Whether it is frozen.
    pub fn frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Another optimizer. The same one changes nothing; other numbers of the same kind count from the
    /// next step on. Another kind takes its place where no step was done yet, and slots start anew.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where steps were done with another kind, with nothing changed.
    pub fn set_optimizer(&self, optimizer: Optimizer) -> Result<()> {
        self.thawed()?;
        if self.table().options().optimizer == optimizer {
            return Ok(());
        }
        self.replace(|table| table.with_optimizer(optimizer).map(Some))
    }

    /// The values of keys, `out` [n, dim] row by row; keys without a row get one where admission lets
    /// them in, with their initial values. `step` is the global step: new rows carry it as their
    /// version. A key that is not let in gives its initial values, or zeros (`missing`).
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit, with nothing changed; no memory.
    pub fn lookup(&self, keys: &[i64], step: u32, out: &mut [f32]) -> Result<()> {
        if self.frozen() {
            return self.table().lookup_infer(keys, out, None);
        }
        self.table().lookup(keys, step, out)
    }

    /// The values of keys, with nothing changed: for inference. `found` (n long) says which have a
    /// row; the others give their initial values, or zeros (`missing`). What is read of a row is of one
    /// instant.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit.
    pub fn lookup_infer(
        &self,
        keys: &[i64],
        out: &mut [f32],
        found: Option<&mut [u8]>,
    ) -> Result<()> {
        self.table().lookup_infer(keys, out, found)
    }

    /// One optimizer step: `gradients` [n, dim] row by row. Gradients of a key that comes more than
    /// once are added up first, in the order of the batch. `lr` is the learning rate of this step, or
    /// that of the options. A key without a row gets one first if there is no admission; with admission
    /// its gradient is dropped, and counted.
    ///
    /// Adam's `t` counts the different values of `step`: a table may be applied in several calls per
    /// step. Every `evict_every` steps eviction runs after it.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit or a gradient is not finite, with nothing changed; no
    /// memory.
    pub fn apply(&self, keys: &[i64], gradients: &[f32], step: u32, lr: Option<f32>) -> Result<()> {
        self.thawed()?;
        self.table().apply(keys, gradients, step, lr)
    }

    /// Sets the values of keys, `values` [n, dim]; of a key that comes more than once the last count.
    /// Slots of rows that were there stay. No admission.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths do not fit or a value is not finite, with nothing changed; no
    /// memory.
    pub fn upsert(&self, keys: &[i64], values: &[f32], step: u32) -> Result<()> {
        self.thawed()?;
        self.table().upsert(keys, values, step)
    }

    /// Takes rows away; how many there were.
    pub fn remove(&self, keys: &[i64]) -> u64 {
        if self.frozen() {
            return 0;
        }
        self.table().remove(keys)
    }

    /// What admission has counted of keys without a row: keys and counts.
    pub fn counts(&self) -> (Vec<i64>, Vec<u32>) {
        self.table().counts()
    }

    /// Puts counts of keys back; 0 forgets a key. Nothing where admission does not count keys.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where lengths differ; no memory.
    pub fn set_counts(&self, keys: &[i64], counts: &[u32]) -> Result<()> {
        self.thawed()?;
        self.table().set_counts(keys, counts)
    }

    /// The counters of admission by a Bloom filter, shard by shard; empty without one.
    pub fn counters(&self) -> Vec<u8> {
        self.table().counters()
    }

    /// Raises each counter to what [`Store::counters`] of a store with as many shards gave: what either has
    /// counted is counted.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for another number of counters.
    pub fn raise_counters(&self, bytes: &[u8]) -> Result<()> {
        self.thawed()?;
        self.table().raise_counters(bytes)
    }

    /// Takes all rows away and gives their memory back; counts of admission and steps start anew.
    ///
    /// # Errors
    /// Where the system has no memory for empty indexes.
    pub fn clear(&self) -> Result<()> {
        self.thawed()?;
        self.table().clear()
    }

    /// Each row once, shard by shard, each shard at one instant: key, values, frequency, version.
    ///
    /// # Errors
    /// Where rows of the second tier cannot be read.
    pub fn export(&self, each: impl FnMut(i64, &[f32], u32, u32)) -> Result<()> {
        self.table().export(each)
    }

    /// Whole rows, as they are: `rows` [n, dim + slots], the values (widened to f32) and then each
    /// slot. Keys without a row get one as in [`Store::lookup`]; those that are not let in give their
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
        self.thawed()?;
        self.table().take_rows(keys, step, rows, meta, admitted)
    }

    /// Writes whole rows back, with their frequencies and versions; rows that are not there are made.
    /// Values of 16 bits are rounded: what [`Store::take_rows`] gave comes back as it was.
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
        self.thawed()?;
        self.table().put_rows(keys, rows, frequencies, versions)
    }

    /// The whole rows of one shard, at one instant, in the order of its index: keys, rows
    /// [n, dim + slots], frequencies, versions.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where there is no such shard.
    pub fn export_shard(&self, number: usize) -> Result<Exported> {
        self.table().export_shard(number)
    }

    /// Frequency and version of keys; none for those without a row.
    ///
    /// # Errors
    /// As [`Store::export`].
    pub fn meta(&self, keys: &[i64]) -> Result<Vec<Option<(u32, u32)>>> {
        self.table().meta(keys)
    }

    /// The numbers of strings, which lie one behind another in `bytes`; string `i` is
    /// `offsets[i]..offsets[i + 1]`. Without `insert` a string that is not known gets a number that has
    /// no row.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where keys are not strings or offsets do not fit.
    pub fn intern(
        &self,
        bytes: &[u8],
        offsets: &[u64],
        insert: bool,
        out: &mut [i64],
    ) -> Result<()> {
        self.table().intern(bytes, offsets, insert, out)
    }

    /// The string of a number, where keys are strings.
    pub fn name(&self, key: i64) -> Option<Box<[u8]>> {
        self.table().name(key)
    }

    /// Takes away what the eviction policy names, as of `step`; how many rows.
    ///
    /// # Errors
    /// Where the system has no memory; rows may have gone then.
    pub fn evict(&self, step: u32) -> Result<u64> {
        self.thawed()?;
        self.table().evict(step)
    }

    /// Sizes and counts.
    pub fn stats(&self) -> Stats {
        self.table().stats()
    }

    /// Writes all rows to a new file in `folder`, of one instant, while training goes on. The file is
    /// whole or not there. The last of older full snapshots stays, with what belongs to it.
    ///
    /// # Errors
    /// [`crate::Error::Io`]: older files are as they were then, and the next delta has all that this
    /// one would have had.
    pub fn snapshot(&self, folder: &Path) -> Result<Saved> {
        snapshot::into_folder(&self.table(), folder, Kind::Full)
    }

    /// Writes what changed since the last file of `folder` to a new one in it. Where that file is not the
    /// last of this store's snapshots and deltas, or more went than is left, it is a full snapshot.
    ///
    /// # Errors
    /// As [`Store::snapshot`].
    pub fn delta(&self, folder: &Path) -> Result<Saved> {
        snapshot::into_folder(&self.table(), folder, Kind::Delta)
    }

    /// Writes all rows to the file `path`, as [`Store::snapshot`]; a file that is there is replaced once
    /// the new one is whole. The next delta is what it would have been without it.
    ///
    /// # Errors
    /// [`crate::Error::Io`], with the file as it was.
    pub fn save(&self, path: &Path) -> Result<Saved> {
        snapshot::aside(&self.table(), path)
    }

    /// As [`Store::save`], into memory.
    ///
    /// # Errors
    /// No memory.
    pub fn save_bytes(&self) -> Result<Vec<u8>> {
        snapshot::into_memory(&self.table())
    }

    /// Replaces all rows by those of a snapshot: a file, or a folder of [`Store::snapshot`], of which the
    /// last full snapshot and the deltas after it are read. Lookups see the old rows until the new ones
    /// are all there. The number of shards may be another one.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Corrupt`] (which names the file and the place), or
    /// [`crate::Error::Invalid`] where dim, dtype, keys or optimizer differ; with nothing changed.
    pub fn restore(&self, path: &Path) -> Result<Saved> {
        let (table, saved) = snapshot::restore(self.table().options(), path)?;
        self.replace(|_| Ok(Some(table)))?;
        Ok(saved)
    }

    /// As [`Store::restore`], from memory.
    ///
    /// # Errors
    /// As there.
    pub fn restore_bytes(&self, bytes: &[u8]) -> Result<Saved> {
        let (table, saved) = snapshot::from_bytes(self.table().options(), bytes)?;
        self.replace(|_| Ok(Some(table)))?;
        Ok(saved)
    }

    /// Takes a delta in, while lookups go on; each row is the old one or the new one.
    ///
    /// # Errors
    /// As [`Store::restore`]; also where the delta does not follow what the store has.
    pub fn apply_delta(&self, path: &Path) -> Result<Saved> {
        snapshot::apply_delta(&self.table(), path)
    }
}
