//! Copies between a device and frames of a card's memory ([`framing`](crate::framing)), by copy engines.
//!
//! - **Pinned.** The memory of all frames is registered with the driver, once for a process, and until the last
//!   exchange that uses it is gone (`cuMemHostRegister`). The kernel has pinned the same pages for the card.
//! - **Strided.** Units lie in frames at a fixed distance, and behind each other in the device's memory:
//!   `cuMemcpy2DAsync` moves as many as lie so in one command.
//! - **A stream of its own.** The pump issues copies when pieces come. It never waits for a stream.
//! - **A priority of its own.** The stream "in" waits, by way of the pump, for copies that are issued later. CUDA cannot
//!   see that, and puts streams of one priority into a few queues of the device, in turn: behind a stream that waits the
//!   copies would wait too, for ever. So this stream has the highest priority, which nobody else here uses. Should copies
//!   be held up all the same, the exchange fails after its patience and does not hang.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::{DriverError, Stream, done, driver};
use crate::framing::Run;

/// The memory may be used by all contexts.
const PORTABLE: c_uint = 1;
/// It is registered already, by another library.
const REGISTERED: c_int = 712;
/// Flag of a stream: it does not wait for the legacy default stream.
const NON_BLOCKING: c_uint = 1;
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

pub(super) type Context = *mut c_void;
pub(super) type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;
pub(super) type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;
pub(super) type Current = unsafe extern "C" fn(*mut Context) -> c_int;
pub(super) type Enter = unsafe extern "C" fn(Context) -> c_int;
pub(super) type Priorities = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
pub(super) type NewStream = unsafe extern "C" fn(*mut Stream, c_uint, c_int) -> c_int;
pub(super) type EndStream = unsafe extern "C" fn(Stream) -> c_int;
pub(super) type Strided = unsafe extern "C" fn(*const Copy2D, Stream) -> c_int;
pub(super) type Set = unsafe extern "C" fn(u64, u8, usize, Stream) -> c_int;

/// `CUDA_MEMCPY2D` of cuda.h (from CUDA 3.2 on, 64 bits): the sizes of the fields are checked below.
#[repr(C)]
pub(super) struct Copy2D {
    from_x: usize,
    from_y: usize,
    from_kind: c_uint,
    from_host: *const c_void,
    from_device: u64,
    from_array: *mut c_void,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: c_uint,
    to_host: *mut c_void,
    to_device: u64,
    to_array: *mut c_void,
    to_pitch: usize,
    width: usize,
    height: usize,
}

const _: () = assert!(size_of::<Copy2D>() == 128);

/// A rectangle's side: where it begins, and the bytes from one row to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub at: usize,
    pub pitch: usize,
}

/// Copies `count` rows of `width` bytes between a device and the host.
///
/// # Safety
/// All rows live until the stream has passed the copy; the host's are registered.
pub(super) unsafe fn copy_rows(
    stream: Stream,
    to_device: bool,
    (from, to): (Rows, Rows),
    (width, count): (usize, usize),
) -> Result<(), DriverError> {
    let driver = driver()?;
    if count == 1 {
        // SAFETY: promised by the caller.
        return unsafe { driver.copy(stream, to.at, from.at, width) };
    }
    let (host, device) = if to_device { (from, to) } else { (to, from) };
    let copy = Copy2D {
        from_x: 0,
        from_y: 0,
        from_kind: if to_device { HOST } else { DEVICE },
        from_host: if to_device {
            host.at as *const c_void
        } else {
            std::ptr::null()
        },
        from_device: if to_device { 0 } else { device.at as u64 },
        from_array: std::ptr::null_mut(),
        from_pitch: from.pitch,
        to_x: 0,
        to_y: 0,
        to_kind: if to_device { DEVICE } else { HOST },
        to_host: if to_device {
            std::ptr::null_mut()
        } else {
            host.at as *mut c_void
        },
        to_device: if to_device { device.at as u64 } else { 0 },
        to_array: std::ptr::null_mut(),
        to_pitch: to.pitch,
        width,
        height: count,
    };
    // SAFETY: promised by the caller; the driver reads the description during the call.
    done("cuMemcpy2DAsync", unsafe {
        (driver.strided)(&raw const copy, stream)
    })
}

/// Memory that is registered, and by how many exchanges it is used.
static PINNED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Keeps memory registered.
#[derive(Debug)]
struct Pin(usize);

impl Pin {
    /// # Safety
    /// The memory lives until this is dropped. The context is current.
    unsafe fn take(start: usize, length: usize) -> Result<Pin, DriverError> {
        let driver = driver()?;
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, users)) = pinned.iter_mut().find(|(at, _)| *at == start) {
            *users += 1;
            return Ok(Pin(start));
        }
        // SAFETY: promised by the caller.
        let code = unsafe { (driver.register)(start as *mut c_void, length, PORTABLE) };
        if code != REGISTERED {
            done("cuMemHostRegister", code)?;
        }
        pinned.push((start, 1));
        Ok(Pin(start))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = pinned.iter().position(|(at, _)| *at == self.0) else {
            return;
        };
        pinned[place].1 -= 1;
        if pinned[place].1 == 0 {
            pinned.swap_remove(place);
            if let Ok(driver) = driver() {
                // SAFETY: it was registered, and no exchange uses it. Where the context is gone the call fails,
                // and so is the registration.
                let _ = unsafe { (driver.unregister)(self.0 as *mut c_void) };
            }
        }
    }
}

/// What the pump copies with.
#[derive(Debug)]
pub(crate) struct Gatherer {
    context: usize,
    stream: usize,
    pin: Option<Pin>,
}

impl Gatherer {
    /// For frames in this memory, in the current context.
    ///
    /// # Safety
    /// The memory lives until this is dropped.
    pub(super) unsafe fn new((start, length): (usize, usize)) -> Result<Gatherer, DriverError> {
        let driver = driver()?;
        let mut context: Context = std::ptr::null_mut();
        // SAFETY: the driver writes a handle there.
        done("cuCtxGetCurrent", unsafe {
            (driver.current)(&raw mut context)
        })?;
        // SAFETY: promised by the caller.
        let pin = unsafe { Pin::take(start, length) }?;
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: the driver writes two numbers there.
        done("cuCtxGetStreamPriorityRange", unsafe {
            (driver.priorities)(&raw mut lowest, &raw mut highest)
        })?;
        let mut stream: Stream = std::ptr::null_mut();
        // SAFETY: the driver writes a handle there.
        done("cuStreamCreateWithPriority", unsafe {
            (driver.new_stream)(&raw mut stream, NON_BLOCKING, highest)
        })?;
        Ok(Gatherer {
            context: context as usize,
            stream: stream as usize,
            pin: Some(pin),
        })
    }

    /// Makes the context this thread's.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        let driver = driver()?;
        // SAFETY: it was current when this was made, and is the device's own, which lives as long as the process.
        done("cuCtxSetCurrent", unsafe {
            (driver.enter)(self.context as Context)
        })
    }

    /// Copies what lies in frames to `to` and behind it.
    pub(crate) fn copy_in(
        &self,
        stride: usize,
        runs: &[Run],
        to: usize,
    ) -> Result<(), DriverError> {
        for run in runs {
            let from = Rows {
                at: run.at,
                pitch: stride,
            };
            let to = Rows {
                at: to + run.offset,
                pitch: run.width,
            };
            // SAFETY: the frames are registered, and not given back before the word behind this was written; the
            // result lives until the stream that waits for it has passed (`Exchange::enqueue`).
            unsafe {
                copy_rows(
                    self.stream as Stream,
                    true,
                    (from, to),
                    (run.width, run.count),
                )
            }?;
        }
        Ok(())
    }

    /// Writes a word behind all that was copied.
    pub(crate) fn write(&self, address: usize, value: u32) -> Result<(), DriverError> {
        driver()?.write(self.stream as Stream, address, value)
    }

    /// Waits until nothing that was issued is left.
    pub(crate) fn finish(&self) {
        if let Ok(driver) = driver() {
            // SAFETY: our stream. An error says that the device has failed: then nothing is copied any more.
            let _ = unsafe { (driver.synchronize)(self.stream as Stream) };
        }
    }
}

impl Drop for Gatherer {
    fn drop(&mut self) {
        let Ok(driver) = driver() else {
            return;
        };
        // Any thread may drop it: the context is this thread's for the moment, and then what it was.
        let mut before: Context = std::ptr::null_mut();
        // SAFETY: the driver writes a handle there; the rest as for `enter`. What was issued was waited for by the
        // pump. At the end of a process the driver may be down: then the calls fail, and nothing is left to free.
        unsafe {
            let known = (driver.current)(&raw mut before) == 0;
            if (driver.enter)(self.context as Context) == 0 {
                let _ = (driver.end_stream)(self.stream as Stream);
                self.pin = None;
                if known {
                    let _ = (driver.enter)(before);
                }
            }
        }
    }
}
