//! What two processes say about measuring: one message, at the listener of those who measure.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | magic |
//! | 4 | 1 ask, 2 tell |
//! | 5 | tell: 0 TCP, 1 UDP |
//! | 8..136 | who says it: the handle of its listener for those who measure |

use evener_proto::accord::Carrier;

use crate::hello::{HANDLE, Handle};

const MAGIC: [u8; 4] = *b"EVNC";
/// Bytes of a word. A load's messages are longer.
pub(crate) const WORD: usize = 8 + HANDLE;

/// What is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// Measure, and tell me.
    Ask,
    /// This is better.
    Tell(Carrier),
}

/// As bytes.
pub(crate) fn emit(word: Word, from: &Handle) -> [u8; WORD] {
    let mut bytes = [0; WORD];
    bytes[..4].copy_from_slice(&MAGIC);
    (bytes[4], bytes[5]) = match word {
        Word::Ask => (1, 0),
        Word::Tell(Carrier::Tcp) => (2, 0),
        Word::Tell(Carrier::Udp) => (2, 1),
    };
    bytes[8..].copy_from_slice(&from.emit());
    bytes
}

/// From bytes; `None` where they are no word.
pub(crate) fn parse(bytes: &[u8]) -> Option<(Word, Handle)> {
    let bytes: &[u8; WORD] = bytes.try_into().ok()?;
    if bytes[..4] != MAGIC {
        return None;
    }
    let word = match (bytes[4], bytes[5]) {
        (1, _) => Word::Ask,
        (2, 0) => Word::Tell(Carrier::Tcp),
        (2, 1) => Word::Tell(Carrier::Udp),
        _ => return None,
    };
    Some((word, Handle::parse(bytes[8..].first_chunk()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_come_back_and_other_bytes_are_refused(
            process: [u8; 16], which in 0usize..3, noise in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let from = Handle {
                process, token: [3; 16], listener: 0, port: 4, udp: true, measures: true, lanes: 4,
                addresses: vec!["10.0.0.1".parse().unwrap()],
            };
            let word = [Word::Ask, Word::Tell(Carrier::Tcp), Word::Tell(Carrier::Udp)][which];
            prop_assert_eq!(parse(&emit(word, &from)), Some((word, from.clone())));
            prop_assert_eq!(parse(&noise), None);
            let mut other = emit(word, &from);
            other[4] = 9;
            prop_assert_eq!(parse(&other), None);
        }
    }
}
