//! Which keys get a row: the state of one shard. Every choice is a function of what this key did (and
//! for the Bloom filter of what its neighbours did), never of time or of threads.

use crate::error::Result;
use crate::hash;
use crate::index::Pool;
use crate::map::Map;
use crate::options::Admission;
use crate::philox;
use std::sync::Arc;

const GENERATION: u32 = 1 << 31;

/// What a shard remembers of keys without a row.
#[derive(Debug)]
pub enum Filter {
    /// Nothing: each key is let in.
    None,
    /// Exact counts; the highest bit is the generation in which the key was last seen.
    Counter {
        /// Key to count.
        seen: Map,
        /// How many are asked for.
        count: u32,
        /// 0 or the highest bit.
        generation: u32,
    },
    /// A counting Bloom filter.
    Bloom {
        /// One byte per counter.
        counters: Vec<u8>,
        /// Counters per key.
        hashes: u32,
        /// How many are asked for.
        count: u8,
    },
    /// A draw.
    Probability {
        /// Probability of a look-up.
        p: f64,
        /// Seed of the draws.
        seed: u64,
    },
}

impl Filter {
    /// For one of `1 << bits` shards.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn new(admission: Admission, seed: u64, bits: u32, pool: &Arc<Pool>) -> Result<Filter> {
        Ok(match admission {
            Admission::None | Admission::Counter { count: ..=1 } => Filter::None,
            Admission::Counter { count } => Filter::Counter {
                seen: Map::new(32, bits, pool)?,
                count,
                generation: 0,
            },
            Admission::Bloom {
                count,
                capacity,
                false_positives,
            } => {
                let keys = (capacity as f64 / f64::from(1u32 << bits)).max(16.0);
                let per_key = -false_positives.ln() / std::f64::consts::LN_2.powi(2);
                Filter::Bloom {
                    counters: vec![0; (keys * per_key).ceil() as usize],
                    hashes: ((per_key * std::f64::consts::LN_2).round() as u32).clamp(1, 16),
                    count: count.min(255) as u8,
                }
            }
            Admission::Probability { p } => Filter::Probability { p, seed },
        })
    }

    /// Whether a key that has no row gets one now; counts this time.
    ///
    /// # Errors
    /// Where the system has no memory; it counts as not seen then.
    pub fn admit(&mut self, hash: u64, key: i64, step: u32) -> Result<bool> {
        Ok(match self {
            Filter::None => true,
            Filter::Counter {
                seen,
                count,
                generation,
            } => {
                let before = seen.find(hash, key).map_or(0, |n| n & !GENERATION);
                if before + 1 >= *count {
                    seen.remove(hash, key);
                    true
                } else {
                    let now = (before + 1) | *generation;
                    if before == 0 {
                        seen.insert(hash, key, now)?;
                    } else {
                        seen.replace(hash, key, now);
                    }
                    false
                }
            }
            Filter::Bloom {
                counters,
                hashes,
                count,
            } => {
                // Kirsch and Mitzenmacher, 2006: two hashes make as many as are needed. Only the
                // smallest counters rise, which keeps others from being over-counted.
                let places = places(hash, *hashes, counters.len());
                let least = places.clone().map(|at| counters[at]).min().unwrap_or(0);
                for at in places {
                    if counters[at] == least {
                        counters[at] = least.saturating_add(1);
                    }
                }
                least.saturating_add(1) >= *count
            }
            Filter::Probability { p, seed } => {
                let word = philox::words(*seed, key, step, 0x00ad_317e);
                let unit = (f64::from(word[0]) + 0.5) / 4_294_967_296.0;
                unit < *p
            }
        })
    }

    /// Forgets exact counts of keys that nobody looked up since the last call.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn age(&mut self) -> Result<()> {
        if let Filter::Counter {
            seen, generation, ..
        } = self
        {
            let stale: Vec<i64> = seen
                .iter()
                .filter(|(_, n)| n & GENERATION != *generation)
                .map(|(key, _)| key)
                .collect();
            for key in stale {
                seen.remove(hash::mix(key), key);
            }
            seen.shrink()?;
            *generation ^= GENERATION;
        }
        Ok(())
    }

    /// Keys that are counted one by one.
    pub fn pending(&self) -> usize {
        match self {
            Filter::Counter { seen, .. } => seen.len(),
            _ => 0,
        }
    }

    /// The counts, for a snapshot.
    pub fn counts(&self) -> Vec<(i64, u32)> {
        match self {
            Filter::Counter { seen, .. } => {
                seen.iter().map(|(key, n)| (key, n & !GENERATION)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Puts a count back; 0 forgets the key.
    ///
    /// # Errors
    /// Where the system has no memory.
    pub fn set(&mut self, key: i64, n: u32) -> Result<()> {
        if let Filter::Counter {
            seen, generation, ..
        } = self
        {
            let hash = hash::mix(key);
            if n == 0 {
                seen.remove(hash, key);
                return Ok(());
            }
            let n = n & !GENERATION | *generation;
            if seen.replace(hash, key, n).is_none() {
                seen.insert(hash, key, n)?;
            }
        }
        Ok(())
    }

    /// The counters of a Bloom filter, for a snapshot.
    pub fn counters(&self) -> &[u8] {
        match self {
            Filter::Bloom { counters, .. } => counters,
            _ => &[],
        }
    }

    /// Puts counters back, if there are as many.
    pub fn set_counters(&mut self, bytes: &[u8]) {
        if let Filter::Bloom { counters, .. } = self
            && counters.len() == bytes.len()
        {
            counters.copy_from_slice(bytes);
        }
    }

    /// Each counter is at least what it is in `bytes`: keys of both are never late.
    pub fn raise_counters(&mut self, bytes: &[u8]) {
        if let Filter::Bloom { counters, .. } = self {
            for (counter, &other) in counters.iter_mut().zip(bytes) {
                *counter = other.max(*counter);
            }
        }
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Filter::Counter { seen, .. } => seen.bytes(),
            Filter::Bloom { counters, .. } => counters.len(),
            _ => 0,
        }
    }
}

fn places(hash: u64, hashes: u32, len: usize) -> impl Iterator<Item = usize> + Clone {
    // The shard's bits are the same for all keys here: mix again.
    let one = hash::mix(hash as i64);
    let two = hash::mix(one as i64) | 1;
    (0..u64::from(hashes)).map(move |i| {
        let h = one.wrapping_add(i.wrapping_mul(two));
        ((u128::from(h) * len as u128) >> 64) as usize
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(admission: Admission) -> Filter {
        Filter::new(admission, 7, 2, &Arc::default()).unwrap()
    }

    fn admits(filter: &mut Filter, key: i64, times: u32) -> Vec<bool> {
        (0..times)
            .map(|step| filter.admit(hash::mix(key), key, step).unwrap())
            .collect()
    }

    #[test]
    fn a_counter_is_exact_and_forgets_what_rests() {
        let mut filter = filter(Admission::Counter { count: 3 });
        assert_eq!(admits(&mut filter, 5, 4), [false, false, true, false]);
        assert_eq!(filter.pending(), 1);
        filter.age().unwrap();
        filter.age().unwrap();
        assert_eq!(filter.pending(), 0);
        assert_eq!(admits(&mut filter, 5, 3), [false, false, true]);
    }

    #[test]
    fn a_bloom_filter_is_never_late_and_seldom_early() {
        let capacity = if cfg!(miri) { 1_000 } else { 40_000 };
        let mut filter = filter(Admission::Bloom {
            count: 2,
            capacity,
            false_positives: 0.01,
        });
        let keys: Vec<i64> = (0..capacity as i64)
            .filter(|&key| hash::shard(hash::mix(key), 2) == 1)
            .collect();
        let early = keys
            .iter()
            .filter(|&&key| admits(&mut filter, key, 1)[0])
            .count();
        assert!(early < keys.len() / 50, "{early} of {}", keys.len());
        assert!(keys.iter().all(|&key| admits(&mut filter, key, 1)[0]));
        assert!(filter.bytes() < 12 * keys.len());
    }

    #[test]
    fn a_draw_has_its_probability() {
        let mut filter = filter(Admission::Probability { p: 0.25 });
        if cfg!(miri) {
            assert!((5..45).contains(&admits(&mut filter, -9, 100).iter().filter(|&&b| b).count()));
            return;
        }
        let n = admits(&mut filter, -9, 4000).iter().filter(|&&b| b).count();
        assert!((900..1100).contains(&n), "{n}");
        assert_eq!(admits(&mut filter, -9, 50), admits(&mut filter, -9, 50));
    }
}
