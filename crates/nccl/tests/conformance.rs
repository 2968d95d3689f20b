//! Drives the built library through every version of the interface, exactly as NCCL's service and
//! progress threads do. Two ends in one process talk to themselves over loopback; two processes are
//! in `processes.rs`.

#![allow(unsafe_code, reason = "memory is lent to the plug-in as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{pair, until};

use std::time::Duration;

use evener_drive::{DriveError, NULL, Object, Plugin};

const HOST: i32 = 1;

fn load(version: u32) -> Plugin {
    common::environment();
    let mut plugin = Plugin::load(&common::path(), version).unwrap();
    plugin.init().unwrap();
    plugin
}

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

fn exchange(plugin: &Plugin, (send, receive): (Object, Object), seed: usize, size: usize) {
    let (mut from, mut to) = (pattern(seed, size), vec![0xaa; size + 64]);
    let posted = irecv(plugin, receive, &mut to);
    let sent = isend(plugin, send, &mut from);
    assert_eq!(wait(plugin, posted), size);
    // NCCL may not ask for the size.
    until(|| plugin.test(sent, false).unwrap());
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
    let plugin = load(version);
    assert_eq!(plugin.name(), "Evener");
    assert_eq!(plugin.devices().unwrap(), 2);
    for device in 0..2 {
        let properties = plugin.properties(device).unwrap();
        assert_eq!(properties.name, format!("evener{device}"));
        assert_eq!(properties.max_recvs, 1);
        assert_eq!(properties.ptr_support, HOST);
        assert_eq!(properties.speed, 10_000);
    }
    assert_ne!(call_code(plugin.properties(2)), 0);

    let comm = pair(&plugin);
    for (seed, size) in [0, 1, 100, 16384, 65536, 65537, 1 << 20, 3_000_001]
        .into_iter()
        .enumerate()
    {
        exchange(&plugin, comm, seed, size);
    }
    let (send, receive) = comm;

    // The sender far ahead of the receiver, small and large.
    for size in [8usize, 200_000] {
        let mut out: Vec<Vec<u8>> = (0..16).map(|seed| pattern(seed, size)).collect();
        let sent: Vec<_> = out
            .iter_mut()
            .map(|bytes| isend(&plugin, send, bytes))
            .collect();
        std::thread::sleep(Duration::from_millis(20));
        for seed in 0..16 {
            let mut to = vec![0; size];
            let posted = irecv(&plugin, receive, &mut to);
            assert_eq!(wait(&plugin, posted), size);
            assert_eq!(to, pattern(seed, size));
        }
        for request in sent {
            wait(&plugin, request);
        }
    }

    // More requests than NCCL ever has: null, and not an error, where there is no room.
    let mut bytes = vec![0u8; 1 << 20];
    let mut posted = Vec::new();
    let full = (0..1000).any(|_| {
        // SAFETY: the buffer outlives the comm. All write the same bytes, or none.
        let request = unsafe { plugin.irecv(receive, bytes.as_mut_ptr(), 1 << 20, NULL) }.unwrap();
        posted.extend(request);
        request.is_none()
    });
    assert!(full && posted.len() >= 32, "{}", posted.len());

    // Nothing to flush: null, which counts as done.
    assert_eq!(plugin.iflush(receive).unwrap(), None);

    // Registration.
    let memory = bytes.as_mut_ptr();
    let registration = plugin.register(send, memory, 1 << 20, HOST).unwrap();
    assert_ne!(call_code(plugin.register(send, memory, 1 << 20, 2)), 0);
    plugin.deregister(send, registration).unwrap();
    plugin.deregister(send, registration).unwrap();
    plugin.deregister(send, NULL).unwrap();
    plugin.deregister(NULL, NULL).unwrap();

    // Close with requests in flight, twice, and of nothing.
    for _ in 0..2 {
        plugin.close_recv(receive).unwrap();
        plugin.close_send(send).unwrap();
    }
    drop(bytes);
    plugin.close_send(NULL).unwrap();
    plugin.close_recv(NULL).unwrap();
    plugin.close_listen(NULL).unwrap();
    plugin.deregister(send, registration).unwrap();

    // Destroy and recreate.
    let comm = pair(&plugin);
    exchange(&plugin, comm, 1, 100_000);
    plugin.close_send(comm.0).unwrap();
    plugin.close_recv(comm.1).unwrap();
    let mut plugin = plugin;
    plugin.finalize().unwrap();
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
        let (mut a, mut b) = (load(first), load(second));
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
    let plugin = load(11);
    let (send, receive) = pair(&plugin);
    let (mut from, mut to) = (vec![1; 200_000], vec![0xaa; 100_000]);
    let posted = irecv(&plugin, receive, &mut to);
    let sent = isend(&plugin, send, &mut from);
    for request in [posted, sent] {
        let code = until(|| match plugin.test(request, true) {
            Ok(None) => None,
            other => Some(call_code(other)),
        });
        assert_eq!(code, 5);
    }
    assert!(to.iter().all(|byte| *byte == 0xaa));
    plugin.close_send(send).unwrap();
    plugin.close_recv(receive).unwrap();
}

#[test]
fn what_is_null_or_wrong_is_refused_and_nothing_else_happens() {
    let plugin = load(11);
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
    let plugin = load(11);
    let (listener, handle) = plugin.listen(0).unwrap();
    let mut handles = [handle; 20];
    let (mut sends, mut receives) = (vec![None; 20], Vec::new());
    until(|| {
        for (send, handle) in sends.iter_mut().zip(&mut handles) {
            if send.is_none() {
                *send = plugin.connect(0, handle).unwrap();
            }
        }
        receives.extend(plugin.accept(listener).unwrap());
        (receives.len() == 20 && sends.iter().all(Option::is_some)).then_some(())
    });
    for comm in sends.into_iter().flatten() {
        plugin.close_send(comm).unwrap();
    }
    for comm in receives {
        plugin.close_recv(comm).unwrap();
    }
    plugin.close_listen(listener).unwrap();
}

#[test]
fn memory_may_vanish_right_after_deregistration() {
    let plugin = load(11);
    let length = 8 << 20;
    for round in 0..10 {
        let (send, receive) = pair(&plugin);
        // SAFETY: anonymous memory; protected below, so any later access is a fault.
        let map = |length| unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0).cast::<u8>()
        };
        let (from, to) = (map(length), map(length));
        let sending = plugin.register(send, from, length, HOST).unwrap();
        let receiving = plugin.register(receive, to, length, HOST).unwrap();
        // SAFETY: the memory stays until deregMr has returned.
        unsafe {
            plugin
                .irecv(receive, to, length, receiving)
                .unwrap()
                .unwrap();
            plugin.isend(send, from, length, sending).unwrap().unwrap();
        }
        // Somewhere in the middle of it.
        std::thread::sleep(Duration::from_micros(300 * round));
        plugin.deregister(send, sending).unwrap();
        // SAFETY: our own mapping.
        unsafe { libc::mprotect(from.cast(), length, libc::PROT_NONE) };
        plugin.deregister(receive, receiving).unwrap();
        // SAFETY: our own mapping.
        unsafe { libc::mprotect(to.cast(), length, libc::PROT_NONE) };
        std::thread::sleep(Duration::from_millis(2));
        plugin.close_send(send).unwrap();
        plugin.close_recv(receive).unwrap();
        // SAFETY: our own mappings.
        unsafe {
            libc::munmap(from.cast(), length);
            libc::munmap(to.cast(), length);
        }
    }
}

#[test]
fn a_thousand_comms_leave_nothing_behind() {
    let plugin = load(11);
    let turn = |count| {
        for seed in 0..count {
            let comm = pair(&plugin);
            if seed % 10 == 0 {
                exchange(&plugin, comm, seed, 1000);
            }
            plugin.close_send(comm.0).unwrap();
            plugin.close_recv(comm.1).unwrap();
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
    common::again_over_udp("the_same_over_udp");
}
