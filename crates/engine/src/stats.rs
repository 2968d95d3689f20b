//! What each path did, kept by its worker and read by everybody.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
    /// The kernel's delivery rate, bytes a second.
    pub rate: u64,
    /// Smoothed round trip, microseconds.
    pub rtt_us: u64,
    /// Segments sent again.
    pub retransmits: u64,
    /// Microseconds in which something was in flight.
    pub busy_us: u64,
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
            suspect: self.suspect.load(Relaxed) == 1,
            heals: self.heals.load(Relaxed),
        }
    }
}
