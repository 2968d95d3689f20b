//! UDP sockets: several packets go to the kernel in one call (GSO) and come from it in one (GRO).
//! quinn-udp finds out what the kernel has. Packets are marked as capable of ECN, and marks by
//! switches are handed on.

use std::cell::Cell;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evener_proto::packet::Arrival;
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{fds, sys};

/// Bytes that one call to the kernel takes at most.
pub(super) const MOST: usize = 65_000;
/// The largest datagram that is made here.
pub const LARGEST: usize = 9_216;
/// Asked for; the kernel gives what net.core.rmem_max allows.
const BUFFER: usize = 4 << 20;

/// One socket: one source port.
pub struct Port {
    socket: Arc<UdpSocket>,
    /// Others have it too, and see to it that a child of a fork lets go of it.
    held: bool,
    state: UdpSocketState,
    /// What was sent from it to ports that nobody has, as their host says.
    refused: Cell<u32>,
}

impl Port {
    /// Bound to this address, and to this interface where one is named.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn bind(address: SocketAddr, device: Option<&str>) -> io::Result<Port> {
        let domain = Domain::for_address(address);
        let socket = Socket::new(domain, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        if address.is_ipv6() && address.ip().is_unspecified() {
            socket.set_only_v6(false)?;
        }
        if let Some(name) = device {
            // It makes things better where the kernel allows it; it is not needed.
            let _ = socket.bind_device(Some(name.as_bytes()));
        }
        socket.bind(&address.into())?;
        let socket = UdpSocket::from(socket);
        let state = UdpSocketState::new((&socket).into())?;
        // What the kernel does not grant makes for more losses and no error.
        let _ = state.set_recv_buffer_size((&socket).into(), BUFFER);
        let _ = state.set_send_buffer_size((&socket).into(), BUFFER);
        fds::note(socket.as_raw_fd());
        // Where it is refused, a peer that has ended is missed for longer.
        let _ = sys::set_errors_told(socket.as_raw_fd(), address.is_ipv6());
        Ok(Port {
            socket: Arc::new(socket),
            held: false,
            state,
            refused: Cell::new(0),
        })
    }

    /// Over a socket that stays bound without this port.
    ///
    /// # Errors
    /// Errors of the socket.
    pub(super) fn held(socket: Arc<UdpSocket>) -> io::Result<Port> {
        let state = UdpSocketState::new((&*socket).into())?;
        let _ = state.set_recv_buffer_size((&*socket).into(), BUFFER);
        let _ = state.set_send_buffer_size((&*socket).into(), BUFFER);
        let v6 = socket.local_addr()?.is_ipv6();
        let _ = sys::set_errors_told(socket.as_raw_fd(), v6);
        Ok(Port {
            socket,
            held: true,
            state,
            refused: Cell::new(0),
        })
    }

    /// Packets leave by this interface (`None`: by any), where the kernel allows it.
    pub(super) fn leave_by(&self, device: Option<&str>) {
        let name = device.map(str::as_bytes);
        let _ = socket2::SockRef::from(&*self.socket).bind_device(name);
    }

    /// The descriptor, to wait for.
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Where it is.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Packets of `segment` bytes each (the last may be shorter) that one call takes.
    pub(super) fn segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    /// Hands packets of `segment` bytes each to the kernel. `false`: it has refused them, and they are
    /// lost, as in the network.
    pub fn send(&self, to: SocketAddr, packets: &[u8], segment: usize) -> bool {
        let several = packets.len() > segment;
        let transmit = quinn_udp::Transmit {
            destination: to,
            ecn: Some(EcnCodepoint::Ect0),
            contents: packets,
            segment_size: several.then_some(segment),
            src_ip: None,
        };
        let sent = self.state.try_send((&*self.socket).into(), &transmit);
        sent.inspect_err(|error| self.hear_errors(error)).is_ok()
    }

    /// Takes what the network says, of which an error of another call may tell.
    fn hear_errors(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::WouldBlock {
            return;
        }
        while let Some(refused) = sys::network_error(self.fd()) {
            self.refused.set(self.refused.get() + u32::from(refused));
        }
    }

    /// How often a host said that nobody has the port to which something was sent, since the last look.
    pub fn refusals(&self) -> u32 {
        self.refused.take()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if !self.held {
            fds::forget(self.socket.as_raw_fd());
        }
    }
}

/// A packet that came.
pub struct Came<'a> {
    /// Its bytes.
    pub packet: &'a [u8],
    /// From where.
    pub from: SocketAddr,
    /// To which address of this host, where the kernel says so.
    pub to: Option<IpAddr>,
    /// What is known of the way here.
    pub arrival: Arrival,
}

/// Buffers that a call fills where the kernel brings many packets in one (GRO). More would hold back
/// what is to be said about the first ones, and leave the processor's cache before they are read.
const FEW: usize = 6;
/// Bytes of a buffer, on the average, from which on the packets count as many.
const MANY: usize = 8 << 10;

/// Buffers for packets that come, for one thread. The default has none.
#[derive(Default)]
pub struct Reader {
    buffers: Vec<Vec<u8>>,
    /// How many the next call has.
    next: usize,
}

impl Reader {
    /// With as many buffers as one call fills.
    pub fn new() -> Self {
        Reader {
            buffers: vec![vec![0; 1 << 16]; BATCH_SIZE],
            next: BATCH_SIZE,
        }
    }

    /// One call to the kernel: `each` gets what came, and the time by `clock`. How many packets; `None`: nothing was
    /// there.
    pub fn read(
        &mut self,
        port: &Port,
        clock: impl Fn() -> Duration,
        mut each: impl FnMut(&Came<'_>, Duration),
    ) -> Option<usize> {
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut slices: Vec<IoSliceMut<'_>> = self
            .buffers
            .iter_mut()
            .take(self.next)
            .map(|buffer| IoSliceMut::new(buffer))
            .collect();
        // An error says that a port of the peer is closed, or that nothing is there.
        let count = port
            .state
            .recv((&*port.socket).into(), &mut slices, &mut metas)
            .inspect_err(|error| port.hear_errors(error))
            .ok()?;
        let bytes: usize = metas.iter().take(count).map(|meta| meta.len).sum();
        let few = bytes >= MANY * count.max(1);
        self.next = if few { FEW } else { BATCH_SIZE };
        let mut came = 0;
        // Both clocks after the call, and the engine's last. A thread that has lost its processor between two readings
        // of clocks takes a packet for later than it was; were they the other way round, for earlier: and the earliest
        // packet of the last ten seconds is what all others are compared with.
        let by_kernel = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let now = clock();
        for (buffer, meta) in self.buffers.iter().zip(&metas).take(count) {
            let bytes = buffer.get(..meta.len).unwrap_or_default();
            // By the kernel's stamp. If the clock was set just now, it is wrong for a moment.
            let waited = by_kernel.zip(meta.timestamp);
            let waited = waited.map_or(Duration::ZERO, |(now, at)| now.saturating_sub(at));
            let mut one = Came {
                packet: &[],
                from: SocketAddr::new(meta.addr.ip().to_canonical(), meta.addr.port()),
                to: meta.dst_ip.map(|ip| ip.to_canonical()),
                arrival: Arrival {
                    marked: meta.ecn == Some(EcnCodepoint::Ce),
                    waited,
                },
            };
            for packet in bytes.chunks(meta.stride.max(1)) {
                came += 1;
                one.packet = packet;
                each(&one, now);
            }
        }
        Some(came)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv4Addr;

    use super::*;

    fn port() -> Port {
        Port::held(Arc::new(
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket"),
        ))
        .expect("a port")
    }

    #[test]
    fn a_port_that_nobody_has_is_told() {
        let from = Port::bind((Ipv4Addr::LOCALHOST, 0).into(), None).expect("a port");
        let gone = port().address().expect("an address");
        let (mut reader, mut told) = (Reader::new(), 0);
        let began = std::time::Instant::now();
        while told < 2 && began.elapsed() < Duration::from_secs(5) {
            from.send(gone, &[7; 100], 100);
            reader.read(&from, || Duration::ZERO, |_, _| {});
            told += from.refusals();
        }
        assert!(told >= 2);
    }

    /// What the kernel took for its call is no time that a packet came earlier.
    #[test]
    fn the_time_is_read_after_the_packets() {
        let (from, to) = (port(), port());
        assert!(from.send(to.address().expect("an address"), &[7; 100], 100));
        let began = std::time::Instant::now();
        let left = Cell::new(None);
        let clock = || {
            left.set(Some(to.socket.peek(&mut [0; 1]).is_ok()));
            began.elapsed()
        };
        let mut reader = Reader::new();
        let mut came = 0;
        while came == 0 && began.elapsed() < Duration::from_secs(5) {
            let read = reader.read(&to, clock, |one, _| assert_eq!(one.packet, [7; 100]));
            came += read.unwrap_or(0);
        }
        assert_eq!((came, left.get()), (1, Some(false)));
    }
}
