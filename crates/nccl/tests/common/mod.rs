//! What all tests here need: where cargo has put the library, the environment that it reads, and a comm.
//!
//! The engine is chosen once per process. So each list runs again in processes of its own: with the UDP
//! engine, and with AF_XDP ([`again_over`]). Loopback has no card, so with AF_XDP the two ends of a comm
//! are in two namespaces. A process has one engine per library, and a copy of the file is another
//! library: each end has its own, whose threads are in its namespace.

#![allow(dead_code, reason = "each test file uses a part")]

#[path = "../../../xdp/tests/nodes/mod.rs"]
pub mod nodes;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use evener_drive::{Object, Plugin};
use nodes::Node;

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
            let interfaces = if past_kernel() { "=va,vb" } else { "=lo" };
            std::env::set_var("EVENER_NET_IFNAME", interfaces);
            std::env::set_var("EVENER_NET_FLOWS", "4");
        }
    });
}

/// Whether this process has the engine with AF_XDP.
pub fn past_kernel() -> bool {
    std::env::var(ENGINE).is_ok_and(|engine| engine == "xdp")
}

/// Two namespaces that a veth pair joins, for the life of this process; `None`: not allowed here.
pub fn namespaces() -> Option<&'static (Node, Node)> {
    static BOTH: OnceLock<Option<(Node, Node)>> = OnceLock::new();
    BOTH.get_or_init(|| nodes::pair(1500)).as_ref()
}

/// Another library of the same bytes.
fn copy() -> PathBuf {
    static COPY: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let test = std::env::current_exe().unwrap();
        let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test.file_name().unwrap());
        let (part, to) = (to.with_extension("part"), to.with_extension("so"));
        std::fs::copy(path(), &part).unwrap();
        std::fs::rename(&part, &to).unwrap();
        to
    };
    COPY.get_or_init(make).clone()
}

fn start(library: PathBuf, version: u32) -> Plugin {
    let mut plugin = Plugin::load(&library, version).unwrap();
    plugin.init().unwrap();
    plugin
}

/// The sender's and the receiver's plug-in, by these versions of the interface; `None`: the test is
/// skipped, with the reason on stderr.
pub fn ends(sender: u32, receiver: u32) -> Option<(Plugin, Plugin)> {
    environment();
    if !past_kernel() {
        return Some((start(path(), sender), start(path(), receiver)));
    }
    let (a, b) = namespaces()?;
    let other = copy();
    Some((
        a.run(move || start(path(), sender)),
        b.run(move || start(other, receiver)),
    ))
}

/// Runs all tests of this file again with another engine, in a process of its own.
pub fn again_over(engine: &str) {
    if std::env::var_os(ENGINE).is_some() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .arg("--nocapture")
        .env(ENGINE, engine)
        // Several threads, on small machines too.
        .env("EVENER_NET_WORKERS", "4")
        .env("EVENER_DRIVE_LOG", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "over {engine}: {said}\n{log}");
    assert!(said.contains("test result: ok"), "{said}");
    if engine == "xdp" {
        let reason = |line: &&str| line.contains("skipped: ") || line.contains("UDP is taken");
        match log.lines().find(reason) {
            Some(why) => eprintln!("skipped past the kernel: {why}"),
            None => assert!(log.contains("copy taken"), "{log}"),
        }
    }
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
pub fn pair(sender: &Plugin, receiver: &Plugin) -> (Object, Object) {
    let (listener, mut handle) = receiver.listen(0).unwrap();
    let (mut send, mut receive) = (None, None);
    until(|| {
        if send.is_none() {
            send = sender.connect(0, &mut handle).unwrap();
        }
        if receive.is_none() {
            receive = receiver.accept(listener).unwrap();
        }
        (send.is_some() && receive.is_some()).then_some(())
    });
    receiver.close_listen(listener).unwrap();
    (send.unwrap(), receive.unwrap())
}
