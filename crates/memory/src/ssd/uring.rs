//! io_uring: requests and answers in two rings that the kernel shares, buffers registered once so
//! that it need not look them up for every request.

#![allow(
    unsafe_code,
    reason = "buffers are given by address; each use says why it holds"
)]

use crate::ssd::backend::{Backend, Done};
use crate::ssd::buffers::Buffers;
use crate::ssd::requests::Op;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long whoever ends a ring waits for what the disk has not answered yet.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) struct Uring {
    ring: ManuallyDrop<IoUring>,
    file: Arc<File>,
    buffers: Buffers,
    registered: bool,
    running: usize,
}

impl Uring {
    /// Fails where the kernel refuses io_uring (too old, or switched off by sysctl or seccomp).
    pub(crate) fn new(file: &Arc<File>, buffers: &Buffers, depth: usize) -> io::Result<Uring> {
        let entries = u32::try_from(depth.clamp(1, 1024)).unwrap_or(1024);
        let ring = IoUring::new(entries.next_power_of_two())?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::other(
                "the kernel's io_uring cannot wait with a limit",
            ));
        }
        let vectors: Vec<libc::iovec> = (0..buffers.count())
            .map(|buffer| libc::iovec {
                iov_base: buffers.address(buffer) as *mut libc::c_void,
                iov_len: buffers.room(),
            })
            .collect();
        // SAFETY: the buffers are mapped for as long as `buffers` lives; Drop ends the ring first,
        // or leaks both.
        let registered = unsafe { ring.submitter().register_buffers(&vectors) }.is_ok();
        Ok(Uring {
            ring: ManuallyDrop::new(ring),
            file: file.clone(),
            buffers: buffers.clone(),
            registered,
            running: 0,
        })
    }
}

impl Backend for Uring {
    fn begin(&mut self, op: Op) -> io::Result<()> {
        let file = Fd(self.file.as_raw_fd());
        let address = (self.buffers.address(op.buffer) + op.at) as *mut u8;
        let length = u32::try_from(op.length)
            .map_err(|_| io::Error::other("an operation of 4 GiB or more"))?;
        let number = u16::try_from(op.buffer).unwrap_or(u16::MAX);
        let entry = match (op.write, self.registered) {
            (true, true) => opcode::WriteFixed::new(file, address, length, number)
                .offset(op.offset)
                .build(),
            (false, true) => opcode::ReadFixed::new(file, address, length, number)
                .offset(op.offset)
                .build(),
            (true, false) => opcode::Write::new(file, address, length)
                .offset(op.offset)
                .build(),
            (false, false) => opcode::Read::new(file, address, length)
                .offset(op.offset)
                .build(),
        }
        .user_data(op.ticket);
        // SAFETY: the span lies in one buffer, which nobody else touches until this operation has
        // ended (see `Requests`), and which stays mapped: Drop waits for the kernel, or leaks.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("the submission ring is full"))?;
        self.running += 1;
        match self.ring.submit() {
            Ok(_) => Ok(()),
            // It stays in the ring; `collect` submits it again.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EAGAIN) | Some(libc::EBUSY) | Some(libc::EINTR)
                ) =>
            {
                Ok(())
            }
            Err(error) => {
                self.running -= 1;
                Err(error)
            }
        }
    }

    fn collect(&mut self, wait: Duration, into: &mut Vec<Done>) -> io::Result<()> {
        let limit = Timespec::new()
            .sec(wait.as_secs())
            .nsec(wait.subsec_nanos());
        let arguments = SubmitArgs::new().timespec(&limit);
        let wanted = usize::from(self.ring.completion().is_empty());
        match self.ring.submitter().submit_with_args(wanted, &arguments) {
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME) | Some(libc::EINTR) | Some(libc::EBUSY) | Some(libc::EAGAIN)
                ) => {}
            Err(error) => return Err(error),
        }
        for entry in self.ring.completion() {
            self.running = self.running.saturating_sub(1);
            let result = match usize::try_from(entry.result()) {
                Ok(moved) => Ok(moved),
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
            };
            into.push(Done {
                ticket: entry.user_data(),
                result,
            });
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        if self.registered {
            "io_uring with registered buffers"
        } else {
            "io_uring (the buffers could not be registered: see ulimit -l)"
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        let mut ended = Vec::new();
        while self.running > 0 && Instant::now() < end {
            if self
                .collect(Duration::from_millis(100), &mut ended)
                .is_err()
            {
                break;
            }
        }
        if self.running > 0 {
            // The kernel may still write to the buffers: they are never given back.
            std::mem::forget(self.buffers.clone());
            std::mem::forget(self.file.clone());
            return;
        }
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
    }
}
