//! Which connections to open to a peer, and when to try again.
//!
//! A *route* is a pair of NICs, ours and the peer's. Each route gets some *flows*; which of a
//! fabric's equal-cost paths a flow takes is decided by a hash of its addresses and ports, so every
//! dial takes a new source port. A flow that ends is dialled again for ever: at once the first time
//! (a new port is likely to be another path), then after a back-off that doubles up to [`LONGEST`],
//! with a random part so that many flows do not knock together. That holds for one that connects and
//! ends again as well, until it has been up for [`PROVEN`] or has carried much: on a network that is
//! too slow for all flows a dial at once is what fills it. Where no other flow is up, it waits no
//! longer than the first time: nothing else carries.
//!
//! A flow that was lost is dialled at once from another port, and its *former* port is tried again
//! for ever beside it ([`COMEBACK`]): a fabric that repairs a path gives the same port the same path.
//! When that connects it takes the place of the one that stood in for it, so that after a repair every
//! path has the flows that it had, and no search is needed.
//!
//! # Placement
//! All flows pull from one queue, so it is enough that every path has *a* flow: sixteen random ones
//! miss one of four paths in 4 of 100 cases. What paths a fabric has cannot be asked, only measured.
//! Each side looks at what it *sends* ([`Dialer::measure`]): a flow takes one path in each
//! direction, and only its sender sees whether it is busy. While what it sends keeps nearly all
//! flows busy,
//! - half as many again are opened; if the sum has not grown by [`WORTH`] after a while, they are
//!   closed, and the next attempt waits, longer after each failure;
//! - when there are as many as there may be, one that delivers much less than the median shares its
//!   path with many: it is *re-rolled* (others are opened first, so nothing is lost if none of them
//!   is better).
//!
//! So caps a flow and the number of paths are found, not configured.

use std::collections::HashMap;
use std::time::Duration;

use crate::lane::SCARCE;
use crate::path::PathId;

/// Longest wait between two attempts.
pub const LONGEST: Duration = Duration::from_secs(5);
const FIRST: Duration = Duration::from_millis(50);
/// A flow that was up for so long has found a way.
const PROVEN: Duration = Duration::from_secs(2);
/// Between two attempts to use a lost flow's port again; later ones are farther apart.
const COMEBACK: Duration = Duration::from_millis(250);
/// A gain of throughput that is worth another flow.
const WORTH: f64 = 1.05;
/// A flow below this share of the median is re-rolled.
const LAGGING: f64 = 0.6;
/// Flows opened to replace one; the best of them stays.
const CANDIDATES: usize = 4;
/// A new flow needs this long to find its rate, and this many round trips.
const SETTLE: Duration = Duration::from_millis(300);
const SETTLE_TRIPS: u32 = 16;
/// Looks whose mean is compared with that of as many others.
const LOOKS: u32 = 3;
/// Flows that are busy for less of their time, on the average, leave room for more to be sent.
const BUSY: f64 = 0.7;
/// After growth or a re-roll brought nothing: it doubles from the first to the second.
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
        /// Over which NICs.
        route: Route,
        /// To choose the source port from.
        entropy: u64,
        /// It was used before: others carry meanwhile, so there is no need to wait for long.
        again: bool,
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
    route: Route,
    state: State,
    attempts: u32,
    /// How often it came up and went down again before it was proven; and since when it is up.
    falls: u32,
    since: Duration,
    /// What its present or last port was chosen from.
    entropy: u64,
    /// Where it tries a lost port again: the flow that took its place, and the path that it was.
    comeback_of: Option<(u64, PathId)>,
    /// Which flow it replaces when it is up ([`Dialer::greet_again`]).
    in_place_of: Option<u64>,
    /// It has been up.
    was_up: bool,
}

#[derive(Debug, Clone, Copy)]
enum Why {
    /// To see whether the sum grows; what it was before.
    Growth(f64),
    /// To replace this path.
    Replace(PathId),
}

/// Flows that were opened to see what they bring.
#[derive(Debug)]
struct Trial {
    why: Why,
    opened: Vec<u64>,
    /// From when on it counts what is delivered.
    from: Duration,
}

/// What became of trials, for statistics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trials {
    /// Trials that are over.
    pub all: u64,
    /// Those after which more was delivered, so that their flows stayed.
    pub gains: u64,
    /// Those that replaced a flow by one from another port.
    pub rerolls: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Dialer {
    flows: HashMap<u64, Flow>,
    next: u64,
    seed: u64,
    routes: Vec<Route>,
    most: usize,
    trial: Option<Trial>,
    /// Busy looks in a row, and the sum of what they saw.
    looks: (u32, f64),
    rest_until: Duration,
    rest: Duration,
    trials: Trials,
    /// Paths whose place was taken back.
    replaced: Vec<PathId>,
}

/// `first`, doubled this many times, [`LONGEST`] at most; and a random part.
fn backed_off(first: Duration, times: u32, random: u64) -> Duration {
    let wait = (first * 2u32.pow(times.min(7))).min(LONGEST);
    wait.mul_f64(0.75 + 0.5 * (random % 1024) as f64 / 1024.0)
}

/// What was sent over a path since the last measure.
#[derive(Debug, Clone, Copy)]
pub struct Delivered {
    /// Which.
    pub path: PathId,
    /// Bytes per second.
    pub rate: f64,
    /// The share of the time in which something was in flight.
    pub busy: f64,
    /// Its round trip, zero where unknown.
    pub trip: Duration,
}

impl Dialer {
    /// Wants `first` flows at the start, spread over the routes. More are opened while there are
    /// fewer than `most`, those of the peer included.
    pub fn new(routes: &[Route], first: usize, most: usize, seed: u64) -> Self {
        let mut dialer = Dialer {
            flows: HashMap::new(),
            next: 0,
            seed,
            routes: routes.to_vec(),
            most,
            trial: None,
            looks: (0, 0.0),
            rest_until: Duration::ZERO,
            rest: REST.0,
            trials: Trials::default(),
            replaced: Vec::new(),
        };
        for route in routes.iter().cycle().take(first) {
            dialer.add(*route, Duration::ZERO);
        }
        dialer
    }

    fn add(&mut self, route: Route, at: Duration) -> u64 {
        self.next += 1;
        self.flows.insert(
            self.next,
            Flow {
                route,
                state: State::Waiting(at),
                attempts: 0,
                falls: 0,
                since: Duration::ZERO,
                entropy: 0,
                comeback_of: None,
                in_place_of: None,
                was_up: false,
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

    /// There are these routes as well, or instead: each new one gets `flows.0`, and there are at most
    /// `flows.1` in all. The flows of others stay, since they may be what carries.
    pub fn widen(&mut self, routes: &[Route], flows: (usize, usize), now: Duration) {
        for route in routes {
            if !self.routes.contains(route) {
                self.routes.push(*route);
                for _ in 0..flows.0 {
                    self.add(*route, now);
                }
            }
        }
        self.most = self.most.max(flows.1);
    }

    /// There is something that only the first words on a connection say: over each route a flow is
    /// dialled, which takes the place of one that has been up. Of one that is down now the former path may
    /// recover, and then nothing would be said. One that was never up and waits will say it.
    pub fn greet_again(&mut self, now: Duration) {
        for route in self.routes.clone() {
            let flows = self.flows.iter();
            let flows = flows.filter(|(_, flow)| flow.route == route && flow.comeback_of.is_none());
            let known = flows.clone().find(|(_, flow)| flow.was_up);
            let place = known.map(|(id, _)| *id);
            let mut new = flows.filter(|(_, flow)| !flow.was_up);
            if new.any(|(_, flow)| matches!(flow.state, State::Waiting(_))) {
                continue;
            }
            let id = self.add(route, now);
            if let Some(flow) = self.flows.get_mut(&id) {
                flow.in_place_of = place;
            }
        }
    }

    /// What is due now.
    pub fn orders(&mut self, now: Duration) -> Vec<Order> {
        self.forget_comebacks(now);
        let mut orders: Vec<Order> = self.replaced.drain(..).map(Order::Close).collect();
        let mut due: Vec<u64> = self
            .flows
            .iter()
            .filter(|(_, flow)| matches!(flow.state, State::Waiting(at) if at <= now))
            .map(|(id, _)| *id)
            .collect();
        due.sort_unstable();
        orders.extend(due.into_iter().filter_map(|id| {
            let fresh = self.random();
            let flow = self.flows.get_mut(&id)?;
            flow.state = State::Dialing;
            let again = flow.comeback_of.is_some();
            if !again {
                flow.entropy = fresh;
            }
            Some(Order::Dial {
                flow: id,
                route: flow.route,
                entropy: flow.entropy,
                again,
            })
        }));
        orders
    }

    /// Lets go of ports whose flow is closed, or has not found another way by the time that they
    /// would be tried: then it is the NIC or the peer, and not the path, that is gone.
    fn forget_comebacks(&mut self, now: Duration) {
        let idle: Vec<u64> = self
            .flows
            .iter()
            .filter(|(_, flow)| {
                let Some((of, _)) = flow.comeback_of else {
                    return false;
                };
                let stands_in = self.flows.get(&of).map(|other| other.state);
                let first =
                    flow.attempts == 0 && matches!(flow.state, State::Waiting(at) if at <= now);
                match stands_in {
                    None => !matches!(flow.state, State::Dialing),
                    Some(State::Up(_)) => false,
                    Some(_) => first,
                }
            })
            .map(|(id, _)| *id)
            .collect();
        for id in idle {
            self.flows.remove(&id);
        }
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
    pub fn connected(&mut self, id: u64, path: PathId, now: Duration) {
        let Some(flow) = self.flows.get_mut(&id) else {
            // It was let go meanwhile.
            self.replaced.push(path);
            return;
        };
        (flow.state, flow.since, flow.was_up) = (State::Up(path), now, true);
        let (of, place) = (flow.comeback_of.take(), flow.in_place_of.take());
        if let Some(other) = place.and_then(|of| self.flows.remove(&of))
            && let State::Up(path) = other.state
        {
            self.replaced.push(path);
        }
        for flow in self.flows.values_mut() {
            if let (Some(place), Some((of, _))) = (&mut flow.in_place_of, of)
                && *place == of
            {
                *place = id;
            }
        }
        if let Some(other) = of.and_then(|(of, _)| self.flows.remove(&of)) {
            // It is the same flow's trouble, whichever port it has.
            if let Some(flow) = self.flows.get_mut(&id) {
                flow.falls = flow.falls.max(other.falls);
            }
            if let State::Up(path) = other.state {
                self.replaced.push(path);
            }
        }
    }

    /// A path that was suspect carries again, before it was given up.
    pub fn recovered(&mut self, path: PathId, now: Duration) {
        let was = |flow: &Flow| flow.comeback_of.is_some_and(|(_, was)| was == path);
        let found = self.flows.iter().find(|(_, flow)| was(flow));
        if let Some(id) = found.map(|(id, _)| *id) {
            self.connected(id, path, now);
        }
    }

    /// A dial failed.
    pub fn failed(&mut self, id: u64, now: Duration) {
        let jitter = self.random();
        if let Some(flow) = self.flows.get_mut(&id) {
            let wait = match flow.comeback_of {
                Some(_) => backed_off(COMEBACK, (flow.attempts / 8).min(5), jitter),
                None => backed_off(FIRST, flow.attempts, jitter),
            };
            flow.attempts += 1;
            flow.state = State::Waiting(now + wait);
        }
    }

    /// A path is suspect or dead: another is dialled at once (later, if the one before it ended soon as
    /// well), and its port again later. Whether it was one of ours.
    pub fn down(&mut self, path: PathId, now: Duration) -> bool {
        let Some(id) = self.of(path) else {
            return false;
        };
        let tried = self
            .flows
            .values()
            .any(|flow| flow.comeback_of.is_some_and(|(of, _)| of == id));
        let others = self
            .flows
            .iter()
            .any(|(other, flow)| *other != id && matches!(flow.state, State::Up(_)));
        let Some(flow) = self.flows.get_mut(&id) else {
            return false;
        };
        if now >= flow.since + PROVEN {
            flow.falls = 0;
        }
        let wait = match flow.falls {
            0 => Duration::ZERO,
            falls if others => backed_off(FIRST, falls - 1, self.random()),
            _ => FIRST,
        };
        let Some(flow) = self.flows.get_mut(&id) else {
            return false;
        };
        flow.state = State::Waiting(now + wait);
        flow.falls += 1;
        if !tried {
            let (route, entropy, falls) = (flow.route, flow.entropy, flow.falls);
            let comeback = self.add(route, now + COMEBACK + wait);
            if let Some(flow) = self.flows.get_mut(&comeback) {
                flow.falls = falls;
                flow.entropy = entropy;
                flow.comeback_of = Some((id, path));
            }
        }
        true
    }

    /// Something came back: nobody waits any longer.
    pub fn hurry(&mut self, now: Duration) {
        for flow in self.flows.values_mut() {
            if matches!(flow.state, State::Waiting(_)) {
                flow.state = State::Waiting(now);
                (flow.attempts, flow.falls) = (0, 0);
            }
        }
    }

    /// A path has carried data for a while: its flow's troubles are forgotten.
    pub fn proven(&mut self, path: PathId) {
        if let Some(flow) = self.of(path).and_then(|id| self.flows.get_mut(&id)) {
            (flow.attempts, flow.falls) = (0, 0);
        }
    }

    fn of(&self, path: PathId) -> Option<u64> {
        self.flows
            .iter()
            .find(|(_, flow)| flow.state == State::Up(path))
            .map(|(id, _)| *id)
    }

    /// Flows that are up.
    pub fn up(&self) -> usize {
        self.flows
            .values()
            .filter(|flow| matches!(flow.state, State::Up(_)))
            .count()
    }

    /// What became of trials.
    pub fn trials(&self) -> Trials {
        self.trials
    }

    /// Looks at what all paths delivered, the peer's included, and opens or closes flows; see the
    /// module.
    pub fn measure(&mut self, delivered: &[Delivered], now: Duration) -> Vec<Order> {
        if let Some(trial) = &self.trial
            && now < trial.from
        {
            self.looks = (0, 0.0);
            return Vec::new();
        }
        let sum: f64 = delivered.iter().map(|one| one.rate).sum();
        let busy: f64 = delivered.iter().map(|one| one.busy).sum();
        // Those that have little each are many enough: what one more brings is chance, and it costs the
        // others packets.
        let many = sum < SCARCE * delivered.len() as f64;
        let idle = busy < BUSY * delivered.len() as f64;
        if delivered.is_empty() || idle || (many && self.trial.is_none()) {
            self.looks = (0, 0.0);
            return Vec::new();
        }
        self.looks = (self.looks.0 + 1, self.looks.1 + sum);
        if self.looks.0 < LOOKS {
            return Vec::new();
        }
        let mean = self.looks.1 / f64::from(self.looks.0);
        self.looks = (0, 0.0);
        if let Some(trial) = self.trial.take() {
            return self.judge(&trial, delivered, mean, now);
        }
        if now < self.rest_until {
            return Vec::new();
        }
        let count = delivered.len();
        if count < self.most {
            let step = (count / 2).clamp(1, self.most - count);
            let opened: Vec<u64> = (0..step).filter_map(|_| self.add_anywhere(now)).collect();
            self.start(Why::Growth(mean), opened, delivered, now);
        } else {
            self.replace(delivered, now);
        }
        self.orders(now)
    }

    fn add_anywhere(&mut self, now: Duration) -> Option<u64> {
        let pick = self.random() as usize % self.routes.len().max(1);
        let route = *self.routes.get(pick)?;
        Some(self.add(route, now))
    }

    fn start(&mut self, why: Why, opened: Vec<u64>, delivered: &[Delivered], now: Duration) {
        let trip = delivered.iter().map(|one| one.trip).min();
        let from = now + SETTLE.max(trip.unwrap_or_default() * SETTLE_TRIPS);
        self.trial = Some(Trial { why, opened, from });
    }

    /// Tries others instead of our slowest flow, if it lags behind.
    fn replace(&mut self, delivered: &[Delivered], now: Duration) {
        let mut rates: Vec<f64> = delivered.iter().map(|one| one.rate).collect();
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        let ours = delivered
            .iter()
            .filter_map(|one| Some((one, self.of(one.path)?)));
        let slowest = ours.min_by(|a, b| a.0.rate.total_cmp(&b.0.rate));
        let Some((slowest, flow)) = slowest.filter(|(one, _)| one.rate < LAGGING * median) else {
            return;
        };
        let (path, route) = (slowest.path, self.flows[&flow].route);
        let opened = (0..CANDIDATES).map(|_| self.add(route, now)).collect();
        self.start(Why::Replace(path), opened, delivered, now);
    }

    fn rest_now(&mut self, now: Duration) {
        self.rest_until = now + self.rest;
        self.rest = (self.rest * 2).min(REST.1);
    }

    /// The time of a trial is over: keep what it opened, or not.
    fn judge(
        &mut self,
        trial: &Trial,
        delivered: &[Delivered],
        sum: f64,
        now: Duration,
    ) -> Vec<Order> {
        self.trials.all += 1;
        let rate = |path: PathId| {
            let one = delivered.iter().find(|one| one.path == path);
            one.map(|one| one.rate)
        };
        let mut close = Vec::new();
        match trial.why {
            Why::Growth(before) if sum >= before * WORTH => {
                self.trials.gains += 1;
                self.rest = REST.0;
            }
            Why::Growth(_) => {
                close.extend_from_slice(&trial.opened);
                self.rest_now(now);
            }
            Why::Replace(old) => {
                let score = |id: &u64| match self.flows.get(id)?.state {
                    State::Up(path) => rate(path).map(|rate| (rate, *id)),
                    _ => None,
                };
                let scores = trial.opened.iter().filter_map(score);
                let best = scores
                    .max_by(|a, b| a.0.total_cmp(&b.0))
                    .filter(|best| best.0 > rate(old).unwrap_or(0.0) * 1.2);
                let others = trial.opened.iter();
                close.extend(others.filter(|id| best.is_none_or(|(_, best)| best != **id)));
                if best.is_some() {
                    self.trials.rerolls += 1;
                    close.extend(self.of(old));
                } else {
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
mod tests;
