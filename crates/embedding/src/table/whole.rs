//! Whole rows, values and slots: for caches that lend rows, and for exports.

use super::{Table, add, reading, writing};
use crate::batch::{Part, Rows};
use crate::cold::{COLD, Wanted};
use crate::error::{Result, invalid};
use crate::hash;
use crate::shard::{Record, Shard};

/// How many keys a batch is ahead of itself with rows.
const AHEAD: usize = 8;

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

impl Table {
    /// Asks the processor for what a loop over a shard's positions reads soon: the line of the index,
    /// and nearer the row with its metadata.
    #[inline(always)]
    fn ahead(&self, shard: &Shard, keys: &[i64], i: usize) {
        shard.prefetch_two(keys, i);
        if let Some(&key) = keys.get(i + AHEAD)
            && let Some(id) = shard.find(hash::mix(key), key)
            && id & COLD == 0
        {
            let arena = &self.core.arena;
            arena.prefetch(id, self.core.layout.bytes().min(512));
            arena.prefetch_meta(id);
        }
    }

    /// Whole rows, as they are: `rows` [n, dim + slots], the values (widened to f32) and then each
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
                let Part { keys, positions } = parts.of(number);
                if keys.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                shard.warm(core, keys)?;
                let (mut inserted, mut refused) = (0, 0);
                for (i, (&key, &at)) in keys.iter().zip(positions).enumerate() {
                    self.ahead(&shard, keys, i);
                    let at = at as usize;
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
                let Part { keys, positions } = parts.of(number);
                if keys.is_empty() {
                    continue;
                }
                let mut shard = writing(&self.shards[number]);
                for (i, (&key, &at)) in keys.iter().zip(positions).enumerate() {
                    self.ahead(&shard, keys, i);
                    let at = at as usize;
                    core.layout
                        .pack(&rows[at * width..(at + 1) * width], &mut bytes);
                    shard.put(
                        core,
                        &Record {
                            key,
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
        shard.scan(&self.core, Wanted::All, |key, meta, row| {
            out.keys.push(key);
            out.frequencies.push(meta.frequency());
            out.versions.push(meta.version);
            let start = out.rows.len();
            out.rows.resize(start + width, 0.0);
            self.core.layout.unpack(row, &mut out.rows[start..]);
        })?;
        Ok(out)
    }
}
