//! Which connections to open to a peer, and when to try again.
//!
//! A *route* is a pair of NICs, ours and the peer's. Each lane wants a few *flows* on each route;
//! which of a fabric's equal-cost paths a flow takes is decided by a hash of its addresses and
//! ports, so every dial takes a new source port. A flow that ends is dialled again for ever:
//! at once the first time (a new port is likely to be another path), then after a back-off that
//! doubles up to [`LONGEST`], with a random part so that many flows do not knock together.
//!
//! # Placement
//! What paths a fabric has cannot be asked, only measured. While flows are busy, [`Dialer::measure`]
//! compares what each delivered:
//! - the flow that delivered much less than the median shares its path with others: it is
//!   *re-rolled* (another flow is opened first, so nothing is lost if that is no better);
//! - when everything is busy, half as many flows again are opened; if the sum has not grown by
//!   [`WORTH`] a while later, they are closed and growth rests, longer each time in vain.
//!
//! So caps a flow and the number of paths are found, not configured.

use std::collections::HashMap;
use std::time::Duration;

use crate::path::PathId;

/// Longest wait between two attempts.
pub const LONGEST: Duration = Duration::from_secs(5);
const FIRST: Duration = Duration::from_millis(50);
/// A gain of throughput that is worth another flow.
const WORTH: f64 = 1.05;
/// A flow below this share of the median is re-rolled.
const LAGGING: f64 = 0.6;
/// Flows opened to replace one; the best of them stays.
const CANDIDATES: usize = 4;
/// Between two looks at what a change brought.
const SETTLE: Duration = Duration::from_millis(300);
/// After growth brought nothing, or a re-roll: it doubles from the first to the second.
const REST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// A pair of NICs, by their places in the two address lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Ours.
    pub local: usize,
    /// The peer's.
    pub remote: usize,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Open a connection; answer with [`Dialer::connected`] or [`Dialer::failed`].
    Dial {
        /// Its number here.
        flow: u64,
        /// For which lane.
        lane: usize,
        /// Over which NICs.
        route: Route,
        /// To choose the source port from.
        entropy: u64,
    },
    /// Close it: it is not worth keeping.
    Close(PathId),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Waiting(Duration),
    Dialing,
    Up(PathId),
}

#[derive(Debug)]
struct Flow {
    lane: usize,
    route: Route,
    state: State,
    attempts: u32,
}

#[derive(Debug, Clone, Copy)]
enum Trial {
    /// Opened to see whether the sum grows; what it was before.
    Growth(f64),
    /// Opened to replace this path.
    Replace(PathId),
}

/// See the module.
#[derive(Debug)]
pub struct Dialer {
    flows: HashMap<u64, Flow>,
    next: u64,
    seed: u64,
    most: usize,
    lanes: usize,
    trial: Option<(Trial, Vec<u64>, Duration)>,
    rest_until: Duration,
    rest: Duration,
}

/// What a path delivered since the last measure.
#[derive(Debug, Clone, Copy)]
pub struct Delivered {
    /// Which.
    pub path: PathId,
    /// Bytes a second.
    pub rate: f64,
    /// Whether it had something to deliver nearly all the time.
    pub busy: bool,
}

impl Dialer {
    /// Wants `each` flows for every lane and route at the start, and never more than `most` for all.
    pub fn new(lanes: usize, routes: &[Route], each: usize, most: usize, seed: u64) -> Self {
        let mut dialer = Dialer {
            flows: HashMap::new(),
            next: 0,
            seed,
            most,
            lanes,
            trial: None,
            rest_until: Duration::ZERO,
            rest: REST.0,
        };
        for _ in 0..each {
            for lane in 0..lanes {
                for route in routes {
                    dialer.add(lane, *route, Duration::ZERO);
                }
            }
        }
        dialer
    }

    fn add(&mut self, lane: usize, route: Route, at: Duration) -> u64 {
        self.next += 1;
        self.flows.insert(
            self.next,
            Flow {
                lane,
                route,
                state: State::Waiting(at),
                attempts: 0,
            },
        );
        self.next
    }

    /// A number that looks random (splitmix64).
    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// What is due now.
    pub fn orders(&mut self, now: Duration) -> Vec<Order> {
        let mut due: Vec<u64> = self
            .flows
            .iter()
            .filter(|(_, flow)| matches!(flow.state, State::Waiting(at) if at <= now))
            .map(|(id, _)| *id)
            .collect();
        due.sort_unstable();
        due.into_iter()
            .filter_map(|id| {
                let entropy = self.random();
                let flow = self.flows.get_mut(&id)?;
                flow.state = State::Dialing;
                Some(Order::Dial {
                    flow: id,
                    lane: flow.lane,
                    route: flow.route,
                    entropy,
                })
            })
            .collect()
    }

    /// When [`Dialer::orders`] next has something.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows
            .values()
            .filter_map(|flow| match flow.state {
                State::Waiting(at) => Some(at),
                _ => None,
            })
            .min()
    }

    /// A dial succeeded.
    pub fn connected(&mut self, flow: u64, path: PathId) {
        if let Some(flow) = self.flows.get_mut(&flow) {
            flow.state = State::Up(path);
        }
    }

    /// A dial failed.
    pub fn failed(&mut self, id: u64, now: Duration) {
        let jitter = self.random();
        if let Some(flow) = self.flows.get_mut(&id) {
            let wait = (FIRST * 2u32.pow(flow.attempts.min(7))).min(LONGEST);
            flow.attempts += 1;
            let share = 0.75 + 0.5 * (jitter % 1024) as f64 / 1024.0;
            flow.state = State::Waiting(now + wait.mul_f64(share));
        }
    }

    /// A path is suspect or dead: another is dialled at once. Whether it was one of ours.
    pub fn down(&mut self, path: PathId, now: Duration) -> bool {
        let found = self.of(path);
        if let Some(flow) = found.and_then(|id| self.flows.get_mut(&id)) {
            flow.state = State::Waiting(now);
        }
        found.is_some()
    }

    /// Something came back: nobody waits any longer.
    pub fn hurry(&mut self, now: Duration) {
        for flow in self.flows.values_mut() {
            if matches!(flow.state, State::Waiting(_)) {
                flow.state = State::Waiting(now);
                flow.attempts = 0;
            }
        }
    }

    /// A path has carried data for a while: its flow's troubles are forgotten.
    pub fn proven(&mut self, path: PathId) {
        if let Some(flow) = self.of(path).and_then(|id| self.flows.get_mut(&id)) {
            flow.attempts = 0;
        }
    }

    fn of(&self, path: PathId) -> Option<u64> {
        self.flows
            .iter()
            .find(|(_, flow)| flow.state == State::Up(path))
            .map(|(id, _)| *id)
    }

    /// Routes are not where they were thought to be: no flow may use one that `keep` refuses.
    pub fn retain_routes(&mut self, keep: impl Fn(&Route) -> bool) {
        self.flows.retain(|_, flow| keep(&flow.route));
    }

    /// Flows that are up.
    pub fn up(&self) -> usize {
        self.flows
            .values()
            .filter(|flow| matches!(flow.state, State::Up(_)))
            .count()
    }

    /// Compares what the paths delivered, and opens or closes flows; see the module.
    pub fn measure(&mut self, delivered: &[Delivered], now: Duration) -> Vec<Order> {
        let ours: Vec<Delivered> = delivered
            .iter()
            .filter(|one| self.of(one.path).is_some())
            .copied()
            .collect();
        let busy = !ours.is_empty() && ours.iter().all(|one| one.busy);
        if !busy {
            return Vec::new();
        }
        let sum: f64 = ours.iter().map(|one| one.rate).sum();
        if let Some((trial, opened, at)) = self.trial.take() {
            if now < at {
                self.trial = Some((trial, opened, at));
                return Vec::new();
            }
            return self.judge(trial, &opened, &ours, sum, now);
        }
        if now < self.rest_until {
            return Vec::new();
        }
        let mut rates: Vec<f64> = ours.iter().map(|one| one.rate).collect();
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        let slowest = ours.iter().min_by(|a, b| a.rate.total_cmp(&b.rate));
        if let Some(slowest) = slowest.filter(|one| one.rate < LAGGING * median) {
            if let Some(flow) = self.of(slowest.path).and_then(|id| self.flows.get(&id)) {
                let (lane, route) = (flow.lane, flow.route);
                let opened = (0..CANDIDATES)
                    .map(|_| self.add(lane, route, now))
                    .collect();
                self.trial = Some((Trial::Replace(slowest.path), opened, now + SETTLE * 2));
            }
        } else if self.flows.len() + self.lanes <= self.most {
            let routes: Vec<Route> = {
                let mut seen = Vec::new();
                for flow in self.flows.values() {
                    if !seen.contains(&flow.route) {
                        seen.push(flow.route);
                    }
                }
                seen
            };
            let mut opened = Vec::new();
            let step = (self.flows.len() / 2)
                .clamp(self.lanes, self.most - self.flows.len())
                .next_multiple_of(self.lanes);
            for index in 0..step {
                let pick = (self.random() as usize) % routes.len().max(1);
                if let Some(route) = routes.get(pick) {
                    opened.push(self.add(index % self.lanes, *route, now));
                }
            }
            self.trial = Some((Trial::Growth(sum), opened, now + SETTLE * 2));
        }
        self.orders(now)
    }

    fn rest_now(&mut self, now: Duration) {
        self.rest_until = now + self.rest;
        self.rest = (self.rest * 2).min(REST.1);
    }

    /// The time of a trial is over: keep what it opened, or not.
    fn judge(
        &mut self,
        trial: Trial,
        opened: &[u64],
        ours: &[Delivered],
        sum: f64,
        now: Duration,
    ) -> Vec<Order> {
        let rate = |path: PathId| ours.iter().find(|one| one.path == path).map(|one| one.rate);
        let mut close = Vec::new();
        match trial {
            Trial::Growth(before) if sum >= before * WORTH => self.rest = REST.0,
            Trial::Growth(_) => {
                close.extend_from_slice(opened);
                self.rest_now(now);
            }
            Trial::Replace(old) => {
                let score = |id: &u64| match self.flows.get(id)?.state {
                    State::Up(path) => rate(path).map(|rate| (rate, *id)),
                    _ => None,
                };
                let best = opened
                    .iter()
                    .filter_map(score)
                    .max_by(|a, b| a.0.total_cmp(&b.0))
                    .filter(|best| best.0 > rate(old).unwrap_or(0.0) * 1.2);
                let better = best.is_some();
                close.extend(
                    opened
                        .iter()
                        .filter(|id| best.is_none_or(|(_, b)| b != **id)),
                );
                if better {
                    close.extend(self.of(old));
                }
                if !better {
                    self.rest_now(now);
                }
            }
        }
        close
            .into_iter()
            .filter_map(|id| match self.flows.remove(&id)?.state {
                State::Up(path) => Some(Order::Close(path)),
                _ => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: Route = Route {
        local: 0,
        remote: 0,
    };

    fn dials(orders: &[Order]) -> Vec<u64> {
        orders
            .iter()
            .filter_map(|order| match order {
                Order::Dial { flow, .. } => Some(*flow),
                Order::Close(_) => None,
            })
            .collect()
    }

    #[test]
    fn a_flow_is_dialled_again_for_ever_with_growing_waits() {
        let mut dialer = Dialer::new(1, &[ROUTE], 1, 8, 1);
        let mut now = Duration::ZERO;
        let mut waits = Vec::new();
        for _ in 0..40 {
            let flows = dials(&dialer.orders(now));
            assert_eq!(flows.len(), 1);
            dialer.failed(flows[0], now);
            let next = dialer.deadline().unwrap();
            assert!(dialer.orders(next - Duration::from_nanos(1)).is_empty());
            waits.push(next - now);
            now = next;
        }
        assert!(waits[0] < Duration::from_millis(80));
        assert!(waits[39] >= LONGEST.mul_f64(0.75) && waits[39] <= LONGEST.mul_f64(1.25));
    }

    #[test]
    fn a_path_that_ends_is_replaced_at_once() {
        let mut dialer = Dialer::new(2, &[ROUTE], 2, 8, 1);
        let flows = dials(&dialer.orders(Duration::ZERO));
        assert_eq!(flows.len(), 4);
        for flow in &flows {
            dialer.connected(*flow, PathId(*flow));
        }
        let now = Duration::from_secs(1);
        assert!(dialer.down(PathId(flows[2]), now));
        assert_eq!(dials(&dialer.orders(now)), [flows[2]]);
        assert!(!dialer.down(PathId(99), now));
    }

    /// A fabric of equal paths: each busy flow gets an equal share of the path that it is on.
    struct Fabric {
        on: HashMap<PathId, usize>,
        paths: usize,
        cap: f64,
    }

    impl Fabric {
        fn rates(&self) -> Vec<Delivered> {
            let mut flows: Vec<_> = self.on.iter().collect();
            flows.sort();
            flows
                .into_iter()
                .map(|(path, on)| {
                    let sharing = self.on.values().filter(|other| *other == on).count();
                    Delivered {
                        path: *path,
                        rate: (1.0 / sharing as f64).min(self.cap),
                        busy: true,
                    }
                })
                .collect()
        }

        fn follow(&mut self, dialer: &mut Dialer, orders: Vec<Order>) {
            for order in orders {
                match order {
                    Order::Dial { flow, entropy, .. } => {
                        let path = PathId(entropy);
                        self.on.insert(path, entropy as usize % self.paths);
                        dialer.connected(flow, path);
                    }
                    Order::Close(path) => {
                        self.on.remove(&path);
                    }
                }
            }
        }
    }

    fn settled(paths: usize, cap: f64, seed: u64) -> f64 {
        let mut fabric = Fabric {
            on: HashMap::new(),
            paths,
            cap,
        };
        let mut dialer = Dialer::new(1, &[ROUTE], 4, 24, seed);
        let orders = dialer.orders(Duration::ZERO);
        fabric.follow(&mut dialer, orders);
        for step in 1..1200 {
            let now = Duration::from_millis(100) * step;
            let orders = dialer.measure(&fabric.rates(), now);
            fabric.follow(&mut dialer, orders);
            let orders = dialer.orders(now);
            fabric.follow(&mut dialer, orders);
        }
        fabric.rates().iter().map(|one| one.rate).sum()
    }

    #[test]
    fn flows_find_all_equal_cost_paths() {
        let found: Vec<f64> = (0..20).map(|seed| settled(4, 1.0, seed)).collect();
        assert!(found.iter().all(|sum| *sum > 3.99), "{found:?}");
    }

    #[test]
    fn caps_a_flow_are_met_by_more_flows() {
        for seed in 0..10 {
            let sum = settled(1, 0.1, seed);
            assert!(sum > 0.94, "{sum}");
        }
    }
}
