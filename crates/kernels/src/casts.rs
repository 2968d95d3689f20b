//! f32 to a 16-bit form and back, scaled on the way: the division of an average costs no pass of its
//! own.

use crate::formats::{from_bf16, from_f16, to_bf16, to_f16};
use crate::isa::{Isa, Work};

/// A 16-bit form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
}

/// `out = scale * values`, rounded to nearest even; the shorter of the two slices counts.
pub fn narrow(values: &[f32], scale: f32, half: Half, out: &mut [u16]) {
    match half {
        Half::F16 => Isa::detect().run(Narrow(values, scale, out, to_f16)),
        Half::Bf16 => Isa::detect().run(Narrow(values, scale, out, to_bf16)),
    }
}

struct Narrow<'a, F>(&'a [f32], f32, &'a mut [u16], F);

impl<F: Fn(f32) -> u16> Work for Narrow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (out, value) in self.2.iter_mut().zip(self.0) {
            *out = (self.3)(value * self.1);
        }
    }
}

/// `out = scale * values`; the shorter of the two slices counts.
pub fn widen(values: &[u16], scale: f32, half: Half, out: &mut [f32]) {
    match half {
        Half::F16 => Isa::detect().run(Widen(values, scale, out, from_f16)),
        Half::Bf16 => Isa::detect().run(Widen(values, scale, out, from_bf16)),
    }
}

struct Widen<'a, F>(&'a [u16], f32, &'a mut [f32], F);

impl<F: Fn(u16) -> f32> Work for Widen<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (out, value) in self.2.iter_mut().zip(self.0) {
            *out = (self.3)(*value) * self.1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_and_comes_back() {
        for half in [Half::F16, Half::Bf16] {
            let (mut out, mut back) = ([0; 4], [0.0; 4]);
            narrow(&[1.0, -2.0, f32::INFINITY, f32::NAN], 0.5, half, &mut out);
            widen(&out, 2.0, half, &mut back);
            assert_eq!(back[..3], [1.0, -2.0, f32::INFINITY]);
            assert!(back[3].is_nan());
        }
    }

    #[test]
    fn scaling_comes_before_the_cast() {
        let mut out = [0; 1];
        narrow(&[80_000.0], 0.5, Half::F16, &mut out);
        assert_eq!(from_f16(out[0]), 40_000.0);
    }
}
