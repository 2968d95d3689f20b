//! The optimizer's step for a shard's part of a batch: rows are found or made, gradients of a key that
//! comes more than once are summed, and each row is updated once.

use super::{AHEAD, Core, Shard};
use crate::arena::{Meta, prefetch};
use crate::batch::Part;
use crate::error::Result;
use crate::hash;
use crate::optimizer::Step;

/// What became of a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Rows that were updated.
    pub updated: u64,
    /// Rows that were made.
    pub inserted: u64,
    /// Keys whose gradient was dropped, because they have no row.
    pub dropped: u64,
}

/// A key of a batch whose gradients are added up.
struct Unique {
    id: u32,
    key: i64,
    first: u32,
    count: u32,
    sum: u32,
}

const NONE: u32 = u32::MAX;

impl Shard {
    /// One optimizer step for the positions of a batch that are this shard's.
    ///
    /// # Errors
    /// As [`Shard::insert`]; rows of a part of the keys may have been made then, none updated.
    pub fn apply(
        &mut self,
        core: &Core,
        step: &Step,
        number: u32,
        part: Part<'_>,
        gradients: &[f32],
        admits: bool,
    ) -> Result<Counts> {
        let Part { keys, positions } = part;
        let dim = core.layout.dim;
        let gradient = |at: u32| &gradients[at as usize * dim..(at as usize + 1) * dim];
        let mut counts = Counts::default();
        // What the lookup of this batch brought back stays, even where that is more than the share.
        if self.len() - self.cold.rows() > positions.len().saturating_add(core.share()) {
            self.cool(core, 0)?;
        }

        // The keys of the batch once each, in the order in which they first come, and the sums of
        // what comes more than once, added in the order of the batch.
        let room = (positions.len() * 2).next_power_of_two();
        let mut places = vec![NONE; room];
        let mut uniques: Vec<Unique> = Vec::with_capacity(positions.len());
        let mut sums: Vec<f32> = Vec::new();
        for (i, (&key, &position)) in keys.iter().zip(positions).enumerate() {
            self.prefetch_two(keys, i);
            let hash = hash::mix(key);
            let id = match self.find_warm(core, hash, key)? {
                Some(id) => id,
                None if admits => {
                    counts.inserted += 1;
                    self.insert(core, hash, key, number)?
                }
                None => {
                    counts.dropped += 1;
                    continue;
                }
            };
            let mut place = (id.wrapping_mul(0x9e37_79b1) >> 7) as usize & (room - 1);
            loop {
                match places[place] {
                    NONE => {
                        places[place] = uniques.len() as u32;
                        uniques.push(Unique {
                            id,
                            key,
                            first: position,
                            count: 1,
                            sum: NONE,
                        });
                        break;
                    }
                    at if uniques[at as usize].id == id => {
                        let unique = &mut uniques[at as usize];
                        if unique.sum == NONE {
                            unique.sum = (sums.len() / dim) as u32;
                            sums.extend_from_slice(gradient(unique.first));
                        }
                        unique.count += 1;
                        let start = unique.sum as usize * dim;
                        for (sum, g) in sums[start..start + dim].iter_mut().zip(gradient(position))
                        {
                            *sum += g;
                        }
                        break;
                    }
                    _ => place = (place + 1) & (room - 1),
                }
            }
        }

        let bytes = core.layout.bytes();
        let mut wide = vec![0.0; dim];
        let epoch = core.epoch();
        for (i, unique) in uniques.iter().enumerate() {
            if let Some(next) = uniques.get(i + AHEAD / 2) {
                core.arena.prefetch(next.id, bytes.min(512));
                core.arena.prefetch_meta(next.id);
                if next.sum == NONE {
                    prefetch(gradient(next.first).as_ptr().cast());
                }
            }
            if self.saving.is_some() {
                self.keep(core, unique.id, unique.key);
            }
            // SAFETY: see the head of this file.
            let (row, meta) =
                unsafe { (core.arena.row_mut(unique.id), core.arena.meta(unique.id)) };
            let g = match unique.sum {
                NONE => gradient(unique.first),
                sum => &sums[sum as usize * dim..(sum as usize + 1) * dim],
            };
            let absent = number.saturating_sub(meta.version).saturating_sub(1);
            core.layout.change(row, &mut wide, |values, slots| {
                step.update(values, slots, g, u64::from(absent));
            });
            let frequency = meta.frequency().saturating_add(unique.count);
            // SAFETY: as above.
            unsafe {
                core.arena
                    .set_meta(unique.id, Meta::new(number, frequency, epoch));
            };
        }
        counts.updated = uniques.len() as u64;
        Ok(counts)
    }
}
