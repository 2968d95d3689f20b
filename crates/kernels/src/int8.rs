//! Gradients as 8-bit integers in blocks of [`BLOCK`], each with a scale of its own: a quarter of the
//! bytes of f32 and 0.4% (block-wise scaling as in Dettmers et al., arXiv 2110.02861; stochastic
//! rounding as in Alistarh et al., "QSGD", arXiv 1610.02132).
//!
//! A code is `floor(value * 127 / largest + u)`, u uniform in [0, 1) from a hash of (key, index): up
//! with the probability of the part that is cut off, so the mean is right, and the same on any
//! machine and any number of threads. What rounding takes away stays in the residual where there is
//! one.
//!
//! A block with an entry that is not finite has the scale NaN: all of it arrives as NaN, a loss
//! scaler sees it, and its finite entries stay in the residual. A block whose largest entry is below
//! 2^-100 is sent as zeros.

use crate::formats::mix;
use crate::isa::{Isa, Work};

/// Entries that share a scale.
pub const BLOCK: usize = 1024;

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const SMALLEST: u32 = 27 << 23;

/// Why a call was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{elements} elements, residual {residual}, {peers} x {codes} codes with {scales} scales: need residual == elements, codes a multiple of {BLOCK} that holds them, one scale a block"
)]
pub struct Int8Error {
    elements: usize,
    residual: usize,
    peers: usize,
    codes: usize,
    scales: usize,
}

fn check(
    elements: usize,
    residual: usize,
    peers: usize,
    codes: usize,
    scales: usize,
) -> Result<(), Int8Error> {
    let fits = residual == elements
        && codes.is_multiple_of(BLOCK)
        && elements <= codes
        && scales == peers * (codes / BLOCK);
    if fits {
        Ok(())
    } else {
        Err(Int8Error {
            elements,
            residual,
            peers,
            codes,
            scales,
        })
    }
}

/// Writes `values` (plus `residual`, where there is one, which then keeps what is not sent) as codes
/// and scales. Codes past the values are 0.
///
/// # Errors
/// [`Int8Error`] where lengths do not fit; nothing has been written then.
pub fn quantize(
    values: &[f32],
    residual: Option<&mut [f32]>,
    codes: &mut [i8],
    scales: &mut [f32],
    key: u32,
) -> Result<(), Int8Error> {
    let kept = residual.as_ref().map_or(values.len(), |r| r.len());
    check(values.len(), kept, 1, codes.len(), scales.len())?;
    Isa::detect().run(Quantize {
        values,
        residual,
        codes,
        scales,
        key,
    });
    Ok(())
}

struct Quantize<'a> {
    values: &'a [f32],
    residual: Option<&'a mut [f32]>,
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    key: u32,
}

impl Work for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut sum = [0f32; BLOCK];
        let mut uniform = [0f32; BLOCK];
        let mut rounded = [0i32; BLOCK];
        let blocks = self.codes.chunks_exact_mut(BLOCK).zip(self.scales);
        for (block, (codes, scale)) in blocks.enumerate() {
            let start = (block * BLOCK).min(self.values.len());
            let end = (start + BLOCK).min(self.values.len());
            let sum = &mut sum[..end - start];
            sum.copy_from_slice(&self.values[start..end]);
            if let Some(residual) = &self.residual {
                for (sum, kept) in sum.iter_mut().zip(&residual[start..end]) {
                    *sum += kept;
                }
            }
            let most = sum
                .iter()
                .fold(0, |most, x| (x.to_bits() & MAGNITUDE).max(most));
            let largest = f32::from_bits(most);
            let (inverse, step) = if (SMALLEST..INFINITY).contains(&most) {
                (127.0 / largest, largest / 127.0)
            } else {
                (0.0, 0.0)
            };
            *scale = if most >= INFINITY { f32::NAN } else { step };
            let (full, past) = codes.split_at_mut(sum.len());
            past.fill(0);
            // Three loops, each of which becomes vector instructions; a cast straight to i8 does not.
            for (i, uniform) in uniform.iter_mut().enumerate() {
                let random = mix((start + i) as u32 ^ self.key) >> 8;
                *uniform = random as i32 as f32 * (1.0 / 16_777_216.0);
            }
            for (rounded, (x, uniform)) in rounded.iter_mut().zip(sum.iter().zip(&uniform)) {
                let whole = (x * inverse + uniform).floor().clamp(-127.0, 127.0);
                // NaN, where the inverse is 0 and the entry is not finite, becomes 0.
                *rounded = whole as i32;
            }
            for (code, rounded) in full.iter_mut().zip(&rounded) {
                *code = *rounded as i8;
            }
            if let Some(residual) = &mut self.residual {
                let kept = residual[start..end].iter_mut();
                for (kept, (rounded, x)) in kept.zip(rounded.iter().zip(sum.iter())) {
                    let left = x - *rounded as f32 * step;
                    *kept = if left.is_finite() { left } else { 0.0 };
                }
            }
        }
    }
}

/// `out = factor * (codes of rank 0 * their scales + those of rank 1 + ...)`, in this order.
/// `codes` and `scales` hold the ranks one after another, equally long.
///
/// # Errors
/// [`Int8Error`] where lengths do not fit; nothing has been written then.
pub fn dequantize_sum(
    codes: &[i8],
    scales: &[f32],
    peers: usize,
    factor: f32,
    out: &mut [f32],
) -> Result<(), Int8Error> {
    let each = codes.len() / peers.max(1);
    check(out.len(), out.len(), peers.max(1), each, scales.len())?;
    if codes.len() == each * peers {
        Isa::detect().run(Sum {
            codes,
            scales,
            each,
            factor,
            out,
        });
    }
    Ok(())
}

struct Sum<'a> {
    codes: &'a [i8],
    scales: &'a [f32],
    each: usize,
    factor: f32,
    out: &'a mut [f32],
}

impl Work for Sum<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (block, out) in self.out.chunks_mut(BLOCK).enumerate() {
            out.fill(0.0);
            let ranks = self.codes.chunks_exact(self.each);
            for (codes, scales) in ranks.zip(self.scales.chunks_exact(self.each / BLOCK)) {
                let scale = scales[block];
                for (out, code) in out.iter_mut().zip(&codes[block * BLOCK..]) {
                    *out += f32::from(*code) * scale;
                }
            }
            for out in out {
                *out *= self.factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(values: &[f32], residual: &mut [f32], key: u32) -> Vec<f32> {
        let room = values.len().next_multiple_of(BLOCK);
        let (mut codes, mut scales) = (vec![1; room], vec![1.0; room / BLOCK]);
        quantize(values, Some(residual), &mut codes, &mut scales, key).unwrap();
        let mut out = vec![7.0; values.len()];
        dequantize_sum(&codes, &scales, 1, 1.0, &mut out).unwrap();
        out
    }

    proptest! {
        #[test]
        fn within_one_step_and_the_rest_is_kept(
            values in prop::collection::vec(-5.0f32..5.0, 0..3000),
            key in any::<u32>(),
        ) {
            let mut residual = vec![0.0; values.len()];
            let out = round_trip(&values, &mut residual, key);
            for (block, (x, (y, r))) in
                values.iter().zip(out.iter().zip(&residual)).enumerate().map(|(i, x)| (i / BLOCK, x))
            {
                let all = &values[block * BLOCK..values.len().min((block + 1) * BLOCK)];
                let step = all.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
                prop_assert!((x - y).abs() <= step * 1.001);
                prop_assert_eq!(x - y, *r);
            }
        }

        #[test]
        fn any_bits_leave_a_finite_residual(
            bits in prop::collection::vec(any::<u32>(), 0..2500),
        ) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let mut residual = vec![0.0; values.len()];
            let out = round_trip(&values, &mut residual, 1);
            prop_assert!(residual.iter().all(|x| x.is_finite()));
            for (values, out) in values.chunks(BLOCK).zip(out.chunks(BLOCK)) {
                let finite = values.iter().all(|x| x.is_finite());
                prop_assert!(out.iter().all(|x| x.is_finite() == finite));
            }
        }
    }

    #[test]
    fn rounding_is_right_on_the_mean() {
        let mut values = vec![0.3f32; 1024];
        values[0] = 127.0;
        let mut sum = 0f64;
        for key in 0..200 {
            let mut residual = vec![0.0; 1024];
            let out = round_trip(&values, &mut residual, mix(key));
            sum += out[1..].iter().map(|x| f64::from(*x)).sum::<f64>();
        }
        let mean = sum / (200.0 * 1023.0);
        assert!((mean - 0.3).abs() < 0.01, "{mean}");
    }

    #[test]
    fn ranks_are_added_and_scaled() {
        let (mut codes, mut scales) = (vec![0; 2 * BLOCK], vec![0.0; 2]);
        for (rank, value) in [1.0f32, -3.0].into_iter().enumerate() {
            let part = &mut codes[rank * BLOCK..(rank + 1) * BLOCK];
            quantize(&[value; 5], None, part, &mut scales[rank..=rank], 0).unwrap();
        }
        let mut out = [9.0; 5];
        dequantize_sum(&codes, &scales, 2, 0.5, &mut out).unwrap();
        assert!(out.iter().all(|x| (x + 1.0).abs() < 1e-5), "{out:?}");
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        assert!(quantize(&[1.0; 5], None, &mut [0; 5], &mut [0.0; 1], 0).is_err());
        assert!(dequantize_sum(&[0; BLOCK], &[1.0; 2], 1, 1.0, &mut [0.0; 5]).is_err());
    }
}
