//! How long a chunk would wait on each path: on the queue that the path shares with others, where
//! that is known ([`teams`](crate::teams)), and on what the path itself has been given.

use std::time::Duration;

use super::Lane;
use crate::path::{Path, PathId};

/// Paths that need less than this are as good as idle ones: the first of them is as good as any,
/// and few connections that are warm cost less than many.
const SHORT: Duration = Duration::from_micros(150);
/// Bytes a second of a path that has delivered nothing yet.
const UNKNOWN: f64 = 100e6;

/// Ways whose rates differ by less than this factor are taken for equal: how much a way delivers
/// depends on how much it was given.
const EQUAL: f64 = 0.35;
/// What a team delivers is counted over this time.
const WINDOW: Duration = Duration::from_millis(4);
/// Paths that share a queue.
#[derive(Debug, Default)]
pub(super) struct Team {
    members: Vec<PathId>,
    /// Bytes that its members were given and have not delivered.
    held: u64,
    delivered: u64,
    since: Duration,
    /// Bytes a second, the best of late.
    rate: f64,
}

/// How long a chunk waits: first what decides, then what decides between equals.
pub type Wait = (Duration, Duration);

impl Lane {
    /// How long a path needs for what is in front of a chunk that it is given now: `queued` bytes of
    /// its own that it has not delivered yet, and what others have given to the same way. Where a
    /// chunk waits the shortest, it should go: so ways fill by what they carry, however many flows
    /// share them and however little there is to send.
    pub fn wait(&self, id: PathId, queued: u64) -> Wait {
        let Some(path) = self.paths.get(&id) else {
            return (Duration::MAX, Duration::MAX);
        };
        // A path without a figure is taken for a slow one: it gets a chunk, and then it has one.
        let rate = if path.rate > 0.0 { path.rate } else { UNKNOWN };
        let wait = Duration::from_secs_f64(queued as f64 / rate);
        let wait = if wait < SHORT { Duration::ZERO } else { wait };
        match path.team.and_then(|team| self.teams.get(team)) {
            Some(team) => (self.wait_of(team), wait),
            None => (wait, Duration::ZERO),
        }
    }

    fn wait_of(&self, team: &Team) -> Duration {
        let best = self.teams.iter().map(|team| team.rate).fold(0.0, f64::max);
        let rate = if best == 0.0 {
            UNKNOWN
        } else if team.rate > best * EQUAL || team.rate == 0.0 {
            best
        } else {
            team.rate
        };
        Duration::from_secs_f64(team.held as f64 / rate)
    }

    /// Which paths are known to share a queue: for statistics.
    pub fn teams(&self) -> impl Iterator<Item = &[PathId]> {
        self.teams.iter().map(|team| team.members.as_slice())
    }

    /// Asks a path how long it takes now; for all paths at about the same time.
    pub fn ask(&mut self, id: PathId) {
        if let Some(path) = self.paths.get_mut(&id)
            && path.own.is_empty()
        {
            path.own.push_back(crate::Frame::Ping { stamp: 0 });
        }
    }

    /// Of what the path was given, `outstanding` bytes have not reached the peer, queued ones
    /// included.
    pub fn delivered(&mut self, id: PathId, outstanding: u64, now: Duration) {
        let Some(path) = self.paths.get_mut(&id) else {
            return;
        };
        let confirmed = path.given.saturating_sub(outstanding);
        let Some(more) = confirmed
            .checked_sub(path.confirmed)
            .filter(|more| *more > 0)
        else {
            return;
        };
        path.confirmed = confirmed;
        path.moved = now;
        if let Some(team) = path.team.and_then(|team| self.teams.get_mut(team)) {
            team.held = team.held.saturating_sub(more);
            team.delivered += more;
            let passed = now.saturating_sub(team.since);
            if passed >= WINDOW {
                let rate = team.delivered as f64 / passed.as_secs_f64();
                team.rate = rate.max(team.rate * 0.98);
                (team.delivered, team.since) = (0, now);
            }
        }
    }

    /// A path was given more.
    pub(super) fn gave(&mut self, id: PathId, bytes: u64) {
        let team = self.paths.get(&id).and_then(|path| path.team);
        if let Some(team) = team.and_then(|team| self.teams.get_mut(team)) {
            team.held += bytes;
        }
    }

    pub(super) fn leave(&mut self, id: PathId, path: &Path) {
        self.known.forget(id);
        if let Some(team) = path.team.and_then(|team| self.teams.get_mut(team)) {
            team.held = team.held.saturating_sub(path.given - path.confirmed);
            team.members.retain(|one| *one != id);
        }
    }

    /// A ping has come back.
    pub(super) fn compare(&mut self, id: PathId, stamp: u64, at: u64, now: Duration) {
        let sent = Duration::from_nanos(stamp);
        let recent = sent <= now && now < sent + Duration::from_secs(1);
        if !recent
            || !self.paths.contains_key(&id)
            || !self.known.sample(id, sent, Duration::from_nanos(at))
        {
            return;
        }
        let found = self.known.teams(self.paths.keys().copied());
        let same = found.len() == self.teams.len()
            && found
                .iter()
                .zip(&self.teams)
                .all(|(new, old)| *new == old.members);
        if same {
            return;
        }
        let before = std::mem::take(&mut self.teams);
        for path in self.paths.values_mut() {
            path.team = None;
        }
        for members in found {
            let mut team = Team {
                since: now,
                // Whoever most of them were with before knows how quick they are.
                rate: before
                    .iter()
                    .filter(|old| members.iter().any(|one| old.members.contains(one)))
                    .map(|old| old.rate)
                    .fold(0.0, f64::max),
                ..Team::default()
            };
            for id in &members {
                if let Some(path) = self.paths.get_mut(id) {
                    path.team = Some(self.teams.len());
                    team.held += path.given - path.confirmed;
                }
            }
            team.members = members;
            self.teams.push(team);
        }
    }
}
