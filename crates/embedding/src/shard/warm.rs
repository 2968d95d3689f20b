//! Which rows of a shard are in memory, where the store has a second tier.
//!
//! Rows come back when training meets them: a batch brings all that it needs of a shard at once
//! ([`Shard::warm`]). They go before a batch needs their room ([`Shard::cool`]), an eighth of the shard at
//! a time, so that one look at its rows serves many. So a shard holds up to its share of `tier.rows`, and
//! besides what one batch brings.
//!
//! Those go that were updated least often, where each mean age without an update halves what counts: the
//! order is that of use in the long run, and rows whose time is over go all the same.

use super::{Core, Shard};
use crate::arena::Meta;
use crate::cold::{COLD, Disk};
use crate::error::Result;
use crate::hash;
use std::collections::HashSet;

impl Shard {
    /// The row of a key in memory, brought back where it is cold.
    ///
    /// # Errors
    /// Where it cannot be read, or there is no memory; nothing has changed then.
    #[inline(always)]
    pub fn find_warm(&mut self, core: &Core, hash: u64, key: i64) -> Result<Option<u32>> {
        match self.find(hash, key) {
            Some(id) if id & COLD != 0 => {
                self.fetch(core, &[(id, key)])?;
                Ok(self.find(hash, key))
            }
            found => Ok(found),
        }
    }

    /// Makes room for a batch of keys, and brings those of its rows back that are cold.
    ///
    /// # Errors
    /// Where rows cannot be written or read, or there is no memory; each row is where it was, or in its
    /// new place.
    pub fn warm(&mut self, core: &Core, keys: &[i64]) -> Result<()> {
        if core.disk.is_none() {
            return Ok(());
        }
        self.cool(core, keys.len())?;
        if self.cold.rows() == 0 {
            return Ok(());
        }
        let mut wanted: Vec<(u32, i64)> = Vec::new();
        for (i, &key) in keys.iter().enumerate() {
            self.prefetch_two(keys, i);
            match self.find(hash::mix(key), key) {
                Some(id) if id & COLD != 0 => wanted.push((id, key)),
                _ => {}
            }
        }
        // In the order of the file, and each once.
        wanted.sort_unstable();
        wanted.dedup();
        self.fetch(core, &wanted)
    }

    /// Brings cold rows back, each with its key.
    fn fetch(&mut self, core: &Core, wanted: &[(u32, i64)]) -> Result<()> {
        let (Some(disk), false) = (&core.disk, wanted.is_empty()) else {
            return Ok(());
        };
        let ids: Vec<u32> = wanted.iter().map(|&(id, _)| id).collect();
        let cold = std::mem::take(&mut self.cold);
        let read = cold.read(disk, &ids, |i, found| {
            if found.key != wanted[i].1 {
                return disk.broken();
            }
            if let Some(&(_, key)) = wanted.get(i + super::AHEAD / 2) {
                self.map.prefetch(hash::mix(key));
            }
            if let Some(&id) = self.free.iter().nth_back(super::AHEAD / 2) {
                core.arena.prefetch(id, core.layout.bytes().min(512));
            }
            let id = self.take(core)?;
            // SAFETY: see the head of `shard`; the row is new.
            unsafe {
                core.arena.row_mut(id)[..found.row.len()].copy_from_slice(found.row);
                core.arena.set_meta(id, found.meta);
            }
            self.map.replace(hash::mix(found.key), found.key, id);
            Ok(())
        });
        self.cold = cold;
        // What came back has left its place, also where a later one could not be read.
        let stayed: HashSet<u32> = match read {
            Ok(()) => HashSet::new(),
            Err(_) => self.map.iter().map(|(_, id)| id).collect(),
        };
        for &id in ids.iter().filter(|id| !stayed.contains(id)) {
            self.cold.forget(disk, id);
            self.came += 1;
        }
        read
    }

    /// Where `coming` more rows do not fit: an eighth of the rows in memory, or more, go to the file.
    ///
    /// # Errors
    /// Where they cannot be written; no row is lost.
    #[inline(always)]
    pub fn cool(&mut self, core: &Core, coming: usize) -> Result<()> {
        match &core.disk {
            Some(disk) if self.len() - self.cold.rows() + coming > core.share() => {
                self.send(core, disk, coming)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn send(&mut self, core: &Core, disk: &Disk, coming: usize) -> Result<()> {
        let mut rows: Vec<(i64, u32, Meta)> = Vec::with_capacity(self.len() - self.cold.rows());
        let warm: Vec<(i64, u32)> = self.map.iter().filter(|(_, id)| id & COLD == 0).collect();
        for (i, &(key, id)) in warm.iter().enumerate() {
            if let Some(&(_, next)) = warm.get(i + super::AHEAD) {
                core.arena.prefetch_meta(next);
            }
            rows.push((key, id, self.meta(core, id)));
        }
        let share = core.share();
        let stay = (share - share / 8).saturating_sub(coming);
        let Some(go) = rows.len().checked_sub(stay).filter(|&go| go > 0) else {
            return Ok(());
        };
        let newest = rows.iter().map(|row| row.2.version).max().unwrap_or(0);
        let age = |meta: Meta| u64::from(newest - meta.version);
        let mean = rows.iter().map(|row| age(row.2)).sum::<u64>() / rows.len() as u64 + 1;
        let worth = |meta: Meta| {
            let uses = (u64::from(meta.frequency()) + 1) << 32;
            (uses >> (age(meta) / mean).min(63), meta.version)
        };
        if go < rows.len() {
            rows.select_nth_unstable_by_key(go, |row| worth(row.2));
            rows.truncate(go);
        }
        for (i, &(key, id, meta)) in rows.iter().enumerate() {
            if let Some(next) = rows.get(i + super::AHEAD) {
                core.arena.prefetch(next.1, core.layout.bytes().min(512));
                self.map.prefetch(hash::mix(next.0));
            }
            // SAFETY: see the head of `shard`.
            let row = unsafe { core.arena.row(id) };
            let place = self
                .cold
                .push(disk, key, meta, &row[..core.layout.bytes()])?;
            self.map.replace(hash::mix(key), key, place);
            self.free.push(id);
            self.went += 1;
        }
        while let Some(number) = self.cold.emptiest(disk) {
            self.compact(disk, number)?;
        }
        Ok(())
    }

    /// Moves the rows of a segment, so that it is empty.
    fn compact(&mut self, disk: &Disk, number: u32) -> Result<()> {
        let mut rows: Vec<(u32, i64, Meta, Vec<u8>)> = Vec::new();
        self.cold.segment(disk, number, |id, found| {
            if self.find(hash::mix(found.key), found.key) == Some(id) {
                rows.push((id, found.key, found.meta, found.row.to_vec()));
            }
        })?;
        for (id, key, meta, row) in rows {
            let place = self.cold.push(disk, key, meta, &row)?;
            self.map.replace(hash::mix(key), key, place);
            self.cold.forget(disk, id);
        }
        Ok(())
    }
}
