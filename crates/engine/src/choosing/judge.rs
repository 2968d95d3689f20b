//! The thread that measures, asks and tells.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_proto::accord::{Carrier, Do, Measured, better};

use super::load;
use super::words::{self, Word};
use super::{LISTENER, Pair, Running, State, transport};
use crate::callers::Callers;
use crate::hello::{Handle, ProcessId};
use crate::lock::lock;
use crate::log::Level;
use crate::peer::Transport;
use crate::shared::Shared;
use crate::slots::Status;
use crate::sys::Memory;

/// The turn of this host is waited for as long.
const TURN: Duration = Duration::from_secs(4);
/// Each carrier is measured so often, in turn, and its best counts: others use the network as well.
const ROUNDS: usize = 2;
/// A word must arrive in this time.
const WORD_TIME: Duration = Duration::from_millis(1500);

/// See the module.
pub(crate) struct Judge {
    _running: Running,
    callers: Callers,
    /// What was measured, by the addresses of a host.
    hosts: Vec<(Handle, [Option<Measured>; 2])>,
}

/// The right to measure on this host: a name that the kernel gives to one process of a network namespace
/// at a time, and takes back when it ends.
struct Turn(#[allow(dead_code, reason = "it is held")] UnixListener);

fn turn() -> Option<Turn> {
    let name = SocketAddr::from_abstract_name(b"evener-net-measures").ok()?;
    UnixListener::bind_addr(&name).ok().map(Turn)
}

fn best(one: Option<Measured>, other: Option<Measured>) -> Option<Measured> {
    match (one, other) {
        (Some(one), Some(other)) => Some(Measured {
            rate: one.rate.max(other.rate),
            small: one.small.min(other.small),
            again: one.again.max(other.again),
        }),
        (one, other) => one.or(other),
    }
}

fn words(figures: Option<&Measured>) -> String {
    match figures {
        Some(of) => format!(
            "{:.1} MB/s, 64 KiB in {:.2} ms, {} packets again",
            of.rate / 1e6,
            of.small.as_secs_f64() * 1e3,
            of.again
        ),
        None => "does not come through".into(),
    }
}

impl Judge {
    pub(crate) fn new(shared: Arc<Shared>) -> Judge {
        Judge {
            _running: Running::new(&shared),
            callers: Callers { shared },
            hosts: Vec::new(),
        }
    }

    /// Runs until it is told to stop.
    pub(crate) fn run(mut self) {
        let shared = self.callers.shared.clone();
        let choosing = &shared.choosing;
        let _ = choosing.judge.set(std::thread::current());
        while !choosing.stops() {
            let next = lock(&choosing.state).todo.pop_front();
            match next {
                Some((process, what)) => self.act(process, what),
                None => std::thread::park_timeout(Duration::from_secs(1)),
            }
            let now = shared.started.elapsed();
            let mut state = lock(&choosing.state);
            let State { pairs, todo, .. } = &mut *state;
            for (process, pair) in pairs {
                todo.extend(pair.accord.on_time(now).map(|what| (*process, what)));
            }
        }
    }

    fn act(&mut self, process: ProcessId, what: Do) {
        let shared = self.callers.shared.clone();
        let handle = lock(&shared.choosing.state)
            .pairs
            .get(&process)
            .map(|pair| pair.handle.clone());
        let Some(handle) = handle else {
            return;
        };
        match what {
            Do::Ask => self.say(&handle, Word::Ask),
            Do::Tell(carrier) => self.say(&handle, Word::Tell(carrier)),
            Do::Measure => {
                let begun = Instant::now();
                let (carrier, figures) = self.measure(&handle);
                let figures = format!("{figures} (in {} ms)", begun.elapsed().as_millis());
                let mut state = lock(&shared.choosing.state);
                let what = state.pairs.get_mut(&process).and_then(|pair: &mut Pair| {
                    let what = pair.accord.measured(carrier);
                    if let Some(settled) = pair.accord.settled() {
                        pair.say(settled, &shared, &figures);
                    }
                    what
                });
                state.push(process, what);
            }
        }
    }

    /// The better carrier to a process, `None` if it cannot be known; and why.
    fn measure(&mut self, to: &Handle) -> (Option<Carrier>, String) {
        let known = self
            .hosts
            .iter()
            .find(|(host, _)| host.addresses == to.addresses);
        let figures = match known {
            Some((_, figures)) => *figures,
            None => {
                let begun = Instant::now();
                let turn = loop {
                    if let Some(turn) = turn() {
                        break turn;
                    }
                    if begun.elapsed() > TURN || self.callers.shared.choosing.stops() {
                        return (None, "other processes of this host measure".into());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                };
                let mut figures = [None; 2];
                for round in 0..ROUNDS {
                    for (place, carrier) in [Carrier::Tcp, Carrier::Udp].into_iter().enumerate() {
                        // Who does not come through is not waited for twice.
                        if round == 0 || figures[place].is_some() {
                            let now = load::measure(&self.callers, to, transport(carrier));
                            figures[place] = best(figures[place], now);
                        }
                    }
                }
                drop(turn);
                self.hosts.push((to.clone(), figures));
                figures
            }
        };
        let text = format!(
            "tcp {}; udp {}",
            words(figures[0].as_ref()),
            words(figures[1].as_ref())
        );
        let carrier = match figures {
            [Some(tcp), Some(udp)] => Some(better(&tcp, &udp)),
            [Some(_), None] => Some(Carrier::Tcp),
            [None, Some(_)] => Some(Carrier::Udp),
            [None, None] => None,
        };
        (carrier, text)
    }

    /// Says a word to a process, over TCP.
    fn say(&self, to: &Handle, word: Word) {
        let shared = &self.callers.shared;
        let mut bytes = words::emit(word, &self.callers.handle(LISTENER));
        let comm = self.callers.open(to, Transport::Tcp);
        let begun = Instant::now();
        let mut arrived = false;
        if load::accepted(&self.callers, &comm, WORD_TIME) {
            let memory = Memory::of(&mut bytes);
            // SAFETY: the bytes live until the comm is released, below.
            #[allow(unsafe_code, reason = "see above")]
            let slot = unsafe { self.callers.post(&comm, memory) };
            if let Ok(Some(slot)) = slot {
                while begun.elapsed() < WORD_TIME && !shared.choosing.stops() {
                    match slot.test() {
                        Status::Pending => std::thread::sleep(Duration::from_micros(100)),
                        Status::Done(_) => {
                            arrived = true;
                            break;
                        }
                        Status::Failed(_) => break,
                    }
                }
            }
        }
        self.callers.release(&comm);
        if !arrived && !shared.choosing.stops() {
            let text = format!("auto: {word:?} did not reach {}", super::name(to));
            shared.log(Level::Debug, &text);
        }
    }
}
