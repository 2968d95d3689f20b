//! Networks that are drawn from seeds, in virtual time: of each a stated part is used, and all bytes arrive once. A
//! failure names its seed: `FROM=SEED COUNT=1 cargo run --release -p evener-proto --example packet_random` shows it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    dead_code,
    reason = "a test may panic"
)]

#[path = "packet/cubic.rs"]
mod cubic;
#[path = "packet/fabrics.rs"]
mod fabrics;
#[path = "packet/host.rs"]
mod host;
#[path = "packet/model.rs"]
mod model;
#[path = "packet/random.rs"]
mod random;
#[path = "packet/scenario.rs"]
mod scenario;

use evener_proto::faults::{self, Fault};
use evener_proto::packet::Config;

/// Seeds of networks that cost little, for each run of the tests.
const SEEDS: std::ops::Range<u64> = 0..60;
const PACKETS: f64 = 8_000.0;

/// What is wrong with the first network that is not as it should be.
fn find(config: &Config) -> Result<usize, String> {
    let mut count = 0;
    for seed in SEEDS {
        let fabric = random::draw(seed);
        if fabric.packets() > PACKETS {
            continue;
        }
        count += 1;
        let reached = fabrics::run(&fabric, seed, config.clone());
        let reached = reached.map_err(|why| format!("seed {seed}: {why}: {fabric:?}"))?;
        if reached.share < random::LEAST {
            return Err(format!("seed {seed}: {reached:?} of {fabric:?}"));
        }
    }
    Ok(count)
}

#[test]
fn networks_of_any_kind_are_used_and_each_mistake_is_found() {
    assert!(find(&Config::default()).unwrap() > 20);
    // A sender that is held to four packets leaves most of a network.
    let few = Config {
        in_flight: 6_000,
        ..Config::default()
    };
    let why = find(&few).expect_err("a network shows it");
    assert!(why.starts_with("seed ") && why.contains("share"), "{why}");
    faults::put(&[Fault::Unfinished]);
    let found = find(&Config::default());
    faults::put(&[]);
    let why = found.expect_err("a network shows it");
    assert!(why.starts_with("seed ") && why.contains("wrong"), "{why}");
}
