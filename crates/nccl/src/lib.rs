//! `libnccl-net-evener.so`: Evener's engine as an NCCL net plug-in, for every version of the
//! interface from 6 (NCCL 2.13) to 12 (NCCL 2.30).
//!
//! `evener_nccl_abi` has the C layouts, [`core`] what they mean, this file the thunks: one a function of the
//! newest version, and a few for what older ones say differently. Every thunk catches panics and
//! checks the pointers that it writes through.

#![allow(
    unsafe_code,
    reason = "the C boundary: NCCL's pointers are what its documentation says"
)]

pub mod core;
pub mod devices;
mod lock;
pub mod log;

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use evener_nccl_abi as abi;

use abi::{
    INTERNAL_ERROR, INVALID_USAGE, Logger, NcclResult, PropertiesV6, PropertiesV7, PropertiesV8,
    PropertiesV10, PropertiesV11, PropertiesV12, SUCCESS, TableV6, TableV7, TableV8, TableV9,
    TableV10, TableV11, TableV12, VProps,
};

/// Longest message that NCCL may ask for: NCCL's own limit.
const MOST_BYTES: usize = 1 << 40;

/// Runs `body`; a panic becomes an internal error.
fn guard(body: impl FnOnce() -> NcclResult) -> NcclResult {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log::say(
            evener_engine::Level::Error,
            "a fault of Evener: please report it",
        );
        INTERNAL_ERROR
    })
}

/// Writes through a pointer of NCCL's, unless it is null.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn give<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: promised by the caller.
        unsafe { to.write(value) };
    }
}

/// Gives an object, or null and the error.
///
/// # Safety
/// As [`give`].
unsafe fn give_object(to: *mut *mut c_void, made: Result<*mut c_void, NcclResult>) -> NcclResult {
    let (object, result) = match made {
        Ok(object) => (object, SUCCESS),
        Err(code) => (null_mut(), code),
    };
    // SAFETY: promised by the caller. The entry may have come in as (void*)1.
    unsafe { give(to, object) };
    result
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    _comm: u64,
    _config: *mut c_void,
    logger: Logger,
    _profiler: *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointer.
    guard(|| unsafe { give_object(context, core::init(logger)) })
}

unsafe extern "C" fn init_v10(logger: Logger, _profiler: *mut c_void) -> NcclResult {
    guard(|| core::init(logger).err().unwrap_or(SUCCESS))
}

unsafe extern "C" fn init_v9(logger: Logger) -> NcclResult {
    guard(|| core::init(logger).err().unwrap_or(SUCCESS))
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guard(|| core::finalize(context))
}

unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guard(|| {
        // SAFETY: NCCL's pointer.
        unsafe { give(count, c_int::try_from(core::devices()).unwrap_or(0)) };
        SUCCESS
    })
}

macro_rules! get_properties {
    ($name:ident, $type:ident { $($field:ident: $value:expr),* $(,)? }) => {
        unsafe extern "C" fn $name(device: c_int, to: *mut $type) -> NcclResult {
            guard(|| match core::properties(device) {
                Ok(of) => {
                    let properties = $type {
                        name: of.name,
                        pci_path: of.pci_path,
                        guid: device as u64,
                        ptr_support: abi::PTR_HOST,
                        speed: of.speed,
                        port: 0,
                        latency: 0.0,
                        max_comms: 65536,
                        max_recvs: 1,
                        $($field: $value(device)),*
                    };
                    // SAFETY: NCCL's pointer.
                    unsafe { give(to, properties) };
                    SUCCESS
                }
                Err(code) => code,
            })
        }
    };
}

fn no(_: c_int) -> c_int {
    0
}
fn one(_: c_int) -> c_int {
    1
}
fn most(_: c_int) -> usize {
    MOST_BYTES
}
fn undefined(_: c_int) -> i16 {
    -1
}
fn alone<const N: usize>(device: c_int) -> VProps<N> {
    let mut devs = [0; N];
    devs[0] = device;
    VProps { ndevs: 1, devs }
}

get_properties!(
    properties_v12,
    PropertiesV12 {
        reg_is_global: no,
        force_flush: no,
        device_type: no,
        device_version: no,
        vprops: alone::<8>,
        max_p2p_bytes: most,
        max_coll_bytes: most,
        max_multi_request: one,
        rail: undefined,
        plane: undefined,
    }
);
get_properties!(
    properties_v11,
    PropertiesV11 {
        reg_is_global: no,
        force_flush: no,
        device_type: no,
        device_version: no,
        vprops: alone::<4>,
        max_p2p_bytes: most,
        max_coll_bytes: most,
        max_multi_request: one,
    }
);
get_properties!(
    properties_v10,
    PropertiesV10 {
        reg_is_global: no,
        force_flush: no,
        device_type: no,
        device_version: no,
        vprops: alone::<4>,
        max_p2p_bytes: most,
        max_coll_bytes: most,
    }
);
get_properties!(
    properties_v8,
    PropertiesV8 {
        reg_is_global: no,
        device_type: no,
        device_version: no
    }
);
get_properties!(
    properties_v7,
    PropertiesV7 {
        device_type: no,
        device_version: no
    }
);
get_properties!(properties_v6, PropertiesV6 {});

unsafe extern "C" fn listen(
    _context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers; its handles have 128 bytes.
    guard(|| unsafe { give_object(to, core::listen(device, handle)) })
}

unsafe extern "C" fn listen_v10(
    device: c_int,
    handle: *mut c_void,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { listen(null_mut(), device, handle, to) }
}

unsafe extern "C" fn connect(
    _context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    to: *mut *mut c_void,
    device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers; its handles have 128 bytes.
    guard(|| unsafe {
        give(device_handle, null_mut());
        give_object(to, core::connect(device, handle))
    })
}

unsafe extern "C" fn connect_v10(
    device: c_int,
    _config: *mut c_void,
    handle: *mut c_void,
    to: *mut *mut c_void,
    device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { connect(null_mut(), device, handle, to, device_handle) }
}

unsafe extern "C" fn connect_v9(
    device: c_int,
    handle: *mut c_void,
    to: *mut *mut c_void,
    device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { connect(null_mut(), device, handle, to, device_handle) }
}

unsafe extern "C" fn connect_v6(
    device: c_int,
    handle: *mut c_void,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { connect(null_mut(), device, handle, to, null_mut()) }
}

unsafe extern "C" fn accept(
    listener: *mut c_void,
    to: *mut *mut c_void,
    device_handle: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers.
    guard(|| unsafe {
        give(device_handle, null_mut());
        give_object(to, core::accept(listener))
    })
}

unsafe extern "C" fn accept_v6(listener: *mut c_void, to: *mut *mut c_void) -> NcclResult {
    // SAFETY: as above.
    unsafe { accept(listener, to, null_mut()) }
}

unsafe extern "C" fn reg_mr(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers.
    guard(|| unsafe { give_object(to, core::reg_mr(comm, data, size, kind)) })
}

unsafe extern "C" fn reg_mr_v7(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { reg_mr(comm, data, usize::try_from(size).unwrap_or(0), kind, to) }
}

unsafe extern "C" fn reg_mr_dma_buf(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    to: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointer. The properties say that only host memory is taken.
    guard(|| unsafe { give_object(to, Err(INVALID_USAGE)) })
}

unsafe extern "C" fn dereg_mr(comm: *mut c_void, registration: *mut c_void) -> NcclResult {
    // SAFETY: NCCL's pointers.
    guard(|| unsafe { core::dereg_mr(comm, registration) })
}

unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    _tag: c_int,
    _registration: *mut c_void,
    _phandle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers.
    guard(|| unsafe { give_object(request, core::post(comm, data, size)) })
}

unsafe extern "C" fn isend_v9(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    registration: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe { isend(comm, data, size, tag, registration, null_mut(), request) }
}

unsafe extern "C" fn isend_v8(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    registration: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    let Ok(size) = usize::try_from(size) else {
        return abi::INVALID_ARGUMENT;
    };
    // SAFETY: as above.
    unsafe { isend(comm, data, size, tag, registration, null_mut(), request) }
}

/// A receive: one buffer, because the properties say `maxRecvs` = 1.
///
/// # Safety
/// NCCL's pointers; `sizes` reads the n-th size.
unsafe fn receive(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    size: impl FnOnce() -> usize,
    request: *mut *mut c_void,
) -> NcclResult {
    guard(|| {
        let made = if count != 1 || data.is_null() {
            Err(abi::INVALID_ARGUMENT)
        } else {
            // SAFETY: promised by the caller: there is one buffer.
            unsafe { core::post(comm, *data, size()) }
        };
        // SAFETY: promised by the caller.
        unsafe { give_object(request, made) }
    })
}

unsafe extern "C" fn irecv(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    _tags: *mut c_int,
    _registrations: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointers.
    unsafe {
        receive(
            comm,
            count,
            data,
            || if sizes.is_null() { 0 } else { *sizes },
            request,
        )
    }
}

unsafe extern "C" fn irecv_v9(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as above.
    unsafe {
        irecv(
            comm,
            count,
            data,
            sizes,
            tags,
            registrations,
            null_mut(),
            request,
        )
    }
}

unsafe extern "C" fn irecv_v8(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _tags: *mut c_int,
    _registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    let size = || {
        if sizes.is_null() {
            0
        } else {
            // SAFETY: NCCL's pointer.
            usize::try_from(unsafe { *sizes }).unwrap_or(0)
        }
    };
    // SAFETY: NCCL's pointers.
    unsafe { receive(comm, count, data, size, request) }
}

/// Nothing to flush: only host memory is written. A null request counts as done.
unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _count: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL's pointer.
    guard(|| unsafe { give_object(request, Ok(null_mut())) })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    // SAFETY: NCCL's pointers.
    guard(|| unsafe {
        match core::test(request) {
            Ok(Some(bytes)) => {
                give(done, 1);
                give(sizes, c_int::try_from(bytes).unwrap_or(c_int::MAX));
                SUCCESS
            }
            Ok(None) => {
                give(done, 0);
                SUCCESS
            }
            Err(code) => {
                give(done, 0);
                code
            }
        }
    })
}

unsafe extern "C" fn close(comm: *mut c_void) -> NcclResult {
    // SAFETY: NCCL's pointer.
    guard(|| unsafe { core::close(comm) })
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> NcclResult {
    // SAFETY: NCCL's pointer.
    guard(|| unsafe { core::close_listen(listener) })
}

unsafe extern "C" fn set_net_attr(_context: *mut c_void, _attributes: *mut c_void) -> NcclResult {
    SUCCESS
}

macro_rules! export {
    ($symbol:ident: $type:ident { $($field:ident: $value:expr),* $(,)? }) => {
        /// The table that NCCL looks up by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name is NCCL's")]
        pub static $symbol: $type = $type {
            name: core::NAME.as_ptr(),
            devices: Some(devices),
            reg_mr_dma_buf: Some(reg_mr_dma_buf),
            dereg_mr: Some(dereg_mr),
            iflush: Some(iflush),
            test: Some(test),
            close_send: Some(close),
            close_recv: Some(close),
            close_listen: Some(close_listen),
            $($field: $value),*
        };
    };
}

// Absent functions are ones that NCCL calls only where a device asks for them: device-side
// networking (get_device_mr, irecv_consumed) and NICs merged by NCCL (make_v_device), which the
// aggregated device makes needless.
export!(ncclNetPlugin_v12: TableV12 {
    init: Some(init), get_properties: Some(properties_v12), listen: Some(listen),
    connect: Some(connect), accept: Some(accept), reg_mr: Some(reg_mr), isend: Some(isend),
    irecv: Some(irecv), get_device_mr: None, irecv_consumed: None, make_v_device: None,
    finalize: Some(finalize), set_net_attr: Some(set_net_attr),
});
export!(ncclNetPlugin_v11: TableV11 {
    init: Some(init), get_properties: Some(properties_v11), listen: Some(listen),
    connect: Some(connect), accept: Some(accept), reg_mr: Some(reg_mr), isend: Some(isend),
    irecv: Some(irecv), get_device_mr: None, irecv_consumed: None, make_v_device: None,
    finalize: Some(finalize), set_net_attr: Some(set_net_attr),
});
export!(ncclNetPlugin_v10: TableV10 {
    init: Some(init_v10), get_properties: Some(properties_v10), listen: Some(listen_v10),
    connect: Some(connect_v10), accept: Some(accept), reg_mr: Some(reg_mr), isend: Some(isend),
    irecv: Some(irecv), get_device_mr: None, irecv_consumed: None, make_v_device: None,
});
export!(ncclNetPlugin_v9: TableV9 {
    init: Some(init_v9), get_properties: Some(properties_v10), listen: Some(listen_v10),
    connect: Some(connect_v9), accept: Some(accept), reg_mr: Some(reg_mr), isend: Some(isend_v9),
    irecv: Some(irecv_v9), get_device_mr: None, irecv_consumed: None, make_v_device: None,
});
export!(ncclNetPlugin_v8: TableV8 {
    init: Some(init_v9), get_properties: Some(properties_v8), listen: Some(listen_v10),
    connect: Some(connect_v9), accept: Some(accept), reg_mr: Some(reg_mr), isend: Some(isend_v8),
    irecv: Some(irecv_v8), get_device_mr: None, irecv_consumed: None,
});
export!(ncclNetPlugin_v7: TableV7 {
    init: Some(init_v9), get_properties: Some(properties_v7), listen: Some(listen_v10),
    connect: Some(connect_v9), accept: Some(accept), reg_mr: Some(reg_mr_v7),
    isend: Some(isend_v8), irecv: Some(irecv_v8), get_device_mr: None, irecv_consumed: None,
});
export!(ncclNetPlugin_v6: TableV6 {
    init: Some(init_v9), get_properties: Some(properties_v6), listen: Some(listen_v10),
    connect: Some(connect_v6), accept: Some(accept_v6), reg_mr: Some(reg_mr_v7),
    isend: Some(isend_v8), irecv: Some(irecv_v8),
});
