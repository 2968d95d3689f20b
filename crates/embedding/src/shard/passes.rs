//! What looks at all rows of a shard: snapshots, export and eviction.
//!
//! While a snapshot is being written, a row that belongs to it and is about to change is copied aside
//! first ([`Saving`]): the snapshot is of one instant, and training does not wait for it.

use super::{AHEAD, Core, Shard};
use crate::arena::Meta;
use crate::cold::{COLD, Wanted};
use crate::error::{Error, Result, invalid};
use crate::hash;
use crate::options::Eviction;

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

impl Shard {
    /// Before a row changes or goes: a copy for the snapshot that is being written, if it is in it.
    pub(super) fn keep(&mut self, core: &Core, id: u32, key: i64) {
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
    /// Parses the bytes of a record.
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

/// Adds a record.
fn push(out: &mut Vec<u8>, key: i64, meta: Meta, row: &[u8]) {
    out.extend_from_slice(&key.to_le_bytes());
    out.extend_from_slice(&meta.version.to_le_bytes());
    out.extend_from_slice(&meta.frequency().to_le_bytes());
    out.extend_from_slice(row);
}
