//! What others tell the control thread.

use evener_proto::PathId;

use crate::peer::PeerKey;

/// See the module.
#[derive(Debug)]
pub enum News {
    /// A comm needs this peer.
    Want(PeerKey),
    /// A path is gone.
    Lost(PeerKey, PathId),
    /// The same, of one that comms wanted and that has carried nothing but what is small.
    Fruitless(PeerKey, PathId),
    /// A path is suspect.
    Suspected(PeerKey, PathId),
    /// And carries again.
    Recovered(PeerKey, PathId),
    /// The end.
    Stop,
}
