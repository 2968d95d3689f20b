//! One TCP connection of a worker: frames in, frames out, payload straight from the caller's memory and,
//! by way of a worker's, into it. It knows nothing of messages; the worker tells it where bytes belong.
//!
//! What is queued to be written names memory that is pinned ([`link`](crate::link)); when it is
//! written, its messages are in [`Conn::done`] until the worker has unpinned them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use evener_proto::PathId;
use evener_proto::path::unsent_room;
use evener_proto::wire::HEADER;

use crate::fds;
use crate::stats::PathStats;
use crate::sys::{self, Memory, TcpInfo};

/// Bytes of the buffer that headers (and what follows them) are read into.
///
/// Payload that lands here is copied once more, so it is small.
const STAGING: usize = 8 << 10;
/// And so much of it behind a chunk that is read in place: the next header, or some.
const BEHIND: usize = 1 << 10;
/// One of this many segments lost is a path that bursts are too much for. Fewer are cheaper sent again
/// than paced: a timer for each packet is a quarter of what a connection costs.
const LOSSY: u64 = 100;
/// And so much of what was sent: it shares its path with too many.
const MUCH: u32 = 8;
/// This many looks must say so: a start always loses some.
const LOSSY_LOOKS: u32 = 4;
/// See [`Conn::is_stuck`].
const STUCK: Duration = Duration::from_millis(10);

/// A chunk whose bytes are arriving.
#[derive(Debug, Clone, Copy)]
pub struct Arriving {
    /// The sender's number.
    pub comm: u64,
    /// Which message.
    pub message: u64,
    /// Where the chunk starts.
    pub offset: u64,
    /// Its bytes.
    pub length: u32,
    /// How many are there.
    pub got: u32,
}

#[derive(Debug)]
enum Body {
    None,
    /// In the caller's memory, pinned.
    Message {
        comm: u64,
        message: u64,
        memory: Memory,
    },
    /// A copy, because the message is over and the frame must still be whole.
    Copy(Vec<u8>),
}

#[derive(Debug)]
struct Item {
    header: [u8; HEADER],
    body: Body,
    /// Bytes of header and body that are written.
    written: usize,
}

impl Item {
    fn length(&self) -> usize {
        HEADER
            + match &self.body {
                Body::None => 0,
                Body::Message { memory, .. } => memory.length,
                Body::Copy(bytes) => bytes.len(),
            }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Conn {
    /// The socket.
    pub fd: OwnedFd,
    /// Place of its peer in the worker's list.
    pub link: usize,
    /// Its number.
    pub path: PathId,
    /// Index of the interface.
    pub interface: u32,
    /// There may be something to read.
    pub readable: bool,
    /// There may be room.
    pub writable: bool,
    /// When nothing was there to read.
    pub since: Duration,
    /// The peer is done writing.
    pub hung_up: bool,
    /// What others may know of it.
    pub stats: Arc<PathStats>,
    /// Acknowledged bytes at the last look.
    pub acknowledged: u64,
    /// Segments that were sent again at the last look.
    resent: u32,
    /// Segments that were sent up to that look.
    segments: u32,
    /// How many of the last looks saw more than a few of them lost.
    lossy: u32,
    low_water: u32,
    /// When something arrived, or nothing was on its way, as of the last look.
    moved: Duration,
    /// The shortest of the last round trips; zero where unknown.
    pub least_rtt: Duration,
    /// When the kernel was last asked about it.
    pub asked: Duration,
    paced: bool,
    /// The chunk that is arriving.
    pub arriving: Option<Arriving>,
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    out: VecDeque<Item>,
    queued: usize,
    /// Bytes in the kernel that the peer's has not acknowledged, as far as known.
    in_kernel: usize,
    /// (comm, message) of chunks that are written and still pinned.
    pub done: Vec<(u64, u64)>,
}

impl Drop for Conn {
    fn drop(&mut self) {
        fds::forget(self.fd.as_raw_fd());
    }
}

impl Conn {
    /// A connection that has been greeted and answered.
    pub fn new(
        fd: OwnedFd,
        link: usize,
        path: PathId,
        interface: u32,
        stats: Arc<PathStats>,
    ) -> Conn {
        fds::note(fd.as_raw_fd());
        Conn {
            fd,
            link,
            path,
            interface,
            readable: true,
            writable: true,
            since: Duration::ZERO,
            hung_up: false,
            stats,
            acknowledged: 0,
            resent: 0,
            segments: 0,
            lossy: 0,
            low_water: 0,
            moved: Duration::ZERO,
            least_rtt: Duration::ZERO,
            asked: Duration::ZERO,
            paced: false,
            arriving: None,
            staging: vec![0; STAGING].into_boxed_slice(),
            start: 0,
            end: 0,
            out: VecDeque::new(),
            queued: 0,
            in_kernel: 0,
            done: Vec::new(),
        }
    }

    /// Adapts to what the kernel says: unsent bytes for about half a millisecond of what the path
    /// delivers, and no bursts where those are what it loses. Whether much of what was sent since the
    /// last time was sent again.
    pub fn adapt(&mut self, info: &TcpInfo) -> bool {
        self.least_rtt = Duration::from_micros(info.least_rtt_us.into());
        let fd = self.fd.as_raw_fd();
        if info.delivery_rate > 0 {
            let wanted = unsent_room(info.delivery_rate);
            if wanted.abs_diff(self.low_water) > self.low_water / 4
                && sys::set_unsent_low_water(fd, wanted).is_ok()
            {
                self.low_water = wanted;
            }
        }
        let lost = info.retransmits.wrapping_sub(self.resent);
        let sent = info.segments.wrapping_sub(self.segments);
        (self.resent, self.segments) = (info.retransmits, info.segments);
        if u64::from(lost) * LOSSY > u64::from(sent) {
            self.lossy += 1;
        } else {
            self.lossy = self.lossy.saturating_sub(1);
        }
        if !self.paced && self.lossy >= LOSSY_LOOKS {
            self.paced = true;
            // Where the kernel refuses, things stay as they are.
            let _ = sys::set_paced(fd);
        }
        lost > 1 && lost * MUCH > sent
    }

    // ---- in ----

    /// The next header in the staging buffer.
    pub fn header(&mut self) -> Option<[u8; HEADER]> {
        let header = self.staging[self.start..self.end]
            .first_chunk::<HEADER>()
            .copied()?;
        self.start += HEADER;
        Some(header)
    }

    /// Moves what the staging buffer has of the arriving chunk to `place`, its memory from the first
    /// missing byte on (`None`: nowhere).
    pub fn unstage(&mut self, place: Option<Memory>) {
        let Some(arriving) = &mut self.arriving else {
            return;
        };
        let count = (self.end - self.start).min((arriving.length - arriving.got) as usize);
        if let Some(place) = place {
            let from = Memory::read_only(&self.staging[self.start..self.start + count]);
            // SAFETY: `place` is pinned, or an eager slot and the caller has the lock. Staging is ours.
            #[allow(unsafe_code, reason = "the one place where staged bytes are placed")]
            unsafe {
                sys::publish(from, place);
            }
        }
        self.start += count;
        arriving.got += count as u32;
    }

    /// Bytes in the staging buffer.
    pub fn staged(&self) -> usize {
        self.end - self.start
    }

    /// Reads: first to `place`, for bytes of the arriving chunk; then, if it has room for all of them, to the
    /// staging buffer, which must hold less than a header.
    pub fn fill(&mut self, place: Option<Memory>) -> io::Result<usize> {
        self.staging.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let mut room = Memory::of(&mut self.staging[self.end..]);
        let direct = place.map_or(0, |place| place.length);
        if place.is_some() {
            let missing = self.arriving.map_or(0, |chunk| chunk.length - chunk.got);
            let all = direct >= missing as usize;
            room.length = if all { room.length.min(BEHIND) } else { 0 };
        }
        let pieces = [place.unwrap_or(room), room];
        let pieces = if place.is_some() {
            &pieces[..]
        } else {
            &pieces[1..]
        };
        // SAFETY: as in `unstage`.
        #[allow(unsafe_code, reason = "the one place where bytes are read")]
        let got = unsafe { sys::receive(self.fd.as_raw_fd(), pieces) }?;
        if let Some(arriving) = &mut self.arriving {
            arriving.got += got.min(direct) as u32;
        }
        self.end += got.saturating_sub(direct);
        if got < direct + room.length && !self.hung_up {
            self.readable = false;
        }
        self.stats.received(got as u64);
        Ok(got)
    }

    // ---- out ----

    /// Bytes that are queued here and not in the kernel.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Bytes that are queued here or on their way, as of the last [`Conn::look`].
    pub fn outstanding(&self) -> u64 {
        (self.queued + self.in_kernel) as u64
    }

    /// Asks the kernel what is on its way, where anything was: bytes that have arrived since.
    pub fn look(&mut self, now: Duration) -> usize {
        let before = self.in_kernel;
        if before > 0 {
            self.in_kernel = sys::unacknowledged(self.fd.as_raw_fd());
        }
        let arrived = before.saturating_sub(self.in_kernel);
        if before == 0 || arrived > 0 {
            self.moved = now;
        }
        arrived
    }

    /// Whether nothing has arrived for so long that what is on its way may not.
    pub fn is_stuck(&self, now: Duration) -> bool {
        now >= self.moved + STUCK
    }

    /// Frames that are queued here.
    pub fn frames(&self) -> usize {
        self.out.len()
    }

    /// Queues a frame; `chunk`: (comm, message, pinned memory) of the bytes that follow it.
    pub fn push(&mut self, header: [u8; HEADER], chunk: Option<(u64, u64, Memory)>) {
        let body = match chunk {
            Some((comm, message, memory)) => Body::Message {
                comm,
                message,
                memory,
            },
            None => Body::None,
        };
        self.enqueue(header, body);
    }

    /// Queues a frame whose bytes do not matter any more, but must be there.
    pub fn push_blank(&mut self, header: [u8; HEADER], length: usize) {
        self.enqueue(header, Body::Copy(vec![0; length]));
    }

    fn enqueue(&mut self, header: [u8; HEADER], body: Body) {
        let item = Item {
            header,
            body,
            written: 0,
        };
        self.queued += item.length();
        self.out.push_back(item);
    }

    /// Writes what the kernel takes: bytes written.
    pub fn flush(&mut self) -> io::Result<usize> {
        let mut pieces = [Memory::of(&mut []); sys::PIECES];
        let mut count = 0;
        for item in &self.out {
            if count + 2 > pieces.len() {
                break;
            }
            if item.written < HEADER {
                pieces[count] = Memory::read_only(&item.header[item.written..]);
                count += 1;
            }
            let skip = item.written.saturating_sub(HEADER);
            let body = match &item.body {
                Body::None => continue,
                Body::Copy(bytes) => Memory::read_only(&bytes[skip..]),
                Body::Message { memory, .. } => memory.from(skip),
            };
            pieces[count] = body;
            count += 1;
        }
        // SAFETY: headers and copies are ours; messages are pinned.
        #[allow(unsafe_code, reason = "the one place where bytes are written")]
        let sent = unsafe { sys::send(self.fd.as_raw_fd(), &pieces[..count]) }?;
        self.account(sent);
        Ok(sent)
    }

    /// So much more of what is queued was written.
    fn account(&mut self, sent: usize) {
        self.queued -= sent;
        self.in_kernel += sent;
        self.stats.sent(sent as u64);
        let mut left = sent;
        while let Some(item) = self.out.front_mut() {
            let step = left.min(item.length() - item.written);
            item.written += step;
            left -= step;
            if item.written < item.length() {
                break;
            }
            if let Body::Message { comm, message, .. } = item.body {
                self.done.push((comm, message));
            }
            self.out.pop_front();
        }
    }

    /// Copies what is queued of messages that are over, so that their memory is not looked at again
    /// and the frames end as they began.
    pub fn detach(&mut self, is_over: impl Fn(u64, u64) -> bool) {
        for item in &mut self.out {
            let Body::Message {
                comm,
                message,
                memory,
            } = item.body
            else {
                continue;
            };
            if !is_over(comm, message) {
                continue;
            }
            let mut bytes = vec![0; memory.length];
            let skip = item.written.saturating_sub(HEADER);
            // SAFETY: the message is pinned; the copy is ours.
            #[allow(unsafe_code, reason = "the one place where a rest is copied")]
            unsafe {
                sys::copy(memory.from(skip), Memory::of(&mut bytes[skip..]));
            }
            item.body = Body::Copy(bytes);
            self.done.push((comm, message));
        }
    }

    /// The connection is over: nothing more is written, and all that it pinned is done.
    pub fn abandon(&mut self) {
        for item in self.out.drain(..) {
            if let Body::Message { comm, message, .. } = item.body {
                self.done.push((comm, message));
            }
        }
        self.queued = 0;
    }
}
