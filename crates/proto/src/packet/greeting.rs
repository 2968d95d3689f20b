//! How a connection begins: one round trip, authenticated by the job key.
//!
//! The initiator's *hello* names its versions, a random number and the number by which it wants to be
//! called; the responder's *welcome* names the version it took and its own. Both derive the session's
//! keys from the two random numbers ([`auth`](super::auth)). A hello that was recorded and is sent
//! again opens nothing: the responder is silent until a packet comes that is authenticated with keys
//! for its fresh random number. A hello of versions that the responder does not speak is answered with
//! the versions that it does.

use std::time::Duration;

use super::auth::JobKey;
use super::dropped::Dropped;
use super::format::{GREETING, Greeting, HEADER, Haste, Header, Kind, VERSION};

/// Bytes of a greeting's packet.
pub const PACKET: usize = HEADER + GREETING;
/// Between two hellos: doubled each time.
pub const FIRST: Duration = Duration::from_millis(5);
/// The longest between two hellos.
pub const LONGEST: Duration = Duration::from_millis(100);

/// What one end brings to a greeting.
#[derive(Debug, Clone, Copy)]
pub struct Own {
    /// What the peer writes into its packets. Not 0; unique among the connections of a socket.
    pub connection: u32,
    /// From the system's source of random bytes: never used twice with one job key.
    pub random: u64,
}

/// Writes a greeting's packet. `false`: `out` is too short.
pub fn emit(out: &mut [u8], kind: Kind, to: u32, path: u8, says: &Greeting, key: &JobKey) -> bool {
    let Some(packet) = out.get_mut(..PACKET) else {
        return false;
    };
    let header = Header {
        version: VERSION,
        kind,
        haste: Haste::Soon,
        path,
        connection: to,
        number: 0,
        stamp: 0,
        tag: 0,
    };
    let written = header.emit(packet) && says.emit(&mut packet[HEADER..]);
    key.greeting().seal(packet, 0);
    written
}

/// The greeting in a packet whose header was parsed, if the job key made it.
///
/// # Errors
/// [`Dropped::Forged`], [`Dropped::Malformed`].
pub fn open(packet: &[u8], header: &Header, key: &JobKey) -> Result<Greeting, Dropped> {
    if !key.greeting().verify(packet, 0, header.tag) {
        return Err(Dropped::Forged);
    }
    let body = packet.get(HEADER..).unwrap_or_default();
    Greeting::parse(body).map_err(Dropped::Malformed)
}

/// The newest version that both speak.
pub fn agree(own: (u8, u8), theirs: (u8, u8)) -> Option<u8> {
    let (oldest, newest) = (own.0.max(theirs.0), own.1.min(theirs.1));
    (oldest <= newest).then_some(newest)
}
