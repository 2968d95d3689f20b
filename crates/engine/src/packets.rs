//! What all packet connections of a process counted, for its statistics: also those that are over.
//!
//! Each connection keeps counts of its own, without atomics. Its thread brings what is new here a few
//! times a second ([`Counted::bring`]).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use evener_proto::packet::{Connection, ROUND_TRIPS, Stats};

/// Names of what is counted, in the record's words, and where it is found.
const NAMES: [&str; 17] = [
    "sent",
    "sent_bytes",
    "payload_bytes",
    "received",
    "acks",
    "lost",
    "timed_out",
    "late",
    "silences",
    "replaced",
    "echoed_bytes",
    "malformed",
    "forged",
    "replayed",
    "not_posted",
    "stray",
    "marked",
];

fn values(stats: &Stats) -> [u64; NAMES.len()] {
    [
        stats.sent,
        stats.sent_bytes,
        stats.payload,
        stats.received,
        stats.acks,
        stats.lost,
        stats.timed_out,
        stats.late,
        stats.silences,
        stats.replaced,
        stats.echoes,
        stats.malformed,
        stats.forged,
        stats.replayed,
        stats.not_posted,
        stats.stray,
        stats.marked,
    ]
}

/// Packets of a process. Callers read its neighbours for each request: it has its own cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Packets {
    counts: [AtomicU64; NAMES.len()],
    round_trips: [AtomicU64; ROUND_TRIPS],
    /// Packets at the door by those who have not the token, or of no connection.
    strangers: AtomicU64,
    /// Bytes that a processor copied: out of callers' memory and to the kernel; from it and into theirs.
    copied: [AtomicU64; 2],
}

/// What a connection has brought so far.
#[derive(Debug)]
pub struct Counted {
    counts: [u64; NAMES.len()],
    round_trips: [u64; ROUND_TRIPS],
    /// Copied since, sending and receiving.
    copied: [u64; 2],
}

impl Default for Counted {
    fn default() -> Self {
        Counted {
            counts: [0; NAMES.len()],
            round_trips: [0; ROUND_TRIPS],
            copied: [0; 2],
        }
    }
}

impl Counted {
    /// Bytes were copied on their way out.
    pub fn copied_out(&mut self, bytes: usize) {
        self.copied[0] += bytes as u64;
    }

    /// Bytes were copied on their way in.
    pub fn copied_in(&mut self, bytes: usize) {
        self.copied[1] += bytes as u64;
    }

    /// Brings what is new since the last time.
    pub fn bring(&mut self, connection: &Connection, to: &Packets) {
        let now = values(&connection.stats());
        for ((sum, before), now) in to.counts.iter().zip(&mut self.counts).zip(now) {
            sum.fetch_add(now - std::mem::replace(before, now), Relaxed);
        }
        let places = to.round_trips.iter().zip(&mut self.round_trips);
        for ((sum, before), now) in places.zip(connection.round_trips()) {
            sum.fetch_add(*now - std::mem::replace(before, *now), Relaxed);
        }
        for (sum, more) in to.copied.iter().zip(&mut self.copied) {
            sum.fetch_add(std::mem::take(more), Relaxed);
        }
    }
}

impl Packets {
    /// A packet came to the door that nobody with the token has sent.
    pub fn stranger(&self) {
        self.strangers.fetch_add(1, Relaxed);
    }

    /// Bytes that a processor copied: sending, receiving.
    pub fn copied(&self) -> [u64; 2] {
        self.copied.each_ref().map(|one| one.load(Relaxed))
    }

    /// As JSON.
    pub fn json(&self) -> String {
        let counts = NAMES.iter().zip(&self.counts);
        let counts = counts.map(|(name, count)| format!("\"{name}\":{},", count.load(Relaxed)));
        let places = self
            .round_trips
            .each_ref()
            .map(|one| one.load(Relaxed).to_string());
        format!(
            "{{{}\"strangers\":{},\"rtt_us_log2\":[{}]}}",
            counts.collect::<String>(),
            self.strangers.load(Relaxed),
            places.join(",")
        )
    }
}
