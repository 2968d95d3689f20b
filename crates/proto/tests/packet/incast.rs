//! Incast: several senders, each over a link of its own, to one receiver whose link has a short queue. All-to-all and
//! the roots of reduce trees do this.

use std::rc::Rc;
use std::time::Duration;

use evener_proto::packet::Config;

use super::host::{Flow, Host};
use super::model::{BELOW, Link, Net, Route};
use super::scenario::{flows, limit, measure};

const MILLI: Duration = Duration::from_millis(1);
const LENGTH: u64 = 1 << 20;
/// Messages of each sender at a time.
const AHEAD: u64 = 2;

#[derive(Debug, Clone, Copy)]
pub struct Incast {
    pub senders: usize,
    pub bits: f64,
    pub mtu: u64,
    /// Full packets that the receiver's queue holds.
    pub queue: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub struct Gathered {
    /// The part of the receiver's link that is payload, by what it can be.
    pub share: f64,
    /// The slowest sender's part and the quickest one's, by an equal part.
    pub slowest: f64,
    pub quickest: f64,
    /// Messages: the 99th percentile of their time, by what it is where all senders have equal parts of a full link.
    pub p99: f64,
    /// The part of packets that the queue has dropped.
    pub dropped: f64,
}

/// Runs it for 100 ms and then for `time`.
pub fn incast(cell: &Incast, config: &Config, seed: u64, time: Duration) -> Gathered {
    let datagram = (cell.mtu - BELOW) as usize;
    let config = Config {
        datagram,
        most_datagram: datagram,
        ..config.clone()
    };
    // Link 0 leads to the receiver, 1 away from it; each sender has its own besides.
    let link = || Link::new(cell.bits, Duration::from_micros(5));
    let mut links: Vec<Link> = (0..2 + cell.senders).map(|_| link()).collect();
    links[0].queue = (cell.queue * cell.mtu) as f64;
    let mut net = Net::new(links, seed);
    for at in 0..cell.senders {
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
        let flow = Flow {
            channel: 1,
            length: LENGTH,
            ahead: AHEAD,
            every: None,
            left: u64::MAX,
        };
        flows(&mut net, 2 * at, 2 * at + 1, flow);
    }
    let warm = 100 * MILLI;
    net.run_until(warm);
    let before = (net.links[0].dropped, net.links[0].carried);
    let ends: Vec<usize> = (0..cell.senders).map(|at| 2 * at + 1).collect();
    let rates = measure(&mut net, &ends, Duration::ZERO, time);
    let full = cell.bits / 8.0 * limit(datagram);
    let sum: f64 = rates.iter().sum();
    let equal = sum / cell.senders as f64;
    let dropped = (net.links[0].dropped - before.0) as f64;
    let passed = (net.links[0].carried - before.1) as f64 / cell.mtu as f64;
    let mut took: Vec<Duration> = (0..cell.senders)
        .flat_map(|at| {
            let took = net.end::<Host>(2 * at).took.clone().into_iter();
            took.filter(|(at, ..)| *at >= warm).map(|(.., took)| took)
        })
        .collect();
    took.sort_unstable();
    let p99 = took[(took.len() - 1) * 99 / 100].as_secs_f64();
    Gathered {
        share: sum / full,
        slowest: rates.iter().copied().fold(f64::MAX, f64::min) / equal,
        quickest: rates.iter().copied().fold(0.0, f64::max) / equal,
        p99: p99 * full / (AHEAD * cell.senders as u64 * LENGTH) as f64,
        dropped: dropped / (dropped + passed).max(1.0),
    }
}
