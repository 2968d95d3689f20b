//! The tier: a file, buffers, and requests between them.

use crate::ssd::backend::{Backend, Done};
use crate::ssd::buffers::Buffers;
use crate::ssd::file::{self, Opened};
use crate::ssd::requests::{Fault, Requests, Span};
use crate::ssd::threads::Threads;
use crate::ssd::{ALIGN, SsdError};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who is to move the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// io_uring where the kernel has it, else threads.
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads.
    Threads,
}

/// Bytes that a store has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Out of the file.
    pub read: u64,
    /// Into the file.
    pub written: u64,
}

/// See the head of this file. One thread at a time uses it.
pub struct Store {
    folder: PathBuf,
    file: Arc<File>,
    size: u64,
    direct: bool,
    reserved: bool,
    way: Way,
    refused: Option<String>,
    buffers: Buffers,
    requests: Requests,
    backend: Box<dyn Backend>,
    patience: Duration,
    moved: Moved,
    broken: bool,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("folder", &self.folder)
            .field("size", &self.size)
            .field("backend", &self.backend.name())
            .finish_non_exhaustive()
    }
}

impl Store {
    /// A file of at least `size` bytes in `folder`, `count` buffers of `room` bytes, at most `depth`
    /// operations at a time, and an error when the disk has not answered for `patience`.
    ///
    /// # Errors
    /// [`SsdError::Open`], [`SsdError::Full`], [`SsdError::Buffers`].
    pub fn new(
        folder: &Path,
        size: u64,
        count: usize,
        room: usize,
        depth: usize,
        patience: Duration,
        way: Way,
    ) -> Result<Store, SsdError> {
        let size = size.max(1).div_ceil(ALIGN as u64) * ALIGN as u64;
        let Opened {
            file,
            direct,
            reserved,
        } = file::make(folder, size, true)?;
        let made = Made {
            folder: folder.to_owned(),
            file: Arc::new(file),
            size,
            direct,
            reserved,
        };
        Store::on(made, count, room, depth, patience, way)
    }

    fn on(
        made: Made,
        count: usize,
        room: usize,
        depth: usize,
        patience: Duration,
        way: Way,
    ) -> Result<Store, SsdError> {
        let buffers = Buffers::new(count, room)?;
        let (backend, refused) = backend(&made, &buffers, depth, way)?;
        Ok(Store {
            requests: Requests::new(made.size, buffers.room(), depth),
            folder: made.folder,
            file: made.file,
            size: made.size,
            direct: made.direct,
            reserved: made.reserved,
            way,
            refused,
            buffers,
            backend,
            patience,
            moved: Moved::default(),
            broken: false,
        })
    }

    /// The same file with buffers and requests of its own, for another thread. The two know nothing
    /// of each other's requests.
    ///
    /// # Errors
    /// [`SsdError::Buffers`].
    pub fn beside(&self, count: usize, room: usize, depth: usize) -> Result<Store, SsdError> {
        let made = Made {
            folder: self.folder.clone(),
            file: self.file.clone(),
            size: self.size,
            direct: self.direct,
            reserved: self.reserved,
        };
        Store::on(made, count, room, depth, self.patience, self.way)
    }

    /// A backend to use instead of its own: tests inject faults with it.
    #[doc(hidden)]
    pub fn with_backend(mut self, backend: Box<dyn Backend>) -> Store {
        self.backend = backend;
        self
    }

    /// The buffers.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that were moved until now.
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// For people: who moves the bytes and how, and why not better.
    pub fn describe(&self) -> String {
        let mut said = self.backend.name().to_owned();
        if let Some(why) = &self.refused {
            said += &format!(" (io_uring was refused: {why})");
        }
        if !self.direct {
            said += ", through the page cache (this file system refuses O_DIRECT)";
        }
        if !self.reserved {
            said += ", its room not reserved (this file system cannot)";
        }
        said
    }

    /// Asks for a read or a write. A read shows in the buffer when [`Store::wait`] has returned;
    /// before that nobody touches the buffer.
    ///
    /// # Errors
    /// [`SsdError::Misuse`]; or an earlier failure's consequence: a store that has stalled takes
    /// nothing more.
    pub fn submit(&mut self, write: bool, span: Span) -> Result<u64, SsdError> {
        if self.broken {
            return Err(self.stalled());
        }
        if span.buffer >= self.buffers.count() {
            return Err(SsdError::Misuse(format!(
                "there is no buffer {}",
                span.buffer
            )));
        }
        let ticket = self
            .requests
            .submit(write, span)
            .map_err(SsdError::Misuse)?;
        let bytes = span.length as u64;
        if write {
            self.moved.written += bytes;
        } else {
            self.moved.read += bytes;
        }
        self.begin();
        Ok(ticket)
    }

    /// Until a request has ended.
    ///
    /// # Errors
    /// [`SsdError::Io`], or [`SsdError::Stalled`] where no request has ended for the store's
    /// patience.
    pub fn wait(&mut self, ticket: u64) -> Result<(), SsdError> {
        let mut since = Instant::now();
        while !self.requests.finished(ticket) {
            if self.collect(Duration::from_millis(200))? {
                since = Instant::now();
            }
            if since.elapsed() >= self.patience {
                self.broken = true;
                return Err(self.stalled());
            }
        }
        self.take(ticket)
    }

    /// Whether a request has ended; takes it, as [`Store::wait`], where it has.
    ///
    /// # Errors
    /// As [`Store::wait`], but for `Stalled`.
    pub fn poll(&mut self, ticket: u64) -> Result<bool, SsdError> {
        if !self.requests.finished(ticket) {
            self.collect(Duration::ZERO)?;
        }
        if !self.requests.finished(ticket) {
            return Ok(false);
        }
        self.take(ticket).map(|()| true)
    }

    fn take(&mut self, ticket: u64) -> Result<(), SsdError> {
        match self.requests.take(ticket) {
            Some(Err(Fault {
                write,
                span,
                source,
            })) => Err(SsdError::Io {
                folder: self.folder.clone(),
                verb: if write { "writing" } else { "reading" },
                offset: span.offset,
                length: span.length,
                source,
            }),
            _ => Ok(()),
        }
    }

    fn stalled(&self) -> SsdError {
        SsdError::Stalled {
            folder: self.folder.clone(),
            seconds: self.patience.as_secs_f64(),
        }
    }

    fn begin(&mut self) {
        while let Some(op) = self.requests.start() {
            if let Err(error) = self.backend.begin(op) {
                self.requests.refuse(op.ticket, error);
            }
        }
    }

    /// Whether anything has ended.
    fn collect(&mut self, wait: Duration) -> Result<bool, SsdError> {
        self.begin();
        let mut ended: Vec<Done> = Vec::new();
        self.backend
            .collect(wait, &mut ended)
            .map_err(|source| SsdError::Open {
                folder: self.folder.clone(),
                source,
            })?;
        let any = !ended.is_empty();
        for done in ended {
            self.requests.complete(done.ticket, done.result);
        }
        self.begin();
        Ok(any)
    }
}

struct Made {
    folder: PathBuf,
    file: Arc<File>,
    size: u64,
    direct: bool,
    reserved: bool,
}

type Chosen = (Box<dyn Backend>, Option<String>);

fn backend(made: &Made, buffers: &Buffers, depth: usize, way: Way) -> Result<Chosen, SsdError> {
    let failed = |source| SsdError::Open {
        folder: made.folder.clone(),
        source,
    };
    let threads = || Threads::new(&made.file, buffers, depth.min(16)).map_err(failed);
    match (way, uring(made, buffers, depth)) {
        (Way::Auto | Way::Uring, Ok(ring)) => Ok((ring, None)),
        (Way::Uring, Err(error)) => Err(failed(error)),
        (Way::Auto, Err(error)) => Ok((Box::new(threads()?), Some(error.to_string()))),
        (Way::Threads, _) => Ok((Box::new(threads()?), None)),
    }
}

#[cfg(target_os = "linux")]
fn uring(made: &Made, buffers: &Buffers, depth: usize) -> io::Result<Box<dyn Backend>> {
    Ok(Box::new(crate::ssd::uring::Uring::new(
        &made.file, buffers, depth,
    )?))
}

#[cfg(not(target_os = "linux"))]
fn uring(_: &Made, _: &Buffers, _: usize) -> io::Result<Box<dyn Backend>> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}
