//! Top-k in chunks of [`CHUNK`] entries, each with the same number of them: the payload has one size,
//! known before, so no rank tells another how much will come; an index fits 16 bits and a value is an
//! f16, 4 bytes an entry (error feedback as in [`crate::topk`]; local selection as in Lin et al.,
//! arXiv 1712.01887, section 3.3, which samples instead).
//!
//! # How
//! A chunk stays in the first-level cache. The k-th largest magnitude is found bit by bit from above:
//! a bit of the threshold is set where at least k entries are still not below it. That is 31 counts
//! at most over 16 kB, which the vector units do faster than any sort; it ends at the first count
//! that is k exactly.
//!
//! # Numbers
//! Values are sent relative to the power of two of the chunk's largest, so that gradients far below
//! the smallest f16 lose nothing but rounding, and what rounding takes away stays in the residual.
//! A chunk with an entry that is not finite is sent with a scale of 1: infinity and NaN arrive as such,
//! a loss scaler sees them, and none is kept.
//!
//! A chunk at the end with fewer than k entries fills its places with [`NO_INDEX`].

use crate::formats::{from_f16, to_f16};
use crate::isa::{Isa, Work};

/// Entries of one chunk.
pub const CHUNK: usize = 4096;
/// The index of a place that holds no entry.
pub const NO_INDEX: u16 = u16::MAX;

/// Entries that are skipped by one comparison.
const SPAN: usize = 32;
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
/// Scales are between 2^-100 and 2^126, so that one over them is a normal number too.
const SMALLEST: u32 = 27 << 23;
const LARGEST: u32 = 253 << 23;

/// Why a call was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// Lengths that do not belong together.
    #[error(
        "{elements} elements in chunks of {CHUNK} with k = {k}: residual {residual}, scales {scales}, values {values} and indices {indices} do not fit"
    )]
    Lengths {
        /// Elements in the gradient, or the output.
        elements: usize,
        /// Entries a chunk.
        k: usize,
        /// Elements in the residual.
        residual: usize,
        /// Room for scales.
        scales: usize,
        /// Room for values.
        values: usize,
        /// Room for indices.
        indices: usize,
    },
}

/// What crosses the network: for each chunk a scale, k values and k indices within the chunk.
#[derive(Debug)]
pub struct Payload<S, V> {
    /// One power of two a chunk.
    pub scales: S,
    /// f16 bits.
    pub values: V,
    /// Places in the chunk, ascending; [`NO_INDEX`] where there is no entry.
    pub indices: V,
}

fn check(elements: usize, residual: usize, k: usize, sizes: [usize; 3]) -> Result<(), ChunkError> {
    let chunks = elements.div_ceil(CHUNK);
    if residual == elements && (1..=CHUNK).contains(&k) && sizes == [chunks, chunks * k, chunks * k]
    {
        return Ok(());
    }
    let [scales, values, indices] = sizes;
    Err(ChunkError::Lengths {
        elements,
        k,
        residual,
        scales,
        values,
        indices,
    })
}

/// Adds `gradient` to `residual` and moves the `k` entries of largest magnitude of every chunk into
/// `payload`; of equal ones the lowest indices.
///
/// # Errors
/// [`ChunkError`] where lengths do not fit; nothing has been written then.
pub fn select(
    gradient: &[f32],
    residual: &mut [f32],
    k: usize,
    payload: Payload<&mut [f32], &mut [u16]>,
) -> Result<(), ChunkError> {
    let sizes = [
        payload.scales.len(),
        payload.values.len(),
        payload.indices.len(),
    ];
    check(gradient.len(), residual.len(), k, sizes)?;
    Isa::detect().run(Select {
        gradient,
        residual,
        k,
        payload,
    });
    Ok(())
}

struct Select<'a> {
    gradient: &'a [f32],
    residual: &'a mut [f32],
    k: usize,
    payload: Payload<&'a mut [f32], &'a mut [u16]>,
}

impl Work for Select<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut bits = [0u32; CHUNK];
        let chunks = self
            .residual
            .chunks_mut(CHUNK)
            .zip(self.gradient.chunks(CHUNK));
        let places = self
            .payload
            .values
            .chunks_mut(self.k)
            .zip(self.payload.indices.chunks_mut(self.k));
        for (((kept, new), (values, indices)), scale) in
            chunks.zip(places).zip(self.payload.scales.iter_mut())
        {
            let bits = &mut bits[..kept.len()];
            let mut most = 0;
            for ((kept, new), bits) in kept.iter_mut().zip(new).zip(bits.iter_mut()) {
                *kept += new;
                *bits = kept.to_bits() & MAGNITUDE;
                most = most.max(*bits);
            }
            *scale = scale_of(most);
            let wanted = self.k.min(bits.len());
            let threshold = threshold(bits, wanted);
            take(kept, bits, threshold, *scale, values, indices);
        }
    }
}

#[inline(always)]
fn scale_of(most: u32) -> f32 {
    if most >= INFINITY {
        return 1.0;
    }
    f32::from_bits((most & INFINITY).clamp(SMALLEST, LARGEST))
}

/// The largest number that at least `wanted` of `bits` are not below, and how many of those that
/// equal it are taken.
#[inline(always)]
fn threshold(bits: &[u32], wanted: usize) -> (u32, usize) {
    let mut found = 0u32;
    for bit in (0..31).rev() {
        let tried = found | (1 << bit);
        let count = count(bits, tried);
        if count >= wanted {
            found = tried;
        }
        if count == wanted {
            break;
        }
    }
    let above = count(bits, found + 1);
    (found, wanted.saturating_sub(above))
}

#[inline(always)]
fn count(bits: &[u32], least: u32) -> usize {
    let mut count = 0u32;
    for x in bits {
        count += u32::from(*x >= least);
    }
    count as usize
}

#[inline(always)]
fn take(
    kept: &mut [f32],
    bits: &[u32],
    (threshold, mut ties): (u32, usize),
    scale: f32,
    values: &mut [u16],
    indices: &mut [u16],
) {
    let mut next = 0;
    let bound = threshold.min(INFINITY);
    let spans = kept.chunks_mut(SPAN).zip(bits.chunks(SPAN));
    for (span, (kept, bits)) in spans.enumerate() {
        if bits.iter().fold(0, |most, x| most.max(*x)) < bound {
            continue;
        }
        for (i, (kept, bits)) in kept.iter_mut().zip(bits).enumerate() {
            if *bits > threshold || (*bits == threshold && ties > 0) {
                ties -= usize::from(*bits == threshold);
                let sent = to_f16(*kept * (1.0 / scale));
                values[next] = sent;
                indices[next] = (span * SPAN + i) as u16;
                next += 1;
                let left = *kept - from_f16(sent) * scale;
                *kept = if left.is_finite() { left } else { 0.0 };
            } else if *bits >= INFINITY {
                *kept = 0.0;
            }
        }
    }
    values[next..].fill(0);
    indices[next..].fill(NO_INDEX);
}

/// Adds `factor` times what one rank sent to `out`.
///
/// # Errors
/// [`ChunkError`] where lengths do not fit; nothing has been written then. An index that does not lie
/// in its chunk is left out.
pub fn add(
    payload: &Payload<&[f32], &[u16]>,
    k: usize,
    factor: f32,
    out: &mut [f32],
) -> Result<(), ChunkError> {
    let sizes = [
        payload.scales.len(),
        payload.values.len(),
        payload.indices.len(),
    ];
    check(out.len(), out.len(), k, sizes)?;
    let places = payload.values.chunks(k).zip(payload.indices.chunks(k));
    for ((out, (values, indices)), scale) in out.chunks_mut(CHUNK).zip(places).zip(payload.scales) {
        for (value, index) in values.iter().zip(indices) {
            if let Some(out) = out.get_mut(usize::from(*index)) {
                *out += from_f16(*value) * scale * factor;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(gradient: &[f32], residual: &mut [f32], k: usize) -> (Vec<f32>, Vec<u16>, Vec<u16>) {
        let chunks = gradient.len().div_ceil(CHUNK);
        let mut scales = vec![0.0; chunks];
        let (mut values, mut indices) = (vec![1; chunks * k], vec![1; chunks * k]);
        let payload = Payload {
            scales: &mut scales[..],
            values: &mut values[..],
            indices: &mut indices[..],
        };
        select(gradient, residual, k, payload).unwrap();
        (scales, values, indices)
    }

    fn entry() -> impl Strategy<Value = f32> {
        prop_oneof![
            any::<u32>().prop_map(f32::from_bits),
            (-3i8..4).prop_map(f32::from),
            (-1.0f32..1.0),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn takes_what_a_sort_would_take(
            gradient in prop::collection::vec(entry(), 1..5000),
            k in 1usize..60,
        ) {
            // An addition makes a signalling NaN quiet: another bit pattern.
            let gradient: Vec<f32> = gradient.into_iter().map(|x| x + 0.0).collect();
            let mut residual = vec![0.0; gradient.len()];
            let (_, _, indices) = run(&gradient, &mut residual, k);
            for (chunk, indices) in gradient.chunks(CHUNK).zip(indices.chunks(k)) {
                let mut order: Vec<usize> = (0..chunk.len()).collect();
                order.sort_by_key(|i| (std::cmp::Reverse(chunk[*i].to_bits() & MAGNITUDE), *i));
                let mut want: Vec<u16> = order.iter().take(k).map(|i| *i as u16).collect();
                want.sort_unstable();
                want.resize(k, NO_INDEX);
                prop_assert_eq!(indices, &want[..]);
            }
            prop_assert!(residual.iter().all(|x| x.is_finite()));
        }

        #[test]
        fn what_is_sent_and_what_stays_add_up(
            gradient in prop::collection::vec(-1e-9f32..1e-9, 1..9000),
            k in 1usize..60,
        ) {
            let mut residual = vec![0.0; gradient.len()];
            let (scales, values, indices) = run(&gradient, &mut residual, k);
            let payload = Payload { scales: &scales[..], values: &values[..], indices: &indices[..] };
            add(&payload, k, 1.0, &mut residual).unwrap();
            prop_assert_eq!(residual, gradient);
        }
    }

    #[test]
    fn infinity_arrives_and_is_not_kept() {
        let mut residual = [0.0; 3];
        let (scales, values, _) = run(&[1.0, f32::INFINITY, f32::NAN], &mut residual, 1);
        assert_eq!(scales, [1.0]);
        assert!(from_f16(values[0]).is_nan());
        assert_eq!(residual, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused_with_nothing_written() {
        let (mut residual, mut scales, mut values, mut indices) = ([1.0; 3], [0.0; 1], [7], [7]);
        let payload = Payload {
            scales: &mut scales[..],
            values: &mut values[..],
            indices: &mut indices[..],
        };
        assert!(select(&[1.0; 3], &mut residual, 2, payload).is_err());
        assert_eq!((residual, values), ([1.0; 3], [7]));
    }
}
