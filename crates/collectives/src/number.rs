//! Element types and what is computed on them, in place on bytes of this machine's order.
//!
//! Types have the numbers of `evener_negotiate::check::DTYPES`, reductions those of Horovod. A loop
//! is over arrays of one element's bytes, so no alignment is asked of a buffer, and the compiler
//! makes vector code of it all the same.
//!
//! float16 and bfloat16 are computed in float32 and rounded once per step. Whole numbers wrap around
//! in sums, and an average goes toward zero.

use half::{bf16, f16};

/// Horovod's numbers of the reductions.
pub const AVERAGE: u8 = 0;
/// The sum.
pub const SUM: u8 = 1;
/// The Adasum rule.
pub const ADASUM: u8 = 2;
/// The smallest.
pub const MIN: u8 = 3;
/// The largest.
pub const MAX: u8 = 4;
/// The product.
pub const PRODUCT: u8 = 5;

/// Bytes of an element.
#[must_use]
pub fn size(dtype: u8) -> usize {
    evener_negotiate::check::element_bytes(dtype) as usize
}

trait Number: Copy {
    type Bytes: AsRef<[u8]> + Copy;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn wide(self) -> f64;
    fn narrow(value: f64) -> Self;
    fn divide(self, by: u32) -> Self;
}

macro_rules! whole {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Bytes = [u8; size_of::<$type>()];
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            fn wide(self) -> f64 { self as f64 }
            // As Rust's casts: toward zero, and at the ends of the range.
            fn narrow(value: f64) -> Self { value as Self }
            fn divide(self, by: u32) -> Self { (i128::from(self) / i128::from(by)) as Self }
        }
    )*};
}
whole!(u8, i8, u16, i16, i32, i64);

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Bytes = [u8; size_of::<$type>()];
            fn add(self, other: Self) -> Self { self + other }
            fn mul(self, other: Self) -> Self { self * other }
            // A number that is none stays one, whichever side it is on.
            fn min(self, other: Self) -> Self {
                if self.is_nan() || self < other { self } else { other }
            }
            fn max(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
            fn wide(self) -> f64 { f64::from(self) }
            fn narrow(value: f64) -> Self { value as Self }
            fn divide(self, by: u32) -> Self { self / by as Self }
        }
    )*};
}
float!(f32, f64);

macro_rules! half {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Bytes = [u8; 2];
            fn add(self, other: Self) -> Self { Self::from_f32(self.to_f32() + other.to_f32()) }
            fn mul(self, other: Self) -> Self { Self::from_f32(self.to_f32() * other.to_f32()) }
            fn min(self, other: Self) -> Self {
                if self.is_nan() || self < other { self } else { other }
            }
            fn max(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
            fn wide(self) -> f64 { self.to_f64() }
            fn narrow(value: f64) -> Self { Self::from_f32(value as f32) }
            fn divide(self, by: u32) -> Self { Self::from_f32(self.to_f32() / by as f32) }
        }
    )*};
}
half!(f16, bf16);

/// true and false; a sum is "any", a product "all".
#[derive(Clone, Copy)]
struct Truth(bool);

impl Truth {
    fn from_ne_bytes(bytes: [u8; 1]) -> Self {
        Self(bytes[0] != 0)
    }
    fn to_ne_bytes(self) -> [u8; 1] {
        [u8::from(self.0)]
    }
}

impl Number for Truth {
    type Bytes = [u8; 1];
    fn add(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    fn mul(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    fn min(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    fn max(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    fn wide(self) -> f64 {
        f64::from(u8::from(self.0))
    }
    fn narrow(value: f64) -> Self {
        Self(value != 0.0)
    }
    fn divide(self, _by: u32) -> Self {
        self
    }
}

/// `$body` with `$type` as the element type of number `$dtype`, `$n` as its size.
macro_rules! with_type {
    ($dtype:expr, $type:ident, $n:ident, $body:block) => {
        match $dtype {
            0 => {
                type $type = u8;
                const $n: usize = 1;
                $body
            }
            1 => {
                type $type = i8;
                const $n: usize = 1;
                $body
            }
            2 => {
                type $type = u16;
                const $n: usize = 2;
                $body
            }
            3 => {
                type $type = i16;
                const $n: usize = 2;
                $body
            }
            4 => {
                type $type = i32;
                const $n: usize = 4;
                $body
            }
            5 => {
                type $type = i64;
                const $n: usize = 8;
                $body
            }
            6 => {
                type $type = f16;
                const $n: usize = 2;
                $body
            }
            7 => {
                type $type = f32;
                const $n: usize = 4;
                $body
            }
            8 => {
                type $type = f64;
                const $n: usize = 8;
                $body
            }
            9 => {
                type $type = Truth;
                const $n: usize = 1;
                $body
            }
            _ => {
                type $type = bf16;
                const $n: usize = 2;
                $body
            }
        }
    };
}

/// `into` becomes the reduction of `into` and `other`, element by element.
pub fn reduce(dtype: u8, op: u8, into: &mut [u8], other: &[u8]) {
    macro_rules! each {
        ($type:ident, $n:ident, $how:expr) => {
            for (a, b) in into
                .as_chunks_mut::<$n>()
                .0
                .iter_mut()
                .zip(other.as_chunks::<$n>().0)
            {
                *a = $how($type::from_ne_bytes(*a), $type::from_ne_bytes(*b)).to_ne_bytes();
            }
        };
    }
    with_type!(dtype, T, N, {
        match op {
            MIN => each!(T, N, Number::min),
            MAX => each!(T, N, Number::max),
            PRODUCT => each!(T, N, Number::mul),
            _ => each!(T, N, Number::add),
        }
    });
}

/// Each element times `factor`; whole numbers in float64 and toward zero, halves in float32.
pub fn scale(dtype: u8, data: &mut [u8], factor: f64) {
    if factor == 1.0 {
        return;
    }
    if dtype == 7 {
        for a in data.as_chunks_mut::<4>().0 {
            *a = (f32::from_ne_bytes(*a) * factor as f32).to_ne_bytes();
        }
        return;
    }
    with_type!(dtype, T, N, {
        for a in data.as_chunks_mut::<N>().0 {
            *a = T::narrow(T::from_ne_bytes(*a).wide() * factor).to_ne_bytes();
        }
    });
}

/// Each element of a sum over `size` ranks becomes what `op` and the factor after it ask for.
pub fn finish(dtype: u8, op: u8, data: &mut [u8], factor: f64, size: usize) {
    if op != AVERAGE || size == 1 {
        return scale(dtype, data, factor);
    }
    let whole = !matches!(dtype, 6..=8 | 10);
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    with_type!(dtype, T, N, {
        for a in data.as_chunks_mut::<N>().0 {
            let sum = T::from_ne_bytes(*a);
            let mean = if whole && factor != 1.0 {
                T::narrow(sum.wide() * factor / f64::from(size))
            } else {
                sum.divide(size)
            };
            *a = mean.to_ne_bytes();
        }
    });
    if !whole {
        scale(dtype, data, factor);
    }
}

/// The elements as float64, added to `into`.
pub fn widen(dtype: u8, data: &[u8], into: &mut Vec<f64>) {
    with_type!(dtype, T, N, {
        let values = data.as_chunks::<N>().0.iter();
        into.extend(values.map(|a| T::from_ne_bytes(*a).wide()));
    });
}

/// The other way.
pub fn narrow(dtype: u8, values: &[f64], into: &mut [u8]) {
    with_type!(dtype, T, N, {
        for (a, value) in into.as_chunks_mut::<N>().0.iter_mut().zip(values) {
            *a = T::narrow(*value).to_ne_bytes();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<const N: usize, T: Copy>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|value| to(*value)).collect()
    }

    #[test]
    fn averages_of_whole_numbers_go_toward_zero() {
        let mut data = bytes(&[-5i32, 7, 11, -9], i32::to_ne_bytes);
        finish(4, AVERAGE, &mut data, 1.0, 2);
        assert_eq!(data, bytes(&[-2i32, 3, 5, -4], i32::to_ne_bytes));
    }

    #[test]
    fn large_whole_numbers_keep_their_last_digits() {
        let mut data = bytes(&[(1i64 << 60) + 4], i64::to_ne_bytes);
        finish(5, AVERAGE, &mut data, 1.0, 2);
        assert_eq!(data, bytes(&[(1i64 << 59) + 2], i64::to_ne_bytes));
    }

    #[test]
    fn a_number_that_is_none_is_seen_from_both_sides() {
        for op in [MIN, MAX, SUM, PRODUCT] {
            let (nan, one) = (f32::NAN.to_ne_bytes(), 1f32.to_ne_bytes());
            for (mut a, b) in [(nan, one), (one, nan)] {
                reduce(7, op, &mut a, &b);
                assert!(f32::from_ne_bytes(a).is_nan(), "op {op}");
            }
        }
    }

    #[test]
    fn a_sum_of_truths_is_any() {
        let mut a = [0, 1, 0, 1];
        reduce(9, SUM, &mut a, &[0, 0, 1, 1]);
        assert_eq!(a, [0, 1, 1, 1]);
        finish(9, AVERAGE, &mut a, 1.0, 2);
        assert_eq!(a, [0, 1, 1, 1]);
    }
}
