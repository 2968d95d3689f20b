//! The device's part: copies and stream memory operations of CUDA's driver, found at run time.
//!
//! NVIDIA, CUDA Driver API, "Stream Memory Operations": `cuStreamWaitValue32` holds a stream, and
//! nothing else, until a word in memory is at or past a value on a circle of 2^32;
//! `cuStreamWriteValue32` writes one after all that the stream did before.

#![allow(unsafe_code, reason = "calls into CUDA's driver")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::pieces::Pieces;
use crate::room::reached;
use crate::{Error, Exchange, Kind, Order, Word};

type Stream = *mut c_void;
type Value = unsafe extern "C" fn(Stream, u64, c_uint, c_uint) -> c_int;
type Copy = unsafe extern "C" fn(u64, u64, usize, Stream) -> c_int;
type Synchronize = unsafe extern "C" fn(Stream) -> c_int;
type Event = *mut c_void;
type Create = unsafe extern "C" fn(*mut Event, c_uint) -> c_int;
type Destroy = unsafe extern "C" fn(Event) -> c_int;
type Record = unsafe extern "C" fn(Event, Stream) -> c_int;
type Follow = unsafe extern "C" fn(Stream, Event, c_uint) -> c_int;

/// An event that keeps no time.
const UNTIMED: c_uint = 2;

/// Wait until `(value in memory - value) >= 0`, with a sign.
const AT_OR_PAST: c_uint = 0;

/// The driver says no.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// It cannot be loaded.
    #[error("CUDA's driver cannot be loaded: {0}")]
    Load(String),
    /// A call failed.
    #[error("{call} returned {code}")]
    Call {
        /// Which.
        call: &'static str,
        /// The driver's code.
        code: c_int,
    },
    /// A value did not arrive where it was written to.
    #[error("stream memory operations do not reach host memory here")]
    Blind,
}

struct Driver {
    wait: Value,
    write: Value,
    copy: Copy,
    synchronize: Synchronize,
    create: Create,
    destroy: Destroy,
    record: Record,
    follow: Follow,
}

/// The process' driver, loaded once and for ever.
fn driver() -> Result<&'static Driver, DriverError> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER
        .get_or_init(|| Driver::load().map_err(|error| error.to_string()))
        .as_ref()
        .map_err(|error| DriverError::Load(error.clone()))
}

fn done(call: &'static str, code: c_int) -> Result<(), DriverError> {
    if code == 0 {
        Ok(())
    } else {
        Err(DriverError::Call { call, code })
    }
}

impl Driver {
    fn load() -> Result<Driver, libloading::Error> {
        // SAFETY: CUDA's driver, whose functions have these types; it is never unloaded.
        unsafe {
            let library = std::mem::ManuallyDrop::new(Library::new("libcuda.so.1")?);
            Ok(Driver {
                wait: *library.get::<Value>(b"cuStreamWaitValue32_v2\0")?,
                write: *library.get::<Value>(b"cuStreamWriteValue32_v2\0")?,
                copy: *library.get::<Copy>(b"cuMemcpyAsync\0")?,
                synchronize: *library.get::<Synchronize>(b"cuStreamSynchronize\0")?,
                create: *library.get::<Create>(b"cuEventCreate\0")?,
                destroy: *library.get::<Destroy>(b"cuEventDestroy_v2\0")?,
                record: *library.get::<Record>(b"cuEventRecord\0")?,
                follow: *library.get::<Follow>(b"cuStreamWaitEvent\0")?,
            })
        }
    }

    fn wait(&self, stream: Stream, address: usize, value: u32) -> Result<(), DriverError> {
        // SAFETY: the word outlives the exchange, and the stream is the caller's.
        let code = unsafe { (self.wait)(stream, address as u64, value, AT_OR_PAST) };
        done("cuStreamWaitValue32", code)
    }

    fn write(&self, stream: Stream, address: usize, value: u32) -> Result<(), DriverError> {
        // SAFETY: as for `wait`.
        let code = unsafe { (self.write)(stream, address as u64, value, 0) };
        done("cuStreamWriteValue32", code)
    }

    /// # Safety
    /// Both areas live until the stream has passed the copy.
    unsafe fn copy(
        &self,
        stream: Stream,
        to: usize,
        from: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: promised by the caller.
        let code = unsafe { (self.copy)(to as u64, from as u64, bytes, stream) };
        done("cuMemcpyAsync", code)
    }
}

/// An event of the driver's, used again and again: who waits for it waits for its last record.
#[derive(Debug)]
pub(crate) struct Mark(usize);

impl Mark {
    fn new(driver: &Driver) -> Result<Mark, DriverError> {
        let mut event: Event = std::ptr::null_mut();
        // SAFETY: the driver writes a handle there.
        done("cuEventCreate", unsafe {
            (driver.create)(&raw mut event, UNTIMED)
        })?;
        Ok(Mark(event as usize))
    }

    /// What `after` does from now on comes after all that `before` has been given.
    fn order(&self, driver: &Driver, before: Stream, after: Stream) -> Result<(), DriverError> {
        self.record(driver, before)?;
        self.follow(driver, after)
    }

    fn record(&self, driver: &Driver, stream: Stream) -> Result<(), DriverError> {
        // SAFETY: our event, and the caller's stream.
        done("cuEventRecord", unsafe {
            (driver.record)(self.0 as Event, stream)
        })
    }

    fn follow(&self, driver: &Driver, stream: Stream) -> Result<(), DriverError> {
        // SAFETY: as for `record`.
        done("cuStreamWaitEvent", unsafe {
            (driver.follow)(stream, self.0 as Event, 0)
        })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            // SAFETY: ours, and nobody has it; the driver keeps it for streams that still wait.
            // Where the context is gone the call fails, and there is nothing to free.
            let _ = unsafe { (driver.destroy)(self.0 as Event) };
        }
    }
}

/// Streams of the current device, as addresses.
#[derive(Debug, Clone, Copy)]
pub struct Streams {
    /// Made the payload, and uses the result.
    pub current: usize,
    /// Copies payloads out.
    pub out: usize,
    /// Copies what arrived in.
    pub back: usize,
}

impl Exchange {
    /// Whether the driver can do what is needed here: writes a word through a stream and waits for it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn try_device(&self, stream: usize) -> Result<(), DriverError> {
        let driver = driver()?;
        let (room, stream) = (self.inner.room, stream as Stream);
        let address = room.address(Word::Trial);
        let value = room.load(Word::Trial).wrapping_add(1);
        driver.write(stream, address, value)?;
        driver.wait(stream, address, value)?;
        // SAFETY: the caller's stream.
        done("cuStreamSynchronize", unsafe {
            (driver.synchronize)(stream)
        })?;
        if room.load(Word::Trial) != value {
            return Err(DriverError::Blind);
        }
        if self.marks.get().is_none() {
            let made = [Mark::new(driver)?, Mark::new(driver)?, Mark::new(driver)?];
            // Where another thread was first, its marks stay.
            let _ = self.marks.set(made);
        }
        Ok(())
    }

    /// Enqueues a collective over all ranks, between what `current` was given before and what it is
    /// given later. Sizes as for [`Exchange::run_on_host`], but that a payload of [`Kind::Gather`]
    /// may lie at its place in the result. [`Exchange::try_device`] was called.
    ///
    /// # Errors
    /// [`Error::Failed`], [`Error::Driver`].
    ///
    /// # Safety
    /// Streams and memory are of the current device, and the memory lives and is used by nobody
    /// else until `current` has passed what this enqueues.
    pub unsafe fn enqueue(
        &self,
        kind: Kind,
        bytes: usize,
        payload: usize,
        received: usize,
        streams: Streams,
    ) -> Result<(), Error> {
        let driver = driver()?;
        let Some([begin, left, landed]) = self.marks.get() else {
            return Err(Error::Shape("no device was tried"));
        };
        let (current, out, back) = (
            streams.current as Stream,
            streams.out as Stream,
            streams.back as Stream,
        );
        self.submit(kind, bytes, |pieces, order| {
            begin.order(driver, current, out)?;
            begin.follow(driver, back)?;
            // SAFETY: promised by the caller.
            unsafe {
                self.enqueue_pieces(
                    driver, pieces, order, kind, bytes, payload, received, streams,
                )
            }?;
            // The payload may be written again, and the result read.
            left.order(driver, out, current)?;
            landed.order(driver, back, current)
        })
    }

    /// # Safety
    /// As for [`Exchange::enqueue`].
    #[allow(clippy::too_many_arguments, reason = "all of one call")]
    unsafe fn enqueue_pieces(
        &self,
        driver: &Driver,
        pieces: &Pieces,
        order: &Order,
        kind: Kind,
        bytes: usize,
        payload: usize,
        received: usize,
        streams: Streams,
    ) -> Result<(), DriverError> {
        let room = self.inner.room;
        let (out, back) = (streams.out as Stream, streams.back as Stream);
        for (index, part) in pieces.sends.iter().enumerate() {
            let piece = order.sends.wrapping_add(index as u32);
            let free = piece.wrapping_add(1).wrapping_sub(room.slots);
            // What has happened already needs no command: a stream holds some thousand.
            if !reached(room.load(Word::Sent), free) {
                driver.wait(out, room.address(Word::Sent), free)?;
            }
            let slot = room.slot(room.send, piece, part.piece.length);
            // SAFETY: the payload lives; the slot is the stream's until it has written `ready`.
            unsafe { driver.copy(out, slot.start as usize, payload + part.offset, slot.length) }?;
            driver.write(out, room.address(Word::Ready), piece.wrapping_add(1))?;
        }
        let rank = self.inner.rank as usize;
        let own = match kind {
            Kind::Gather => payload,
            Kind::Parts => payload + rank * bytes,
        };
        if own != received + rank * bytes {
            // SAFETY: within both.
            unsafe { driver.copy(back, received + rank * bytes, own, bytes) }?;
        }
        for (index, part) in pieces.receives.iter().enumerate() {
            let piece = order.receives.wrapping_add(index as u32);
            driver.wait(back, room.address(Word::Arrived), piece.wrapping_add(1))?;
            let slot = room.slot(room.receive, piece, part.piece.length);
            // SAFETY: the result lives; the slot is the stream's until it has written `consumed`.
            unsafe {
                driver.copy(
                    back,
                    received + part.offset,
                    slot.start as usize,
                    slot.length,
                )
            }?;
            driver.write(back, room.address(Word::Consumed), piece.wrapping_add(1))?;
        }
        Ok(())
    }
}
