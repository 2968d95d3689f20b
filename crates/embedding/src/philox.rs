//! Initial values: a function of (seed, key, column) and of nothing else, so that the order in which
//! keys come, the shard, the number of threads and the framework do not matter.
//!
//! Philox4x32-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
//! counter is (column / 4, 0, key), the key of the generator is the seed.

use crate::options::Init;

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
#[inline]
fn unit(word: u32) -> f32 {
    ((word >> 8) as f32 + 0.5) * (1.0 / 16_777_216.0)
}

/// The natural logarithm of a normal number, with additions, multiplications and divisions alone:
/// those are the same on every machine, the system's `ln` is not. Good to about 1e-13.
#[inline]
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64 - 1023) as f64;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1.0;
    }
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

/// The formula for all other `p`.
#[inline]
fn tail(p: f64) -> f32 {
    let low = p < 0.5;
    let r = (-ln(if low { p } else { 1.0 - p })).sqrt();
    let value = if r <= 5.0 {
        let r = r - 1.6;
        (((0.170_238_211_03 * r + 1.306_728_481_6) * r + 2.756_815_390_0) * r + 1.423_437_277_7)
            / ((0.120_211_329_75 * r + 0.737_001_642_50) * r + 1.0)
    } else {
        let r = r - 5.0;
        (((0.017_337_203_997 * r + 0.428_682_943_37) * r + 3.081_226_386_0) * r + 6.657_905_115_0)
            / ((0.012_258_202_635 * r + 0.241_978_942_25) * r + 1.0)
    };
    (if low { -value } else { value }) as f32
}

/// Normal values of `key`, each by the probability that `chance` makes of a uniform one. Sixteen at a
/// time go through the formula without branches; those of the tails are then done again.
fn normals(seed: u64, key: i64, out: &mut [f32], spread: (f32, f32), chance: impl Fn(f64) -> f64) {
    let (mean, std) = spread;
    for (block, part) in out.chunks_mut(16).enumerate() {
        let mut chances = [0.5; 16];
        for (i, four) in chances[..part.len().next_multiple_of(4)]
            .chunks_mut(4)
            .enumerate()
        {
            let random = words(seed, key, (block * 4 + i) as u32, 0);
            for (p, word) in four.iter_mut().zip(random) {
                *p = chance(f64::from(unit(word)));
            }
        }
        let mut values = chances.map(central);
        for (value, p) in values.iter_mut().zip(chances) {
            if (p - 0.5).abs() > CENTRAL {
                *value = tail(p);
            }
        }
        for (out, value) in part.iter_mut().zip(values) {
            *out = mean + std * value;
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
        Init::Normal { mean, std } => normals(seed, key, out, (mean, std), |p| p),
        Init::TruncatedNormal { mean, std } => normals(seed, key, out, (mean, std), |p| {
            BELOW_TWO + (1.0 - 2.0 * BELOW_TWO) * p
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
