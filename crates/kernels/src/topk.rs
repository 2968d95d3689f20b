//! Exact top-k by magnitude with error feedback: what a rank sends is added up over steps, and what
//! it does not send stays behind as the residual (Lin et al., "Deep Gradient Compression",
//! arXiv 1712.01887; Stich et al., "Sparsified SGD with memory", arXiv 1809.07599).
//!
//! # How
//! The order of non-negative IEEE 754 numbers is the order of their bit patterns. The first pass over
//! memory adds the gradient and counts the upper 11 of the 31 magnitude bits; that histogram says in
//! which bin the k-th largest magnitude lies. The second pass notes every entry from that bin up, in
//! blocks that are skipped by one comparison where all of it is smaller: at 1% nearly all are. The
//! exact threshold is then found among the noted ones alone, and of those equal to it the lowest
//! indices are taken, so the same input selects the same entries on every machine.
//!
//! # Infinities and NaN
//! Their bit patterns are the largest, so they are sent first: a loss scaler on the other side sees
//! the overflow and skips the step. They are never kept: an entry that is not finite leaves 0 in
//! the residual, whether it was sent or not, and later steps are not poisoned.

use crate::isa::{Isa, Work};

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// The histogram counts the bits from here up.
const SHIFT: u32 = 20;
const BINS: usize = 1 << (31 - SHIFT);
/// Entries that the second pass skips by one comparison.
const SPAN: usize = 64;

/// Why a call was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopKError {
    /// The gradient and the residual differ in length.
    #[error("gradient has {gradient} elements, residual {residual}: they must be equal")]
    Length {
        /// Elements in the gradient.
        gradient: usize,
        /// Elements in the residual.
        residual: usize,
    },
    /// The outputs differ in length, or are longer than the input.
    #[error(
        "k = {values} values and {indices} indices of {elements} elements: need values == indices <= elements"
    )]
    Outputs {
        /// Room for values.
        values: usize,
        /// Room for indices.
        indices: usize,
        /// Elements in the input.
        elements: usize,
    },
    /// Indices are sent as 32-bit integers.
    #[error("{0} elements do not fit 32-bit indices: split the buffer")]
    TooLong(usize),
}

/// Adds `gradient` to `residual`, moves the k entries of largest magnitude out of it into `values`
/// and `indices` (ascending), and leaves the rest in `residual`; k is `values.len()`.
///
/// # Errors
/// [`TopKError`] where lengths do not fit; nothing has been written then.
pub fn select_with_feedback(
    gradient: &[f32],
    residual: &mut [f32],
    values: &mut [f32],
    indices: &mut [i32],
) -> Result<(), TopKError> {
    check(gradient.len(), residual.len(), values.len(), indices.len())?;
    let isa = Isa::detect();
    let counts = isa.run(Accumulate { gradient, residual });
    let (lowest, candidates) = lowest_bin(&counts, values.len());
    // What is not finite must be found too, wherever the bin lies.
    let bound = ((lowest as u32) << SHIFT).min(INFINITY);
    let mut noted = Vec::with_capacity(candidates);
    isa.run(Note {
        data: residual,
        bound,
        noted: &mut noted,
    });
    let threshold = threshold(residual, &noted, values.len());
    take(residual, &noted, &threshold, values, indices);
    Ok(())
}

fn check(gradient: usize, residual: usize, values: usize, indices: usize) -> Result<(), TopKError> {
    if gradient != residual {
        return Err(TopKError::Length { gradient, residual });
    }
    if values != indices || values > gradient {
        return Err(TopKError::Outputs {
            values,
            indices,
            elements: gradient,
        });
    }
    if i32::try_from(gradient).is_err() {
        return Err(TopKError::TooLong(gradient));
    }
    Ok(())
}

#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & MAGNITUDE
}

/// Adds the gradient, and counts the upper magnitude bits of the sums.
struct Accumulate<'a> {
    gradient: &'a [f32],
    residual: &'a mut [f32],
}

impl Work for Accumulate<'_> {
    type Output = Vec<usize>;

    #[inline(always)]
    fn run(self) -> Vec<usize> {
        // Two tables: neighbours often fall into one bin, and a counter waits for its last store.
        let mut tables = [[0u32; BINS]; 2];
        for (kept, new) in self
            .residual
            .chunks_mut(SPAN)
            .zip(self.gradient.chunks(SPAN))
        {
            for (kept, new) in kept.iter_mut().zip(new) {
                *kept += new;
            }
            for (i, kept) in kept.iter().enumerate() {
                tables[i & 1][(magnitude(*kept) >> SHIFT) as usize] += 1;
            }
        }
        let [even, odd] = tables;
        even.iter()
            .zip(odd)
            .map(|(a, b)| *a as usize + b as usize)
            .collect()
    }
}

/// The bin in which the k-th largest entry lies, and how many entries are in it or above.
fn lowest_bin(counts: &[usize], k: usize) -> (usize, usize) {
    let mut above = 0;
    for (bin, count) in counts.iter().enumerate().rev() {
        above += count;
        if above >= k && above > 0 {
            return (bin, above);
        }
    }
    (0, above)
}

/// Notes, in ascending order, the entries whose magnitude bits are at least `bound`.
struct Note<'a> {
    data: &'a [f32],
    bound: u32,
    noted: &'a mut Vec<u32>,
}

impl Work for Note<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (block, entries) in self.data.chunks(SPAN).enumerate() {
            let largest = entries.iter().fold(0, |most, x| magnitude(*x).max(most));
            if largest < self.bound {
                continue;
            }
            for (i, x) in entries.iter().enumerate() {
                if magnitude(*x) >= self.bound {
                    self.noted.push((block * SPAN + i) as u32);
                }
            }
        }
    }
}

/// Where the selection ends: everything above `bits` is taken, and `ties` of those equal to it.
struct Threshold {
    bits: u32,
    ties: usize,
}

/// The k-th largest magnitude; it is among the `noted`.
fn threshold(data: &[f32], noted: &[u32], k: usize) -> Threshold {
    if k == 0 {
        return Threshold {
            bits: MAGNITUDE,
            ties: 0,
        };
    }
    let mut bits: Vec<u32> = noted.iter().map(|i| magnitude(data[*i as usize])).collect();
    let (larger, kth, _) = bits.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    let kth = *kth;
    let above = larger.iter().filter(|bits| **bits > kth).count();
    Threshold {
        bits: kth,
        ties: k - above,
    }
}

fn take(
    data: &mut [f32],
    noted: &[u32],
    threshold: &Threshold,
    values: &mut [f32],
    indices: &mut [i32],
) {
    let mut ties = threshold.ties;
    let mut next = 0;
    for index in noted {
        let entry = &mut data[*index as usize];
        let bits = magnitude(*entry);
        let tie = bits == threshold.bits && ties > 0;
        if bits > threshold.bits || tie {
            ties -= usize::from(tie);
            values[next] = *entry;
            // Checked: the length fits i32.
            indices[next] = *index as i32;
            next += 1;
            *entry = 0.0;
        } else if bits >= INFINITY {
            *entry = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same by a full sort: what the fast one must equal.
    fn reference(gradient: &[f32], residual: &mut [f32], k: usize) -> (Vec<f32>, Vec<i32>) {
        for (kept, new) in residual.iter_mut().zip(gradient) {
            *kept += new;
        }
        let mut order: Vec<usize> = (0..residual.len()).collect();
        order.sort_by_key(|i| (std::cmp::Reverse(magnitude(residual[*i])), *i));
        let mut taken = order[..k].to_vec();
        taken.sort_unstable();
        let values = taken.iter().map(|i| residual[*i]).collect();
        for i in &taken {
            residual[*i] = 0.0;
        }
        for entry in residual.iter_mut().filter(|entry| !entry.is_finite()) {
            *entry = 0.0;
        }
        (values, taken.iter().map(|i| *i as i32).collect())
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    fn compare(gradient: &[f32], residual: &[f32], k: usize) {
        let (mut fast, mut slow) = (residual.to_vec(), residual.to_vec());
        let (mut values, mut indices) = (vec![0.0; k], vec![0; k]);
        select_with_feedback(gradient, &mut fast, &mut values, &mut indices).unwrap();
        let (want_values, want_indices) = reference(gradient, &mut slow, k);
        assert_eq!(indices, want_indices);
        assert_eq!(bits(&values), bits(&want_values));
        assert_eq!(bits(&fast), bits(&slow));
    }

    /// Any bit pattern, and many ties: small integers make equal magnitudes likely.
    fn entry() -> impl Strategy<Value = f32> {
        prop_oneof![
            any::<u32>().prop_map(f32::from_bits),
            (-3i8..4).prop_map(f32::from),
        ]
    }

    proptest! {
        #[test]
        fn equals_a_full_sort(
            pairs in prop::collection::vec((entry(), entry()), 0..400),
            share in 0.0f64..=1.0,
        ) {
            let (gradient, residual): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            compare(&gradient, &residual, (gradient.len() as f64 * share) as usize);
        }
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        let mut residual = [0.0; 5];
        let (mut values, mut indices) = ([0.0; 2], [0; 2]);
        select_with_feedback(
            &[1.0, -1.0, 1.0, 1.0, 1.0],
            &mut residual,
            &mut values,
            &mut indices,
        )
        .unwrap();
        assert_eq!(indices, [0, 1]);
        assert_eq!(values, [1.0, -1.0]);
        assert_eq!(residual, [0.0, 0.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn what_is_not_finite_is_sent_and_never_kept() {
        let mut residual = [0.0; 4];
        let (mut values, mut indices) = ([0.0; 1], [0; 1]);
        select_with_feedback(
            &[1.0, f32::NEG_INFINITY, f32::INFINITY, 2.0],
            &mut residual,
            &mut values,
            &mut indices,
        )
        .unwrap();
        assert_eq!(values, [f32::NEG_INFINITY]);
        assert_eq!(residual, [1.0, 0.0, 0.0, 2.0]);
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused_with_nothing_written() {
        let mut residual = [7.0; 3];
        let refused =
            select_with_feedback(&[1.0; 2], &mut residual, &mut [0.0; 1], &mut [0; 1]).unwrap_err();
        assert_eq!(
            refused,
            TopKError::Length {
                gradient: 2,
                residual: 3
            }
        );
        let refused =
            select_with_feedback(&[1.0; 3], &mut residual, &mut [0.0; 4], &mut [0; 4]).unwrap_err();
        assert!(matches!(refused, TopKError::Outputs { values: 4, .. }));
        assert_eq!(residual, [7.0; 3]);
    }
}
