//! What goes out: of the connections with room, the one whose window is the least full pulls it.
//!
//! Room in the kernel's buffers is not enough. What NCCL keeps in flight is often less than what they
//! hold: a connection that shares its path with many then takes as much as one that has a path for
//! itself, and everybody waits for it. So each has a window of the protocol's, steered by how long its
//! chunks wait on their way, and what is on its way fills it.

use std::time::{Duration, Instant};

use evener_proto::ahead::Ahead;
use evener_proto::wire::PACKET;
use evener_proto::{Frame, Side};

use super::{Mine, Worker, enter};
use crate::conn::Conn;
use crate::link::Link;
use crate::stats::WorkerStats;
use crate::sync::Ordering as SyncOrdering;
use crate::sys;

/// A connection holds at most this much that the kernel has not taken.
const PULL: usize = BITE as usize;
/// A worker pulls at most this much before it writes that: what is left others may have.
const BITE: u64 = 4 * PACKET as u64;
/// The kernel is asked this often what is on its way. Between two looks only what was added is
/// known, which makes no window seem emptier than it is.
const LOOK: Duration = Duration::from_micros(50);
/// Turns that the connections to a peer get before the worker looks at other things.
const TURNS: usize = 8;

/// What a worker's connections to a peer deliver, and whether they may have more.
#[derive(Debug, Default)]
pub(super) struct Delivery {
    /// What they may have on their way, all together.
    pub ahead: Ahead,
    /// There is no room for a chunk until something arrives.
    pub full: bool,
}

impl Worker {
    /// Lets the connections of every peer with something to send pull: bytes that were written.
    pub(super) fn pump_dirty(&mut self) -> usize {
        let mut any = 0;
        for index in 0..self.links.len() {
            if let Some(Some(mine)) = self.links.get_mut(index)
                && std::mem::take(&mut mine.dirty)
            {
                any += self.pump(index);
            }
        }
        any
    }

    fn pump(&mut self, index: usize) -> usize {
        let Some(Some(mine)) = self.links.get_mut(index) else {
            return 0;
        };
        let inbox = &self.shared.workers[self.index];
        let peer = mine.peer.clone();
        let (mut any, mut told, mut broken) = (0, false, Vec::new());
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
                let began = Instant::now();
                match conn.flush() {
                    Ok(bytes) => {
                        moved = true;
                        any += bytes;
                        inbox.counts.wrote(bytes, began.elapsed());
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
            let now = self.shared.started.elapsed();
            // Where there is more to come the kernel is asked before the lock is taken: it is a call
            // for each connection.
            let mut looked = mine.wants && look(mine, &mut self.conns, now, &inbox.counts);
            let mut link = enter(&peer, &inbox.counts);
            mine.wants = link.lane.has_frames();
            looked |= mine.wants && look(mine, &mut self.conns, now, &inbox.counts);
            for number in &mine.conns {
                if let Some(Some(conn)) = self.conns.get_mut(*number) {
                    for (comm, message) in conn.done.drain(..) {
                        link.unpin(Side::Send, comm, message);
                    }
                    if looked {
                        link.lane.delivered(conn.path, conn.outstanding(), now);
                    }
                }
            }
            let last = turn == TURNS;
            let pulled = !last && pull(&mut link, mine, &mut self.conns, now);
            // With nothing to write either the next turn would find the same, at the price of a lock.
            let stuck = turn > 0 && !moved;
            let over = !last && !pulled && (stuck || !has_queued(mine, &self.conns));
            mine.dirty |= last;
            let left = link.lane.has_frames();
            mine.delivery.full &= left;
            // Nothing tells us when there is room again.
            mine.dirty |= mine.delivery.full;
            if !left {
                // Under the lock: who has something for us later sees this.
                inbox.hungry.store(true, SyncOrdering::SeqCst);
            }
            if left && (!told || over) {
                // More than is pulled here at once: others may have room, while this one copies.
                // Where nothing here has room, all of them.
                told = true;
                let bites = link.lane.backlog().div_ceil(BITE) as usize;
                let count = if over { usize::MAX } else { bites };
                let others = link.workers().filter(|worker| *worker != self.index);
                let others: Vec<usize> = others.collect();
                drop(link);
                let hungry = |other: &&usize| self.shared.workers[**other].nudge();
                others.iter().filter(hungry).take(count).for_each(drop);
            }
            if over {
                break;
            }
        }
        for (number, why) in broken {
            self.lose(number, &why);
        }
        any
    }
}

/// Asks the kernel what is on its way, if that was long enough ago. Whether it was.
fn look(
    mine: &mut Mine,
    conns: &mut [Option<Box<Conn>>],
    now: Duration,
    counts: &WorkerStats,
) -> bool {
    if now < mine.looked + LOOK {
        return false;
    }
    mine.looked = now;
    WorkerStats::add(&counts.looks, mine.conns.len() as u64);
    let mut delivered = 0;
    for number in &mine.conns {
        if let Some(Some(conn)) = conns.get_mut(*number) {
            delivered += conn.look(now) as u64;
        }
    }
    mine.delivery.ahead.count(delivered, now);
    true
}

/// Whether any connection has something that is not written.
fn has_queued(mine: &Mine, conns: &[Option<Box<Conn>>]) -> bool {
    let mine = mine.conns.iter();
    let mut mine = mine.filter_map(|number| conns.get(*number).and_then(Option::as_ref));
    mine.any(|conn| conn.frames() > 0)
}

fn has_room(conn: &Conn) -> bool {
    conn.writable && conn.queued() < PULL && conn.frames() < sys::PIECES / 2
}

/// Queues what there is to send, a [`BITE`] at a time, each frame where the window is the least full.
/// Whether there was anything.
fn pull(link: &mut Link, mine: &mut Mine, conns: &mut [Option<Box<Conn>>], now: Duration) -> bool {
    let mut any = false;
    let mut open: Vec<usize> = Vec::with_capacity(mine.conns.len());
    for number in &mine.conns {
        let Some(Some(conn)) = conns.get_mut(*number) else {
            continue;
        };
        while has_room(conn)
            && let Some(frame) = link.lane.transmit_own(conn.path, now)
        {
            conn.push(frame.emit(), None);
            any = true;
        }
        // One that rests leaves it to others.
        if has_room(conn) && link.lane.is_awake(conn.path, now) {
            open.push(*number);
        }
    }
    if !link.lane.has_frames() {
        return any;
    }
    let here = mine.conns.iter();
    let here = here.filter_map(|number| conns.get(*number).and_then(Option::as_ref));
    let (mut ahead, mut round_trip) = (0, None);
    for conn in here {
        // What is stuck on a path that is gone must not keep the others from carrying.
        if !conn.is_stuck(now) {
            ahead += conn.outstanding();
        }
        if !conn.least_rtt.is_zero() {
            round_trip = Some(
                round_trip.map_or(conn.least_rtt, |least: Duration| least.min(conn.least_rtt)),
            );
        }
    }
    let limit = mine
        .delivery
        .ahead
        .limit(round_trip, link.workers().count());
    mine.delivery.full = false;
    // How full each is; only what gets a chunk changes.
    let mut open: Vec<(f64, usize)> = open
        .into_iter()
        .filter_map(|number| {
            let conn = conns.get(number)?.as_ref()?;
            let fill = link.lane.fill(conn.path, conn.outstanding());
            if fill >= 1.0 {
                link.lane.is_full(conn.path);
            }
            Some((fill, number))
        })
        .collect();
    let mut bite = 0;
    while link.lane.has_frames() && bite < BITE {
        let least = (0..open.len()).min_by(|one, other| open[*one].0.total_cmp(&open[*other].0));
        // Where paths are too many, an empty one may stand still for long: what all wait for goes over
        // the quickest that moves.
        let moves = |(_, number): &(f64, usize)| {
            let conn = conns.get(*number).and_then(Option::as_ref);
            conn.is_some_and(|conn| !conn.is_stuck(now))
        };
        let first = if link.lane.has_statement() && link.lane.is_scarce() {
            open.iter().position(moves)
        } else {
            None
        };
        let least = first.or(least);
        let Some(place) = least else {
            return any;
        };
        let (fill, number) = open[place];
        mine.delivery.full = fill >= 1.0 || ahead >= limit;
        if mine.delivery.full && !link.lane.has_statement() {
            return any;
        }
        let Some(Some(conn)) = conns.get_mut(number) else {
            return any;
        };
        let frame = if mine.delivery.full {
            link.lane.transmit_statement(conn.path, now)
        } else {
            link.lane.transmit(conn.path, now)
        };
        let taken = match frame {
            Some(frame) => {
                ahead += u64::from(frame.payload());
                bite += u64::from(frame.payload());
                queue(link, conn, frame);
                any = true;
                true
            }
            None => false,
        };
        if taken && has_room(conn) {
            open[place].0 = link.lane.fill(conn.path, conn.outstanding());
            if open[place].0 >= 1.0 && link.lane.has_frames() {
                link.lane.is_full(conn.path);
            }
        } else {
            open.remove(place);
        }
    }
    any
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
