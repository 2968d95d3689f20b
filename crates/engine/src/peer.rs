//! The process at the other end.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use crate::addresses::Addresses;
use crate::hello::ProcessId;
use crate::link::{Link, Traffic};

/// What a connection is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// Streams of TCP.
    Tcp,
    /// Packets over UDP.
    Udp,
}

/// A process, as this one sees it. `mirror`: this very process, seen from the accepting end of a
/// connection to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey {
    /// Which process.
    pub process: ProcessId,
    /// The accepting end of a connection to ourselves.
    pub mirror: bool,
    /// What leads there: a process may be reached by both.
    pub transport: Transport,
    /// Which of the connections to it; of TCP there is one. One thread moves all packets of a connection,
    /// so comms are dealt out over as many as there are threads.
    pub connection: u8,
}

/// See the module.
#[derive(Debug)]
pub struct Peer {
    /// Who it is.
    pub key: PeerKey,
    /// What admits to it.
    pub token: [u8; 16],
    /// Where it listens.
    pub port: u16,
    /// The worker that takes its comms' requests.
    pub home: usize,
    /// Its addresses, as far as known.
    pub addresses: Mutex<Addresses>,
    /// For people, and in statistics: its first address when it was new.
    name: String,
    /// Who uses it: comms, offers of comms, connections on their way ([`Claim`]).
    pub claims: AtomicUsize,
    /// Connections.
    pub connections: AtomicUsize,
    /// What its link has to do, to be seen without the lock.
    pub traffic: Arc<Traffic>,
    /// What became of the flows that were tried out.
    pub placement: Placement,
    /// The protocol between it and us.
    pub link: Mutex<Link>,
}

/// What became of the flows that were tried out ([`evener_proto::dial`]), for statistics.
#[derive(Debug, Default)]
pub struct Placement {
    /// Times that flows were opened to see whether the sum grows.
    pub trials: AtomicU64,
    /// Times that it grew.
    pub gains: AtomicU64,
    /// Flows that were replaced by one from another port.
    pub rerolls: AtomicU64,
    /// Most bytes per second that were sent to the peer within a tenth of a second.
    pub best: AtomicU64,
}

impl Peer {
    /// A peer without a link that anybody would use.
    #[cfg(test)]
    pub fn for_tests(key: PeerKey) -> Peer {
        let config = crate::config::Config::default();
        let silences = Default::default();
        Peer::new(
            key,
            [0; 16],
            0,
            0,
            Vec::new(),
            Link::new(&config, silences, Default::default()),
        )
    }

    /// A peer without connections that nobody claims.
    pub fn new(
        key: PeerKey,
        token: [u8; 16],
        port: u16,
        home: usize,
        addresses: Vec<IpAddr>,
        link: Link,
    ) -> Peer {
        let id: String = key.process[..3]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let name = match addresses.first() {
            Some(address) => format!("{address}:{port} ({id})"),
            None => id,
        };
        let addresses = Addresses {
            edition: 0,
            list: addresses,
        };
        Peer {
            key,
            token,
            port,
            home,
            addresses: Mutex::new(addresses),
            name,
            claims: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            traffic: link.traffic().clone(),
            placement: Placement::default(),
            link: Mutex::new(link),
        }
    }

    /// For people, and in statistics: it stays when the addresses change.
    pub fn name(&self) -> &str {
        &self.name
    }
}
