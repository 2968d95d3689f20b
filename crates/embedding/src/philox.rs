//! Initial values: a function of (seed, key, column) and of nothing else, so that the order in which
//! keys come, the shard, the number of threads and the framework do not matter.
//!
//! Philox4x32-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
//! counter is (column / 4, 0, key), the key of the generator is the seed.

use crate::options::Init;
use evener_kernels::isa::{Isa, Work};

/// Four 32-bit words for a counter under a key.
#[inline]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key[0] = key[0].wrapping_add(0x9E37_79B9);
        key[1] = key[1].wrapping_add(0xBB67_AE85);
    }
    counter
}

/// The words of (seed, key, block).
#[inline]
pub fn words(seed: u64, key: i64, block: u32, stream: u32) -> [u32; 4] {
    philox(
        [block, stream, key as u32, (key as u64 >> 32) as u32],
        [seed as u32, (seed >> 32) as u32],
    )
}

/// Uniform in (0, 1): never 0 and never 1.
#[inline(always)]
fn unit(word: u32) -> f32 {
    let unit = ((word >> 8) as i32 as f32 + 0.5) * (1.0 / 16_777_216.0);
    // The sum of the largest word is rounded up to 1.
    unit.min(1.0 - f32::EPSILON / 2.0)
}

/// The natural logarithm of a normal number, with additions, multiplications and divisions alone:
/// those are the same on every machine, the system's `ln` is not. Good to about 1e-13.
#[inline(always)]
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = f64::from((bits >> 52) as i32 - 1023);
    let mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    let above = mantissa > std::f64::consts::SQRT_2;
    let mantissa = if above { mantissa * 0.5 } else { mantissa };
    let exponent = if above { exponent + 1.0 } else { exponent };
    // ln m = 2 artanh((m - 1) / (m + 1)).
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let z = s * s;
    let mut sum = 1.0 / 17.0;
    for odd in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * z + 1.0 / odd;
    }
    2.0 * s * sum + exponent * std::f64::consts::LN_2
}

/// Up to here from one half AS 241 has a formula that needs no logarithm; 85% of all values are there.
const CENTRAL: f64 = 0.425;

/// The value below which a standard normal variable is with probability `p`: algorithm AS 241,
/// PPND7 (M. Wichura, 1988), good to 7 digits. Its formula for `p` near one half.
#[inline(always)]
fn central(p: f64) -> f32 {
    let q = p - 0.5;
    let r = 0.180_625 - q * q;
    let above = ((59.109_374_720 * r + 159.291_132_02) * r + 50.434_271_938) * r + 3.387_132_717_9;
    let below = ((67.187_563_600 * r + 78.757_757_664) * r + 17.895_169_469) * r + 1.0;
    (q * above / below) as f32
}

/// The formula for all other `p` of at least 2^-36 and at most 1 - 2^-36: [`unit`] gives no others. (For
/// those AS 241 has a third formula.)
#[inline(always)]
fn tail(p: f64) -> f32 {
    let low = p < 0.5;
    let r = (-ln(if low { p } else { 1.0 - p })).sqrt() - 1.6;
    let above =
        ((0.170_238_211_03 * r + 1.306_728_481_6) * r + 2.756_815_390_0) * r + 1.423_437_277_7;
    let below = (0.120_211_329_75 * r + 0.737_001_642_50) * r + 1.0;
    let value = above / below;
    (if low { -value } else { value }) as f32
}

/// The words of sixteen columns: four counters side by side.
#[inline(always)]
fn sixteen(seed: u64, key: i64, block: u32) -> [u32; 16] {
    let mut bump = [seed as u32, (seed >> 32) as u32];
    let first = block * 4;
    let first = [first, first + 1, first + 2, first + 3];
    let mut counter = [
        first,
        [0; 4],
        [key as u32; 4],
        [(key as u64 >> 32) as u32; 4],
    ];
    for _ in 0..10 {
        let before = counter;
        for i in 0..4 {
            let a = u64::from(before[0][i]) * 0xD251_1F53;
            let b = u64::from(before[2][i]) * 0xCD9E_8D57;
            counter[0][i] = (b >> 32) as u32 ^ before[1][i] ^ bump[0];
            counter[1][i] = b as u32;
            counter[2][i] = (a >> 32) as u32 ^ before[3][i] ^ bump[1];
            counter[3][i] = a as u32;
        }
        bump[0] = bump[0].wrapping_add(0x9E37_79B9);
        bump[1] = bump[1].wrapping_add(0xBB67_AE85);
    }
    let mut words = [0; 16];
    for (i, word) in words.iter_mut().enumerate() {
        *word = counter[i % 4][i / 4];
    }
    words
}

/// Normal values of a key, each by the probability that `chance` makes of a uniform one. Sixteen at a
/// time go through the formula without branches; those of the tails are then done again, four at a time.
/// No two operations are made one, so that every set of instructions gives the same bits.
struct Normals<'a, F> {
    seed: u64,
    key: i64,
    out: &'a mut [f32],
    spread: (f32, f32),
    chance: F,
}

impl<F: Fn(f64) -> f64> Work for Normals<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mean, std) = self.spread;
        for (block, part) in self.out.chunks_mut(16).enumerate() {
            let words = sixteen(self.seed, self.key, block as u32);
            let mut chances = [0.0; 16];
            for (p, word) in chances.iter_mut().zip(words) {
                *p = (self.chance)(f64::from(unit(word)));
            }
            let mut values = [0.0; 16];
            for (value, &p) in values.iter_mut().zip(&chances) {
                *value = central(p);
            }
            let (mut outside, mut count) = ([0usize; 16], 0);
            for (i, p) in chances.iter().enumerate() {
                outside[count] = i;
                count += usize::from((p - 0.5).abs() > CENTRAL);
            }
            for four in outside[..count].chunks(4) {
                let mut p = [0.25; 4];
                for (p, &i) in p.iter_mut().zip(four) {
                    *p = chances[i];
                }
                let mut found = [0.0; 4];
                for (found, p) in found.iter_mut().zip(p) {
                    *found = tail(p);
                }
                for (&i, found) in four.iter().zip(found) {
                    values[i] = found;
                }
            }
            for (out, value) in part.iter_mut().zip(values) {
                *out = mean + std * value;
            }
        }
    }
}

/// The probability that a standard normal variable is below -2.
const BELOW_TWO: f64 = 0.022_750_131_948_179_2;

/// Writes the initial values of `key`.
pub fn fill(init: &Init, seed: u64, key: i64, out: &mut [f32]) {
    match *init {
        Init::Zeros => out.fill(0.0),
        Init::Constant { value } => out.fill(value),
        Init::Uniform { low, high } => {
            for (block, part) in out.chunks_mut(4).enumerate() {
                let random = words(seed, key, block as u32, 0);
                for (value, word) in part.iter_mut().zip(random) {
                    *value = low + (high - low) * unit(word);
                }
            }
        }
        Init::Normal { mean, std } => Isa::detect().run(Normals {
            seed,
            key,
            out,
            spread: (mean, std),
            chance: |p| p,
        }),
        Init::TruncatedNormal { mean, std } => Isa::detect().run(Normals {
            seed,
            key,
            out,
            spread: (mean, std),
            chance: |p| BELOW_TWO + (1.0 - 2.0 * BELOW_TWO) * p,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(p: f64) -> f32 {
        match (p - 0.5).abs() > CENTRAL {
            true => tail(p),
            false => central(p),
        }
    }

    // The known answers that come with Random123 1.14 (kat_vectors, philox4x32 10).
    #[test]
    fn philox_gives_the_known_answers() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, z) in [
            (0.5, 0.0),
            (0.841_344_746, 1.0),
            (0.022_750_132, -2.0),
            (0.998_650_102, 3.0),
            (2.866_515_7e-7, -5.0),
            (9.865_876e-10, -6.0),
        ] {
            assert!(
                (f64::from(normal(p)) - z).abs() < 2e-6,
                "{p}: {}",
                normal(p)
            );
        }
        for x in [1e-9, 0.3, 0.9999, 1.0, 7.5, 1e12] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-12 * (1.0 + f64::ln(x).abs()));
        }
    }

    #[test]
    fn every_word_is_inside_of_0_and_1() {
        for word in [0, 1, u32::MAX - 256, u32::MAX] {
            assert!(unit(word) > 0.0 && unit(word) < 1.0, "{word}");
            assert!(normal(f64::from(unit(word))).abs() < 5.5);
        }
    }

    #[test]
    fn every_set_of_instructions_gives_the_same_bits() {
        let values = |isa: Isa| {
            let mut all = Vec::new();
            for key in 0..if cfg!(miri) { 3 } else { 3000 } {
                let mut out = [0.0; 21];
                isa.run(Normals {
                    seed: 5,
                    key: key * 0x1_0000_0001,
                    out: &mut out,
                    spread: (0.5, 2.0),
                    chance: |p| p,
                });
                all.extend(out.map(f32::to_bits));
            }
            all
        };
        let base = values(Isa::BASELINE);
        for isa in Isa::available() {
            assert_eq!(values(isa), base, "{}", isa.name());
        }
        // Column by column, as philox says.
        for column in 0..21 {
            let word = words(5, 0x1_0000_0001, column as u32 / 4, 0)[column % 4];
            let expected: f32 = 0.5 + 2.0 * normal(f64::from(unit(word)));
            assert_eq!(base[21 + column], expected.to_bits());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a matter of numbers, in safe code: Miri takes minutes")]
    fn moments_are_those_asked_for() {
        let sample = |init: &Init| {
            let mut all = Vec::new();
            for key in 0..4000 {
                let mut row = [0.0; 7];
                fill(init, 3, key, &mut row);
                all.extend(row.map(f64::from));
            }
            let n = all.len() as f64;
            let mean = all.iter().sum::<f64>() / n;
            let std = (all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
            let worst = all.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            (mean, std, worst)
        };
        let (mean, std, _) = sample(&Init::Normal {
            mean: 1.0,
            std: 0.5,
        });
        assert!((mean - 1.0).abs() < 0.01 && (std - 0.5).abs() < 0.01);
        let (mean, std, worst) = sample(&Init::Uniform {
            low: -1.0,
            high: 1.0,
        });
        assert!(mean.abs() < 0.015 && (std - 0.5774).abs() < 0.01 && worst < 1.0);
        let (mean, std, worst) = sample(&Init::TruncatedNormal {
            mean: 0.0,
            std: 1.0,
        });
        assert!(mean.abs() < 0.02 && (std - 0.8796).abs() < 0.02 && worst <= 2.00001);
    }
}
