//! Two engines in one process, over loopback: everything but the network is real.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use evener_engine::addresses::Addresses;
use evener_engine::comm::Comm;
use evener_engine::hello::{Answer, CHALLENGE, GREETING, Greeting, Handle, Met, PROOF, tag_of};
use evener_engine::{Choice, Config, Engine, Error, Memory, Slot, Status};
use evener_proto::Frame;
use evener_proto::packet::JobKey;

use common::{LIMIT, finish, pair, until};

mod common;
use evener_proto::wire::HEADER;

/// What must hold whatever carries the bytes.
macro_rules! with_each_engine {
    ($($name:ident)*) => {
        mod tcp {
            $(#[test]
            fn $name() {
                super::$name(super::Choice::Tcp);
            })*
        }

        mod udp {
            $(#[test]
            fn $name() {
                super::$name(super::Choice::Udp);
            })*
        }
    };
}

with_each_engine! {
    messages_of_all_sizes_arrive
    many_in_flight_both_ways_keep_their_order
    connections_change_hands_and_end_while_they_carry
    a_comm_to_oneself_works
    connections_that_are_cut_cost_nothing_but_time
    strangers_stop_nothing
    closing_with_requests_in_flight_fails_the_other_end
    who_ends_without_a_word_is_missed_within_seconds
    a_message_that_is_too_long_is_refused_on_both_ends
    a_closed_listener_declines
    comms_come_and_go_without_growth
}

fn engine(choice: Choice, workers: usize) -> Engine {
    engine_with(Config {
        engine: choice,
        interfaces: Some("lo".into()),
        workers,
        // With UDP: a comm's messages take turns over all threads.
        flows: 4,
        most_flows: 8,
        ..Config::default()
    })
}

fn engine_with(config: Config) -> Engine {
    let verbose = std::env::var_os("EVENER_TEST_LOG").is_some();
    let log = move |level, text: &str| {
        if verbose {
            eprintln!("{level:?} {text}");
        }
    };
    Engine::start(config, Box::new(log)).unwrap()
}

fn post<'a>(engine: &Engine, comm: &'a Comm, bytes: &mut [u8]) -> Option<&'a Slot> {
    // SAFETY: every test keeps its buffers until the request is finished or the comm released.
    unsafe { engine.post(comm, Memory::of(bytes)) }.unwrap()
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (seed * 131 + at * 7 + (at >> 9)) as u8)
        .collect()
}

fn messages_of_all_sizes_arrive(choice: Choice) {
    for workers in [1, 2] {
        let (a, b) = (engine(choice, workers), engine(choice, workers));
        let (send, receive) = pair(&a, &b);
        let sizes = [
            0,
            1,
            100,
            4096,
            16384,
            16385,
            65536,
            65537,
            1 << 20,
            5_000_001,
        ];
        for (seed, size) in sizes.into_iter().enumerate() {
            let mut from = pattern(seed, size);
            let mut to = vec![0xaa; size + 10];
            // Half of the time the data is there before its buffer.
            let early = seed % 2 == 0;
            let posted = (!early).then(|| post(&b, &receive, &mut to).unwrap());
            let sent = post(&a, &send, &mut from).unwrap();
            if early {
                std::thread::sleep(Duration::from_millis(5));
            }
            let posted = posted.unwrap_or_else(|| post(&b, &receive, &mut to).unwrap());
            assert_eq!(finish(posted), size);
            assert_eq!(finish(sent), size);
            assert_eq!(to[..size], pattern(seed, size));
            assert!(to[size..].iter().all(|byte| *byte == 0xaa));
        }
        a.release(&send);
        b.release(&receive);
    }
}

fn many_in_flight_both_ways_keep_their_order(choice: Choice) {
    let (a, b) = (engine(choice, 2), engine(choice, 2));
    let (ab, ba) = (pair(&a, &b), pair(&b, &a));
    let count = if choice == Choice::Udp { 50 } else { 200 };
    std::thread::scope(|scope| {
        for (engine, comm, receiving) in [
            (&a, &ab.0, false),
            (&b, &ab.1, true),
            (&b, &ba.0, false),
            (&a, &ba.1, true),
        ] {
            scope.spawn(move || {
                let mut flying: std::collections::VecDeque<(usize, Vec<u8>, &Slot)> =
                    std::collections::VecDeque::new();
                let mut next = 0;
                while next < count || !flying.is_empty() {
                    if next < count && flying.len() < 8 {
                        let size = next * 997 % 300_000;
                        let mut bytes = if receiving {
                            vec![0; size]
                        } else {
                            pattern(next, size)
                        };
                        let slot = until(|| post(engine, comm, &mut bytes));
                        flying.push_back((next, bytes, slot));
                        next += 1;
                        continue;
                    }
                    let (number, bytes, slot) = flying.pop_front().unwrap();
                    assert_eq!(finish(slot), number * 997 % 300_000);
                    if receiving {
                        assert_eq!(bytes, pattern(number, bytes.len()));
                    }
                }
            });
        }
    });
}

fn connections_change_hands_and_end_while_they_carry(choice: Choice) {
    // Packets are authenticated: slow without the compiler's optimizations.
    let count = if choice == Choice::Udp { 30 } else { 150 };
    let (a, b) = (engine(choice, 3), engine(choice, 2));
    let (send, receive) = pair(&a, &b);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
                a.pass_connections_on();
                b.pass_connections_on();
                if round % 16 == 15 {
                    b.cut_paths(1);
                }
            }
        });
        for number in 0..count {
            let size = 1 + number * 7919 % 2_000_000;
            let mut from = [pattern(number, size), pattern(number + 1, 1000)];
            let mut to = [vec![0; size], vec![0; 2000]];
            let posted: Vec<_> = to
                .iter_mut()
                .map(|to| post(&b, &receive, to).unwrap())
                .collect();
            let sent: Vec<_> = from
                .iter_mut()
                .map(|from| post(&a, &send, from).unwrap())
                .collect();
            let lengths: Vec<_> = posted.into_iter().map(finish).collect();
            assert_eq!(lengths, [size, 1000]);
            sent.into_iter().for_each(|slot| {
                finish(slot);
            });
            assert_eq!(from[0], to[0]);
            assert_eq!(from[1], to[1][..1000]);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut huge = vec![0; 4 << 20];
    post(&a, &send, &mut huge).unwrap();
    a.pass_connections_on();
    a.release(&send);
    b.release(&receive);
}

fn a_comm_to_oneself_works(choice: Choice) {
    let a = engine(choice, 1);
    let (send, receive) = pair(&a, &a);
    let (mut from, mut to) = (pattern(3, 300_000), vec![0; 300_000]);
    let posted = post(&a, &receive, &mut to).unwrap();
    let sent = post(&a, &send, &mut from).unwrap();
    finish(posted);
    finish(sent);
    assert_eq!(from, to);
}

fn connections_that_are_cut_cost_nothing_but_time(choice: Choice) {
    let count = if choice == Choice::Udp { 30 } else { 200 };
    // As in a Python or C process that has not ignored it: a write to a dead connection must not
    // raise it. Rust's runtime would.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    let (send, receive) = pair(&a, &b);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Cuts whatever there is, again and again, as a flapping link would.
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(30));
                a.cut_paths(2);
            }
        });
        for number in 0..count {
            let size = 1 + number * 7919 % 2_000_000;
            let (mut from, mut to) = (pattern(number, size), vec![0; size]);
            let posted = post(&b, &receive, &mut to).unwrap();
            let sent = post(&a, &send, &mut from).unwrap();
            assert_eq!(finish(posted), size);
            assert_eq!(finish(sent), size);
            assert_eq!(from, to);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn strangers_stop_nothing(choice: Choice) {
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    let mut strangers = Vec::new();
    for number in 0..300 {
        let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", b.port())) else {
            continue;
        };
        match number % 3 {
            0 => {}
            1 => {
                let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
            }
            // Half a greeting.
            _ => {
                let _ = stranger.write_all(b"EVENER\0\x01 and nothing more");
            }
        }
        strangers.push(stranger);
    }
    let (send, receive) = pair(&a, &b);
    let (mut from, mut to) = (pattern(1, 1000), vec![0; 1000]);
    let posted = post(&b, &receive, &mut to).unwrap();
    let sent = post(&a, &send, &mut from).unwrap();
    finish(posted);
    finish(sent);
    // Those who spoke wrong are closed, without a word.
    let mut wrong = strangers.swap_remove(1);
    wrong.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(matches!(wrong.read(&mut [0; 16]), Ok(0) | Err(_)));
}

/// Nobody stays for longer than a greeting may take: not who says nothing, nor who says it slowly,
/// nor who has the wrong token.
#[test]
fn strangers_are_closed_in_time_and_hear_nothing() {
    let b = engine(Choice::Tcp, 1);
    let (_listener, bytes) = b.listen();
    let handle = Handle::parse(&bytes).unwrap();
    let greeting = Greeting {
        to: handle.process,
        from: [1; 16],
        random: [2; 16],
        port: 1,
        path: 1,
        local: 0,
        remote: 0,
        addresses: Addresses::default(),
    };
    let greeting = greeting.emit(&JobKey::new([7; 16]));
    let connect = || TcpStream::connect(("127.0.0.1", b.port())).unwrap();
    let (mut silent, mut slow, mut wrong) = (connect(), connect(), connect());
    wrong.write_all(&greeting).unwrap();
    // As versions before the challenge greeted: 92 bytes, the key among them.
    let mut old = connect();
    let mut said = [0; 92];
    said[..8].copy_from_slice(b"EVENER\0\x03");
    said[8..24].copy_from_slice(&handle.token);
    old.write_all(&said).unwrap();
    let began = Instant::now();
    // A byte at a time, of a greeting that would take longer than it may.
    let mut byte = greeting.iter().cycle();
    let slow_ended = until(|| {
        std::thread::sleep(Duration::from_millis(100));
        let gone = slow.write_all(&[*byte.next().unwrap()]).is_err();
        gone.then(|| began.elapsed())
    });
    assert!(slow_ended >= Duration::from_millis(1500), "{slow_ended:?}");
    for stranger in [&mut silent, &mut slow, &mut wrong, &mut old] {
        stranger.set_read_timeout(Some(LIMIT)).unwrap();
        let heard = stranger.read(&mut [0; 16]);
        assert!(!matches!(heard, Ok(1..)), "{heard:?}");
        let kind = heard.map_err(|error| error.kind());
        assert_ne!(kind, Err(std::io::ErrorKind::WouldBlock), "still open");
    }
}

/// One that was admitted and then says what makes no sense, as a broken build of ourselves would.
#[test]
fn a_peer_that_speaks_nonsense_stops_nothing() {
    let (a, b) = (engine(Choice::Tcp, 1), engine(Choice::Tcp, 1));
    let (send, receive) = pair(&a, &b);
    let (_listener, bytes) = b.listen();
    let handle = Handle::parse(&bytes).unwrap();
    let mut seed = 7u64;
    for round in 0..60u64 {
        let greeting = Greeting {
            to: handle.process,
            from: [round as u8 % 3 + 1; 16],
            random: [round as u8; 16],
            port: 1,
            path: round,
            local: 0,
            remote: 200,
            addresses: Addresses::default(),
        };
        let mut peer = TcpStream::connect(("127.0.0.1", b.port())).unwrap();
        let (key, said) = (
            JobKey::new(handle.token),
            greeting.emit(&JobKey::new(handle.token)),
        );
        peer.write_all(&said).unwrap();
        let mut challenge = [0; CHALLENGE];
        peer.read_exact(&mut challenge).unwrap();
        let met = Met::of_challenge(&challenge, &key, tag_of(&said)).unwrap();
        peer.write_all(&met.proof(&key, [0; 16])).unwrap();
        let mut bytes = Vec::new();
        for number in 0..20u64 {
            let frame = Frame::Chunk {
                comm: send.id,
                message: number % 3,
                offset: number,
                length: 5,
                total: 100 + number,
                stamp: 0,
                heard: 0,
            };
            bytes.extend_from_slice(&frame.emit());
            bytes.extend_from_slice(b"12345");
        }
        for byte in bytes.iter_mut().skip(round as usize % 3 * 53) {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte ^= if seed >> 60 == 0 {
                (seed >> 32) as u8
            } else {
                0
            };
        }
        let _ = peer.write_all(&bytes);
    }
    for round in 0..20 {
        let (mut from, mut to) = (pattern(round, 100_000), vec![0; 100_000]);
        let posted = post(&b, &receive, &mut to).unwrap();
        let sent = post(&a, &send, &mut from).unwrap();
        finish(posted);
        finish(sent);
        assert_eq!(from, to);
    }
    assert!(!b.is_broken());
}

fn closing_with_requests_in_flight_fails_the_other_end(choice: Choice) {
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    let (send, receive) = pair(&a, &b);
    let (other_send, other_receive) = pair(&a, &b);
    let mut to = vec![0; 4 << 20];
    let posted = post(&b, &receive, &mut to).unwrap();
    let mut from = vec![1; 4 << 20];
    post(&a, &send, &mut from).unwrap();
    a.release(&send);
    drop(from);
    until(|| match posted.test() {
        Status::Pending => None,
        Status::Failed(_) | Status::Done(_) => Some(()),
    });
    b.release(&receive);
    drop(to);
    // The other comm between the same two is untouched.
    let (mut from, mut to) = (pattern(1, 100_000), vec![0; 100_000]);
    let posted = post(&b, &other_receive, &mut to).unwrap();
    let sent = post(&a, &other_send, &mut from).unwrap();
    finish(posted);
    finish(sent);
    assert_eq!(from, to);
}

/// EVENER_NET_TIMEOUT is for networks that are cut: of a process that is gone its host tells.
fn who_ends_without_a_word_is_missed_within_seconds(choice: Choice) {
    let patient = || {
        engine_with(Config {
            engine: choice,
            interfaces: Some("lo".into()),
            workers: 1,
            timeout: 10 * LIMIT, // `until` does not wait that long
            ..Config::default()
        })
    };
    let (a, b) = (patient(), patient());
    let (_send, receive) = pair(&a, &b);
    let mut to = vec![0; 4 << 20];
    let posted = post(&b, &receive, &mut to).unwrap();
    a.stop();
    until(|| match posted.test() {
        Status::Pending => None,
        Status::Failed(_) => Some(()),
        Status::Done(_) => panic!("nothing was sent"),
    });
    b.release(&receive);
}

fn a_message_that_is_too_long_is_refused_on_both_ends(choice: Choice) {
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    let (send, receive) = pair(&a, &b);
    let mut to = vec![0xaa; 100];
    let posted = post(&b, &receive, &mut to).unwrap();
    let mut from = vec![1; 101];
    let sent = post(&a, &send, &mut from).unwrap();
    for slot in [posted, sent] {
        until(|| matches!(slot.test(), Status::Failed(_)).then_some(()));
    }
    assert!(to.iter().all(|byte| *byte == 0xaa));
    for comm in [&send, &receive] {
        let why = comm.failure().unwrap().to_string();
        assert_eq!(why, "a message of 101 bytes came for a buffer of 100");
    }
}

fn a_closed_listener_declines(choice: Choice) {
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    let (listener, mut handle) = b.listen();
    b.close_listener(&listener);
    let refused = until(|| a.connect(&mut handle).err());
    assert!(matches!(refused, Error::Declined));
}

#[test]
fn a_peer_that_is_gone_is_an_error_after_the_timeout_and_not_before() {
    let patient = |timeout| Config {
        interfaces: Some("lo".into()),
        workers: 1,
        flows: 2,
        timeout,
        ..Config::default()
    };
    let a = engine_with(patient(Duration::from_millis(400)));
    let b = engine_with(patient(Duration::from_secs(60)));
    let (send, receive) = pair(&a, &b);
    drop(receive);
    b.stop();
    let gone = Instant::now();
    let mut from = vec![1; 1 << 20];
    let slot = post(&a, &send, &mut from).unwrap();
    until(|| matches!(slot.test(), Status::Failed(_)).then_some(()));
    assert!(gone.elapsed() >= Duration::from_millis(390));
    a.release(&send);
}

fn comms_come_and_go_without_growth(choice: Choice) {
    let (a, b) = (engine(choice, 1), engine(choice, 1));
    drop(pair(&a, &b));
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for round in 0..100 {
        let (send, receive) = pair(&a, &b);
        let (mut from, mut to) = (pattern(round, 1000), vec![0; 1000]);
        let posted = post(&b, &receive, &mut to).unwrap();
        let sent = post(&a, &send, &mut from).unwrap();
        finish(posted);
        finish(sent);
        a.release(&send);
        b.release(&receive);
    }
    // Other tests run in this process: what 100 leaked comms would cost is far above their noise.
    let flows = a.paths().len() + b.paths().len();
    assert!(flows <= 2 * 8 + 4, "{flows} connections");
    assert!(count() < 3000);
}

#[test]
fn processes_with_different_engines_speak_to_each_other() {
    let (a, b) = (engine(Choice::Udp, 1), engine(Choice::Tcp, 1));
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (send, receive) = pair(from, to);
        let (mut bytes, mut into) = (pattern(5, 300_000), vec![0; 300_000]);
        let posted = post(to, &receive, &mut into).unwrap();
        let sent = post(from, &send, &mut bytes).unwrap();
        assert_eq!((finish(posted), finish(sent)), (300_000, 300_000));
        assert_eq!(bytes, into);
    }
}

fn udp(workers: usize) -> Engine {
    engine_with(Config {
        engine: Choice::Udp,
        interfaces: Some("lo".into()),
        workers,
        flows: 4,
        ..Config::default()
    })
}

/// One thread moves all packets of a connection: comms to one process take several.
#[test]
fn comms_are_dealt_out_over_the_threads_of_udp() {
    let (a, b) = (udp(2), udp(2));
    let pairs: Vec<_> = (0..5).map(|_| pair(&a, &b)).collect();
    let of_first = |home: &dyn Fn(usize) -> usize| {
        let first = home(0);
        (0..pairs.len()).filter(|at| home(*at) == first).count()
    };
    assert!((2..=3).contains(&of_first(&|at| pairs[at].0.peer.home)));
    assert!((2..=3).contains(&of_first(&|at| pairs[at].1.peer.home)));
    for (at, (send, receive)) in pairs.iter().enumerate() {
        let (mut bytes, mut into) = (pattern(at, 300_000), vec![0; 300_000]);
        let posted = post(&b, receive, &mut into).unwrap();
        let sent = post(&a, send, &mut bytes).unwrap();
        assert_eq!((finish(posted), finish(sent)), (300_000, 300_000));
        assert_eq!(bytes, into);
    }
}

#[test]
fn a_peer_that_ends_says_so_over_udp() {
    let (a, b) = (engine(Choice::Udp, 1), engine(Choice::Udp, 1));
    let (send, receive) = pair(&a, &b);
    drop(receive);
    b.stop();
    let mut from = vec![1; 1 << 20];
    until(|| {
        // SAFETY: as in `post`; the comm is released before the memory goes.
        match unsafe { a.post(&send, Memory::of(&mut from)) } {
            Err(Error::Comm(_)) => Some(()),
            _ => None,
        }
    });
    a.release(&send);
}

/// A peer that has one comm, takes what comes only when it is told to, and answers a goodbye.
struct Slow {
    stream: TcpStream,
}

impl Slow {
    const TOKEN: [u8; 16] = [1; 16];

    /// Takes the one connection that comes, up to the opening of a comm.
    fn meet(listener: &TcpListener) -> Slow {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let key = JobKey::new(Slow::TOKEN);
        let mut greeting = vec![0; GREETING];
        stream.read_exact(&mut greeting).unwrap();
        let whole = Greeting::length(greeting.first_chunk().unwrap()).unwrap();
        greeting.resize(whole, 0);
        stream.read_exact(&mut greeting[GREETING..]).unwrap();
        assert!(Greeting::parse(&greeting, &key).is_some());
        let (greeting, random) = (tag_of(&greeting), [9; 16]);
        let met = Met { greeting, random };
        stream.write_all(&met.challenge(&key)).unwrap();
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof).unwrap();
        assert!(met.of_proof(&proof, &key).is_some());
        let answer = Answer {
            addresses: Addresses {
                edition: 0,
                list: vec!["127.0.0.1".parse().unwrap()],
            },
        };
        stream.write_all(&answer.emit(&key, &met)).unwrap();
        let mut slow = Slow { stream };
        loop {
            if let Some(Frame::Open { comm, .. }) = slow.hear() {
                let accepted = true;
                slow.say(Frame::Opened { comm, accepted });
                let (message, room) = (0, u64::MAX >> 1);
                slow.say(Frame::Credit {
                    comm,
                    message,
                    room,
                });
                return slow;
            }
        }
    }

    fn say(&mut self, frame: Frame) {
        self.stream.write_all(&frame.emit()).unwrap();
    }

    /// The next frame, its bytes left out; none where the stream is over.
    fn hear(&mut self) -> Option<Frame> {
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header).ok()?;
        let frame = Frame::parse(&header).unwrap();
        let mut bytes = vec![0; frame.payload() as usize];
        self.stream.read_exact(&mut bytes).ok()?;
        Some(frame)
    }
}

/// Its only connection is full when it ends: it must not end before the peer has heard of that.
#[test]
fn a_process_that_ends_in_the_middle_of_a_message_says_goodbye() {
    let config = Config {
        engine: Choice::Tcp,
        interfaces: Some("lo".into()),
        workers: 1,
        flows: 1,
        most_flows: 1,
        ..Config::default()
    };
    let a = engine_with(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = Handle {
        process: [0xff; 16],
        token: Slow::TOKEN,
        listener: 7,
        port: listener.local_addr().unwrap().port(),
        udp: false,
        addresses: vec!["127.0.0.1".parse().unwrap()],
    }
    .emit();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| Slow::meet(&listener));
        let send = until(|| a.connect(&mut handle).unwrap());
        let mut slow = peer.join().unwrap();
        let mut huge = vec![3; 64 << 20];
        post(&a, &send, &mut huge).unwrap();
        // By then the kernel takes no more: its buffers hold some megabytes.
        std::thread::sleep(Duration::from_millis(300));
        let (ending, comm) = (&a, send.clone());
        let end = scope.spawn(move || {
            ending.release(&comm);
            ending.stop();
        });
        std::thread::sleep(Duration::from_millis(20));
        let mut heard = false;
        while let Some(frame) = slow.hear() {
            if let Frame::CloseSend { comm } = frame {
                heard = true;
                let of_send = true;
                slow.say(Frame::Closed { comm, of_send });
            }
        }
        assert!(heard, "it ended without a goodbye");
        end.join().unwrap();
    });
}
