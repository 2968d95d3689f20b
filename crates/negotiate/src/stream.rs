//! A connection below its messages: how it begins, and where a message ends.
//!
//! It begins with 4 bytes that name the protocol, the job's token and the rank; rank 0 answers with
//! the 4 bytes, and drops a stranger. Then come frames: a length (u32, little-endian) and its bytes.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

const MAGIC: [u8; 4] = *b"EvN2";
/// No message of a sane job is longer.
const LONGEST_FRAME: usize = 64 << 20;

/// A socket for the other ranks, on any free port.
pub(crate) fn listen() -> io::Result<TcpListener> {
    TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))
}

/// Rank 0's side of the first words: who is there, before it is answered.
pub(crate) fn hear(mut stream: TcpStream, token: &str) -> io::Result<(u32, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut said = vec![0; MAGIC.len() + token.len() + 4];
    stream.read_exact(&mut said)?;
    let (magic, rest) = said.split_at(MAGIC.len());
    let (theirs, rank) = rest.split_at(token.len());
    if magic != MAGIC || theirs != token.as_bytes() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "a stranger",
        ));
    }
    let mut number = [0; 4];
    number.copy_from_slice(rank);
    Ok((u32::from_le_bytes(number), stream))
}

/// Tells a rank that it is taken.
pub(crate) fn answer(mut stream: TcpStream) -> io::Result<TcpStream> {
    stream.write_all(&MAGIC)?;
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Another rank's side.
pub(crate) fn knock(address: &str, port: u16, token: &str, rank: u32) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, address.to_owned());
    for place in (address, port).to_socket_addrs()? {
        let mut stream = match TcpStream::connect_timeout(&place, Duration::from_secs(2)) {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut words = MAGIC.to_vec();
        words.extend_from_slice(token.as_bytes());
        words.extend_from_slice(&rank.to_le_bytes());
        stream.write_all(&words)?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        if answer != MAGIC {
            return Err(invalid("a stranger"));
        }
        stream.set_read_timeout(None)?;
        return Ok(stream);
    }
    Err(last)
}

/// The messages, each in its frame.
pub(crate) fn frames(messages: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut all = Vec::new();
    for message in messages {
        all.extend_from_slice(&(message.len() as u32).to_le_bytes());
        all.extend_from_slice(&message);
    }
    all
}

/// What a peer of this job would not say.
pub(crate) fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// The length of the frame that `bytes` begin with, without its 4 bytes; None where it is not whole.
pub(crate) fn whole(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(first) = bytes.first_chunk() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*first) as usize;
    if length > LONGEST_FRAME {
        return Err(invalid(format!("a frame of {length} bytes")));
    }
    Ok((bytes.len() >= 4 + length).then_some(length))
}
