//! Who may speak: every packet carries a keyed hash of all its bytes.
//!
//! The job's ranks share 128 random bits. From these and one random number of each end come two keys
//! for each connection, one for each direction: what was recorded on one connection means nothing on
//! another, nor on the way back. The hash is SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast
//! short-input PRF", 2012). Of the hashes that keep their strength without a nonce it is the fastest
//! for 1500 bytes that was tried on one core: docs/benchmarks/network-packets.md has the figures. A
//! tag has 64 bits: who sends ten million guesses a second needs 29 thousand years for an even chance.
//!
//! The upper half of the packet number is not in the packet but is hashed with it, so that a packet
//! recorded before the lower half wrapped is refused after.
//!
//! This says who sent a packet and that nobody changed it. It hides nothing.

use std::hash::Hasher;

use siphasher::sip::SipHasher24;
use siphasher::sip128::{Hasher128, SipHasher24 as SipHasher128};

use super::format::{HEADER, PLAIN};

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

    fn derive(&self, label: u8, initiator: u64, responder: u64) -> Key {
        let mut hasher = SipHasher128::new_with_key(&self.0);
        hasher.write(&[label]);
        hasher.write(&initiator.to_le_bytes());
        hasher.write(&responder.to_le_bytes());
        Key(SipHasher24::new_with_key(&hasher.finish128().as_bytes()))
    }

    /// For packets before there is a connection.
    pub fn greeting(&self) -> Key {
        self.derive(0, 0, 0)
    }

    /// For packets of the initiator and of the responder, once both random numbers are known.
    pub fn session(&self, initiator: u64, responder: u64) -> (Key, Key) {
        (
            self.derive(1, initiator, responder),
            self.derive(2, initiator, responder),
        )
    }
}

/// For one direction of one connection.
#[derive(Clone)]
pub struct Key(SipHasher24);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// The tag of a packet with this full number. Of bytes that are too short for a packet: `None`.
    pub fn tag(&self, packet: &[u8], number: u64) -> Option<u64> {
        let (plain, body) = (packet.get(..PLAIN)?, packet.get(HEADER..)?);
        let mut hasher = self.0;
        hasher.write(plain);
        hasher.write(&number.to_le_bytes());
        hasher.write(body);
        Some(hasher.finish())
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

    proptest! {
        #[test]
        fn one_wrong_bit_is_refused(
            mut packet in prop::collection::vec(any::<u8>(), HEADER..200),
            number in any::<u64>(), bit in any::<usize>(),
        ) {
            let key = JobKey::new([5; 16]).greeting();
            key.seal(&mut packet, number);
            let tag_of = |packet: &[u8]| {
                u64::from_le_bytes(packet[PLAIN..HEADER].try_into().unwrap())
            };
            prop_assert!(key.verify(&packet, number, tag_of(&packet)));
            prop_assert!(!key.verify(&packet, number ^ (1 << 32), tag_of(&packet)));
            let bit = bit % (packet.len() * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!key.verify(&packet, number, tag_of(&packet)));
        }
    }
}
