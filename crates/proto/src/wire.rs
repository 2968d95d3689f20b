//! The wire format: every frame starts with 52 bytes, little endian; a chunk's payload follows.
//!
//! | bytes | what |
//! |---|---|
//! | 0..2 | magic |
//! | 2 | version |
//! | 3 | kind |
//! | 4..8 | length of the payload |
//! | 8..16 | comm |
//! | 16..24 | message, or what stands for it |
//! | 24..32 | offset, or what stands for it |
//! | 32..40 | total length of the message, or what stands for it |
//! | 40..44 | when a chunk was sent, or zero |
//! | 44..48 | how long chunks waited that came the other way, or zero |
//! | 48..52 | check of the 48 bytes before |
//!
//! The check is not cryptography: it finds a peer that lost its place in the stream, before its bytes
//! are taken for lengths. [`Frame::parse`] checks everything that can be checked without state, so
//! the rest of the crate works on values that make sense.

/// Bytes of a frame's header.
pub const HEADER: usize = 52;
/// Largest payload of one frame.
pub const MAX_CHUNK: u32 = 1 << 20;
/// A message up to this many bytes is never split: NCCL's LL and LL128 rely on the order of stores.
pub const WHOLE: u64 = 64 << 10;
/// Chunks are multiples of this, where a message is not at its end: one, with its header, fits into
/// the largest packet that a kernel hands to a network card, 65,160 bytes of 1,448 each, or 62,636 of
/// 8,948. With 64 KiB, 400 bytes would need a packet of their own. In a network that serves flows in
/// turn that packet waits for another round, and the chunk takes twice as long.
pub const PACKET: u32 = 60 << 10;

const MAGIC: u16 = 0xe7e4;
const VERSION: u8 = 2;
/// Where the check is.
const CHECK: usize = HEADER - 4;

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not our magic number.
    #[error("magic {0:#06x} is not Evener's")]
    Magic(u16),
    /// A version that this build does not speak.
    #[error("version {0} of the protocol; this build speaks {VERSION}")]
    Version(u8),
    /// The check does not match the bytes.
    #[error("a header's check does not match its bytes")]
    Check,
    /// A kind that does not exist.
    #[error("frame kind {0} does not exist")]
    Kind(u8),
    /// A field is outside of what its kind allows.
    #[error("a {0} frame with fields that cannot be")]
    Field(&'static str),
}

/// A frame's header, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// Sender: here is a new comm for your listener.
    Open {
        /// Number that the sender gave it.
        comm: u64,
        /// The listener it was made for.
        listener: u64,
    },
    /// Receiver: the comm is ready, or there is no such listener.
    Opened {
        /// The sender's number.
        comm: u64,
        /// Whether the listener took it.
        accepted: bool,
    },
    /// Sender: `length` bytes of a message follow.
    Chunk {
        /// The sender's number.
        comm: u64,
        /// Number of the message in the comm's lane.
        message: u64,
        /// Where the bytes belong.
        offset: u64,
        /// How many follow.
        length: u32,
        /// Length of the whole message.
        total: u64,
        /// When it was sent, by the sender's clock: microseconds, from any start, round and round.
        stamp: u32,
        /// As in [`Frame::Heard`]; 0 where there is nothing to say.
        heard: u32,
    },
    /// Receiver: how long chunks waited on their way over this path.
    Heard {
        /// Microseconds more than the quickest lately took, and one: the longest since this was said
        /// before.
        heard: u32,
    },
    /// Receiver: there is a buffer of `room` bytes for this message.
    Credit {
        /// The sender's number.
        comm: u64,
        /// Number of the message.
        message: u64,
        /// Bytes of the posted buffer.
        room: u64,
    },
    /// Receiver: all messages below `floor` are complete, and `floor + 1 + i` for each bit i.
    Ack {
        /// The sender's number.
        comm: u64,
        /// The first message that is not complete.
        floor: u64,
        /// Complete ones after it.
        beyond: u64,
    },
    /// Receiver: the message is longer than the posted buffer.
    Refuse {
        /// The sender's number.
        comm: u64,
        /// Number of the message.
        message: u64,
        /// Its length.
        total: u64,
        /// Bytes of the posted buffer.
        room: u64,
    },
    /// Sender: the comm is closed on my side.
    CloseSend {
        /// The sender's number.
        comm: u64,
    },
    /// Receiver: the comm is closed on my side.
    CloseReceive {
        /// The sender's number.
        comm: u64,
    },
    /// The other side knows that the comm is closed. `of_send`: it answers a `CloseSend`.
    Closed {
        /// The sender's number.
        comm: u64,
        /// Which of the two it answers.
        of_send: bool,
    },
    /// Are you there?
    Ping {
        /// Given back as it is.
        stamp: u64,
    },
    /// The answer.
    Pong {
        /// The ping's.
        stamp: u64,
    },
    /// I gave up this path; do the same.
    Gone {
        /// Its number.
        path: u64,
    },
}

fn check(bytes: &[u8]) -> u32 {
    let mut sum = 0x811c_9dc5_u32;
    for word in bytes.chunks_exact(4) {
        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        sum = (sum ^ word).wrapping_mul(0x9e37_79b1).rotate_left(13);
    }
    sum
}

fn u64_at(bytes: &[u8; HEADER], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Frame {
    /// Bytes that follow the header.
    pub fn payload(&self) -> u32 {
        match self {
            Frame::Chunk { length, .. } => *length,
            _ => 0,
        }
    }

    /// The header's bytes.
    pub fn emit(&self) -> [u8; HEADER] {
        let (mut sent, mut told) = (0u32, 0u32);
        let (kind, comm, message, offset, total) = match *self {
            Frame::Open { comm, listener } => (1, comm, listener, 0, 0),
            Frame::Opened { comm, accepted } => (2, comm, u64::from(accepted), 0, 0),
            Frame::Chunk {
                comm,
                message,
                offset,
                total,
                stamp,
                heard,
                ..
            } => {
                (sent, told) = (stamp, heard);
                (3, comm, message, offset, total)
            }
            Frame::Credit {
                comm,
                message,
                room,
            } => (4, comm, message, 0, room),
            Frame::Ack {
                comm,
                floor,
                beyond,
            } => (5, comm, floor, beyond, 0),
            Frame::Refuse {
                comm,
                message,
                total,
                room,
            } => (6, comm, message, room, total),
            Frame::CloseSend { comm } => (7, comm, 0, 0, 0),
            Frame::CloseReceive { comm } => (8, comm, 0, 0, 0),
            Frame::Closed { comm, of_send } => (9, comm, u64::from(of_send), 0, 0),
            Frame::Ping { stamp } => (10, 0, stamp, 0, 0),
            Frame::Pong { stamp } => (11, 0, stamp, 0, 0),
            Frame::Gone { path } => (12, 0, path, 0, 0),
            Frame::Heard { heard } => {
                told = heard;
                (13, 0, 0, 0, 0)
            }
        };
        let mut bytes = [0; HEADER];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[3] = kind;
        bytes[4..8].copy_from_slice(&self.payload().to_le_bytes());
        for (at, value) in [(8, comm), (16, message), (24, offset), (32, total)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        for (at, value) in [(40, sent), (44, told)] {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let sum = check(&bytes[..CHECK]);
        bytes[CHECK..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The frame that these bytes are.
    ///
    /// # Errors
    /// [`WireError`] for anything that [`Frame::emit`] would not have written.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Frame, WireError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let magic = u16::from_le_bytes([bytes[0], bytes[1]]);
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        if bytes[2] != VERSION {
            return Err(WireError::Version(bytes[2]));
        }
        if word(CHECK) != check(&bytes[..CHECK]) {
            return Err(WireError::Check);
        }
        let length = word(4);
        let (comm, message) = (u64_at(bytes, 8), u64_at(bytes, 16));
        let (offset, total) = (u64_at(bytes, 24), u64_at(bytes, 32));
        let frame = match bytes[3] {
            1 => Frame::Open {
                comm,
                listener: message,
            },
            2 => Frame::Opened {
                comm,
                accepted: message == 1,
            },
            3 => {
                let end = offset.checked_add(u64::from(length));
                if length > MAX_CHUNK || end.is_none_or(|end| end > total) {
                    return Err(WireError::Field("chunk"));
                }
                Frame::Chunk {
                    comm,
                    message,
                    offset,
                    length,
                    total,
                    stamp: word(40),
                    heard: word(44),
                }
            }
            4 => Frame::Credit {
                comm,
                message,
                room: total,
            },
            5 => Frame::Ack {
                comm,
                floor: message,
                beyond: offset,
            },
            6 => Frame::Refuse {
                comm,
                message,
                total,
                room: offset,
            },
            7 => Frame::CloseSend { comm },
            8 => Frame::CloseReceive { comm },
            9 => Frame::Closed {
                comm,
                of_send: message == 1,
            },
            10 => Frame::Ping { stamp: message },
            11 => Frame::Pong { stamp: message },
            12 => Frame::Gone { path: message },
            13 => Frame::Heard { heard: word(44) },
            kind => return Err(WireError::Kind(kind)),
        };
        if length > 0 && !matches!(frame, Frame::Chunk { .. }) {
            return Err(WireError::Field("control"));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let n = any::<u64>;
        prop_oneof![
            (n(), n()).prop_map(|(comm, listener)| Frame::Open { comm, listener }),
            (n(), any::<bool>()).prop_map(|(comm, accepted)| Frame::Opened { comm, accepted }),
            (
                (n(), n(), 0..1u64 << 40, 0..=MAX_CHUNK, 0..1u64 << 40),
                (any::<u32>(), any::<u32>())
            )
                .prop_map(|((comm, message, offset, length, more), (stamp, heard))| {
                    Frame::Chunk {
                        comm,
                        message,
                        offset,
                        length,
                        total: offset + u64::from(length) + more,
                        stamp,
                        heard,
                    }
                }),
            any::<u32>().prop_map(|heard| Frame::Heard { heard }),
            (n(), n(), n()).prop_map(|(comm, message, room)| Frame::Credit {
                comm,
                message,
                room
            }),
            (n(), n(), n()).prop_map(|(comm, floor, beyond)| Frame::Ack {
                comm,
                floor,
                beyond
            }),
            (n(), n(), n(), n()).prop_map(|(comm, message, total, room)| Frame::Refuse {
                comm,
                message,
                total,
                room
            }),
            n().prop_map(|comm| Frame::CloseSend { comm }),
            n().prop_map(|comm| Frame::CloseReceive { comm }),
            (n(), any::<bool>()).prop_map(|(comm, of_send)| Frame::Closed { comm, of_send }),
            n().prop_map(|stamp| Frame::Ping { stamp }),
            n().prop_map(|stamp| Frame::Pong { stamp }),
            n().prop_map(|path| Frame::Gone { path }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_emitted_parses_to_the_same(frame in frame()) {
            prop_assert_eq!(Frame::parse(&frame.emit()), Ok(frame));
        }

        #[test]
        fn one_wrong_bit_is_refused(frame in frame(), bit in 0usize..HEADER * 8) {
            let mut bytes = frame.emit();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Frame::parse(&bytes).is_err());
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes in prop::array::uniform32(any::<u8>())) {
            let mut header = [0; HEADER];
            header[..32].copy_from_slice(&bytes);
            let _ = Frame::parse(&header);
            header[0..2].copy_from_slice(&MAGIC.to_le_bytes());
            header[2] = VERSION;
            let sum = check(&header[..CHECK]);
            header[CHECK..].copy_from_slice(&sum.to_le_bytes());
            if let Ok(frame) = Frame::parse(&header) {
                prop_assert!(frame.payload() <= MAX_CHUNK);
            }
        }
    }
}
