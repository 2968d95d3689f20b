//! All paths dead for a while, and then one back before the other. Two connections, one each way, over two
//! paths: how long each stands still after the repair.

use std::time::Duration;

use evener_proto::packet::Config;

use super::host::{Flow, Host};
use super::model::{Link, Net};
use super::scenario::{MILLI, flows, hashed};

/// The network, and for how long it is dead.
#[derive(Debug, Clone, Copy)]
pub struct Dark {
    /// Of each path.
    pub bits: f64,
    pub round_trip: Duration,
    /// For so long no path carries, and after that the first does.
    pub all: Duration,
    /// The second follows so much later.
    pub second: Duration,
}

/// Two connections, one each way, with four messages of 256 KiB at a time on each of two channels.
fn both_ways(dark: &Dark, seed: u64) -> Net {
    let link = || {
        let mut link = Link::new(dark.bits, dark.round_trip / 2);
        link.queue = dark.bits / 8.0 * 20e-3;
        link
    };
    let mut net = Net::new((0..4).map(|_| link()).collect(), seed);
    for at in 0..4usize {
        let there = if matches!(at, 0 | 3) { [0, 1] } else { [2, 3] };
        let ports = seed * 77 + at as u64;
        let route = hashed(there.to_vec(), ports);
        let initiates = at.is_multiple_of(2);
        let peer = if initiates { at + 1 } else { at - 1 };
        let host = Host::new(
            initiates,
            Config::default(),
            seed * 100 + at as u64,
            peer,
            route,
        );
        net.add(Box::new(host));
    }
    for (from, channel) in [(0, 1), (0, 2), (2, 1), (2, 2)] {
        let flow = Flow {
            channel,
            length: 256 << 10,
            ahead: 4,
            every: None,
            left: u64::MAX,
        };
        flows(&mut net, from, from + 1, flow);
    }
    net
}

/// The longest time without a byte, of either connection, in the 3 s after the first path is back.
pub fn stands_still(dark: &Dark, seed: u64) -> Duration {
    const STEP: Duration = MILLI;
    let mut net = both_ways(dark, seed);
    net.run_until(Duration::from_secs(1) + 5 * dark.round_trip);
    net.links.iter_mut().for_each(|link| link.dead = true);
    net.run_until(net.now + dark.all);
    for first in [0, 2] {
        net.links[first].dead = false;
    }
    let healed = net.now;
    let placed = |net: &mut Net| [1, 3].map(|end| net.end::<Host>(end).placed);
    let (mut before, mut last) = (placed(&mut net), [healed; 2]);
    let mut longest = Duration::ZERO;
    while net.now < healed + Duration::from_secs(3) {
        if net.now >= healed + dark.second {
            net.links.iter_mut().for_each(|link| link.dead = false);
        }
        net.run_until(net.now + STEP);
        let now = placed(&mut net);
        for way in 0..2 {
            longest = longest.max(net.now - last[way]);
            if now[way] > before[way] {
                last[way] = net.now;
            }
        }
        before = now;
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acknowledgements that were lost tell of old packets when the network is back: how long it was dead is no
    /// round trip. Where it was taken for one a path that was still dead had seconds to answer, with all of a small
    /// window in flight over it.
    #[test]
    fn how_long_the_network_was_dead_is_no_round_trip() {
        for (bits, most, seeds) in [(1e8, 100, &[4, 7][..]), (2e7, 600, &[1, 4])] {
            let dark = Dark {
                bits,
                round_trip: MILLI / 10,
                all: 3000 * MILLI,
                second: 500 * MILLI,
            };
            for seed in seeds {
                let still = stands_still(&dark, *seed);
                assert!(still < most * MILLI, "{bits}, seed {seed}: {still:?}");
            }
        }
    }

    #[test]
    fn over_a_long_way_some_round_trips_repair_it() {
        let dark = Dark {
            bits: 1e8,
            round_trip: 200 * MILLI,
            all: 3000 * MILLI,
            second: 500 * MILLI,
        };
        let still = stands_still(&dark, 3);
        assert!(still < Duration::from_millis(1500), "{still:?}");
    }

    /// What is not dead is not taken for dead: a round trip of 200 ms, and one of 10 ms that becomes 210 ms.
    #[test]
    fn a_long_way_is_no_silence() {
        for before in [200, 10] {
            let mut dark = Dark {
                bits: 5e7,
                round_trip: before * MILLI,
                all: Duration::ZERO,
                second: Duration::ZERO,
            };
            let mut net = both_ways(&dark, 2);
            net.run_until(3000 * MILLI);
            dark.round_trip = 210 * MILLI;
            net.links
                .iter_mut()
                .for_each(|link| link.delay = dark.round_trip / 2);
            // A longer way is a silence, once.
            net.run_until(5000 * MILLI);
            let silences = |net: &mut Net| net.end::<Host>(0).stats().silences;
            let known = silences(&mut net);
            net.run_until(8000 * MILLI);
            assert_eq!(silences(&mut net), known, "{before} ms");
        }
    }

    /// A peer's process that does nothing for a second: no connection ends, and bytes come at once after it, as many
    /// as before.
    #[test]
    fn a_pause_of_a_second_is_no_dead_network() {
        for bits in [2e7, 1e8] {
            let dark = Dark {
                bits,
                round_trip: MILLI / 10,
                all: Duration::ZERO,
                second: Duration::ZERO,
            };
            let mut net = both_ways(&dark, 5);
            net.run_until(1000 * MILLI);
            for end in [1, 2] {
                net.end::<Host>(end).asleep = 2000 * MILLI;
            }
            net.run_until(2000 * MILLI);
            let before = [1, 3].map(|end| net.end::<Host>(end).placed);
            net.run_until(2050 * MILLI);
            let after = [1, 3].map(|end| net.end::<Host>(end).placed);
            assert!(after[0] > before[0] && after[1] > before[1], "{bits}");
            net.run_until(3000 * MILLI);
            let start = net.links[0].carried + net.links[1].carried;
            net.run_until(3500 * MILLI);
            let carried = (net.links[0].carried + net.links[1].carried - start) as f64;
            let share = carried / (bits / 8.0 * 2.0 * 0.5);
            assert!(share > 0.8, "{bits}: {share}");
        }
    }
}
