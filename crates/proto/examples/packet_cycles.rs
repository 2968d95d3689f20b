//! What the protocol takes of a processor for each packet, without a kernel and without a network:
//! `cargo run --release -p evener-proto --example packet_cycles [FILE.json]`.
//!
//! Two connections in one thread. One sends messages of 512 KiB, eight per channel at a time, in calls of up to 44
//! packets; the other hears each call and acknowledges. Bytes are copied out of and into memory at each end, as the
//! engine does: 8 MiB, which no core's cache holds, and 128 KiB, which each does. Time is counted for each stage; the
//! connections' own clock goes on by 20 us per call. At the end larger datagrams, those of MTU 3498 and 9000.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a bench may panic"
)]

use std::time::{Duration, Instant};

use evener_proto::packet::{
    Accepted, Arrival, Config, Connection, Event, JobKey, Own, Place, Span, accept,
};

const MESSAGE: u64 = 512 << 10;
const AHEAD: u64 = 8;
const CHANNELS: u32 = 2;
const MEMORIES: [usize; 2] = [8 << 20, 128 << 10];
const DATAGRAM: usize = 1472;
/// Without the headers of IP and UDP.
const LARGER: [usize; 2] = [3470, 8972];
const LARGEST: usize = 8972;
/// Packets and bytes that one call takes at most.
const CALL: usize = 44;
const BYTES: usize = 65_000;
const STEP: Duration = Duration::from_micros(20);
const STAGES: [&str; 4] = ["send", "receive", "acknowledge", "be acknowledged"];

/// One end: a connection, memory, and the packets of a call.
struct End {
    connection: Connection,
    memory: Vec<u8>,
    packets: Vec<u8>,
    lengths: Vec<usize>,
}

fn place(memory: usize, channel: u32, message: u64, offset: u64) -> usize {
    let slot = (u64::from(channel) * AHEAD + message % AHEAD) * MESSAGE;
    ((slot + offset) % (memory - LARGEST) as u64) as usize
}

impl End {
    fn new(connection: Connection, memory: usize) -> End {
        End {
            connection,
            memory: (0..memory).map(|at| (at * 31) as u8).collect(),
            packets: vec![0; BYTES + LARGEST],
            lengths: Vec::new(),
        }
    }

    /// One call's packets. Whether there were any.
    fn send(&mut self, now: Duration) -> bool {
        let memory = &self.memory;
        let mut read = |span: &Span, to: &mut [u8]| {
            let at = place(memory.len(), span.channel, span.message, span.offset);
            to.copy_from_slice(&memory[at..at + to.len()]);
        };
        self.lengths.clear();
        let mut filled = 0;
        while self.lengths.len() < CALL && filled + self.connection.datagram() <= BYTES {
            let out = &mut self.packets[filled..filled + LARGEST];
            let Some(sent) = self.connection.transmit(now, out, &mut read) else {
                break;
            };
            filled += sent.length;
            self.lengths.push(sent.length);
        }
        !self.lengths.is_empty()
    }

    fn hear(&mut self, from: &End, now: Duration) {
        let memory = &mut self.memory;
        let mut put = |one: Place<'_>| {
            let at = place(memory.len(), one.channel, one.message, one.offset);
            memory[at..at + one.bytes.len()].copy_from_slice(one.bytes);
        };
        let mut at = 0;
        for length in &from.lengths {
            let packet = &from.packets[at..at + length];
            let arrival = Arrival::default();
            self.connection
                .receive(packet, arrival, now, &mut put)
                .expect("it is the peer's");
            at += length;
        }
        self.connection.on_time(now);
    }
}

fn pair(memory: usize, datagram: usize) -> (End, End) {
    let config = || Config {
        datagram,
        most_datagram: datagram,
        ..Config::default()
    };
    let (job, now) = (JobKey::new([7; 16]), Duration::ZERO);
    let own = |random| Own {
        connection: random as u32,
        random,
    };
    let mut one = Connection::connect(config(), job, own(1), now);
    let mut hello = vec![0; DATAGRAM];
    let sent = one
        .transmit(now, &mut hello, &mut |_, _| {})
        .expect("a hello");
    let accepted = accept(config(), job, own(2), &hello[..sent.length], now);
    let Ok(Accepted::Connection(other)) = accepted else {
        panic!("no connection: {accepted:?}");
    };
    (End::new(one, memory), End::new(*other, memory))
}

/// Seconds of each stage, and packets with bytes.
fn run(packets: u64, memory: usize, datagram: usize) -> ([f64; 4], u64, u64) {
    let (mut from, mut to) = pair(memory, datagram);
    let mut now = STEP;
    for channel in 0..CHANNELS {
        for _ in 0..AHEAD {
            from.connection.send(channel, MESSAGE);
            to.connection.post(channel, MESSAGE);
        }
    }
    let mut seconds = [0.0; 4];
    let (mut skipped, mut acks) = (0, 0);
    let warm = packets / 4;
    loop {
        let before = from.connection.stats().sent;
        if before >= packets {
            return (seconds, before - skipped, acks);
        }
        if before < warm {
            (seconds, skipped, acks) = ([0.0; 4], before, 0);
        }
        let mut last = Instant::now();
        let mut stage = |at: usize| {
            let now = Instant::now();
            seconds[at] += (now - last).as_secs_f64();
            last = now;
        };
        let any = from.send(now);
        stage(0);
        if any {
            to.hear(&from, now + STEP);
        }
        stage(1);
        while to.send(now + STEP) {
            acks += to.lengths.len() as u64;
            stage(2);
            from.hear(&to, now + 2 * STEP);
            stage(3);
        }
        // Where nothing could go, time passes until something may.
        now += if any { STEP } else { 100 * STEP };
        from.connection.on_time(now);
        while let Some(event) = from.connection.event() {
            if let Event::Sent { channel, .. } = event {
                from.connection.send(channel, MESSAGE);
            }
        }
        while let Some(event) = to.connection.event() {
            if let Event::Received { channel, .. } = event {
                to.connection.post(channel, MESSAGE);
            }
        }
    }
}

/// The quickest of twenty runs: nanoseconds of each stage per packet with bytes, and packets per acknowledgement.
fn quickest(memory: usize, datagram: usize) -> ([f64; 4], f64) {
    let packets = 100_000;
    let runs = (0..20).map(|_| {
        let (seconds, count, acks) = run(packets, memory, datagram);
        (
            seconds.map(|all| all / count as f64 * 1e9),
            count as f64 / acks as f64,
        )
    });
    let all = |run: &([f64; 4], f64)| run.0.iter().sum::<f64>();
    runs.min_by(|one, other| all(one).total_cmp(&all(other)))
        .expect("there were runs")
}

fn main() {
    let mut rows = Vec::new();
    let sizes = MEMORIES.into_iter().map(|memory| (memory, DATAGRAM));
    let larger = LARGER.into_iter().map(|datagram| (MEMORIES[0], datagram));
    for (memory, datagram) in sizes.chain(larger) {
        let (stages, together) = quickest(memory, datagram);
        let mut parts: Vec<String> = STAGES
            .iter()
            .zip(stages)
            .map(|(stage, each)| format!("\"{stage}_ns\":{each:.1}"))
            .collect();
        let all: f64 = stages.iter().sum();
        println!(
            "{:5} KiB, {datagram} bytes: {all:6.1} ns per packet: {}; {together:.1} packets per acknowledgement",
            memory >> 10,
            STAGES
                .iter()
                .zip(stages)
                .map(|(stage, each)| format!("{stage} {each:.1}"))
                .collect::<Vec<_>>()
                .join(", ")
        );
        parts.push(format!(
            "\"memory\":{memory},\"datagram\":{datagram},\"all_ns\":{all:.1}"
        ));
        rows.push(format!("{{{}}}", parts.join(",")));
    }
    if let Some(file) = std::env::args().nth(1) {
        let text = format!("{{\"rows\":[{}]}}\n", rows.join(","));
        std::fs::write(&file, text).expect("it can be written");
    }
}
