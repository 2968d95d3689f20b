//! What `benchmarks/net_fabrics.py` does, where its threads wait for processors, in virtual time:
//! `cargo run --release -p evener-proto --example packet_busy [FILE.json]`.
//! docs/benchmarks/network-packets.md has its table.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a bench may panic"
)]

mod virtual_time;

use std::time::Duration;

use evener_proto::packet::Config;
use virtual_time::scenario::{Busy, exchange};

const SEEDS: u64 = 5;

fn main() {
    let config = Config {
        paths: 32,
        patience: Duration::from_secs(6),
        ..Config::default()
    };
    let limit = Duration::from_secs(1000);
    let mut rows = Vec::new();
    for (runs, waits) in [
        (1000, 0),
        (5000, 1000),
        (5000, 5000),
        (3000, 9000),
        (3000, 20_000),
    ] {
        let busy = Busy {
            runs: Duration::from_micros(runs),
            waits: Duration::from_micros(waits),
        };
        let all = (0..SEEDS).map(|seed| {
            exchange(&[2.5e7; 4], &config, busy, seed, (100, 130), limit).expect("it ends")
        });
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|(first, second, _)| *first + *second);
        let (first, second, longest) = all[all.len() / 2];
        let [first, second, longest] = [first, second, longest].map(|time| time.as_secs_f64());
        println!(
            "threads run {runs} us, wait {waits} us: {first:.1} s one at a time, {second:.1} s four at a \
             time, longest stall {longest:.2} s"
        );
        rows.push(format!(
            "    {{\"runs_us\": {runs}, \"waits_us\": {waits}, \"one_at_a_time_s\": {first:.2}, \
             \"four_at_a_time_s\": {second:.2}, \"longest_stall_s\": {longest:.3}}}"
        ));
    }
    if let Some(file) = std::env::args().nth(1) {
        let rows = rows.join(",\n");
        let note = "virtual time: four hidden paths of 25 Mb/s, queues of 2 ms; 100 messages of 256 KiB \
                    there and back, then 130 each way; the median of 5 seeds";
        let text = format!("{{\n  \"note\": \"{note}\",\n  \"rows\": [\n{rows}\n  ]\n}}\n");
        std::fs::write(file, text).unwrap();
    }
}
