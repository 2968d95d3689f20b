//! What a packet costs by stage, between two namespaces with a veth pair: one thread has both ends, sends a
//! batch and receives it. The kernel does the work of both ends inside of the call that sends.
//!
//!     cargo run --release -p evener-xdp --example packet_cost
//!
//! Prints a table for docs/benchmarks/network-packets.md. Needs root; `SECONDS_PER_ROW=0.2` is the default, for each of five runs.

#![allow(
    clippy::unwrap_used,
    reason = "a measurement ends with its first error"
)]

use std::net::{SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use evener_xdp::port::Sent;
use evener_xdp::{Card, Mode, Port, Rule, Wanted};
use nodes::{A, B, Node, pair};

#[path = "../tests/nodes/mod.rs"]
mod nodes;

const BATCH: u32 = 64;
const RUNS: usize = 5;
const PORT: u16 = 20_007;

#[derive(Default)]
struct Stages {
    packets: u64,
    bytes: u64,
    write: Duration,
    flush: Duration,
    receive: Duration,
    wall: Duration,
}

/// What the processor's clock does at its usual rate, as the kernel says; 0: it does not say.
fn gigahertz() -> f64 {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("cpu MHz"));
    let value = line.and_then(|line| line.split(':').nth(1)?.trim().parse::<f64>().ok());
    value.unwrap_or(0.0) / 1000.0
}

/// The quickest of several runs: others use the machine too.
fn quickest(name: &str, run: impl Fn() -> Option<Stages>) {
    let runs = (0..RUNS).filter_map(|_| run());
    let quickest = runs.min_by(|one, other| one.wall_each().total_cmp(&other.wall_each()));
    match quickest {
        Some(stages) => stages.row(name),
        None => println!("| {name} | not measured | | | | | |"),
    }
}

impl Stages {
    fn wall_each(&self) -> f64 {
        self.wall.as_nanos() as f64 / self.packets as f64
    }

    fn row(&self, name: &str) {
        let each = |time: Duration| time.as_nanos() as f64 / self.packets as f64;
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} |",
            each(self.write),
            each(self.flush),
            each(self.receive),
            each(self.wall),
            each(self.wall) * gigahertz(),
            self.bytes as f64 * 8e-9 / self.wall.as_secs_f64(),
        );
    }
}

fn open(
    node: &Node,
    name: &'static str,
    address: std::net::Ipv4Addr,
    mode: Mode,
) -> (Card, Port, UdpSocket) {
    node.run(move || {
        let ports = 20_000..=20_031;
        let mut wanted = Wanted::new(name, Rule { address, ports });
        wanted.modes = vec![mode];
        let own = UdpSocket::bind((address, PORT)).unwrap();
        own.set_nonblocking(true).unwrap();
        let (card, mut ports) = Card::open(&wanted).unwrap();
        (card, ports.remove(0), own)
    })
}

fn xdp(mtu: usize, mode: Mode, time: Duration) -> Option<Stages> {
    let (a, b) = pair(mtu)?;
    let (_card_a, mut from, own) = open(&a, "va", A, mode);
    let (card, mut to, _own) = open(&b, "vb", B, mode);
    let (there, length) = (SocketAddrV4::new(B, PORT), mtu - 28);
    let payload = vec![7u8; length];
    let mut stages = Stages::default();
    let (mut got, mut began) = (0u64, Instant::now());
    let mut warm = true;
    while warm || began.elapsed() < time {
        let start = Instant::now();
        let mut framed = 0;
        for _ in 0..BATCH {
            let sent = from.send(PORT, there, length, start, |room| {
                room.copy_from_slice(&payload);
                length
            });
            match sent {
                Sent::Framed => framed += 1,
                Sent::ByKernel => {
                    own.send_to(&payload[..100], there).unwrap();
                    std::thread::sleep(Duration::from_millis(2));
                    break;
                }
                Sent::Full | Sent::TooLong => break,
            }
        }
        let written = Instant::now();
        from.flush().unwrap();
        let flushed = Instant::now();
        let mut came = 0u64;
        // Copied out, as the engine does: one read of every byte.
        let mut sum = 0u8;
        to.receive(BATCH as usize * 2, |one| {
            sum = one.packet.iter().fold(sum, |sum, byte| sum ^ byte);
            came += 1;
        });
        std::hint::black_box(sum);
        let received = Instant::now();
        if warm {
            warm = framed == 0 || came == 0;
            began = Instant::now();
            continue;
        }
        got += came;
        stages.packets += framed;
        stages.bytes += came * length as u64;
        stages.write += written - start;
        stages.flush += flushed - written;
        stages.receive += received - flushed;
    }
    stages.wall = began.elapsed();
    if got * 100 < stages.packets * 99 {
        println!(
            "  of {} packets {got} came: {}",
            stages.packets,
            card.summary()
        );
    }
    Some(stages)
}

fn sockets(mtu: usize, time: Duration) -> Option<Stages> {
    let (a, b) = pair(mtu)?;
    let socket = |address| {
        move || {
            let socket = UdpSocket::bind((address, PORT)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        }
    };
    let (from, to) = (a.run(socket(A)), b.run(socket(B)));
    let length = mtu - 28;
    let payload = vec![7u8; length];
    let mut room = vec![0; 65_536];
    let mut stages = Stages::default();
    let mut began = Instant::now();
    let mut warm = true;
    while warm || began.elapsed() < time {
        let start = Instant::now();
        for _ in 0..BATCH {
            let _ = from.send_to(&payload, (B, PORT));
        }
        let flushed = Instant::now();
        let (mut came, mut sum) = (0u64, 0u8);
        while let Ok(length) = to.recv(&mut room) {
            sum = room[..length].iter().fold(sum, |sum, byte| sum ^ byte);
            came += 1;
        }
        std::hint::black_box(sum);
        let received = Instant::now();
        if warm {
            warm = came == 0;
            began = Instant::now();
            continue;
        }
        stages.packets += u64::from(BATCH);
        stages.bytes += came * length as u64;
        stages.flush += flushed - start;
        stages.receive += received - flushed;
    }
    stages.wall = began.elapsed();
    Some(stages)
}

fn main() {
    let seconds = std::env::var("SECONDS_PER_ROW")
        .ok()
        .and_then(|text| text.parse().ok());
    let time = Duration::from_secs_f64(seconds.unwrap_or(0.2));
    println!("| | write ns | kernel ns | read ns | all ns | all cycles | Gb/s |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for mtu in [1500, 3498, 9000] {
        for mode in [Mode::Native, Mode::Generic] {
            let name = format!("xdp, {}, MTU {mtu}", mode.name());
            quickest(&name, || xdp(mtu, mode, time));
        }
        let name = format!("UDP socket, a call for each packet, MTU {mtu}");
        quickest(&name, || sockets(mtu, time));
    }
}
