//! The packet protocol over UDP sockets: any machine, no privilege.
//!
//! [`instance`] is what the engine runs: a thread with its own connections, comms and sockets. The
//! [`Driver`] here is one connection for tests and measurements. [`ports`] has the sockets of both,
//! [`cards`] what goes past the kernel.
//!
//! One thread drives a [`Driver`]: it never blocks but in [`Driver::wait`], and nothing is shared.

mod association;
mod away;
pub mod batch;
mod cards;
#[cfg(any(test, fuzzing))]
pub mod hostile;
pub mod instance;
pub mod ports;
mod signals;

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use evener_proto::packet::{
    Accepted, Config, Connection, Dropped, Event, JobKey, Own, Place, Span, Stats, accept,
};

use crate::nics::Nic;
use crate::shared::Shared;
use crate::sys::{Epoll, Ready};
use batch::Batch;
use ports::{Came, LARGEST, Port, Reader};

/// What one end of a connection does with bytes.
pub trait Bytes {
    /// Fills in bytes of a message that goes out.
    fn read(&mut self, span: &Span, to: &mut [u8]);
    /// Takes bytes of a message that came in. They are inside of the posted buffer.
    fn place(&mut self, place: Place<'_>);
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
    reader: Reader,
    batch: Batch,
    epoll: Epoll,
    /// Which sockets have something.
    ready: Vec<Ready>,
    /// Calls to the kernel that sent and that received something.
    pub calls: (u64, u64),
    /// Datagrams that the kernel refused to take.
    pub refused: u64,
}

/// Bytes that a link carries in a packet, its headers included.
fn mtu(nic: &Nic) -> usize {
    let text = std::fs::read_to_string(format!("/sys/class/net/{}/mtu", nic.name));
    text.ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1500)
}

/// What a connection is made with.
fn config(shared: &Shared) -> Config {
    let nics = shared.nics();
    let least = nics.iter().map(mtu).min().unwrap_or(1500);
    let v6 = nics.iter().any(|nic| nic.address.is_ipv6());
    let headers = if v6 { 48 } else { 28 };
    let used = shared.config.flows.clamp(1, 128);
    Config {
        paths: 2 * used,
        used,
        datagram: least.clamp(600, 1500) - headers,
        most_datagram: least.clamp(600, LARGEST.min(9000)) - headers,
        patience: shared.config.timeout,
        ..Config::default()
    }
}

pub(crate) fn own() -> io::Result<Own> {
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
            let port = Port::bind(address, None)?;
            epoll.add_readable(port.fd(), at as u64)?;
            ports.push(port);
        }
        Ok(Driver {
            ports,
            peer: None,
            connection: None,
            config,
            key,
            own: own()?,
            begun: Instant::now(),
            reader: Reader::new(),
            batch: Batch::default(),
            epoll,
            ready: Vec::new(),
            calls: (0, 0),
            refused: 0,
        })
    }

    /// Connects to a peer that listens there.
    ///
    /// # Errors
    /// Errors of the sockets.
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
    /// Errors of the sockets.
    pub fn listen(at: SocketAddr, config: Config, key: JobKey) -> io::Result<Driver> {
        Driver::new(at, config, key)
    }

    /// The address of the first socket.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self.ports.first() {
            Some(port) => port.address(),
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
        if self
            .epoll
            .wait(&mut self.ready, Some(Duration::ZERO))
            .is_err()
        {
            self.ready.clear();
        }
        let mut reader = std::mem::take(&mut self.reader);
        let ports = std::mem::take(&mut self.ports);
        for at in 0..self.ready.len() {
            let at = self.ready[at].token as usize;
            let begun = self.begun;
            let clock = || begun.elapsed();
            let hear = |packet: &Came<'_>, now| self.hear(&ports, packet, now, memory);
            if let Some(count) = reader.read(&ports[at], clock, hear) {
                came += count;
                self.calls.1 += 1;
            }
        }
        (self.reader, self.ports) = (reader, ports);
        came
    }

    fn hear(&mut self, ports: &[Port], came: &Came<'_>, now: Duration, memory: &mut dyn Bytes) {
        if let Some(connection) = &mut self.connection {
            let place = &mut |place: Place<'_>| memory.place(place);
            let _ = connection.receive(came.packet, came.arrival, now, place);
            return;
        }
        match accept(self.config.clone(), self.key, self.own, came.packet, now) {
            Ok(Accepted::Connection(connection)) => {
                self.connection = Some(connection);
                self.peer = Some(came.from);
            }
            Ok(Accepted::Reply(reply)) => {
                if let Some(port) = ports.first() {
                    port.send(came.from, &reply, reply.len());
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
        let (Some(connection), Some(peer)) = (&mut self.connection, self.peer) else {
            return;
        };
        let (ports, calls, refused) = (&self.ports, &mut self.calls, &mut self.refused);
        let mut send = |path: usize, packets: &[u8], segment| {
            // What the kernel has no room for is lost, as in the network, and goes again.
            let taken = ports
                .get(path)
                .is_some_and(|port| port.send(peer, packets, segment));
            calls.0 += 1;
            *refused += u64::from(!taken);
        };
        while let Some(sent) = connection.transmit(now, self.batch.place(), &mut |span, to| {
            memory.read(span, to)
        }) {
            let path = usize::from(sent.path);
            self.batch
                .add(path, sent.length, ports.get(path), &mut send);
        }
        self.batch.flush(&mut send);
    }

    /// Sleeps until a datagram is there or something is due, `longest` at most.
    ///
    /// # Errors
    /// Errors of poll(2).
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
