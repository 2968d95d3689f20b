//! TCP or UDP to a peer, where EVENER_NET_ENGINE=auto leaves it to a measurement.
//!
//! # Who does what
//! - Callers ask ([`Choosing::transport`]) when a comm is to be opened, and come back while it is not
//!   known: connecting does not block.
//! - The [`Judge`], a thread, does what an [`Accord`] of two processes wants: it measures ([`load`]), asks
//!   the other process, tells it.
//! - The [`Server`], a thread, answers at a listener of its own: it takes the load of those who measure,
//!   and hears what they ask and tell.
//!
//! Both use comms as callers do, so what is measured is what NCCL would get. Both sleep where there is
//! nothing to do, which is always but at the start of a job.
//!
//! # In time
//! A measurement takes half a second, and some seconds where a carrier does not come through. All
//! processes of a host measure one after the other, and wait for that for some seconds at most. Who hears
//! nothing takes TCP, and says so.
//!
//! What was measured holds for all processes with the same addresses as the one that was measured (its
//! host), and for as long as this process runs.

mod judge;
mod load;
mod server;
mod words;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use evener_proto::accord::{Accord, Carrier, Do, Reason};

use crate::hello::{Handle, ProcessId};
use crate::lock::lock;
use crate::log::Level;
use crate::peer::Transport;
use crate::shared::Shared;

pub(crate) use judge::Judge;
pub(crate) use server::Server;

/// The listener of those who measure: no other has this number.
pub(crate) const LISTENER: u64 = 0;
/// For so long a carrier is waited for.
const PATIENCE: Duration = Duration::from_secs(6);

/// A pair of processes, this one and another.
struct Pair {
    accord: Accord,
    /// Leads to the other's listener for those who measure.
    handle: Handle,
    /// What was logged.
    said: Option<(Carrier, Reason)>,
}

#[derive(Default)]
struct State {
    pairs: HashMap<ProcessId, Pair>,
    /// What the judge has to do.
    todo: VecDeque<(ProcessId, Do)>,
    /// Processes that get TCP without a measurement, and were spoken of.
    plain: HashSet<ProcessId>,
}

/// What is known of all pairs.
#[derive(Default)]
pub(crate) struct Choosing {
    state: Mutex<State>,
    judge: OnceLock<Thread>,
    server: OnceLock<Thread>,
    stops: AtomicBool,
    running: AtomicUsize,
}

fn transport(carrier: Carrier) -> Transport {
    match carrier {
        Carrier::Tcp => Transport::Tcp,
        Carrier::Udp => Transport::Udp,
    }
}

impl State {
    fn push(&mut self, process: ProcessId, what: Option<Do>) {
        // What is said to others takes little, and they wait for it.
        match what {
            Some(Do::Measure) => self.todo.push_back((process, Do::Measure)),
            Some(what) => self.todo.push_front((process, what)),
            None => {}
        }
    }

    /// The pair with the process that this handle leads to.
    fn pair(&mut self, own: ProcessId, to: &Handle) -> &mut Pair {
        let pair = || Pair {
            accord: Accord::new(own < to.process, PATIENCE),
            handle: Handle {
                listener: LISTENER,
                ..to.clone()
            },
            said: None,
        };
        self.pairs.entry(to.process).or_insert_with(pair)
    }
}

impl Choosing {
    /// What carries comms to this process; `None`: ask again.
    pub(crate) fn transport(&self, shared: &Shared, to: &Handle) -> Option<Transport> {
        let here = to
            .addresses
            .iter()
            .any(|ip| ip.is_loopback() || shared.nics.iter().any(|nic| nic.address == *ip));
        let why = if !to.measures {
            Some("it does not measure (EVENER_NET_ENGINE is not auto there)")
        } else if here && !shared.config.measure_here {
            Some("it is on this host")
        } else {
            None
        };
        let mut state = lock(&self.state);
        if let Some(why) = why {
            if state.plain.insert(to.process) {
                let text = format!("auto: tcp to {}: {why}", name(to));
                shared.log(Level::Debug, &text);
            }
            return Some(Transport::Tcp);
        }
        let now = shared.started.elapsed();
        let pair = state.pair(shared.process, to);
        let late = pair.accord.on_time(now);
        let wants = pair.accord.want(now);
        let settled = pair.accord.settled();
        if let Some(settled) = settled {
            pair.say(settled, shared, "");
        }
        state.push(to.process, late);
        state.push(to.process, wants);
        let wake = !state.todo.is_empty();
        drop(state);
        if wake && let Some(judge) = self.judge.get() {
            judge.unpark();
        }
        settled.map(|(carrier, _)| transport(carrier))
    }

    /// Something arrived at the listener of those who measure.
    pub(crate) fn offered(&self) {
        if let Some(server) = self.server.get() {
            server.unpark();
        }
    }

    /// Ends both threads, and waits for that: they use comms, which workers must end.
    pub(crate) fn stop(&self) {
        self.stops.store(true, Ordering::SeqCst);
        for thread in [&self.judge, &self.server] {
            if let Some(thread) = thread.get() {
                thread.unpark();
            }
        }
        while self.running.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::SeqCst)
    }

    /// The other process of a pair asks; its handle leads to it.
    fn asked(&self, shared: &Shared, by: &Handle) {
        let mut state = lock(&self.state);
        let now = shared.started.elapsed();
        let what = state.pair(shared.process, by).accord.asked(now);
        state.push(by.process, what);
        drop(state);
        if let Some(judge) = self.judge.get() {
            judge.unpark();
        }
    }

    /// The other process of a pair has told.
    fn told(&self, shared: &Shared, by: ProcessId, carrier: Carrier) {
        let mut state = lock(&self.state);
        if let Some(pair) = state.pairs.get_mut(&by) {
            pair.accord.told(carrier);
            if let Some(settled) = pair.accord.settled() {
                pair.say(settled, shared, "");
            }
        }
    }
}

/// For people: where a handle leads.
fn name(to: &Handle) -> String {
    match to.addresses.first() {
        Some(address) => format!("{address}:{}", to.port),
        None => format!("port {}", to.port),
    }
}

impl Pair {
    /// Logs what was taken and why, once.
    fn say(&mut self, settled: (Carrier, Reason), shared: &Shared, figures: &str) {
        if self.said.replace(settled) == Some(settled) {
            return;
        }
        let (carrier, reason) = settled;
        let (level, why) = match reason {
            Reason::Measured => (Level::Info, figures),
            Reason::Told => (Level::Info, "the other side has measured"),
            Reason::NoAnswer => (
                Level::Warn,
                "the other side has not said in time what it measured",
            ),
            Reason::NotMeasured => (Level::Warn, figures),
        };
        let why = if why.is_empty() {
            "there was no time to measure"
        } else {
            why
        };
        let text = format!("auto: {carrier} to {}: {why}", name(&self.handle));
        shared.log(level, &text);
    }
}

/// Counts a thread from before it starts until it ends, however that comes.
struct Running(Arc<Shared>);

impl Running {
    fn new(shared: &Arc<Shared>) -> Running {
        shared.choosing.running.fetch_add(1, Ordering::SeqCst);
        Running(shared.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.choosing.running.fetch_sub(1, Ordering::SeqCst);
    }
}
