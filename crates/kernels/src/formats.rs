//! The number formats of optimizer states, as loops over blocks that every compiler vectorises:
//! integer arithmetic on bit patterns, no branch, no table.
//!
//! - **bf16** is the upper half of an f32. Rounded to nearest even, or stochastically: up with the
//!   probability of the part that is cut off, so that the mean over many steps is right even where
//!   one step is smaller than half a unit in the last place.
//! - **split**: an f32 in two 16-bit halves. The upper half is the f32 *rounded* to bf16 (half away
//!   from zero), the lower half is the rest as a signed number, so that `upper << 16 + lower` is the
//!   f32 again, bit for bit. The upper half is what the accelerator computes with: a master copy
//!   costs 2 bytes more than the weights alone, and not 4. NaN is kept as one quiet pattern.
//! - **f16** for fp16 training: gradients in, weights out.
//! - **one byte** for a moment: a float of 3 mantissa bits, 4 exponent bits and a sign for the first
//!   moment, 5 exponent bits for the second, which has no sign. [`BLOCK`] elements share a power of
//!   two, that of the largest, as in microscaling formats (arXiv 2310.10537). So codes mean the same
//!   numbers when the power changes, and a number that is on the grid stays there bit for bit.
//!   Rounding is stochastic, but nothing above zero becomes a second moment of zero: a step divides
//!   by its root. A block with a number that is not finite, or above 1.875 * 2^127, is NaN.
//!
//! Random bits are a hash of (key, index), no generator state: the same step gives the same bits on
//! any number of threads. Keys are mixed well (lowbias32 by C. Wellons, "Prospecting for hash
//! functions", 2018); of an element's bits rounding asks only that each 16 are uniform and that
//! neighbours and steps do not go together, so `counter_hash` is one round: a Weyl sequence and one
//! multiplication, a third of the cost.

/// Elements of one block: what is staged in the first-level cache at a time.
pub const BLOCK: usize = 256;

const INFINITY: u32 = 0x7f80_0000;
const QUIET_NAN: u32 = 0x7fc0_0000;

/// A hash of 32 bits in which every input bit changes each output bit about half of the time.
#[inline(always)]
pub fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// 32 random bits of element `index` under `key`; the loop adds a constant for each element.
#[inline(always)]
pub fn counter_hash(index: u32, key: u32) -> u32 {
    let mut x = index.wrapping_mul(0x9e37_79b9).wrapping_add(key);
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^ (x >> 15)
}

/// The key of the random bits of one tensor in one step.
pub fn key(seed: u64, step: u64, stream: u32) -> u32 {
    let mut key = mix(stream ^ 0x9e37_79b9);
    for word in [
        seed as u32,
        (seed >> 32) as u32,
        step as u32,
        (step >> 32) as u32,
    ] {
        key = mix(key ^ word).wrapping_add(0x9e37_79b9);
    }
    key
}

/// f32 to bf16, to nearest, ties to even.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > INFINITY {
        nan
    } else {
        rounded
    }) as u16
}

/// bf16 to f32, exact.
#[inline(always)]
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// f32 to bf16, up or down by 16 random bits in the low half of `random`.
#[inline(always)]
pub fn to_bf16_stochastic(x: f32, random: u32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(random & 0xffff) >> 16;
    let special = (bits >> 16)
        | if bits & 0x7fff_ffff > INFINITY {
            0x40
        } else {
            0
        };
    (if bits & 0x7fff_ffff >= INFINITY {
        special
    } else {
        rounded
    }) as u16
}

/// The two halves of an f32; see the head of this file.
#[inline(always)]
pub fn split(x: f32) -> (u16, u16) {
    let bits = x.to_bits();
    let bits = if bits & 0x7fff_ffff > INFINITY {
        QUIET_NAN
    } else {
        bits
    };
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}

/// The f32 that was [`split`].
#[inline(always)]
pub fn join(upper: u16, lower: u16) -> f32 {
    let lower = i32::from(lower as i16) as u32;
    f32::from_bits((u32::from(upper) << 16).wrapping_add(lower))
}

/// Mantissa bits of an f32 below those of a code.
const CUT: u32 = 20;

/// The numbers that a block's codes mean. `TOP`: the highest exponent of a code, the lowest is 0:
/// [`FIRST`] or [`SECOND`]. Below exponent 1 numbers are equally spaced, as with denormal floats.
#[derive(Debug, Clone, Copy)]
pub struct Grid<const TOP: u32> {
    /// The f32 of exponent 0 of a code, as bits.
    low: u32,
    /// Ored into every number: not 0 where the block is NaN.
    nan: u32,
}

/// `TOP` of a first moment.
pub const FIRST: u32 = 15;
/// `TOP` of a second moment.
pub const SECOND: u32 = 31;

impl<const TOP: u32> Grid<TOP> {
    /// The grid of a block whose scale is `scale`: the f32 exponent of its highest numbers.
    #[inline(always)]
    pub fn new(scale: u8) -> Self {
        // No number of the grid is a denormal f32: some GPUs take those for zero.
        let top = u32::from(scale).max(TOP + 3);
        let nan = if scale == 255 { QUIET_NAN } else { 0 };
        let low = (top - TOP) << 23;
        Grid { low, nan }
    }

    /// The scale of a block by the largest bits of its numbers without their signs.
    #[inline(always)]
    pub fn scale(largest: u32) -> u8 {
        // Rounded up, as numbers are: the highest code is not exceeded.
        ((largest + ((1 << CUT) - 1)) >> 23).clamp(TOP + 3, 255) as u8
    }

    /// The number of a code without its sign.
    #[inline(always)]
    pub fn decode(self, code: u32) -> f32 {
        let one = self.low + (1 << 23);
        let bits = code << CUT;
        let small = f32::from_bits(one + bits) - f32::from_bits(one);
        let number = if code < 8 {
            small.to_bits()
        } else {
            self.low + bits
        };
        f32::from_bits(number | self.nan)
    }

    /// The code of a number without its sign, up or down by the low 16 bits of `random`.
    #[inline(always)]
    pub fn encode(self, magnitude: u32, random: u32) -> u32 {
        let one = self.low + (1 << 23);
        let small = (f32::from_bits(magnitude) + f32::from_bits(one))
            .to_bits()
            .wrapping_sub(one);
        let place = if magnitude < one {
            small
        } else {
            magnitude.wrapping_sub(self.low)
        };
        let code = place.wrapping_add((random & 0xffff) << (CUT - 16)) >> CUT;
        if self.nan == 0 { code } else { 0 }
    }
}

/// f32 of a first moment's code.
#[inline(always)]
pub fn from_first(code: u8, grid: Grid<FIRST>) -> f32 {
    let code = u32::from(code);
    f32::from_bits(grid.decode(code & 0x7f).to_bits() | (code & 0x80) << 24)
}

/// A first moment's code.
#[inline(always)]
pub fn to_first(x: f32, grid: Grid<FIRST>, random: u32) -> u8 {
    let bits = x.to_bits();
    (grid.encode(bits & 0x7fff_ffff, random) | (bits >> 24 & 0x80)) as u8
}

/// f32 of a second moment's code.
#[inline(always)]
pub fn from_second(code: u8, grid: Grid<SECOND>) -> f32 {
    grid.decode(u32::from(code))
}

/// A second moment's code.
#[inline(always)]
pub fn to_second(x: f32, grid: Grid<SECOND>, random: u32) -> u8 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let least = u32::from(magnitude != 0 && grid.nan == 0);
    grid.encode(magnitude, random).max(least) as u8
}

/// f16 to f32, exact (subnormals by a multiplication with a power of two).
#[inline(always)]
pub fn from_f16(x: u16) -> f32 {
    let magnitude = u32::from(x & 0x7fff) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000); // 2^112
    let special = magnitude | INFINITY;
    let bits = if magnitude >= 0x0f80_0000 {
        special
    } else {
        scaled.to_bits()
    };
    f32::from_bits(bits | (u32::from(x & 0x8000) << 16))
}

/// f32 to f16, to nearest, ties to even; what is too large becomes infinite.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    // Below the smallest normal f16, adding 0.5 lets the adder round at the right place.
    let small = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude
        .wrapping_sub(0x3800_0000)
        .wrapping_add(0xfff + odd)
        >> 13;
    let large = if magnitude > INFINITY { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < 0x3880_0000 {
        small
    } else {
        normal
    };
    (sign
        | if magnitude >= 0x4780_0000 {
            large
        } else {
            finite
        }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_split_number_comes_back_bit_for_bit(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let (upper, lower) = split(x);
            if x.is_nan() {
                prop_assert!(join(upper, lower).is_nan() && from_bf16(upper).is_nan());
            } else {
                prop_assert_eq!(join(upper, lower).to_bits(), bits);
                // The upper half is a nearest bf16: within half a unit in its last place.
                let next = from_bf16(upper);
                if next.is_finite() {
                    let ulp = f64::from(from_bf16(upper & 0x7fff).max(f32::MIN_POSITIVE)) / 128.0;
                    prop_assert!((f64::from(next) - f64::from(x)).abs() <= ulp);
                }
            }
        }

        #[test]
        fn stochastic_rounding_takes_a_neighbour(bits in any::<u32>(), random in any::<u32>()) {
            let x = f32::from_bits(bits);
            let rounded = to_bf16_stochastic(x, random);
            if x.is_nan() {
                prop_assert!(from_bf16(rounded).is_nan());
            } else {
                let down = (bits >> 16) as u16;
                prop_assert!(rounded == down || rounded == down.wrapping_add(1));
                prop_assert!(bits & 0xffff != 0 || rounded == down);
            }
        }

        #[test]
        fn a_byte_is_a_neighbour_and_comes_back(
            bits in 0u32..0x7f80_0000, below in 0u32..(12 << 23), random in any::<u32>(),
        ) {
            let bits = bits.max(40 << 23);
            let largest = f32::from_bits(bits);
            let x = f32::from_bits(bits - below);
            let first = Grid::<FIRST>::new(Grid::<FIRST>::scale(bits));
            let second = Grid::<SECOND>::new(Grid::<SECOND>::scale(bits));
            for (sign, y) in [(1.0, x), (-1.0, -x)] {
                let code = to_first(y, first, random);
                let value = from_first(code, first);
                if largest > 1.875 * f32::from_bits(0x7f00_0000) {
                    prop_assert!(value.is_nan());
                    continue;
                }
                // Three bits of mantissa, or equal steps below the smallest of those.
                let step = (x / 8.0).max(largest / 32768.0);
                prop_assert!((value - y).abs() <= step, "{y} became {value}");
                prop_assert_eq!(to_first(value, first, random), code);
                prop_assert_eq!(value.signum(), sign);
            }
            let value = from_second(to_second(x, second, random), second);
            if largest <= 1.875 * f32::from_bits(0x7f00_0000) {
                prop_assert!((value - x).abs() <= x / 8.0, "{x} became {value}");
                // Also on the grid of its own power.
                let own = Grid::<SECOND>::new(Grid::<SECOND>::scale(value.to_bits()));
                prop_assert_eq!(from_second(to_second(value, own, random), own), value);
            }
        }

        #[test]
        fn f16_rounds_to_nearest(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let got = to_f16(x);
            if x.is_nan() {
                prop_assert!(from_f16(got).is_nan());
            } else if x.abs() < 65520.0 {
                let value = f64::from(from_f16(got));
                let error = (value - f64::from(x)).abs();
                // No other f16 is nearer.
                for other in [got.wrapping_add(1), got.wrapping_sub(1)] {
                    let other = f64::from(from_f16(other));
                    prop_assert!(!other.is_finite() || error <= (other - f64::from(x)).abs());
                }
            } else {
                prop_assert_eq!(got & 0x7fff, 0x7c00);
            }
        }
    }

    #[test]
    fn every_f16_comes_back() {
        for bits in 0..=u16::MAX {
            let x = from_f16(bits);
            assert!(x.is_nan() || to_f16(x) == bits, "{bits:#x} -> {x}");
        }
    }

    #[test]
    fn bytes_are_right_on_the_mean_and_zero_is_kept() {
        let grid = Grid::<FIRST>::new(Grid::<FIRST>::scale(1f32.to_bits()));
        let other = Grid::<SECOND>::new(Grid::<SECOND>::scale(1f32.to_bits()));
        for x in [0.9f32, 0.011, 3e-5, 7e-6] {
            let draws = |code: &dyn Fn(u32) -> f32| {
                let sum: f64 = (0..65_536u32).map(|r| f64::from(code(r))).sum();
                sum / 65_536.0
            };
            let mean = draws(&|r| from_first(to_first(x, grid, r), grid));
            assert!((mean / f64::from(x) - 1.0).abs() < 1e-3, "{x} {mean}");
            let mean = draws(&|r| from_second(to_second(x, other, r), other));
            assert!((mean / f64::from(x) - 1.0).abs() < 1e-3, "{x} {mean}");
        }
        // A second moment is never rounded to zero, and zeros are zeros under any scale.
        for scale in 0..255 {
            let grid = Grid::<SECOND>::new(scale);
            assert!(from_second(to_second(1e-45, grid, 0), grid) > 0.0);
            assert_eq!(from_second(0, grid), 0.0);
            assert_eq!(from_first(0, Grid::new(scale)), 0.0);
            assert_eq!(to_second(0.0, grid, 0xffff), 0);
        }
    }

    #[test]
    fn stochastic_rounding_is_right_on_the_mean() {
        let x = 1.0 + 1.0 / 512.0; // a quarter of the way to the next bf16
        let up = |random: u32| to_bf16_stochastic(x, random) != to_bf16_stochastic(x, 0);
        for step in 0..8 {
            let key = key(1, step, 2);
            for shift in [0, 16] {
                let ups: Vec<bool> = (0..100_000u32)
                    .map(|i| up(counter_hash(i, key) >> shift))
                    .collect();
                let count = ups.iter().filter(|up| **up).count();
                assert!((24_400..25_600).contains(&count), "{step} {shift}: {count}");
                // Neighbours (also of the next rows of a vector) are rounded independently.
                for apart in [1, 2, 3, 8, 16, 256] {
                    let both = ups.iter().zip(&ups[apart..]).filter(|(a, b)| **a && **b);
                    let both = both.count();
                    assert!((5_850..6_650).contains(&both), "{step} {apart}: {both}");
                }
            }
            // The two moments of an element too.
            let both = (0..100_000u32).map(|i| counter_hash(i, key));
            let both = both.filter(|bits| up(*bits) && up(bits >> 16)).count();
            assert!((5_850..6_650).contains(&both), "{step}: {both}");
        }
    }
}
