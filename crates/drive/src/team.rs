//! What a host can carry: some TCP streams a comm, each with a thread of its own at both ends, and no
//! protocol at all. Calls are as large as a message's part, and a reader is woken for as much as it
//! can take ([`GULP`]) and not for each packet. Nothing that carries messages over TCP needs less
//! processor time for a byte, or has more threads to carry it.
//!
//! A message is cut into equal parts of at least [`LEAST`], one a stream, as NCCL's own sockets do
//! with several sockets a communicator. Streams take turns in who gets the first part.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::DriveError;

/// Bytes of the smallest part of a message that is cut.
const LEAST: usize = 64 << 10;
/// A reader is woken when so much is there, or all that it waits for.
const GULP: usize = 256 << 10;

/// A part of a message: address, bytes, and how many parts of the message are left.
struct Part {
    start: usize,
    length: usize,
    left: Arc<AtomicUsize>,
}

struct Member {
    socket: TcpStream,
    parts: Option<Sender<Part>>,
    thread: Option<JoinHandle<()>>,
}

/// One direction of one comm.
pub struct Team {
    members: Vec<Member>,
    /// Parts left of each message.
    posted: VecDeque<Arc<AtomicUsize>>,
    count: usize,
    failed: Arc<AtomicBool>,
}

impl Team {
    /// From connected sockets, in the order that the other end has them in.
    ///
    /// # Errors
    /// A socket's, or a thread cannot be started.
    pub fn new(sockets: Vec<TcpStream>, sending: bool) -> std::io::Result<Team> {
        let failed = Arc::new(AtomicBool::new(false));
        let mut team = Team {
            members: Vec::new(),
            posted: VecDeque::new(),
            count: 0,
            failed: failed.clone(),
        };
        for socket in sockets {
            socket.set_nodelay(true)?;
            let (parts, work) = channel();
            let (own, failed) = (socket.try_clone()?, failed.clone());
            let thread = std::thread::Builder::new().spawn(move || {
                if carry(own, sending, &work).is_err() {
                    failed.store(true, Ordering::Release);
                }
            })?;
            team.members.push(Member {
                socket,
                parts: Some(parts),
                thread: Some(thread),
            });
        }
        Ok(team)
    }

    /// Posts a piece of memory.
    ///
    /// # Safety
    /// The memory stays until [`Team::progress`] has counted it, or the team is dropped.
    pub unsafe fn post(&mut self, start: *mut u8, length: usize) {
        let parts = (length / LEAST).clamp(1, self.members.len());
        let left = Arc::new(AtomicUsize::new(parts));
        for index in 0..parts {
            let (from, to) = (length * index / parts, length * (index + 1) / parts);
            let place = (self.count + index) % self.members.len();
            let part = Part {
                start: start as usize + from,
                length: to - from,
                left: left.clone(),
            };
            if let Some(parts) = &self.members[place].parts
                && parts.send(part).is_err()
            {
                self.failed.store(true, Ordering::Release);
            }
        }
        self.count += parts;
        self.posted.push_back(left);
    }

    /// How many pieces were finished since the last call.
    ///
    /// # Errors
    /// A stream has ended.
    pub fn progress(&mut self) -> Result<usize, DriveError> {
        let mut finished = 0;
        while let Some(left) = self.posted.front()
            && left.load(Ordering::Acquire) == 0
        {
            self.posted.pop_front();
            finished += 1;
        }
        if finished == 0 && self.failed.load(Ordering::Acquire) {
            return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        Ok(finished)
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        for member in &mut self.members {
            member.parts = None;
            if !self.posted.is_empty() {
                // Something is unfinished: its thread must not touch the memory any more.
                let _ = member.socket.shutdown(Shutdown::Both);
            }
            if let Some(thread) = member.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// A thread's work until there is no more.
fn carry(mut socket: TcpStream, sending: bool, work: &Receiver<Part>) -> std::io::Result<()> {
    let mut low = 1;
    for part in work {
        // SAFETY: promised to `post`: the memory is there until the part is counted.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.start as *mut u8, part.length) };
        if sending {
            socket.write_all(bytes)?;
        } else {
            let mut got = 0;
            while got < bytes.len() {
                let wanted = (bytes.len() - got).min(GULP);
                if wanted != low {
                    low = wanted;
                    set_low_water(&socket, low)?;
                }
                await_low_water(&socket)?;
                match socket.read(&mut bytes[got..]) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(more) => got += more,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        part.left.fetch_sub(1, Ordering::Release);
    }
    Ok(())
}

/// The socket is readable when this many bytes are there.
fn set_low_water(socket: &TcpStream, bytes: usize) -> std::io::Result<()> {
    let value = bytes as libc::c_int;
    // SAFETY: four bytes are read from `value`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Sleeps until the socket is readable. A read that sleeps itself would not do: what it has copied
/// already does not count for the low water, so its rest may never wake it.
fn await_low_water(socket: &TcpStream) -> std::io::Result<()> {
    let mut one = libc::pollfd {
        fd: socket.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, which lives through the call.
    while unsafe { libc::poll(&raw mut one, 1, -1) } < 0 {
        let error = std::io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn messages_of_any_length_arrive_whole_and_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            near.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            far.push(listener.accept().unwrap().0);
        }
        let (mut near, mut far) = (
            Team::new(near, true).unwrap(),
            Team::new(far, false).unwrap(),
        );
        for (number, length) in [0, 1, 65_536, 300_001, 200_000, 7].into_iter().enumerate() {
            let mut sent: Vec<u8> = (0..length).map(|at| (at * 7 + number) as u8).collect();
            let mut got = vec![0; length];
            // SAFETY: both stay until they are counted, below.
            unsafe {
                near.post(sent.as_mut_ptr(), length);
                far.post(got.as_mut_ptr(), length);
            }
            let (mut left, mut wanted) = (1, 1);
            while left + wanted > 0 {
                left -= near.progress().unwrap();
                wanted -= far.progress().unwrap();
                std::thread::yield_now();
            }
            assert_eq!(sent, got);
        }
    }

    #[test]
    fn an_end_that_goes_away_is_an_error_and_not_a_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop(listener.accept().unwrap());
        let mut team = Team::new(vec![near], false).unwrap();
        let mut room = vec![0; 10];
        // SAFETY: it outlives the team's work: the other end is gone.
        unsafe { team.post(room.as_mut_ptr(), 10) };
        while team.progress().is_ok() {
            std::thread::yield_now();
        }
    }
}
