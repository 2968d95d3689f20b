//! Bare packets: one chunk, whose payload the tag does not cover.
//!
//! Where a card reads payload from memory that a device has filled, a tag over the payload would be the
//! only reason for a processor to read it. So here the tag covers what is before the payload alone:
//! 46 bytes, which name message, offset and length.
//!
//! | bytes | what |
//! |---|---|
//! | 0..24 | the header, of kind 5 |
//! | 24..41 | a chunk's frame, as in other packets |
//! | 41..46 | zeros: with them the payload begins at a multiple of 8 in a card's frame |
//! | 46.. | payload, to the end of the packet |
//!
//! Nothing else is in such a packet: acknowledgements and credits go in others, whose tag covers all of
//! them. A receiver takes one only for a buffer that it has posted for bare packets, which its credit
//! has said, and only in pieces of the size that it has named.

use super::{CHUNK, Chunk, FormatError, Frame, Frames, HEADER, Writer};

const ZEROS: usize = 5;

/// Bytes before the payload of a bare packet.
pub const BARE: usize = HEADER + CHUNK + ZEROS;

/// Writes what is between header and payload. `false`: `out` is too short, or the chunk too long.
pub fn emit(out: &mut [u8], key: (u32, u32), offset: u64, length: usize, last: bool) -> bool {
    let Some(out) = out.get_mut(HEADER..BARE) else {
        return false;
    };
    out.fill(0);
    Writer::new(out).chunk_head(key, offset, length, last)
}

/// The chunk of a bare packet.
///
/// # Errors
/// [`FormatError`] where [`emit`] and a payload of that length would not have made the packet.
pub fn parse(packet: &[u8]) -> Result<Chunk<'_>, FormatError> {
    let short = FormatError::Short("bare chunk");
    let head = packet.get(HEADER..BARE).ok_or(short)?;
    let (frame, zeros) = head.split_at(CHUNK);
    let payload = packet.get(BARE..).ok_or(short)?;
    if zeros.iter().any(|byte| *byte != 0) {
        return Err(FormatError::Field("bare chunk"));
    }
    // The frame's length is that of a payload which is not behind it: it is parsed as if it were empty.
    let length = u16::from_le_bytes([frame[1], frame[2]]);
    let mut alone = [0; CHUNK];
    alone.copy_from_slice(frame);
    (alone[1], alone[2]) = (0, 0);
    let Some(Ok(Frame::Chunk(chunk))) = Frames::new(&alone).next() else {
        return Err(FormatError::Field("bare chunk"));
    };
    let (channel, message, offset, last) = (chunk.channel, chunk.message, chunk.offset, chunk.last);
    let beyond = offset + u64::from(length) > super::MAX_OFFSET;
    if usize::from(length) != payload.len() || beyond {
        return Err(FormatError::Field("bare chunk"));
    }
    Ok(Chunk {
        channel,
        message,
        offset,
        last,
        payload,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bare_chunks_come_back_and_no_other_length_does(
            channel in any::<u32>(), message in any::<u32>(), offset in 0..super::super::MAX_OFFSET - 2000,
            payload in prop::collection::vec(any::<u8>(), 0..1424), last in any::<bool>(),
        ) {
            let mut packet = vec![0xee; BARE];
            prop_assert!(emit(&mut packet, (channel, message), offset, payload.len(), last));
            packet.extend(&payload);
            let chunk = Chunk { channel, message, offset, last, payload: &payload };
            prop_assert_eq!(parse(&packet), Ok(chunk));
            packet.push(0);
            prop_assert!(parse(&packet).is_err());
            packet.truncate(BARE + payload.len().saturating_sub(1));
            prop_assert!(payload.is_empty() || parse(&packet).is_err());
        }

        #[test]
        fn any_bytes_are_a_bare_chunk_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&bytes);
        }
    }
}
