//! The system calls that std does not have, each behind a safe function.

#![allow(unsafe_code, reason = "this file is a boundary to the kernel")]

use std::ffi::c_void;
use std::io;
use std::mem::{size_of, size_of_val, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null, null_mut};
use std::time::Duration;

/// From linux/if_xdp.h; libc does not have it yet.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_DETACH: libc::c_int = 34;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
const ETHTOOL_GDRVINFO: u32 = 3;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // Safety: the kernel has just given this descriptor to us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

// ---- bpf ----

/// The argument of bpf(2): its fields by offset, all others zero, which is what the kernel asks for.
struct Attributes([u64; 16]);

impl Attributes {
    fn new() -> Self {
        Attributes([0; 16])
    }

    fn u32(mut self, offset: usize, value: u32) -> Self {
        let word = &mut self.0[offset / 8];
        let mut bytes = word.to_ne_bytes();
        bytes[offset % 8..offset % 8 + 4].copy_from_slice(&value.to_ne_bytes());
        *word = u64::from_ne_bytes(bytes);
        self
    }

    fn u64(mut self, offset: usize, value: u64) -> Self {
        self.0[offset / 8] = value;
        self
    }

    fn pointer<T: ?Sized>(self, offset: usize, to: *const T) -> Self {
        self.u64(offset, to.cast::<u8>() as usize as u64)
    }

    fn call(&self, command: libc::c_int) -> io::Result<libc::c_int> {
        // Safety: the attributes are as long as is said; pointers in them are to memory that the
        // functions below borrow for the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                command,
                self.0.as_ptr(),
                size_of_val(&self.0) as libc::c_uint,
            )
        };
        check(result as libc::c_int)
    }
}

/// A map from queue to socket, for this many queues.
pub(crate) fn socket_map(queues: u32) -> io::Result<OwnedFd> {
    let attributes = Attributes::new()
        .u32(0, BPF_MAP_TYPE_XSKMAP)
        .u32(4, 4)
        .u32(8, 4)
        .u32(12, queues);
    owned(attributes.call(BPF_MAP_CREATE)?)
}

/// Packets of this queue may go to this socket.
pub(crate) fn map_socket(
    map: BorrowedFd<'_>,
    queue: u32,
    socket: BorrowedFd<'_>,
) -> io::Result<()> {
    let value = socket.as_raw_fd() as u32;
    Attributes::new()
        .u32(0, map.as_raw_fd() as u32)
        .pointer(8, &raw const queue)
        .pointer(16, &raw const value)
        .call(BPF_MAP_UPDATE_ELEM)?;
    Ok(())
}

/// Loads a program; the verifier writes what it has to say into `log`.
pub(crate) fn load_program(
    instructions: &[u64],
    frags: bool,
    log: Option<&mut [u8]>,
) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::new()
        .u32(0, BPF_PROG_TYPE_XDP)
        .u32(4, instructions.len() as u32)
        .pointer(8, instructions.as_ptr())
        .pointer(16, c"Apache-2.0".as_ptr())
        .u32(44, if frags { BPF_F_XDP_HAS_FRAGS } else { 0 })
        .u64(48, u64::from_ne_bytes(*b"evener\0\0"))
        .u32(68, BPF_XDP);
    if let Some(log) = log {
        attributes = attributes
            .u32(24, 1)
            .u32(28, log.len() as u32)
            .pointer(32, log.as_mut_ptr());
    }
    owned(attributes.call(BPF_PROG_LOAD)?)
}

/// Takes the program of a link away, whoever has copies of its descriptor.
pub(crate) fn detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = Attributes::new().u32(0, link.as_raw_fd() as u32);
    attributes.call(BPF_LINK_DETACH).map(|_| ())
}

/// Attaches a program to an interface for as long as the descriptor is open. `flags`: the mode.
pub(crate) fn attach(program: BorrowedFd<'_>, interface: u32, flags: u32) -> io::Result<OwnedFd> {
    let attributes = Attributes::new()
        .u32(0, program.as_raw_fd() as u32)
        .u32(4, interface)
        .u32(8, BPF_XDP)
        .u32(12, flags);
    owned(attributes.call(BPF_LINK_CREATE)?)
}

// ---- memory ----

/// Mapped memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// Safety: the memory belongs to the mapping, not to a thread. Who reads and writes it is for the files
// that use it to say.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(
        length: usize,
        flags: libc::c_int,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> io::Result<Mapping> {
        let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
        // Safety: a new mapping at a place of the kernel's choice touches no memory that is in use.
        let start = unsafe {
            libc::mmap(
                null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                offset as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A child would keep the socket of a ring open, and make the kernel copy pages that the card writes
        // to. It has no use for either. An error leaves that as it is.
        // Safety: the range is the new mapping.
        unsafe { libc::madvise(start, length, libc::MADV_DONTFORK) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }

    /// Zeroed memory of our own, in huge pages if asked for.
    pub(crate) fn own(length: usize, huge: bool) -> io::Result<Mapping> {
        let huge = if huge {
            libc::MAP_HUGETLB | libc::MAP_HUGE_2MB
        } else {
            0
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE | huge;
        Mapping::new(length, flags, None)
    }

    fn ring(socket: BorrowedFd<'_>, length: usize, offset: u64) -> io::Result<Mapping> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Mapping::new(length, flags, Some((socket, offset)))
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Safety: it was mapped by `new` with this length, and whoever points into it holds it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

// ---- sockets ----

/// A ring's place in its mapping, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offsets {
    pub producer: usize,
    pub consumer: usize,
    pub flags: usize,
    pub entries: usize,
}

/// One of the four rings of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Fill,
    Completion,
    Receive,
    Transmit,
}

/// An AF_XDP socket.
pub(crate) fn xdp_socket() -> io::Result<OwnedFd> {
    // Safety: no memory is handed over.
    owned(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })
}

fn set<T>(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // Safety: the kernel reads as many bytes as `value` has.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    check(result).map(|_| ())
}

/// Registers memory for a socket's frames of `frame` bytes each. It must outlive the socket's use of it,
/// which the kernel sees to: it holds the pages.
pub(crate) fn register(socket: BorrowedFd<'_>, memory: &Mapping, frame: u32) -> io::Result<()> {
    let registration = libc::xdp_umem_reg {
        addr: memory.start.as_ptr() as usize as u64,
        len: memory.length as u64,
        chunk_size: frame,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    set(socket, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration)
}

/// Makes and maps one ring with this many entries of `entry` bytes.
pub(crate) fn ring(
    socket: BorrowedFd<'_>,
    which: Which,
    entries: u32,
    entry: usize,
) -> io::Result<(Mapping, Offsets)> {
    let (option, page) = match which {
        Which::Fill => (libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_PGOFF_FILL_RING),
        Which::Completion => (
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_UMEM_PGOFF_COMPLETION_RING,
        ),
        Which::Receive => (libc::XDP_RX_RING, libc::XDP_PGOFF_RX_RING as u64),
        Which::Transmit => (libc::XDP_TX_RING, libc::XDP_PGOFF_TX_RING as u64),
    };
    set(socket, libc::SOL_XDP, option, &entries)?;
    // Safety: all zeros is a value of these plain numbers.
    let mut all: libc::xdp_mmap_offsets = unsafe { zeroed() };
    let mut length = size_of_val(&all) as libc::socklen_t;
    // Safety: the kernel writes at most `length` bytes there.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_MMAP_OFFSETS,
            (&raw mut all).cast(),
            &mut length,
        )
    })?;
    if length as usize != size_of_val(&all) {
        // Linux before 5.4 has no need-wakeup.
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let one = match which {
        Which::Fill => all.fr,
        Which::Completion => all.cr,
        Which::Receive => all.rx,
        Which::Transmit => all.tx,
    };
    let offsets = Offsets {
        producer: one.producer as usize,
        consumer: one.consumer as usize,
        flags: one.flags as usize,
        entries: one.desc as usize,
    };
    let mapping = Mapping::ring(socket, offsets.entries + entries as usize * entry, page)?;
    Ok((mapping, offsets))
}

/// Binds a socket to one queue of an interface.
pub(crate) fn bind(
    socket: BorrowedFd<'_>,
    interface: u32,
    queue: u32,
    flags: u16,
) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: interface,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    // Safety: the address is as long as is said.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    check(result).map(|_| ())
}

/// Whether the kernel has taken zero copy.
pub(crate) fn is_zero_copy(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut options = libc::xdp_options { flags: 0 };
    let mut length = size_of_val(&options) as libc::socklen_t;
    // Safety: the kernel writes at most `length` bytes there.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_OPTIONS,
            (&raw mut options).cast(),
            &mut length,
        )
    })?;
    Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// What the kernel dropped or found wrong.
pub(crate) fn statistics(socket: BorrowedFd<'_>) -> io::Result<libc::xdp_statistics> {
    // Safety: all zeros is a value of these plain numbers.
    let mut all: libc::xdp_statistics = unsafe { zeroed() };
    let mut length = size_of_val(&all) as libc::socklen_t;
    // Safety: the kernel writes at most `length` bytes there.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_STATISTICS,
            (&raw mut all).cast(),
            &mut length,
        )
    })?;
    Ok(all)
}

/// Room for what is on its way, where the kernel allows it.
pub(crate) fn set_send_room(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let bytes = bytes as libc::c_int;
    set(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes)
        .or_else(|_| set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes))
}

/// More packets for each call that sends, where the kernel has the option.
pub(crate) fn set_send_budget(socket: BorrowedFd<'_>, packets: u32) -> io::Result<()> {
    set(socket, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &packets)
}

/// The process polls the card's queue itself.
pub(crate) fn set_busy_poll(
    socket: BorrowedFd<'_>,
    time: Duration,
    packets: u32,
) -> io::Result<()> {
    let on: libc::c_int = 1;
    set(socket, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, &on)?;
    let microseconds = time.as_micros() as libc::c_int;
    set(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL, &microseconds)?;
    set(
        socket,
        libc::SOL_SOCKET,
        libc::SO_BUSY_POLL_BUDGET,
        &(packets as libc::c_int),
    )
}

/// Tells the kernel that there is something to send.
pub(crate) fn kick_send(socket: BorrowedFd<'_>) -> io::Result<()> {
    // Safety: no memory is handed over.
    let result =
        unsafe { libc::sendto(socket.as_raw_fd(), null(), 0, libc::MSG_DONTWAIT, null(), 0) };
    check(result as libc::c_int).map(|_| ())
}

/// Tells the kernel that there are frames to receive into.
pub(crate) fn kick_receive(socket: BorrowedFd<'_>) -> io::Result<()> {
    // Safety: no memory is handed over.
    let result = unsafe {
        libc::recvfrom(
            socket.as_raw_fd(),
            null_mut(),
            0,
            libc::MSG_DONTWAIT,
            null_mut(),
            null_mut(),
        )
    };
    check(result as libc::c_int).map(|_| ())
}

/// Nanoseconds by the clock that programs have; 0: there is none.
pub(crate) fn clock() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Safety: it writes one value of this type.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let nanoseconds = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
    if result == 0 { nanoseconds } else { 0 }
}

/// Waits until the descriptor has something to read; whether it has.
pub(crate) fn wait(fd: BorrowedFd<'_>, time: Duration) -> io::Result<bool> {
    let mut one = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let milliseconds = time.as_millis().min(i32::MAX as u128) as libc::c_int;
    // Safety: one entry is handed over.
    let count = check(unsafe { libc::poll(&raw mut one, 1, milliseconds) })?;
    Ok(count > 0)
}

// ---- netlink and ethtool ----

/// A socket to the kernel's routing, which hears what changes in these groups. It waits for answers for a
/// second at most.
pub(crate) fn netlink(groups: u32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // Safety: no memory is handed over.
    let fd = owned(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })?;
    // Safety: all zeros is a value of these plain numbers.
    let mut address: libc::sockaddr_nl = unsafe { zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address.nl_groups = groups;
    // Safety: the address is as long as is said.
    check(unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    })?;
    let second = libc::timeval {
        tv_sec: 1,
        tv_usec: 0,
    };
    set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, &second)?;
    Ok(fd)
}

pub(crate) fn send(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // Safety: the kernel reads as many bytes as there are.
    let result = unsafe {
        libc::send(
            fd.as_raw_fd(),
            bytes.as_ptr().cast::<c_void>(),
            bytes.len(),
            0,
        )
    };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// `None`: nothing was there (only with `now`).
pub(crate) fn receive(
    fd: BorrowedFd<'_>,
    bytes: &mut [u8],
    now: bool,
) -> io::Result<Option<usize>> {
    let flags = if now { libc::MSG_DONTWAIT } else { 0 };
    // Safety: the kernel writes at most as many bytes as there are.
    let result = unsafe {
        libc::recv(
            fd.as_raw_fd(),
            bytes.as_mut_ptr().cast::<c_void>(),
            bytes.len(),
            flags,
        )
    };
    match usize::try_from(result) {
        Ok(count) => Ok(Some(count)),
        Err(_) => match io::Error::last_os_error() {
            error if now && error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}

/// The driver of an interface, where it says so.
pub(crate) fn driver(interface: &str) -> Option<String> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").ok();
    // Loopback may be down in a namespace; the address does not matter.
    let socket = socket.or_else(|| std::net::UdpSocket::bind("0.0.0.0:0").ok())?;
    // struct ethtool_drvinfo: a command, then names of 32 bytes; 196 bytes in all.
    let mut info = [0u32; 49];
    info[0] = ETHTOOL_GDRVINFO;
    // Safety: all zeros is a value of these plain numbers.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request
        .ifr_name
        .iter_mut()
        .zip(interface.bytes().take(room))
    {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = info.as_mut_ptr().cast();
    // Safety: the kernel writes a struct ethtool_drvinfo to where `ifru_data` points, which is as long.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request) })
        .ok()?;
    let bytes: Vec<u8> = info[1..9]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect();
    let name = bytes.split(|byte| *byte == 0).next()?;
    let name = String::from_utf8_lossy(name).into_owned();
    (!name.is_empty()).then_some(name)
}
