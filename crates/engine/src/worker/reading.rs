//! What comes in: headers to the staging buffer, payload to where it belongs.
//!
//! NCCL reads a posted buffer while it fills, and the kernel copies in any order. So payload for one is
//! read into memory of the worker's own, which stays in its processor's cache, and put in place from
//! there ([`publish`](crate::sys::publish)).

use std::sync::Arc;
use std::time::Instant;

use evener_proto::faults::{self, Fault};
use evener_proto::{Frame, Side};

use super::{Worker, enter};
use crate::conn::{Arriving, Conn};
use crate::link::{Effect, Link, Target};
use crate::lock::lock;
use crate::peer::Peer;
use crate::sys::{self, Memory};

/// A connection reads at most this much before others have their turn.
const READ_TURN: usize = 2 << 20;

impl Worker {
    /// Lets every connection that may have something read: bytes that were.
    pub(super) fn read_hot(&mut self) -> usize {
        let mut any = 0;
        for index in std::mem::take(&mut self.hot) {
            // Out of the table while it reads: nobody else looks for it there meanwhile.
            let Some(mut conn) = self.conns.get_mut(index).and_then(Option::take) else {
                continue;
            };
            let Some(Some(mine)) = self.links.get_mut(conn.link) else {
                continue;
            };
            let peer = mine.peer.clone();
            let mut effects = Vec::new();
            let result = self.read(&peer, &mut conn, &mut effects);
            let again = conn.readable;
            if let Some(Some(mine)) = self.links.get_mut(conn.link) {
                mine.dirty = true;
            }
            self.conns[index] = Some(conn);
            // Before the connection ends: it keeps the peer known, and offers need that.
            self.apply(&peer, effects);
            match result {
                Ok(bytes) => any += bytes,
                Err(why) => self.lose(index, &why),
            }
            if again && !self.hot.contains(&index) {
                self.hot.push(index);
            }
        }
        any
    }

    /// Reads for one turn: bytes, or why the connection is over. The lock is taken once a read: for
    /// what the last one brought, and for where the next one goes.
    fn read(
        &mut self,
        peer: &Arc<Peer>,
        conn: &mut Conn,
        effects: &mut Vec<Effect>,
    ) -> Result<usize, String> {
        let (mut total, mut pinned) = (0, None);
        let result = loop {
            let mut link = enter(peer, &self.shared.workers[self.index].counts);
            if let Some((comm, message)) = pinned.take() {
                link.unpin(Side::Receive, comm, message);
            }
            let parsed = self.parse(&mut link, conn);
            effects.append(&mut link.effects());
            if let Err(why) = parsed {
                break Err(why);
            }
            if !conn.readable {
                conn.since = self.now();
            }
            if !conn.readable || total >= READ_TURN {
                break Ok(total);
            }
            let target = conn.arriving.map(|arriving| target(&mut link, &arriving));
            let began = Instant::now();
            let result = match target {
                None => {
                    drop(link);
                    conn.fill(None)
                }
                Some(Target::Eager(memory)) => conn.fill(Some(memory)),
                Some(Target::Nowhere) => {
                    drop(link);
                    conn.fill(Some(self.own_memory(conn)))
                }
                Some(Target::Pinned(memory)) => {
                    drop(link);
                    pinned = conn.arriving.map(|chunk| (chunk.comm, chunk.message));
                    self.read_into(conn, memory)
                }
            };
            match result {
                Ok(0) => break Err("the peer closed it".into()),
                Ok(bytes) => {
                    total += bytes;
                    self.shared.workers[self.index]
                        .counts
                        .read(bytes, began.elapsed());
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    conn.readable = false;
                    break Ok(total);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error.to_string()),
            }
        };
        if let Some((comm, message)) = pinned {
            lock(&peer.link).unpin(Side::Receive, comm, message);
        }
        result
    }

    /// Reads bytes of the arriving chunk into a posted buffer, which is pinned.
    fn read_into(&mut self, conn: &mut Conn, memory: Memory) -> std::io::Result<usize> {
        if faults::is(Fault::ByKernel) {
            return conn.fill(Some(memory));
        }
        let mut own = self.own_memory(conn);
        let got = conn.fill(Some(own))?;
        own.length = own.length.min(got);
        // SAFETY: the buffer is pinned, and the other is this worker's.
        #[allow(unsafe_code, reason = "bytes that were read are placed")]
        unsafe {
            sys::publish(own, memory);
        }
        Ok(got)
    }

    /// Memory of the worker's own for what is missing of the arriving chunk, or as much as there is.
    fn own_memory(&mut self, conn: &Conn) -> Memory {
        let rest = conn.arriving.map_or(0, |chunk| chunk.length - chunk.got);
        let mut scratch = Memory::of(&mut self.scratch);
        scratch.length = scratch.length.min(rest as usize);
        scratch
    }

    /// Takes frames and their bytes out of the staging buffer.
    fn parse(&self, link: &mut Link, conn: &mut Conn) -> Result<(), String> {
        loop {
            if let Some(arriving) = conn.arriving {
                if arriving.got < arriving.length {
                    if conn.staged() == 0 {
                        return Ok(());
                    }
                    match target(link, &arriving) {
                        Target::Pinned(memory) => {
                            conn.unstage(Some(memory));
                            link.unpin(Side::Receive, arriving.comm, arriving.message);
                        }
                        Target::Eager(memory) => conn.unstage(Some(memory)),
                        Target::Nowhere => conn.unstage(None),
                    }
                    continue;
                }
                conn.arriving = None;
                let Arriving {
                    comm,
                    message,
                    offset,
                    length,
                    ..
                } = arriving;
                link.lane.filled(comm, message, offset, length);
                link.events(self.now());
                continue;
            }
            let Some(header) = conn.header() else {
                return Ok(());
            };
            let frame = Frame::parse(&header).map_err(|error| error.to_string())?;
            if let Frame::Chunk {
                comm,
                message,
                offset,
                length,
                ..
            } = frame
            {
                conn.arriving = Some(Arriving {
                    comm,
                    message,
                    offset,
                    length,
                    got: 0,
                });
            }
            let now = self.now();
            let result = link.lane.receive(conn.path, &frame, conn.since, now);
            result.map_err(|error| error.to_string())?;
            link.events(now);
        }
    }
}

/// Where the missing bytes of an arriving chunk go now.
fn target(link: &mut Link, arriving: &Arriving) -> Target {
    let Arriving {
        comm,
        message,
        offset,
        length,
        got,
    } = *arriving;
    let (at, rest) = (offset + u64::from(got), (length - got) as usize);
    link.place(comm, message, at, rest)
}
