//! Incast with short queues, in virtual time: `cargo run --release -p evener-proto --example packet_incast [FILE.json]`.
//! docs/benchmarks/network-packets-shared.md has the table. `SENDERS=4,32` and `QUEUES=100` take fewer rows.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a bench may panic"
)]

mod virtual_time;

use std::time::{Duration, Instant};

use evener_proto::packet::Config;
use virtual_time::incast::{Incast, incast};

fn numbers(name: &str, all: &str) -> Vec<u64> {
    let value = std::env::var(name).unwrap_or_else(|_| all.into());
    value.split(',').map(|one| one.parse().unwrap()).collect()
}

fn main() {
    let mut rows = Vec::new();
    println!("Gb/s   MTU queue senders   share slowest quickest p99 of ideal dropped");
    for (gigabits, mtu) in [(25, 1500), (100, 9000)] {
        for queue in numbers("QUEUES", "100,500") {
            for senders in numbers("SENDERS", "4,8,16,32") {
                let cell = Incast {
                    senders: senders as usize,
                    bits: gigabits as f64 * 1e9,
                    mtu,
                    queue,
                };
                let began = Instant::now();
                let got = incast(&cell, &Config::default(), 1, Duration::from_millis(200));
                println!(
                    "{gigabits:>4} {mtu:>5} {queue:>5} {senders:>7} {:>7.3} {:>7.2} {:>8.2} {:>12.2} {:>6.2}%   {:.1} s",
                    got.share,
                    got.slowest,
                    got.quickest,
                    got.p99,
                    100.0 * got.dropped,
                    began.elapsed().as_secs_f64(),
                );
                rows.push(format!(
                    "    {{\"gbit\": {gigabits}, \"mtu\": {mtu}, \"queue_packets\": {queue}, \"senders\": {senders}, \"share\": {:.4}, \"slowest_of_fair\": {:.3}, \"quickest_of_fair\": {:.3}, \"p99_of_ideal\": {:.3}, \"dropped\": {:.5}}}",
                    got.share, got.slowest, got.quickest, got.p99, got.dropped,
                ));
            }
        }
    }
    if let Some(file) = std::env::args().nth(1) {
        let note = "virtual time; share is payload by what the receiver's link carries; two messages of 1 MiB a sender at a time";
        let rows = rows.join(",\n");
        let text = format!(
            "{{\n  \"note\": \"{note}\",\n  \"required\": \"share >= 0.92, slowest_of_fair >= 0.5\",\n  \"rows\": [\n{rows}\n  ]\n}}\n"
        );
        std::fs::write(file, text).unwrap();
    }
}
