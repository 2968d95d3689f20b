//! A TCP connection between each two ranks, and moving bytes over two of them at once.
//!
//! One thread uses a mesh at a time, and in the order that all ranks have agreed on, so nothing on the
//! wire says what it belongs to. [`Mesh::close`] may be called from any thread: whoever waits then
//! fails, and so do the peers that wait for this rank. So one failure ends all, and nobody hangs.

use crate::sys;
use evener_negotiate::meet;
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why bytes did not move. After it a mesh is of no use.
#[derive(Debug, Error)]
pub enum Lost {
    /// The peer's process has ended, or has given up.
    #[error("the connection to rank {peer} is lost: {reason}")]
    Gone {
        /// The peer's rank.
        peer: usize,
        /// What the kernel says.
        reason: String,
    },
    /// The peer said nothing for too long.
    #[error("rank {peer} did not come within {seconds:.0} s")]
    Late {
        /// The peer's rank.
        peer: usize,
        /// The limit.
        seconds: f64,
    },
    /// [`Mesh::close`] was called.
    #[error("the connections were closed")]
    Closed,
    /// Some rank could not be reached in the beginning.
    #[error("{0}")]
    Meeting(String),
}

/// Where a rank can be reached: its addresses, and its port.
pub type Place = (Vec<String>, u16);

/// How much is received at a time, and so how soon it is reduced. It stays in the core's cache.
const PIECE: usize = 256 << 10;

/// Without a pause for so long, because a peer's answer is often on its way.
const SPIN: Duration = Duration::from_micros(30);

/// The connections of one rank.
pub struct Mesh {
    rank: usize,
    size: usize,
    links: Vec<Option<TcpStream>>,
    listener: Mutex<Option<TcpListener>>,
    port: u16,
    timeout: Duration,
    closed: AtomicBool,
}

impl Mesh {
    /// Listens for the others. `timeout`: how long a peer may be silent while it is waited for.
    ///
    /// # Errors
    /// Where this process cannot listen.
    pub fn new(rank: usize, size: usize, timeout: Duration) -> io::Result<Self> {
        let listener = if size > 1 {
            Some(meet::listen()?)
        } else {
            None
        };
        let port = match &listener {
            Some(listener) => listener.local_addr()?.port(),
            None => 0,
        };
        Ok(Self {
            rank,
            size,
            links: (0..size).map(|_| None).collect(),
            listener: Mutex::new(listener),
            port,
            timeout,
            closed: AtomicBool::new(false),
        })
    }

    /// The port on which this rank listens; 0 where it is alone.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Connects all ranks. `places`: of each rank. `token`: the job's secret.
    ///
    /// # Errors
    /// [`Lost::Meeting`] names who did not come.
    pub fn connect(&mut self, places: &[Place], token: &str) -> Result<(), Lost> {
        let listener = self.listener.get_mut().ok().and_then(Option::take);
        let Some(listener) = listener else {
            return Ok(());
        };
        let deadline = Instant::now() + self.timeout;
        let (rank, size) = (self.rank as u32, self.size as u32);
        // Lower ranks are called, higher ones call: both at once, so that no order can be in the way.
        let (called, calls) = std::thread::scope(|scope| {
            let above = scope.spawn(|| meet::accept(&listener, token, rank + 1..size, deadline));
            let mut called = HashMap::new();
            let mut problem = None;
            for (peer, (addresses, port)) in places.iter().enumerate().take(self.rank) {
                match meet::reach(addresses, *port, token, rank, deadline) {
                    Ok(stream) => {
                        called.insert(peer as u32, stream);
                    }
                    Err(error) => {
                        problem = Some(format!(
                            "rank {peer} was not reached at port {port} of {}: {error}",
                            addresses.join(", ")
                        ));
                        break;
                    }
                }
            }
            let calls = match above.join() {
                Ok(calls) => calls.map_err(|error| error.to_string()),
                Err(_) => Err("a panic while the ranks met".to_owned()),
            };
            (problem.map_or(Ok(called), Err), calls)
        });
        let mut links = called.map_err(Lost::Meeting)?;
        links.extend(calls.map_err(Lost::Meeting)?);
        for (peer, stream) in links {
            stream
                .set_nonblocking(true)
                .map_err(|error| Lost::Meeting(error.to_string()))?;
            self.links[peer as usize] = Some(stream);
        }
        Ok(())
    }

    /// Ends all connections, from any thread. Who waits on one fails, here and at the peers.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for stream in self.links.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn link(&self, peer: usize) -> Result<&TcpStream, Lost> {
        self.links
            .get(peer)
            .and_then(Option::as_ref)
            .ok_or_else(|| Lost::Meeting(format!("rank {peer} is not connected")))
    }

    fn gone(&self, peer: usize, reason: impl ToString) -> Lost {
        if self.closed.load(Ordering::Acquire) {
            return Lost::Closed;
        }
        let reason = reason.to_string();
        Lost::Gone { peer, reason }
    }

    /// Sends `out` to one rank while `into` is filled by another.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn exchange(&self, out: (usize, &[u8]), into: (usize, &mut [u8])) -> Result<(), Lost> {
        let (from, into) = into;
        let (mut sender, mut receiver) = (Sender::new(out), Receiver::new(from, into.len()));
        self.both(&mut sender, &mut receiver, &mut |start, stream| {
            let end = into.len().min(start + PIECE);
            (&mut &*stream).read(&mut into[start..end])
        })
    }

    /// Sends `out` to one rank while `length` bytes of another are handed to `take`, piece by piece:
    /// where a piece begins, and its bytes, whole elements of `element` bytes.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn exchange_with(
        &self,
        out: (usize, &[u8]),
        from: usize,
        length: usize,
        element: usize,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Lost> {
        let mut piece = vec![0; PIECE.min(length)];
        let mut filled = 0;
        let mut done = 0;
        let (mut sender, mut receiver) = (Sender::new(out), Receiver::new(from, length));
        self.both(&mut sender, &mut receiver, &mut |start, stream| {
            let room = (length - start).min(piece.len() - filled);
            let got = (&mut &*stream).read(&mut piece[filled..filled + room])?;
            filled += got;
            let whole = filled - filled % element;
            if got > 0 && (filled == piece.len() || start + got == length) {
                take(done, &piece[..whole]);
                done += whole;
                piece.copy_within(whole..filled, 0);
                filled -= whole;
            }
            Ok(got)
        })
    }

    /// Sends and receives until both are done. `read` takes what has come: it is given how many bytes
    /// came before.
    fn both(
        &self,
        sender: &mut Sender,
        receiver: &mut Receiver,
        read: &mut dyn FnMut(usize, &TcpStream) -> io::Result<usize>,
    ) -> Result<(), Lost> {
        let mut moved = Instant::now();
        while sender.left() > 0 || receiver.left() > 0 {
            let mut idle = true;
            let mut waiting = (None, None);
            if sender.left() > 0 {
                let stream = self.link(sender.peer)?;
                match (&mut &*stream).write(&sender.bytes[sender.sent..]) {
                    Ok(0) => return Err(self.gone(sender.peer, "it takes no more")),
                    Ok(count) => {
                        sender.sent += count;
                        idle = false;
                    }
                    Err(error) if again(&error) => waiting.0 = Some(stream),
                    Err(error) => return Err(self.gone(sender.peer, error)),
                }
            }
            if receiver.left() > 0 {
                let stream = self.link(receiver.peer)?;
                match read(receiver.got, stream) {
                    Ok(0) => return Err(self.gone(receiver.peer, "it has closed it")),
                    Ok(count) => {
                        receiver.got += count;
                        idle = false;
                    }
                    Err(error) if again(&error) => waiting.1 = Some(stream),
                    Err(error) => return Err(self.gone(receiver.peer, error)),
                }
            }
            if !idle {
                moved = Instant::now();
                continue;
            }
            let waited = moved.elapsed();
            if waited < SPIN {
                std::thread::yield_now();
                continue;
            }
            if self.closed.load(Ordering::Acquire) {
                return Err(Lost::Closed);
            }
            let peer = if waiting.1.is_some() {
                receiver.peer
            } else {
                sender.peer
            };
            if waited > self.timeout {
                let seconds = self.timeout.as_secs_f64();
                return Err(Lost::Late { peer, seconds });
            }
            sys::wait(waiting.0, waiting.1, 200).map_err(|error| self.gone(peer, error))?;
        }
        Ok(())
    }
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

struct Sender<'a> {
    peer: usize,
    bytes: &'a [u8],
    sent: usize,
}

impl<'a> Sender<'a> {
    fn new((peer, bytes): (usize, &'a [u8])) -> Self {
        Self {
            peer,
            bytes,
            sent: 0,
        }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.sent
    }
}

struct Receiver {
    peer: usize,
    length: usize,
    got: usize,
}

impl Receiver {
    fn new(peer: usize, length: usize) -> Self {
        Self {
            peer,
            length,
            got: 0,
        }
    }

    fn left(&self) -> usize {
        self.length - self.got
    }
}
