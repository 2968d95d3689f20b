//! What a connection counted.

/// All counts since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Packets that were sent, of any kind.
    pub sent: u64,
    /// Bytes of them.
    pub sent_bytes: u64,
    /// Bytes of messages in them, those that went again included.
    pub payload: u64,
    /// Packets that were taken.
    pub received: u64,
    /// Packets that held acknowledgements.
    pub acks: u64,
    /// Packets that were taken for lost because later ones have arrived.
    pub lost: u64,
    /// Packets that were taken for lost because their path was silent.
    pub timed_out: u64,
    /// Lost ones that came after all.
    pub late: u64,
    /// Times that a path was silent.
    pub silences: u64,
    /// Paths that were dropped for another.
    pub replaced: u64,
    /// Bytes that had arrived before.
    pub echoes: u64,
    /// Dropped: no packet of this protocol, or frames that cannot be.
    pub malformed: u64,
    /// Dropped: the tag is wrong.
    pub forged: u64,
    /// Dropped: seen before, or too old to know.
    pub replayed: u64,
    /// Dropped: for a buffer that nobody posted.
    pub not_posted: u64,
    /// Dropped: of another connection, or before there is one.
    pub stray: u64,
    /// Packets that a switch had marked.
    pub marked: u64,
}
