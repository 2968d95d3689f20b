//! The packet protocol on networks that are drawn from seeds, in virtual time: `cargo run --release -p evener-proto
//! --example packet_random [FILE.json]`. `FROM=0 COUNT=500` says which seeds,
//! `PACKETS=30000` leaves out networks that carry more. The worst are printed, and how the shares
//! are spread over kinds of networks. docs/benchmarks/network-packets.md has the table.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a bench may panic"
)]

mod virtual_time;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use evener_proto::packet::Config;
use virtual_time::fabrics::{Fabric, Reached};
use virtual_time::{fabrics, random};

type Row = (u64, Fabric, Reached);

fn number(name: &str, other: u64) -> u64 {
    std::env::var(name).map_or(other, |text| text.parse().unwrap())
}

fn main() {
    let (from, count) = (number("FROM", 0), number("COUNT", 500));
    let (next, rows) = (AtomicU64::new(from), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let seed = next.fetch_add(1, Ordering::Relaxed)
                    && seed < from + count
                {
                    let fabric = random::draw(seed);
                    if fabric.packets() > number("PACKETS", u64::MAX) as f64 {
                        continue;
                    }
                    let reached = fabrics::run(&fabric, seed, Config::default());
                    let reached = reached.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
                    rows.lock().unwrap().push((seed, fabric, reached));
                }
            });
        }
    });
    let mut rows: Vec<Row> = rows.into_inner().unwrap();
    rows.sort_by(|one, other| one.2.share.total_cmp(&other.2.share));
    for row in rows.iter().take(number("WORST", 40) as usize) {
        print(row);
    }
    println!(
        "{:44} {:>5} {:>6} {:>6} {:>6} {:>6} {:>6} {:>7}",
        "kind", "seeds", "min", "1%", "5%", "25%", "median", "< 0.92"
    );
    for (name, is) in kinds() {
        let shares: Vec<f64> = rows
            .iter()
            .filter(|row| is(&row.1))
            .map(|row| row.2.share)
            .collect();
        spread(name, &shares);
    }
    let mut parts: Vec<f64> = rows.iter().filter_map(|row| row.2.part).collect();
    parts.sort_by(f64::total_cmp);
    spread("part of the first way, beside cubic", &parts);
    if let Some(file) = std::env::args().nth(1) {
        std::fs::write(file, json(&mut rows)).unwrap();
    }
}

type Kind = (&'static str, fn(&Fabric) -> bool);

fn kinds() -> Vec<Kind> {
    fn longest(fabric: &Fabric) -> f64 {
        let all = fabric.ways.iter().map(|way| way.round_trip.as_secs_f64());
        all.fold(0.0, f64::max)
    }
    fn unequal(fabric: &Fabric, of: fn(&fabrics::Way) -> f64) -> bool {
        let all = || fabric.ways.iter().map(of);
        all().fold(0.0, f64::max) > 1.01 * all().fold(f64::MAX, f64::min)
    }
    vec![
        ("all", |_| true),
        ("one way", |f| f.ways.len() == 1),
        ("several equal ways", |f| {
            f.ways.len() > 1
                && !unequal(f, |way| way.bits)
                && !unequal(f, |way| way.round_trip.as_secs_f64())
        }),
        ("ways of unequal rate", |f| unequal(f, |way| way.bits)),
        ("ways of unequal delay", |f| {
            unequal(f, |way| way.round_trip.as_secs_f64())
        }),
        ("round trips below 1 ms", |f| longest(f) < 1e-3),
        ("1 to 10 ms", |f| (1e-3..1e-2).contains(&longest(f))),
        ("10 ms and more", |f| longest(f) >= 1e-2),
        ("below 100 Mb/s", |f| f.rate() < 1e8),
        ("100 Mb/s to 10 Gb/s", |f| (1e8..1e10).contains(&f.rate())),
        ("10 Gb/s and more", |f| f.rate() >= 1e10),
        ("loss", |f| f.weather.loss > 0.0),
        ("packets that overtake", |f| f.weather.overtaken.0 > 0.0),
        ("beside cubic", |f| f.weather.cubic),
    ]
}

fn spread(name: &str, shares: &[f64]) {
    if shares.is_empty() {
        return;
    }
    let at = |part: f64| shares[((shares.len() - 1) as f64 * part) as usize];
    let below = shares.iter().filter(|share| **share < 0.92).count();
    println!(
        "{name:44} {:>5} {:>6.3} {:>6.3} {:>6.3} {:>6.3} {:>6.3} {below:>7}",
        shares.len(),
        at(0.0),
        at(0.01),
        at(0.05),
        at(0.25),
        at(0.5)
    );
}

fn print((seed, fabric, reached): &Row) {
    let ways: Vec<String> = fabric
        .ways
        .iter()
        .zip(&reached.busy)
        .map(|(way, busy)| {
            format!(
                "{:.0}M/{:.2}ms/q{:.1}:{busy:.2}",
                way.bits / 1e6,
                way.round_trip.as_secs_f64() * 1e3,
                way.queue.as_secs_f64() * 1e3
            )
        })
        .collect();
    let weather = fabric.weather;
    println!(
        "{seed:>5} {:.3} again {:>5.2}% late {:>5.2}% {} mtu {} loss {:.3}% overtaken {:.2}%/{:.2}ms{} {}",
        reached.share,
        100.0 * reached.again,
        100.0 * reached.late,
        reached
            .part
            .map_or(String::new(), |part| format!("part {part:.2}")),
        fabric.mtu,
        weather.loss * 100.0,
        weather.overtaken.0 * 100.0,
        weather.overtaken.1.as_secs_f64() * 1e3,
        if weather.cubic { " cubic" } else { "" },
        ways.join(" ")
    );
}

fn json(rows: &mut [Row]) -> String {
    rows.sort_by_key(|row| row.0);
    let rows: Vec<String> = rows
        .iter()
        .map(|(seed, fabric, reached)| {
            format!(
                "    {{\"seed\": {seed}, \"ways\": {}, \"gbit\": {:.4}, \"share\": {:.4}, \"part\": {}, \"again\": {:.5}, \"late\": {:.5}}}",
                fabric.ways.len(),
                fabric.rate() / 1e9,
                reached.share,
                reached.part.map_or(String::from("null"), |part| format!("{part:.4}")),
                reached.again,
                reached.late
            )
        })
        .collect();
    format!(
        "{{\n  \"note\": \"virtual time; share is payload by what the ways carry; part is bulk's of the first way beside cubic\",\n  \"rows\": [\n{}\n  ]\n}}\n",
        rows.join(",\n")
    )
}
