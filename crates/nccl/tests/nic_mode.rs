//! One device a NIC, on request; and IPv6. The environment is read once a process, so these have one
//! of their own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the environment is set before threads start")]

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use evener_drive::Plugin;

#[test]
fn each_nic_is_a_device_and_carries_its_own_comms() {
    common::environment();
    let v6 = TcpListener::bind("[::1]:0").is_ok();
    // SAFETY: before the library has started a thread.
    unsafe {
        std::env::set_var("EVENER_NET_DEVICES", "nic");
        if v6 {
            std::env::set_var("NCCL_SOCKET_FAMILY", "AF_INET6");
        } else {
            eprintln!("IPv6 is left out: this machine has no ::1");
        }
    }
    let mut plugin = Plugin::load(&common::path(), 11).unwrap();
    plugin.init().unwrap();
    assert_eq!(plugin.devices().unwrap(), 1);
    assert_eq!(plugin.properties(0).unwrap().name, "lo");
    let (listener, mut handle) = plugin.listen(0).unwrap();
    // Kind of the first address in the handle.
    assert_eq!(handle[49], if v6 { 6 } else { 4 });
    let (mut send, mut receive) = (None, None);
    let end = Instant::now() + Duration::from_secs(30);
    while send.is_none() || receive.is_none() {
        send = send.or_else(|| plugin.connect(0, &mut handle).unwrap());
        receive = receive.or_else(|| plugin.accept(listener).unwrap());
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    let mut from = vec![5u8; 300_000];
    let mut to = vec![0u8; 300_000];
    // SAFETY: the buffers outlive the requests.
    let (posted, sent) = unsafe {
        let null = evener_drive::NULL;
        let posted = plugin.irecv(receive.unwrap(), to.as_mut_ptr(), to.len(), null);
        let sent = plugin.isend(send.unwrap(), from.as_mut_ptr(), from.len(), null);
        (posted.unwrap().unwrap(), sent.unwrap().unwrap())
    };
    let (mut got, mut done) = (None, None);
    while got.is_none() || done.is_none() {
        got = got.or_else(|| plugin.test(posted, true).unwrap());
        done = done.or_else(|| plugin.test(sent, false).unwrap());
        assert!(Instant::now() < end);
    }
    assert_eq!(from, to);
    plugin.close_send(send.unwrap()).unwrap();
    plugin.close_recv(receive.unwrap()).unwrap();
    plugin.close_listen(listener).unwrap();
    plugin.finalize().unwrap();
}

#[test]
fn the_same_over_udp() {
    common::again_over_udp("the_same_over_udp");
}
