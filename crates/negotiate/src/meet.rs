//! How ranks that know each other's addresses and a secret get connections between them.

use crate::error::LinkError;
use crate::lobby::{Lobby, STRANGERS};
use crate::stream;
use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

/// A socket for other ranks, on any free port.
///
/// # Errors
/// The kernel's.
pub fn listen() -> io::Result<TcpListener> {
    stream::listen()
}

/// Waits for all ranks of `wanted`. Strangers, who do not know the `token`, are sent away.
///
/// # Errors
/// [`LinkError::Missing`] names those who have not come by `deadline`.
pub fn accept(
    listener: &TcpListener,
    token: &str,
    wanted: Range<u32>,
    deadline: Instant,
) -> Result<HashMap<u32, TcpStream>, LinkError> {
    let limit = deadline.saturating_duration_since(Instant::now());
    listener.set_nonblocking(true)?;
    let mut lobby = Lobby::new(token, wanted.len() + STRANGERS);
    let mut links = HashMap::new();
    while links.len() < wanted.len() {
        match listener.accept() {
            Ok((stream, _)) => lobby.enter(stream)?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if let Some((rank, stream)) = lobby.greeted(Duration::from_millis(2)) {
                    if wanted.contains(&rank) {
                        links.insert(rank, stream);
                    }
                } else if Instant::now() > deadline {
                    let missing: Vec<String> = wanted
                        .filter(|rank| !links.contains_key(rank))
                        .map(|rank| rank.to_string())
                        .collect();
                    return Err(LinkError::Missing(missing.join(", "), limit.as_secs_f64()));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(links)
}

/// Reaches the rank that listens at `port` of one of `addresses`, as rank `rank`.
///
/// # Errors
/// The last one, at `deadline`.
pub fn reach(
    addresses: &[String],
    port: u16,
    token: &str,
    rank: u32,
    deadline: Instant,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "no address was given");
    loop {
        for address in addresses {
            match stream::knock(address, port, token, rank) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        if Instant::now() > deadline {
            return Err(last);
        }
        thread::sleep(Duration::from_millis(50));
    }
}
