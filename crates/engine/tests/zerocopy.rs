//! Sending without the kernel's copy, with a real kernel. It always copies what stays on the machine,
//! so here it is dropped after one piece; the rest is driven by going on nevertheless.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evener_engine::conn::Conn;
use evener_engine::stats::PathStats;
use evener_engine::sys::TcpInfo;
use evener_engine::zerocopy::{Mode, Verdict};
use evener_engine::{Config, Engine, Memory};
use evener_proto::PathId;
use evener_proto::wire::HEADER;

use common::{finish, pair, until};

mod common;

const PIECE: usize = 256 << 10;

/// A connection of the engine's, its counters, and the other end.
fn connection(mode: Mode) -> (Conn, Arc<PathStats>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ours.set_nodelay(true).unwrap();
    let stats = Arc::new(PathStats::new("lo".into(), 1, "test".into()));
    let mut conn = Conn::new(ours.into(), 0, PathId(1), 1, stats.clone());
    conn.offer_zero_copy(mode);
    let quick = TcpInfo {
        delivery_rate: 1 << 30,
        bytes_acknowledged: 1 << 30,
        ..TcpInfo::default()
    };
    let _ = conn.adapt(&quick, Duration::from_millis(4));
    (conn, stats, listener.accept().unwrap().0)
}

#[test]
fn one_piece_is_tried_and_it_is_dropped_where_the_kernel_copied_it() {
    let (mut conn, stats, mut peer) = connection(Mode::Auto);
    let mut bytes: Vec<u8> = (0..PIECE).map(|at| (at * 7 + (at >> 9)) as u8).collect();
    for message in 0..3 {
        conn.push(
            [message as u8; HEADER],
            Some((9, message, Memory::of(&mut bytes))),
        );
    }
    let mut got = Vec::new();
    peer.set_nonblocking(true).unwrap();
    let mut buffer = vec![0; 1 << 20];
    let want = 3 * (HEADER + PIECE);
    until(|| {
        let _ = conn.flush();
        if let Ok(count) = peer.read(&mut buffer) {
            got.extend_from_slice(&buffer[..count]);
        }
        (got.len() == want).then_some(())
    });
    for message in 0..3 {
        let part = &got[message * (HEADER + PIECE)..];
        assert_eq!(part[..HEADER], [message as u8; HEADER]);
        assert_eq!(part[HEADER..HEADER + PIECE], bytes);
    }
    until(|| {
        conn.take_notices();
        (!conn.is_lent()).then_some(())
    });
    assert_eq!(stats.report().zero_copy, Verdict::Copied);
    // Every message is given back once.
    conn.done.sort_unstable();
    assert_eq!(conn.done, [(9, 0), (9, 1), (9, 2)]);
}

#[test]
fn what_the_kernel_may_still_read_is_not_given_back() {
    let (mut conn, _, peer) = connection(Mode::Always);
    let mut bytes = vec![5; PIECE];
    let mut pushed = 0;
    // Until the peer, who does not read, and the kernel take no more.
    while conn.queued() < 4 * PIECE {
        conn.push([0; HEADER], Some((9, pushed, Memory::of(&mut bytes))));
        pushed += 1;
        if conn.flush().is_err() {
            break;
        }
    }
    assert!(pushed > 1);
    // The last ones are in the kernel's queue, or here: the peer's window is closed.
    std::thread::sleep(Duration::from_millis(50));
    conn.take_notices();
    assert!(conn.is_lent());
    assert!((conn.done.len() as u64) < pushed);
    // A message that is wanted back is copied as far as it is not written; what is, stays.
    conn.detach(|_, _| true);
    assert!(conn.is_lent());
    assert!((conn.done.len() as u64) < pushed);
    // Closing empties the queue, and gives all back, once each.
    conn.abandon();
    assert!(!conn.is_lent());
    conn.done.sort_unstable();
    let all: Vec<(u64, u64)> = (0..pushed).map(|message| (9, message)).collect();
    assert_eq!(conn.done, all);
    drop(peer);
}

fn engine(mode: Mode) -> Engine {
    let config = Config {
        interfaces: Some("lo".into()),
        workers: 2,
        flows: 4,
        most_flows: 8,
        zero_copy: mode,
        ..Config::default()
    };
    Engine::start(config, Box::new(|_, _| ())).unwrap()
}

/// Messages whose memory changes as soon as they are finished, while connections are cut and change
/// hands: whoever reads it later reads something else.
fn exchange(mode: Mode, cut: bool) -> Vec<Verdict> {
    let (a, b) = (engine(mode), engine(mode));
    let (send, receive) = pair(&a, &b);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while cut && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
                a.cut_paths(1);
                a.pass_connections_on();
            }
        });
        let mut from = vec![0u8; 3 << 20];
        let mut to = vec![0u8; 3 << 20];
        for number in 0..60u8 {
            let size = 100_000 + usize::from(number) * 48_000;
            from[..size].fill(number);
            // SAFETY: both live until the requests are finished.
            let (sent, posted) = unsafe {
                let posted = b.post(&receive, Memory::of(&mut to[..size])).unwrap();
                let sent = a.post(&send, Memory::of(&mut from[..size])).unwrap();
                (sent.unwrap(), posted.unwrap())
            };
            finish(sent);
            from.fill(0xee);
            finish(posted);
            assert!(to[..size].iter().all(|byte| *byte == number), "{number}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    let verdicts = a.paths().into_iter().map(|path| path.zero_copy).collect();
    a.release(&send);
    b.release(&receive);
    verdicts
}

#[test]
fn connections_go_back_to_copies_by_themselves() {
    let verdicts = exchange(Mode::Auto, false);
    assert!(verdicts.contains(&Verdict::Copied), "{verdicts:?}");
    assert!(!verdicts.contains(&Verdict::Works), "{verdicts:?}");
}

#[test]
fn memory_is_given_back_when_the_kernel_has_done_with_it_whatever_happens_to_the_path() {
    let verdicts = exchange(Mode::Always, true);
    // Connections that were cut begin anew; those that carried something large are not copying.
    assert!(!verdicts.contains(&Verdict::Copied), "{verdicts:?}");
}

#[test]
fn a_comm_that_ends_in_the_middle_gives_its_memory_back() {
    let (a, b) = (engine(Mode::Always), engine(Mode::Always));
    for _ in 0..10 {
        let (send, receive) = pair(&a, &b);
        let (mut from, mut to) = (vec![1u8; 8 << 20], vec![0u8; 8 << 20]);
        // SAFETY: both live until the comms are released.
        unsafe {
            b.post(&receive, Memory::of(&mut to)).unwrap();
            a.post(&send, Memory::of(&mut from)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(3));
        a.release(&send);
        from.fill(2);
        b.release(&receive);
    }
}
