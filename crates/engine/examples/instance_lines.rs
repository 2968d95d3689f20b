//! Messages between two engines of this process over UDP, with several instances each, so that a tool can look
//! at what their threads share: scripts/lines.py does.
//!
//!     instance_lines [SECONDS] [COMMS]
//!
//! EVENER_NET_WORKERS is the number of instances; EVENER_NET_ENGINE has to be udp. It prints one line of JSON.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench may panic")]
#![allow(
    unsafe_code,
    reason = "memory is lent to the engine, and kept until its end"
)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::settings::{Process, Settings};
use evener_engine::{Engine, Memory, Slot, Status};

const BYTES: usize = 64 << 10;
const DEPTH: usize = 4;

/// Callers' memory ends where a cache line does, as NCCL's does: what two instances would share otherwise is none of
/// the engine's.
#[derive(Clone, Copy)]
#[repr(align(128))]
struct Aligned {
    _bytes: [u8; 128],
}

/// A comm and its memory.
struct Flow {
    comm: Arc<Comm>,
    buffers: Vec<Vec<Aligned>>,
}

fn engine() -> Engine {
    let settings = Settings::read(&Process).expect("settings");
    Engine::start(settings.config, Box::new(|_, _| {})).expect("an engine")
}

/// Keeps all comms of one engine busy: how many requests have ended.
fn drive(engine: &Engine, flows: &mut [Flow], end: Instant) -> u64 {
    let mut done = 0;
    let mut flying: Vec<VecDeque<(&Slot, usize)>> = Vec::new();
    let mut free: Vec<Vec<usize>> = Vec::new();
    for _ in flows.iter() {
        flying.push(VecDeque::new());
        free.push((0..DEPTH).collect());
    }
    let flows: Vec<(&Comm, Vec<Memory>)> = flows
        .iter_mut()
        .map(|flow| {
            let memory = flow.buffers.iter_mut().map(|one| Memory {
                start: one.as_mut_ptr().cast(),
                length: BYTES,
            });
            (&*flow.comm, memory.collect())
        })
        .collect();
    while Instant::now() < end {
        for (at, (comm, memory)) in flows.iter().enumerate() {
            while let Some(place) = free[at].pop() {
                // SAFETY: buffers are not touched and live until the comm is released.
                match unsafe { engine.post(comm, memory[place]) }.expect("a comm") {
                    Some(slot) => flying[at].push_back((slot, place)),
                    None => {
                        free[at].push(place);
                        break;
                    }
                }
            }
            while let Some((slot, place)) = flying[at].front() {
                match slot.test() {
                    Status::Pending => break,
                    Status::Done(_) => {
                        done += 1;
                        free[at].push(*place);
                        flying[at].pop_front();
                    }
                    Status::Failed(why) => panic!("a request failed: {why}"),
                }
            }
        }
        std::thread::yield_now();
    }
    done
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, default: f64| args.get(at).map_or(Some(default), |text| text.parse().ok());
    let (Some(seconds), Some(comms)) = (number(0, 3.0), number(1, 4.0)) else {
        eprintln!("error: {args:?}\n  fix: instance_lines SECONDS COMMS, two numbers");
        std::process::exit(2);
    };
    let (a, b) = (engine(), engine());
    let (mut send, mut receive) = (Vec::new(), Vec::new());
    for _ in 0..comms as usize {
        let (listener, mut handle) = b.listen();
        let (mut out, mut into) = (None, None);
        while out.is_none() || into.is_none() {
            if out.is_none() {
                out = a.connect(&mut handle).expect("a comm");
            }
            if into.is_none() {
                into = b.accept(&listener).expect("a comm");
            }
            std::thread::yield_now();
        }
        b.close_listener(&listener);
        for (all, comm) in [(&mut send, out), (&mut receive, into)] {
            all.push(Flow {
                comm: comm.expect("it is there"),
                buffers: vec![vec![Aligned { _bytes: [7; 128] }; BYTES / 128]; DEPTH],
            });
        }
    }
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let (sent, received) = std::thread::scope(|scope| {
        let spawn = |name: &str, engine, flows| {
            let thread = std::thread::Builder::new().name(name.into());
            thread
                .spawn_scoped(scope, move || drive(engine, flows, end))
                .expect("a thread")
        };
        let from = spawn("caller-a", &a, &mut send[..]);
        let to = spawn("caller-b", &b, &mut receive[..]);
        (from.join().expect("a caller"), to.join().expect("a caller"))
    });
    for (engine, flows) in [(&a, &send), (&b, &receive)] {
        for flow in flows {
            engine.release(&flow.comm);
        }
    }
    println!("{{\"sent\": {sent}, \"received\": {received}, \"bytes\": {BYTES}}}");
}
