//! The paths of a process, and what is left of those that have ended.
//!
//! What a path carried counts for its NIC when the path is gone, and how it ended is what an operator
//! looks for after the job: the peer that ends first closes all of them before the other writes its
//! statistics for the last time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evener_proto::PathId;

use crate::stats::{PathReport, PathStats};

/// Flows are tried out and dropped for as long as a job runs: this many are told of by themselves.
const KEPT: usize = 64;

/// A path that is no more.
#[derive(Debug)]
pub struct Ended {
    /// What it had done.
    pub path: PathReport,
    /// How it ended.
    pub why: String,
    /// When, since 1970.
    pub time: Duration,
}

/// Paths of one process to all its peers.
#[derive(Debug, Default)]
pub struct Paths {
    /// By whether it is the accepting end of a connection to ourselves, and number.
    live: HashMap<(bool, PathId), Arc<PathStats>>,
    ended: VecDeque<Ended>,
    /// Bytes that ended paths of a NIC sent and received.
    past: HashMap<String, [u64; 2]>,
}

impl Paths {
    /// A path is there. `mirror`: the accepting end of a connection to ourselves.
    pub fn insert(&mut self, mirror: bool, path: PathId, stats: Arc<PathStats>) {
        self.live.insert((mirror, path), stats);
    }

    /// Statistics of a path that is there.
    pub fn get(&self, mirror: bool, path: PathId) -> Option<&Arc<PathStats>> {
        self.live.get(&(mirror, path))
    }

    /// A path is gone, and its counters will not change.
    pub fn end(&mut self, mirror: bool, path: PathId, why: &str) {
        let Some(stats) = self.live.remove(&(mirror, path)) else {
            return;
        };
        let path = stats.report();
        let [sent, received] = self.past.entry(path.nic.clone()).or_default();
        *sent += path.sent;
        *received += path.received;
        if self.ended.len() == KEPT {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended {
            path,
            why: why.to_string(),
            time: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default(),
        });
    }

    /// Those that are there.
    pub fn live(&self) -> impl Iterator<Item = (&(bool, PathId), &Arc<PathStats>)> {
        self.live.iter()
    }

    /// The last that ended, oldest first.
    pub fn ended(&self) -> impl Iterator<Item = &Ended> {
        self.ended.iter()
    }

    /// Bytes that all paths of a NIC have sent and received.
    pub fn carried(&self, nic: &str) -> [u64; 2] {
        let [mut sent, mut received] = self.past.get(nic).copied().unwrap_or_default();
        for stats in self.live.values().filter(|stats| stats.nic == nic) {
            let path = stats.report();
            sent += path.sent;
            received += path.received;
        }
        [sent, received]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(nic: &str, sent: u64) -> Arc<PathStats> {
        let stats = PathStats::new(nic.into(), 7, "peer".into());
        stats.sent(sent);
        stats.received(2 * sent);
        Arc::new(stats)
    }

    #[test]
    fn what_ended_paths_carried_still_counts_for_their_nic() {
        let mut paths = Paths::default();
        paths.insert(false, PathId(1), stats("eth0", 5));
        paths.insert(true, PathId(1), stats("eth0", 70));
        paths.insert(false, PathId(2), stats("eth1", 900));
        paths.end(true, PathId(1), "cut");
        paths.end(true, PathId(1), "again");
        assert_eq!(paths.carried("eth0"), [75, 150]);
        assert_eq!(paths.carried("eth1"), [900, 1800]);
        assert_eq!(paths.carried("eth2"), [0, 0]);
        let ended: Vec<_> = paths
            .ended()
            .map(|one| (one.path.sent, &*one.why))
            .collect();
        assert_eq!(ended, [(70, "cut")]);
        assert_eq!(paths.live().count(), 2);
    }

    #[test]
    fn the_last_are_told_of_and_none_is_forgotten() {
        let mut paths = Paths::default();
        for number in 0..100 {
            paths.insert(false, PathId(number), stats("eth0", 1 + number));
            paths.end(false, PathId(number), "not worth keeping");
        }
        assert_eq!(paths.ended().count(), KEPT);
        assert_eq!(paths.ended().last().map(|one| one.path.sent), Some(100));
        assert_eq!(paths.carried("eth0")[0], 5050);
    }
}
