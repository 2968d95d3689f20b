//! What can be chosen.

use std::path::PathBuf;
use std::time::Duration;

use crate::nics::Family;

/// What carries what this process sends. It takes what comes by TCP, and unless it is told to use TCP
/// alone by UDP too, so the processes of a job may differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Streams.
    Tcp,
    /// Packets, to processes that take them.
    Udp,
    /// The same, past the kernel where a card allows it.
    Xdp,
}

/// What can be chosen.
#[derive(Debug, Clone)]
pub struct Config {
    /// What carries what is sent.
    pub engine: Choice,
    /// Which interfaces: NCCL's rules.
    pub interfaces: Option<String>,
    /// Which addresses.
    pub family: Family,
    /// Worker threads; 0: by the number of processors.
    pub workers: usize,
    /// Connections to a peer at the start, over all routes.
    pub flows: usize,
    /// And at most.
    pub most_flows: usize,
    /// Congestion control by name; `None`: by what the system has.
    pub congestion: Option<String>,
    /// With no path for this long, a comm fails.
    pub timeout: Duration,
    /// Eager slots a comm has.
    pub eager_slots: usize,
    /// Bytes of each.
    pub eager_bytes: u64,
    /// Where statistics are written.
    pub stats_dir: Option<PathBuf>,
    /// Where what the UDP engine does is written, packet by packet.
    pub trace_dir: Option<PathBuf>,
    /// Bytes of that for a process, at most.
    pub trace_bytes: u64,
    /// What tells this engine's statistics from those of another in the process: a suffix.
    pub label: &'static str,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            engine: Choice::Tcp,
            interfaces: None,
            family: Family::Any,
            workers: 0,
            flows: 16,
            most_flows: 32,
            congestion: None,
            timeout: Duration::from_secs(60),
            eager_slots: 4,
            eager_bytes: 16 << 10,
            stats_dir: None,
            trace_dir: None,
            trace_bytes: 64_000_000,
            label: "",
        }
    }
}
