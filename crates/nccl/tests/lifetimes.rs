//! What stays behind: communicators made and destroyed a thousand times, the child of a fork, and how
//! much an idle one works. In a process of their own, one after the other, because they count what the
//! process has.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(
    unsafe_code,
    reason = "memory is lent as NCCL lends it; a fork is the test"
)]

mod common;

use common::{ends, pair, until};

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use evener_drive::{NULL, Object, Plugin};

fn exchange(
    (sender, receiver): (&Plugin, &Plugin),
    (send, receive): (Object, Object),
    round: usize,
) {
    let mut from = vec![round as u8; 20_000];
    let mut to = vec![0; 20_000];
    // SAFETY: the buffers outlive the requests.
    unsafe {
        let posted = until(|| {
            receiver
                .irecv(receive, to.as_mut_ptr(), to.len(), NULL)
                .unwrap()
        });
        let sent = until(|| {
            sender
                .isend(send, from.as_mut_ptr(), from.len(), NULL)
                .unwrap()
        });
        until(|| receiver.test(posted, true).unwrap());
        until(|| sender.test(sent, false).unwrap());
    }
    assert_eq!(from, to);
}

fn descriptors() -> BTreeSet<String> {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn status(field: &str) -> i64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Processor time of this process, and how often a thread of it went to sleep.
fn worked() -> (Duration, i64) {
    // SAFETY: a plain structure is filled.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let time = |one: libc::timeval| {
        Duration::from_secs(one.tv_sec as u64) + Duration::from_micros(one.tv_usec as u64)
    };
    (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_nvcsw)
}

/// The first device's sockets in the child of a fork.
fn sockets_of_a_child() -> usize {
    let mut pipe = [0; 2];
    // SAFETY: the child only reads its own directory and writes to the pipe, then ends at once.
    unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        let child = libc::fork();
        if child == 0 {
            let mut count = 0u8;
            for fd in 3..1000 {
                let mut stat: libc::stat = std::mem::zeroed();
                if libc::fstat(fd, &raw mut stat) == 0
                    && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK
                {
                    let (mut kind, mut length) = (0, 4);
                    libc::getsockopt(
                        fd,
                        libc::SOL_SOCKET,
                        libc::SO_DOMAIN,
                        (&raw mut kind).cast(),
                        &raw mut length,
                    );
                    count += u8::from(kind == libc::AF_INET || kind == libc::AF_INET6);
                }
            }
            libc::write(pipe[1], (&raw const count).cast(), 1);
            libc::_exit(0);
        }
        let mut count = 0u8;
        assert_eq!(libc::read(pipe[0], (&raw mut count).cast(), 1), 1);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        libc::close(pipe[0]);
        libc::close(pipe[1]);
        usize::from(count)
    }
}

#[test]
fn nothing_stays_behind() {
    let Some((mut sender, mut receiver)) = ends(11, 11) else {
        return;
    };
    let kept = pair(&sender, &receiver);
    for round in 0..50 {
        let both = pair(&sender, &receiver);
        exchange((&sender, &receiver), both, round);
        sender.close_send(both.0).unwrap();
        receiver.close_recv(both.1).unwrap();
    }
    let before = (descriptors(), status("Threads:"), status("VmRSS:"));
    for round in 0..1000 {
        let both = pair(&sender, &receiver);
        if round % 10 == 0 {
            exchange((&sender, &receiver), both, round);
        }
        sender.close_send(both.0).unwrap();
        receiver.close_recv(both.1).unwrap();
    }
    // Connections are shared: a few may have been opened or replaced meanwhile, none a communicator.
    let grown = descriptors().len() as i64 - before.0.len() as i64;
    assert!(grown <= 16, "{grown} descriptors more");
    assert_eq!(status("Threads:"), before.1);
    let kilobytes = status("VmRSS:") - before.2;
    assert!(kilobytes < 8192, "{kilobytes} kB more");

    // An open communicator with nothing to do sleeps. What a wake-up costs depends on the machine, and
    // on what else it does; how many there are does not.
    std::thread::sleep(Duration::from_millis(200));
    let before = worked();
    std::thread::sleep(Duration::from_secs(3));
    let after = worked();
    let (idle, wakes) = (after.0 - before.0, after.1 - before.1);
    println!("idle: {wakes} wake-ups, {idle:?} in 3 s");
    assert!(wakes < 600, "{wakes} wake-ups in 3 s");
    assert!(idle < Duration::from_millis(500), "{idle:?} in 3 s");

    assert_eq!(sockets_of_a_child(), 0);
    // The parent's are as they were.
    exchange((&sender, &receiver), kept, 7);
    sender.close_send(kept.0).unwrap();
    receiver.close_recv(kept.1).unwrap();
    sender.finalize().unwrap();
    receiver.finalize().unwrap();

    // NCCL makes a context for each communicator: with the last, the engine goes.
    let context = |round: usize| {
        let (mut sender, mut receiver) = ends(11, 11).unwrap();
        let both = pair(&sender, &receiver);
        exchange((&sender, &receiver), both, round);
        sender.close_send(both.0).unwrap();
        receiver.close_recv(both.1).unwrap();
        sender.finalize().unwrap();
        receiver.finalize().unwrap();
        (descriptors().len(), status("Threads:"))
    };
    let mut before = context(0);
    std::thread::sleep(Duration::from_millis(50));
    before.1 = status("Threads:");
    let memory = status("VmRSS:");
    for round in 0..60 {
        let mut now = context(round);
        // A joined thread stays in the kernel's list for a moment after it has told its joiner.
        let until = Instant::now() + Duration::from_secs(5);
        while now.1 > before.1 && Instant::now() < until {
            std::thread::yield_now();
            now.1 = status("Threads:");
        }
        assert_eq!(now, before);
    }
    // The threads' heaps settle within the first fifty.
    let kilobytes = status("VmRSS:") - memory;
    assert!(kilobytes < 2048, "{kilobytes} kB more");

    // What another process does meanwhile would be counted above.
    for engine in ["udp", "xdp"] {
        common::again_over(engine);
    }
}
