//! One connection beside one or several streams of cubic on one link.

use std::rc::Rc;
use std::time::Duration;

use evener_proto::packet::Config;

use super::cubic;
use super::host::Host;
use super::model::{BELOW, Link, Net};
use super::scenario::{bulk, flows, hosts, limit, measure};

const FULL: u64 = 1500;
/// Packets that a bench has time for.
const MOST: f64 = 6e6;

#[derive(Debug, Clone, Copy)]
pub struct Beside {
    pub bits: f64,
    pub round_trip: Duration,
    /// In parts of what the way holds.
    pub queue: f64,
    /// Streams of cubic.
    pub count: usize,
    /// They have filled the queue when the connection begins.
    pub cubic_first: bool,
    /// A stream of cubic is in the connection's place: what cubic has beside itself.
    pub control: bool,
}

impl Beside {
    /// Bytes that the way holds without a queue.
    fn holds(&self) -> f64 {
        self.bits / 8.0 * self.round_trip.as_secs_f64()
    }

    /// What is not counted, and what is: long enough for cubic to come back from a loss, four times (RFC 9438: K is
    /// the cube root of the window it lost, 0.3 of it, by 0.4), or as long as [`MOST`] packets take.
    pub fn time(&self) -> (Duration, Duration) {
        let packets = (self.holds() * (1.0 + self.queue) / FULL as f64).max(32.0);
        let back = (packets / (self.count + 1) as f64 * 0.3 / 0.4).cbrt();
        let turn = back.max(50.0 * self.round_trip.as_secs_f64()).max(0.5);
        let turn = turn.min(MOST * FULL as f64 / (self.bits / 8.0) / 6.0);
        let time = |times| Duration::from_secs_f64(times * turn);
        (time(2.0), time(4.0))
    }
}

/// The connection's part of what all have, the least of a stream of cubic, and what all have of the link.
pub fn beside(
    cell: &Beside,
    config: Config,
    seed: u64,
    (warm, time): (Duration, Duration),
) -> (f64, f64, f64) {
    let link = || {
        let mut link = Link::new(cell.bits, cell.round_trip / 2);
        link.queue = (cell.holds() * cell.queue).max(16.0 * FULL as f64);
        link
    };
    let mut net = Net::new(vec![link(), link()], seed);
    hosts(&mut net, 1, &config, seed);
    let most = (2.5 * cell.holds() * (1.0 + cell.queue) / f64::from(1 << 20)).ceil() as u64;
    let flow = || {
        let mut flow = bulk(1, 1 << 20);
        flow.ahead = most.max(4);
        flow
    };
    let start = warm / 2;
    let stream = |net: &mut Net, sender: usize| {
        net.add(Box::new(cubic::Sender::new(sender + 1, Rc::from([0]))));
        net.add(Box::new(cubic::Receiver::new(sender, Rc::from([1]))));
    };
    let mut ends = vec![1];
    let mut sender = 2;
    if !cell.cubic_first {
        if cell.control {
            stream(&mut net, sender);
            (ends[0], sender) = (sender + 1, sender + 2);
        } else {
            flows(&mut net, 0, 1, flow());
        }
        net.run_until(start);
    }
    for _ in 0..cell.count {
        stream(&mut net, sender);
        ends.push(sender + 1);
        sender += 2;
    }
    if cell.cubic_first && cell.control {
        net.run_until(start);
        stream(&mut net, sender);
        ends[0] = sender + 1;
    } else if cell.cubic_first {
        net.run_until(start);
        flows(&mut net, 0, 1, flow());
        net.end::<Host>(0).again();
        net.end::<Host>(1).again();
        net.poke(1);
        net.poke(0);
    }
    let rates = measure(&mut net, &ends, warm, time);
    let datagram = (FULL - BELOW) as usize;
    // In bytes of packets: those of TCP hold a little more.
    let payload = if cell.control {
        cubic::LIMIT
    } else {
        limit(datagram)
    };
    let own = rates[0] / payload;
    let theirs: Vec<f64> = rates[1..].iter().map(|rate| rate / cubic::LIMIT).collect();
    let sum = own + theirs.iter().sum::<f64>();
    let least = theirs.iter().copied().fold(f64::MAX, f64::min);
    (own / sum, least / sum, sum / (cell.bits / 8.0))
}
