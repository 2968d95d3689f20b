//! NCCL's reader over a real network: lines that were torn when their flag had come (see
//! tests/common/lines.rs). tests/twins/net.py runs it in labs.
//!
//!     lines receive ADDRESS:PORT
//!     lines send ADDRESS:PORT
//!
//! Both are told the same on their standard input, a line each, and answer each job with a line of JSON:
//!
//!     job ll|ll128 BYTES LINES SEED      messages of up to BYTES, LINES lines of 128 bytes in all
//!     faults [any-cut] [any-order] [by-kernel] [unfinished]      mistakes that are made from here on, and
//!     no others

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench may panic")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use evener_engine::Engine;
use evener_engine::hello::HANDLE;
use evener_engine::settings::{Process, Settings};
use evener_proto::faults::{self, Fault};
use lines::{Form, Job, Seen};

#[path = "../tests/common/lines.rs"]
mod lines;

fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(value) = step() {
            return value;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn fault(name: &str) -> Fault {
    match name {
        "any-cut" => Fault::AnyCut,
        "any-order" => Fault::AnyOrder,
        "by-kernel" => Fault::ByKernel,
        "unfinished" => Fault::Unfinished,
        _ => panic!("no fault {name}"),
    }
}

fn job(words: &[&str]) -> Job {
    let [form, most, lines, seed] = words else {
        panic!("a job is: ll|ll128 BYTES LINES SEED");
    };
    Job {
        form: if *form == "ll" { Form::Ll } else { Form::Ll128 },
        most: most.parse().expect("bytes"),
        lines: lines.parse().expect("lines"),
        seed: seed.parse().expect("a seed"),
    }
}

fn run(engine: &Engine, sends: bool, meeting: &mut TcpStream, job: Job) -> Seen {
    if sends {
        let mut handle = [0; HANDLE];
        meeting.read_exact(&mut handle).expect("a handle");
        let comm = until(|| engine.connect(&mut handle).expect("a comm"));
        lines::send(engine, &comm, job);
        meeting.write_all(&[0]).expect("a receiver");
        engine.release(&comm);
        return Seen::default();
    }
    let (listener, handle) = engine.listen();
    meeting.write_all(&handle).expect("a sender");
    let comm = until(|| engine.accept(&listener).expect("a comm"));
    let seen = lines::receive(engine, &comm, job);
    // It has heard that all has arrived.
    meeting.read_exact(&mut [0]).expect("a sender");
    engine.close_listener(&listener);
    engine.release(&comm);
    seen
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [role, at] = &words[..] else {
        panic!("lines receive|send ADDRESS:PORT");
    };
    let sends = role == "send";
    let verbose = std::env::var_os("EVENER_DRIVE_LOG").is_some();
    let log = move |level, text: &str| {
        if verbose {
            eprintln!("{level:?} {text}");
        }
    };
    let settings = Settings::read(&Process).expect("settings");
    let engine = Engine::start(settings.config, Box::new(log)).expect("an engine");
    let mut meeting = if sends {
        until(|| TcpStream::connect(at).ok())
    } else {
        let door = TcpListener::bind(at).expect("a port");
        door.accept().expect("a sender").0
    };
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.split_first() {
            Some((&"job", rest)) => {
                let began = Instant::now();
                let seen = run(&engine, sends, &mut meeting, job(rest));
                println!(
                    "{{\"lines\": {}, \"torn\": {}, \"early\": {}, \"messages\": {}, \"seconds\": {:.3}}}",
                    seen.lines,
                    seen.torn,
                    seen.early,
                    seen.messages,
                    began.elapsed().as_secs_f64()
                );
            }
            Some((&"faults", names)) => {
                let made: Vec<Fault> = names.iter().copied().map(fault).collect();
                faults::put(&made);
            }
            _ => panic!("neither a job nor faults: {line}"),
        }
    }
    engine.stop();
}
