//! An AF_XDP socket on one queue of a card: its memory, its four rings and the calls that wake the kernel.
//!
//! Frames go round. Those for receiving: fill ring, kernel, receive ring, caller, fill ring. Those for
//! sending: caller, transmit ring, kernel, completion ring, caller. No ring can overflow: each is as
//! long as its half of the memory has frames.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::ring::{CONTINUED, Consumer, Descriptor, Producer};
use crate::sys::{self, Which};
use crate::umem::{Frame, Umem};

/// Packets for each call that sends, in copy mode; the kernel's own limit is 32.
const SEND_BUDGET: u32 = 256;
/// As above, for polling by the process.
const POLL_BUDGET: u32 = 64;
/// Time for SO_BUSY_POLL.
const POLL: Duration = Duration::from_micros(20);
/// Frames that one packet may have, at most: the kernel's limit is 18.
const MOST_FRAMES: usize = 18;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// How packets come from the card to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The card reads and writes the process's memory.
    ZeroCopy,
    /// The driver copies, before the kernel makes a packet of its own.
    Native,
    /// The kernel copies; any driver can.
    Generic,
}

impl Mode {
    /// All, the best one first.
    pub const ALL: [Mode; 3] = [Mode::ZeroCopy, Mode::Native, Mode::Generic];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Mode::ZeroCopy => "zero copy",
            Mode::Native => "native copy",
            Mode::Generic => "generic",
        }
    }

    pub(crate) fn attaches(self) -> u32 {
        match self {
            Mode::ZeroCopy | Mode::Native => XDP_FLAGS_DRV_MODE,
            Mode::Generic => XDP_FLAGS_SKB_MODE,
        }
    }

    fn binds(self) -> u16 {
        match self {
            Mode::ZeroCopy => libc::XDP_ZEROCOPY,
            Mode::Native | Mode::Generic => libc::XDP_COPY,
        }
    }
}

/// Sizes of a socket.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Bytes of a frame: 2048 or 4096.
    pub frame: usize,
    /// Frames for each direction; a power of two.
    pub frames: u32,
    /// A packet may take several frames.
    pub several: bool,
    /// The process polls the card, where it may.
    pub busy_poll: bool,
}

/// What was asked of a socket and not granted, less what stops it.
#[derive(Debug, Default)]
pub struct Lacks {
    /// Huge pages.
    pub huge_pages: Option<io::Error>,
    /// Polling by the process.
    pub busy_poll: Option<io::Error>,
}

/// See the module.
#[derive(Debug)]
pub struct Socket {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    received: Consumer<Descriptor>,
    transmit: Producer<Descriptor>,
    fd: OwnedFd,
    umem: Umem,
    shape: Shape,
    mode: Mode,
    /// A packet of several frames, put together.
    joined: Vec<u8>,
    /// Its frames.
    parts: Vec<u64>,
    /// When its first frame came.
    stamp: u64,
    /// Calls to the kernel that send.
    pub calls: u64,
}

fn spoilt() -> io::Error {
    io::Error::other("the kernel's rings are not where it says")
}

impl Socket {
    /// On a queue of an interface (by its number), in this mode.
    ///
    /// # Errors
    /// The kernel's refusals: of the mode, the rights, or the memory.
    pub fn open(
        interface: u32,
        queue: u32,
        mode: Mode,
        shape: Shape,
    ) -> io::Result<(Socket, Lacks)> {
        let mut umem = Umem::new(shape.frame, shape.frames, shape.frames)?;
        let fd = sys::xdp_socket()?;
        sys::register(fd.as_fd(), umem.mapping(), shape.frame as u32)?;
        let ring = |which, entry| sys::ring(fd.as_fd(), which, shape.frames, entry);
        let (address, descriptor) = (size_of::<u64>(), size_of::<Descriptor>());
        let (mapping, at) = ring(Which::Fill, address)?;
        let mut fill = Producer::map(mapping, at, shape.frames).ok_or_else(spoilt)?;
        let (mapping, at) = ring(Which::Completion, address)?;
        let completion = Consumer::map(mapping, at, shape.frames).ok_or_else(spoilt)?;
        let (mapping, at) = ring(Which::Receive, descriptor)?;
        let received = Consumer::map(mapping, at, shape.frames).ok_or_else(spoilt)?;
        let (mapping, at) = ring(Which::Transmit, descriptor)?;
        let transmit = Producer::map(mapping, at, shape.frames).ok_or_else(spoilt)?;
        for frame in umem.receiving() {
            fill.push(frame);
        }
        fill.submit();
        let mut lacks = Lacks {
            huge_pages: umem.not_huge.take(),
            busy_poll: None,
        };
        // Both make it quicker; an old kernel does without.
        let _ = sys::set_send_room(fd.as_fd(), shape.frame * shape.frames as usize);
        let _ = sys::set_send_budget(fd.as_fd(), SEND_BUDGET);
        if shape.busy_poll {
            lacks.busy_poll = sys::set_busy_poll(fd.as_fd(), POLL, POLL_BUDGET).err();
        }
        let several = if shape.several { libc::XDP_USE_SG } else { 0 };
        let flags = mode.binds() | libc::XDP_USE_NEED_WAKEUP | several;
        sys::bind(fd.as_fd(), interface, queue, flags)?;
        if mode == Mode::ZeroCopy && !sys::is_zero_copy(fd.as_fd())? {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let socket = Socket {
            fill,
            completion,
            received,
            transmit,
            fd,
            umem,
            shape,
            mode,
            joined: Vec::new(),
            parts: Vec::new(),
            stamp: 0,
            calls: 0,
        };
        Ok((socket, lacks))
    }

    /// To wait for.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes that the kernel dropped: it had no frame, or a ring was full.
    pub fn dropped(&self) -> u64 {
        sys::statistics(self.fd.as_fd()).map_or(0, |all| {
            all.rx_dropped + all.rx_ring_full + all.rx_fill_ring_empty_descs
        })
    }

    /// Hands on what came, packet by packet; how many. `most` at once, so that sending is not put off.
    /// The second argument of `each` says when the packet came (0: nobody knows).
    pub fn receive(&mut self, most: usize, mut each: impl FnMut(&[u8], u64)) -> usize {
        let mut count = 0;
        while count < most {
            let Some(one) = self.received.pop() else {
                break;
            };
            // An address that is not in our memory belongs to no frame: there is none to give back.
            let frame = self.umem.frame_of(one.address);
            let continued = one.options & CONTINUED != 0;
            if self.parts.is_empty() {
                self.stamp = self.umem.stamp(one.address);
            }
            if !continued && self.parts.is_empty() {
                if let Some(bytes) = self.umem.received(one.address, one.length) {
                    each(bytes, self.stamp);
                    count += 1;
                }
                if let Some(frame) = frame {
                    self.fill.push(frame);
                }
                continue;
            }
            let bytes = self.umem.received(one.address, one.length);
            self.joined.extend_from_slice(bytes.unwrap_or_default());
            self.parts.extend(frame);
            if !continued {
                each(&self.joined, self.stamp);
                count += 1;
                self.joined.clear();
                for part in self.parts.drain(..) {
                    self.fill.push(part);
                }
            }
        }
        self.received.release();
        self.fill.submit();
        if self.fill.needs_wakeup() {
            // An error says what the next packet would: nothing comes.
            let _ = sys::kick_receive(self.fd.as_fd());
        }
        count
    }

    /// Takes frames back that were sent.
    pub fn complete(&mut self) -> usize {
        let mut count = 0;
        while let Some(address) = self.completion.pop() {
            count += usize::from(self.umem.completed(address));
        }
        self.completion.release();
        count
    }

    /// A frame to write into; `None`: all are on their way.
    pub fn take(&mut self) -> Option<Frame> {
        if self.umem.free() == 0 {
            self.complete();
        }
        self.umem.take()
    }

    /// Its bytes.
    pub fn bytes(&mut self, frame: &Frame) -> &mut [u8] {
        self.umem.bytes(frame)
    }

    /// A frame that is not sent.
    pub fn give(&mut self, frame: Frame) {
        self.umem.give(frame);
    }

    /// Queues one packet of `length` bytes. [`Socket::flush`] sends.
    pub fn queue(&mut self, frame: Frame, length: usize) {
        let length = length.min(self.shape.frame) as u32;
        let address = self.umem.sent(frame);
        // There is room: the ring has as many places as there are frames.
        self.transmit.push(Descriptor {
            address,
            length,
            options: 0,
        });
    }

    /// Queues a packet that may take several frames; `false`: there are too few, or it may not.
    pub fn queue_bytes(&mut self, packet: &[u8]) -> bool {
        let size = self.shape.frame;
        let count = packet.len().div_ceil(size);
        if count > 1 && (!self.shape.several || count > MOST_FRAMES) {
            return false;
        }
        if self.umem.free() < count {
            self.complete();
        }
        if self.umem.free() < count {
            return false;
        }
        for (at, part) in packet.chunks(size).enumerate() {
            let Some(frame) = self.umem.take() else {
                return false;
            };
            self.umem.bytes(&frame)[..part.len()].copy_from_slice(part);
            let address = self.umem.sent(frame);
            self.transmit.push(Descriptor {
                address,
                length: part.len() as u32,
                options: if at + 1 < count { CONTINUED } else { 0 },
            });
        }
        true
    }

    /// Sends what is queued. What the kernel has no room for now stays queued, and goes with the next call;
    /// `true`: nothing is left.
    ///
    /// # Errors
    /// The interface is down or gone.
    pub fn flush(&mut self) -> io::Result<bool> {
        self.transmit.submit();
        let mut left = self.transmit.waiting();
        while left > 0 {
            if !self.transmit.needs_wakeup() {
                // The card is at it.
                return Ok(true);
            }
            self.calls += 1;
            match sys::kick_send(self.fd.as_fd()) {
                Ok(()) => {}
                Err(error) => match error.raw_os_error() {
                    // The call's budget is used up, or the queue below is full.
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => {}
                    _ => return Err(error),
                },
            }
            let now = self.transmit.waiting();
            if now == left || self.mode == Mode::ZeroCopy {
                return Ok(now == 0);
            }
            left = now;
        }
        Ok(true)
    }
}
