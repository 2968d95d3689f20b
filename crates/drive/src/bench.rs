//! Measures a network as NCCL's progress thread would use it: two processes, some comms in each
//! direction, some messages in flight, both directions at once (a ring sends and receives).
//!
//! The two agree over a control connection that is open before and after each run and silent
//! within. First the round trip of one message at a time, then so many messages that the run takes
//! about the time asked for, which the first rank decides from a short trial.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::stream::Stream;
use crate::{DriveError, NULL, Object, Plugin};

/// What to measure.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// 0 or 1. Rank 0 waits for rank 1 at `control`.
    pub rank: u32,
    /// `address:port` of rank 0, for the agreement.
    pub control: String,
    /// The plug-in; without one, a TCP stream a comm.
    pub plugin: Option<PathBuf>,
    /// Version of the interface.
    pub version: u32,
    /// Comms in each direction.
    pub comms: usize,
    /// Messages in flight on each.
    pub depth: usize,
    /// Bytes of a message, one run each.
    pub sizes: Vec<usize>,
    /// About how long a run takes, seconds.
    pub seconds: f64,
    /// Whether what arrives is compared with what was sent.
    pub verify: bool,
}

/// What was measured with one message size.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Bytes of a message.
    pub size: usize,
    /// Messages in each direction.
    pub messages: usize,
    /// How long they took, seconds.
    pub seconds: f64,
    /// Bytes a second in each direction.
    pub bandwidth: f64,
    /// Half the round trip of one message, microseconds: the median.
    pub latency_us: f64,
    /// Processor time of this process, seconds.
    pub cpu_seconds: f64,
    /// Longest time without a message, seconds.
    pub stall: f64,
}

const LIMIT: Duration = Duration::from_secs(120);

enum Net {
    Plugin {
        plugin: Plugin,
        sends: Vec<Object>,
        receives: Vec<Object>,
    },
    Streams {
        sends: Vec<Stream>,
        receives: Vec<Stream>,
    },
}

struct Control(TcpStream);

impl Control {
    fn say(&mut self, number: u64) -> std::io::Result<()> {
        self.0.write_all(&number.to_le_bytes())
    }

    fn hear(&mut self) -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn meet(&mut self) -> std::io::Result<()> {
        self.say(0)?;
        self.hear().map(|_| ())
    }
}

fn connect(rank: u32, control: &str) -> std::io::Result<TcpStream> {
    if rank == 0 {
        return Ok(TcpListener::bind(control)?.accept()?.0);
    }
    let end = Instant::now() + LIMIT;
    loop {
        match TcpStream::connect(control) {
            Ok(socket) => return Ok(socket),
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Runs all sizes of a scenario, in both of its processes.
///
/// # Errors
/// [`DriveError`]: the plug-in's, the network's, content that differs, no progress for two minutes.
pub fn run(scenario: &Scenario) -> Result<Vec<Run>, DriveError> {
    let socket = connect(scenario.rank, &scenario.control)?;
    socket.set_nodelay(true)?;
    let mut control = Control(socket);
    let mut net = match &scenario.plugin {
        Some(path) => plugged(scenario, path, &mut control)?,
        None => streams(scenario, &mut control)?,
    };
    let most = scenario.sizes.iter().copied().max().unwrap_or(0).max(1);
    let mut memory = Memory::new(scenario, most);
    let mut runs = Vec::new();
    for size in &scenario.sizes {
        let began = Instant::now();
        let phase = |name: &str| {
            if std::env::var_os("EVENER_DRIVE_LOG").is_some() {
                eprintln!("{size} bytes: {name} after {:.2?}", began.elapsed());
            }
        };
        let latency_us = latency(scenario, &mut net, &mut memory, *size, &mut control)?;
        phase("latency measured");
        control.meet()?;
        // Queues and token buckets take the first messages at once: the trial must outlast them.
        let mut count = scenario.depth * 2;
        let each = loop {
            let (took, _) = measure(scenario, &mut net, &mut memory, *size, count)?;
            let enough = if scenario.rank == 0 {
                let enough = u64::from(took >= (scenario.seconds / 4.0).min(0.5));
                control.say(enough)?;
                enough
            } else {
                control.hear()?
            };
            if enough == 1 {
                break took / count as f64;
            }
            count *= 3;
        };
        let messages = if scenario.rank == 0 {
            let wanted = (scenario.seconds / each.max(1e-7)).clamp(8.0, 1e7) as u64;
            control.say(wanted)?;
            wanted
        } else {
            control.hear()?
        };
        phase("trial done");
        control.meet()?;
        let before = cpu_seconds();
        let (seconds, stall) = measure(scenario, &mut net, &mut memory, *size, messages as usize)?;
        let cpu = cpu_seconds() - before;
        control.meet()?;
        let messages = messages as usize * scenario.comms;
        runs.push(Run {
            size: *size,
            messages,
            seconds,
            bandwidth: (messages * size) as f64 / seconds,
            latency_us,
            cpu_seconds: cpu,
            stall,
        });
    }
    if let Net::Plugin {
        mut plugin,
        sends,
        receives,
    } = net
    {
        for comm in sends {
            plugin.close_send(comm)?;
        }
        for comm in receives {
            plugin.close_recv(comm)?;
        }
        control.meet()?;
        plugin.finalize()?;
    }
    Ok(runs)
}

fn cpu_seconds() -> f64 {
    // SAFETY: a plain structure is filled.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn plugged(
    scenario: &Scenario,
    path: &std::path::Path,
    control: &mut Control,
) -> Result<Net, DriveError> {
    let mut plugin = Plugin::load(path, scenario.version)?;
    plugin.init()?;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for _ in 0..scenario.comms {
        let (listener, handle) = plugin.listen(0)?;
        control.0.write_all(&handle)?;
        let mut theirs = [0; 128];
        control.0.read_exact(&mut theirs)?;
        let (mut send, mut receive) = (None, None);
        let end = Instant::now() + LIMIT;
        // As the service thread does: all that is pending is polled in one loop.
        while send.is_none() || receive.is_none() {
            if send.is_none() {
                send = plugin.connect(0, &mut theirs)?;
            }
            if receive.is_none() {
                receive = plugin.accept(listener)?;
            }
            if Instant::now() > end {
                return Err(DriveError::Stalled(LIMIT.as_secs()));
            }
            std::thread::yield_now();
        }
        sends.extend(send);
        receives.extend(receive);
        plugin.close_listen(listener)?;
    }
    Ok(Net::Plugin {
        plugin,
        sends,
        receives,
    })
}

fn streams(scenario: &Scenario, control: &mut Control) -> Result<Net, DriveError> {
    let ours = control.0.local_addr()?.ip();
    let theirs = control.0.peer_addr()?.ip();
    let listener = TcpListener::bind((ours, 0))?;
    control.say(listener.local_addr()?.port().into())?;
    let port = control.hear()? as u16;
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for _ in 0..scenario.comms {
        // The backlog takes our connection before the peer accepts it.
        sends.push(Stream::new(TcpStream::connect((theirs, port))?)?);
        receives.push(Stream::new(listener.accept()?.0)?);
    }
    Ok(Net::Streams { sends, receives })
}

/// Buffers: for each comm and place in flight, one to send and one to receive.
struct Memory {
    bytes: Vec<u8>,
    stride: usize,
    depth: usize,
    comms: usize,
    turn: u8,
}

impl Memory {
    fn new(scenario: &Scenario, most: usize) -> Memory {
        let stride = most.next_multiple_of(4096);
        let count = scenario.comms * scenario.depth * 2;
        Memory {
            bytes: vec![0; stride * count],
            stride,
            depth: scenario.depth,
            comms: scenario.comms,
            turn: 0,
        }
    }

    fn at(&mut self, sending: bool, comm: usize, number: usize) -> *mut u8 {
        let place = (usize::from(sending) * self.comms + comm) * self.depth + number % self.depth;
        self.bytes[place * self.stride..].as_mut_ptr()
    }

    fn pattern(&self, comm: usize, number: usize) -> u8 {
        (number * 7 + comm * 31 + 1) as u8 ^ self.turn
    }

    fn write(&mut self, comm: usize, number: usize, size: usize) {
        let byte = self.pattern(comm, number);
        let place = (self.comms + comm) * self.depth + number % self.depth;
        let at = place * self.stride;
        for (index, cell) in self.bytes[at..at + size].iter_mut().enumerate() {
            *cell = byte.wrapping_add((index >> 6) as u8);
        }
    }

    fn check(&self, comm: usize, number: usize, size: usize) -> Result<(), DriveError> {
        let byte = self.pattern(comm, number);
        let at = (comm * self.depth + number % self.depth) * self.stride;
        let good = self.bytes[at..at + size]
            .iter()
            .enumerate()
            .all(|(index, cell)| *cell == byte.wrapping_add((index >> 6) as u8));
        if good {
            Ok(())
        } else {
            Err(DriveError::Content(number as u64))
        }
    }
}

/// One direction of one comm in a run.
#[derive(Default)]
struct Progress {
    posted: usize,
    done: usize,
    flying: std::collections::VecDeque<Object>,
}

/// `count` messages on each comm in both directions; seconds, and the longest time without one.
fn measure(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    count: usize,
) -> Result<(f64, f64), DriveError> {
    memory.turn = memory.turn.wrapping_add(1);
    let mut sides: Vec<[Progress; 2]> = Vec::new();
    sides.resize_with(scenario.comms, Default::default);
    let began = Instant::now();
    let (mut last, mut stall) = (began, Duration::ZERO);
    let mut left = scenario.comms * 2 * count;
    while left > 0 {
        let mut moved = false;
        for (comm, pair) in sides.iter_mut().enumerate() {
            for (sending, side) in [false, true].into_iter().zip(pair.iter_mut()) {
                let done = step(scenario, net, memory, comm, sending, side, size, count)?;
                left -= done;
                moved |= done > 0;
            }
        }
        let now = Instant::now();
        if moved {
            stall = stall.max(now - last);
            last = now;
        } else {
            if now - last > LIMIT {
                return Err(DriveError::Stalled(LIMIT.as_secs()));
            }
            std::thread::yield_now();
        }
    }
    Ok((began.elapsed().as_secs_f64(), stall.as_secs_f64()))
}

#[allow(clippy::too_many_arguments, reason = "the state of one turn")]
fn step(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    comm: usize,
    sending: bool,
    side: &mut Progress,
    size: usize,
    count: usize,
) -> Result<usize, DriveError> {
    let before = side.done;
    while side.posted < count && side.posted - side.done < scenario.depth {
        if sending && scenario.verify {
            memory.write(comm, side.posted, size);
        }
        let at = memory.at(sending, comm, side.posted);
        // SAFETY: the buffers live in `memory` through the run, and each has one request at a time.
        let posted = unsafe {
            match net {
                Net::Plugin {
                    plugin,
                    sends,
                    receives,
                } => {
                    let request = if sending {
                        plugin.isend(sends[comm], at, size, NULL)?
                    } else {
                        plugin.irecv(receives[comm], at, size, NULL)?
                    };
                    side.flying.extend(request);
                    request.is_some()
                }
                Net::Streams { sends, receives } => {
                    let stream = if sending { sends } else { receives };
                    stream[comm].post(at, size);
                    true
                }
            }
        };
        if !posted {
            break;
        }
        side.posted += 1;
    }
    match net {
        Net::Plugin { plugin, .. } => {
            // NCCL looks at the oldest step only.
            while let Some(request) = side.flying.front() {
                if plugin.test(*request, !sending)?.is_none() {
                    break;
                }
                side.flying.pop_front();
                if !sending && scenario.verify {
                    memory.check(comm, side.done, size)?;
                }
                side.done += 1;
            }
        }
        Net::Streams { sends, receives } => {
            let stream = if sending { sends } else { receives };
            for _ in 0..stream[comm].progress(sending)? {
                if !sending && scenario.verify {
                    memory.check(comm, side.done, size)?;
                }
                side.done += 1;
            }
        }
    }
    Ok(side.done - before)
}

/// Half the round trip of one message on the first comm, microseconds: the median of some.
fn latency(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    control: &mut Control,
) -> Result<f64, DriveError> {
    let rounds = if size >= 1 << 20 { 20 } else { 100 };
    control.meet()?;
    memory.turn = memory.turn.wrapping_add(1);
    let mut sides: [Progress; 2] = Default::default();
    let mut samples = Vec::new();
    for round in 0..rounds {
        let began = Instant::now();
        for half in 0..2 {
            let sending = (half == 0) == (scenario.rank == 0);
            let side = &mut sides[usize::from(sending)];
            let began = Instant::now();
            // A message counts when it has arrived: the sender goes on to wait for the answer.
            loop {
                let target = round + 1;
                step(scenario, net, memory, 0, sending, side, size, target)?;
                let on_its_way = sending && matches!(net, Net::Plugin { .. });
                if side.done == target || (on_its_way && side.posted == target) {
                    break;
                }
                if began.elapsed() > LIMIT {
                    return Err(DriveError::Stalled(LIMIT.as_secs()));
                }
                std::thread::yield_now();
            }
        }
        // What was sent must be finished before its buffer is used again.
        let side = &mut sides[1];
        while side.done < round + 1 {
            step(scenario, net, memory, 0, true, side, size, round + 1)?;
        }
        samples.push(began.elapsed().as_secs_f64() * 1e6 / 2.0);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}
