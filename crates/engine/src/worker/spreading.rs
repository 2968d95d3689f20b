//! Which worker has which connection. One core copies as much as most networks carry, and one thread
//! that is awake costs less and answers sooner than four; so a peer's connections start on its home
//! worker, and move to others only when that has no time left.

use std::os::fd::AsRawFd;
use std::time::Duration;

use super::{Task, Worker};
use crate::Level;
use crate::comm::lock;
use crate::sync::Ordering;

/// Between two looks.
const EVERY: Duration = Duration::from_millis(20);
/// In thousandths: above, a worker has too much to do.
const FULL: u64 = 800;
/// Below, it can take more.
const SPARE: u64 = 500;
/// Below, for a while, what it has goes home.
const QUIET: u64 = 30;
const QUIET_LOOKS: u32 = 150;

/// How much of its time a worker works.
#[derive(Debug, Default)]
pub(super) struct Load {
    busy: Duration,
    all: Duration,
    quiet: u32,
}

impl Load {
    /// A turn of the loop has taken `time`.
    pub fn count(&mut self, time: Duration, active: bool) {
        self.all += time;
        if active {
            self.busy += time;
        }
    }
}

impl Worker {
    /// Looks whether connections should be another worker's.
    pub(super) fn spread(&mut self) {
        if self.load.all < EVERY {
            return;
        }
        let load = (self.load.busy.as_micros() * 1000 / self.load.all.as_micros().max(1)) as u64;
        let quiet = if load < QUIET { self.load.quiet + 1 } else { 0 };
        self.load = Load {
            quiet,
            ..Load::default()
        };
        let workers = &self.shared.workers;
        workers[self.index].load.store(load, Ordering::Relaxed);
        if workers.len() == 1 {
            return;
        }
        if load >= FULL {
            let others = (0..workers.len()).filter(|one| *one != self.index);
            let least = others.min_by_key(|one| workers[*one].load.load(Ordering::Relaxed));
            let Some(to) = least.filter(|to| workers[*to].load.load(Ordering::Relaxed) < SPARE)
            else {
                return;
            };
            // Nobody else gives to it before it has counted what this brings.
            workers[to].load.store(FULL, Ordering::Relaxed);
            let most = (0..self.links.len()).max_by_key(|link| self.count(*link));
            if let Some(link) = most.filter(|link| self.count(*link) > 1) {
                let half = self.count(link) / 2;
                self.give(link, half, to);
            }
        } else if quiet >= QUIET_LOOKS {
            for link in 0..self.links.len() {
                let home = self.links[link].as_ref().map(|mine| mine.peer.home);
                if let Some(home) = home.filter(|home| *home != self.index)
                    && self.shared.workers[home].load.load(Ordering::Relaxed) < SPARE
                {
                    let all = self.count(link);
                    self.give(link, all, home);
                }
            }
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
            lock(&peer.link).owners.insert(conn.path, to);
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
