//! Numbers that wrap in packets and never in memory.
//!
//! A packet carries the low 32 bits of its number (RFC 9000, section 17.1 does the same), and a chunk
//! those of its message. The other side knows about where it is, and takes the one number with these
//! low bits that is nearest. At 100 Gb/s and 1500 bytes 32 bits last for eight minutes; what is in
//! flight is a millionth of that.

/// The number whose low bits are `low` that is nearest to `near`.
pub fn expand(low: u32, near: u64) -> u64 {
    const SPAN: u64 = 1 << 32;
    let candidate = (near & !(SPAN - 1)) | u64::from(low);
    if candidate + SPAN / 2 <= near {
        candidate.saturating_add(SPAN)
    } else if candidate > near.saturating_add(SPAN / 2) && candidate >= SPAN {
        candidate - SPAN
    } else {
        candidate
    }
}

/// What of a number is written.
pub fn low(number: u64) -> u32 {
    (number & u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_number_near_another_survives(near in 0u64..1 << 60, apart in -(1i64 << 31) + 1..1i64 << 31) {
            let number = near.saturating_add_signed(apart);
            prop_assert_eq!(expand(low(number), near), number);
        }

        #[test]
        fn any_two_numbers_give_one(low in any::<u32>(), near in 0u64..u64::MAX - (1 << 33)) {
            prop_assert_eq!(super::low(expand(low, near)), low);
        }
    }
}
