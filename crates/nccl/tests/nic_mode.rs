//! One device a NIC, on request; and IPv6. The environment is read once a process, so these have one
//! of their own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the environment is set before threads start")]

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

#[test]
fn each_nic_is_a_device_and_carries_its_own_comms() {
    common::environment();
    // AF_XDP is for IPv4 alone.
    let v6 = !common::past_kernel() && TcpListener::bind("[::1]:0").is_ok();
    // SAFETY: before the library has started a thread.
    unsafe {
        std::env::set_var("EVENER_NET_DEVICES", "nic");
        if v6 {
            std::env::set_var("NCCL_SOCKET_FAMILY", "AF_INET6");
        } else {
            // It may have come from the process that started this one.
            std::env::set_var("NCCL_SOCKET_FAMILY", "AF_INET");
            eprintln!("IPv6 is left out: this machine has no ::1, or packets go past the kernel");
        }
    }
    let Some((mut sender, mut receiver)) = common::ends(11, 11) else {
        return;
    };
    let [one, other] = if common::past_kernel() {
        ["va", "vb"]
    } else {
        ["lo", "lo"]
    };
    for (plugin, name) in [(&sender, one), (&receiver, other)] {
        assert_eq!(plugin.devices().unwrap(), 1);
        assert_eq!(plugin.properties(0).unwrap().name, name);
    }
    let (listener, mut handle) = receiver.listen(0).unwrap();
    // Kind of the first address in the handle.
    assert_eq!(handle[49], if v6 { 6 } else { 4 });
    let (mut send, mut receive) = (None, None);
    let end = Instant::now() + Duration::from_secs(30);
    while send.is_none() || receive.is_none() {
        send = send.or_else(|| sender.connect(0, &mut handle).unwrap());
        receive = receive.or_else(|| receiver.accept(listener).unwrap());
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    let mut from = vec![5u8; 300_000];
    let mut to = vec![0u8; 300_000];
    // SAFETY: the buffers outlive the requests.
    let (posted, sent) = unsafe {
        let null = evener_drive::NULL;
        let posted = receiver.irecv(receive.unwrap(), to.as_mut_ptr(), to.len(), null);
        let sent = sender.isend(send.unwrap(), from.as_mut_ptr(), from.len(), null);
        (posted.unwrap().unwrap(), sent.unwrap().unwrap())
    };
    let (mut got, mut done) = (None, None);
    while got.is_none() || done.is_none() {
        got = got.or_else(|| receiver.test(posted, true).unwrap());
        done = done.or_else(|| sender.test(sent, false).unwrap());
        assert!(Instant::now() < end);
    }
    assert_eq!(from, to);
    sender.close_send(send.unwrap()).unwrap();
    receiver.close_recv(receive.unwrap()).unwrap();
    receiver.close_listen(listener).unwrap();
    sender.finalize().unwrap();
    receiver.finalize().unwrap();
}

#[test]
fn the_same_over_udp() {
    common::again_over("udp");
}

#[test]
fn the_same_past_the_kernel() {
    common::again_over("xdp");
}
