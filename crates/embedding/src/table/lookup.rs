//! The lookup of a batch: every shard is locked for reading, each thread takes a run of positions, and
//! keys go through in blocks, so that the memory of the next block is on its way while one is read.

use super::{SMALL, TASK, Table, add, lock, reading, writing};
use crate::batch::{Part, Parts, Rows};
use crate::cold::COLD;
use crate::error::{Result, invalid};
use crate::hash;
use crate::index::Bucket;
use crate::map::OPEN;
use crate::shard::Shard;
use std::sync::{Mutex, PoisonError, RwLockReadGuard};

/// Keys that go through a stage of a lookup together.
const BLOCK: usize = 8;
/// Blocks from one stage to the next. The lines of 24 keys are on their way.
const LAG: usize = 3;
/// Blocks on their way, rounded up to a power of two.
const RING: usize = (3 * LAG + 1).next_power_of_two();

/// Keys of a lookup on their way.
struct Block<'a> {
    hashes: [u64; BLOCK],
    lines: [Option<&'a Bucket>; BLOCK],
    ids: [u32; BLOCK],
    /// A bit for each key whose first line did not say.
    open: u32,
}

impl Table {
    /// Reads what is in memory into `out`; gives `absent` every position without a row (number 0) and
    /// those of cold rows.
    fn gather(
        &self,
        shards: &[&Shard],
        keys: &[i64],
        out: &mut [f32],
        mut absent: impl FnMut(usize, u32, &mut [f32]),
    ) {
        let core = &self.core;
        let (dim, bits) = (core.layout.dim, core.bits);
        let bytes = core.layout.value_bytes();
        // Four stages, some blocks of keys apart: the line of the index, the row that it names, the rows
        // of which a second line had to say where they are, the copy.
        let mut ring = [(); RING].map(|()| Block {
            hashes: [0; BLOCK],
            lines: [None; BLOCK],
            ids: [0; BLOCK],
            open: 0,
        });
        let blocks = keys.len().div_ceil(BLOCK);
        let part = |turn: usize| turn * BLOCK..keys.len().min((turn + 1) * BLOCK);
        for turn in 0..blocks + 3 * LAG {
            if turn < blocks {
                let block = &mut ring[turn % RING];
                for (i, &key) in keys[part(turn)].iter().enumerate() {
                    let hash = hash::mix(key);
                    block.hashes[i] = hash;
                    block.lines[i] = shards[hash::shard(hash, bits)].map().line(hash);
                }
            }
            if let Some(turn) = turn.checked_sub(LAG).filter(|&turn| turn < blocks) {
                let block = &mut ring[turn % RING];
                let mut open = 0u32;
                for (i, &key) in keys[part(turn)].iter().enumerate() {
                    let hash = block.hashes[i];
                    let map = shards[hash::shard(hash, bits)].map();
                    let id = map.glance(block.lines[i], hash, key);
                    match id {
                        0 => {}
                        OPEN => open |= 1 << i,
                        id if id & COLD != 0 => {}
                        id => core.arena.prefetch(id, bytes.min(1024)),
                    }
                    block.ids[i] = id;
                }
                block.open = open;
            }
            if let Some(turn) = turn.checked_sub(2 * LAG).filter(|&turn| turn < blocks) {
                let block = &mut ring[turn % RING];
                while block.open != 0 {
                    let i = block.open.trailing_zeros() as usize;
                    block.open &= block.open - 1;
                    let hash = block.hashes[i];
                    let shard = shards[hash::shard(hash, bits)];
                    let id = shard.find(hash, keys[turn * BLOCK + i]).unwrap_or(0);
                    if id != 0 && id & COLD == 0 {
                        core.arena.prefetch(id, bytes.min(1024));
                    }
                    block.ids[i] = id;
                }
            }
            if let Some(turn) = turn.checked_sub(3 * LAG) {
                let block = &ring[turn % RING];
                for (i, at) in part(turn).enumerate() {
                    let row = &mut out[at * dim..(at + 1) * dim];
                    match block.ids[i] {
                        id if id == 0 || id & COLD != 0 => absent(at, id, row),
                        id => shards[0].read(core, id, row),
                    }
                }
            }
        }
    }

    /// Rows that stay where they are: what only reads moves nothing.
    fn read_cold(
        &self,
        shard: &Shard,
        ids: &[u32],
        key: impl Fn(usize) -> i64,
        mut each: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let Some(disk) = &self.core.disk else {
            return Ok(());
        };
        shard.cold().read(disk, ids, |i, found| {
            if found.key != key(i) {
                return disk.broken();
            }
            each(i, found.row);
            Ok(())
        })
    }

    fn all(&self) -> Vec<RwLockReadGuard<'_, Shard>> {
        self.shards.iter().map(reading).collect()
    }

    fn task(&self, n: usize) -> usize {
        n.div_ceil(self.threads.count() * 4).max(TASK)
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
                    Some(id) if id & COLD == 0 => shard.read(core, id, row),
                    _ => missing.push(i as u32),
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
                self.gather(&shards, keys, out, |at, _, _| {
                    misses.push((start + at) as u32)
                });
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
        let batch = missing.iter().map(|&at| (at, keys[at as usize]));
        let parts = Parts::new(batch, self.shards.len(), |key| self.home(key));
        let rows = Rows::new(out, self.dim());
        self.threads.run(self.tasks(missing.len()), |task| {
            for number in self.share(task, missing.len()) {
                let Part { keys, positions } = parts.of(number);
                if keys.is_empty() {
                    continue;
                }
                let (mut inserted, mut refused) = (0, 0);
                let mut shard = writing(&self.shards[number]);
                shard.warm(core, keys)?;
                for (i, (&key, &position)) in keys.iter().zip(positions).enumerate() {
                    shard.prefetch_two(keys, i);
                    if let Some(&next) = positions.get(i + 8) {
                        rows.prefetch(next as usize);
                    }
                    // SAFETY: each position is in one part once.
                    let row = unsafe { rows.row(position as usize) };
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
                    Some(id) if id & COLD == 0 => shard.read(core, id, row),
                    Some(id) => self.read_cold(
                        &shard,
                        &[id],
                        |_| key,
                        |_, values| core.layout.read(values, row),
                    )?,
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
                let mut cold: Vec<(usize, u32, usize)> = Vec::new();
                self.gather(&shards, keys, out, |at, id, row| {
                    if id == 0 {
                        flags[at] = 0;
                        core.absent(keys[at], row);
                    } else {
                        cold.push((self.home(keys[at]), id, at));
                    }
                });
                // Shard by shard, in the order of the file.
                cold.sort_unstable();
                for part in cold.chunk_by(|a, b| a.0 == b.0) {
                    let ids: Vec<u32> = part.iter().map(|&(_, id, _)| id).collect();
                    let key = |i: usize| keys[part[i].2];
                    self.read_cold(shards[part[0].0], &ids, key, |i, values| {
                        let at = part[i].2;
                        core.layout.read(values, &mut out[at * dim..(at + 1) * dim]);
                    })?;
                }
                Ok(())
            })?;
        }
        let missing = found.iter().filter(|&&found| found == 0).count();
        add(&self.counters.lookups, keys.len());
        add(&self.counters.missing, missing);
        Ok(())
    }
}
