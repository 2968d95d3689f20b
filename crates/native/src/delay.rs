//! The delay lines of `evener lab`, where the kernel has no netem: frames come in at one end of a
//! line and go out at the other, so much later. `evener.tools.lab.delay` opens the sockets.

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A frame with segments of the kernel's (64 KiB), its Ethernet header and its virtio header.
const LARGEST: usize = 1 << 17;
/// Frames that are read from one end before the others have their turn.
const TURN: usize = 64;
/// Bytes that wait in one way of a line; what comes then is lost.
const ROOM: usize = 256 << 20;

/// One way of a line.
#[derive(Default)]
struct Way {
    delay: Duration,
    /// Of 2^32 frames, how many pass the others.
    ahead: u64,
    waiting: VecDeque<(Instant, Box<[u8]>)>,
    bytes: usize,
}

/// What the lab asks for, in its order on the control socket: which end's frames, their delay in
/// nanoseconds, and `ahead`.
const REQUEST: usize = 24;

/// xorshift64: which frames pass others is the same in each run of one seed.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 32
}

fn receive(fd: RawFd, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `into` is ours, and its length is what is said.
    let got = unsafe { libc::recv(fd, into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// A frame that the device does not take is lost, as on a cable.
fn send(fd: RawFd, frame: &[u8]) {
    // SAFETY: `frame` is valid for its length; the call reads it only.
    unsafe { libc::send(fd, frame.as_ptr().cast(), frame.len(), libc::MSG_DONTWAIT) };
}

/// Until something can be read, or until `due`.
fn sleep(ends: &mut [libc::pollfd], due: Option<Instant>) -> io::Result<()> {
    let wait = due.map(|at| at.saturating_duration_since(Instant::now()));
    let wait = wait.map(|left| libc::timespec {
        tv_sec: left.as_secs() as libc::time_t,
        tv_nsec: left.subsec_nanos() as libc::c_long,
    });
    let time = wait.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `ends` is a slice of pollfd; `time` is null or points to `wait`, which lives.
    let done = unsafe {
        libc::ppoll(
            ends.as_mut_ptr(),
            ends.len() as libc::nfds_t,
            time,
            std::ptr::null(),
        )
    };
    if done < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// `ends`: two sockets per line. Returns when the other end of `control` is closed.
fn carry(control: RawFd, ends: &[RawFd], seed: u64) -> io::Result<()> {
    let mut ways: Vec<Way> = ends.iter().map(|_| Way::default()).collect();
    let poll = |&fd: &RawFd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut ready: Vec<libc::pollfd> = ends.iter().chain([&control]).map(poll).collect();
    let mut frame = vec![0; LARGEST];
    let mut state = seed | 1 << 40;
    // SAFETY: no pointers. Waits end when they are due, and not up to 50 us later.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    loop {
        let due = ways
            .iter()
            .filter_map(|way| way.waiting.front())
            .map(|w| w.0);
        sleep(&mut ready, due.min())?;
        for (index, &end) in ends.iter().enumerate() {
            if ready[index].revents != 0 {
                let (way, out) = (&mut ways[index], ends[index ^ 1]);
                for _ in 0..TURN {
                    // An end that is down has an error once, and nothing to read.
                    let Ok(length) = receive(end, &mut frame) else {
                        break;
                    };
                    if way.delay.is_zero() || random(&mut state) < way.ahead {
                        send(out, &frame[..length]);
                    } else if way.bytes + length <= ROOM {
                        let at = Instant::now() + way.delay;
                        way.bytes += length;
                        way.waiting.push_back((at, frame[..length].into()));
                    }
                }
            }
        }
        if ready[ends.len()].revents != 0 {
            match receive(control, &mut frame) {
                Ok(REQUEST) => {
                    let word = |at: usize| {
                        let mut bytes = [0; 8];
                        bytes.copy_from_slice(&frame[8 * at..][..8]);
                        u64::from_ne_bytes(bytes)
                    };
                    if let Some(way) = ways.get_mut(word(0) as usize) {
                        way.delay = Duration::from_nanos(word(1));
                        way.ahead = word(2);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return Ok(()),
            }
        }
        let now = Instant::now();
        for (way, index) in ways.iter_mut().zip(0..) {
            while way.waiting.front().is_some_and(|waiting| waiting.0 <= now) {
                if let Some((_, frame)) = way.waiting.pop_front() {
                    way.bytes -= frame.len();
                    send(ends[index ^ 1], &frame);
                }
            }
        }
    }
}

/// Carries frames between the two ends of each line until `control`, a socket of packets, is closed
/// at its other end. `ends`: packet sockets with PACKET_VNET_HDR, two per line. What comes on
/// `control` are three words of 64 bits: the place of an end in `ends`, by how many nanoseconds what
/// comes in there is delayed, and how many of 2^32 frames go at once and pass the others.
#[pyfunction]
pub fn delay_lines(py: Python<'_>, control: i32, ends: Vec<i32>, seed: u64) -> PyResult<()> {
    if !ends.len().is_multiple_of(2) {
        return Err(PyValueError::new_err("two ends per line"));
    }
    py.detach(|| carry(control, &ends, seed))
        .map_err(|error| PyOSError::new_err((error.raw_os_error(), error.to_string())))
}
