//! A network that swallows large packets without a word, between cards that take them: TCP goes on with
//! small ones. Skipped where namespaces are not allowed.

#![allow(
    unsafe_code,
    reason = "a filter on sockets of this process, and memory lent to the engine"
)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{finish, pair, until};
use evener_engine::{Choice, Config, Engine, Memory};
use nodes::{Node, ip, pair as namespaces};

mod common;
#[path = "../../xdp/tests/nodes/mod.rs"]
mod nodes;

/// Drops what comes to TCP sockets of this process with more than this many bytes behind the IP header.
fn swallow(most: u32) {
    const LOAD_LENGTH: u16 = 0x80;
    const JUMP_IF_MORE: u16 = 0x25;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut steps = [
        step(LOAD_LENGTH, 0, 0, 0),
        step(JUMP_IF_MORE, 1, 0, most),
        step(RETURN, 0, 0, u32::MAX),
        step(RETURN, 0, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    let is_tcp = |fd: &i32| {
        let (mut protocol, mut size) = (0i32, 4u32);
        // SAFETY: four bytes are written at most.
        let result = unsafe {
            let to = (&raw mut protocol).cast();
            libc::getsockopt(*fd, libc::SOL_SOCKET, libc::SO_PROTOCOL, to, &raw mut size)
        };
        result == 0 && protocol == libc::IPPROTO_TCP
    };
    let set = |fd: i32| {
        let size = size_of_val(&program) as u32;
        let from = (&raw const program).cast();
        // SAFETY: the program and its steps are read.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, from, size) }
    };
    for fd in (0..200).filter(is_tcp) {
        set(fd);
    }
}

#[test]
fn large_packets_that_vanish_are_sent_as_small_ones() {
    let Some((a, b)) = namespaces(1500) else {
        return;
    };
    // Each packet by itself, as a network sees them.
    let single = |name| ip(&format!("link set {name} gso_max_segs 1"));
    if !a.run(move || single("va")) || !b.run(move || single("vb")) {
        return;
    }
    let said: Arc<Mutex<Vec<String>>> = Arc::default();
    let engine = |node: &Node, name: &'static str| {
        let log = said.clone();
        node.run(move || {
            let config = Config {
                engine: Choice::Tcp,
                interfaces: Some(name.into()),
                workers: 1,
                flows: 2,
                ..Config::default()
            };
            let log = move |_, text: &str| log.lock().unwrap().push(text.to_string());
            Engine::start(config, Box::new(log)).unwrap()
        })
    };
    let (a, b) = (engine(&a, "va"), engine(&b, "vb"));
    // Accepted ones have it from the start, the others soon.
    std::thread::spawn(|| {
        loop {
            swallow(1300);
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (send, receive) = pair(from, to);
        let (mut bytes, mut into) = (vec![7; 500_000], vec![0; 500_000]);
        // SAFETY: both live until their requests are finished.
        let posted = until(|| unsafe { to.post(&receive, Memory::of(&mut into)) }.unwrap());
        // SAFETY: as above.
        let sent = until(|| unsafe { from.post(&send, Memory::of(&mut bytes)) }.unwrap());
        assert_eq!((finish(posted), finish(sent)), (500_000, 500_000));
        assert!(bytes == into);
    }
    let told = |line: &String| line.contains("large packets") && line.contains("vanish");
    let lines = said.lock().unwrap().clone();
    assert!(lines.iter().any(told), "{lines:?}");
}
