//! Which paths share a queue of the fabric.
//!
//! A fabric's hash puts many flows on few ways. What waits on a way, waits in front of all flows that
//! take it, so a sender that knows of each flow only what it gave *that* flow takes a full way for an
//! empty one. Which flows are together cannot be asked, but it shows: pings that leave at the same
//! time over flows of one way meet the same queue and arrive with the same delay; on ways with longer
//! or shorter queues they do not. Both clocks are the same for all flows, so delays can be compared
//! without knowing how far the clocks are apart.
//!
//! An *epoch* of pings says something only if the delays differ: with all queues equally long, flows
//! of different ways look alike. So flows are taken for a *team* while, in the epochs that say
//! something, their delays differ by much less than delays do in all. A network with one queue never
//! says anything, and no teams are made.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::path::PathId;

/// Pings that belong together leave within one of these.
pub const EPOCH: Duration = Duration::from_millis(2);
/// So many epochs are open for late answers.
const OPEN: u64 = 6;
/// An epoch whose delays differ by less says nothing, microseconds.
const SPREAD: f64 = 200.0;
/// Two delays that differ by less may be the same, microseconds: pings are not sent at once.
const SAME: f64 = 60.0;
/// Or by less than this share of what delays differ by.
const SHARE: f64 = 0.2;
/// Epochs that said something about a pair of paths before it is believed.
const ENOUGH: u32 = 8;
/// Of each epoch, this counts; the rest is what was known before.
const GAIN: f64 = 0.1;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Teams {
    /// Delays in microseconds.
    epochs: BTreeMap<u64, Vec<(PathId, f64)>>,
    /// By how much the delays of two paths differ, and how often that was seen.
    apart: HashMap<(PathId, PathId), (f64, u32)>,
    /// By how much delays differ in all.
    spread: f64,
}

impl Teams {
    /// A ping that left at `stamp` has arrived at `at` by the peer's clock. Whether something new was
    /// learnt.
    pub fn sample(&mut self, path: PathId, stamp: Duration, at: Duration) -> bool {
        let epoch = (stamp.as_nanos() / EPOCH.as_nanos()) as u64;
        let delay = (at.as_nanos() as f64 - stamp.as_nanos() as f64) / 1e3;
        self.epochs.entry(epoch).or_default().push((path, delay));
        let mut learnt = false;
        while let Some(oldest) = self.epochs.first_entry()
            && *oldest.key() + OPEN < epoch
        {
            let delays = oldest.remove();
            learnt |= self.learn(&delays);
        }
        learnt
    }

    fn learn(&mut self, delays: &[(PathId, f64)]) -> bool {
        let all = || delays.iter().map(|one| one.1);
        let spread = all().fold(f64::MIN, f64::max) - all().fold(f64::MAX, f64::min);
        if spread < SPREAD {
            return false;
        }
        let blend = |old: f64, new: f64| old + (new - old) * GAIN;
        // One flow that waits for its own reasons must not make all others look alike.
        let mut sorted: Vec<f64> = all().collect();
        sorted.sort_by(f64::total_cmp);
        let tenth = sorted.len() / 8;
        let middle = sorted[sorted.len() - 1 - tenth] - sorted[tenth];
        if middle < SPREAD {
            return false;
        }
        self.spread = if self.spread == 0.0 {
            middle
        } else {
            blend(self.spread, middle)
        };
        for (place, first) in delays.iter().enumerate() {
            for second in &delays[place + 1..] {
                let pair = (first.0.min(second.0), first.0.max(second.0));
                let apart = (first.1 - second.1).abs();
                let known = self.apart.entry(pair).or_insert((apart, 0));
                *known = (blend(known.0, apart), known.1 + 1);
            }
        }
        true
    }

    /// A path is gone.
    pub fn forget(&mut self, path: PathId) {
        self.apart
            .retain(|pair, _| pair.0 != path && pair.1 != path);
    }

    /// The paths by the queues that they share, some of them alone; none where nothing is known.
    pub fn teams(&self, paths: impl Iterator<Item = PathId>) -> Vec<Vec<PathId>> {
        let limit = SAME.max(self.spread * SHARE);
        let apart = |a: PathId, b: PathId| {
            let known = self.apart.get(&(a.min(b), a.max(b)));
            known.filter(|known| known.1 >= ENOUGH).map(|known| known.0)
        };
        let mut teams: Vec<Vec<PathId>> = Vec::new();
        for path in paths {
            let from = |team: &Vec<PathId>| {
                let known: Vec<f64> = team.iter().filter_map(|one| apart(path, *one)).collect();
                let most = known.iter().copied().fold(0.0, f64::max);
                (known.len() == team.len()).then_some(most)
            };
            let nearest = teams
                .iter()
                .enumerate()
                .filter_map(|(place, team)| Some((place, from(team)?)))
                .min_by(|a, b| a.1.total_cmp(&b.1))
                .filter(|nearest| nearest.1 < limit);
            match nearest {
                Some((place, _)) => teams[place].push(path),
                None => teams.push(vec![path]),
            }
        }
        if teams.iter().all(|team| team.len() == 1) {
            teams.clear();
        }
        teams
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: &mut u64, most: u64) -> u64 {
        *seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (*seed >> 33) % most
    }

    fn learn(ways: usize, flows: usize, longest: u64, seed: u64) -> Vec<Vec<PathId>> {
        let (mut teams, mut seed) = (Teams::default(), seed);
        for epoch in 0..60u64 {
            let queues: Vec<u64> = (0..ways).map(|_| noise(&mut seed, longest)).collect();
            for flow in 0..flows {
                let sent = EPOCH * epoch as u32 + Duration::from_micros(noise(&mut seed, 100));
                // The peer's clock began later.
                let delay = 5_000_000 - 3_000_000 + queues[flow % ways] + noise(&mut seed, 80);
                let at = sent + Duration::from_micros(delay);
                teams.sample(PathId(flow as u64), sent, at);
            }
        }
        teams.teams((0..flows as u64).map(PathId))
    }

    #[test]
    fn flows_of_one_way_are_a_team() {
        for seed in 1..20 {
            let mut teams = learn(4, 16, 1500, seed);
            teams.sort();
            let want: Vec<Vec<PathId>> = (0..4)
                .map(|way| (0..4).map(|n| PathId(way + 4 * n)).collect())
                .collect();
            assert_eq!(teams, want, "seed {seed}");
        }
    }

    #[test]
    fn one_way_says_nothing() {
        for seed in 1..20 {
            assert!(learn(1, 16, 2000, seed).is_empty());
            assert!(learn(4, 16, 20, seed).is_empty());
        }
    }
}
