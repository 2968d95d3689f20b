//! A protocol of packets, for UDP and raw sockets, sans-IO.
//!
//! It does for packets what the [`Lane`](crate::Lane) does for TCP's streams, and repairs losses by
//! itself: in a round trip where TCP's shortest timer is 200 ms, without a byte waiting for an earlier
//! one, over hundreds of source ports with one congestion decision. It knows no socket and no clock:
//! who drives it hands in datagrams and times and takes out datagrams, events and a deadline, as with
//! quinn-proto and s2n-quic's core.
//!
//! # A message
//! 1. The receiver posts a buffer ([`Connection::post`]); a *credit* goes to the sender ([`credit`]).
//! 2. The sender cuts *chunks* as paths have room ([`outgoing`], [`paths`], [`congestion`]). Each
//!    names channel, message and offset ([`format`]).
//! 3. The receiver checks tag and number ([`auth`], [`replay`]), hands each chunk to the driver, which
//!    puts it where it belongs, and acknowledges ranges of packet numbers ([`ack`]).
//! 4. What is lost, by the order and the time of its own path ([`loss`]), goes again, cut anew. A path
//!    that is silent for some milliseconds is suspect, and then dropped for another source port.
//!
//! # What is not here
//! Encryption. Fewer copies than one in and one out: `read` and `place` of [`Connection::transmit`] and
//! [`Connection::receive`] are where a port that shares its memory with the card does without.

pub mod ack;
pub mod auth;
pub mod congestion;
pub mod connection;
pub mod credit;
pub mod delivery;
mod drain;
mod dropped;
pub mod format;
pub mod greeting;
pub mod loss;
pub mod mtu;
pub mod number;
mod numbered;
pub mod outgoing;
mod pace;
pub mod paths;
pub mod replay;
pub mod rtt;
mod shortest;
pub mod stats;
pub mod trace;
mod window;

pub use auth::JobKey;
pub use connection::{
    Accepted, Arrival, Config, Connection, Event, Over, Place, ROUND_TRIPS, Transmit, accept,
};
pub use dropped::Dropped;
pub use greeting::Own;
pub use outgoing::Span;
pub use stats::Stats;
