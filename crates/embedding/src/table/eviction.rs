//! Which rows go: eviction over all shards.

use super::{Table, add, lock, reading, writing};
use crate::cold::Wanted;
use crate::error::Result;
use crate::hash;
use crate::options::{Eviction, Keys};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

impl Table {
    pub(super) fn evict_if_due(&self, step: u32) -> Result<()> {
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
                    let keys = writing(&self.shards[number]).evict(&self.core, policy, step)?;
                    add(&gone, keys.len());
                    Ok(())
                })?;
                gone.into_inner()
            }
            Eviction::Lru { rows } => self.keep_most(rows, |frequency, version| {
                u64::from(version) << 32 | u64::from(frequency)
            })?,
            Eviction::Lfu { rows } => self.keep_most(rows, |frequency, version| {
                u64::from(frequency) << 32 | u64::from(version)
            })?,
        };
        self.counters.evicted.fetch_add(gone, Ordering::Relaxed);
        let ages = self.ages(policy, step);
        self.threads.run(self.shards.len(), |number| {
            writing(&self.shards[number]).tidy(ages)
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

    /// Whether counts of keys without a row are forgotten now, where nobody looked the key up since the
    /// last time: after the life of a row, or when there are more counts than rows may be. To forget
    /// them with every eviction would let in no key that comes less often.
    fn ages(&self, policy: Eviction, step: u32) -> bool {
        let pending = || -> u64 {
            let each = self.shards.iter().map(|s| reading(s).filter.pending());
            each.sum::<usize>() as u64
        };
        match policy {
            Eviction::Ttl { steps } => {
                let mut clock = lock(&self.clock);
                let due = step.saturating_sub(clock.aged) >= steps;
                if due {
                    clock.aged = step;
                }
                due
            }
            Eviction::Lru { rows } | Eviction::Lfu { rows } => pending() > rows,
            Eviction::L2 { .. } | Eviction::None => pending() > self.len(),
        }
    }

    /// Leaves the `rows` rows of the highest worth. What is worth the same goes in the order of its
    /// hash, so that the choice does not depend on the number of shards.
    fn keep_most(&self, rows: u64, worth: impl Fn(u32, u32) -> u64 + Sync) -> Result<u64> {
        let mut count: HashMap<u64, u64> = HashMap::new();
        for shard in &self.shards {
            reading(shard).scan(&self.core, Wanted::All, |_, meta, _| {
                *count
                    .entry(worth(meta.frequency(), meta.version))
                    .or_default() += 1;
            })?;
        }
        let total: u64 = count.values().sum();
        let Some(mut surplus) = total.checked_sub(rows).filter(|&n| n > 0) else {
            return Ok(0);
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
            reading(shard).scan(&self.core, Wanted::All, |key, meta, _| {
                let worth = worth(meta.frequency(), meta.version);
                if worth < bound {
                    keys.push(key);
                } else if worth == bound {
                    ties.push(hash::mix(key));
                }
            })?;
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
                shard.scan(&self.core, Wanted::All, |key, meta, _| {
                    if worth(meta.frequency(), meta.version) == bound && hash::mix(key) <= last {
                        keys.push(key);
                    }
                })?;
            }
            for key in keys {
                n += u64::from(shard.remove(&self.core, hash::mix(key), key));
            }
        }
        Ok(n)
    }
}
