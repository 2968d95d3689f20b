//! Lines: what NCCL reads of a message before all of it is there.
//!
//! NCCL's LL and LL128 protocols look at a posted buffer while it fills. When a line's flag has come
//! they use the rest at once: of LL that is 16 bytes, of LL128 it is [`LINE`]. So a message is cut
//! between lines alone, in chunks, in packets and when some of it goes again, and whoever places a piece
//! stores it in order, the last bytes of each line last. Buffers lie at multiples of a line, as NCCL's
//! do, so the cuts are those of memory too.

use crate::faults::{self, Fault};

/// Bytes of the longest line. All cuts of a message are at multiples of it.
pub const LINE: u64 = 128;

/// The largest piece of at most `most` bytes that starts at a line and of which `left` bytes are left:
/// all of them, or whole lines. Zero: not even one line fits.
pub(crate) fn cut(most: u64, left: u64) -> u64 {
    if left <= most || faults::is(Fault::AnyCut) {
        left.min(most)
    } else {
        most / LINE * LINE
    }
}

/// Half of these bytes, or up to a line more.
pub(crate) fn half(left: u64) -> u64 {
    let half = left.div_ceil(2);
    if faults::is(Fault::AnyCut) {
        half
    } else {
        half.next_multiple_of(LINE).min(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_all_that_is_left_or_whole_lines(most in 0u64..1 << 20, left in 0u64..1 << 20) {
            let length = cut(most, left);
            prop_assert!(length <= most && length <= left);
            prop_assert!(length == left || length.is_multiple_of(LINE));
            prop_assert!(length == left || length + LINE > most);
            prop_assert!(half(left) == left || half(left).is_multiple_of(LINE));
        }
    }
}
