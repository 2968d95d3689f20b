//! Two processes over loopback, or in two namespaces where packets go past the kernel, driven as NCCL's progress thread drives a comm.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the environment is set before threads start")]

mod common;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use evener_drive::bench::{Pattern, Run, Scenario, run};

const ROLE: &str = "EVENER_TEST_ROLE";
const PATTERN: &str = "EVENER_TEST_PATTERN";
const UNTIL: &str = "EVENER_TEST_UNTIL";

/// What is exchanged, and, if not for its time, until when.
#[derive(Clone)]
struct What(Pattern, Option<PathBuf>);

fn scenario(rank: u32, control: String, what: What) -> Scenario {
    let What(pattern, until) = what;
    Scenario {
        rank,
        control,
        plugin: Some(common::path()),
        streams: 1,
        version: 11,
        pattern,
        comms: 3,
        depth: 4,
        sizes: match pattern {
            Pattern::Steady => vec![8, 4096, 100_000, 1 << 20],
            Pattern::Ring => vec![8, 100_001, 20 << 20],
        },
        seconds: 0.1,
        verify: true,
        until,
    }
}

/// The other process: this very test, started again.
#[test]
fn other_process() {
    if let Ok(control) = std::env::var(ROLE) {
        common::environment();
        let ring = std::env::var_os(PATTERN).is_some();
        let pattern = if ring { Pattern::Ring } else { Pattern::Steady };
        let until = std::env::var_os(UNTIL).map(PathBuf::from);
        run(&scenario(1, control, What(pattern, until))).unwrap();
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What both processes measured, by the first one.
fn measure(what: What) -> Option<Vec<Run>> {
    common::environment();
    if !common::past_kernel() {
        let control = free("127.0.0.1");
        let mut other = start_other(&control, &what);
        let runs = run(&scenario(0, control, what)).unwrap();
        assert!(other.0.wait().unwrap().success());
        return Some(runs);
    }
    // A card has one engine at a time.
    static CARDS: Mutex<()> = Mutex::new(());
    let _alone = CARDS.lock().unwrap();
    // A program is in the namespace of the thread that starts it.
    let (a, b) = common::namespaces()?;
    let control = a.run(|| free(&common::nodes::A.to_string()));
    let (to, same) = (control.clone(), what.clone());
    let mut other = b.run(move || start_other(&to, &same));
    let runs = a.run(move || run(&scenario(0, control, what)).unwrap());
    assert!(other.0.wait().unwrap().success());
    Some(runs)
}

/// An address with a port that nobody has.
fn free(host: &str) -> String {
    let free = TcpListener::bind((host, 0)).unwrap();
    free.local_addr().unwrap().to_string()
}

fn start_other(control: &str, what: &What) -> Ended {
    let mut other = Command::new(std::env::current_exe().unwrap());
    other
        .args(["--exact", "other_process", "--nocapture"])
        .env(ROLE, control)
        .stdout(Stdio::null());
    if what.0 == Pattern::Ring {
        other.env(PATTERN, "ring");
    }
    if let Some(until) = &what.1 {
        other.env(UNTIL, until);
    }
    Ended(other.spawn().unwrap())
}

#[test]
fn two_processes_exchange_what_was_sent() {
    let Some(runs) = measure(What(Pattern::Steady, None)) else {
        return;
    };
    assert_eq!(runs.len(), 4);
    for one in &runs {
        println!("{one:?}");
        assert!(one.messages >= 24 && one.bandwidth > 0.0);
    }
}

#[test]
fn a_run_lasts_until_a_file_is_there() {
    const LASTS: Duration = Duration::from_secs(2);
    let file = std::env::temp_dir().join(format!("evener-until-{}", std::process::id()));
    let (made, began) = (file.clone(), Instant::now());
    let told = std::thread::spawn(move || {
        std::thread::sleep(LASTS);
        std::fs::write(&made, "").unwrap();
    });
    let runs = measure(What(Pattern::Steady, Some(file.clone())));
    told.join().unwrap();
    std::fs::remove_file(&file).unwrap();
    let Some(runs) = runs else {
        return;
    };
    // Its sizes alone would take less than a second.
    assert!(began.elapsed() >= LASTS);
    assert!(runs.iter().all(|one| one.messages > 0));
}

#[test]
fn a_ring_of_two_processes_carries_what_was_sent() {
    let Some(runs) = measure(What(Pattern::Ring, None)) else {
        return;
    };
    assert_eq!(runs.len(), 3);
    for one in &runs {
        println!("{one:?}");
        assert!(one.messages >= 5 && one.bandwidth > 0.0);
    }
}

#[test]
fn the_same_over_udp() {
    common::again_over("udp");
}

#[test]
fn the_same_past_the_kernel() {
    common::again_over("xdp");
}
