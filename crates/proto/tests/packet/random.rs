//! Networks drawn from a seed, and what bulk must get of each.

use std::time::Duration;

use super::fabrics::{Fabric, Way, Weather};
use super::model::random;

/// The least share of what a network carries: all of 617 seeds had more (0.268 at least).
pub const LEAST: f64 = 0.25;
/// What all ways hold without a queue: half of what a connection may have in flight.
const HOLD: f64 = (32 << 20) as f64;
/// Packets of one run: a second of a processor's time.
const PACKETS: f64 = 1e6;

/// Numbers from a seed.
struct Draw(u64);

impl Draw {
    fn unit(&mut self) -> f64 {
        (random(&mut self.0) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn one_in(&mut self, count: u64) -> bool {
        random(&mut self.0).is_multiple_of(count)
    }

    /// Each power of ten as often as another.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.unit())
    }
}

/// The network of this seed: 10 Mb/s to 100 Gb/s, one to eight ways of 0.05 to 150 ms there and back, each second
/// network with ways that differ in rate (by 40 at most), each second in delay; queues of 0.5 to 8 times what a way holds,
/// 16 packets at least. Every third loses packets, up to 1%, every fifth has packets that overtake, and one of six has a
/// stream of cubic. What would take too long to run, or hold more than a connection has in flight, is drawn again.
pub fn draw(seed: u64) -> Fabric {
    let mut draw = Draw(seed);
    loop {
        let fabric = attempt(seed, &mut draw);
        let bits = |way: &Way| way.bits * way.round_trip.as_secs_f64();
        let holds: f64 = fabric.ways.iter().map(bits).sum::<f64>() / 8.0;
        if holds <= HOLD && fabric.packets() <= PACKETS {
            return fabric;
        }
    }
}

fn attempt(seed: u64, draw: &mut Draw) -> Fabric {
    let count = 1 + (random(&mut draw.0) % 8) as usize;
    let count = if draw.one_in(3) { 1 } else { count };
    let (bits, round_trip) = (draw.between(1e7, 1e11), draw.between(5e-5, 0.15));
    let (rates, delays) = (draw.one_in(2), draw.one_in(2));
    let mtu = if bits >= 2e10 || bits >= 1e9 && draw.one_in(3) {
        9000
    } else {
        1500
    };
    let queue = draw.between(0.5, 8.0);
    let ways: Vec<Way> = (0..count)
        .map(|_| {
            let bits = bits * if rates { draw.between(0.025, 1.0) } else { 1.0 };
            let bits = bits.max(1e7);
            let times = if delays { draw.between(0.1, 1.0) } else { 1.0 };
            let round_trip = (round_trip * times).max(5e-5);
            let least = 16.0 * mtu as f64 * 8.0 / bits;
            Way {
                bits,
                round_trip: Duration::from_secs_f64(round_trip),
                queue: Duration::from_secs_f64((queue * round_trip).max(least)),
            }
        })
        .collect();
    let mut weather = Weather::default();
    if draw.one_in(3) {
        weather.loss = draw.between(1e-4, 0.01);
    }
    if draw.one_in(5) {
        let hold = draw.between(0.05, 0.5) * round_trip;
        weather.overtaken = (draw.between(1e-3, 0.05), Duration::from_secs_f64(hold));
    }
    weather.cubic = draw.one_in(6);
    // Long enough to double from nothing, to know the ways, and for the slowest to carry some hundred packets.
    let longest = ways
        .iter()
        .map(|way| way.round_trip)
        .max()
        .unwrap_or_default();
    let slowest = ways.iter().map(|way| way.bits).fold(f64::MAX, f64::min);
    let several = Duration::from_secs_f64(300.0 * mtu as f64 * 8.0 / slowest);
    let time = (longest * 40).max(several).max(Duration::from_millis(100));
    Fabric {
        name: format!("seed {seed}"),
        ways,
        mtu,
        weather,
        warm: time,
        time,
        quick: false,
    }
}

impl Fabric {
    /// Packets that it carries while it runs.
    pub fn packets(&self) -> f64 {
        self.rate() / 8.0 * (self.warm + self.time).as_secs_f64() / self.mtu as f64
    }
}
