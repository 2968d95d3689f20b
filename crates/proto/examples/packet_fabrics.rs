//! The packet protocol on twenty-four networks, in virtual time: `cargo run --release -p evener-proto
//! --example packet_fabrics [FILE.json]`. docs/benchmarks/network-packets.md has the table. `ONLY=cubic`
//! takes the networks with that word, `SEEDS=3` as many seeds of each.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a bench may panic"
)]

mod virtual_time;

use std::time::Instant;

use evener_proto::packet::Config;
use virtual_time::{fabrics, model, scenario};

fn main() {
    let only = std::env::var("ONLY").unwrap_or_default();
    let seeds: u64 = std::env::var("SEEDS").map_or(1, |seeds| seeds.parse().unwrap());
    let mut rows = Vec::new();
    println!(
        "{:42} {:>4} {:>10} {:>10} {:>6} {:>6} {:>7} {:>7}",
        "fabric", "seed", "limit Gb/s", "reached", "ratio", "part", "again", "late"
    );
    for (at, fabric) in fabrics::all().iter().enumerate() {
        if !fabric.name.contains(only.as_str()) {
            continue;
        }
        for seed in (at as u64..).step_by(100).take(seeds as usize) {
            let began = Instant::now();
            let reached = fabrics::run(fabric, seed, Config::default()).expect(&fabric.name);
            let limit = fabric.rate() * scenario::limit((fabric.mtu - model::BELOW) as usize) / 1e9;
            let part = reached
                .part
                .map_or(String::from("-"), |part| format!("{part:.2}"));
            println!(
                "{:42} {seed:>4} {limit:>10.3} {:>10.3} {:>6.3} {part:>6} {:>6.2}% {:>6.2}%  {:.1} s",
                fabric.name,
                limit * reached.share,
                reached.share,
                100.0 * reached.again,
                100.0 * reached.late,
                began.elapsed().as_secs_f64(),
            );
            rows.push(format!(
                "    {{\"fabric\": \"{}\", \"seed\": {seed}, \"limit_gbit\": {limit:.4}, \"ratio\": {:.4}, \"part\": {}, \"again\": {:.5}, \"late\": {:.5}}}",
                fabric.name,
                reached.share,
                reached.part.map_or(String::from("null"), |part| format!("{part:.4}")),
                reached.again,
                reached.late,
            ));
        }
    }
    if let Some(file) = std::env::args().nth(1) {
        let note = "virtual time; ratio is payload by what the paths carry; part is bulk's of what it and cubic have";
        let rows = rows.join(",\n");
        let text = format!(
            "{{\n  \"note\": \"{note}\",\n  \"required\": \"ratio >= 0.92, part 0.33 to 0.67\",\n  \"rows\": [\n{rows}\n  ]\n}}\n"
        );
        std::fs::write(file, text).unwrap();
    }
}
