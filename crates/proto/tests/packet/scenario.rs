//! Networks and what is measured on them, for the tests and for the table.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use evener_proto::packet::format::{CHUNK, HEADER};
use evener_proto::packet::{Config, Event};

use super::cubic;
use super::host::{Flow, Host};
use super::model::{BELOW, Link, Net, Route, random};

pub const MILLI: Duration = Duration::from_millis(1);
const DELAY: Duration = Duration::from_micros(25);

/// The share of a full packet that is payload.
pub fn limit(datagram: usize) -> f64 {
    (datagram - HEADER - CHUNK) as f64 / (datagram as f64 + BELOW as f64)
}

pub fn bulk(channel: u32, length: u64) -> Flow {
    Flow {
        channel,
        length,
        ahead: 4,
        every: None,
        left: u64::MAX,
    }
}

/// Over which of these links (there), and these (back), a source port's packets go.
pub fn hashed(links: Vec<usize>, seed: u64) -> impl Fn(u8) -> Route {
    let routes: Vec<Route> = (0..256)
        .map(|port| {
            let mut seed = seed ^ (port << 8);
            Rc::from([links[(random(&mut seed) % links.len() as u64) as usize]])
        })
        .collect();
    move |port| routes[usize::from(port)].clone()
}

/// A link of each of these rates there, then one of each back.
fn each_way(bits: &[f64]) -> Vec<Link> {
    let link = |bits: &f64| Link::new(*bits, DELAY);
    bits.iter().chain(bits).map(link).collect()
}

/// Two hosts with equal-cost paths of these rates between them, each way.
pub fn pair(bits: &[f64], config: &Config, seed: u64) -> Net {
    let count = bits.len();
    let mut net = Net::new(each_way(bits), seed);
    hosts(&mut net, count, config, seed);
    net
}

/// Two hosts, the first of which dials, with `count` links there and as many back after them.
pub fn hosts(net: &mut Net, count: usize, config: &Config, seed: u64) {
    let there = hashed((0..count).collect(), seed);
    let back = hashed((count..2 * count).collect(), seed + 1);
    net.add(Box::new(Host::new(
        true,
        config.clone(),
        seed + 2,
        1,
        there,
    )));
    net.add(Box::new(Host::new(
        false,
        config.clone(),
        seed + 3,
        0,
        back,
    )));
}

pub fn flows(net: &mut Net, from: usize, to: usize, flow: Flow) {
    net.end::<Host>(to).posts.push(flow.clone());
    net.end::<Host>(from).sends.push(flow);
}

/// Bytes per second that arrive at an end of `Host` or `cubic::Receiver` after a warm-up.
pub fn measure(net: &mut Net, ends: &[usize], warm: Duration, time: Duration) -> Vec<f64> {
    let read = |net: &mut Net, end: &usize| match net.ends[*end].as_any().downcast_mut::<Host>() {
        Some(host) => host.placed,
        None => net.end::<cubic::Receiver>(*end).got,
    };
    let start = net.now;
    net.run_until(start + warm);
    let before: Vec<u64> = ends.iter().map(|end| read(net, end)).collect();
    net.run_until(start + warm + time);
    ends.iter()
        .zip(before)
        .map(|(end, before)| (read(net, end) - before) as f64 / time.as_secs_f64())
        .collect()
}

/// The share of the payload limit that bulk gets over these paths.
pub fn goodput(bits: &[f64], loss: f64, config: &Config, seed: u64, both: bool) -> f64 {
    let mut net = pair(bits, config, seed);
    for link in &mut net.links {
        link.loss = loss;
    }
    flows(&mut net, 0, 1, bulk(1, 1 << 20));
    if both {
        flows(&mut net, 1, 0, bulk(1, 1 << 20));
    }
    let sum: f64 = bits.iter().sum::<f64>() / 8.0;
    let rates = measure(&mut net, &[1, 0], 100 * MILLI, 400 * MILLI);
    let rate = if both {
        (rates[0] + rates[1]) / 2.0
    } else {
        rates[0]
    };
    rate / sum / limit(config.most_datagram)
}

/// The same for one TCP stream over one path.
pub fn tcp(bits: f64, loss: f64, seed: u64) -> f64 {
    let (mut net, ends) = (
        Net::new(vec![Link::new(bits, DELAY), Link::new(bits, DELAY)], seed),
        [0, 1],
    );
    for link in &mut net.links {
        link.loss = loss;
    }
    net.add(Box::new(cubic::Sender::new(1, Rc::from([0]))));
    net.add(Box::new(cubic::Receiver::new(0, Rc::from([1]))));
    let rates = measure(&mut net, &ends[1..], 200 * MILLI, 2000 * MILLI);
    rates[0] / (bits / 8.0) / (1448.0 / 1500.0)
}

fn percentile(mut all: Vec<Duration>, share: f64) -> Duration {
    all.sort_unstable();
    all[((all.len() - 1) as f64 * share) as usize]
}

/// The 99th percentile of 64 KB messages behind bulk: this protocol, and one TCP stream.
pub fn behind_bulk(bits: f64, config: &Config, seed: u64) -> (Duration, Duration) {
    let mut net = pair(&[bits], config, seed);
    flows(&mut net, 0, 1, bulk(1, 1 << 20));
    // On a slow link rarer, or they would be more than it carries.
    let every = Duration::from_micros(3700).mul_f64((1e9 / bits).max(1.0));
    let small = Flow {
        channel: 2,
        length: 64 << 10,
        ahead: 64,
        every: Some(every),
        left: u64::MAX,
    };
    flows(&mut net, 0, 1, small);
    net.run_until(1500 * MILLI);
    let took = &net.end::<Host>(0).took;
    let own = took
        .iter()
        .filter(|(at, channel, _)| *channel == 2 && *at > 100 * MILLI);
    let own = percentile(own.map(|(_, _, took)| *took).collect(), 0.99);
    let mut net = Net::new(vec![Link::new(bits, DELAY), Link::new(bits, DELAY)], seed);
    let mut sender = cubic::Sender::new(1, Rc::from([0]));
    sender.every = Some((64 << 10, every));
    net.add(Box::new(sender));
    net.add(Box::new(cubic::Receiver::new(0, Rc::from([1]))));
    net.run_until(3000 * MILLI);
    let took = &net.end::<cubic::Sender>(0).took;
    let took = took
        .iter()
        .filter(|(at, _)| *at > 500 * MILLI)
        .map(|(_, took)| *took);
    (own, percentile(took.collect(), 0.99))
}

/// One of four paths swallows everything from some time on: the longest that a 64 KB message takes
/// after that, and the longest time without a byte.
pub fn black_hole(bits: f64, config: &Config, seed: u64) -> (Duration, Duration) {
    let mut net = pair(&[bits; 4], config, seed);
    flows(&mut net, 0, 1, bulk(1, 64 << 10));
    net.run_until(100 * MILLI);
    let dead = (seed % 4) as usize;
    (net.links[dead].dead, net.links[4 + dead].dead) = (true, true);
    net.end::<Host>(1).longest_gap = Duration::ZERO;
    net.run_until(400 * MILLI);
    let gap = net.end::<Host>(1).longest_gap;
    let took = net
        .end::<Host>(0)
        .took
        .iter()
        .filter(|(at, ..)| *at > 90 * MILLI);
    (
        took.map(|(_, _, took)| *took)
            .max()
            .unwrap_or(Duration::MAX),
        gap,
    )
}

/// All paths are dead for a while: how long after they heal the first byte comes.
pub fn outage(bits: f64, config: &Config, seed: u64, dead: Duration) -> Duration {
    let mut net = pair(&[bits; 4], config, seed);
    flows(&mut net, 0, 1, bulk(1, 64 << 10));
    net.run_until(100 * MILLI);
    net.links.iter_mut().for_each(|link| link.dead = true);
    net.run_until(100 * MILLI + dead);
    net.links.iter_mut().for_each(|link| link.dead = false);
    let before = net.end::<Host>(1).placed;
    let healed = net.now;
    while net.end::<Host>(1).placed == before && net.now < healed + 10 * dead {
        net.run_until(net.now + MILLI / 4);
    }
    net.now - healed
}

/// Several senders to one receiver's link: the share of it that arrives, the least and the largest
/// part of one sender, and the share of packets that were dropped.
pub fn incast(senders: usize, bits: f64, config: &Config, seed: u64) -> (f64, f64, f64, f64) {
    // Link 0 leads to the receiver, 1 away from it; each sender has its own besides.
    let mut links = vec![Link::new(bits, DELAY), Link::new(bits, DELAY)];
    links.extend((0..senders).map(|_| Link::new(bits, DELAY)));
    let mut net = Net::new(links, seed);
    for at in 0..senders {
        let there: Route = Rc::from([2 + at, 0]);
        let back: Route = Rc::from([1]);
        let seed = seed + 10 * at as u64;
        let send = Host::new(true, config.clone(), seed, 2 * at + 1, move |_| {
            there.clone()
        });
        let take = Host::new(false, config.clone(), seed + 1, 2 * at, move |_| {
            back.clone()
        });
        net.add(Box::new(send));
        net.add(Box::new(take));
        flows(&mut net, 2 * at, 2 * at + 1, bulk(1, 1 << 20));
    }
    let ends: Vec<usize> = (0..senders).map(|at| 2 * at + 1).collect();
    let rates = measure(&mut net, &ends, 100 * MILLI, 500 * MILLI);
    let sum: f64 = rates.iter().sum();
    let least = rates.iter().copied().fold(f64::MAX, f64::min) / sum;
    let most = rates.iter().copied().fold(0.0, f64::max) / sum;
    let dropped = net.links[0].dropped as f64;
    let packets = net.links[0].carried as f64 / 1500.0;
    let share = sum / (bits / 8.0) / limit(config.most_datagram);
    (share, least, most, dropped / (dropped + packets))
}

/// Several connections each way share a link each way. Each packet takes a thread of its end so long,
/// and now and then the thread has to wait for a processor: a nap of half of to twice `nap`, so that it
/// is away for a tenth of the time. The share of both links that arrives, and the least part of one.
pub fn threads(
    bits: f64,
    config: &Config,
    count: usize,
    (cost, nap): (Duration, Duration),
) -> (f64, f64) {
    let mut net = Net::new(vec![Link::new(bits, DELAY), Link::new(bits, DELAY)], 1);
    let mut ends = Vec::new();
    for at in 0..2 * count {
        let (there, back): (Route, Route) = (Rc::from([at % 2]), Rc::from([1 - at % 2]));
        let seed = 10 * at as u64;
        for (initiates, route) in [(true, there), (false, back)] {
            let peer = 2 * at + usize::from(initiates);
            let seed = seed + u64::from(initiates);
            let mut host = Host::new(initiates, config.clone(), seed, peer, move |_| {
                route.clone()
            });
            host.cost = cost;
            net.add(Box::new(host));
        }
        let flow = Flow {
            ahead: 8,
            ..bulk(1, 1 << 20)
        };
        flows(&mut net, 2 * at, 2 * at + 1, flow);
        ends.push(2 * at + 1);
    }
    let (warm, time) = (60 * MILLI, 150 * MILLI);
    let read = |net: &mut Net| -> Vec<f64> {
        let placed = ends.iter().map(|end| net.end::<Host>(*end).placed as f64);
        placed.collect()
    };
    let mut before = Vec::new();
    let mut seed = 7;
    let mut naps: Vec<Duration> = (0..4 * count as u32).map(|at| MILLI * at / 4).collect();
    while net.now < warm + time {
        if net.now >= warm && before.is_empty() {
            before = read(&mut net);
        }
        let now = net.now;
        for (at, next) in naps.iter_mut().enumerate() {
            if !nap.is_zero() && now >= *next {
                let share = 0.5 + (random(&mut seed) % 1536) as f64 / 1024.0;
                let host = net.end::<Host>(at);
                host.nap(now, nap.mul_f64(share));
                *next = now + nap.mul_f64(share * 10.0);
            }
        }
        net.run_until(net.now + MILLI / 100);
    }
    let rates: Vec<f64> = read(&mut net)
        .iter()
        .zip(&before)
        .map(|(after, before)| (after - before) / time.as_secs_f64())
        .collect();
    let sum: f64 = rates.iter().sum();
    let least = rates.iter().copied().fold(f64::MAX, f64::min) / sum;
    (sum / (bits / 4.0) / limit(config.most_datagram), least)
}

/// Two connections share a link, the second starts later: the first one's part.
pub fn two_jobs(bits: f64, config: &Config, seed: u64, later: Duration) -> (f64, f64) {
    let mut net = pair(&[bits], config, seed);
    flows(&mut net, 0, 1, bulk(1, 1 << 20));
    net.run_until(later);
    let (there, back) = (|_| Rc::from([0]), |_| Rc::from([1]));
    let mut second = Host::new(true, config.clone(), seed + 50, 3, there);
    // Its clock is another.
    second.clock = Duration::from_secs(1000);
    net.add(Box::new(second));
    net.add(Box::new(Host::new(
        false,
        config.clone(),
        seed + 51,
        2,
        back,
    )));
    flows(&mut net, 2, 3, bulk(1, 1 << 20));
    let rates = measure(&mut net, &[1, 3], 300 * MILLI, 1500 * MILLI);
    let sum = rates[0] + rates[1];
    (
        rates[0] / sum,
        sum / (bits / 8.0) / limit(config.most_datagram),
    )
}

/// Beside one cubic stream on one link: this protocol's part, and the share of the link that both have.
pub fn beside_cubic(bits: f64, config: &Config, seed: u64, cubic_first: bool) -> (f64, f64) {
    let mut net = pair(&[bits], config, seed);
    if !cubic_first {
        flows(&mut net, 0, 1, bulk(1, 1 << 20));
        net.run_until(200 * MILLI);
    }
    net.add(Box::new(cubic::Sender::new(3, Rc::from([0]))));
    net.add(Box::new(cubic::Receiver::new(2, Rc::from([1]))));
    if cubic_first {
        net.run_until(500 * MILLI);
        flows(&mut net, 0, 1, bulk(1, 1 << 20));
        net.end::<Host>(0).again();
        net.end::<Host>(1).again();
        net.poke(1);
        net.poke(0);
    }
    let rates = measure(&mut net, &[1, 3], 2000 * MILLI, 4000 * MILLI);
    let sum = rates[0] + rates[1];
    (
        rates[0] / sum,
        sum / (bits / 8.0) / limit(config.most_datagram),
    )
}

/// Messages of a comm that are on their way at a time, and bytes of each: as NCCL has them.
const AHEAD: u64 = 8;
const STEP: u64 = 512 << 10;

/// One comm: its messages, each over one of its connections.
struct Comm {
    /// Its connections: where it sends and where it receives.
    lanes: Vec<(usize, usize)>,
    /// The lane of each message whose buffer is posted.
    of: Vec<usize>,
    /// Which message of the comm is the next of a lane at the sender, and at the receiver.
    numbers: Vec<Vec<u64>>,
    /// Messages that went, and bytes that are posted and have not come, for each lane.
    sent: u64,
    outstanding: Vec<u64>,
    /// Which have been sent and received; all before these places have.
    done: [Vec<bool>; 2],
    first: [u64; 2],
}

impl Comm {
    fn over(lanes: Vec<(usize, usize)>) -> Comm {
        Comm {
            of: Vec::new(),
            numbers: vec![Vec::new(); lanes.len()],
            sent: 0,
            outstanding: vec![0; lanes.len()],
            done: [Vec::new(), Vec::new()],
            first: [0, 0],
            lanes,
        }
    }

    fn finish(&mut self, end: usize, lane: usize, number: u64) {
        let message = self.numbers[lane][number as usize] as usize;
        let done = &mut self.done[end];
        done.resize(done.len().max(message + 1), false);
        done[message] = true;
        while done.get(self.first[end] as usize) == Some(&true) {
            self.first[end] += 1;
        }
        if end == 1 {
            self.outstanding[lane] -= 1;
        }
    }
}

/// Rounds as NCCL's all-reduce has them: two nodes of four threads, four connections each way; connection
/// `n` is thread `n`'s where it sends and the next one's where it receives. Comm `n` each way goes over
/// the connections `lanes[n]`; all comms move as much, and the next round begins when all have. A message
/// goes over the connection whose turn it is, or over the one with the least left to deliver (`chosen`).
/// Each packet takes a thread so long, and threads nap as in [`threads`]. Between the nodes are `paths` equal ones of
/// these bits in all; which one a packet takes depends on its source port and `hash`. The share of all links.
pub fn rounds(
    (bits, paths, hash): (f64, usize, u64),
    config: &Config,
    lanes: &[Vec<usize>],
    chosen: bool,
    (cost, nap): (Duration, Duration),
) -> f64 {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 4;
    let amount = 384 / lanes.len() as u64;
    let mut net = Net::new(each_way(&vec![bits / paths as f64; paths]), 1);
    let busy: Vec<Rc<Cell<Duration>>> = (0..2 * THREADS).map(|_| Rc::default()).collect();
    for at in 0..2 * THREADS {
        let (connection, way) = (at / 2, at % 2);
        for (initiates, way) in [(true, way), (false, 1 - way)] {
            let peer = 2 * at + usize::from(initiates);
            let seed = 10 * at as u64 + u64::from(initiates);
            let route = hashed((way * paths..(way + 1) * paths).collect(), hash + seed);
            let mut host = Host::new(initiates, config.clone(), seed, peer, route);
            let thread = if initiates {
                way * THREADS + connection
            } else {
                way * THREADS + (connection + 1) % THREADS
            };
            (host.cost, host.keeps) = (cost, true);
            host.thread = Some(busy[thread].clone());
            net.add(Box::new(host));
        }
    }
    let mut comms: Vec<Comm> = (0..2 * lanes.len())
        .map(|at| {
            let of = lanes[at / 2].iter();
            let ends = of.map(|connection| 2 * (2 * connection + at % 2));
            Comm::over(ends.map(|end| (end, end + 1)).collect())
        })
        .collect();
    net.run_until(MILLI);
    let mut seed = 7;
    let mut naps: Vec<Duration> = (0..2 * THREADS as u32).map(|at| MILLI * at / 4).collect();
    let (mut round, mut began) = (1, Duration::ZERO);
    while net.now < Duration::from_secs(4) {
        let now = net.now;
        for (thread, next) in busy.iter().zip(&mut naps) {
            if !nap.is_zero() && now >= *next {
                let share = 0.5 + (random(&mut seed) % 1536) as f64 / 1024.0;
                thread.set(thread.get().max(now + nap.mul_f64(share)));
                *next = now + nap.mul_f64(share * 10.0);
            }
        }
        for at in 0..4 * THREADS {
            for event in std::mem::take(&mut net.end::<Host>(at).events) {
                let (end, channel, message) = match event {
                    Event::Sent { channel, message } => (0, channel, message),
                    Event::Received {
                        channel, message, ..
                    } => (1, channel, message),
                    _ => continue,
                };
                let comm = &mut comms[channel as usize - 1];
                let of = |lane: &(usize, usize)| lane.0 == at || lane.1 == at;
                let lane = comm.lanes.iter().position(of).unwrap();
                comm.finish(end, lane, message);
            }
        }
        for (at, comm) in comms.iter_mut().enumerate() {
            let channel = at as u32 + 1;
            let count = comm.lanes.len();
            while (comm.of.len() as u64) < (comm.first[1] + AHEAD).min(round * amount) {
                let turn = comm.of.len() % count;
                let mut all = (0..count).map(|more| (turn + more) % count);
                let least = all.by_ref().min_by_key(|lane| comm.outstanding[*lane]);
                let lane = if chosen { least.unwrap() } else { turn };
                comm.numbers[lane].push(comm.of.len() as u64);
                comm.of.push(lane);
                comm.outstanding[lane] += 1;
                let host = net.end::<Host>(comm.lanes[lane].1);
                host.connection.as_mut().unwrap().post(channel, STEP);
                net.poke(comm.lanes[lane].1);
            }
            while comm.sent < (comm.first[0] + AHEAD).min(comm.of.len() as u64) {
                let lane = comm.of[comm.sent as usize];
                comm.sent += 1;
                let host = net.end::<Host>(comm.lanes[lane].0);
                host.connection.as_mut().unwrap().send(channel, STEP);
                net.poke(comm.lanes[lane].0);
            }
        }
        if comms.iter().all(|comm| comm.first[1] == round * amount) {
            if round == 1 {
                began = now;
            }
            if round == ROUNDS {
                break;
            }
            round += 1;
        }
        net.run_until(net.now + MILLI / 100);
    }
    assert_eq!(round, ROUNDS, "not ended in time");
    let bytes = ((round - 1) * amount * STEP * comms.len() as u64) as f64;
    let time = (net.now - began).as_secs_f64();
    bytes / time / (bits / 4.0) / limit(config.most_datagram)
}

/// How a busy machine gives its processors away: how long a thread runs and how long it waits then, on the
/// average (both are random, with long tails).
#[derive(Debug, Clone, Copy)]
pub struct Busy {
    pub runs: Duration,
    pub waits: Duration,
}

/// What `benchmarks/net_fabrics.py` does, on busy processors: two hosts with these paths between them, each
/// with a thread of the engine and one that posts; first `rounds` messages there and back one at a time, then
/// `count` each way at once, four at a time. How long the two parts took, and the longest time without a
/// message; `None`: it did not end within `limit`.
pub fn exchange(
    bits: &[f64],
    config: &Config,
    busy: Busy,
    seed: u64,
    (rounds, count): (u64, u64),
    limit: Duration,
) -> Option<(Duration, Duration, Duration)> {
    const LENGTH: u64 = 256 << 10;
    const DEPTH: u64 = 4;
    let paths = bits.len();
    let mut net = Net::new(each_way(bits), seed);
    let threads: [Rc<Cell<Duration>>; 2] = Default::default();
    for at in 0..4 {
        // Ends 0 and 3 are of the first host, 1 and 2 of the second.
        let host = usize::from(at == 1 || at == 2);
        let range = if host == 0 {
            0..paths
        } else {
            paths..2 * paths
        };
        let route = hashed(range.collect(), seed + at as u64);
        let mut end = Host::new(
            at % 2 == 0,
            config.clone(),
            seed + 10 + at as u64,
            at ^ 1,
            route,
        );
        end.keeps = true;
        end.thread = Some(threads[host].clone());
        net.add(Box::new(end));
    }
    let mut dice = seed;
    let mut draw = |mean: Duration| {
        let share = ((random(&mut dice) >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
        mean.mul_f64(-share.ln())
    };
    // Of each host: the end that receives and the one that sends.
    let ends = [[3, 0], [1, 2]];
    // When each thread stops next: two of the engine's, two callers'.
    let mut stops = [Duration::ZERO; 4];
    let mut callers = [Duration::ZERO; 2];
    // Of each host: messages that were posted to receive and to send, and that are through.
    let (mut posted, mut done) = ([[0u64; 2]; 2], [[0u64; 2]; 2]);
    let (mut first, mut last, mut longest) = (None, Duration::ZERO, Duration::ZERO);
    while net.now < limit {
        let now = net.now;
        for at in 0..4 {
            if now >= stops[at] && !busy.waits.is_zero() {
                let until = now + draw(busy.waits);
                match at {
                    0 | 1 => {
                        threads[at].set(threads[at].get().max(until));
                        for end in ends[at] {
                            if let Some(connection) = &mut net.end::<Host>(end).connection {
                                connection.away(now, until);
                            }
                        }
                    }
                    _ => callers[at - 2] = until,
                }
                stops[at] = until + draw(busy.runs);
            }
        }
        for host in 0..2 {
            for side in 0..2 {
                for event in std::mem::take(&mut net.end::<Host>(ends[host][side]).events) {
                    match event {
                        Event::Sent { .. } | Event::Received { .. } => {
                            done[host][side] += 1;
                            longest = longest.max(now - last);
                            last = now;
                        }
                        Event::Over(_) => return None,
                        _ => {}
                    }
                }
            }
        }
        let all = |wanted: u64, done: &[[u64; 2]; 2]| done.iter().flatten().all(|n| *n >= wanted);
        if first.is_none() && all(rounds, &done) {
            first = Some(now);
        }
        if all(rounds + count, &done) {
            let first = first.unwrap_or(now);
            return Some((first, now - first, longest));
        }
        for host in (0..2).filter(|host| now >= callers[*host]) {
            for side in 0..2 {
                let have = done[host][side];
                let may = match first {
                    Some(_) => (have + DEPTH).min(rounds + count),
                    // One there, then one back.
                    None if side == 0 => (have + 1).min(rounds),
                    None if host == 0 => (have.min(done[host][0]) + 1).min(rounds),
                    None => done[host][0].min(have + 1).min(rounds),
                };
                while posted[host][side] < may {
                    let end = ends[host][side];
                    let Some(connection) = &mut net.end::<Host>(end).connection else {
                        break;
                    };
                    if side == 0 {
                        connection.post(1, LENGTH);
                    } else {
                        connection.send(1, LENGTH);
                    }
                    posted[host][side] += 1;
                    net.poke(end);
                }
            }
        }
        net.run_until(now + MILLI / 20);
    }
    None
}
