//! Where a key lives: one 64-bit hash gives the shard (its highest bits) and the bucket (the bits
//! below them, by multiplication, so that a table may have any number of buckets).

/// The hash of a key: the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable
/// pseudorandom number generators", 2014), a permutation, so that no two keys share a hash.
#[inline(always)]
pub fn mix(key: i64) -> u64 {
    let mut x = (key as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Which of `1 << bits` shards.
#[inline(always)]
pub fn shard(hash: u64, bits: u32) -> usize {
    // Two shifts: a shift by 64 is none.
    (hash >> 1 >> (63 - bits)) as usize
}

/// Which of `buckets` buckets inside the shard.
#[inline(always)]
pub fn bucket(hash: u64, bits: u32, buckets: usize) -> usize {
    ((u128::from(hash << bits) * buckets as u128) >> 64) as usize
}

/// A 64-bit hash of a string: 8 bytes a time through [`mix`].
pub fn text(bytes: &[u8]) -> i64 {
    let mut state = mix(bytes.len() as i64);
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        state = mix((state ^ u64::from_le_bytes(word)) as i64).rotate_left(23);
    }
    mix(state as i64) as i64
}
