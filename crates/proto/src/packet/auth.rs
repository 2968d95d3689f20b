//! Who may speak: every packet carries a keyed hash of all its bytes.
//!
//! The job's ranks share 128 random bits. From these and one random number of each end come two keys
//! for each connection, one for each direction: what was recorded on one connection means nothing on
//! another, nor on the way back. A tag has 64 bits: who sends ten million guesses a second needs 29
//! thousand years for an even chance.
//!
//! # The hash
//! Greetings are hashed by SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF",
//! 2012). Of 1500 bytes it takes 0.6 us, a third and more of what a packet costs this engine. So the
//! bytes of other packets go into a sum first, as in NH (Black, Halevi, Krawczyk, Krovetz and Rogaway,
//! "UMAC: fast and secure message authentication", CRYPTO 1999), with products that processors have an
//! instruction for ([`carryless`]). Two texts of one length have the same sum for one key in 2^64.
//! SipHash of sum, number and length is the tag. A number is never used twice, so two packets with one sum say
//! nothing; and a tag that is wrong for another text stays a guess, should a number come twice after all.
//!
//! The upper half of the packet number is not in the packet but is hashed with it, so that a packet
//! recorded before the lower half wrapped is refused after.
//!
//! This says who sent a packet and that nobody changed it. It hides nothing.

mod carryless;

use std::hash::Hasher;
use std::sync::Arc;

use siphasher::sip::SipHasher24;
use siphasher::sip128::{Hasher128, SipHasher24 as SipHasher128};

use super::format::{HEADER, PLAIN};
use carryless::Unit;

/// Words of a key of the sum: for the largest datagram that is sent, one of a jumbo frame.
const WORDS: usize = 9_216 / 8;

/// Smaller labels of derived keys are this module's own.
pub const LABELS: u8 = 16;

/// What all ranks of a job know and nobody else.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JobKey([u8; 16]);

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey(..)")
    }
}

impl JobKey {
    /// From 16 random bytes.
    pub fn new(bytes: [u8; 16]) -> Self {
        JobKey(bytes)
    }

    fn derive(&self, label: u8, initiator: u64, responder: u64) -> SipHasher24 {
        let mut hasher = SipHasher128::new_with_key(&self.0);
        hasher.write(&[label]);
        hasher.write(&initiator.to_le_bytes());
        hasher.write(&responder.to_le_bytes());
        SipHasher24::new_with_key(&hasher.finish128().as_bytes())
    }

    /// A keyed hash of `parts`, one after the other, for a purpose of the caller's: a label from
    /// [`LABELS`] on. Who has it learns nothing of the key. (SipHash-2-4 with 128 bits.)
    pub fn proof(&self, label: u8, parts: &[&[u8]]) -> [u8; 16] {
        debug_assert!(label >= LABELS, "a label of this module");
        let mut hasher = SipHasher128::new_with_key(&self.0);
        hasher.write(&[label]);
        parts.iter().for_each(|part| hasher.write(part));
        hasher.finish128().as_bytes()
    }

    /// For packets before there is a connection.
    pub fn greeting(&self) -> Key {
        Key {
            last: self.derive(0, 0, 0),
            words: None,
        }
    }

    /// For packets of the initiator and of the responder, once both random numbers are known.
    pub fn session(&self, initiator: u64, responder: u64) -> (Key, Key) {
        let key = |label| Key {
            last: self.derive(label, initiator, responder),
            words: Some(words(self.derive(label + 2, initiator, responder))),
        };
        (key(1), key(2))
    }
}

/// The words of a key of the sum: what a pseudo-random function says of their places.
fn words(seed: SipHasher24) -> Arc<[u64]> {
    let word = |at: usize| {
        let mut hasher = seed;
        hasher.write(&(at as u64).to_le_bytes());
        hasher.finish()
    };
    (0..WORDS).map(word).collect()
}

/// For one direction of one connection.
#[derive(Clone)]
pub struct Key {
    last: SipHasher24,
    /// Words of the sum's key; a greeting goes without.
    words: Option<Arc<[u64]>>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// The tag of a packet with this full number, whatever tag is in it. For bytes that are too short or too many for
    /// a packet: `None`.
    pub fn tag(&self, packet: &[u8], number: u64) -> Option<u64> {
        let head = packet.first_chunk::<HEADER>()?;
        let Some(words) = &self.words else {
            let mut hasher = self.last;
            hasher.write(&head[..PLAIN]);
            hasher.write(&number.to_le_bytes());
            hasher.write(&packet[HEADER..]);
            return Some(hasher.finish());
        };
        let sum = Unit::detect().sum(words, packet, PLAIN)?;
        // In one piece: half of the time that several take. Two bytes more than three words cost nothing.
        let mut all = [0; 16 + 8 + 2];
        all[..16].copy_from_slice(&sum.to_le_bytes());
        all[16..24].copy_from_slice(&number.to_le_bytes());
        all[24..].copy_from_slice(&(packet.len() as u16).to_le_bytes());
        Some(self.last.hash(&all))
    }

    /// Writes the tag into a finished packet.
    pub fn seal(&self, packet: &mut [u8], number: u64) {
        if let Some(tag) = self.tag(packet, number)
            && let Some(place) = packet.get_mut(PLAIN..HEADER)
        {
            place.copy_from_slice(&tag.to_le_bytes());
        }
    }

    /// Whether the tag is right. Two words are compared: it takes the same time for all.
    pub fn verify(&self, packet: &[u8], number: u64, tag: u64) -> bool {
        self.tag(packet, number) == Some(tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_differ_by_direction_connection_and_job() {
        let (one, two) = (JobKey::new([1; 16]), JobKey::new([2; 16]));
        let packet = [9; 100];
        let keys = [
            one.greeting(),
            one.session(3, 4).0,
            one.session(3, 4).1,
            one.session(3, 5).0,
            one.session(4, 3).0,
            two.session(3, 4).0,
            two.greeting(),
        ];
        let mut tags: Vec<_> = keys.iter().map(|key| key.tag(&packet, 7)).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), keys.len());
        assert!(!format!("{one:?}{:?}", keys[0]).contains('1'));
    }

    #[test]
    fn a_datagram_that_is_too_long_has_no_tag() {
        let (key, _) = JobKey::new([5; 16]).session(1, 2);
        assert!(key.tag(&[1; 9_216], 0).is_some());
        assert_eq!(key.tag(&[1; 9_217], 0), None);
        assert_eq!(key.tag(&[1; HEADER - 1], 0), None);
    }

    proptest! {
        #[test]
        fn one_wrong_bit_is_refused(
            mut packet in prop::collection::vec(any::<u8>(), HEADER..200),
            number in any::<u64>(), bit in any::<usize>(),
        ) {
            let job = JobKey::new([5; 16]);
            for key in [job.greeting(), job.session(1, 2).0] {
                key.seal(&mut packet, number);
                let tag_of = |packet: &[u8]| {
                    u64::from_le_bytes(packet[PLAIN..HEADER].try_into().unwrap())
                };
                prop_assert!(key.verify(&packet, number, tag_of(&packet)));
                prop_assert!(!key.verify(&packet, number ^ (1 << 32), tag_of(&packet)));
                let bit = bit % (packet.len() * 8);
                packet[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(!key.verify(&packet, number, tag_of(&packet)));
                // The longer and the shorter one have tags of their own.
                let tag = key.tag(&packet, number);
                packet.push(0);
                prop_assert_ne!(key.tag(&packet, number), tag);
                packet.pop();
            }
        }
    }
}
