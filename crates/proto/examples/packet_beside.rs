//! The packet protocol beside streams of cubic on one link, in virtual time: `cargo run --release -p evener-proto
//! --example packet_beside [FILE.json]`. docs/benchmarks/network-packets-shared.md has the table. `RATES=0.1,1` (Gb/s),
//! `TRIPS=0.05,1,20` (ms), `QUEUES=0.25,1,4` (of what the way holds), `COUNTS=1,4` and `FIRST=cubic,this` take fewer cells;
//! `INSTEAD=cubic` has a stream of cubic in the connection's place: what cubic has beside itself.

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
use virtual_time::beside::{Beside, beside};

fn list(name: &str, all: &str) -> Vec<String> {
    let value = std::env::var(name).unwrap_or_else(|_| all.into());
    value.split(',').map(String::from).collect()
}

fn numbers(name: &str, all: &str) -> Vec<f64> {
    list(name, all)
        .iter()
        .map(|one| one.parse().unwrap())
        .collect()
}

fn main() {
    let control = std::env::var("INSTEAD").is_ok_and(|name| name == "cubic");
    let mut rows = Vec::new();
    println!("Gb/s  trip ms  queue  cubics  first     part x all   least cubic x all   link");
    for rate in numbers("RATES", "0.1,1,10,25") {
        for trip in numbers("TRIPS", "0.05,1,20") {
            for queue in numbers("QUEUES", "0.25,1,4") {
                for count in numbers("COUNTS", "1,4") {
                    for first in list("FIRST", "cubic,this") {
                        let cell = Beside {
                            bits: rate * 1e9,
                            round_trip: Duration::from_secs_f64(trip / 1e3),
                            queue,
                            count: count as usize,
                            cubic_first: first == "cubic",
                            control,
                        };
                        let time = cell.time();
                        let began = Instant::now();
                        let (part, least, link) = beside(&cell, Config::default(), 6, time);
                        let all = count + 1.0;
                        println!(
                            "{rate:>4} {trip:>8} {queue:>6} {count:>7}  {first:5} {:>12.2} {:>12.2} {link:>12.3}   {:.1} s of {:.0} s",
                            part * all,
                            least * all,
                            time.1.as_secs_f64(),
                            began.elapsed().as_secs_f64(),
                        );
                        rows.push(format!(
                            "    {{\"gbit\": {rate}, \"round_trip_ms\": {trip}, \"queue\": {queue}, \"cubics\": {count}, \"first\": \"{first}\", \"of_fair\": {:.3}, \"least_cubic_of_fair\": {:.3}, \"link\": {link:.4}, \"seconds\": {:.1}}}",
                            part * all,
                            least * all,
                            time.1.as_secs_f64(),
                        ));
                    }
                }
            }
        }
    }
    if let Some(file) = std::env::args().nth(1) {
        let note = "virtual time; parts of payload by an equal part; queue in what the way holds, 16 packets at least";
        let rows = rows.join(",\n");
        let text = format!(
            "{{\n  \"note\": \"{note}\",\n  \"required\": \"of_fair 0.5 to 2, link >= 0.92\",\n  \"rows\": [\n{rows}\n  ]\n}}\n"
        );
        std::fs::write(file, text).unwrap();
    }
}
