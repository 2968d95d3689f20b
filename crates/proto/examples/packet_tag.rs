//! What a packet's tag takes, beside plain SipHash-2-4 of all its bytes (which greetings have):
//! `cargo run --release -p evener-proto --example packet_tag [FILE.json]`.

#![allow(clippy::expect_used, reason = "a bench may panic")]

use std::hint::black_box;
use std::time::Instant;

use evener_proto::packet::JobKey;

/// Seconds per call, the least of five runs.
fn time(mut call: impl FnMut(u64)) -> f64 {
    let run = |call: &mut dyn FnMut(u64)| {
        let begun = Instant::now();
        for number in 0..100_000 {
            call(number);
        }
        begun.elapsed().as_secs_f64() / 1e5
    };
    (0..5).map(|_| run(&mut call)).fold(f64::MAX, f64::min)
}

fn main() {
    let job = JobKey::new([3; 16]);
    let (whole, (session, _)) = (job.greeting(), job.session(1, 2));
    let packet: Vec<u8> = (0..9_000).map(|at| (at * 7) as u8).collect();
    let mut rows = Vec::new();
    for bytes in [64, 1472, 8972] {
        let packet = &packet[..bytes];
        let sip = time(|number| {
            black_box(whole.tag(black_box(packet), number));
        });
        let sum = time(|number| {
            black_box(session.tag(black_box(packet), number));
        });
        println!(
            "{bytes:5} bytes: SipHash {:6.0} ns ({:.1} GB/s), sum and SipHash {:5.0} ns ({:.1} GB/s), {:.1} x",
            sip * 1e9,
            bytes as f64 / sip / 1e9,
            sum * 1e9,
            bytes as f64 / sum / 1e9,
            sip / sum
        );
        rows.push(format!(
            "{{\"bytes\":{bytes},\"siphash_ns\":{:.1},\"sum_siphash_ns\":{:.1}}}",
            sip * 1e9,
            sum * 1e9
        ));
    }
    if let Some(file) = std::env::args().nth(1) {
        std::fs::write(&file, format!("{{\"rows\":[{}]}}\n", rows.join(",")))
            .expect("it can be written");
    }
}
