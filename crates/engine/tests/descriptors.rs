//! A process that has few descriptors left, alone in its own: messages go over the sockets there are.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::sync::{Arc, Mutex};

use common::{finish, pair, until};
use evener_engine::{Choice, Config, Engine, Memory};

mod common;

#[test]
fn a_path_without_a_descriptor_shares_the_socket_of_another() {
    let said: Arc<Mutex<Vec<String>>> = Arc::default();
    let engine = || {
        let log = said.clone();
        let config = Config {
            engine: Choice::Udp,
            interfaces: Some("lo".into()),
            workers: 1,
            ..Config::default()
        };
        let log = move |_, text: &str| log.lock().unwrap().push(text.to_string());
        Engine::start(config, Box::new(log)).unwrap()
    };
    let (a, b) = (engine(), engine());
    // All that this process may have but two of each side's.
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is filled, and read.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = 200;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - 4);
    let (send, receive) = pair(&a, &b);
    for round in 0..30u8 {
        let (mut from, mut to) = (vec![round; 200_000], vec![0xff; 200_000]);
        // SAFETY: both live until their requests are finished.
        let posted = until(|| unsafe { b.post(&receive, Memory::of(&mut to)) }.unwrap());
        // SAFETY: as above.
        let sent = until(|| unsafe { a.post(&send, Memory::of(&mut from)) }.unwrap());
        assert_eq!((finish(posted), finish(sent)), (200_000, 200_000));
        assert!(from == to);
    }
    let lines = said.lock().unwrap();
    let why = |line: &&String| line.contains("raise the limit of open files");
    assert!(lines.iter().any(|line| why(&line)), "{lines:?}");
}
