//! Drives the built library through every version of the interface, exactly as NCCL's service and
//! progress threads do. Two ends in one process talk over loopback, or between two namespaces where
//! packets go past the kernel; two processes are in `processes.rs`.

#![allow(unsafe_code, reason = "memory is lent to the plug-in as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{ends, pair, until};

use std::time::Duration;

use evener_drive::{DriveError, NULL, Object, Plugin};

const HOST: i32 = 1;

fn isend(plugin: &Plugin, comm: Object, bytes: &mut [u8]) -> Object {
    // SAFETY: every test keeps its buffers until the request is done or the comm closed.
    until(|| unsafe {
        plugin
            .isend(comm, bytes.as_mut_ptr(), bytes.len(), NULL)
            .unwrap()
    })
}

fn irecv(plugin: &Plugin, comm: Object, bytes: &mut [u8]) -> Object {
    // SAFETY: as above.
    until(|| unsafe {
        plugin
            .irecv(comm, bytes.as_mut_ptr(), bytes.len(), NULL)
            .unwrap()
    })
}

fn wait(plugin: &Plugin, request: Object) -> usize {
    until(|| plugin.test(request, true).unwrap())
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (seed * 131 + at * 7 + (at >> 9)) as u8)
        .collect()
}

fn exchange(
    (sender, receiver): (&Plugin, &Plugin),
    (send, receive): (Object, Object),
    seed: usize,
    size: usize,
) {
    let (mut from, mut to) = (pattern(seed, size), vec![0xaa; size + 64]);
    let posted = irecv(receiver, receive, &mut to);
    let sent = isend(sender, send, &mut from);
    assert_eq!(wait(receiver, posted), size);
    // NCCL may not ask for the size.
    until(|| sender.test(sent, false).unwrap());
    assert_eq!(to[..size], from);
    assert!(to[size..].iter().all(|byte| *byte == 0xaa));
}

fn call_code<T>(result: Result<T, DriveError>) -> i32 {
    match result {
        Err(DriveError::Call { code, .. }) => code,
        Err(other) => panic!("{other}"),
        Ok(_) => 0,
    }
}

fn conforms(version: u32) {
    let Some((mut sender, mut receiver)) = ends(version, version) else {
        return;
    };
    assert_eq!(sender.name(), "Evener");
    assert_eq!(sender.devices().unwrap(), 2);
    for device in 0..2 {
        let properties = sender.properties(device).unwrap();
        assert_eq!(properties.name, format!("evener{device}"));
        assert_eq!(properties.max_recvs, 1);
        assert_eq!(properties.ptr_support, HOST);
        assert_eq!(properties.speed, 10_000);
    }
    assert_ne!(call_code(sender.properties(2)), 0);

    let comm = pair(&sender, &receiver);
    for (seed, size) in [0, 1, 100, 16384, 65536, 65537, 1 << 20, 3_000_001]
        .into_iter()
        .enumerate()
    {
        exchange((&sender, &receiver), comm, seed, size);
    }
    let (send, receive) = comm;

    // The sender far ahead of the receiver, small and large.
    for size in [8usize, 200_000] {
        let mut out: Vec<Vec<u8>> = (0..16).map(|seed| pattern(seed, size)).collect();
        let sent: Vec<_> = out
            .iter_mut()
            .map(|bytes| isend(&sender, send, bytes))
            .collect();
        std::thread::sleep(Duration::from_millis(20));
        for seed in 0..16 {
            let mut to = vec![0; size];
            let posted = irecv(&receiver, receive, &mut to);
            assert_eq!(wait(&receiver, posted), size);
            assert_eq!(to, pattern(seed, size));
        }
        for request in sent {
            wait(&sender, request);
        }
    }

    // More requests than NCCL ever has: null, and not an error, where there is no room.
    let mut bytes = vec![0u8; 1 << 20];
    let mut posted = Vec::new();
    let full = (0..1000).any(|_| {
        // SAFETY: the buffer outlives the comm. All write the same bytes, or none.
        let request =
            unsafe { receiver.irecv(receive, bytes.as_mut_ptr(), 1 << 20, NULL) }.unwrap();
        posted.extend(request);
        request.is_none()
    });
    assert!(full && posted.len() >= 32, "{}", posted.len());

    // Nothing to flush: null, which counts as done.
    assert_eq!(receiver.iflush(receive).unwrap(), None);

    // Registration.
    let memory = bytes.as_mut_ptr();
    let registration = sender.register(send, memory, 1 << 20, HOST).unwrap();
    assert_ne!(call_code(sender.register(send, memory, 1 << 20, 2)), 0);
    sender.deregister(send, registration).unwrap();
    sender.deregister(send, registration).unwrap();
    sender.deregister(send, NULL).unwrap();
    sender.deregister(NULL, NULL).unwrap();

    // Close with requests in flight, twice, and of nothing.
    for _ in 0..2 {
        receiver.close_recv(receive).unwrap();
        sender.close_send(send).unwrap();
    }
    drop(bytes);
    sender.close_send(NULL).unwrap();
    receiver.close_recv(NULL).unwrap();
    receiver.close_listen(NULL).unwrap();
    sender.deregister(send, registration).unwrap();

    // Destroy and recreate.
    let comm = pair(&sender, &receiver);
    exchange((&sender, &receiver), comm, 1, 100_000);
    sender.close_send(comm.0).unwrap();
    receiver.close_recv(comm.1).unwrap();
    sender.finalize().unwrap();
    receiver.finalize().unwrap();
}

macro_rules! versions {
    ($($name:ident: $version:literal),*) => {
        $(#[test]
        fn $name() {
            conforms($version);
        })*
    };
}

versions!(v6_conforms: 6, v7_conforms: 7, v8_conforms: 8, v9_conforms: 9, v10_conforms: 10,
    v11_conforms: 11, v12_conforms: 12);

#[test]
fn all_versions_are_one_plug_in() {
    // A comm's two ends, made through different tables: the same core, the same bytes.
    for (first, second) in [(6, 12), (12, 6), (8, 11)] {
        let Some((mut b, mut a)) = ends(second, first) else {
            return;
        };
        let (listener, mut handle) = a.listen(0).unwrap();
        let (mut send, mut receive) = (None, None);
        until(|| {
            send = send.or_else(|| b.connect(0, &mut handle).unwrap());
            receive = receive.or_else(|| a.accept(listener).unwrap());
            send.zip(receive)
        });
        let (mut from, mut to) = (pattern(1, 300_000), vec![0; 300_000]);
        let posted = irecv(&a, receive.unwrap(), &mut to);
        let sent = isend(&b, send.unwrap(), &mut from);
        wait(&a, posted);
        wait(&b, sent);
        assert_eq!(from, to);
        b.close_send(send.unwrap()).unwrap();
        a.close_recv(receive.unwrap()).unwrap();
        a.close_listen(listener).unwrap();
        b.finalize().unwrap();
        a.finalize().unwrap();
    }
}

#[test]
fn an_oversize_message_is_invalid_usage_on_both_ends() {
    let Some((sender, receiver)) = ends(11, 11) else {
        return;
    };
    let (send, receive) = pair(&sender, &receiver);
    let (mut from, mut to) = (vec![1; 200_000], vec![0xaa; 100_000]);
    let posted = irecv(&receiver, receive, &mut to);
    let sent = isend(&sender, send, &mut from);
    for (plugin, request) in [(&receiver, posted), (&sender, sent)] {
        let code = until(|| match plugin.test(request, true) {
            Ok(None) => None,
            other => Some(call_code(other)),
        });
        assert_eq!(code, 5);
    }
    assert!(to.iter().all(|byte| *byte == 0xaa));
    sender.close_send(send).unwrap();
    receiver.close_recv(receive).unwrap();
}

#[test]
fn what_is_null_or_wrong_is_refused_and_nothing_else_happens() {
    let Some((plugin, _other)) = ends(11, 11) else {
        return;
    };
    let mut bytes = [0u8; 8];
    // SAFETY: the calls are refused.
    unsafe {
        assert_ne!(
            call_code(plugin.isend(NULL, bytes.as_mut_ptr(), 8, NULL)),
            0
        );
        assert_ne!(
            call_code(plugin.irecv(NULL, bytes.as_mut_ptr(), 8, NULL)),
            0
        );
    }
    assert_ne!(call_code(plugin.accept(NULL)), 0);
    assert_ne!(call_code(plugin.listen(7)), 0);
    assert_ne!(call_code(plugin.connect(0, &mut [0; 128])), 0);
    assert_eq!(plugin.test(NULL, true).unwrap(), Some(0));
    plugin.finalize_with(NULL).unwrap();
}

#[test]
fn many_comms_come_over_one_listener() {
    let Some((sender, receiver)) = ends(11, 11) else {
        return;
    };
    let (listener, handle) = receiver.listen(0).unwrap();
    let mut handles = [handle; 20];
    let (mut sends, mut receives) = (vec![None; 20], Vec::new());
    until(|| {
        for (send, handle) in sends.iter_mut().zip(&mut handles) {
            if send.is_none() {
                *send = sender.connect(0, handle).unwrap();
            }
        }
        receives.extend(receiver.accept(listener).unwrap());
        (receives.len() == 20 && sends.iter().all(Option::is_some)).then_some(())
    });
    for comm in sends.into_iter().flatten() {
        sender.close_send(comm).unwrap();
    }
    for comm in receives {
        receiver.close_recv(comm).unwrap();
    }
    receiver.close_listen(listener).unwrap();
}

#[test]
fn memory_may_vanish_right_after_deregistration() {
    let Some((sender, receiver)) = ends(11, 11) else {
        return;
    };
    let length = 8 << 20;
    for round in 0..10 {
        let (send, receive) = pair(&sender, &receiver);
        // SAFETY: anonymous memory; protected below, so any later access is a fault.
        let map = |length| unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0).cast::<u8>()
        };
        let (from, to) = (map(length), map(length));
        let sending = sender.register(send, from, length, HOST).unwrap();
        let receiving = receiver.register(receive, to, length, HOST).unwrap();
        // SAFETY: the memory stays until deregMr has returned.
        unsafe {
            receiver
                .irecv(receive, to, length, receiving)
                .unwrap()
                .unwrap();
            sender.isend(send, from, length, sending).unwrap().unwrap();
        }
        // Somewhere in the middle of it.
        std::thread::sleep(Duration::from_micros(300 * round));
        sender.deregister(send, sending).unwrap();
        // SAFETY: our own mapping.
        unsafe { libc::mprotect(from.cast(), length, libc::PROT_NONE) };
        receiver.deregister(receive, receiving).unwrap();
        // SAFETY: our own mapping.
        unsafe { libc::mprotect(to.cast(), length, libc::PROT_NONE) };
        std::thread::sleep(Duration::from_millis(2));
        sender.close_send(send).unwrap();
        receiver.close_recv(receive).unwrap();
        // SAFETY: our own mappings.
        unsafe {
            libc::munmap(from.cast(), length);
            libc::munmap(to.cast(), length);
        }
    }
}

#[test]
fn a_thousand_comms_leave_nothing_behind() {
    let Some((sender, receiver)) = ends(11, 11) else {
        return;
    };
    let turn = |count| {
        for seed in 0..count {
            let comm = pair(&sender, &receiver);
            if seed % 10 == 0 {
                exchange((&sender, &receiver), comm, seed, 1000);
            }
            sender.close_send(comm.0).unwrap();
            receiver.close_recv(comm.1).unwrap();
        }
    };
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    turn(300);
    let (memory, running) = (resident(), threads());
    turn(1000);
    // A comm has 64 KiB of eager slots: one in a hundred left behind would be seen.
    let grown = resident().saturating_sub(memory);
    assert!(grown < 16 << 20, "{grown} bytes");
    assert!(threads() <= running + 16);
}

#[test]
fn the_same_over_udp() {
    common::again_over("udp");
}

#[test]
fn the_same_past_the_kernel() {
    common::again_over("xdp");
}
