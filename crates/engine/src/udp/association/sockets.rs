//! The sockets of a connection, one a path, and the addresses of the peer that they send to.
//!
//! A path is a source port. Those of the connecting side are dealt out over its NICs, and each goes to
//! an address of the peer that the same place in the peer's list has. The answering side takes the
//! routes that the kernel has, to the addresses from which it has heard.
//!
//! Where either list changes, a path whose NIC or address is another one gets another socket. The
//! connection takes it for one whose way through the network has changed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_proto::PathId;

use super::Effect;
use crate::lock::lock;
use crate::log::Level;
use crate::nics::Nic;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::stats::{PathStats, WorkerStats};
use crate::udp::batch::Batch;
use crate::udp::mtu;
use crate::udp::ports::Port;

/// After a socket could not be opened no other is for so long.
const OPEN_AGAIN: Duration = Duration::from_secs(1);
/// Most paths of a connection.
const MOST_PATHS: usize = 256;
/// Most addresses of the peer that packets are sent to.
const MOST_REMOTES: usize = 16;

/// A socket of ours, and what it did.
pub(super) struct Own {
    pub(super) port: Port,
    /// Where it is bound.
    pub(super) at: SocketAddr,
    /// Its NIC: the kernel's number and the address.
    nic: (u32, IpAddr),
    path: PathId,
    pub(super) stats: Arc<PathStats>,
    /// The card that it goes by, past the kernel.
    pub(super) card: Option<usize>,
    /// The peer sends to it.
    pub(super) heard: bool,
}

/// See the module.
pub(super) struct Sockets {
    peer: Arc<Peer>,
    /// Whether this side has opened the connection.
    initiates: bool,
    own: Vec<Option<Own>>,
    /// Those that are used.
    nics: Vec<Nic>,
    /// Bytes that each of these carries in a packet: a connection's packets grow to what the first ones
    /// carry.
    carry: usize,
    remotes: Vec<SocketAddr>,
    /// Where the last packet came from: what is to be known of it is known.
    heard_from: Option<SocketAddr>,
    /// Before this time no socket is opened: one could not be.
    opens_again: Duration,
    /// Packets that the peer's host has refused while it was silent.
    refused: u32,
}

impl Sockets {
    /// None yet, over these NICs to a peer with these addresses.
    pub(super) fn new(
        peer: Arc<Peer>,
        initiates: bool,
        nics: &[Nic],
        remotes: Vec<SocketAddr>,
    ) -> Sockets {
        Sockets {
            peer,
            initiates,
            own: Vec::new(),
            nics: nics.to_vec(),
            carry: nics.iter().map(mtu).min().unwrap_or(0),
            remotes,
            heard_from: None,
            opens_again: Duration::ZERO,
            refused: 0,
        }
    }

    /// All that are open.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Own> {
        self.own.iter().flatten()
    }

    /// That of a path.
    pub(super) fn get(&self, path: usize) -> Option<&Own> {
        self.own.get(path)?.as_ref()
    }

    /// That of a path.
    pub(super) fn get_mut(&mut self, path: usize) -> Option<&mut Own> {
        self.own.get_mut(path)?.as_mut()
    }

    /// That of a path, until [`Sockets::give_back`].
    pub(super) fn lend(&mut self, path: usize) -> Option<Own> {
        self.own.get_mut(path)?.take()
    }

    /// Puts back what [`Sockets::lend`] gave.
    pub(super) fn give_back(&mut self, path: usize, own: Own) {
        self.own[path] = Some(own);
    }

    /// Where a path leads.
    pub(super) fn remote(&self, path: usize) -> Option<&SocketAddr> {
        self.remotes.get(path % self.remotes.len().max(1))
    }

    /// Answers go back to where packets came from last: that way is open.
    pub(super) fn answer_to(&mut self, from: SocketAddr) {
        if self.heard_from == Some(from) {
            return;
        }
        self.heard_from = Some(from);
        let known = self
            .remotes
            .iter()
            .position(|known| known.ip() == from.ip());
        match known {
            Some(place) => self.remotes[place].set_port(from.port()),
            None if self.remotes.len() < MOST_REMOTES => self.remotes.push(from),
            None => {}
        }
    }

    /// This host has other NICs, or other addresses of them.
    pub(super) fn have(&mut self, nics: &[Nic], shared: &Shared) {
        let fits = |nic: &&Nic| mtu(nic) >= self.carry;
        let (used, small): (Vec<_>, Vec<_>) = nics.iter().partition(fits);
        // Where there is no other, packets become smaller once many have vanished.
        let (used, small) = match used.is_empty() {
            true => (small, used),
            false => (used, small),
        };
        self.nics = used.into_iter().cloned().collect();
        for nic in small {
            let text = format!(
                "{nic} carries {} bytes in a packet and others {}: it is not used for the UDP connection \
                 with {}. fix: give it the MTU of the others before it gets its address",
                mtu(nic),
                self.carry,
                self.peer.name()
            );
            shared.log(Level::Warn, &text);
        }
        self.open_others(shared);
    }

    /// The peer has these addresses.
    pub(super) fn peer_has(&mut self, list: &[IpAddr], shared: &Shared) {
        if !self.initiates {
            // Those that have gone. Where its addresses are translated on the way, none of them is known.
            let lives = |known: &SocketAddr| list.contains(&known.ip());
            if self.remotes.iter().any(lives) {
                self.remotes.retain(lives);
            }
            return;
        }
        let Some(port) = self.remotes.first().map(SocketAddr::port) else {
            return;
        };
        let reaches = |ip: &&IpAddr| {
            let mut nics = self.nics.iter();
            nics.any(|nic| nic.address.is_ipv4() == ip.is_ipv4())
        };
        let reached = list.iter().filter(reaches).take(MOST_REMOTES);
        let remotes: Vec<_> = reached.map(|ip| SocketAddr::new(*ip, port)).collect();
        if !remotes.is_empty() {
            self.remotes = remotes;
            self.open_others(shared);
        }
    }

    /// What each path's way begins and ends with.
    pub(super) fn ways(&self) -> impl Iterator<Item = Option<((u32, IpAddr), IpAddr)>> + use<> {
        let way = |path| {
            let remote = *self.remote(path)?;
            let nic = self.nic(path, remote)?;
            Some(((nic.index, nic.address), remote.ip()))
        };
        let all: Vec<_> = (0..MOST_PATHS).map(way).collect();
        all.into_iter()
    }

    /// The NIC of a path to this address.
    fn nic(&self, path: usize, remote: SocketAddr) -> Option<&Nic> {
        let matches = |nic: &&Nic| nic.address.is_ipv4() == remote.is_ipv4();
        let count = self.nics.iter().filter(matches).count();
        let place = path.checked_rem(count)?;
        self.nics.iter().filter(matches).nth(place)
    }

    /// The interface by which packets to this address have to leave.
    fn device<'a>(&self, nic: &'a Nic, remote: SocketAddr) -> Option<&'a str> {
        let several = self.nics.len() > 1 && !remote.ip().is_loopback();
        several.then_some(nic.name.as_str())
    }

    /// Closes sockets of NICs and addresses that their paths do not have any more: another is opened when
    /// the path is used.
    fn open_others(&mut self, shared: &Shared) {
        for path in 0..self.own.len() {
            let (Some(own), Some(remote)) = (self.get(path), self.remote(path)) else {
                continue;
            };
            let nic = self.nic(path, *remote);
            let device = nic.and_then(|nic| self.device(nic, *remote));
            let same = nic.is_some_and(|nic| own.nic == (nic.index, nic.address));
            if !self.initiates {
                // It sends by any. What a card says of itself is wrong when its address has changed.
                let lives = |nic: &Nic| own.nic == (nic.index, nic.address);
                if !self.nics.iter().any(lives)
                    && let Some(own) = self.get_mut(path)
                {
                    own.card = None;
                }
            } else if same {
                own.port.leave_by(device);
            } else {
                let id = own.path;
                self.own[path] = None;
                let why = "its NIC or its address is another one";
                lock(&shared.paths).end(self.peer.key.mirror, id, why);
            }
        }
    }

    /// The peer's welcome names the port of the thread that has the other end.
    pub(super) fn welcomed_by(&mut self, port: u16) {
        for remote in &mut self.remotes {
            remote.set_port(port);
        }
    }

    /// Packets that the peer's host has refused since it was last heard, which it `is` now.
    pub(super) fn refused(&mut self, is_heard: bool) -> u32 {
        self.refused += self.iter().map(|own| own.port.refusals()).sum::<u32>();
        if is_heard {
            self.refused = 0;
        }
        self.refused
    }

    /// Sends packets, each as long as `segment`. What the kernel has no room for is lost, as in the
    /// network, and goes again.
    pub(super) fn send(&self, counts: &WorkerStats, path: usize, packets: &[u8], segment: usize) {
        let (Some(own), Some(to)) = (self.get(path), self.remote(path)) else {
            return;
        };
        let began = Instant::now();
        if own.port.send(*to, packets, segment) {
            own.stats.sent(packets.len() as u64);
            counts.wrote(packets.len(), began.elapsed());
        }
    }

    /// The place of the socket for a path, which is opened if need be. Where there can be no more of them,
    /// one of those that there are: the process may be short of descriptors, and messages go on.
    pub(super) fn place_of(
        &mut self,
        path: usize,
        shared: &Shared,
        batch: &mut Batch,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) -> Option<usize> {
        if self.get(path).is_some() {
            return Some(path);
        }
        if now >= self.opens_again {
            let Err(error) = self.open(path, shared, batch) else {
                effects.push(Effect::Watch { path });
                return Some(path);
            };
            let first = self.opens_again.is_zero();
            self.opens_again = now + OPEN_AGAIN;
            let text = format!(
                "no UDP socket more to {}: {error}; those that there are carry all of it. \
                 fix: raise the limit of open files (ulimit -n)",
                self.peer.name()
            );
            let level = if first { Level::Warn } else { Level::Debug };
            shared.log(level, &text);
        }
        let open = self.own.iter().enumerate();
        let mut open = open.filter_map(|(place, own)| own.as_ref().map(|_| place));
        let count = open.clone().count();
        open.nth(path.checked_rem(count)?)
    }

    fn open(&mut self, path: usize, shared: &Shared, batch: &mut Batch) -> io::Result<()> {
        let none = || io::Error::from(io::ErrorKind::AddrNotAvailable);
        let remote = *self.remote(path).ok_or_else(none)?;
        let nic = self.nic(path, remote).ok_or_else(none)?.clone();
        let (address, device) = if self.initiates {
            (nic.address, self.device(&nic, remote))
        } else if remote.is_ipv4() {
            (IpAddr::from([0; 4]), None)
        } else {
            (IpAddr::from([0u16; 8]), None)
        };
        let card = batch
            .cards
            .as_mut()
            .and_then(|cards| Some((cards.of(&nic)?, cards.port()?)));
        let (card, port) = match card {
            Some((card, port)) => {
                port.leave_by(device);
                (Some(card), port)
            }
            None => (None, Port::bind(SocketAddr::new(address, 0), device)?),
        };
        let at = SocketAddr::new(address, port.address()?.port());
        let stats = Arc::new(PathStats::new(
            nic.name.clone(),
            at.port(),
            self.peer.name().to_owned(),
        ));
        let id = PathId(shared.random());
        lock(&shared.paths).insert(self.peer.key.mirror, id, stats.clone());
        self.own.resize_with(self.own.len().max(path + 1), || None);
        self.own[path] = Some(Own {
            port,
            at,
            nic: (nic.index, nic.address),
            path: id,
            stats,
            card,
            heard: false,
        });
        Ok(())
    }

    /// Closes a socket, as a network that cuts a path would; the path gets another when it is used. The
    /// one that the peer sends to is no path but an address: it stays.
    pub(super) fn cut(&mut self, path: PathId, why: &str, shared: &Shared) {
        for place in &mut self.own {
            let cuts = |own: &Own| own.path == path && (self.initiates || !own.heard);
            if place.as_ref().is_some_and(cuts) {
                *place = None;
                lock(&shared.paths).end(self.peer.key.mirror, path, why);
            }
        }
    }

    /// Closes all.
    pub(super) fn close(&mut self, why: &str, shared: &Shared) {
        let mut paths = lock(&shared.paths);
        for own in self.own.drain(..).flatten() {
            paths.end(self.peer.key.mirror, own.path, why);
        }
    }
}
