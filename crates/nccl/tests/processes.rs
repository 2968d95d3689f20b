//! Two processes over loopback, driven as NCCL's progress thread drives a comm.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the environment is set before threads start")]

mod library;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use evener_drive::bench::{Scenario, run};

const ROLE: &str = "EVENER_TEST_ROLE";

fn scenario(rank: u32, control: String) -> Scenario {
    Scenario {
        rank,
        control,
        plugin: Some(library::path()),
        version: 11,
        comms: 3,
        depth: 4,
        sizes: vec![8, 4096, 100_000, 1 << 20],
        seconds: 0.1,
        verify: true,
    }
}

/// The other process: this very test, started again.
#[test]
fn other_process() {
    if let Ok(control) = std::env::var(ROLE) {
        library::environment();
        run(&scenario(1, control)).unwrap();
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_processes_exchange_what_was_sent() {
    library::environment();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let control = free.local_addr().unwrap().to_string();
    drop(free);
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_process", "--nocapture"])
        .env(ROLE, &control)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut other = Ended(other);
    let runs = run(&scenario(0, control)).unwrap();
    assert_eq!(runs.len(), 4);
    for one in &runs {
        println!("{one:?}");
        assert!(one.messages >= 24 && one.bandwidth > 0.0);
    }
    assert!(other.0.wait().unwrap().success());
}
