//! Connections before frames flow on them: dialled or accepted, greeted, answered, handed to a worker.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use evener_proto::PathId;
use evener_proto::dial::Route;
use evener_proto::packet::JobKey;
use socket2::{Domain, Protocol, Socket, Type};

use super::LISTENER;
use super::{
    Control, DIAL_TIME, FRUITLESS, GREETING_TIME, Handshake, Kind, LOW_WATER, MOST_GREETINGS,
    PORTS, SMALL, Said,
};
use crate::hello::{
    ADDRESS, ANSWER, Answer, CHALLENGE, GREETING, Greeting, MOST_ADDRESSES, Met, PROOF, TAG,
    other_version, tag_of,
};
use crate::lock::lock;
use crate::log::Level;
use crate::peer::{PeerKey, Transport};
use crate::peers::Claim;
use crate::stats::PathStats;
use crate::sys::{self, Memory};
use crate::task::StreamTask;

impl Control {
    pub(super) fn dial(
        &mut self,
        key: PeerKey,
        (flow, route): (u64, Route),
        entropy: u64,
        again: bool,
    ) -> std::io::Result<()> {
        let none = || std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
        let state = self.peers.get(&key).ok_or_else(none)?;
        let nics = self.shared.nics();
        let nic = nics.get(route.local).ok_or_else(none)?;
        let remote = lock(&state.peer.addresses)
            .list
            .get(route.remote)
            .copied()
            .ok_or_else(none)?;
        let to = SocketAddr::new(remote, state.peer.port);
        let small = state.fruitless >= FRUITLESS;
        if state.fruitless == FRUITLESS {
            let name = state.peer.name();
            let text = format!(
                "large packets to {name} seem to vanish: segments of {SMALL} bytes are taken. \
                 fix: the MTU of this node's interfaces, or of a link on the way"
            );
            self.shared.log(Level::Warn, &text);
            if let Some(state) = self.peers.get_mut(&key) {
                state.fruitless += 1;
            }
        }
        let mut entropy = entropy;
        let mut tries = 0;
        let socket = loop {
            let socket = new_socket(&remote)?;
            self.prepare(&socket, Some(&nic.name), &remote);
            if small {
                // Before it connects: the peer is told as well.
                let _ = sys::set_most_segment(socket.as_raw_fd(), SMALL);
            }
            // Ports in a row hash badly on some fabrics; these are all over the range.
            let span = PORTS.end - PORTS.start;
            let port = (PORTS.start + entropy % span) as u16;
            socket.set_reuse_address(true)?;
            let from = SocketAddr::new(nic.address, port);
            let result = socket
                .bind(&from.into())
                .and_then(|()| socket.connect(&to.into()));
            match result {
                Ok(()) => break socket,
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => break socket,
                Err(error)
                    // A port that was used before is wanted for the path that it leads to.
                    if !again
                        && tries < 16
                        && matches!(
                            error.kind(),
                            std::io::ErrorKind::AddrInUse | std::io::ErrorKind::AddrNotAvailable
                        ) =>
                {
                    tries += 1;
                    entropy = entropy.rotate_left(16) ^ 0x9e37_79b9;
                }
                Err(error) => return Err(error),
            }
        };
        let kind = Kind::Outgoing {
            peer: key,
            flow,
            path: PathId(self.shared.random()),
            route,
            said: Said::Nothing,
        };
        let time = if again { DIAL_TIME } else { DIAL_TIME * 2 };
        self.watch(socket, kind, time)
    }

    fn prepare(&self, socket: &Socket, nic: Option<&str>, peer: &IpAddr) {
        // Each of these makes things better where the kernel has it; none is needed.
        let _ = socket.set_tcp_nodelay(true);
        let fd = socket.as_raw_fd();
        let _ = sys::set_unsent_low_water(fd, LOW_WATER);
        if let Some(name) = &self.shared.congestion {
            let _ = sys::set_congestion(fd, name);
        }
        if self.shared.nics().len() > 1
            && !peer.is_loopback()
            && let Some(nic) = nic
        {
            // Two NICs in one subnet: the routing table alone would send all through the first.
            let _ = socket.bind_device(Some(nic.as_bytes()));
        }
    }

    fn watch(&mut self, socket: Socket, kind: Kind, time: Duration) -> std::io::Result<()> {
        let now = self.now();
        let index = match self.handshakes.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.handshakes.push(None);
                self.handshakes.len() - 1
            }
        };
        self.epoll.add_edge(socket.as_raw_fd(), index as u64)?;
        self.handshakes[index] = Some(Handshake {
            socket,
            kind,
            bytes: Vec::new(),
            until: now + time,
            began: now,
        });
        // What came before it was watched raises no edge.
        self.step(index);
        Ok(())
    }

    pub(super) fn accept(&mut self) {
        loop {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) => return self.not_accepted(&error),
            };
            let incoming = |shake: &Option<Handshake>| {
                shake
                    .as_ref()
                    .is_some_and(|shake| matches!(shake.kind, Kind::Incoming(_)))
            };
            let count = self.handshakes.iter().filter(|one| incoming(one)).count();
            if count >= MOST_GREETINGS {
                let oldest = (0..self.handshakes.len())
                    .filter(|index| incoming(&self.handshakes[*index]))
                    .min_by_key(|index| self.handshakes[*index].as_ref().map(|shake| shake.began));
                if let Some(oldest) = oldest {
                    self.handshakes[oldest] = None;
                }
            }
            if socket.set_nonblocking(true).is_ok() {
                let _ = self.watch(socket, Kind::Incoming(None), GREETING_TIME);
            }
        }
    }

    /// Without descriptors the listener stays readable: it is left alone for a while, or the loop would
    /// turn without an end.
    fn not_accepted(&mut self, error: &std::io::Error) {
        let code = error.raw_os_error().unwrap_or(0);
        let short = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
        if !short.contains(&code) || self.epoll.remove(self.listener.as_raw_fd()).is_err() {
            return;
        }
        if !self.short {
            self.short = true;
            self.shared.log(
                Level::Warn,
                &format!(
                    "a peer cannot be accepted ({error}): raise the limit of open files (ulimit -n)"
                ),
            );
        }
        self.deaf = Some(self.now());
    }

    /// The time to try again has come.
    pub(super) fn listen_again(&mut self) {
        self.deaf = None;
        if self
            .epoll
            .add_readable(self.listener.as_raw_fd(), LISTENER)
            .is_err()
        {
            self.deaf = Some(self.now());
        }
    }

    pub(super) fn give_up(&mut self, index: usize, why: &std::io::Error) {
        let Some(shake) = self.handshakes.get_mut(index).and_then(Option::take) else {
            return;
        };
        if let Kind::Outgoing {
            peer, flow, route, ..
        } = shake.kind
        {
            let now = self.now();
            if let Some(state) = self.peers.get_mut(&peer) {
                state.dialer.failed(flow, now);
                let nics = self.shared.nics();
                let nic = nics.get(route.local);
                let nic = nic.map_or("?", |nic| nic.name.as_str());
                let name = state.peer.name();
                let text = format!("no connection from {nic} to {name}: {why}; trying again");
                self.shared.log(Level::Debug, &text);
            }
            self.answered(peer, why.kind() == ErrorKind::ConnectionRefused);
        }
    }

    /// Goes on with a handshake as far as it goes.
    pub(super) fn step(&mut self, index: usize) {
        match self.try_step(index) {
            Ok(()) => {}
            Err(error) => self.give_up(index, &error),
        }
    }

    fn try_step(&mut self, index: usize) -> std::io::Result<()> {
        self.greet(index)?;
        while let Some(bytes) = self.hear(index)? {
            if !self.go_on(index, &bytes)? {
                break;
            }
        }
        Ok(())
    }

    /// Says the greeting, once it is connected.
    fn greet(&mut self, index: usize) -> std::io::Result<()> {
        let Some(Some(shake)) = self.handshakes.get_mut(index) else {
            return Ok(());
        };
        let Kind::Outgoing {
            peer,
            path,
            route,
            said,
            ..
        } = &mut shake.kind
        else {
            return Ok(());
        };
        if !matches!(said, Said::Nothing) {
            return Ok(());
        }
        if let Some(error) = shake.socket.take_error()? {
            return Err(error);
        }
        if shake.socket.peer_addr().is_err() {
            return Ok(()); // Not connected yet.
        }
        let state = self.peers.get(peer).ok_or_else(refuse)?;
        let greeting = Greeting {
            to: peer.process,
            from: self.shared.process,
            random: self.shared.nonce(),
            port: self.shared.port,
            path: path.0,
            local: route.local as u8,
            remote: route.remote as u8,
            addresses: self.shared.nics().addresses(),
        };
        let bytes = greeting.emit(&JobKey::new(state.peer.token));
        *said = Said::Greeting(tag_of(&bytes));
        say(&shake.socket, &bytes)
    }

    /// What the other end says next, once all of it is there.
    fn hear(&mut self, index: usize) -> std::io::Result<Option<Vec<u8>>> {
        let Some(Some(shake)) = self.handshakes.get_mut(index) else {
            return Ok(None);
        };
        let length = |bytes: &[u8]| -> Option<usize> {
            match &shake.kind {
                Kind::Incoming(None) if bytes.len() < GREETING => Some(GREETING),
                Kind::Incoming(None) => Greeting::length(bytes.first_chunk()?),
                Kind::Incoming(Some(_)) => Some(PROOF),
                Kind::Outgoing {
                    said: Said::Proof(_),
                    ..
                } if bytes.len() < ANSWER => Some(ANSWER),
                Kind::Outgoing {
                    said: Said::Proof(_),
                    ..
                } => Answer::length(bytes.first_chunk()?),
                Kind::Outgoing { .. } => Some(CHALLENGE),
            }
        };
        loop {
            let Some(want) = length(&shake.bytes) else {
                let version = other_version(&shake.bytes);
                return Err(version.map_or_else(refuse, |version| self.of_other(version)));
            };
            if shake.bytes.len() == want {
                return Ok(Some(std::mem::take(&mut shake.bytes)));
            }
            let mut part = [0u8; GREETING + ADDRESS * MOST_ADDRESSES + TAG];
            let mut memory = Memory::of(&mut part);
            memory.length = want - shake.bytes.len();
            // SAFETY: `part` is ours, and `want` is at most its size.
            #[allow(unsafe_code, reason = "reads into a buffer of this function")]
            let got = unsafe { sys::receive(shake.socket.as_raw_fd(), &[memory]) };
            match got {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => shake.bytes.extend_from_slice(&part[..got]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A process of another version of Evener's has dialled: that is said once.
    fn of_other(&mut self, version: u8) -> std::io::Error {
        let text = format!(
            "a peer greets in version {version} of the plug-in's protocol, and this is another: \
             install the same version of Evener on all nodes"
        );
        if !std::mem::replace(&mut self.mixed, true) {
            self.shared.log(Level::Warn, &text);
        }
        std::io::Error::new(ErrorKind::InvalidData, text)
    }

    /// Takes what was heard: whether more is to come.
    fn go_on(&mut self, index: usize, bytes: &[u8]) -> std::io::Result<bool> {
        let Some(Some(shake)) = self.handshakes.get_mut(index) else {
            return Ok(false);
        };
        let own = JobKey::new(self.shared.token);
        match &mut shake.kind {
            Kind::Incoming(None) => {
                let Some(greeting) = Greeting::parse(bytes, &own)
                    .filter(|greeting| greeting.to == self.shared.process)
                else {
                    let text = "a stranger's greeting was dropped";
                    self.shared.log(Level::Debug, text);
                    return Err(refuse());
                };
                let met = Met {
                    greeting: tag_of(bytes),
                    random: self.shared.nonce(),
                };
                say(&shake.socket, &met.challenge(&own))?;
                shake.kind = Kind::Incoming(Some((greeting, met)));
                return Ok(true);
            }
            Kind::Outgoing { peer, said, .. } => {
                let state = self.peers.get(peer).ok_or_else(refuse)?;
                if let Said::Greeting(tag) = said {
                    let key = JobKey::new(state.peer.token);
                    let met = Met::of_challenge(bytes, &key, *tag).ok_or_else(refuse)?;
                    say(&shake.socket, &met.proof(&key, self.shared.token))?;
                    *said = Said::Proof(met);
                    return Ok(true);
                }
            }
            Kind::Incoming(Some(_)) => {}
        }
        let Some(shake) = self.handshakes[index].take() else {
            return Ok(false);
        };
        match shake.kind {
            Kind::Incoming(Some((greeting, met))) => {
                let token = met.of_proof(bytes, &own).ok_or_else(refuse)?;
                self.greeted(shake.socket, &greeting, token, &met)?;
            }
            Kind::Outgoing {
                peer,
                flow,
                path,
                route,
                said: Said::Proof(met),
            } => {
                let now = self.now();
                let Some(state) = self.peers.get_mut(&peer) else {
                    return Ok(false);
                };
                let Some(answer) = Answer::parse(bytes, &JobKey::new(state.peer.token), &met)
                else {
                    state.dialer.failed(flow, now);
                    return Ok(false);
                };
                state.dialer.connected(flow, path, now);
                state.refused = None;
                let peer = state.peer.clone();
                self.learn(peer.key, &answer.addresses);
                let nics = self.shared.nics();
                let nic = nics.get(route.local);
                let nic = nic.map(|nic| (nic.name.clone(), nic.index));
                self.hand_over(shake.socket, Claim::of(&peer), path, nic, true);
            }
            _ => {}
        }
        Ok(false)
    }

    /// One of ours has dialled: `token` is its key.
    fn greeted(
        &mut self,
        socket: Socket,
        greeting: &Greeting,
        token: [u8; 16],
        met: &Met,
    ) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let key = PeerKey {
            process: greeting.from,
            mirror: greeting.from == shared.process,
            transport: Transport::Tcp,
            connection: 0,
        };
        let said = &greeting.addresses;
        let peer = shared.peer(key, token, greeting.port, &said.list, None);
        let path = PathId(greeting.path);
        self.learn(key, said);
        self.want(key);
        let nics = shared.nics();
        let nic = nics.get(usize::from(greeting.remote));
        let nic = nic.map(|nic| (nic.name.clone(), nic.index));
        let from = socket.peer_addr()?.as_socket();
        let ip = from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip());
        self.prepare(&socket, nic.as_ref().map(|nic| nic.0.as_str()), &ip);
        let answer = Answer {
            addresses: shared.nics().addresses(),
        };
        say(&socket, &answer.emit(&JobKey::new(shared.token), met))?;
        self.hand_over(socket, peer, path, nic, false);
        Ok(())
    }

    pub(super) fn hand_over(
        &self,
        socket: Socket,
        peer: Claim,
        path: PathId,
        nic: Option<(String, u32)>,
        dialled: bool,
    ) {
        // The side that dialled has chosen it: it tells the flow on both.
        let address = if dialled {
            socket.local_addr()
        } else {
            socket.peer_addr()
        };
        let port = address
            .ok()
            .and_then(|address| address.as_socket())
            .map_or(0, |address| address.port());
        let (name, interface) = nic.unwrap_or_default();
        let stats = Arc::new(PathStats::new(name, port, peer.name().to_owned()));
        let fd = OwnedFd::from(socket);
        self.shared.workers[peer.home].ask_own(StreamTask::Connect {
            peer,
            fd,
            path,
            interface,
            stats,
        });
    }
}

fn refuse() -> std::io::Error {
    std::io::Error::from(ErrorKind::InvalidData)
}

/// Says something short: a new connection has room for it.
fn say(socket: &Socket, bytes: &[u8]) -> std::io::Result<()> {
    if socket.send(bytes)? == bytes.len() {
        Ok(())
    } else {
        Err(refuse())
    }
}

fn new_socket(remote: &IpAddr) -> std::io::Result<Socket> {
    let domain = if remote.is_ipv4() {
        Domain::IPV4
    } else {
        Domain::IPV6
    };
    let socket = Socket::new(domain, Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    Ok(socket)
}
