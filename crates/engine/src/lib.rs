//! The I/O that drives Evener's protocol: TCP over every path between two nodes.
//!
//! # Threads
//! - *Callers* (NCCL's threads) post requests into slots and look at them. No lock, no system call
//!   unless a worker sleeps.
//! - *Workers* ([`worker`]) move bytes, each over its own connections. What they know of a peer they
//!   share ([`link`]), so that every connection pulls from the same queue.
//! - *Control* ([`control`]) greets, dials, watches links and writes statistics.
//!
//! # Between two processes
//! All comms between two processes share their connections. Which process it is is told by a
//! random number, so a comm's handle finds the connections that are there already.
//!
//! # Streams and packets
//! Workers carry bytes over TCP. The instances of [`udp`] carry them in packets, and need neither links
//! nor control: slots, comms, listeners and the public face are the same for both. Which one a comm goes
//! over is decided when it connects ([`Choice`]).

pub mod addresses;
mod callers;
pub mod comm;
pub mod config;
pub mod conn;
mod control;
mod crew;
pub mod doorbell;
pub mod fds;
pub mod hello;
mod inbox;
pub mod link;
pub mod lock;
pub mod log;
mod news;
pub mod nics;
pub mod packets;
mod paths;
pub mod peer;
pub mod peers;
mod records;
pub mod requests;
pub mod settings;
#[rustfmt::skip]
pub mod settings_generated;
mod shared;
pub mod slots;
pub mod stats;
mod sync;
pub mod sys;
mod task;
mod trace;
pub mod udp;
mod worker;

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use evener_proto::{PathId, Why};

pub use callers::{Callers, Listener};
pub use config::{Choice, Config};
use control::Control;
use crew::Crew;
use inbox::Inbox;
use lock::lock;
pub use log::{Level, Log};
use news::News;
use nics::Nics;
use shared::Shared;
pub use slots::{Slot, Status};
pub use sys::Memory;
use task::{StreamTask, Task};
use udp::instance::{Instance, Reception};
use worker::Worker;

/// Why something cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No interface to use.
    #[error(
        "no network interface to use{}: set EVENER_NET_IFNAME (or NCCL_SOCKET_IFNAME) to one that \
         is up and has an address",
        .0.as_ref().map(|rule| format!(" ({rule} matches none)")).unwrap_or_default()
    )]
    NoInterface(Option<String>),
    /// A system call failed.
    #[error("{0}: {1}")]
    System(&'static str, #[source] std::io::Error),
    /// Not a handle of this version of Evener.
    #[error("the handle is not one of this version of Evener: use the same version on all nodes")]
    Handle,
    /// The peer has no such listener (any more).
    #[error("the peer has closed the listener that the handle is for")]
    Declined,
    /// The comm failed.
    #[error(transparent)]
    Comm(#[from] Why),
    /// A device number that does not exist.
    #[error("device {0} does not exist")]
    Device(usize),
    /// The engine has stopped, or a thread of it has died.
    #[error("the engine has stopped")]
    Stopped,
}

/// Set for good when a thread of any engine has died: its requests will never finish.
static DIED: AtomicBool = AtomicBool::new(false);

/// Whether a thread of any engine of this process has died.
pub fn has_died() -> bool {
    DIED.load(Ordering::Relaxed)
}

/// The engine of a process. What callers do with it is [`Callers`]'.
pub struct Engine {
    callers: Callers,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Deref for Engine {
    type Target = Callers;

    fn deref(&self) -> &Callers {
        &self.callers
    }
}

fn name_thread<F>(name: String, body: F) -> std::io::Result<JoinHandle<()>>
where
    F: FnOnce() + Send + 'static,
{
    std::thread::Builder::new().name(name).spawn(body)
}

impl Engine {
    /// Finds the interfaces, listens, and starts the threads.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::System`].
    pub fn start(config: Config, log: Log) -> Result<Engine, Error> {
        let all = sys::interfaces().map_err(|e| Error::System("getifaddrs", e))?;
        let nics = nics::choose(&all, config.interfaces.as_deref(), config.family);
        if nics.is_empty() {
            return Err(Error::NoInterface(config.interfaces));
        }
        let v6 = nics.iter().any(|nic| nic.address.is_ipv6());
        let (socket, port, reception) = listen(v6, config.engine)?;
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)
            .map_err(|e| Error::System("getrandom", std::io::Error::other(e)))?;
        let (mut process, mut token) = ([0; 16], [0; 16]);
        process.copy_from_slice(&secret[..16]);
        token.copy_from_slice(&secret[16..]);
        let processors = sys::processors();
        let workers = match config.workers {
            // A card's queue has one socket, and one instance has that.
            _ if config.engine == Choice::Xdp => 1,
            0 => (processors / 4).clamp(1, 8),
            given => given.min(16),
        };
        // Of two engines one waits for peers that speak nothing else.
        let (streams, instances) = match config.engine {
            Choice::Udp | Choice::Xdp => (1, workers),
            Choice::Tcp => (workers, 0),
        };
        let (congestion, why) = congestion(&socket, config.congestion.as_deref());
        let waker = sys::Waker::new().map_err(|e| Error::System("eventfd", e))?;
        let shared = Arc::new(Shared {
            config,
            process,
            token,
            nics: Mutex::new(Arc::new(Nics::new(nics))),
            port,
            congestion,
            workers: inboxes(streams)?,
            instances: inboxes(instances)?,
            crew: Mutex::new(Crew::new(streams)),
            log,
            ..Shared::bare(waker)
        });
        let callers = Callers {
            shared: shared.clone(),
        };
        let engine = Engine {
            callers,
            threads: Mutex::new(Vec::new()),
        };
        let control = Control::new(shared.clone(), socket);
        let control = control.map_err(|e| Error::System("epoll", e))?;
        engine.spawn("evener-net".into(), move || control.run())?;
        for index in 0..streams {
            let worker = Worker::new(index, shared.clone());
            let worker = worker.map_err(|e| Error::System("epoll", e))?;
            engine.spawn(format!("evener-net-{index}"), move || worker.run())?;
        }
        let (mut reception, mut rings) = (reception, engine.trace()?.into_iter());
        for index in 0..instances {
            let instance = Instance::new(index, shared.clone(), reception.take(), rings.next());
            let instance = instance.map_err(|e| Error::System("epoll", e))?;
            engine.spawn(format!("evener-udp-{index}"), move || instance.run())?;
        }
        let nics = shared.nics();
        shared.say_unsteered(&nics);
        let nics: Vec<String> = nics.iter().map(ToString::to_string).collect();
        shared.log(
            Level::Info,
            &format!(
                "{} over {}; {workers} worker(s) for {processors} processor(s), {} flows to \
                 a peer at the start and at most {}, congestion control {why}",
                match shared.config.engine {
                    Choice::Tcp => "TCP engine",
                    Choice::Udp => "UDP engine",
                    Choice::Xdp => "UDP engine with AF_XDP",
                },
                nics.join(", "),
                shared.config.flows,
                shared.config.most_flows,
            ),
        );
        Ok(engine)
    }

    /// Starts the trace, where one is wanted: a ring for each instance of UDP. One that cannot be
    /// written is said in the log, and the engine goes on.
    fn trace(&self) -> Result<Vec<trace::Ring>, Error> {
        let shared = &self.shared;
        let Some(directory) = &shared.config.trace_dir else {
            return Ok(Vec::new());
        };
        let count = shared.instances.len();
        let name = directory.display();
        if count == 0 {
            let text = format!("trace {name}: nothing is written, UDP alone is traced");
            shared.log(Level::Warn, &text);
            return Ok(Vec::new());
        }
        match trace::Writer::start(directory, &shared.config, count, shared.started) {
            Ok((rings, writer)) => {
                let text = format!("trace: {}", writer.path().display());
                shared.log(Level::Info, &text);
                let shared = shared.clone();
                self.spawn("evener-trace".into(), move || {
                    writer.run(&|level, text| shared.log(level, text));
                })?;
                Ok(rings)
            }
            Err(error) => {
                let text = format!("trace {name}: {error}: nothing is written");
                shared.log(Level::Warn, &text);
                Ok(Vec::new())
            }
        }
    }

    fn spawn<F>(&self, name: String, body: F) -> Result<(), Error>
    where
        F: FnOnce() + Send + 'static,
    {
        let shared = self.shared.clone();
        let thread = name_thread(name, move || {
            sys::block_signals();
            sys::set_exact_timers();
            let body = std::panic::AssertUnwindSafe(body);
            if std::panic::catch_unwind(body).is_err() {
                shared.broken.store(true, Ordering::SeqCst);
                DIED.store(true, Ordering::SeqCst);
                shared.log(Level::Error, "a thread of the engine died: all comms fail");
            }
        });
        let thread = thread.map_err(|e| Error::System("thread", e))?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// The NICs in use.
    pub fn nics(&self) -> Arc<Nics> {
        self.shared.nics()
    }

    /// Whether a thread has died: nothing will complete.
    pub fn is_broken(&self) -> bool {
        self.shared.is_broken()
    }

    /// What each path did.
    pub fn paths(&self) -> Vec<stats::PathReport> {
        lock(&self.shared.paths)
            .live()
            .map(|(_, stats)| stats.report())
            .collect()
    }

    /// The TCP port that peers connect to.
    pub fn port(&self) -> u16 {
        self.shared.port
    }

    /// Cuts up to `count` paths, as a network would: for tests of healing.
    pub fn cut_paths(&self, count: usize) {
        let paths: Vec<PathId> = lock(&self.shared.paths)
            .live()
            .map(|((_, path), _)| *path)
            .take(count)
            .collect();
        for peer in self.shared.peers.all() {
            for path in &paths {
                let task = Task::Drop(peer.clone(), *path, "cut by a test");
                self.shared.ask(&peer, task);
            }
        }
    }

    /// Has every worker hand half of its connections to the next, as a busy one would: for tests.
    pub fn pass_connections_on(&self) {
        let workers = &self.shared.workers;
        for peer in self.shared.peers.all() {
            for (index, worker) in workers.iter().enumerate() {
                worker.ask_own(StreamTask::Give(peer.clone(), (index + 1) % workers.len()));
            }
        }
    }

    /// Says something in the engine's log.
    pub fn log(&self, level: Level, text: &str) {
        self.shared.log(level, text);
    }

    /// Stops all threads and closes all connections.
    pub fn stop(&self) {
        for comm in std::mem::take(&mut *lock(&self.shared.pending)).into_values() {
            self.release(&comm);
        }
        for worker in &self.shared.workers {
            worker.ask(Task::Stop);
        }
        for instance in &self.shared.instances {
            instance.ask(Task::Stop);
        }
        // Control is the first: it writes the last record, of all that the others have done.
        let mut threads = std::mem::take(&mut *lock(&self.threads)).into_iter();
        let control = threads.next();
        threads.for_each(|thread| drop(thread.join()));
        self.shared.news(News::Stop);
        control.into_iter().for_each(|thread| drop(thread.join()));
        // From here on nobody answers; and what was handed over last is closed, not kept.
        self.shared.broken.store(true, Ordering::SeqCst);
        for worker in &self.shared.workers {
            worker.clear();
        }
        for instance in &self.shared.instances {
            instance.clear();
        }
        for peer in self.shared.peers.all() {
            lock(&peer.link).abandon();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

fn inboxes<Own>(count: usize) -> Result<Vec<Inbox<Own>>, Error> {
    let made: Result<_, _> = (0..count).map(|_| Inbox::new()).collect();
    made.map_err(|e| Error::System("eventfd", e))
}

/// The TCP socket that all of a process' peers connect to, its port, and unless TCP alone is wanted where
/// hellos come: at the UDP port of the same number.
fn listen(v6: bool, choice: Choice) -> Result<(socket2::Socket, u16, Option<Reception>), Error> {
    const TRIES: usize = 16;
    let mut tries = 0;
    loop {
        let (socket, port) = control::listen(v6).map_err(|e| Error::System("listen", e))?;
        if choice == Choice::Tcp {
            return Ok((socket, port, None));
        }
        match Reception::open(v6, port) {
            Ok(reception) => return Ok((socket, port, Some(reception))),
            // Another program has that UDP port.
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && tries < TRIES => {
                tries += 1;
            }
            Err(error) => return Err(Error::System("bind of UDP", error)),
        }
    }
}

/// Which congestion control to ask for, and in words what is in force and why.
fn congestion(socket: &socket2::Socket, asked: Option<&str>) -> (Option<String>, String) {
    use std::os::fd::AsRawFd;
    let fd = socket.as_raw_fd();
    let default = sys::congestion(fd).unwrap_or_default();
    let wish = match asked {
        Some(name) => Some(name),
        // Without the fq qdisc bbr paces by timers of its own, and floods shallow queues.
        None if default == "bbr" => Some("cubic"),
        None => None,
    };
    match wish {
        None => (None, format!("{default} (the system's)")),
        Some(name) => match sys::set_congestion(fd, name) {
            Ok(()) if asked.is_some() => (Some(name.into()), format!("{name} (asked for)")),
            Ok(()) => (
                Some(name.into()),
                format!("{name} (instead of the system's {default}: shallow queues)"),
            ),
            Err(error) => (None, format!("{default} ({name} is refused: {error})")),
        },
    }
}
