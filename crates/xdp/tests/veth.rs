//! Cards of two network namespaces, joined by a veth pair. The namespaces belong to threads of the test, and
//! go with them. Where they are not allowed (root, CAP_NET_ADMIN), each test says so and is skipped.

#![allow(clippy::unwrap_used, reason = "in tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::BorrowedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use evener_xdp::port::{Refusal, Sent};
use evener_xdp::{Card, Mode, Port, Refused, Rule, Wanted};

mod nodes;

use nodes::{A, B, PATIENCE, echo, ip, pair};

/// A card with its sockets, as a caller has them.
struct End {
    card: Card,
    port: Port,
    own: UdpSocket,
}

fn rule(address: Ipv4Addr) -> Rule {
    Rule {
        address,
        ports: 20_000..=20_031,
    }
}

fn open(name: &str, address: Ipv4Addr, modes: &[Mode]) -> Result<End, Refused> {
    let mut wanted = Wanted::new(name, rule(address));
    wanted.modes = modes.into();
    wanted.frames = 256;
    let own = UdpSocket::bind((address, 20_007)).unwrap();
    own.set_nonblocking(true).unwrap();
    let (card, mut ports) = Card::open(&wanted)?;
    Ok(End {
        card,
        port: ports.remove(0),
        own,
    })
}

/// Packet `number`: its length and bytes follow from it.
fn packet(number: u32, most: usize) -> Vec<u8> {
    let length = 4 + (number as usize * 7919) % (most - 3);
    let mut bytes: Vec<u8> = (0..length)
        .map(|at| (at as u32 ^ (number * 31)) as u8)
        .collect();
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes
}

impl End {
    /// Sends one datagram, by the kernel where the hop is not known; whether by a frame.
    fn send(&mut self, to: SocketAddrV4, bytes: &[u8]) -> bool {
        let began = Instant::now();
        loop {
            let sent = self
                .port
                .send(20_007, to, bytes.len(), Instant::now(), |room| {
                    room.copy_from_slice(bytes);
                    bytes.len()
                });
            match sent {
                Sent::Framed => return true,
                Sent::ByKernel => {
                    let _ = self.own.send_to(bytes, to);
                    return false;
                }
                Sent::Full => {
                    assert!(began.elapsed() < PATIENCE);
                    self.port.flush().unwrap();
                }
                Sent::TooLong => panic!("too long"),
            }
        }
    }

    /// Swaps `count` packets with the other end, a few on their way at a time; how many went in frames. Those
    /// that are lost go again, until both ends have all of them (`done` counts such ends).
    fn swap(&mut self, to: SocketAddrV4, count: u32, most: usize, done: &AtomicU32) -> u32 {
        let (mut framed, mut got, mut next) = (0, vec![false; count as usize], 0);
        let (mut missing, mut quiet) = (count, Instant::now());
        let began = Instant::now();
        let mut all = false;
        while done.load(Ordering::SeqCst) < 2 {
            assert!(
                began.elapsed() < PATIENCE,
                "{missing} of {count} packets are missing"
            );
            if next < count {
                framed += u32::from(self.send(to, &packet(next, most)));
                next += 1;
            } else if quiet.elapsed() > Duration::from_millis(50) {
                next = 0;
            }
            self.port.flush().unwrap();
            let mut hear = |bytes: &[u8]| {
                let number = u32::from_le_bytes(*bytes.first_chunk().unwrap());
                assert_eq!(bytes, packet(number, most), "packet {number}");
                let got = &mut got[number as usize];
                if !std::mem::replace(got, true) {
                    missing -= 1;
                    quiet = Instant::now();
                }
            };
            self.port.receive(64, |came| {
                assert_eq!(came.from, to);
                assert_eq!(came.to.port(), 20_007);
                hear(came.packet);
            });
            let mut room = vec![0; 10_000];
            while let Ok(length) = self.own.recv(&mut room) {
                hear(&room[..length]);
            }
            if missing == 0 && !std::mem::replace(&mut all, true) {
                done.fetch_add(1, Ordering::SeqCst);
            }
        }
        framed
    }
}

/// Both nodes open a card each in this mode and swap packets.
fn both_ways(mtu: usize, mode: Mode, count: u32) -> Option<()> {
    let (a, b) = pair(mtu)?;
    let most = mtu - 28;
    let done = Arc::new(AtomicU32::new(0));
    let one = |name: &'static str, here, there| {
        let done = done.clone();
        move || {
            let mut end = open(name, here, &[mode]).unwrap();
            let framed = end.swap(SocketAddrV4::new(there, 20_007), count, most, &done);
            let counts = end.port.counts();
            assert!(
                framed > count / 2,
                "{framed} of {count} in frames: {counts:?}"
            );
            assert!(counts.received > 0 && counts.odd == 0, "{counts:?}");
            assert_eq!(end.card.mode(), mode);
            assert!(
                end.card.summary().contains("veth"),
                "{}",
                end.card.summary()
            );
        }
    };
    let (at_a, at_b) = (a.start(one("va", A, B)), b.start(one("vb", B, A)));
    at_a.recv_timeout(2 * PATIENCE)
        .expect("the first node failed");
    at_b.recv_timeout(2 * PATIENCE)
        .expect("the second node failed");
    Some(())
}

#[test]
fn packets_cross_both_ways_with_native_copies() {
    // More than the rings hold: they go round several times.
    both_ways(1500, Mode::Native, 3000);
}

#[test]
fn packets_cross_both_ways_in_generic_mode() {
    both_ways(1500, Mode::Generic, 1000);
}

#[test]
fn a_packet_may_take_several_frames() {
    both_ways(9000, Mode::Native, 600);
}

#[test]
fn frames_of_four_kilobytes_take_a_larger_mtu() {
    both_ways(3498, Mode::Native, 600);
}

/// A packet that lies in the ring says for how long it has.
#[test]
fn a_packet_says_when_it_came() {
    const LATE: Duration = Duration::from_millis(20);
    for mode in [Mode::Native, Mode::Generic] {
        let Some((a, b)) = pair(1500) else { return };
        let (ready, sender_waits) = channel();
        let came = b.start(move || {
            let mut end = open("vb", B, &[mode]).unwrap();
            ready.send(()).unwrap();
            let began = Instant::now();
            while !end.port.wait(LATE).unwrap() {
                assert!(began.elapsed() < PATIENCE);
            }
            std::thread::sleep(LATE);
            let mut waited = None;
            end.port.receive(1, |came| waited = Some(came.waited));
            waited.unwrap()
        });
        a.run(move || {
            sender_waits.recv().unwrap();
            let mut end = open("va", A, &[mode]).unwrap();
            let began = Instant::now();
            // The first goes by the kernel, which has to find the other.
            while !end.send(SocketAddrV4::new(B, 20_007), b"hello") {
                assert!(began.elapsed() < PATIENCE);
                std::thread::sleep(Duration::from_millis(2));
            }
            end.port.flush().unwrap();
        });
        let waited = came.recv_timeout(PATIENCE).unwrap();
        assert!(waited >= LATE, "{waited:?}");
    }
}

#[test]
fn zero_copy_is_refused_by_name_and_native_copies_are_taken() {
    let Some((a, _b)) = pair(1500) else { return };
    a.run(|| {
        let end = open("va", A, &Mode::ALL).unwrap();
        assert_eq!(end.card.mode(), Mode::Native);
        let [(Mode::ZeroCopy, Refusal::Bind(0, _))] = end.card.tried() else {
            panic!("{:?}", end.card.tried());
        };
        let summary = end.card.summary();
        let wanted = "va (driver veth): zero copy refused (EOPNOTSUPP when queue 0 is bound), native copy \
                      taken; frames of 2048 bytes";
        assert!(summary.starts_with(wanted), "{summary}");
        drop(end);
        wait_until_gone("va");
        let refused = open("va", A, &[Mode::ZeroCopy]).err().unwrap();
        assert!(matches!(refused, Refused::Modes { .. }), "{refused}");
        wait_until_gone("va");
        let refused = open("nosuch0", A, &Mode::ALL).err().unwrap();
        assert!(refused.to_string().contains("nosuch0"), "{refused}");
    });
}

fn attached(name: &str) -> bool {
    let shown = Command::new("ip")
        .args(["link", "show", name])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(text.contains(name), "{text}");
    text.contains("xdp")
}

/// The kernel takes a program away when the last descriptor of its link is closed. Other tests start
/// programs, which have a copy for a moment.
fn wait_until_gone(name: &str) {
    let began = Instant::now();
    while attached(name) {
        assert!(began.elapsed() < PATIENCE, "the program of {name} stays");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_second_program_is_refused_and_the_first_stays() {
    let Some((a, _b)) = pair(1500) else { return };
    a.run(|| {
        let first = open("va", A, &[Mode::Native]).unwrap();
        let mut wanted = Wanted::new("va", rule(A));
        wanted.frames = 64;
        let refused = Card::open(&wanted).err().unwrap();
        assert!(
            matches!(
                refused,
                Refused::Taken {
                    program: Some(_),
                    ..
                }
            ),
            "{refused}"
        );
        assert!(attached("va"));
        drop(first);
        wait_until_gone("va");
        Card::open(&wanted).unwrap();
    });
}

/// A child that another thread has forked keeps copies of all descriptors until it runs another program. They
/// must not keep the program on the interface, neither after a card nor after a mode that was refused.
#[test]
fn a_copy_of_the_descriptor_keeps_no_program() {
    let Some((a, _b)) = pair(1500) else { return };
    a.run(|| {
        let first = open("va", A, &[Mode::Native]).unwrap();
        // SAFETY: the card has it, and is not dropped yet.
        let link = unsafe { BorrowedFd::borrow_raw(first.card.fd()) };
        let copy = link.try_clone_to_owned().unwrap();
        drop(first);
        assert!(!attached("va"));
        // Zero copy is tried first, and refused.
        open("va", A, &Mode::ALL).unwrap();
        drop(copy);
    });
}

#[test]
fn other_traffic_goes_on() {
    let Some((a, b)) = pair(1500) else { return };
    const BYTES: usize = 1 << 20;
    let (tell, told) = channel();
    let at_b = b.start(move || {
        let listener = TcpListener::bind((B, 5000)).unwrap();
        // UDP to ports that are not ours, and to ours from far away.
        let other = UdpSocket::bind((B, 20_032)).unwrap();
        other.set_read_timeout(Some(PATIENCE)).unwrap();
        tell.send(()).unwrap();
        let end = open("vb", B, &[Mode::Native]).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = vec![0; BYTES];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(&bytes).unwrap();
        let mut room = [0; 100];
        let (length, _) = other.recv_from(&mut room).unwrap();
        (room[..length].to_vec(), end.port.counts().received)
    });
    told.recv_timeout(PATIENCE).unwrap();
    a.run(|| {
        let mut end = open("va", A, &[Mode::Native]).unwrap();
        assert!(echo(B), "no answer to an echo request");
        let mut stream = TcpStream::connect((B, 5000)).unwrap();
        let sent: Vec<u8> = (0..BYTES).map(|at| ((at * 31) >> 5) as u8).collect();
        stream.write_all(&sent).unwrap();
        let mut back = vec![0; BYTES];
        stream.read_exact(&mut back).unwrap();
        assert!(back == sent);
        UdpSocket::bind((A, 0))
            .unwrap()
            .send_to(b"other", (B, 20_032))
            .unwrap();
        assert_eq!(end.port.receive(64, |_| ()), 0);
    });
    assert_eq!(at_b.recv_timeout(PATIENCE).unwrap(), (b"other".to_vec(), 0));
}

#[test]
fn a_router_is_the_next_hop_of_what_is_behind_it() {
    let Some((a, b)) = pair(1500) else { return };
    let far = Ipv4Addr::new(10, 77, 0, 1);
    b.run(|| assert!(ip("addr add 10.77.0.1/32 dev lo")));
    let at_b = b.start(move || {
        let own = UdpSocket::bind((Ipv4Addr::new(10, 77, 0, 1), 20_007)).unwrap();
        own.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut room = [0; 100];
        (0..2).map(|_| own.recv(&mut room).unwrap()).sum::<usize>()
    });
    a.run(move || {
        let mut end = open("va", A, &[Mode::Native]).unwrap();
        let to = SocketAddrV4::new(far, 20_007);
        // No route: the kernel is asked to send, and refuses.
        assert!(!end.send(to, b"lost"));
        assert!(ip("route add 10.77.0.0/24 via 10.9.0.2"));
        let began = Instant::now();
        while !end.send(to, b"by the router") {
            assert!(began.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(2));
        }
        end.send(to, b"by the router");
        end.port.flush().unwrap();
    });
    assert!(at_b.recv_timeout(PATIENCE).unwrap() >= 26);
}

#[test]
fn a_new_ethernet_address_of_the_peer_is_followed() {
    let Some((a, b)) = pair(1500) else { return };
    let (tell, told) = channel();
    let (go, wait) = channel();
    let at_a = a.start(move || {
        let mut end = open("va", A, &[Mode::Native]).unwrap();
        let to = SocketAddrV4::new(B, 20_007);
        let mut until = |done: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !done() {
                assert!(began.elapsed() < PATIENCE);
                end.send(to, b"hello");
                end.port.flush().unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let began = Instant::now();
        until(&|| began.elapsed() > Duration::from_millis(50));
        tell.send(()).unwrap();
        until(&|| wait.try_recv().is_ok());
        end.port.counts()
    });
    told.recv_timeout(PATIENCE).unwrap();
    b.run(move || {
        let own = UdpSocket::bind((B, 20_007)).unwrap();
        own.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut room = [0; 100];
        own.recv(&mut room).unwrap();
        assert!(ip("link set vb address 02:00:00:00:00:99"));
        // What was queued before counts for nothing.
        own.set_nonblocking(true).unwrap();
        while own.recv(&mut room).is_ok() {}
        own.set_nonblocking(false).unwrap();
        // It speaks, so the other kernel learns its new address (the link's own news goes out too).
        assert!(ip("neigh flush dev vb"));
        let _ = own.send_to(b"here", (A, 9));
        for _ in 0..20 {
            own.recv(&mut room).unwrap();
        }
        go.send(()).unwrap();
    });
    let counts = at_a.recv_timeout(PATIENCE).unwrap();
    assert!(counts.sent > counts.by_kernel, "{counts:?}");
}

/// Not a test of its own: what the next one kills.
#[test]
#[ignore = "it is started by the test of kill -9"]
fn holds_a_card_until_it_is_killed() {
    if std::env::var_os("EVENER_XDP_HOLD").is_some() {
        let end = open("va", A, &[Mode::Native]).unwrap();
        println!("\nholds {}", end.card.summary());
        std::thread::sleep(2 * PATIENCE);
    }
}

#[test]
fn nothing_is_left_after_kill_9() {
    let Some((a, _b)) = pair(1500) else { return };
    a.run(|| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "holds_a_card_until_it_is_killed",
                "--ignored",
                "--nocapture",
            ])
            .env("EVENER_XDP_HOLD", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let holds = lines
            .map_while(Result::ok)
            .any(|line| line.starts_with("holds"));
        assert!(holds, "the child did not open its card");
        assert!(attached("va"));
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until_gone("va");
        open("va", A, &[Mode::Native]).unwrap();
    });
}
