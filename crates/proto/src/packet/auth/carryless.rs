//! The sum of a packet's bytes that its tag is made of: CLNH.
//!
//! It is NH (see [`auth`](super)) with products without carries, and with exclusive or instead of additions (Lemire and
//! Kaser, "Faster 64-bit universal hashing using carry-less multiplications", Journal of Cryptographic Engineering
//! 2016): for words `m` and a key's words `k` it is the sum of all `(m0 ^ k0) * (m1 ^ k1)`. Two texts of one length
//! have the same sum for one key in 2^64, as with NH. Processors have an instruction for such a product, and the newer
//! ones do four at once; a sum has nothing that waits for another.
//!
//! Without the instruction it is some hundred times slower: that is for machines that nobody trains on, and for
//! tests.
//!
//! # Safety
//! The only unsafe acts are to call a function that was compiled for instructions which the machine may lack, and to
//! load from a slice at a place that may have any alignment. A [`Unit`] other than [`Unit::Plain`] is made by
//! [`Unit::available`] alone, after the processor said that it has them; each load is of a whole array of that size,
//! which is borrowed.
#![allow(
    unsafe_code,
    reason = "calls of target-feature functions, checked by Unit, and unaligned loads"
)]

use std::sync::OnceLock;

/// Bytes that are taken in a turn; zeros stand behind the last ones up to a whole block.
pub const BLOCK: usize = 64;

/// How a machine multiplies without carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Four products at once.
    #[cfg(target_arch = "x86_64")]
    Wide,
    /// One.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Single,
    /// By other instructions.
    Plain,
}

impl Unit {
    /// All that this machine has, the quickest first.
    pub fn available() -> Vec<Unit> {
        let mut units = Vec::new();
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") && has!("avx2") && has!("vpclmulqdq") && has!("pclmulqdq") {
                units.push(Unit::Wide);
            }
            if has!("pclmulqdq") && has!("sse2") {
                units.push(Unit::Single);
            }
        }
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        if std::arch::is_aarch64_feature_detected!("aes") {
            units.push(Unit::Single);
        }
        units.push(Unit::Plain);
        units
    }

    /// The quickest of this machine; looked up once.
    pub fn detect() -> Unit {
        static BEST: OnceLock<Unit> = OnceLock::new();
        *BEST.get_or_init(|| Unit::available()[0])
    }

    /// The sum of these bytes, the eight at `hole` (a multiple of 16) taken for zeros. `None`: the key has too few
    /// words, or the bytes end before the hole does.
    pub fn sum(self, words: &[u64], bytes: &[u8], hole: usize) -> Option<u128> {
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        let (keys, _) = words.as_chunks::<{ BLOCK / 8 }>();
        let mut last = [0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let key = keys.get(..blocks.len())?;
        let end = match rest {
            [] => None,
            _ => Some((&last, keys.get(blocks.len())?)),
        };
        let all = blocks.iter().zip(key).chain(end);
        // The product of what is in the hole is taken out again: (m ^ k) * x and k * x differ by m * x.
        let inside = u64::from_le_bytes(*bytes.get(hole..)?.first_chunk()?);
        let mut beside = [0; 8];
        let there = bytes.len().min(hole + 16) - (hole + 8);
        beside[..there].copy_from_slice(&bytes[hole + 8..hole + 8 + there]);
        let beside = u64::from_le_bytes(beside) ^ words.get(hole / 8 + 1)?;
        Some(match self {
            // SAFETY: the machine has what it takes (`Unit::available`).
            #[cfg(target_arch = "x86_64")]
            Unit::Wide => unsafe { x86::wide(all, (inside, beside)) },
            // SAFETY: as before.
            #[cfg(target_arch = "x86_64")]
            Unit::Single => unsafe { x86::single(all, (inside, beside)) },
            // SAFETY: as before.
            #[cfg(target_arch = "aarch64")]
            Unit::Single => unsafe { arm::single(all, (inside, beside)) },
            Unit::Plain => pairs(all, product) ^ product(inside, beside),
        })
    }
}

type Key = [u64; BLOCK / 8];

/// Pair by pair. Inlined, so that it is compiled for the instructions of who calls it.
#[inline(always)]
fn pairs<'a>(
    blocks: impl Iterator<Item = (&'a [u8; BLOCK], &'a Key)>,
    product: impl Fn(u64, u64) -> u128,
) -> u128 {
    let mut sum = 0;
    for (block, key) in blocks {
        let (words, _) = block.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        let (keys, _) = key.as_chunks::<2>();
        for (pair, key) in pairs.iter().zip(keys) {
            let one = u64::from_le_bytes(pair[0]) ^ key[0];
            let other = u64::from_le_bytes(pair[1]) ^ key[1];
            sum ^= product(one, other);
        }
    }
    sum
}

/// Without carries: bits are five places apart while they are multiplied, so that sums of thirteen bits stay among
/// themselves (the idea is that of constant-time GHASH in BearSSL).
fn product(one: u64, other: u64) -> u128 {
    const FIFTH: u128 = {
        let (mut mask, mut at) = (0, 0);
        while at < 128 {
            mask |= 1 << at;
            at += 5;
        }
        mask
    };
    let mask = |place: usize| FIFTH << place;
    let mut all = 0;
    for first in 0..5 {
        let part = one & mask(first) as u64;
        for second in 0..5 {
            let product = u128::from(part) * u128::from(other & mask(second) as u64);
            all ^= product & mask((first + second) % 5);
        }
    }
    all
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Key};

    #[target_feature(enable = "avx512f,avx2,vpclmulqdq,pclmulqdq")]
    pub(super) fn wide<'a>(
        blocks: impl Iterator<Item = (&'a [u8; BLOCK], &'a Key)>,
        less: (u64, u64),
    ) -> u128 {
        let mut sum = _mm512_setzero_si512();
        for (block, key) in blocks {
            // SAFETY: 64 bytes are borrowed, and any alignment will do.
            let (text, key) = unsafe {
                (
                    _mm512_loadu_si512(block.as_ptr().cast()),
                    _mm512_loadu_si512(key.as_ptr().cast()),
                )
            };
            let both = _mm512_xor_si512(text, key);
            sum = _mm512_xor_si512(sum, _mm512_clmulepi64_epi128(both, both, 0x10));
        }
        let half = _mm256_xor_si256(
            _mm512_castsi512_si256(sum),
            _mm512_extracti64x4_epi64(sum, 1),
        );
        let quarter = _mm_xor_si128(
            _mm256_castsi256_si128(half),
            _mm256_extracti128_si256(half, 1),
        );
        whole(quarter) ^ product(less)
    }

    #[target_feature(enable = "sse2,pclmulqdq")]
    fn product((one, other): (u64, u64)) -> u128 {
        let (one, other) = (
            _mm_cvtsi64_si128(one as i64),
            _mm_cvtsi64_si128(other as i64),
        );
        whole(_mm_clmulepi64_si128(one, other, 0x00))
    }

    #[target_feature(enable = "sse2")]
    fn whole(register: __m128i) -> u128 {
        let low = _mm_cvtsi128_si64(register) as u64;
        let high = _mm_cvtsi128_si64(_mm_unpackhi_epi64(register, register)) as u64;
        u128::from(high) << 64 | u128::from(low)
    }

    #[target_feature(enable = "sse2,pclmulqdq")]
    pub(super) fn single<'a>(
        blocks: impl Iterator<Item = (&'a [u8; BLOCK], &'a Key)>,
        less: (u64, u64),
    ) -> u128 {
        let mut sums = [_mm_setzero_si128(); 2];
        for (block, key) in blocks {
            let (texts, _) = block.as_chunks::<16>();
            let (keys, _) = key.as_chunks::<2>();
            for (at, (text, key)) in texts.iter().zip(keys).enumerate() {
                // SAFETY: 16 bytes are borrowed, and any alignment will do.
                let (text, key) = unsafe {
                    (
                        _mm_loadu_si128(text.as_ptr().cast()),
                        _mm_loadu_si128(key.as_ptr().cast()),
                    )
                };
                let both = _mm_xor_si128(text, key);
                sums[at % 2] = _mm_xor_si128(sums[at % 2], _mm_clmulepi64_si128(both, both, 0x10));
            }
        }
        whole(_mm_xor_si128(sums[0], sums[1])) ^ product(less)
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::{BLOCK, Key, pairs};

    #[target_feature(enable = "neon,aes")]
    pub(super) fn single<'a>(
        blocks: impl Iterator<Item = (&'a [u8; BLOCK], &'a Key)>,
        less: (u64, u64),
    ) -> u128 {
        pairs(blocks, |one, other| vmull_p64(one, other)) ^ vmull_p64(less.0, less.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit.
    fn slow(one: u64, other: u64) -> u128 {
        (0..64)
            .filter(|bit| other >> bit & 1 == 1)
            .fold(0, |all, bit| all ^ u128::from(one) << bit)
    }

    #[test]
    fn products_without_carries() {
        for (one, other) in [(0, 5), (u64::MAX, u64::MAX), (1 << 63, 1 << 63), (3, 3)] {
            assert_eq!(product(one, other), slow(one, other));
        }
    }

    proptest! {
        /// By its definition, with all that this machine has.
        #[test]
        fn it_is_what_it_is_defined_as(
            bytes in prop::collection::vec(any::<u8>(), 24..400),
            words in prop::collection::vec(any::<u64>(), 56),
            hole in 0usize..4,
        ) {
            let hole = (16 * hole).min((bytes.len() - 8) / 16 * 16);
            let mut padded = bytes.clone();
            padded.resize(bytes.len().next_multiple_of(BLOCK), 0);
            padded[hole..hole + 8].fill(0);
            let word = |at: usize| u64::from_le_bytes(padded[8 * at..8 * at + 8].try_into().unwrap());
            let sum = (0..padded.len() / 16).fold(0, |sum, pair| {
                let at = 2 * pair;
                sum ^ slow(word(at) ^ words[at], word(at + 1) ^ words[at + 1])
            });
            for unit in Unit::available() {
                prop_assert_eq!(unit.sum(&words, &bytes, hole), Some(sum), "{:?}", unit);
                prop_assert_eq!(unit.sum(&words[..padded.len() / 8 - 1], &bytes, hole), None);
                prop_assert_eq!(unit.sum(&words, &bytes[..hole + 7], hole), None);
            }
        }
    }
}
