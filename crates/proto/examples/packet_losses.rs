//! When lost packets are noticed, by their place in the run over one path, in virtual time:
//! `cargo run --release -p evener-proto --example packet_losses [FILE.json]`.
//! docs/benchmarks/network-packets.md has its table.
//!
//! Packets are numbered in the order in which they are sent, so neighbours of one path are a run. The
//! sender's notes say of each number when it was confirmed or taken for lost.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a bench may panic"
)]

mod virtual_time;

use std::collections::BTreeMap;

use evener_proto::packet::Config;
use evener_proto::packet::trace::{Cause, Note, What};
use virtual_time::host::Host;
use virtual_time::scenario::*;

/// Microseconds from sending to being taken for lost, for those that were.
type Fate = Option<u128>;

fn median(mut all: Vec<u128>) -> u128 {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(0)
}

/// Splits packets into runs: the times of those lost at the end of one, and of all others.
fn by_place(notes: &[Note]) -> (Vec<u128>, Vec<u128>) {
    let mut packets: BTreeMap<u64, (u8, Fate)> = BTreeMap::new();
    for note in notes {
        match note.what {
            What::Arrived {
                number,
                late: false,
                ..
            } => packets.insert(number, (note.path, None)),
            What::Lost { number, took, .. } => {
                packets.insert(number, (note.path, Some(took.as_micros())))
            }
            _ => None,
        };
    }
    let all: Vec<(u8, Fate)> = packets.into_values().collect();
    let (mut last, mut others) = (Vec::new(), Vec::new());
    for (at, (path, fate)) in all.iter().enumerate() {
        let ends = all.get(at + 1).is_some_and(|next| next.0 != *path);
        let place = if ends { &mut last } else { &mut others };
        place.extend(*fate);
    }
    (last, others)
}

fn main() {
    let mut rows = Vec::new();
    for (bits, paths, loss) in [
        (1e10, 1, 0.0),
        (1e10, 1, 0.01),
        (1e10, 1, 0.03),
        (1e10, 1, 0.1),
        (1e9, 1, 0.03),
        (1e9, 1, 0.1),
        (1e10, 4, 0.0),
        (1e9, 4, 0.0),
    ] {
        let mut net = pair(&vec![bits / paths as f64; paths], &Config::default(), 2);
        net.links.iter_mut().for_each(|link| link.loss = loss);
        flows(&mut net, 0, 1, bulk(1, 1 << 20));
        net.end::<Host>(0).notes = Some(Default::default());
        let rates = measure(&mut net, &[1], 100 * MILLI, 400 * MILLI);
        let share = rates[0] / (bits / 8.0) / limit(1472);
        let end = net.end::<Host>(0);
        let (stats, calls) = (end.stats(), end.calls);
        let (notes, missed) = end.notes.take().unwrap();
        assert_eq!(missed, 0);
        let silent = notes.iter().filter(|note| {
            matches!(
                note.what,
                What::Lost {
                    cause: Cause::Silence,
                    ..
                }
            )
        });
        let silent = silent.count();
        let (last, others) = by_place(&notes);
        let per_call = stats.sent as f64 / calls as f64;
        let (ends, lost) = (last.len(), last.len() + others.len());
        let (last, others) = (median(last), median(others));
        let giga = bits / 1e9;
        println!(
            "{giga} Gb/s, {paths} paths, loss {loss}: {share:.3} of the link, {per_call:.1} packets per call; \
             {lost} lost, {ends} at the end of a run; noticed after {last} us there, {others} us elsewhere; \
             {silent} by silence, {} late",
            stats.late
        );
        rows.push(format!(
            "    {{\"gbit\": {giga}, \"paths\": {paths}, \"loss\": {loss}, \"share\": {share:.4}, \
             \"packets_per_call\": {per_call:.2}, \"lost\": {lost}, \"lost_at_end_of_run\": {ends}, \
             \"median_us_at_end\": {last}, \"median_us_elsewhere\": {others}, \"by_silence\": {silent}, \
             \"late\": {}}}",
            stats.late
        ));
    }
    if let Some(file) = std::env::args().nth(1) {
        let rows = rows.join(",\n");
        let note =
            "virtual time: MTU 1500, queues of 2 ms x rate, 50 us round trip, one sender, seed 2";
        let text = format!("{{\n  \"note\": \"{note}\",\n  \"rows\": [\n{rows}\n  ]\n}}\n");
        std::fs::write(file, text).unwrap();
    }
}
