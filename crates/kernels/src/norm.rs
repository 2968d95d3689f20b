//! The sum of squares of a gradient, for clipping by the global norm: f64 sums over 16 lanes, block
//! by block in a fixed order, so that the result does not depend on the number of threads.
//! Infinities and NaN come through: a sum that is not finite tells that the step must be skipped.

use crate::formats::{from_bf16, from_f16};
use crate::isa::{Isa, Work};
use crate::state::Gradient;

/// Elements that are added up by themselves before their sum is added to the others.
pub const SPAN: usize = 1 << 16;
const LANES: usize = 16;

/// The sum of squares of at most [`SPAN`] elements; longer gradients are refused by `None`, because
/// the caller has to add up spans in order.
pub fn squares(isa: Isa, gradient: Gradient<'_>) -> Option<f64> {
    let length = match gradient {
        Gradient::F32(x) => x.len(),
        Gradient::Bf16(x) | Gradient::F16(x) => x.len(),
    };
    (length <= SPAN).then(|| isa.run(Squares(gradient)))
}

struct Squares<'a>(Gradient<'a>);

impl Work for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        match self.0 {
            Gradient::F32(x) => sum(x, |x| x),
            Gradient::Bf16(x) => sum(x, from_bf16),
            Gradient::F16(x) => sum(x, from_f16),
        }
    }
}

#[inline(always)]
fn sum<T: Copy>(values: &[T], widen: impl Fn(T) -> f32) -> f64 {
    let mut lanes = [0f64; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            let value = f64::from(widen(*value));
            *lane += value * value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        let value = f64::from(widen(*value));
        *lane += value * value;
    }
    lanes.iter().sum()
}
