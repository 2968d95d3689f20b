//! Whole blocks of the usual formats in one loop: load, widen, update, round and store without a
//! stop in memory. Division and square root keep one port of the core busy most of the time;
//! conversions and the hash of stochastic rounding run beside them on the others, so that fewer
//! bytes are also less time. Formats that have no loop here, and the end of a tensor that is no
//! whole block, are staged (see `state`), by the same operations in the same order.

use crate::formats::{
    BLOCK, Grid, from_bf16, from_first, from_second, join, mix, split, to_bf16_stochastic,
};
use crate::state::{Gradient, Master, Moment, Noise, Output, Tensors, encode};

/// New (weight, first moment, second moment) of an element from (weight, gradient, first, second).
pub(crate) trait Element: Fn(f32, f32, f32, f32) -> (f32, f32, f32) + Copy {}
impl<F: Fn(f32, f32, f32, f32) -> (f32, f32, f32) + Copy> Element for F {}

type Block<T> = [T; BLOCK];

// In each of them the tensors are parameters of their own, not fields, so that the compiler knows
// that they do not overlap.

#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of a step, each apart"
)]
fn split_f32(
    upper: &mut Block<u16>,
    lower: &mut Block<u16>,
    gradient: &Block<u16>,
    first: &mut Block<f32>,
    second: &mut Block<f32>,
    _noise: Noise,
    _start: u32,
    update: impl Element,
) {
    for i in 0..BLOCK {
        let (w, m, v) = update(
            join(upper[i], lower[i]),
            from_bf16(gradient[i]),
            first[i],
            second[i],
        );
        first[i] = m;
        second[i] = v;
        (upper[i], lower[i]) = split(w);
    }
}

#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "the tensors of a step, each apart"
)]
fn split_bf16(
    upper: &mut Block<u16>,
    lower: &mut Block<u16>,
    gradient: &Block<u16>,
    first: &mut Block<u16>,
    second: &mut Block<u16>,
    noise: Noise,
    start: u32,
    update: impl Element,
) {
    for i in 0..BLOCK {
        let (w, m, v) = update(
            join(upper[i], lower[i]),
            from_bf16(gradient[i]),
            from_bf16(first[i]),
            from_bf16(second[i]),
        );
        let random = noise.bits(start.wrapping_add(i as u32));
        first[i] = to_bf16_stochastic(m, random);
        second[i] = to_bf16_stochastic(v, random >> 16);
        (upper[i], lower[i]) = split(w);
    }
}

#[inline(always)]
fn f32_bf16(
    weights: &mut Block<f32>,
    gradient: &Block<u16>,
    first: &mut Block<u16>,
    second: &mut Block<u16>,
    noise: Noise,
    start: u32,
    update: impl Element,
) {
    for i in 0..BLOCK {
        let (w, m, v) = update(
            weights[i],
            from_bf16(gradient[i]),
            from_bf16(first[i]),
            from_bf16(second[i]),
        );
        let random = noise.bits(start.wrapping_add(i as u32));
        first[i] = to_bf16_stochastic(m, random);
        second[i] = to_bf16_stochastic(v, random >> 16);
        weights[i] = w;
    }
}

#[inline(always)]
fn bf16_bf16(
    weights: &mut Block<u16>,
    gradient: &Block<u16>,
    first: &mut Block<u16>,
    second: &mut Block<u16>,
    noise: Noise,
    start: u32,
    update: impl Element,
) {
    for i in 0..BLOCK {
        let (w, m, v) = update(
            from_bf16(weights[i]),
            from_bf16(gradient[i]),
            from_bf16(first[i]),
            from_bf16(second[i]),
        );
        let random = noise.bits(start.wrapping_add(i as u32));
        first[i] = to_bf16_stochastic(m, random);
        second[i] = to_bf16_stochastic(v, random >> 16);
        // The moments have used up these bits: mix them once more.
        weights[i] = to_bf16_stochastic(w, mix(random));
    }
}

/// Moments of one byte: their codes and the scale of the block. The block's largest numbers are
/// known after the update only, so moments are staged.
struct Bytes<'a> {
    codes: &'a mut Block<u8>,
    scale: &'a mut u8,
}

#[inline(always)]
fn split_int8(
    upper: &mut Block<u16>,
    lower: &mut Block<u16>,
    gradient: &Block<u16>,
    first: Bytes<'_>,
    second: Bytes<'_>,
    random: &[u32],
    update: impl Element,
) {
    let mut stage = [[0f32; BLOCK]; 2];
    let [m, v] = &mut stage;
    let (signed, unsigned) = (Grid::new(*first.scale), Grid::new(*second.scale));
    for i in 0..BLOCK {
        let w;
        (w, m[i], v[i]) = update(
            join(upper[i], lower[i]),
            from_bf16(gradient[i]),
            from_first(first.codes[i], signed),
            from_second(second.codes[i], unsigned),
        );
        (upper[i], lower[i]) = split(w);
    }
    *first.scale = encode::<true>(first.codes, m, random);
    *second.scale = encode::<false>(second.codes, v, random);
}

/// Updates as many whole blocks as there are, where the formats have a loop of their own; returns
/// the number of elements done.
#[inline(always)]
pub(crate) fn run(tensors: &mut Tensors<'_>, noise: Noise, update: impl Element) -> usize {
    let (Gradient::Bf16(gradient), Output::Absent) = (tensors.gradient, &tensors.output) else {
        return 0;
    };
    let gradient = gradient.as_chunks::<BLOCK>().0;
    macro_rules! blocks {
        ($name:ident, $first:ident, $second:ident, $($master:ident),+) => {{
            $(let $master = $master.as_chunks_mut::<BLOCK>().0;)+
            let first = $first.as_chunks_mut::<BLOCK>().0;
            let second = $second.as_chunks_mut::<BLOCK>().0;
            for (b, gradient) in gradient.iter().enumerate() {
                let start = (b * BLOCK) as u32;
                $name($(&mut $master[b],)+ gradient, &mut first[b], &mut second[b], noise, start, update);
            }
        }};
    }
    match (&mut tensors.master, &mut tensors.first, &mut tensors.second) {
        (Master::Split { upper, lower }, Moment::F32(first), Moment::F32(second)) => {
            blocks!(split_f32, first, second, upper, lower);
        }
        (Master::Split { upper, lower }, Moment::Bf16(first), Moment::Bf16(second)) => {
            blocks!(split_bf16, first, second, upper, lower);
        }
        (
            Master::Split { upper, lower },
            Moment::Int8 { codes, scales },
            Moment::Int8 {
                codes: codes2,
                scales: scales2,
            },
        ) => {
            let upper = upper.as_chunks_mut::<BLOCK>().0;
            let lower = lower.as_chunks_mut::<BLOCK>().0;
            let codes = codes.as_chunks_mut::<BLOCK>().0;
            let codes2 = codes2.as_chunks_mut::<BLOCK>().0;
            let mut random = [0u32; BLOCK];
            for (b, gradient) in gradient.iter().enumerate() {
                noise.fill(b * BLOCK, &mut random);
                split_int8(
                    &mut upper[b],
                    &mut lower[b],
                    gradient,
                    Bytes {
                        codes: &mut codes[b],
                        scale: &mut scales[b],
                    },
                    Bytes {
                        codes: &mut codes2[b],
                        scale: &mut scales2[b],
                    },
                    &random,
                    update,
                );
            }
        }
        (Master::F32(weights), Moment::Bf16(first), Moment::Bf16(second)) => {
            blocks!(f32_bf16, first, second, weights);
        }
        (Master::Bf16(weights), Moment::Bf16(first), Moment::Bf16(second)) => {
            blocks!(bf16_bf16, first, second, weights);
        }
        _ => return 0,
    }
    gradient.len() * BLOCK
}

impl Tensors<'_> {
    /// Replaces each element's weight and moments by what `update` makes of (weight, gradient,
    /// first, second); a moment that is absent is read as what it was in scratch memory and lost.
    #[inline(always)]
    pub(crate) fn each(&mut self, noise: Noise, update: impl Element) {
        let mut stage = [[0f32; BLOCK]; 4];
        let mut random = [0u32; BLOCK];
        let [weights, gradient, first, second] = &mut stage;
        let narrow = |x: &Moment<'_>| matches!(x, Moment::Bf16(_) | Moment::Int8 { .. });
        let rounded =
            narrow(&self.first) || narrow(&self.second) || matches!(self.master, Master::Bf16(_));
        let length = self.len();
        let mut at = run(self, noise, update);
        while at < length {
            let n = BLOCK.min(length - at);
            let g = self.gradient.load(at, &mut gradient[..n]);
            let m = self.first.load::<true>(at, &mut first[..n]);
            let v = self.second.load::<false>(at, &mut second[..n]);
            let w = self.master.load(at, &mut weights[..n]);
            for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
                (*w, *m, *v) = update(*w, *g, *m, *v);
            }
            self.output.store(at, w);
            if rounded {
                noise.fill(at, &mut random[..n]);
            }
            self.first.store::<true>(at, &first[..n], &random[..n]);
            self.second.store::<false>(at, &second[..n], &random[..n]);
            self.master.store(at, &weights[..n], &random[..n]);
            at += n;
        }
    }
}
