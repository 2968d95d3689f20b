//! Bulk, and a message of 64 KiB now and then, between processes, by the engine that EVENER_NET_ENGINE
//! names or by plain TCP streams. benchmarks/net_lossy.py runs it in labs.
//!
//!     engine_bench receive ADDRESS:PORT SENDERS [tcp]
//!     engine_bench send ADDRESS:PORT SECONDS [tcp]
//!
//! The receiver takes what its senders send, each from when it comes, until all have ended, and prints
//! the bytes of each. A sender prints what was acknowledged by its peer, in all and in the second half of
//! its time, how long the small messages took, and the longest time without an acknowledgement. Each
//! prints one line of JSON. Messages that have not ended count for nothing: a run must be long beside the
//! 2 MiB in flight per sender.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench may panic")]
#![allow(
    unsafe_code,
    reason = "memory is lent to the engine, and kept until its end"
)]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::hello::HANDLE;
use evener_engine::settings::{Process, Settings};
use evener_engine::{Engine, Memory, Slot, Status};

const BULK: usize = 256 << 10;
const DEPTH: usize = 8;
const SMALL: usize = 64 << 10;
const EVERY: Duration = Duration::from_millis(20);

fn engine() -> Engine {
    let settings = Settings::read(&Process).expect("settings");
    let verbose = std::env::var_os("EVENER_DRIVE_LOG").is_some();
    let log = move |level, text: &str| {
        if verbose {
            eprintln!("{level:?} {text}");
        }
    };
    Engine::start(settings.config, Box::new(log)).expect("an engine")
}

/// One comm and its requests, with memory of their own.
struct Flow<'a> {
    engine: &'a Engine,
    comm: &'a Comm,
    buffers: Vec<Vec<u8>>,
    flying: VecDeque<(&'a Slot, usize, Instant)>,
    free: Vec<usize>,
}

impl<'a> Flow<'a> {
    fn new(engine: &'a Engine, comm: &'a Comm, size: usize, depth: usize) -> Flow<'a> {
        Flow {
            engine,
            comm,
            buffers: vec![vec![7; size]; depth],
            flying: VecDeque::new(),
            free: (0..depth).collect(),
        }
    }

    /// Posts what can be; `false`: the comm is over.
    fn post(&mut self) -> bool {
        while let Some(place) = self.free.pop() {
            let memory = Memory::of(&mut self.buffers[place]);
            // SAFETY: buffers are not touched and live until the comm is released.
            match unsafe { self.engine.post(self.comm, memory) } {
                Ok(Some(slot)) => self.flying.push_back((slot, place, Instant::now())),
                Ok(None) => {
                    self.free.push(place);
                    return true;
                }
                Err(_) => return false,
            }
        }
        true
    }

    /// The next finished request: its bytes, and how long it took. `Err`: the comm is over.
    fn done(&mut self) -> Result<Option<(usize, Duration)>, ()> {
        let Some((slot, place, at)) = self.flying.front().copied() else {
            return Ok(None);
        };
        match slot.test() {
            Status::Pending => Ok(None),
            Status::Failed(_) => Err(()),
            Status::Done(bytes) => {
                self.flying.pop_front();
                self.free.push(place);
                Ok(Some((bytes, at.elapsed())))
            }
        }
    }
}

fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(value) = step() {
            return value;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What a sender measured.
#[derive(Default)]
struct Report {
    bytes: u64,
    /// Bytes before half of the time was over.
    early: Option<u64>,
    seconds: f64,
    took: Vec<f64>,
    stall: Duration,
}

impl Report {
    fn print(mut self, name: &str) {
        self.took.sort_by(f64::total_cmp);
        let part = |share: f64| {
            let at = (self.took.len() as f64 * share) as usize;
            self.took.get(at.min(self.took.len().saturating_sub(1)))
        };
        let ms = |share: f64| part(share).copied().unwrap_or(f64::NAN) * 1e3;
        println!(
            "{{\"engine\": \"{name}\", \"gbit_s\": {:.4}, \"late_gbit_s\": {:.4}, \"small\": {}, \"p50_ms\": {:.2}, \"p99_ms\": {:.2}, \"stall_ms\": {:.1}}}",
            self.bytes as f64 * 8e-9 / self.seconds,
            (self.bytes - self.early.unwrap_or(0)) as f64 * 16e-9 / self.seconds,
            self.took.len(),
            ms(0.5),
            ms(0.99),
            self.stall.as_secs_f64() * 1e3,
        );
    }
}

fn send(to: &str, seconds: f64) -> Report {
    let engine = engine();
    let mut meeting = until(|| TcpStream::connect(to).ok());
    let mut comms: Vec<Arc<Comm>> = Vec::new();
    for _ in 0..2 {
        let mut handle = [0; HANDLE];
        meeting.read_exact(&mut handle).expect("a handle");
        comms.push(until(|| engine.connect(&mut handle).expect("a comm")));
    }
    let mut report = Report::default();
    let mut bulk = Flow::new(&engine, &comms[0], BULK, DEPTH);
    let mut small = Flow::new(&engine, &comms[1], SMALL, 1);
    let (begun, time) = (Instant::now(), Duration::from_secs_f64(seconds));
    let (mut last, mut next) = (begun, begun + EVERY);
    while begun.elapsed() < time {
        if begun.elapsed() >= time / 2 {
            report.early.get_or_insert(report.bytes);
        }
        assert!(bulk.post(), "the comm failed");
        if Instant::now() >= next {
            next = Instant::now() + EVERY;
            assert!(small.post(), "the comm failed");
        }
        let mut any = false;
        for (of, flow) in [&mut bulk, &mut small].into_iter().enumerate() {
            while let Some((bytes, took)) = flow.done().expect("the comm failed") {
                report.bytes += bytes as u64;
                report.stall = report.stall.max(last.elapsed());
                last = Instant::now();
                any = true;
                if of == 1 {
                    report.took.push(took.as_secs_f64());
                }
            }
        }
        if !any {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    report.stall = report.stall.max(last.elapsed());
    report.seconds = begun.elapsed().as_secs_f64();
    for comm in &comms {
        engine.release(comm);
    }
    report
}

fn receive(at: &str, senders: usize) {
    let engine = engine();
    let door = TcpListener::bind(at).expect("a port");
    let begun = OnceLock::new();
    let bytes: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..senders)
            .map(|_| {
                let (meeting, _) = door.accept().expect("a sender");
                scope.spawn(|| serve(&engine, meeting, &begun))
            })
            .collect();
        let joined = threads.into_iter().map(|one| one.join().expect("a thread"));
        joined.collect()
    });
    print_bytes(&bytes, begun.get().copied());
}

/// Takes what one sender sends, until it ends; the bytes.
fn serve(engine: &Engine, mut meeting: TcpStream, begun: &OnceLock<Instant>) -> u64 {
    let comms: Vec<Arc<Comm>> = (0..2)
        .map(|_| {
            let (listener, handle) = engine.listen();
            meeting.write_all(&handle).expect("a sender");
            until(|| engine.accept(&listener).expect("a comm"))
        })
        .collect();
    let mut flows = [
        Some(Flow::new(engine, &comms[0], BULK, DEPTH)),
        Some(Flow::new(engine, &comms[1], SMALL, 2)),
    ];
    let mut bytes = 0;
    while flows.iter().any(Option::is_some) {
        let mut any = false;
        for place in &mut flows {
            let Some(flow) = place else {
                continue;
            };
            let mut over = !flow.post();
            loop {
                match flow.done() {
                    Ok(Some((more, _))) => {
                        begun.get_or_init(Instant::now);
                        bytes += more as u64;
                        any = true;
                    }
                    Ok(None) => break,
                    Err(()) => {
                        over = true;
                        break;
                    }
                }
            }
            if over {
                *place = None;
            }
        }
        if !any {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    for comm in &comms {
        engine.release(comm);
    }
    bytes
}

fn print_bytes(bytes: &[u64], begun: Option<Instant>) {
    let seconds = begun.map_or(f64::NAN, |begun| begun.elapsed().as_secs_f64());
    println!("{{\"bytes\": {bytes:?}, \"seconds\": {seconds:.3}}}");
}

/// A stream: what is written, and the peer's word of what it has read in all.
fn stream(to: &str) -> (TcpStream, TcpStream) {
    let stream = until(|| TcpStream::connect(to).ok());
    stream.set_nodelay(true).expect("a socket");
    (stream.try_clone().expect("a socket"), stream)
}

fn hear(stream: &mut TcpStream) -> Option<u64> {
    let mut word = [0; 8];
    stream.read_exact(&mut word).ok()?;
    Some(u64::from_le_bytes(word))
}

fn send_tcp(to: &str, seconds: f64) -> Report {
    let ((mut bulk, mut answers), (mut small, mut echoes)) = (stream(to), stream(to));
    let (begun, time) = (Instant::now(), Duration::from_secs_f64(seconds));
    let writer = std::thread::spawn(move || {
        let data = vec![7; BULK];
        while begun.elapsed() < time && bulk.write_all(&data).is_ok() {}
        let _ = bulk.shutdown(std::net::Shutdown::Both);
    });
    let probe = std::thread::spawn(move || {
        let (data, mut took, mut early) = (vec![7; SMALL], Vec::new(), 0);
        while begun.elapsed() < time {
            std::thread::sleep(EVERY);
            let at = Instant::now();
            if small.write_all(&data).is_err() {
                break;
            }
            let wanted = (took.len() + 1) * SMALL;
            while let Some(got) = hear(&mut echoes)
                && got < wanted as u64
            {}
            took.push(at.elapsed().as_secs_f64());
            if begun.elapsed() < time / 2 {
                early = took.len();
            }
        }
        let _ = small.shutdown(std::net::Shutdown::Both);
        (took, early)
    });
    let mut report = Report::default();
    let mut last = begun;
    while begun.elapsed() < time
        && let Some(bytes) = hear(&mut answers)
    {
        if begun.elapsed() >= time / 2 {
            report.early.get_or_insert(report.bytes);
        }
        report.bytes = bytes;
        report.stall = report.stall.max(last.elapsed());
        last = Instant::now();
    }
    report.seconds = begun.elapsed().as_secs_f64();
    let (took, early) = probe.join().expect("the probe");
    report.took = took;
    report.early = report.early.map(|bytes| bytes + (early * SMALL) as u64);
    report.bytes += (report.took.len() * SMALL) as u64;
    let _ = writer.join();
    report
}

fn receive_tcp(at: &str, senders: usize) {
    let door = TcpListener::bind(at).expect("a port");
    let begun = Instant::now();
    let threads: Vec<_> = (0..2 * senders)
        .map(|_| {
            let (mut stream, from) = door.accept().expect("a sender");
            let reader = std::thread::spawn(move || {
                let (mut buffer, mut bytes) = (vec![0; 256 << 10], 0u64);
                while let Ok(got) = stream.read(&mut buffer)
                    && got > 0
                {
                    bytes += got as u64;
                    if stream.write_all(&bytes.to_le_bytes()).is_err() {
                        break;
                    }
                }
                bytes
            });
            (from.ip(), reader)
        })
        .collect();
    let mut bytes: Vec<(std::net::IpAddr, u64)> = Vec::new();
    for (from, reader) in threads {
        let more = reader.join().expect("a reader");
        match bytes.iter_mut().find(|one| one.0 == from) {
            Some(one) => one.1 += more,
            None => bytes.push((from, more)),
        }
    }
    let bytes: Vec<u64> = bytes.into_iter().map(|one| one.1).collect();
    print_bytes(&bytes, Some(begun));
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |at: usize| args.get(at).map(String::as_str).unwrap_or_default();
    let name = std::env::var("EVENER_NET_ENGINE").unwrap_or_else(|_| "tcp".into());
    match (text(0), text(3)) {
        ("receive", "tcp") => receive_tcp(text(1), text(2).parse().expect("SENDERS")),
        ("receive", _) => receive(text(1), text(2).parse().expect("SENDERS")),
        ("send", "tcp") => send_tcp(text(1), text(2).parse().expect("SECONDS")).print("stream"),
        ("send", _) => send(text(1), text(2).parse().expect("SECONDS")).print(&name),
        _ => eprintln!(
            "error: no role\n  fix: engine_bench receive ADDRESS:PORT SENDERS [tcp], or \
             engine_bench send ADDRESS:PORT SECONDS [tcp]"
        ),
    }
}
