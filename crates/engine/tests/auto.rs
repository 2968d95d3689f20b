//! EVENER_NET_ENGINE=auto between two engines of this process: they measure, agree, and end in time.

#![allow(unsafe_code, reason = "memory is lent to the engine as NCCL lends it")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Choice, Config, Engine, Memory, Status};

const LIMIT: Duration = Duration::from_secs(60);

type Said = Arc<Mutex<Vec<String>>>;

fn engine(choice: Choice) -> (Engine, Said) {
    let said = Said::default();
    let lines = said.clone();
    let config = Config {
        engine: choice,
        interfaces: Some("lo".into()),
        workers: 1,
        flows: 4,
        most_flows: 8,
        measure_here: true,
        ..Config::default()
    };
    let log = move |_, text: &str| {
        if text.starts_with("auto: ") {
            lines.lock().unwrap().push(text.to_string());
        }
    };
    (Engine::start(config, Box::new(log)).unwrap(), said)
}

fn pair(a: &Engine, b: &Engine) -> (Arc<Comm>, Arc<Comm>) {
    let (listener, mut handle) = b.listen();
    let (mut send, mut receive) = (None, None);
    let end = Instant::now() + LIMIT;
    while send.is_none() || receive.is_none() {
        send = send.or_else(|| a.connect(&mut handle).unwrap());
        receive = receive.or_else(|| b.accept(&listener).unwrap());
        assert!(Instant::now() < end, "no comm in {LIMIT:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
    b.close_listener(&listener);
    (send.unwrap(), receive.unwrap())
}

fn carry(a: &Engine, b: &Engine) {
    let (send, receive) = pair(a, b);
    let (mut from, mut to) = (vec![7u8; 300_000], vec![0u8; 300_000]);
    // SAFETY: both comms are released before the memory goes.
    let (posted, sent) = unsafe {
        let posted = b.post(&receive, Memory::of(&mut to)).unwrap().unwrap();
        let sent = a.post(&send, Memory::of(&mut from)).unwrap().unwrap();
        (posted, sent)
    };
    let end = Instant::now() + LIMIT;
    for slot in [posted, sent] {
        while slot.test() != Status::Done(300_000) {
            assert!(Instant::now() < end, "nothing arrived in {LIMIT:?}");
            std::thread::yield_now();
        }
    }
    a.release(&send);
    b.release(&receive);
    assert_eq!(from, to);
}

/// The second word of each line: what was taken.
fn carriers(said: &Said) -> Vec<String> {
    let lines = said.lock().unwrap();
    let word = |line: &String| line.split_whitespace().nth(1).map(String::from);
    lines.iter().filter_map(word).collect()
}

#[test]
fn both_measure_once_and_take_the_same() {
    let ((a, said_a), (b, said_b)) = (engine(Choice::Auto), engine(Choice::Auto));
    carry(&a, &b);
    carry(&b, &a);
    // What was measured holds.
    let begun = Instant::now();
    carry(&a, &b);
    assert!(begun.elapsed() < Duration::from_secs(5));
    let (of_a, of_b) = (carriers(&said_a), carriers(&said_b));
    let all = || {
        let both = [said_a.lock().unwrap(), said_b.lock().unwrap()];
        both.iter()
            .flat_map(|lines| lines.iter().cloned())
            .collect::<Vec<_>>()
    };
    assert_eq!((of_a.len(), of_b.len()), (1, 1), "{:?}", all());
    assert_eq!(of_a, of_b, "{:?}", all());
    let measured = all().iter().filter(|line| line.contains("MB/s")).count();
    assert_eq!(measured, 1, "{:?}", all());
}

#[test]
fn who_does_not_measure_gets_tcp_at_once() {
    let (a, said) = engine(Choice::Auto);
    for choice in [Choice::Tcp, Choice::Udp] {
        let (b, _) = engine(choice);
        carry(&a, &b);
        carry(&b, &a);
    }
    assert_eq!(carriers(&said), ["tcp", "tcp"]);
    let lines = said.lock().unwrap();
    assert!(
        lines.iter().all(|line| line.contains("does not measure")),
        "{lines:?}"
    );
}

#[test]
fn an_engine_that_measures_stops_when_it_is_told_to() {
    for wait in [0, 30, 200] {
        let ((a, _), (b, _)) = (engine(Choice::Auto), engine(Choice::Auto));
        for (from, to) in [(&a, &b), (&b, &a)] {
            let (_, mut handle) = to.listen();
            let _ = from.connect(&mut handle).unwrap();
        }
        std::thread::sleep(Duration::from_millis(wait));
        let begun = Instant::now();
        a.stop();
        b.stop();
        assert!(begun.elapsed() < LIMIT / 4, "{:?}", begun.elapsed());
    }
}
