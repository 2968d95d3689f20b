//! Measures a network as NCCL's progress thread would use it: two processes, some comms in each
//! direction, some messages in flight, both directions at once (a ring sends and receives).
//!
//! The two agree over a control connection that is open before and after each run and silent
//! within. *Steady*: first the round trip of one message at a time, then as many messages as the
//! run takes about the time asked for, which the first rank decides from a short trial, or as many as
//! fit in before a file is there ([`until`](crate::until)). *Ring*: as many all-reduces ([`ring`](crate::ring)) as fit into that time, each timed by itself.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::DriveError;
use crate::net::Net;
use crate::ring;
use crate::scenario::{Control, Memory};
pub use crate::scenario::{Pattern, Scenario};
use crate::until::Until;
use crate::watch::{LIMIT, Watch};

/// What was measured with one size.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Bytes of a message, or of an all-reduce.
    pub size: usize,
    /// Messages in each direction, or all-reduces.
    pub messages: usize,
    /// How long they took, seconds.
    pub seconds: f64,
    /// Bytes per second in each direction; of a ring, what is reduced in a second by the median.
    pub bandwidth: f64,
    /// Microseconds, the median: half the round trip of one message, or one all-reduce.
    pub latency_us: f64,
    /// Processor time of this process, seconds.
    pub cpu_seconds: f64,
    /// Longest time without a message, seconds.
    pub stall: f64,
    /// In a steady run, how evenly the comms shared the network, see [`fairness`].
    pub fairness: Option<f64>,
}

/// Jain's index of what several had of one thing: 1 where all had the same, 1/n where one had all
/// (R. Jain, D. Chiu, W. Hawe: A quantitative measure of fairness, DEC TR-301, 1984).
pub fn fairness(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares > 0.0 {
        sum * sum / (shares.len() as f64 * squares)
    } else {
        1.0
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
    let mut net = Net::open(scenario, &mut control)?;
    let (most, depth) = match scenario.pattern {
        Pattern::Steady => {
            let most = scenario.sizes.iter().copied().max();
            (most.unwrap_or(0).max(1), scenario.depth)
        }
        Pattern::Ring => (ring::SLICE, ring::DEPTH),
    };
    let mut memory = Memory::new(scenario.comms, depth, most);
    let mut runs = Vec::new();
    for size in &scenario.sizes {
        let run = match scenario.pattern {
            Pattern::Steady => steady(scenario, &mut net, &mut memory, *size, &mut control)?,
            Pattern::Ring => rings(scenario, &mut net, &mut memory, *size, &mut control)?,
        };
        runs.push(run);
    }
    net.close(&mut control)?;
    Ok(runs)
}

/// Messages of one size, for a while.
fn steady(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    control: &mut Control,
) -> Result<Run, DriveError> {
    let began = Instant::now();
    let phase = |name: &str| {
        if std::env::var_os("EVENER_DRIVE_LOG").is_some() {
            eprintln!("{size} bytes: {name} after {:.2?}", began.elapsed());
        }
    };
    let latency_us = latency(scenario, net, memory, size, control)?;
    phase("latency measured");
    control.meet()?;
    // Queues and token buckets take the first messages at once: the trial must outlast them.
    let mut count = scenario.depth * 2;
    let each = loop {
        let (took, ..) = measure(scenario, net, memory, size, &mut Until::Count(count))?;
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
    phase("both begin");
    let before = cpu_seconds();
    let mut until = match &scenario.until {
        None => Until::Count(messages as usize),
        Some(file) => Until::file(scenario.rank, file, control),
    };
    let (seconds, stall, fairness) = measure(scenario, net, memory, size, &mut until)?;
    let messages = until.most() * scenario.comms;
    let cpu = cpu_seconds() - before;
    control.meet()?;
    Ok(Run {
        size,
        messages,
        seconds,
        bandwidth: (messages * size) as f64 / seconds,
        latency_us,
        cpu_seconds: cpu,
        stall,
        fairness: Some(fairness),
    })
}

/// All-reduces of one size, for a while; each begins when both sides are ready.
fn rings(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    control: &mut Control,
) -> Result<Run, DriveError> {
    /// These find the network's windows and rates, and are not counted.
    const WARM_UP: usize = 3;
    const LEAST: usize = 5;
    let mut samples = Vec::new();
    let (mut stall, mut cpu) = (0.0f64, cpu_seconds());
    let (mut began, mut round) = (Instant::now(), 0);
    loop {
        let (seconds, longest) = ring::all_reduce(scenario, net, memory, size)?;
        round += 1;
        if round > WARM_UP {
            samples.push(seconds);
            stall = stall.max(longest);
        } else if round == WARM_UP {
            (began, cpu) = (Instant::now(), cpu_seconds());
        }
        let enough = samples.len() >= LEAST && began.elapsed().as_secs_f64() >= scenario.seconds;
        control.say(u64::from(enough))?;
        let theirs = control.hear()?;
        // The first rank decides; both have heard the other, so both are ready.
        let over = if scenario.rank == 0 {
            enough
        } else {
            theirs == 1
        };
        if over {
            break;
        }
    }
    let cpu = cpu_seconds() - cpu;
    let messages = samples.len();
    let seconds = samples.iter().sum();
    samples.sort_by(f64::total_cmp);
    let median = samples[messages / 2];
    Ok(Run {
        size,
        messages,
        seconds,
        bandwidth: size as f64 / median,
        latency_us: median * 1e6,
        cpu_seconds: cpu,
        stall,
        fairness: None,
    })
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

/// One direction of one comm in a run.
#[derive(Default)]
struct Progress {
    posted: usize,
    done: usize,
}

/// Messages on each comm in both directions: seconds, the longest time without one, and how evenly what
/// arrived was shared when the first comm had all of its own.
fn measure(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    until: &mut Until<'_>,
) -> Result<(f64, f64, f64), DriveError> {
    memory.turn();
    let mut sides: Vec<[Progress; 2]> = Vec::new();
    sides.resize_with(scenario.comms, Default::default);
    let began = Instant::now();
    let mut watch = Watch::new(began);
    let mut finished = 0;
    let mut shared = None;
    while until
        .count()
        .is_none_or(|count| finished < scenario.comms * 2 * count)
    {
        let (most, mut moved) = (until.most(), false);
        for (comm, pair) in sides.iter_mut().enumerate() {
            for (sending, side) in [false, true].into_iter().zip(pair.iter_mut()) {
                let done = step(scenario, net, memory, comm, sending, side, size, most)?;
                finished += done;
                moved |= done > 0;
            }
        }
        let now = Instant::now();
        if shared.is_none() && sides.iter().any(|[receive, _]| receive.done == most) {
            let had: Vec<f64> = sides.iter().map(|[one, _]| one.done as f64).collect();
            shared = Some(fairness(&had));
        }
        let posted = || sides.iter().flatten().map(|side| side.posted).max();
        until.look(now, || posted().unwrap_or(0))?;
        watch.turn(now, moved)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    Ok((seconds, watch.longest(), shared.unwrap_or(1.0)))
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
        if !unsafe { net.post(comm, sending, at, size) }? {
            break;
        }
        side.posted += 1;
    }
    for _ in 0..net.finished(comm, sending)? {
        if !sending && scenario.verify {
            memory.check(comm, side.done, size)?;
        }
        side.done += 1;
    }
    Ok(side.done - before)
}

/// Half the round trip of one message on the first comm, microseconds: the median of some, as many as
/// fit into the time of a run. On a slow network 100 of 256 KiB would take a minute.
fn latency(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    control: &mut Control,
) -> Result<f64, DriveError> {
    const FIRST: usize = 5;
    let most = if size >= 1 << 20 { 20 } else { 100 };
    control.meet()?;
    memory.turn();
    let mut sides: [Progress; 2] = Default::default();
    let mut samples = Vec::new();
    let began = Instant::now();
    while samples.len() < FIRST {
        let sample = round_trip(scenario, net, memory, size, &mut sides, samples.len())?;
        samples.push(sample);
    }
    let rounds = if scenario.rank == 0 {
        let each = began.elapsed().as_secs_f64() / FIRST as f64;
        let fit = (scenario.seconds / each.max(1e-9)) as usize;
        let rounds = fit.clamp(FIRST, most);
        control.say(rounds as u64)?;
        rounds
    } else {
        control.hear()? as usize
    };
    while samples.len() < rounds {
        let sample = round_trip(scenario, net, memory, size, &mut sides, samples.len())?;
        samples.push(sample);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

/// One message there and one back, after `round` of them: half of the time, microseconds.
fn round_trip(
    scenario: &Scenario,
    net: &mut Net,
    memory: &mut Memory,
    size: usize,
    sides: &mut [Progress; 2],
    round: usize,
) -> Result<f64, DriveError> {
    let began = Instant::now();
    for half in 0..2 {
        let sending = (half == 0) == (scenario.rank == 0);
        let side = &mut sides[usize::from(sending)];
        let mut watch = Watch::new(Instant::now());
        // A message counts when it has arrived: the sender goes on to wait for the answer.
        loop {
            let target = round + 1;
            step(scenario, net, memory, 0, sending, side, size, target)?;
            let on_its_way = sending && net.is_plugin();
            if side.done == target || (on_its_way && side.posted == target) {
                break;
            }
            watch.turn(Instant::now(), false)?;
        }
    }
    // What was sent must be finished before its buffer is used again.
    let (side, mut watch) = (&mut sides[1], Watch::new(Instant::now()));
    while side.done < round + 1 {
        step(scenario, net, memory, 0, true, side, size, round + 1)?;
        watch.turn(Instant::now(), false)?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / 2.0)
}

#[cfg(test)]
mod tests {
    use super::fairness;

    #[test]
    fn jain_s_index_is_one_for_equals_and_one_nth_for_one_of_many() {
        assert!((fairness(&[3.0; 7]) - 1.0).abs() < 1e-12);
        assert!((fairness(&[5.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((fairness(&[2.0, 1.0]) - 0.9).abs() < 1e-12);
    }
}
