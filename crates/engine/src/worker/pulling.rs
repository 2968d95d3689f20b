//! What goes out: connections with room pull the next frames of their peer.

use evener_proto::{Frame, Side};

use super::Worker;
use crate::comm::lock;
use crate::conn::Conn;
use crate::link::Link;
use crate::sys;

/// A connection holds at most this much that the kernel has not taken.
const PULL: usize = 64 << 10;
/// Turns that the connections to a peer get before the worker looks at other things.
const TURNS: usize = 8;

impl Worker {
    /// Lets the connections of every peer with something to send pull. Whether anything moved.
    pub(super) fn pump_dirty(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.links.len() {
            if let Some(Some(mine)) = self.links.get_mut(index)
                && std::mem::take(&mut mine.dirty)
            {
                any |= self.pump(index);
            }
        }
        any
    }

    fn pump(&mut self, index: usize) -> bool {
        let Some(Some(mine)) = self.links.get_mut(index) else {
            return false;
        };
        let peer = mine.peer.clone();
        let now = self.shared.started.elapsed();
        let (mut any, mut broken) = (false, Vec::new());
        let mut left = false;
        for turn in 0..=TURNS {
            let mut used = Vec::new();
            {
                let mut link = lock(&peer.link);
                for number in &mine.conns {
                    let Some(Some(conn)) = self.conns.get_mut(*number) else {
                        continue;
                    };
                    for (comm, message) in conn.done.drain(..) {
                        link.unpin(Side::Send, comm, message);
                    }
                    if turn < TURNS
                        && conn.writable
                        && broken.is_empty()
                        && pull(&mut link, conn, now)
                    {
                        used.push(*number);
                    }
                }
                left = link.lane.has_work();
            }
            let mut moved = false;
            for number in &mine.conns {
                let Some(Some(conn)) = self.conns.get_mut(*number) else {
                    continue;
                };
                if turn == TURNS || !conn.writable || conn.frames() == 0 {
                    continue;
                }
                let want = conn.queued();
                match conn.flush() {
                    Ok(bytes) => {
                        moved = true;
                        conn.writable = bytes == want || conn.frames() > sys::PIECES / 2;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        conn.writable = false;
                    }
                    Err(error) => broken.push((*number, error.to_string())),
                }
            }
            // Who took a chunk has its next turn after the others.
            if !used.is_empty() {
                mine.conns.sort_by_key(|number| used.contains(number));
            }
            any |= moved;
            if !moved {
                break;
            }
            if turn + 1 == TURNS {
                mine.dirty = true;
            }
        }
        for (number, why) in broken {
            self.lose(number, &why);
        }
        if left {
            // More than the connections here take: others may have room.
            for other in self.others(&peer) {
                self.shared.workers[other].nudge();
            }
        }
        any
    }
}

/// Fills a connection's queue. Whether with any chunk.
fn pull(link: &mut Link, conn: &mut Conn, now: std::time::Duration) -> bool {
    let mut chunks = false;
    while conn.queued() < PULL && conn.frames() < sys::PIECES / 2 {
        let Some(frame) = link.lane.transmit(conn.path, now) else {
            break;
        };
        let Frame::Chunk {
            comm,
            message,
            offset,
            length,
            ..
        } = frame
        else {
            conn.push(frame.emit(), None);
            continue;
        };
        if length == 0 {
            conn.push(frame.emit(), None);
            continue;
        }
        chunks = true;
        let memory = link.pin(Side::Send, comm, message);
        match memory.and_then(|memory| memory.part(offset, length as usize)) {
            Some(part) => conn.push(frame.emit(), Some((comm, message, part))),
            // Cannot be: a message that is over is not pulled. The stream must stay whole.
            None => {
                if memory.is_some() {
                    link.unpin(Side::Send, comm, message);
                }
                conn.push_blank(frame.emit(), length as usize);
            }
        }
    }
    chunks
}
