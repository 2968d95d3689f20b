//! Exact top-k by magnitude with error feedback: what a rank sends is added up over steps, and what
//! it does not send stays behind as the residual (Lin et al., "Deep Gradient Compression",
//! arXiv 1712.01887; Stich et al., "Sparsified SGD with memory", arXiv 1809.07599).
//!
//! # How
//! The order of non-negative IEEE 754 numbers is the order of their bit patterns, so the k-th
//! largest magnitude is found by a radix search over the 31 magnitude bits: three histograms of
//! 11, 11 and 9 bits. The first is filled while the residual is added; the two others look only
//! at entries that share the prefix found so far. Then one pass takes every entry above the
//! threshold and, of those equal to it, the ones with the lowest index, so the same input selects
//! the same entries on every machine.
//!
//! # Infinities and NaN
//! Their bit patterns are the largest, so they are sent first: a loss scaler on the other side sees
//! the overflow and skips the step. They are never kept: an entry that is not finite leaves 0 in
//! the residual, whether it was sent or not, and later steps are not poisoned.

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// The digits of the radix search, from the highest: (shift, width in bits).
const DIGITS: [(u32, u32); 3] = [(20, 11), (9, 11), (0, 9)];

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
    let (shift, _) = DIGITS[0];
    let mut histogram = vec![0usize; 1 << DIGITS[0].1];
    for (kept, new) in residual.iter_mut().zip(gradient) {
        *kept += new;
        histogram[(magnitude(*kept) >> shift) as usize] += 1;
    }
    let threshold = threshold(residual, values.len(), &histogram);
    take(residual, &threshold, values, indices);
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

fn magnitude(x: f32) -> u32 {
    x.to_bits() & MAGNITUDE
}

/// Where the selection ends: everything above `bits` is taken, and `ties` of those equal to it.
struct Threshold {
    bits: u32,
    ties: usize,
}

/// The k-th largest magnitude. `histogram` counts the first digit.
fn threshold(data: &[f32], k: usize, histogram: &[usize]) -> Threshold {
    if k == 0 {
        return Threshold {
            bits: MAGNITUDE,
            ties: 0,
        };
    }
    let (mut prefix, mut wanted) = descend(histogram, k, 0, DIGITS[0].0);
    for window in DIGITS.windows(2) {
        let (above, (shift, width)) = (window[0].0, window[1]);
        let mut counts = vec![0usize; 1 << width];
        let mask = (1u32 << width) - 1;
        for x in data {
            let bits = magnitude(*x);
            if bits >> above == prefix >> above {
                counts[((bits >> shift) & mask) as usize] += 1;
            }
        }
        (prefix, wanted) = descend(&counts, wanted, prefix, shift);
    }
    Threshold {
        bits: prefix,
        ties: wanted,
    }
}

/// One digit of the search: the largest bin in which the `wanted`-th entry from above lies, put
/// into `prefix`, and how many entries are still wanted from that bin.
fn descend(counts: &[usize], mut wanted: usize, prefix: u32, shift: u32) -> (u32, usize) {
    for (bin, count) in counts.iter().enumerate().rev() {
        if *count >= wanted {
            return (prefix | ((bin as u32) << shift), wanted);
        }
        wanted -= count;
    }
    // The counts add up to at least `wanted`, because k is at most the number of elements.
    unreachable!("fewer entries than wanted")
}

fn take(data: &mut [f32], threshold: &Threshold, values: &mut [f32], indices: &mut [i32]) {
    let mut ties = threshold.ties;
    let mut next = 0;
    for (index, entry) in data.iter_mut().enumerate() {
        let bits = magnitude(*entry);
        let tie = bits == threshold.bits && ties > 0;
        if bits > threshold.bits || tie {
            ties -= usize::from(tie);
            values[next] = *entry;
            // Checked: the length fits i32.
            indices[next] = index as i32;
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
