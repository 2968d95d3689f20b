//! The baseline: one TCP stream a comm, moved by the progress thread itself with non-blocking calls,
//! as NCCL's own socket transport does by default.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use crate::DriveError;

/// One direction of one comm. Messages are as long as both ends know them to be.
pub struct Stream {
    socket: TcpStream,
    /// Posted pieces: address, length, bytes moved.
    posted: VecDeque<(usize, usize, usize)>,
}

impl Stream {
    /// From a connected socket.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(socket: TcpStream) -> std::io::Result<Stream> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Stream {
            socket,
            posted: VecDeque::new(),
        })
    }

    /// Posts a piece of memory.
    ///
    /// # Safety
    /// The memory stays until [`Stream::progress`] has counted it.
    pub unsafe fn post(&mut self, start: *mut u8, length: usize) {
        self.posted.push_back((start as usize, length, 0));
    }

    /// Moves what can be moved without waiting: how many pieces were finished.
    ///
    /// # Errors
    /// The socket's.
    pub fn progress(&mut self, sending: bool) -> Result<usize, DriveError> {
        let mut finished = 0;
        while let Some((start, length, moved)) = self.posted.front_mut() {
            // SAFETY: promised to `post`: the memory is there until it is counted.
            let rest = unsafe {
                std::slice::from_raw_parts_mut((*start + *moved) as *mut u8, *length - *moved)
            };
            let result = if sending {
                self.socket.write(rest)
            } else {
                self.socket.read(rest)
            };
            match result {
                Ok(0) if !rest.is_empty() => {
                    return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into());
                }
                Ok(bytes) => *moved += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(finished),
                Err(error) => return Err(error.into()),
            }
            if *moved == *length {
                self.posted.pop_front();
                finished += 1;
            }
        }
        Ok(finished)
    }
}
