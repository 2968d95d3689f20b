//! What each path and each worker did, kept by the worker and read by everybody.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use crate::sys::TcpInfo;

/// Counters of one path since it was opened.
#[derive(Debug, Default)]
pub struct PathStats {
    /// Name of the NIC on our side.
    pub nic: String,
    /// The port of the side that dialled.
    pub port: u16,
    /// For people: who is at the other end.
    pub peer: String,
    sent: AtomicU64,
    received: AtomicU64,
    rate: AtomicU64,
    rtt_us: AtomicU64,
    retransmits: AtomicU64,
    busy_us: AtomicU64,
    window: AtomicU64,
    wait_us: AtomicU64,
    suspect: AtomicU64,
    heals: AtomicU64,
}

/// A copy of [`PathStats`] at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathReport {
    /// Name of the NIC on our side.
    pub nic: String,
    /// The port of the side that dialled.
    pub port: u16,
    /// Who is at the other end.
    pub peer: String,
    /// Bytes written, headers included.
    pub sent: u64,
    /// Bytes read, headers included.
    pub received: u64,
    /// The kernel's delivery rate, bytes per second.
    pub rate: u64,
    /// Smoothed round trip, microseconds.
    pub rtt_us: u64,
    /// Segments sent again.
    pub retransmits: u64,
    /// Microseconds in which something was in flight.
    pub busy_us: u64,
    /// Bytes that it may have on its way.
    pub window: u64,
    /// How long its last chunks waited, microseconds.
    pub wait_us: u64,
    /// Nothing is confirmed for too long.
    pub suspect: bool,
    /// Times that it was suspect and came back.
    pub heals: u64,
}

impl PathStats {
    /// Counters of a new path.
    pub fn new(nic: String, port: u16, peer: String) -> PathStats {
        PathStats {
            nic,
            port,
            peer,
            ..PathStats::default()
        }
    }

    /// One thread writes, so a load and a store are an addition without a locked instruction.
    fn add(counter: &AtomicU64, more: u64) {
        counter.store(counter.load(Relaxed) + more, Relaxed);
    }

    /// Bytes were written.
    pub fn sent(&self, bytes: u64) {
        PathStats::add(&self.sent, bytes);
    }

    /// Bytes were read.
    pub fn received(&self, bytes: u64) {
        PathStats::add(&self.received, bytes);
    }

    /// The kernel was asked.
    pub fn looked(&self, info: &TcpInfo) {
        self.rate.store(info.delivery_rate, Relaxed);
        self.rtt_us.store(info.rtt_us.into(), Relaxed);
        self.retransmits.store(info.retransmits.into(), Relaxed);
        self.busy_us.store(info.busy_us, Relaxed);
    }

    /// What a connection of packets has measured over all of its paths.
    pub fn measured(&self, round_trip: Duration, lost: u64) {
        self.rtt_us.store(round_trip.as_micros() as u64, Relaxed);
        self.retransmits.store(lost, Relaxed);
    }

    /// What the protocol allows it, and why.
    pub fn steered(&self, window: u64, wait: Duration) {
        self.window.store(window, Relaxed);
        self.wait_us.store(wait.as_micros() as u64, Relaxed);
    }

    /// It became suspect, or is no longer.
    pub fn suspected(&self, suspect: bool) {
        if !suspect && self.suspect.load(Relaxed) == 1 {
            PathStats::add(&self.heals, 1);
        }
        self.suspect.store(suspect.into(), Relaxed);
    }

    /// A copy.
    pub fn report(&self) -> PathReport {
        PathReport {
            nic: self.nic.clone(),
            port: self.port,
            peer: self.peer.clone(),
            sent: self.sent.load(Relaxed),
            received: self.received.load(Relaxed),
            rate: self.rate.load(Relaxed),
            rtt_us: self.rtt_us.load(Relaxed),
            retransmits: self.retransmits.load(Relaxed),
            busy_us: self.busy_us.load(Relaxed),
            window: self.window.load(Relaxed),
            wait_us: self.wait_us.load(Relaxed),
            suspect: self.suspect.load(Relaxed) == 1,
            heals: self.heals.load(Relaxed),
        }
    }
}

/// What a worker did since it was started. Times in nanoseconds. It writes them in each turn, so they share
/// no cache lines with what others ring at.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerStats {
    /// Turns of the loop that moved something, and those that did not.
    pub turns: [AtomicU64; 2],
    /// How long they took.
    pub working: AtomicU64,
    /// Looking for something to do.
    pub spinning: AtomicU64,
    /// The part of these two and of naps while there was more to send than may be on its way.
    pub full: AtomicU64,
    /// Naps, and their time.
    pub naps: [AtomicU64; 2],
    /// Sleeps, and their time.
    pub sleeps: [AtomicU64; 2],
    /// Calls that read, their bytes.
    pub reads: [AtomicU64; 2],
    /// Calls that wrote, their bytes.
    pub writes: [AtomicU64; 2],
    /// How long the calls that read and those that wrote took.
    pub calls: [AtomicU64; 2],
    /// How long it waited for other workers that had the lock of a peer.
    pub waiting: AtomicU64,
    /// Processor time of the thread: its own, and the kernel's for it.
    pub processor: [AtomicU64; 2],
    /// Calls that asked how much is in flight, or about the connection.
    pub looks: AtomicU64,
    /// Times that others told it to pull. The one counter that several threads write.
    pub nudges: AtomicU64,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl WorkerStats {
    /// Adds to a counter. Not a locked instruction: a count that is lost does not matter.
    pub fn add(counter: &AtomicU64, more: u64) {
        PathStats::add(counter, more);
    }

    fn add_both(counters: &[AtomicU64; 2], more: u64) {
        PathStats::add(&counters[0], 1);
        PathStats::add(&counters[1], more);
    }

    /// A turn of the loop.
    pub fn turn(&self, time: Duration, active: bool, full: bool) {
        self.was_full(time, full);
        PathStats::add(&self.turns[usize::from(!active)], 1);
        let counter = if active {
            &self.working
        } else {
            &self.spinning
        };
        PathStats::add(counter, nanoseconds(time));
    }

    /// A nap.
    pub fn napped(&self, time: Duration, full: bool) {
        WorkerStats::add_both(&self.naps, nanoseconds(time));
        self.was_full(time, full);
    }

    fn was_full(&self, time: Duration, full: bool) {
        if full {
            PathStats::add(&self.full, nanoseconds(time));
        }
    }

    /// A sleep.
    pub fn slept(&self, time: Duration) {
        WorkerStats::add_both(&self.sleeps, nanoseconds(time));
    }

    /// A call that read.
    pub fn read(&self, bytes: usize, time: Duration) {
        WorkerStats::add_both(&self.reads, bytes as u64);
        PathStats::add(&self.calls[0], nanoseconds(time));
    }

    /// A call that wrote.
    pub fn wrote(&self, bytes: usize, time: Duration) {
        WorkerStats::add_both(&self.writes, bytes as u64);
        PathStats::add(&self.calls[1], nanoseconds(time));
    }

    /// A wait for a lock.
    pub fn waited(&self, time: Duration) {
        PathStats::add(&self.waiting, nanoseconds(time));
    }

    /// What the thread has used so far.
    pub fn used(&self, [own, kernel]: [Duration; 2]) {
        self.processor[0].store(nanoseconds(own), Relaxed);
        self.processor[1].store(nanoseconds(kernel), Relaxed);
    }

    /// As JSON.
    pub fn json(&self) -> String {
        let all = |counters: &[AtomicU64; 2]| counters.each_ref().map(|one| one.load(Relaxed));
        let ([turns, empty], [naps, napped]) = (all(&self.turns), all(&self.naps));
        let ([sleeps, slept], [reads, read]) = (all(&self.sleeps), all(&self.reads));
        let [writes, written] = all(&self.writes);
        let ([reading, writing], [own, kernel]) = (all(&self.calls), all(&self.processor));
        let ms = |nanoseconds: u64| nanoseconds / 1_000_000;
        format!(
            "{{\"turns\":{turns},\"working_ms\":{},\"empty_turns\":{empty},\"spinning_ms\":{},\
             \"naps\":{naps},\"napping_ms\":{},\"sleeps\":{sleeps},\"sleeping_ms\":{},\
             \"reads\":{reads},\"bytes_read\":{read},\"writes\":{writes},\
             \"bytes_written\":{written},\"reading_ms\":{},\"writing_ms\":{},\"waiting_ms\":{},\"full_ms\":{},\
             \"user_ms\":{},\"system_ms\":{},\"looks\":{},\"nudges\":{}}}",
            ms(self.working.load(Relaxed)),
            ms(self.spinning.load(Relaxed)),
            ms(napped),
            ms(slept),
            ms(reading),
            ms(writing),
            ms(self.waiting.load(Relaxed)),
            ms(self.full.load(Relaxed)),
            ms(own),
            ms(kernel),
            self.looks.load(Relaxed),
            self.nudges.load(Relaxed),
        )
    }
}

/// The longest times in which a comm had a buffer posted and no byte was placed in any of its
/// buffers: one for each [`Silences::PART`] of the last two minutes.
///
/// What a fault costs is the longest of them around it, less what is usual.
#[derive(Debug)]
pub struct Silences {
    /// Number of the part << 32 | microseconds, so that a later part replaces an earlier one.
    parts: [AtomicU64; Silences::KEPT],
    /// What the clock on the wall said when `epoch` was, since 1970.
    started: Duration,
    epoch: Instant,
}

impl Default for Silences {
    fn default() -> Self {
        Silences {
            parts: [const { AtomicU64::new(0) }; Silences::KEPT],
            started: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default(),
            epoch: Instant::now(),
        }
    }
}

impl Silences {
    /// A silence counts in the part in which it ended.
    pub const PART: Duration = Duration::from_millis(250);
    const KEPT: usize = 480;

    /// Time for [`Silences::note`].
    pub fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// A silence that lasted from `since` to `now`.
    pub fn note(&self, since: Duration, now: Duration) {
        let us = u64::try_from(now.saturating_sub(since).as_micros()).unwrap_or(u64::MAX);
        let part = (now.as_millis() / Silences::PART.as_millis()) as u64;
        let word = part << 32 | us.min(u64::from(u32::MAX));
        let place = &self.parts[part as usize % Silences::KEPT];
        // Nearly all are shorter than the longest: no locked instruction for them.
        if place.load(Relaxed) < word {
            place.fetch_max(word, Relaxed);
        }
    }

    /// As JSON: `[[start of the part in seconds since 1970, microseconds], ...]`, oldest first.
    pub fn json(&self) -> String {
        let mut words = self.parts.each_ref().map(|one| one.load(Relaxed));
        words.sort_unstable();
        let known = words.iter().filter(|word| **word > 0);
        let pairs: Vec<String> = known
            .map(|word| {
                let start = self.started + Silences::PART * (word >> 32) as u32;
                let us = word & u64::from(u32::MAX);
                format!("[{:.3},{us}]", start.as_secs_f64())
            })
            .collect();
        format!("[{}]", pairs.join(","))
    }
}

/// How many messages took so long: place `n` counts those of less than 2^n microseconds that are not
/// in an earlier one; the last counts all longer ones.
#[derive(Debug, Default)]
pub struct Latencies([AtomicU64; 24]);

impl Latencies {
    /// One message. Under the peer's lock.
    pub fn count(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let place = (u64::BITS - us.leading_zeros()) as usize;
        PathStats::add(&self.0[place.min(self.0.len() - 1)], 1);
    }

    /// As JSON.
    pub fn json(&self) -> String {
        let counts = self.0.each_ref().map(|one| one.load(Relaxed).to_string());
        format!("[{}]", counts.join(","))
    }
}
