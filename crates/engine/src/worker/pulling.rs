//! What goes out: of the connections with room, the one where a frame waits the shortest pulls it.
//!
//! Room alone is not enough. What NCCL keeps in flight is often less than what the kernel's windows
//! hold: a connection that shares its path with many then takes as much as one that has a path for
//! itself, and everybody waits for it (in virtual time, two thirds of four paths: proto's
//! tests/fabric.rs). So bytes that are on their way count, and how quickly the path delivers them.

use std::time::Duration;

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
        let (mut any, mut left, mut broken) = (false, false, Vec::new());
        for turn in 0..=TURNS {
            let mut moved = false;
            for number in &mine.conns {
                let Some(Some(conn)) = self.conns.get_mut(*number) else {
                    continue;
                };
                if turn == 0 || conn.frames() == 0 {
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
                    Err(error) => {
                        conn.writable = false;
                        broken.push((*number, error.to_string()));
                    }
                }
            }
            any |= moved;
            let mut link = lock(&peer.link);
            for number in &mine.conns {
                if let Some(Some(conn)) = self.conns.get_mut(*number) {
                    for (comm, message) in conn.done.drain(..) {
                        link.unpin(Side::Send, comm, message);
                    }
                }
            }
            if turn == TURNS {
                mine.dirty |= moved;
            } else if turn == 0 || moved {
                pull(&mut link, &mine.conns, &mut self.conns, now);
            }
            left = link.lane.has_frames();
            if turn > 0 && !moved {
                break;
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

fn has_room(conn: &Conn) -> bool {
    conn.writable && conn.queued() < PULL && conn.frames() < sys::PIECES / 2
}

/// Queues what there is to send, each frame where it waits the shortest.
fn pull(link: &mut Link, mine: &[usize], conns: &mut [Option<Box<Conn>>], now: Duration) {
    let mut open: Vec<usize> = Vec::with_capacity(mine.len());
    for number in mine {
        let Some(Some(conn)) = conns.get_mut(*number) else {
            continue;
        };
        while has_room(conn)
            && let Some(frame) = link.lane.transmit_own(conn.path, now)
        {
            conn.push(frame.emit(), None);
        }
        if has_room(conn) {
            open.push(*number);
        }
    }
    if !link.lane.has_frames() {
        return;
    }
    if open.len() > 1 {
        for number in &open {
            if let Some(Some(conn)) = conns.get_mut(*number) {
                conn.look();
            }
        }
    }
    while link.lane.has_frames() {
        let wait = |place: &usize| {
            let conn = conns.get(open[*place]).and_then(Option::as_ref);
            conn.map_or(Duration::MAX, |conn| {
                link.lane.wait(conn.path, conn.outstanding())
            })
        };
        let Some(place) = (0..open.len()).min_by_key(wait) else {
            return;
        };
        let Some(Some(conn)) = conns.get_mut(open[place]) else {
            return;
        };
        let taken = match link.lane.transmit(conn.path, now) {
            Some(frame) => {
                queue(link, conn, frame);
                true
            }
            None => false,
        };
        if !taken || !has_room(conn) {
            open.remove(place);
        }
    }
}

fn queue(link: &mut Link, conn: &mut Conn, frame: Frame) {
    let Frame::Chunk {
        comm,
        message,
        offset,
        length,
        ..
    } = frame
    else {
        conn.push(frame.emit(), None);
        return;
    };
    if length == 0 {
        conn.push(frame.emit(), None);
        return;
    }
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
