//! What all versions of the interface stand on: contexts, devices, listeners, comms, registrations.
//!
//! # What NCCL holds
//! Pointers to boxes of ours. A *comm* box stays for a while after its close ([`Graveyard`]): NCCL
//! may close and deregister again after an error, and that must find something to refuse. The
//! request pointer is that of the slot itself, so `test` reads one word of memory.
//!
//! # Threads
//! The data path (`post`, `test`) takes no lock. Everything else may: it is called by NCCL's service
//! thread, some hundred times a communicator.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use evener_engine::comm::Comm;
use evener_engine::hello::HANDLE;
use evener_engine::link::OVERSIZE;
use evener_engine::{Engine, Error, Level, Listener, Memory, Slot, Status};

use crate::devices::{self, Device};
use crate::lock::lock;
use crate::log;
use evener_nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, Logger, NcclResult, PTR_HOST, REMOTE_ERROR,
    SUCCESS, SYSTEM_ERROR,
};

/// What NCCL calls us: `NCCL_NET=Evener`.
pub const NAME: &CStr = c"Evener";

#[derive(Default)]
struct State {
    devices: Vec<Device>,
    contexts: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    devices: Vec::new(),
    contexts: 0,
});

static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn after_fork() {
    // The threads are the parent's. Whatever the child calls is refused.
    FORKED.store(true, Ordering::SeqCst);
    evener_engine::fds::close_all();
}

fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// The fields of a device's properties that differ between devices.
pub struct Properties {
    /// A string that stays.
    pub name: *const c_char,
    /// A string that stays, or null.
    pub pci_path: *const c_char,
    /// Mb/s.
    pub speed: c_int,
}

fn code(error: &Error) -> NcclResult {
    match error {
        Error::NoInterface(_) | Error::System(..) => SYSTEM_ERROR,
        Error::Handle | Error::Device(_) => INVALID_ARGUMENT,
        Error::Declined => REMOTE_ERROR,
        Error::Comm(evener_proto::Why::Oversize { .. }) => INVALID_USAGE,
        Error::Comm(_) => REMOTE_ERROR,
        Error::Stopped => INTERNAL_ERROR,
    }
}

fn refuse(error: &Error) -> NcclResult {
    log::say(Level::Warn, &error.to_string());
    code(error)
}

fn misuse(what: &str) -> NcclResult {
    log::say(Level::Warn, &format!("refused: {what}"));
    INVALID_ARGUMENT
}

/// Begins a context: the first one starts the engine.
pub fn init(logger: Logger) -> Result<*mut c_void, NcclResult> {
    if forked() {
        return Err(SYSTEM_ERROR);
    }
    log::set(logger);
    let mut state = lock(&STATE);
    if state.devices.is_empty() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| evener_engine::sys::at_fork(after_fork));
        match devices::start() {
            Ok(devices) => state.devices = devices,
            Err(why) => {
                log::say(
                    Level::Warn,
                    &format!("not started, NCCL will use another network: {why}"),
                );
                return Err(SYSTEM_ERROR);
            }
        }
    }
    state.contexts += 1;
    // The contexts share everything: what NCCL gets is a mark that init has worked.
    Ok((&raw const STATE).cast_mut().cast())
}

/// Ends a context: the last one stops the engine. A null context is one whose init failed.
pub fn finalize(context: *mut c_void) -> NcclResult {
    if context.is_null() || forked() {
        return SUCCESS;
    }
    let mut state = lock(&STATE);
    state.contexts = state.contexts.saturating_sub(1);
    if state.contexts == 0 {
        for device in std::mem::take(&mut state.devices) {
            device.engine.stop();
        }
    }
    SUCCESS
}

/// How many devices there are.
pub fn devices() -> usize {
    lock(&STATE).devices.len()
}

/// A device's properties.
pub fn properties(device: c_int) -> Result<Properties, NcclResult> {
    let state = lock(&STATE);
    let found = usize::try_from(device)
        .ok()
        .and_then(|index| state.devices.get(index));
    let found = found.ok_or_else(|| misuse("properties of a device that does not exist"))?;
    Ok(Properties {
        name: found.name.as_ptr(),
        pci_path: found.pci_path.map_or(std::ptr::null(), CStr::as_ptr),
        speed: c_int::try_from(found.speed).unwrap_or(c_int::MAX),
    })
}

fn engine(device: c_int) -> Result<Arc<Engine>, NcclResult> {
    if forked() {
        return Err(SYSTEM_ERROR);
    }
    let state = lock(&STATE);
    let found = usize::try_from(device)
        .ok()
        .and_then(|index| state.devices.get(index));
    found
        .map(|device| device.engine.clone())
        .ok_or_else(|| misuse("a device that does not exist"))
}

// ---- objects ----

struct ListenBox {
    engine: Arc<Engine>,
    listener: Listener,
}

/// A comm as NCCL holds it.
pub struct CommBox {
    /// None once closed: an engine has descriptors.
    engine: Option<Arc<Engine>>,
    comm: Mutex<Option<Arc<Comm>>>,
    /// The same, for the data path: null once closed.
    fast: AtomicPtr<Comm>,
    limit: usize,
}

struct Registration {
    memory: Memory,
}

// SAFETY: a registration is an address and a length; nothing is read or written through it.
#[allow(unsafe_code, reason = "see above")]
unsafe impl Send for Registration {}

/// Comm boxes that were closed: kept for a while, so that a second close finds one that is closed,
/// and not another comm that took its place.
#[derive(Default)]
struct Graveyard {
    live: Vec<usize>,
    #[allow(clippy::vec_box, reason = "NCCL holds the boxes' addresses")]
    closed: VecDeque<Box<CommBox>>,
    listeners: Vec<usize>,
    registrations: Vec<usize>,
}

const GRAVES: usize = 256;

static OBJECTS: Mutex<Graveyard> = Mutex::new(Graveyard {
    live: Vec::new(),
    closed: VecDeque::new(),
    listeners: Vec::new(),
    registrations: Vec::new(),
});

fn remove(all: &mut Vec<usize>, one: usize) -> bool {
    match all.iter().position(|known| *known == one) {
        Some(place) => {
            all.swap_remove(place);
            true
        }
        None => false,
    }
}

fn hand_out(engine: Arc<Engine>, comm: Arc<Comm>) -> *mut c_void {
    let fast = AtomicPtr::new(Arc::as_ptr(&comm).cast_mut());
    let boxed = Box::into_raw(Box::new(CommBox {
        engine: Some(engine),
        comm: Mutex::new(Some(comm)),
        fast,
        limit: evener_engine::slots::SLOTS,
    }));
    lock(&OBJECTS).live.push(boxed as usize);
    boxed.cast()
}

/// Listens. `handle` gets at most 128 bytes.
///
/// # Safety
/// `handle` is null or has room for 128 bytes.
#[allow(unsafe_code, reason = "NCCL's memory")]
pub unsafe fn listen(device: c_int, handle: *mut c_void) -> Result<*mut c_void, NcclResult> {
    if handle.is_null() {
        return Err(misuse("listen without room for a handle"));
    }
    let engine = engine(device)?;
    let (listener, bytes) = engine.listen();
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), handle.cast::<u8>(), HANDLE) };
    let boxed = Box::into_raw(Box::new(ListenBox { engine, listener }));
    lock(&OBJECTS).listeners.push(boxed as usize);
    Ok(boxed.cast())
}

/// Connects, as far as it goes without waiting: null means call again.
///
/// # Safety
/// `handle` is null or 128 bytes that may be read and written.
#[allow(unsafe_code, reason = "NCCL's memory")]
pub unsafe fn connect(device: c_int, handle: *mut c_void) -> Result<*mut c_void, NcclResult> {
    if handle.is_null() {
        return Err(misuse("connect without a handle"));
    }
    let engine = engine(device)?;
    // SAFETY: promised by the caller.
    let bytes = unsafe { &mut *handle.cast::<[u8; HANDLE]>() };
    match engine.connect(bytes) {
        Ok(Some(comm)) => Ok(hand_out(engine, comm)),
        Ok(None) => Ok(null_mut()),
        Err(error) => Err(refuse(&error)),
    }
}

/// Accepts, as far as it goes without waiting: null means call again.
///
/// # Safety
/// `listener` is null or came from [`listen`].
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn accept(listener: *mut c_void) -> Result<*mut c_void, NcclResult> {
    if forked() {
        return Err(SYSTEM_ERROR);
    }
    if !lock(&OBJECTS).listeners.contains(&(listener as usize)) {
        return Err(misuse("accept on a listener that is not open"));
    }
    // SAFETY: it is one of ours and was not closed.
    let listening = unsafe { &*listener.cast::<ListenBox>() };
    match listening.engine.accept(&listening.listener) {
        Ok(Some(comm)) => Ok(hand_out(listening.engine.clone(), comm)),
        Ok(None) => Ok(null_mut()),
        Err(error) => Err(refuse(&error)),
    }
}

/// Closes a listener; null and closed ones are accepted.
///
/// # Safety
/// `listener` is null or came from [`listen`], and is not used by another thread.
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn close_listen(listener: *mut c_void) -> NcclResult {
    if !forked() && remove(&mut lock(&OBJECTS).listeners, listener as usize) {
        // SAFETY: it is one of ours, and nobody else closes it.
        let listening = unsafe { Box::from_raw(listener.cast::<ListenBox>()) };
        listening.engine.close_listener(&listening.listener);
    }
    SUCCESS
}

/// Closes a comm; null and closed ones are accepted. When this returns, no memory of its requests
/// is used any more.
///
/// # Safety
/// `comm` is null or came from [`connect`] or [`accept`], and is not used by another thread.
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn close(comm: *mut c_void) -> NcclResult {
    if forked() || !remove(&mut lock(&OBJECTS).live, comm as usize) {
        return SUCCESS;
    }
    // SAFETY: it is one of ours, and nobody else closes it.
    let mut boxed = unsafe { Box::from_raw(comm.cast::<CommBox>()) };
    boxed.fast.store(null_mut(), Ordering::Release);
    let (engine, comm) = (boxed.engine.take(), lock(&boxed.comm).take());
    if let (Some(engine), Some(comm)) = (engine, comm) {
        engine.release(&comm);
    }
    let mut objects = lock(&OBJECTS);
    objects.closed.push_back(boxed);
    if objects.closed.len() > GRAVES {
        objects.closed.pop_front();
    }
    SUCCESS
}

/// The comm behind a pointer that NCCL gave, if it is open.
#[allow(unsafe_code, reason = "NCCL's pointers")]
fn open_comm(comm: *mut c_void) -> Option<(Arc<Engine>, Arc<Comm>)> {
    if !lock(&OBJECTS).live.contains(&(comm as usize)) {
        return None;
    }
    // SAFETY: it is one of ours and was not closed.
    let boxed = unsafe { &*comm.cast::<CommBox>() };
    let open = lock(&boxed.comm).clone()?;
    Some((boxed.engine.clone()?, open))
}

/// Registers memory of the host. Nothing is pinned: TCP reads any.
pub fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
) -> Result<*mut c_void, NcclResult> {
    if kind != PTR_HOST {
        return Err(misuse("registration of memory that is not the host's"));
    }
    if open_comm(comm).is_none() {
        return Err(misuse("registration with a comm that is not open"));
    }
    let memory = Memory {
        start: data.cast(),
        length: size,
    };
    let boxed = Box::into_raw(Box::new(Registration { memory }));
    lock(&OBJECTS).registrations.push(boxed as usize);
    Ok(boxed.cast())
}

/// Takes a registration back. When this returns, the memory is not used any more.
///
/// # Safety
/// `registration` is null or came from [`reg_mr`].
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn dereg_mr(comm: *mut c_void, registration: *mut c_void) -> NcclResult {
    if forked() || !remove(&mut lock(&OBJECTS).registrations, registration as usize) {
        return SUCCESS;
    }
    // SAFETY: it is one of ours, and nobody else takes it back.
    let boxed = unsafe { Box::from_raw(registration.cast::<Registration>()) };
    if let Some((engine, comm)) = open_comm(comm) {
        engine.withdraw(&comm, boxed.memory);
    }
    SUCCESS
}

/// Posts a send or a receive; null means try again.
///
/// # Safety
/// `comm` is null or an open comm. The memory stays until the request is done, or `dereg_mr` or
/// `close` returned.
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn post(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
) -> Result<*mut c_void, NcclResult> {
    if comm.is_null() {
        return Err(misuse("a request on a null comm"));
    }
    if data.is_null() && size > 0 {
        return Err(misuse("a request with a null buffer"));
    }
    // SAFETY: an open comm's box lives.
    let boxed = unsafe { &*comm.cast::<CommBox>() };
    // SAFETY: not null while the comm is open, and then the box holds a count of it.
    let comm = unsafe { boxed.fast.load(Ordering::Acquire).as_ref() };
    let (Some(engine), Some(comm)) = (&boxed.engine, comm) else {
        return Err(misuse("a request on a closed comm"));
    };
    debug_assert!(boxed.limit > 0);
    let memory = Memory {
        start: data.cast(),
        length: size,
    };
    // SAFETY: promised by the caller.
    match unsafe { engine.post(comm, memory) } {
        Ok(Some(slot)) => Ok(std::ptr::from_ref(slot).cast_mut().cast()),
        Ok(None) => Ok(null_mut()),
        Err(error) => Err(refuse(&error)),
    }
}

/// Whether a request is done, and how many bytes it moved.
///
/// # Safety
/// `request` is null or came from [`post`], was not seen done, and its comm is open.
#[allow(unsafe_code, reason = "NCCL's pointers")]
pub unsafe fn test(request: *mut c_void) -> Result<Option<usize>, NcclResult> {
    if request.is_null() {
        return Ok(Some(0));
    }
    // SAFETY: promised by the caller.
    let slot = unsafe { &*request.cast::<Slot>() };
    match slot.test() {
        Status::Done(bytes) => Ok(Some(bytes)),
        Status::Failed(OVERSIZE) => Err(INVALID_USAGE),
        Status::Failed(_) => Err(REMOTE_ERROR),
        Status::Pending if evener_engine::has_died() || forked() => Err(INTERNAL_ERROR),
        Status::Pending => Ok(None),
    }
}
