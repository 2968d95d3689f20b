//! The packet protocol over UDP sockets: any machine, no privilege. Not in the plug-in yet.
//!
//! One socket for each source port. Several packets of one path go to the kernel in one call (GSO) and
//! come from it in one (GRO); quinn-udp finds out what the kernel has. Sockets are marked as capable
//! of ECN, and marks by switches are handed on.
//!
//! One thread drives a [`Driver`]: it never blocks but in [`Driver::wait`], and nothing is shared.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use evener_proto::packet::{
    Accepted, Config, Connection, Dropped, Event, JobKey, Own, Place, Span, Stats, accept,
};
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, UdpSocketState};

use crate::sys::{Epoll, Ready};

/// Bytes that one call to the kernel takes at most.
const MOST: usize = 65_000;
/// Asked for; the kernel gives what net.core.rmem_max allows.
const BUFFER: usize = 4 << 20;

/// What one end of a connection does with bytes.
pub trait Bytes {
    /// Fills in bytes of a message that goes out.
    fn read(&mut self, span: &Span, to: &mut [u8]);
    /// Takes bytes of a message that came in. They are inside of the posted buffer.
    fn place(&mut self, place: Place<'_>);
}

struct Port {
    socket: UdpSocket,
    state: UdpSocketState,
}

/// A connection over UDP sockets.
pub struct Driver {
    ports: Vec<Port>,
    /// The peer's port that the first packet went to or came from.
    peer: Option<SocketAddr>,
    connection: Option<Box<Connection>>,
    config: Config,
    key: JobKey,
    own: Own,
    begun: Instant,
    /// Received packets, and packets that wait for the kernel.
    inbox: Vec<Vec<u8>>,
    outbox: Vec<u8>,
    epoll: Epoll,
    /// Which sockets have something.
    ready: Vec<Ready>,
    segment: usize,
    /// Calls to the kernel that sent and that received something.
    pub calls: (u64, u64),
    /// Datagrams that the kernel refused to take.
    pub refused: u64,
}

fn own() -> io::Result<Own> {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let (random, number) = bytes.split_at(8);
    let random = random.try_into().map_or(1, u64::from_le_bytes);
    let connection = number.try_into().map_or(1, u32::from_le_bytes) | 1;
    Ok(Own { connection, random })
}

impl Driver {
    fn new(first: SocketAddr, config: Config, key: JobKey) -> io::Result<Driver> {
        let mut ports = Vec::new();
        let epoll = Epoll::new()?;
        for at in 0..config.paths.clamp(1, 256) {
            let address = SocketAddr::new(first.ip(), if at == 0 { first.port() } else { 0 });
            let socket = UdpSocket::bind(address)?;
            socket.set_nonblocking(true)?;
            let state = UdpSocketState::new((&socket).into())?;
            // What the kernel does not grant makes for more losses and no error.
            let _ = state.set_recv_buffer_size((&socket).into(), BUFFER);
            let _ = state.set_send_buffer_size((&socket).into(), BUFFER);
            epoll.add_readable(socket.as_raw_fd(), at as u64)?;
            ports.push(Port { socket, state });
        }
        Ok(Driver {
            ports,
            peer: None,
            connection: None,
            config,
            key,
            own: own()?,
            begun: Instant::now(),
            inbox: vec![vec![0; 1 << 16]; BATCH_SIZE],
            outbox: Vec::with_capacity(MOST),
            epoll,
            ready: Vec::new(),
            segment: 0,
            calls: (0, 0),
            refused: 0,
        })
    }

    /// Connects to a peer that listens there.
    ///
    /// # Errors
    /// Of the sockets.
    pub fn connect(peer: SocketAddr, config: Config, key: JobKey) -> io::Result<Driver> {
        let any = if peer.is_ipv6() {
            "[::]:0"
        } else {
            "0.0.0.0:0"
        };
        let any = any.parse().map_err(io::Error::other)?;
        let mut driver = Driver::new(any, config, key)?;
        let connection =
            Connection::connect(driver.config.clone(), key, driver.own, Duration::ZERO);
        driver.peer = Some(peer);
        driver.connection = Some(Box::new(connection));
        Ok(driver)
    }

    /// Waits for the first peer that has the key, at this address.
    ///
    /// # Errors
    /// Of the sockets.
    pub fn listen(at: SocketAddr, config: Config, key: JobKey) -> io::Result<Driver> {
        Driver::new(at, config, key)
    }

    /// The address of the first socket.
    ///
    /// # Errors
    /// Of the socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self.ports.first() {
            Some(port) => port.socket.local_addr(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Queues a message; see [`Connection::send`]. `None`: there is no connection yet.
    pub fn send(&mut self, channel: u32, length: u64) -> Option<u64> {
        Some(self.connection.as_mut()?.send(channel, length))
    }

    /// Posts a buffer; see [`Connection::post`]. `None`: there is no connection yet.
    pub fn post(&mut self, channel: u32, room: u64) -> Option<u64> {
        Some(self.connection.as_mut()?.post(channel, room))
    }

    /// What happened.
    pub fn event(&mut self) -> Option<Event> {
        self.connection.as_mut()?.event()
    }

    /// What was counted.
    pub fn stats(&self) -> Stats {
        self.connection
            .as_ref()
            .map(|connection| connection.stats())
            .unwrap_or_default()
    }

    /// The connection, to be looked at.
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.as_deref()
    }

    /// Ends the connection and says so to the peer.
    pub fn close(&mut self, memory: &mut dyn Bytes) {
        if let Some(connection) = &mut self.connection {
            connection.close();
        }
        self.transmit(memory);
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Receives what is there, sends what may go. How many datagrams came.
    pub fn turn(&mut self, memory: &mut dyn Bytes) -> usize {
        let came = self.receive(memory);
        let now = self.now();
        if let Some(connection) = &mut self.connection {
            connection.on_time(now);
        }
        self.transmit(memory);
        came
    }

    fn receive(&mut self, memory: &mut dyn Bytes) -> usize {
        let mut came = 0;
        let mut inbox = std::mem::take(&mut self.inbox);
        if self
            .epoll
            .wait(&mut self.ready, Some(Duration::ZERO))
            .is_err()
        {
            self.ready.clear();
        }
        for at in 0..self.ready.len() {
            let at = self.ready[at].token as usize;
            let mut metas = [RecvMeta::default(); BATCH_SIZE];
            let port = &self.ports[at];
            let mut slices: Vec<IoSliceMut<'_>> = inbox
                .iter_mut()
                .map(|buffer| IoSliceMut::new(buffer))
                .collect();
            // An error says that a port of the peer is closed, or that nothing is there.
            let Ok(count) = port
                .state
                .recv((&port.socket).into(), &mut slices, &mut metas)
            else {
                continue;
            };
            self.calls.1 += 1;
            for (buffer, meta) in inbox.iter().zip(&metas).take(count) {
                let Some(bytes) = buffer.get(..meta.len) else {
                    continue;
                };
                let marked = meta.ecn == Some(EcnCodepoint::Ce);
                for packet in bytes.chunks(meta.stride.max(1)) {
                    came += 1;
                    self.hear(packet, meta.addr, marked, memory);
                }
            }
        }
        self.inbox = inbox;
        came
    }

    fn hear(&mut self, packet: &[u8], from: SocketAddr, marked: bool, memory: &mut dyn Bytes) {
        let now = self.now();
        if let Some(connection) = &mut self.connection {
            let _ = connection.receive(packet, marked, now, &mut |place| memory.place(place));
            return;
        }
        match accept(self.config.clone(), self.key, self.own, packet, now) {
            Ok(Accepted::Connection(connection)) => {
                self.connection = Some(connection);
                self.peer = Some(from);
            }
            Ok(Accepted::Reply(reply)) => {
                if let Some(port) = self.ports.first() {
                    let _ = port.socket.send_to(&reply, from);
                }
            }
            Err(
                Dropped::Malformed(_)
                | Dropped::Forged
                | Dropped::Replayed
                | Dropped::NotPosted
                | Dropped::Stray
                | Dropped::Nonsense(_),
            ) => {}
        }
    }

    fn transmit(&mut self, memory: &mut dyn Bytes) {
        let now = self.now();
        let mut current = None;
        let mut buffer = [0; 9216];
        while let Some(sent) = self.connection.as_mut().and_then(|connection| {
            connection.transmit(now, &mut buffer, &mut |span, to| memory.read(span, to))
        }) {
            let path = usize::from(sent.path);
            // One call holds packets of one path and one size; the last may be shorter.
            let most = self
                .ports
                .get(path)
                .map_or(1, |port| port.state.max_gso_segments());
            let full = self.outbox.len() + sent.length > MOST
                || (self.segment > 0 && self.outbox.len() >= self.segment * most);
            let ended = self.segment > 0 && !self.outbox.len().is_multiple_of(self.segment);
            if current != Some(path) || full || ended || sent.length > self.segment {
                self.flush(current);
                (current, self.segment) = (Some(path), sent.length);
            }
            self.outbox.extend_from_slice(&buffer[..sent.length]);
        }
        self.flush(current);
    }

    fn flush(&mut self, path: Option<usize>) {
        let (Some(port), Some(peer)) = (path.and_then(|path| self.ports.get(path)), self.peer)
        else {
            self.outbox.clear();
            return;
        };
        if !self.outbox.is_empty() {
            let several = self.outbox.len() > self.segment;
            let transmit = quinn_udp::Transmit {
                destination: peer,
                ecn: Some(EcnCodepoint::Ect0),
                contents: &self.outbox,
                segment_size: several.then_some(self.segment),
                src_ip: None,
            };
            // What the kernel has no room for is lost, as in the network, and goes again.
            if port
                .state
                .try_send((&port.socket).into(), &transmit)
                .is_err()
            {
                self.refused += 1;
            }
            self.calls.0 += 1;
        }
        self.outbox.clear();
    }

    /// Sleeps until a datagram is there or something is due, `longest` at most.
    ///
    /// # Errors
    /// Of poll(2).
    pub fn wait(&mut self, longest: Duration) -> io::Result<()> {
        let now = self.now();
        let due = self
            .connection
            .as_mut()
            .and_then(|connection| connection.deadline());
        let time = due.map_or(longest, |due| due.saturating_sub(now).min(longest));
        // epoll counts milliseconds: what is due before one is over is looked for without sleep.
        let sleeps = Duration::from_millis(time.as_millis() as u64);
        if sleeps.is_zero() {
            std::thread::yield_now();
        }
        self.epoll.wait(&mut self.ready, Some(sleeps))
    }
}
