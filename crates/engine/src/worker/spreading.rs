//! Which worker has which connection: what [`crew`](crate::crew) advises is done.

use std::os::fd::AsRawFd;

use super::Worker;
use crate::crew::{Advice, EVERY};
use crate::lock::lock;
use crate::log::Level;
use crate::sys;
use crate::task::StreamTask;

impl Worker {
    /// Looks whether connections should be another worker's.
    pub(super) fn spread(&mut self) {
        if self.load.awake < EVERY {
            return;
        }
        let [own, kernel] = sys::processor_time();
        self.shared.workers[self.index].counts.used([own, kernel]);
        let load = self.load.take(own + kernel);
        if self.shared.workers.len() == 1 {
            return;
        }
        let Some(link) = (0..self.links.len()).max_by_key(|link| self.count(*link)) else {
            return;
        };
        let Some(Some(mine)) = self.links.get(link) else {
            return;
        };
        let (home, count) = (mine.peer.home, self.count(link));
        let mut mates: Vec<usize> = {
            let link = lock(&mine.peer.link);
            link.workers().filter(|one| *one != self.index).collect()
        };
        mates.sort_by_key(|one| *one != home);
        let keeps = home == self.index || count == 0;
        let advice = lock(&self.shared.crew).look(self.index, &load, keeps, &mates, self.now());
        match advice {
            Advice::Half(to) if count > 1 => self.give(link, count / 2, to),
            Advice::All(to) => self.give(link, count, to),
            Advice::Half(_) | Advice::Stay => {}
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
        let gone = mine.conns.is_empty() && peer.home != self.index;
        for index in &going {
            let Some(conn) = self.conns.get_mut(*index).and_then(Option::take) else {
                continue;
            };
            // Where it fails the socket is not in there.
            let _ = self.epoll.remove(conn.fd.as_raw_fd());
            lock(&peer.link).own(conn.path, Some(to));
            self.shared.workers[to].ask_own(StreamTask::Adopt(peer.clone(), conn));
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
        if gone {
            self.links[link] = None;
        } else {
            self.forget_if_over(&peer);
        }
    }
}
