//! Cards whose packets pass the kernel's stack by, with `EVENER_NET_ENGINE=xdp`.
//!
//! It is the UDP engine, less the kernel's part of the way. A path is still a UDP socket. Its port
//! number is one of a range that is held from the start, and packets to these numbers come from the
//! card's queue ([`evener_xdp`]). What a card cannot take goes by the socket as ever: packets whose next
//! hop the kernel has yet to find, paths of other interfaces, all of it where there is no card. Peers
//! with plain UDP see no difference.
//!
//! One instance has the cards: a queue has one socket. What comes by other queues goes to the kernel,
//! and from there to the path's socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use evener_proto::packet::Arrival;
use evener_xdp::port::Sent;
use evener_xdp::{Card, Mode, Rule, Wanted};

use super::ports::{Came, Port};
use crate::fds;
use crate::log::Level;
use crate::nics::Nic;
use crate::shared::Shared;
use crate::sys::Epoll;

/// Port numbers that are held: paths beyond them go by the kernel.
const NUMBERS: u16 = 256;
/// Below the numbers that the kernel gives away.
const LOWEST: u16 = 10_240;
const HIGHEST: u16 = 32_000;
const TRIES: usize = 64;
/// Packets that are read at once.
const MOST: usize = 256;
/// Packets that are queued before they are sent. In copy mode the call that sends moves each packet itself,
/// through all of a veth's network where it is one: the last of many would have waited for the others.
const RUN: usize = 8;

/// A path: which association, and which of its paths.
pub type Owner = (usize, usize);

/// A number of the range.
struct Number {
    socket: Arc<UdpSocket>,
    taken: bool,
    owner: Option<Owner>,
}

struct One {
    /// The kernel's number of the interface, and the address that it had.
    interface: (u32, IpAddr),
    port: evener_xdp::Port,
    card: Card,
}

/// The cards of an instance, and the numbers that are theirs.
pub struct Cards {
    all: Vec<One>,
    numbers: Vec<Number>,
    first: u16,
    /// The kernel had no room for all that was queued.
    left: bool,
    /// Packets that are queued.
    queued: usize,
}

/// Binds a range of numbers that nobody else has.
fn hold(random: impl Fn() -> u64) -> io::Result<(u16, Vec<Number>)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let span = u64::from(HIGHEST - LOWEST - NUMBERS);
        let first = LOWEST + (random() % span) as u16;
        let bind = |number| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, number))?;
            socket.set_nonblocking(true)?;
            Ok(Number {
                socket: Arc::new(socket),
                taken: false,
                owner: None,
            })
        };
        let all: io::Result<Vec<_>> = (first..first + NUMBERS).map(bind).collect();
        match all {
            Ok(all) => return Ok((first, all)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Why an interface is not taken without a try.
fn unfit(nic: &Nic, loopback: bool) -> Option<&'static str> {
    match nic.address {
        IpAddr::V6(_) => Some("it has no IPv4 address, and only IPv4 goes this way"),
        IpAddr::V4(_) if loopback => Some("loopback has no card"),
        IpAddr::V4(_) => None,
    }
}

impl Cards {
    /// Those of all interfaces that can be had. What is taken and what is not is logged, a line for
    /// each; `None`: none, and UDP sockets do all the work.
    pub fn open(shared: &Shared) -> Option<Cards> {
        let (first, numbers) = match hold(|| shared.random()) {
            Ok(held) => held,
            Err(error) => {
                let text = format!("xdp: no {NUMBERS} free port numbers ({error}): UDP is taken");
                shared.log(Level::Warn, &text);
                return None;
            }
        };
        let mut all = Vec::new();
        for nic in shared.nics().iter() {
            let loopback = nic.address.is_loopback();
            let (address, refused) = match nic.address {
                IpAddr::V4(address) => (address, unfit(nic, loopback)),
                IpAddr::V6(_) => (Ipv4Addr::UNSPECIFIED, unfit(nic, loopback)),
            };
            if let Some(why) = refused {
                let text = format!("xdp: {}: {why}: UDP is taken", nic.name);
                shared.log(Level::Warn, &text);
                continue;
            }
            let ports = first..=first + (NUMBERS - 1);
            let wanted = Wanted::new(&nic.name, Rule { address, ports });
            match Card::open(&wanted) {
                Ok((card, mut ports)) => {
                    shared.log(Level::Info, &format!("xdp: {}", card.summary()));
                    // There is one queue, so one port.
                    all.extend(ports.pop().map(|port| One {
                        interface: (nic.index, nic.address),
                        port,
                        card,
                    }));
                }
                Err(why) => {
                    shared.log(Level::Warn, &format!("xdp: {why}: UDP is taken"));
                }
            }
        }
        if all.is_empty() {
            return None;
        }
        let cards = Cards {
            all,
            numbers,
            first,
            left: false,
            queued: 0,
        };
        cards.descriptors().for_each(fds::note);
        Some(cards)
    }

    /// What the child of a fork must not keep.
    fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let cards = self.all.iter();
        let cards = cards.flat_map(|one| [one.port.fd(), one.card.fd()]);
        let held = self.numbers.iter().map(|number| number.socket.as_raw_fd());
        cards.chain(held)
    }

    /// To wait for, by place.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.all.iter().map(|one| one.port.fd())
    }

    /// The place of the card of this interface. One that came later, or has another address, has none.
    pub fn of(&self, nic: &Nic) -> Option<usize> {
        let of = (nic.index, nic.address);
        self.all.iter().position(|one| one.interface == of)
    }

    /// A socket with a number of the range; `None`: all are in use.
    pub fn port(&mut self) -> Option<Port> {
        let free = self.numbers.iter_mut().find(|number| !number.taken)?;
        let port = Port::held(free.socket.clone()).ok()?;
        free.taken = true;
        Some(port)
    }

    fn number(&mut self, number: u16) -> Option<&mut Number> {
        let place = number.checked_sub(self.first)?;
        self.numbers.get_mut(usize::from(place))
    }

    /// Packets to this number are this path's.
    pub fn own(&mut self, number: u16, owner: Owner) {
        if let Some(number) = self.number(number) {
            number.owner = Some(owner);
        }
    }

    /// Numbers of paths that are gone may be used again.
    pub fn sweep(&mut self, epoll: &Epoll) {
        for number in &mut self.numbers {
            if number.taken && Arc::strong_count(&number.socket) == 1 {
                // It may not be there yet.
                let _ = epoll.remove(number.socket.as_raw_fd());
                number.owner = None;
                number.taken = false;
            }
        }
    }

    /// Queues a packet. `false`: the path's socket has to send it.
    pub fn send(&mut self, card: usize, from: u16, to: SocketAddr, packet: &[u8]) -> bool {
        let (Some(one), SocketAddr::V4(to)) = (self.all.get_mut(card), to) else {
            return false;
        };
        let sent = one
            .port
            .send(from, to, packet.len(), Instant::now(), |room| {
                room.copy_from_slice(packet);
                packet.len()
            });
        match sent {
            Sent::Framed => {
                self.queued += 1;
                true
            }
            // Lost, as in the network: it goes again.
            Sent::Full => {
                self.left = true;
                true
            }
            Sent::ByKernel | Sent::TooLong => false,
        }
    }

    /// Sends what is queued if it is as much as should go at once. Whether it did, which takes time.
    pub fn send_run(&mut self) -> bool {
        let copies = |one: &One| one.card.mode() != Mode::ZeroCopy;
        let sends = self.queued >= RUN && self.all.iter().any(copies);
        if sends {
            self.flush();
        }
        sends
    }

    /// Sends what is queued.
    pub fn flush(&mut self) {
        (self.left, self.queued) = (false, 0);
        for one in &mut self.all {
            // Where the interface is down, what is lost goes again, by others.
            if let Ok(all) = one.port.flush() {
                self.left |= !all;
            }
        }
    }

    /// What they did, for the log.
    pub fn summary(&self) -> String {
        let all = self.all.iter().map(|one| {
            let counts = one.port.counts();
            let (sent, by_kernel) = (counts.sent, counts.by_kernel);
            let (received, dropped) = (counts.received, one.port.dropped());
            format!(
                "xdp: {} packets sent past the kernel in {} calls, {by_kernel} by it, {} not for want \
                 of frames; {received} received, {dropped} dropped",
                sent, counts.calls, counts.full
            )
        });
        all.collect::<Vec<_>>().join("; ")
    }

    /// Something is queued still.
    pub fn left(&self) -> bool {
        self.left
    }

    /// Hands on what a card has: the path that it is for, its port number, the packet, and when its wait was measured.
    /// How many.
    pub fn receive(
        &mut self,
        card: usize,
        mut each: impl FnMut(Owner, u16, &Came<'_>, Instant),
    ) -> usize {
        let (numbers, first) = (&self.numbers, self.first);
        let Some(one) = self.all.get_mut(card) else {
            return 0;
        };
        one.port.receive(MOST, |came| {
            let place = came.to.port().checked_sub(first).map(usize::from);
            let number = place.and_then(|place| numbers.get(place));
            // To a number that no path has now: a late answer, or a stranger.
            let owner = number.and_then(|number| number.owner);
            if let Some(owner) = owner {
                let packet = Came {
                    packet: came.packet,
                    from: SocketAddr::V4(came.from),
                    to: Some(IpAddr::V4(*came.to.ip())),
                    arrival: Arrival {
                        marked: came.marked,
                        waited: came.waited,
                    },
                };
                each(owner, came.to.port(), &packet, came.seen);
            }
        })
    }
}

impl Drop for Cards {
    fn drop(&mut self) {
        self.descriptors().for_each(fds::forget);
    }
}
