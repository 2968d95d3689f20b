//! Whoever reads a posted buffer while it fills, as NCCL's LL and LL128 do, finds every line whole once
//! its flag is there. How many lines are read: EVENER_TEST_LINES. Networks that lose and have unequal
//! paths, and mistakes that the reader must find: tests/twins/net.py, which runs examples/lines.rs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use evener_engine::{Choice, Config, Engine};

use common::pair;
use lines::{Form, Job, Seen};
use nodes::Node;

#[allow(dead_code, reason = "not all who use it use all")]
mod common;
#[path = "common/lines.rs"]
mod lines;
#[path = "../../xdp/tests/nodes/mod.rs"]
mod nodes;

/// Faults are those of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn lines() -> u64 {
    let set = std::env::var("EVENER_TEST_LINES").ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(100_000)
}

fn config(choice: Choice, interface: &str) -> Config {
    Config {
        engine: choice,
        interfaces: Some(interface.into()),
        workers: 2,
        flows: 4,
        most_flows: 8,
        ..Config::default()
    }
}

/// Set when it goes, also by a panic: who waits for it would wait for ever.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Messages, while paths are cut: what was on them goes again, later than what came after it.
fn run(a: &Engine, b: &Engine, job: Job) -> Seen {
    let (send, receive) = pair(a, b);
    let over = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| lines::send(a, &send, job));
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(100));
                a.cut_paths(1);
            }
        });
        let _over = Over(&over);
        lines::receive(b, &receive, job)
    });
    a.release(&send);
    b.release(&receive);
    seen
}

/// Both forms, short messages and long ones: what the reader saw.
fn all(a: &Engine, b: &Engine, lines: u64) -> Vec<(Form, usize, Seen)> {
    let mut found = Vec::new();
    for form in [Form::Ll, Form::Ll128] {
        for most in [2 << 10, 64 << 10, 512 << 10] {
            let job = Job {
                form,
                most,
                lines: lines / 6,
                seed: most as u64 ^ lines,
            };
            found.push((form, most, run(a, b, job)));
        }
    }
    found
}

fn none_is_torn(a: &Engine, b: &Engine) {
    for (form, most, seen) in all(a, b, lines()) {
        assert_eq!(seen.torn, 0, "{form:?} to {most}: {seen:?}");
        assert_eq!(seen.early, 0, "{form:?} to {most}: {seen:?}");
        assert!(seen.lines > 0 && seen.messages > 0);
    }
}

fn engines(choice: Choice) -> [Engine; 2] {
    [(); 2].map(|()| Engine::start(config(choice, "lo"), Box::new(|_, _| {})).unwrap())
}

#[test]
fn lines_are_whole_by_tcp() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [a, b] = engines(Choice::Tcp);
    none_is_torn(&a, &b);
}

#[test]
fn lines_are_whole_by_udp() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [a, b] = engines(Choice::Udp);
    none_is_torn(&a, &b);
}

/// Skipped where namespaces are not allowed.
#[test]
fn lines_are_whole_past_the_kernel() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((a, b)) = nodes::pair(1500) else {
        return;
    };
    let start = |node: &Node, name: &'static str| {
        node.run(move || Engine::start(config(Choice::Xdp, name), Box::new(|_, _| {})).unwrap())
    };
    none_is_torn(&start(&a, "va"), &start(&b, "vb"));
}
