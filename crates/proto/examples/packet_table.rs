//! The packet protocol in virtual time, in a table: `cargo run --release -p evener-proto --example
//! packet_table [FILE.json]`. docs/benchmarks/network-packets.md has it. `RATES=0.1,1` (Gb/s) takes other
//! rates, `ONLY=incast` the rows with that word.

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
use virtual_time::dark::{Dark, stands_still};
use virtual_time::scenario::*;

const GIGA: f64 = 1e9;

struct Table(Vec<(String, f64, &'static str)>);

impl Table {
    fn row(&mut self, name: &str, value: f64, want: &'static str) {
        println!("{name:58} {value:9.3}   {want}");
        self.0.push((name.into(), value, want));
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn main() {
    let config = Config::default();
    let only: Option<String> = std::env::var("ONLY").ok();
    let want = |name: &str| {
        only.as_ref()
            .is_none_or(|only| name.contains(only.as_str()))
    };
    let mut table = Table(Vec::new());
    let rates = std::env::var("RATES").unwrap_or_else(|_| "0.1,1,10".into());
    let rates = rates.split(',').map(|rate| rate.parse::<f64>().unwrap());
    for rate in rates {
        let bits = rate * GIGA;
        let at = format!("{rate} Gb/s");
        if want("clean") {
            table.row(
                &format!("{at}: clean"),
                goodput(&[bits], 0.0, &config, 1, false),
                ">= 0.95",
            );
            table.row(
                &format!("{at}: clean, both ways"),
                goodput(&[bits], 0.0, &config, 1, true),
                ">= 0.95",
            );
            // As the engine has it: what is sent and what is received are of different connections.
            for count in [1, 4] {
                table.row(
                    &format!("{at}: clean, both ways, connections each way: {count}"),
                    threads(bits, &config, count, (Duration::ZERO, Duration::ZERO)).0,
                    ">= 0.95",
                );
            }
            let one = Config {
                used: 1,
                paths: 1,
                ..config.clone()
            };
            table.row(
                &format!("{at}: clean, one source port"),
                goodput(&[bits], 0.0, &one, 1, false),
                "",
            );
        }
        if want("threads") && rate >= 10.0 {
            for (nanos, nap) in [
                (0, 0),
                (300, 0),
                (300, 100),
                (300, 300),
                (300, 1000),
                (300, 3000),
            ] {
                let busy = (Duration::from_nanos(nanos), Duration::from_micros(nap));
                let (share, least) = threads(bits, &config, 4, busy);
                let name = format!("{at}: four threads, {nanos} ns per packet, naps of {nap} us");
                table.row(&name, share, "");
                table.row(&format!("{name}: least part of 8"), least, "");
            }
        }
        if want("rounds") && rate >= 10.0 {
            let spread: Vec<usize> = (0..4).collect();
            let ways: [(&str, Vec<Vec<usize>>, bool); 6] = [
                (
                    "two comms, a connection each",
                    vec![vec![0], vec![1]],
                    false,
                ),
                ("two comms over four", vec![spread.clone(); 2], false),
                ("two comms over four, chosen", vec![spread.clone(); 2], true),
                (
                    "four comms on two",
                    vec![vec![0], vec![2], vec![0], vec![2]],
                    false,
                ),
                (
                    "four comms, a connection each",
                    spread.iter().map(|at| vec![*at]).collect(),
                    false,
                ),
                ("four comms over four", vec![spread.clone(); 4], false),
            ];
            for (cost, nap) in [(300, 0), (300, 300), (600, 0), (600, 300), (600, 1000)] {
                let busy = (Duration::from_nanos(cost), Duration::from_micros(nap));
                for (who, lanes, chosen) in &ways {
                    let name =
                        format!("{at}: rounds, {cost} ns per packet, naps of {nap} us: {who}");
                    table.row(
                        &name,
                        rounds((bits, 1, 1), &config, lanes, *chosen, busy),
                        "",
                    );
                }
            }
        }
        if want("hidden") && rate >= 10.0 {
            let lanes: Vec<_> = (0..4).map(|at| vec![at]).collect();
            let busy = (Duration::from_nanos(300), Duration::ZERO);
            for (paths, seed) in [(1, 1), (3, 1), (4, 1), (4, 2), (8, 1), (8, 2)] {
                table.row(
                    &format!("{at}: rounds of four comms, hidden paths: {paths}, seed {seed}"),
                    rounds((bits, paths, seed), &config, &lanes, false, busy),
                    ">= 0.95",
                );
            }
        }
        if want("four") {
            for seed in 1..4 {
                let four = [bits / 4.0; 4];
                table.row(
                    &format!("{at}: four equal, seed {seed}"),
                    goodput(&four, 0.0, &config, seed, false),
                    ">= 0.95",
                );
                let mut slow = four;
                slow[2] /= 10.0;
                table.row(
                    &format!("{at}: four, one at a tenth, seed {seed}"),
                    goodput(&slow, 0.0, &config, seed, false),
                    ">= 0.95",
                );
            }
        }
        if want("loss") {
            for loss in [0.001, 0.01, 0.03, 0.1] {
                table.row(
                    &format!("{at}: loss {loss}"),
                    goodput(&[bits], loss, &config, 2, false),
                    "0.1% >= 0.90, 1% >= 0.75",
                );
                table.row(
                    &format!("{at}: loss {loss}: one TCP stream"),
                    tcp(bits, loss, 2),
                    "",
                );
            }
        }
        if want("p99") {
            let (own, tcp) = behind_bulk(bits, &config, 3);
            table.row(
                &format!("{at}: p99 of 64 KiB behind bulk, ms"),
                milliseconds(own),
                "",
            );
            table.row(
                &format!("{at}: p99 of 64 KiB behind bulk, TCP, ms"),
                milliseconds(tcp),
                "",
            );
            table.row(
                &format!("{at}: p99, ratio"),
                own.as_secs_f64() / tcp.as_secs_f64(),
                "<= 0.25",
            );
        }
        if want("hole") {
            let all: Vec<_> = (0..8)
                .map(|seed| black_hole(bits / 4.0, &config, seed))
                .collect();
            table.row(
                &format!("{at}: one of four a black hole: longest message, ms"),
                milliseconds(all.iter().map(|one| one.0).max().unwrap()),
                "<= 50",
            );
            table.row(
                &format!("{at}: one of four a black hole: longest gap, ms"),
                milliseconds(all.iter().map(|one| one.1).max().unwrap()),
                "<= 50",
            );
            let all = (0..8)
                .map(|seed| outage(bits / 4.0, &config, seed, Duration::from_millis(300)))
                .max();
            table.row(
                &format!("{at}: all dead for 300 ms: first byte after, ms"),
                milliseconds(all.unwrap()),
                "<= 50",
            );
            if rate <= 1.0 {
                let dark = Dark {
                    bits: bits / 2.0,
                    round_trip: Duration::from_micros(100),
                    all: Duration::from_secs(3),
                    second: Duration::from_millis(500),
                };
                let all = (0..12).map(|seed| stands_still(&dark, seed)).max();
                table.row(
                    &format!("{at}: two dead for 3 s, then one of them: longest gap, ms"),
                    milliseconds(all.unwrap()),
                    "<= 3000",
                );
            }
        }
        if want("incast") {
            for senders in [8, 16] {
                let (share, least, most, dropped) = incast(senders, bits, &config, 4);
                table.row(&format!("{at}: incast {senders} to 1"), share, ">= 0.9");
                table.row(
                    &format!("{at}: incast {senders} to 1: least part x senders"),
                    least * senders as f64,
                    "",
                );
                table.row(
                    &format!("{at}: incast {senders} to 1: largest part x senders"),
                    most * senders as f64,
                    "",
                );
                table.row(
                    &format!("{at}: incast {senders} to 1: dropped"),
                    dropped,
                    "",
                );
            }
        }
        if want("jobs") {
            // All paths share one link, so seeds change nothing: when the second starts does.
            for later in [100, 137, 174, 211, 248, 285] {
                let (part, sum) = two_jobs(bits, &config, 5, Duration::from_millis(later));
                table.row(
                    &format!("{at}: two jobs, second after {later} ms: first's part"),
                    part,
                    "0.45 to 0.55",
                );
                table.row(
                    &format!("{at}: two jobs, second after {later} ms: sum"),
                    sum,
                    "",
                );
            }
        }
        if want("cubic") {
            for first in [false, true] {
                let who = if first { "cubic" } else { "this" };
                let (part, sum) = beside_cubic(bits, &config, 6, first);
                table.row(
                    &format!("{at}: beside cubic, {who} first: part"),
                    part,
                    "0.25 to 0.75",
                );
                table.row(&format!("{at}: beside cubic, {who} first: sum"), sum, "");
            }
        }
    }
    if let Some(file) = std::env::args().nth(1) {
        let rows: Vec<String> = table
            .0
            .iter()
            .map(|(name, value, want)| {
                format!(
                    "    {{\"name\": \"{name}\", \"value\": {value:.4}, \"required\": \"{want}\"}}"
                )
            })
            .collect();
        let note = "virtual time: MTU 1500, queues of 2 ms x rate, 50 us round trip; rates as shares of the payload limit";
        std::fs::write(
            file,
            format!(
                "{{\n  \"note\": \"{note}\",\n  \"rows\": [\n{}\n  ]\n}}\n",
                rows.join(",\n")
            ),
        )
        .unwrap();
    }
}
