//! What goes out: of the connections with room, the one where a frame waits the shortest pulls it.
//!
//! Room alone is not enough. What NCCL keeps in flight is often less than what the kernel's windows
//! hold: a connection that shares its path with many then takes as much as one that has a path for
//! itself, and everybody waits for it (in virtual time, two thirds of four paths: proto's
//! tests/fabric.rs). So bytes that are on their way count, and how quickly the path delivers them.

use std::time::Duration;

use evener_proto::{Frame, Side};

use super::{Mine, Worker};
use crate::comm::lock;
use crate::conn::Conn;
use crate::link::Link;
use crate::stats::WorkerStats;
use crate::sync::Ordering as SyncOrdering;
use crate::sys;

/// A connection holds at most this much that the kernel has not taken.
const PULL: usize = 64 << 10;
/// The kernel is asked this often what is on its way. Between two looks only what was added is
/// known, which makes no path seem quicker than it is.
const LOOK: Duration = Duration::from_micros(100);
/// A worker's connections to a peer have at most this much on its way, in time, and two round trips
/// more ...
const AHEAD: Duration = Duration::from_micros(1200);
/// ... or so many bytes.
const AHEAD_LEAST: u64 = 512 << 10;
/// What they deliver is counted over this time.
const WINDOW: Duration = Duration::from_millis(2);
/// Turns that the connections to a peer get before the worker looks at other things.
const TURNS: usize = 8;

/// What a worker's connections to a peer deliver, and whether they may have more.
///
/// What is on its way beyond a round trip waits in the fabric's queues: until they drop something,
/// and with every acknowledgement and credit of the other direction behind it. NCCL keeps a fixed
/// number of bytes in flight, so what they wait is what it loses. What is not sent yet waits here, and
/// the next connection with room takes it.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Bytes that arrived since `since`.
    delivered: u64,
    since: Duration,
    /// Bytes a second, the best of late.
    rate: f64,
    /// There is no room for a chunk until something arrives.
    pub full: bool,
}

impl Flow {
    /// So much has arrived.
    pub fn count(&mut self, delivered: u64, now: Duration) {
        self.delivered += delivered;
        let passed = now.saturating_sub(self.since);
        if passed >= WINDOW {
            let rate = self.delivered as f64 / passed.as_secs_f64();
            self.rate = rate.max(self.rate * 0.95);
            (self.delivered, self.since) = (0, now);
        }
    }

    fn limit(&self, round_trip: Duration) -> u64 {
        let bytes = self.rate * (AHEAD + round_trip * 2).as_secs_f64();
        (bytes as u64).max(AHEAD_LEAST)
    }
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
        let handle = &self.shared.workers[self.index];
        let peer = mine.peer.clone();
        let now = self.shared.started.elapsed();
        let (mut any, mut left, mut broken) = (0, false, Vec::new());
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
                        any += bytes;
                        handle.counts.wrote(bytes);
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
                pull(&mut link, mine, &mut self.conns, now, &handle.counts);
            }
            left = link.lane.has_frames();
            mine.flow.full &= left;
            // Nothing tells us when there is room again.
            mine.dirty |= mine.flow.full;
            if !left {
                // Under the lock: who has something for us later sees this.
                handle.hungry.store(true, SyncOrdering::SeqCst);
            }
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
fn pull(
    link: &mut Link,
    mine: &mut Mine,
    conns: &mut [Option<Box<Conn>>],
    now: Duration,
    counts: &WorkerStats,
) {
    let mut open: Vec<usize> = Vec::with_capacity(mine.conns.len());
    for number in &mine.conns {
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
    if now >= mine.looked + LOOK {
        mine.looked = now;
        WorkerStats::add(&counts.looks, open.len() as u64);
        let mut delivered = 0;
        for number in &mine.conns {
            if let Some(Some(conn)) = conns.get_mut(*number) {
                delivered += conn.look(now) as u64;
            }
        }
        mine.flow.count(delivered, now);
    }
    let here = mine.conns.iter();
    let here = here.filter_map(|number| conns.get(*number).and_then(Option::as_ref));
    // Where no round trip is known yet, nothing is limited.
    let (mut ahead, mut round_trip) = (0, Duration::from_secs(1));
    for conn in here {
        // What is stuck on a path that is gone must not keep the others from carrying.
        if !conn.is_stuck(now) {
            ahead += conn.outstanding();
        }
        if !conn.least_rtt.is_zero() {
            round_trip = round_trip.min(conn.least_rtt);
        }
    }
    let limit = mine.flow.limit(round_trip);
    mine.flow.full = false;
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
        mine.flow.full = ahead >= limit;
        if mine.flow.full && !link.lane.has_control() {
            return;
        }
        let frame = if mine.flow.full {
            link.lane.transmit_control(conn.path, now)
        } else {
            link.lane.transmit(conn.path, now)
        };
        let taken = match frame {
            Some(frame) => {
                ahead += u64::from(frame.payload());
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
