//! A pool of threads that call pread and pwrite: where io_uring is refused, and in tests.
//!
//! A thread may hang in the kernel for as long as the disk does. Nobody joins it then: it holds the
//! file and the buffers, and ends by itself when the call returns.

#![allow(
    unsafe_code,
    reason = "buffers are given by address; each use says why it holds"
)]

use crate::ssd::backend::{Backend, Done};
use crate::ssd::buffers::Buffers;
use crate::ssd::requests::Op;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) struct Threads {
    jobs: Sender<Op>,
    ended: Receiver<Done>,
}

impl Threads {
    pub(crate) fn new(file: &Arc<File>, buffers: &Buffers, count: usize) -> io::Result<Threads> {
        let (jobs, queue) = channel::<Op>();
        let (tell, ended) = channel();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..count.max(1) {
            let (file, buffers, queue, tell) =
                (file.clone(), buffers.clone(), queue.clone(), tell.clone());
            std::thread::Builder::new()
                .name("evener-ssd".to_owned())
                .spawn(move || {
                    loop {
                        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok(op) = next else { return };
                        let result = carry_out(&file, &buffers, op);
                        let ticket = op.ticket;
                        if tell.send(Done { ticket, result }).is_err() {
                            return;
                        }
                    }
                })?;
        }
        Ok(Threads { jobs, ended })
    }
}

fn carry_out(file: &File, buffers: &Buffers, op: Op) -> io::Result<usize> {
    let address = buffers.address(op.buffer) + op.at;
    // SAFETY: the span lies in one buffer (`Requests::submit` has checked it), `buffers` keeps the
    // map alive, and a buffer with a running operation is touched by nobody else: `Requests` gives
    // it to one operation at a time, and its owner looks at it when that has ended.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, op.length) };
    if op.write {
        file.write_at(memory, op.offset)
    } else {
        file.read_at(memory, op.offset)
    }
}

impl Backend for Threads {
    fn begin(&mut self, op: Op) -> io::Result<()> {
        self.jobs
            .send(op)
            .map_err(|_| io::Error::other("all threads of the pool have ended"))
    }

    fn collect(&mut self, wait: Duration, into: &mut Vec<Done>) -> io::Result<()> {
        match self.ended.recv_timeout(wait) {
            Ok(done) => into.push(done),
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("all threads of the pool have ended"));
            }
        }
        into.extend(self.ended.try_iter());
        Ok(())
    }

    fn name(&self) -> &'static str {
        "a pool of threads with pread and pwrite"
    }
}
