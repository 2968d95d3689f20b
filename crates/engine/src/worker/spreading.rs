//! Which worker has which connection. One core copies as much as most networks carry, and one thread
//! that is awake costs less and answers sooner than four; so a peer's connections start on its home
//! worker, and move to others as soon as that has no time left.
//!
//! Time left is measured while a worker is awake: NCCL waits for the oldest message, so a worker that
//! copies without a pause while there is something to copy holds it up, however long it sleeps
//! afterwards. Naps count as time left, because they are taken only where a network is what limits.

use std::os::fd::AsRawFd;
use std::time::Duration;

use super::{Task, Worker};
use crate::Level;
use crate::comm::lock;
use crate::sync::Ordering;

/// Between two looks, sleep left aside. An all-reduce of NCCL's takes a few to a hundred milliseconds.
const EVERY: Duration = Duration::from_millis(2);
/// In thousandths: above, a worker has too much to do.
const FULL: u64 = 750;
/// Below, it can take more.
const SPARE: u64 = 500;

/// How much of the time for which it is awake a worker works.
#[derive(Debug, Default)]
pub(super) struct Load {
    busy: Duration,
    awake: Duration,
}

impl Load {
    /// A turn of the loop, or a nap, has taken `time`.
    pub fn count(&mut self, time: Duration, active: bool) {
        self.awake += time;
        if active {
            self.busy += time;
        }
    }
}

impl Worker {
    /// Looks whether connections should be another worker's.
    pub(super) fn spread(&mut self) {
        let workers = &self.shared.workers;
        if workers.len() == 1 || self.load.awake < EVERY {
            return;
        }
        let Load { busy, awake } = std::mem::take(&mut self.load);
        let load = (busy.as_micros() * 1000 / awake.as_micros().max(1)) as u64;
        workers[self.index].load.store(load, Ordering::Relaxed);
        if load < FULL {
            return;
        }
        let others = (0..workers.len()).filter(|one| *one != self.index);
        let least = others.min_by_key(|one| workers[*one].load.load(Ordering::Relaxed));
        let Some(to) = least.filter(|to| workers[*to].load.load(Ordering::Relaxed) < SPARE) else {
            return;
        };
        let most = (0..self.links.len()).max_by_key(|link| self.count(*link));
        if let Some(link) = most.filter(|link| self.count(*link) > 1) {
            // Nobody else gives to it before it has counted what this brings.
            workers[to].load.store(FULL, Ordering::Relaxed);
            let half = self.count(link) / 2;
            self.give(link, half, to);
        }
    }

    pub(super) fn count(&self, link: usize) -> usize {
        let mine = self.links.get(link).and_then(Option::as_ref);
        mine.map_or(0, |mine| mine.conns.len())
    }

    pub(super) fn give(&mut self, link: usize, count: usize, to: usize) {
        let Some(Some(mine)) = self.links.get_mut(link) else {
            return;
        };
        let peer = mine.peer.clone();
        let keep = mine.conns.len() - count.min(mine.conns.len());
        let going = mine.conns.split_off(keep);
        for index in &going {
            let Some(conn) = self.conns.get_mut(*index).and_then(Option::take) else {
                continue;
            };
            // Where it fails the socket is not in there.
            let _ = self.epoll.remove(conn.fd.as_raw_fd());
            lock(&peer.link).own(conn.path, Some(to));
            self.shared.workers[to].ask(Task::Adopt(peer.clone(), conn));
        }
        if count > 0 {
            let text = format!(
                "{} connections to {} go from worker {} to worker {to}",
                going.len(),
                peer.name(),
                self.index
            );
            self.shared.log(Level::Debug, &text);
        }
        self.forget_if_over(&peer);
    }
}
