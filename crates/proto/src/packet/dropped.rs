//! Why a datagram is dropped.

use super::format::FormatError;

/// Why a datagram was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    /// Not a packet, or frames that cannot be.
    #[error("malformed: {0}")]
    Malformed(FormatError),
    /// Not of one who has the job key.
    #[error("the tag is wrong")]
    Forged,
    /// Seen before, or too old to know.
    #[error("seen before")]
    Replayed,
    /// It breaks the rule of credits.
    #[error("for a buffer that was not posted")]
    NotPosted,
    /// It belongs to another connection, or came before there is one.
    #[error("not of this connection")]
    Stray,
    /// A credit or an acknowledgement that makes no sense.
    #[error("a {0} that cannot be")]
    Nonsense(&'static str),
}
