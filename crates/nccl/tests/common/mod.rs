//! What all tests here need: where cargo has put the library, the environment that it reads, and a comm.
//!
//! The engine is chosen once a process. So each list runs a second time, in a process of its own, with
//! the UDP engine: see [`again_over_udp`].

#![allow(dead_code, reason = "each test file uses a part")]

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use evener_drive::{Object, Plugin};

const LIMIT: Duration = Duration::from_secs(30);
const ENGINE: &str = "EVENER_NET_ENGINE";

pub fn path() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    [folder, folder.parent().unwrap()]
        .iter()
        .map(|folder| folder.join("libnccl_net_evener.so"))
        .find(|path| path.exists())
        .unwrap()
}

pub fn environment() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: before the library has started a thread, and no test reads what it writes.
        unsafe {
            std::env::set_var("EVENER_NET_IFNAME", "=lo");
            std::env::set_var("EVENER_NET_FLOWS", "4");
        }
    });
}

/// Runs all tests of this file again with the UDP engine, but the one with this name, which has called.
pub fn again_over_udp(name: &str) {
    if std::env::var_os(ENGINE).is_some() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--skip", name])
        .env(ENGINE, "udp")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "over UDP: {said}");
    assert!(said.contains("test result: ok"), "{said}");
}

pub fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(Instant::now() < end, "nothing happened for {LIMIT:?}");
        std::thread::yield_now();
    }
}

/// A comm, as the service thread makes one: both sides polled in one loop.
pub fn pair(plugin: &Plugin) -> (Object, Object) {
    let (listener, mut handle) = plugin.listen(0).unwrap();
    let (mut send, mut receive) = (None, None);
    until(|| {
        if send.is_none() {
            send = plugin.connect(0, &mut handle).unwrap();
        }
        if receive.is_none() {
            receive = plugin.accept(listener).unwrap();
        }
        (send.is_some() && receive.is_some()).then_some(())
    });
    plugin.close_listen(listener).unwrap();
    (send.unwrap(), receive.unwrap())
}
