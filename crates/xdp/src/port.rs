//! What callers use. A [`Card`] attaches the program to one interface; each queue of it that is wanted has a
//! [`Port`], for one thread. Ports share nothing.
//!
//! The ports of the rule are the caller's: it has ordinary UDP sockets bound to them. They keep the numbers
//! from others, take what the program passes on (fragments, other queues), and send packets whose
//! next hop is not known yet ([`Sent::ByKernel`]).

use std::collections::HashMap;
use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::frames::{self, ETHERNET, HEADERS, Mac, Template};
use crate::hops::Hops;
use crate::netlink::{Interface, Netlink};
pub use crate::program::Rule;
use crate::program::{self, NotLoaded};
use crate::socket::{Lacks, Mode, Shape, Socket};
use crate::sys;

/// What the kernel keeps free before a packet that comes.
const HEADROOM: usize = 256;
/// The largest MTU that drivers take for packets of one frame of a page.
const ONE_FRAME: usize = 3498;
/// A queue that is busy is waited for.
const LATER: Duration = Duration::from_secs(1);
/// A wait that is taken for one.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Templates that are kept: paths to peers.
const TEMPLATES: usize = 4096;

/// What to open.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The interface's name.
    pub interface: String,
    /// Which packets are ours.
    pub rule: Rule,
    /// On which queues.
    pub queues: Vec<u32>,
    /// Tried in this order.
    pub modes: Vec<Mode>,
    /// Frames for each direction of a queue; a power of two.
    pub frames: u32,
    /// The process polls the card, where it may.
    pub busy_poll: bool,
}

impl Wanted {
    /// The first queue, all modes, 2048 frames each way.
    pub fn new(interface: &str, rule: Rule) -> Wanted {
        Wanted {
            interface: interface.into(),
            rule,
            queues: vec![0],
            modes: Mode::ALL.into(),
            frames: 2048,
            busy_poll: false,
        }
    }
}

/// An error of a call, by its name.
fn named(error: &io::Error) -> String {
    let name = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => "EOPNOTSUPP",
        Some(libc::EINVAL) => "EINVAL",
        Some(libc::EPERM) => "EPERM",
        Some(libc::EACCES) => "EACCES",
        Some(libc::EBUSY) => "EBUSY",
        Some(libc::EEXIST) => "EEXIST",
        Some(libc::ENOBUFS) => "ENOBUFS",
        Some(libc::ENOMEM) => "ENOMEM",
        Some(libc::ERANGE) => "ERANGE",
        Some(libc::ENODEV) => "ENODEV",
        _ => return error.to_string(),
    };
    name.into()
}

/// Why a mode does not work.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The driver does not take the program in this mode.
    #[error("{} when the program is attached", named(.0))]
    Attach(#[source] io::Error),
    /// The queue does not take a socket in this mode.
    #[error("{error} when queue {0} is bound", error = named(.1))]
    Bind(u32, #[source] io::Error),
}

impl Refusal {
    fn error(&self) -> &io::Error {
        match self {
            Refusal::Attach(error) | Refusal::Bind(_, error) => error,
        }
    }
}

/// A card is not taken; UDP sockets do the work.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// No such interface, or the kernel does not speak of it.
    #[error("{0}: {1}: name an interface that `ip link` shows")]
    Interface(String, #[source] io::Error),
    /// Another program is attached.
    #[error(
        "{interface}: another XDP program{} is attached, and stays: detach it (ip link set {interface} \
         xdp off), or use another interface", id(*.program)
    )]
    Taken {
        /// Where.
        interface: String,
        /// The kernel's number of it, where it is known.
        program: Option<u32>,
    },
    /// The process may not.
    #[error("{0}: {1} is refused: run with CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF")]
    Rights(String, &'static str),
    /// The kernel cannot.
    #[error("{0}: {1} is refused ({2}): it needs Linux 5.9 with CONFIG_XDP_SOCKETS")]
    Kernel(String, &'static str, #[source] io::Error),
    /// The program was not loaded.
    #[error("{0}: {1}")]
    Program(String, #[source] NotLoaded),
    /// No mode works.
    #[error("{interface} (driver {driver}): {}", listed(.tried))]
    Modes {
        /// Where.
        interface: String,
        /// Its driver.
        driver: String,
        /// Each with its reason.
        tried: Vec<(Mode, Refusal)>,
    },
    /// The sizes cannot be.
    #[error("{0} frames are asked for: it must be a power of two from 64 to 32768")]
    Frames(u32),
    /// The rule or the queues cannot be.
    #[error("{0}: no port or no queue is asked for: give at least one of each")]
    Nothing(String),
}

fn id(program: Option<u32>) -> String {
    program.map_or(String::new(), |id| format!(" ({id})"))
}

fn listed(all: &[(Mode, Refusal)]) -> String {
    let texts = all
        .iter()
        .map(|(mode, why)| format!("{} refused ({why})", mode.name()));
    texts.collect::<Vec<_>>().join(", ")
}

/// Our program on an interface.
///
/// The kernel takes it away with the last descriptor of its link. A child that another thread forks just now
/// has one until it runs another program, so a link that is not wanted any more is detached by a call.
#[derive(Debug)]
struct Link(OwnedFd);

impl Drop for Link {
    fn drop(&mut self) {
        // An error says that the interface is gone, or the kernel too old: closing does it then.
        let _ = sys::detach(self.0.as_fd());
    }
}

/// An interface with our program, until it is dropped or the process ends, however that comes.
#[derive(Debug)]
pub struct Card {
    link: Link,
    interface: String,
    driver: String,
    mode: Mode,
    tried: Vec<(Mode, Refusal)>,
    shape: Shape,
    lacks: Lacks,
}

impl Card {
    /// Attaches the program and binds a socket to each queue: in the first mode that works.
    ///
    /// # Errors
    /// [`Refused`]: nothing is attached then.
    pub fn open(wanted: &Wanted) -> Result<(Card, Vec<Port>), Refused> {
        let name = || wanted.interface.clone();
        if !wanted.frames.is_power_of_two() || !(64..=32_768).contains(&wanted.frames) {
            return Err(Refused::Frames(wanted.frames));
        }
        if wanted.rule.ports.is_empty() || wanted.queues.is_empty() {
            return Err(Refused::Nothing(name()));
        }
        let mut netlink = Netlink::open().map_err(|error| Refused::Interface(name(), error))?;
        let found = netlink.interface(&wanted.interface);
        let interface = found.map_err(|error| Refused::Interface(name(), error))?;
        if let Some(program) = interface.program {
            return Err(Refused::Taken {
                interface: name(),
                program: Some(program),
            });
        }
        let call = |what: &'static str| {
            move |error: io::Error| match error.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => Refused::Rights(name(), what),
                _ => Refused::Kernel(name(), what, error),
            }
        };
        drop(sys::xdp_socket().map_err(call("an AF_XDP socket"))?);
        let last = wanted.queues.iter().max().map_or(1, |queue| queue + 1);
        let map = sys::socket_map(last).map_err(call("a map of sockets (bpf)"))?;
        let shape = Shape {
            frame: if interface.mtu + ETHERNET + HEADROOM <= 2048 {
                2048
            } else {
                4096
            },
            frames: wanted.frames,
            several: interface.mtu > ONE_FRAME,
            busy_poll: wanted.busy_poll,
        };
        let program = program::load(&wanted.rule, map.as_fd(), shape.several);
        let program = program.map_err(|not| match not.error.raw_os_error() {
            Some(libc::EPERM) => Refused::Rights(wanted.interface.clone(), "a program (bpf)"),
            _ => Refused::Program(wanted.interface.clone(), not),
        })?;
        let driver = sys::driver(&wanted.interface).unwrap_or_else(|| "unknown".into());
        let mut tried = Vec::new();
        for mode in &wanted.modes {
            match Self::bring_up(wanted, &interface, (&map, &program), *mode, shape) {
                Ok((link, ports, lacks)) => {
                    let card = Card {
                        link,
                        interface: wanted.interface.clone(),
                        driver,
                        mode: *mode,
                        tried,
                        shape,
                        lacks,
                    };
                    return Ok((card, ports));
                }
                Err(why) => {
                    // Another process was quicker.
                    let busy = [Some(libc::EBUSY), Some(libc::EEXIST)];
                    let attach = matches!(why, Refusal::Attach(_));
                    if attach && busy.contains(&why.error().raw_os_error()) {
                        return Err(Refused::Taken {
                            interface: wanted.interface.clone(),
                            program: None,
                        });
                    }
                    tried.push((*mode, why));
                }
            }
        }
        Err(Refused::Modes {
            interface: wanted.interface.clone(),
            driver,
            tried,
        })
    }

    fn bring_up(
        wanted: &Wanted,
        interface: &Interface,
        (map, program): (&OwnedFd, &OwnedFd),
        mode: Mode,
        shape: Shape,
    ) -> Result<(Link, Vec<Port>, Lacks), Refusal> {
        let link = sys::attach(program.as_fd(), interface.index, mode.attaches());
        let link = Link(link.map_err(Refusal::Attach)?);
        let (mut ports, mut all) = (Vec::new(), Lacks::default());
        for queue in &wanted.queues {
            let refused = |error| Refusal::Bind(*queue, error);
            // The kernel frees the queue of a socket that was closed some time later, and later yet where a child
            // has a copy of it.
            let began = Instant::now();
            let opened = loop {
                let opened = Socket::open(interface.index, *queue, mode, shape);
                let busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
                if began.elapsed() > LATER || !opened.as_ref().err().is_some_and(busy) {
                    break opened;
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            let (socket, lacks) = opened.map_err(refused)?;
            // From here on packets come.
            sys::map_socket(map.as_fd(), *queue, socket.as_fd()).map_err(refused)?;
            all.huge_pages = all.huge_pages.or(lacks.huge_pages);
            all.busy_poll = all.busy_poll.or(lacks.busy_poll);
            ports.push(Port {
                hops: Hops::new(interface.index).map_err(refused)?,
                socket,
                mac: interface.mac,
                rule: wanted.rule.clone(),
                largest: interface.mtu + ETHERNET,
                templates: HashMap::new(),
                long: Vec::new(),
                counts: Counts::default(),
            });
        }
        Ok((link, ports, all))
    }

    /// What keeps the program attached: the child of a fork must close its copy.
    pub fn fd(&self) -> RawFd {
        self.link.0.as_raw_fd()
    }

    /// The mode that was taken.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The modes that were refused before, each with its reason.
    pub fn tried(&self) -> &[(Mode, Refusal)] {
        &self.tried
    }

    /// For the log, on one line: what was taken, what was not and why.
    pub fn summary(&self) -> String {
        let mut text = format!("{} (driver {}): ", self.interface, self.driver);
        if !self.tried.is_empty() {
            text += &format!("{}, ", listed(&self.tried));
        }
        text += &format!(
            "{} taken; frames of {} bytes",
            self.mode.name(),
            self.shape.frame
        );
        if self.shape.several {
            text += ", several for each packet";
        }
        match &self.lacks.huge_pages {
            None => text += "; huge pages",
            Some(error) => text += &format!("; no huge pages ({})", named(error)),
        }
        if let Some(error) = &self.lacks.busy_poll {
            text += &format!("; no busy polling ({})", named(error));
        }
        text
    }
}

/// A packet that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Came<'a> {
    /// Its bytes.
    pub packet: &'a [u8],
    /// From where.
    pub from: SocketAddrV4,
    /// To which address and port of ours.
    pub to: SocketAddrV4,
    /// A switch says that its queue is long.
    pub marked: bool,
    /// How long it was here when clocks were read; zero where the card does not say.
    pub waited: Duration,
    /// When that was.
    pub seen: Instant,
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It goes with the next [`Port::flush`].
    Framed,
    /// The next hop is not known: send it by the UDP socket of that port.
    ByKernel,
    /// All frames are on their way: it is lost, as in the network.
    Full,
    /// It is longer than the link takes.
    TooLong,
}

/// What a port did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Packets that came.
    pub received: u64,
    /// Packets that came and were no datagram.
    pub odd: u64,
    /// Packets that went.
    pub sent: u64,
    /// Packets for the kernel's way.
    pub by_kernel: u64,
    /// Packets for which no frame was free.
    pub full: u64,
    /// Calls to the kernel that sent.
    pub calls: u64,
}

/// One moment by two clocks.
struct Seen {
    /// The clock of stamps, in nanoseconds.
    by_card: u64,
    at: Instant,
}

impl Seen {
    fn now() -> Seen {
        // In this order: a thread that loses its processor in between takes packets for later than they were. Taken for
        // earlier, one would make all others look late for ten seconds.
        let by_card = sys::clock();
        Seen {
            by_card,
            at: Instant::now(),
        }
    }

    /// A packet with this stamp may have come since.
    fn catch_up(&mut self, stamp: u64) {
        let ahead = stamp.saturating_sub(self.by_card);
        if ahead > 0 && u128::from(ahead) < LONGEST_WAIT.as_nanos() {
            *self = Seen::now();
        }
    }
}

/// How long a packet with this stamp waited. Longer than the limit counts as none: the process may have a clock of
/// its own (a time namespace).
fn waited(now: u64, stamp: u64) -> Duration {
    let waited = Duration::from_nanos(now.saturating_sub(stamp));
    if waited < LONGEST_WAIT {
        waited
    } else {
        Duration::ZERO
    }
}

/// Datagrams of one queue, for one thread.
#[derive(Debug)]
pub struct Port {
    socket: Socket,
    hops: Hops,
    mac: Mac,
    rule: Rule,
    /// Bytes of a frame on the link.
    largest: usize,
    templates: HashMap<(u16, SocketAddrV4), (Mac, Template)>,
    /// A packet that is longer than a frame.
    long: Vec<u8>,
    counts: Counts,
}

impl Port {
    /// To wait for: readable when packets are there.
    pub fn fd(&self) -> RawFd {
        self.socket.fd()
    }

    /// What it did so far.
    pub fn counts(&self) -> Counts {
        Counts {
            calls: self.socket.calls,
            ..self.counts
        }
    }

    /// Packets that the kernel dropped for want of frames.
    pub fn dropped(&self) -> u64 {
        self.socket.dropped()
    }

    /// Bytes of payload that one datagram takes.
    pub fn largest(&self) -> usize {
        self.largest - HEADERS
    }

    /// Hands on what came; `most` packets at once. How many.
    pub fn receive(&mut self, most: usize, mut each: impl FnMut(Came<'_>)) -> usize {
        let counts = &mut self.counts;
        let mut count = 0;
        let mut seen = Seen::now();
        self.socket.receive(most, |frame, stamp| {
            seen.catch_up(stamp);
            let Some(one) = frames::parse(frame) else {
                counts.odd += 1;
                return;
            };
            count += 1;
            each(Came {
                packet: one.payload,
                from: one.from,
                to: one.to,
                marked: one.marked,
                waited: waited(seen.by_card, stamp),
                seen: seen.at,
            });
        });
        self.counts.received += count as u64;
        count
    }

    /// Queues a datagram of at most `most` bytes from a port of ours: `fill` writes it in place and says how
    /// long it is. It is not called where the packet cannot go this way.
    pub fn send(
        &mut self,
        from: u16,
        to: SocketAddrV4,
        most: usize,
        now: Instant,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Sent {
        if most > self.largest() {
            return Sent::TooLong;
        }
        let Some(hop) = self.hops.to(*to.ip(), now) else {
            self.counts.by_kernel += 1;
            return Sent::ByKernel;
        };
        if self.templates.len() >= TEMPLATES {
            self.templates.clear();
        }
        let here = SocketAddrV4::new(self.rule.address, from);
        let mac = self.mac;
        let new = || (hop, Template::new(mac, hop, here, to));
        let known = self.templates.entry((from, to)).or_insert_with(new);
        if known.0 != hop {
            *known = new();
        }
        let template = &known.1;
        let Some(frame) = self.socket.take() else {
            self.counts.full += 1;
            return Sent::Full;
        };
        let bytes = self.socket.bytes(&frame);
        if let Some(room) = bytes.get_mut(HEADERS..HEADERS + most) {
            let length = fill(room).min(most);
            template.write(bytes, length);
            self.socket.queue(frame, HEADERS + length);
        } else {
            self.socket.give(frame);
            self.long.resize(HEADERS + most, 0);
            let length = fill(&mut self.long[HEADERS..]).min(most);
            template.write(&mut self.long, length);
            if !self.socket.queue_bytes(&self.long[..HEADERS + length]) {
                self.counts.full += 1;
                return Sent::Full;
            }
        }
        self.counts.sent += 1;
        Sent::Framed
    }

    /// Sends what is queued. `false`: the kernel has no room for all of it now, and the rest goes with the
    /// next call.
    ///
    /// # Errors
    /// The interface is down or gone.
    pub fn flush(&mut self) -> io::Result<bool> {
        let all = self.socket.flush()?;
        self.socket.complete();
        Ok(all)
    }

    /// Waits until packets are there, `longest` at most; whether there are.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn wait(&self, longest: Duration) -> io::Result<bool> {
        sys::wait(self.socket.as_fd(), longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_known_where_the_stamp_is_of_this_clock() {
        let now = 5_000_000_000;
        assert_eq!(waited(now, now - 70_000), Duration::from_micros(70));
        // It came while others were read; no stamp; a clock that is far behind or ahead.
        for stamp in [now + 1, 0, now - 1_000_000_000, u64::MAX] {
            assert_eq!(waited(now, stamp), Duration::ZERO, "{stamp}");
        }
    }
}
