//! Moves bytes between two processes by the packet protocol over UDP, or by one TCP stream:
//!
//!     packet_bench serve ADDRESS:PORT [tcp]
//!     packet_bench ADDRESS:PORT [tcp|both] [SECONDS] [SOURCE_PORTS] [MTU]
//!
//! The client prints one line of JSON. The key is that of nobody: for measurements only.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench may panic")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use evener_engine::udp::{Bytes, Driver};
use evener_proto::packet::{Config, Event, JobKey, Place, Span};

const MESSAGE: u64 = 1 << 20;
const AHEAD: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(2);

/// One message's memory, for all messages.
struct Buffer {
    out: Vec<u8>,
    into: Vec<u8>,
    placed: u64,
}

impl Buffer {
    fn new() -> Buffer {
        Buffer {
            out: (0..MESSAGE).map(|at| (at % 251) as u8).collect(),
            into: vec![0; MESSAGE as usize],
            placed: 0,
        }
    }
}

impl Bytes for Buffer {
    fn read(&mut self, span: &Span, to: &mut [u8]) {
        let at = span.offset as usize;
        to.copy_from_slice(&self.out[at..at + to.len()]);
    }

    fn place(&mut self, place: Place<'_>) {
        let at = place.offset as usize;
        self.into[at..at + place.bytes.len()].copy_from_slice(place.bytes);
        self.placed += place.bytes.len() as u64;
    }
}

fn config(ports: usize, mtu: usize) -> Config {
    Config {
        paths: (ports * 2).min(256),
        used: ports,
        datagram: mtu.min(1500) - 28,
        most_datagram: mtu - 28,
        patience: PATIENCE,
        ..Config::default()
    }
}

fn key() -> JobKey {
    JobKey::new(*b"packet-bench-key")
}

fn serve(at: SocketAddr) {
    let mut driver = Driver::listen(at, config(16, 9000), key()).expect("sockets");
    let mut memory = Buffer::new();
    loop {
        driver.turn(&mut memory);
        while let Some(event) = driver.event() {
            match event {
                Event::Connected => {
                    for _ in 0..AHEAD {
                        driver.post(1, MESSAGE);
                    }
                }
                Event::Received { .. } => {
                    driver.post(1, MESSAGE);
                }
                Event::Over(why) => {
                    let right = memory.into == memory.out;
                    println!(
                        "{{\"over\": \"{why}\", \"bytes\": {}, \"same\": {right}}}",
                        memory.placed
                    );
                    return;
                }
                _ => {}
            }
        }
        driver.wait(Duration::from_millis(100)).expect("epoll");
    }
}

fn udp(to: SocketAddr, seconds: f64, ports: usize, mtu: usize) -> String {
    let mut driver = Driver::connect(to, config(ports, mtu), key()).expect("sockets");
    let mut memory = Buffer::new();
    let (mut begun, mut sent) = (None::<Instant>, 0u64);
    let time = Duration::from_secs_f64(seconds);
    loop {
        driver.turn(&mut memory);
        while let Some(event) = driver.event() {
            match event {
                Event::Connected => {
                    begun = Some(Instant::now());
                    for _ in 0..AHEAD {
                        driver.send(1, MESSAGE);
                    }
                }
                Event::Sent { .. } => {
                    sent += MESSAGE;
                    driver.send(1, MESSAGE);
                }
                Event::Over(why) => panic!("{why}"),
                _ => {}
            }
        }
        if let Some(begun) = begun
            && begun.elapsed() >= time
        {
            let gigabits = sent as f64 * 8e-9 / begun.elapsed().as_secs_f64();
            let stats = driver.stats();
            let connection = driver.connection().expect("connected");
            let line = format!(
                "{{\"engine\": \"udp\", \"gbit_s\": {gigabits:.3}, \"ports\": {ports}, \"datagram\": {}, \"packets\": {}, \"calls\": {}, \"lost\": {}, \"timed_out\": {}, \"late\": {}, \"silences\": {}, \"round_trip_us\": {}, \"window\": {}, \"refused\": {}}}",
                connection.datagram(),
                stats.sent,
                driver.calls.0,
                stats.lost,
                stats.timed_out,
                stats.late,
                stats.silences,
                connection.round_trip().smoothed().as_micros(),
                connection.window().0,
                driver.refused,
            );
            driver.close(&mut memory);
            return line;
        }
        driver.wait(Duration::from_millis(100)).expect("epoll");
    }
}

fn serve_tcp(at: SocketAddr) {
    let (mut stream, _) = TcpListener::bind(at)
        .expect("listen")
        .accept()
        .expect("accept");
    let (mut buffer, mut bytes) = (vec![0; 1 << 20], 0u64);
    while let Ok(got) = stream.read(&mut buffer)
        && got > 0
    {
        bytes += got as u64;
        // The client counts what has arrived.
        if stream.write_all(&bytes.to_le_bytes()).is_err() {
            break;
        }
    }
}

fn tcp(to: SocketAddr, seconds: f64) -> String {
    let mut stream = TcpStream::connect(to).expect("connect");
    let mut answers = stream.try_clone().expect("clone");
    let begun = Instant::now();
    let time = Duration::from_secs_f64(seconds);
    let writer = std::thread::spawn(move || {
        let data = vec![1; MESSAGE as usize];
        while begun.elapsed() < time && stream.write_all(&data).is_ok() {}
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    let (mut word, mut arrived) = ([0; 8], 0);
    while begun.elapsed() < time && answers.read_exact(&mut word).is_ok() {
        arrived = u64::from_le_bytes(word);
    }
    let gigabits = arrived as f64 * 8e-9 / begun.elapsed().as_secs_f64();
    let _ = writer.join();
    format!("{{\"engine\": \"tcp\", \"gbit_s\": {gigabits:.3}}}")
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |at: usize| args.get(at).map(String::as_str).unwrap_or_default();
    let number = |at: usize, default: f64| text(at).parse().unwrap_or(default);
    let address = |at: usize| -> SocketAddr { text(at).parse().expect("ADDRESS:PORT") };
    match (text(0), text(1), text(2)) {
        ("", ..) => eprintln!(
            "error: no address\n  fix: packet_bench serve ADDRESS:PORT, or packet_bench ADDRESS:PORT"
        ),
        ("serve", _, "tcp") => serve_tcp(address(1)),
        ("serve", ..) => serve(address(1)),
        (_, "tcp", _) => println!("{}", tcp(address(0), number(2, 3.0))),
        _ => println!(
            "{}",
            udp(
                address(0),
                number(2, 3.0),
                number(3, 16.0) as usize,
                number(4, 1500.0) as usize
            )
        ),
    }
}
