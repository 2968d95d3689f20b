//! Network namespaces that belong to threads, and go with them: for tests and measurements.

#![allow(
    unsafe_code,
    reason = "unshare(2), gettid(2) and raw sockets have no safe functions"
)]
#![allow(dead_code, reason = "not all who use it use all")]
#![allow(clippy::unwrap_used, reason = "of tests")]
#![allow(unreachable_pub, missing_docs, reason = "a module of several programs")]

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::FromRawFd;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const A: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const B: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Whether an echo request (what `ping` sends) is answered.
pub fn echo(to: Ipv4Addr) -> bool {
    // Safety: no memory is handed over.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP) };
    if fd < 0 {
        return false;
    }
    // Safety: the descriptor is new and nobody else's. Sending and receiving are the same calls for a raw
    // socket.
    let socket = unsafe { UdpSocket::from_raw_fd(fd) };
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // Type 8, its sum, number 0x1234, sequence 1.
    let request = [8, 0, 0xe5, 0xca, 0x12, 0x34, 0, 1];
    socket.send_to(&request, (to, 0)).unwrap();
    let mut room = [0; 200];
    while let Ok(length) = socket.recv(&mut room) {
        // After the IPv4 header: type 0 with our number.
        let answer = room.get(20..length).unwrap_or_default();
        if answer.first() == Some(&0) && answer.get(4..6) == Some(&[0x12, 0x34]) {
            return true;
        }
    }
    false
}

fn unshare() -> bool {
    // Safety: it concerns this thread alone, and no memory.
    unsafe { libc::unshare(libc::CLONE_NEWNET) == 0 }
}

pub fn ip(line: &str) -> bool {
    let run = Command::new("ip").args(line.split(' ')).output();
    run.is_ok_and(|done| {
        if !done.status.success() {
            eprintln!("ip {line}: {}", String::from_utf8_lossy(&done.stderr));
        }
        done.status.success()
    })
}

fn runs(name: &str) -> bool {
    let shown = Command::new("ip").args(["link", "show", name]).output();
    shown.is_ok_and(|shown| String::from_utf8_lossy(&shown.stdout).contains("state UP"))
}

type Work = Box<dyn FnOnce() + Send>;

/// A thread with a namespace of its own, which runs what it is given.
pub struct Node {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
    /// The thread's number, which names its namespace.
    id: i32,
}

impl Node {
    pub fn new() -> Option<Node> {
        let (work, jobs): (Sender<Work>, Receiver<Work>) = channel();
        let (tell, told) = channel();
        let thread = std::thread::spawn(move || {
            // Safety: it has no arguments.
            let id = unsafe { libc::gettid() };
            let _ = tell.send((unshare() && ip("link set lo up")).then_some(id));
            for job in jobs {
                job();
            }
        });
        Some(Node {
            id: told.recv().ok()??,
            work: Some(work),
            thread: Some(thread),
        })
    }

    /// Runs it in the namespace; its answer can be waited for.
    pub fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Receiver<T> {
        let (tell, told) = channel();
        let work: Work = Box::new(move || {
            let _ = tell.send(job());
        });
        self.work.as_ref().unwrap().send(work).unwrap();
        told
    }

    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        self.start(job)
            .recv_timeout(PATIENCE)
            .expect("it failed or hangs")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Two nodes with one link.
pub fn pair(mtu: usize) -> Option<(Node, Node)> {
    let nodes = || {
        let (a, b) = (Node::new()?, Node::new()?);
        let id = b.id;
        a.run(move || {
            ip(&format!(
                "link add va mtu {mtu} type veth peer name vb mtu {mtu} netns {id}"
            )) && ip("addr add 10.9.0.1/24 dev va")
                && ip("link set va up")
        })
        .then_some(())?;
        b.run(|| ip("addr add 10.9.0.2/24 dev vb") && ip("link set vb up"))
            .then_some(())?;
        // The kernel says a moment later that the link runs.
        for (node, name) in [(&a, "va"), (&b, "vb")] {
            let began = Instant::now();
            while !node.run(move || runs(name)) {
                assert!(began.elapsed() < PATIENCE, "{name} does not come up");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Some((a, b))
    };
    let made = nodes();
    if made.is_none() {
        eprintln!("skipped: no network namespaces here (they need root and `ip`)");
    }
    made
}
