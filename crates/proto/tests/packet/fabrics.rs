//! Twenty-four networks, from 20 us to 200 ms, 100 Mb/s to 100 Gb/s: what bulk gets of each.
//!
//! Bulk is messages of 1 MiB, and as many are posted as the network holds two and a half times: what an
//! application keeps in flight is not the question here. Source ports are dealt to paths by a hash, as
//! fabrics do. The seed of a fabric is its place in the list.

use std::rc::Rc;
use std::time::Duration;

use evener_proto::packet::{Config, Event};

use super::cubic;
use super::host::{Flow, Host};
use super::model::{BELOW, Link, Net};
use super::scenario::{flows, hashed, hosts, limit, measure};

const MICRO: Duration = Duration::from_micros(1);
const MILLI: Duration = Duration::from_millis(1);

/// One way through the network, equal both ways.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub bits: f64,
    pub round_trip: Duration,
    /// What its queue holds at its rate.
    pub queue: Duration,
}

/// What else is on the network.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Weather {
    /// This share of packets is lost, whatever the queue.
    pub loss: f64,
    /// This share of packets is held back, by up to so long.
    pub overtaken: (f64, Duration),
    /// One stream of cubic shares the first way.
    pub cubic: bool,
}

#[derive(Debug, Clone)]
pub struct Fabric {
    pub name: String,
    pub ways: Vec<Way>,
    pub mtu: u64,
    pub weather: Weather,
    /// Not counted, and counted.
    pub warm: Duration,
    pub time: Duration,
    /// Cheap enough for each run of the tests.
    pub quick: bool,
}

/// What was reached.
#[derive(Debug, Clone)]
pub struct Reached {
    /// Payload of bulk and of the other stream, by what the ways carry.
    pub share: f64,
    /// What bulk has of the first way, where another stream is there.
    pub part: Option<f64>,
    /// Packets that went again, and of these the ones that were only late, by all.
    pub again: f64,
    pub late: f64,
    /// The part of the time for which each way was busy.
    pub busy: Vec<f64>,
}

fn way(bits: f64, round_trip: Duration, queue: Duration) -> Way {
    Way {
        bits,
        round_trip,
        queue,
    }
}

impl Fabric {
    /// Bytes that it holds, if each message is spread over all ways: the longest is waited for.
    fn holds(&self) -> f64 {
        let most = self.ways.iter().map(|way| way.round_trip + way.queue).max();
        self.rate() / 8.0 * most.unwrap_or_default().as_secs_f64()
    }

    /// Bits per second of all ways.
    pub fn rate(&self) -> f64 {
        self.ways.iter().map(|way| way.bits).sum()
    }
}

/// All of them. Queues are of 2 ms where nothing else is said, of 20 ms where round trips are long.
pub fn all() -> Vec<Fabric> {
    let clear = Weather::default();
    let loss = |loss| Weather { loss, ..clear };
    const M: f64 = 1e6;
    const G: f64 = 1e9;
    let one =
        |name: &str, bits, round_trip, queue, weather, mtu, warm: u32, time: u32, quick| Fabric {
            name: name.into(),
            ways: vec![way(bits, round_trip, queue)],
            mtu,
            weather,
            warm: warm * MILLI,
            time: time * MILLI,
            quick,
        };
    let several = |name: &str, ways: Vec<Way>, mtu, warm: u32, time: u32, quick| Fabric {
        name: name.into(),
        ways,
        mtu,
        weather: clear,
        warm: warm * MILLI,
        time: time * MILLI,
        quick,
    };
    let unequal = |bits| {
        let delays = [400, 2_300, 7_000, 13_600];
        let way = |micros: u32| way(bits, micros * MICRO, 20 * MILLI);
        delays.map(way).to_vec()
    };
    let four = |round_trip| vec![way(25.0 * M, round_trip, 20 * MILLI); 4];
    vec![
        one(
            "100 Mb/s, 20 us",
            100.0 * M,
            20 * MICRO,
            2 * MILLI,
            clear,
            1500,
            300,
            1000,
            true,
        ),
        one(
            "100 Mb/s, 1 ms",
            100.0 * M,
            MILLI,
            2 * MILLI,
            clear,
            1500,
            300,
            1000,
            false,
        ),
        one(
            "100 Mb/s, 10 ms",
            100.0 * M,
            10 * MILLI,
            20 * MILLI,
            clear,
            1500,
            2500,
            5000,
            true,
        ),
        one(
            "100 Mb/s, 43 ms",
            100.0 * M,
            43 * MILLI,
            20 * MILLI,
            clear,
            1500,
            2500,
            5000,
            true,
        ),
        one(
            "100 Mb/s, 200 ms",
            100.0 * M,
            200 * MILLI,
            20 * MILLI,
            clear,
            1500,
            8000,
            20_000,
            false,
        ),
        one(
            "1 Gb/s, 20 us",
            G,
            20 * MICRO,
            2 * MILLI,
            clear,
            1500,
            100,
            400,
            false,
        ),
        one(
            "1 Gb/s, 10 ms",
            G,
            10 * MILLI,
            2 * MILLI,
            clear,
            1500,
            500,
            2000,
            false,
        ),
        one(
            "1 Gb/s, 200 ms",
            G,
            200 * MILLI,
            20 * MILLI,
            clear,
            1500,
            8000,
            8000,
            false,
        ),
        one(
            "10 Gb/s, 50 us",
            10.0 * G,
            50 * MICRO,
            2 * MILLI,
            clear,
            1500,
            100,
            200,
            false,
        ),
        one(
            "10 Gb/s, 10 ms",
            10.0 * G,
            10 * MILLI,
            2 * MILLI,
            clear,
            1500,
            500,
            500,
            false,
        ),
        one(
            "100 Gb/s, 20 us, MTU 9000",
            100.0 * G,
            20 * MICRO,
            2 * MILLI,
            clear,
            9000,
            50,
            100,
            false,
        ),
        one(
            "100 Gb/s, 1 ms, MTU 9000",
            100.0 * G,
            MILLI,
            2 * MILLI,
            clear,
            9000,
            100,
            200,
            false,
        ),
        several(
            "2 x 40 Gb/s and 1 Gb/s, 50 us",
            [40.0, 40.0, 1.0]
                .map(|bits| way(bits * G, 50 * MICRO, 2 * MILLI))
                .to_vec(),
            9000,
            50,
            150,
            false,
        ),
        several(
            "4 x 25 Mb/s, 0.4 to 13.6 ms",
            unequal(25.0 * M),
            1500,
            3000,
            8000,
            true,
        ),
        several(
            "4 x 1 Gb/s, 0.4 to 13.6 ms",
            unequal(G),
            1500,
            1000,
            1000,
            false,
        ),
        several(
            "4 x 25 Mb/s, 10 ms",
            four(10 * MILLI),
            1500,
            2500,
            5000,
            true,
        ),
        several(
            "4 x 25 Mb/s, 38 ms",
            four(38 * MILLI),
            1500,
            2500,
            5000,
            true,
        ),
        one(
            "1 Gb/s, 50 us, queue of 16 packets",
            G,
            50 * MICRO,
            192 * MICRO,
            clear,
            1500,
            100,
            400,
            false,
        ),
        one(
            "1 Gb/s, 10 ms, queue of 0.5 ms",
            G,
            10 * MILLI,
            MILLI / 2,
            clear,
            1500,
            500,
            2000,
            false,
        ),
        one(
            "1 Gb/s, 1 ms, queue of 50 ms",
            G,
            MILLI,
            50 * MILLI,
            clear,
            1500,
            200,
            600,
            false,
        ),
        one(
            "1 Gb/s, 10 ms, loss 0.01%",
            G,
            10 * MILLI,
            2 * MILLI,
            loss(1e-4),
            1500,
            500,
            2000,
            false,
        ),
        one(
            "1 Gb/s, 10 ms, loss 1%",
            G,
            10 * MILLI,
            2 * MILLI,
            loss(0.01),
            1500,
            500,
            2000,
            false,
        ),
        one(
            "1 Gb/s, 1 ms, 5% held back up to 0.5 ms",
            G,
            MILLI,
            2 * MILLI,
            Weather {
                overtaken: (0.05, MILLI / 2),
                ..clear
            },
            1500,
            200,
            600,
            false,
        ),
        one(
            "100 Mb/s, 10 ms, beside cubic",
            100.0 * M,
            10 * MILLI,
            20 * MILLI,
            Weather {
                cubic: true,
                ..clear
            },
            1500,
            5000,
            15_000,
            true,
        ),
    ]
}

/// Runs one; `seed` says which paths ports take and which packets are lost.
///
/// # Errors
/// What was lost, doubled or misplaced.
pub fn run(fabric: &Fabric, seed: u64, most: Config) -> Result<Reached, String> {
    let datagram = (fabric.mtu - BELOW) as usize;
    let config = Config {
        datagram,
        most_datagram: datagram,
        ..most
    };
    let link = |way: &Way| {
        let mut link = Link::new(way.bits, way.round_trip / 2);
        link.queue = way.bits / 8.0 * way.queue.as_secs_f64();
        link.loss = fabric.weather.loss;
        (link.overtaken, link.hold) = fabric.weather.overtaken;
        link
    };
    let count = fabric.ways.len();
    let links = fabric.ways.iter().chain(&fabric.ways).map(link).collect();
    let mut net = Net::new(links, seed);
    // With 16 ports one hash in twenty-five leaves one of four ways without any: that is not the question here.
    let covers = |seed: &u64| {
        let route = hashed((0..count).collect(), *seed);
        let ports = 0..config.used as u8;
        (0..count).all(|way| ports.clone().any(|port| route(port)[0] == way))
    };
    let seed = (seed..).step_by(1000).find(covers).unwrap_or(seed);
    hosts(&mut net, count, &config, seed);
    let mut ends = vec![1];
    if fabric.weather.cubic {
        net.add(Box::new(cubic::Sender::new(3, Rc::from([0]))));
        net.add(Box::new(cubic::Receiver::new(2, Rc::from([1]))));
        ends.push(3);
    }
    const MESSAGE: u64 = 1 << 20;
    let flow = Flow {
        channel: 1,
        length: MESSAGE,
        ahead: (2.5 * fabric.holds() / MESSAGE as f64).ceil().max(4.0) as u64,
        every: None,
        left: u64::MAX,
    };
    flows(&mut net, 0, 1, flow);
    for end in 0..2 {
        let host = net.end::<Host>(end);
        (host.lines, host.keeps) = (Some(Default::default()), true);
    }
    net.run_until(fabric.warm);
    let carried = |net: &Net| -> Vec<u64> { net.links.iter().map(|link| link.carried).collect() };
    let before = carried(&net);
    let rates = measure(&mut net, &ends, Duration::ZERO, fabric.time);
    let rate = |(link, before)| (link - before) as f64 / fabric.time.as_secs_f64();
    let passed: Vec<f64> = carried(&net).into_iter().zip(before).map(rate).collect();
    let sum: f64 = rates.iter().sum();
    let busy = |(way, passed): (&Way, &f64)| passed / (way.bits / 8.0);
    let stats = net.end::<Host>(0).stats();
    let sent = stats.sent.max(1) as f64;
    finish(&mut net, MESSAGE)?;
    Ok(Reached {
        share: sum / (fabric.rate() / 8.0) / limit(datagram),
        part: (ends.len() > 1).then(|| 1.0 - rates[1] / cubic::LIMIT / passed[0]),
        busy: fabric.ways.iter().zip(&passed).map(busy).collect(),
        again: (stats.lost + stats.timed_out) as f64 / sent,
        late: stats.late as f64 / sent,
    })
}

/// No new messages: all that were begun arrive once, each line in its place.
fn finish(net: &mut Net, length: u64) -> Result<(), String> {
    net.end::<Host>(0).sends[0].left = 0;
    let begun = net.end::<Host>(0).begun;
    // Numbers of the messages that an end has sent, or received.
    let done = |net: &mut Net, end: usize| {
        let events = &net.end::<Host>(end).events;
        let number = |event: &Event| match event {
            Event::Sent { message, .. } if end == 0 => Some(*message),
            Event::Received { message, .. } if end == 1 => Some(*message),
            _ => None,
        };
        let mut numbers: Vec<u64> = events.iter().filter_map(number).collect();
        numbers.sort_unstable();
        numbers
    };
    let until = net.now + Duration::from_secs(120);
    while (done(net, 0).len() as u64) < begun && net.now < until {
        net.run_until(net.now + 50 * MILLI);
    }
    for (end, what) in [(0, "sent"), (1, "received")] {
        let all = done(net, end);
        if all != (0..begun).collect::<Vec<_>>() {
            return Err(format!("{} messages of {begun} were {what}", all.len()));
        }
    }
    let Host { placed, wrong, .. } = *net.end::<Host>(1);
    if (placed, wrong) != (begun * length, 0) {
        let all = begun * length;
        return Err(format!("{placed} bytes of {all} came, {wrong} wrong"));
    }
    Ok(())
}
