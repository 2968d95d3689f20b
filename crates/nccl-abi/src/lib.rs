//! NCCL's net plug-in interface in C, versions 6 to 12, as its headers lay it out on 64-bit machines.
//! Every size and offset is asserted at compile time; the figures were measured with a C compiler
//! on the headers of NCCL 2.28.9 and 2.30.7.

//!
//! A crate of its own, because two need it: the plug-in, and what drives a plug-in as NCCL would.

use std::ffi::{c_char, c_float, c_int, c_ulong, c_void};

/// `ncclResult_t`.
pub type NcclResult = c_int;
/// It worked.
pub const SUCCESS: NcclResult = 0;
/// A system call failed.
pub const SYSTEM_ERROR: NcclResult = 2;
/// A fault of the library.
pub const INTERNAL_ERROR: NcclResult = 3;
/// The caller asked for what cannot be.
pub const INVALID_ARGUMENT: NcclResult = 4;
/// The user asked for what cannot be.
pub const INVALID_USAGE: NcclResult = 5;
/// The peer, or the way to it.
pub const REMOTE_ERROR: NcclResult = 6;

/// Pointer type of host memory.
pub const PTR_HOST: c_int = 1;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format, ...
pub type Logger =
    Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

type Pointers = *mut *mut c_void;

/// Virtual NICs: up to N devices merged into one.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VProps<const N: usize> {
    /// How many.
    pub ndevs: c_int,
    /// Which.
    pub devs: [c_int; N],
}

macro_rules! properties {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty = $offset:literal),* $(,)? } $size:literal) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        #[allow(missing_docs, reason = "the names are NCCL's")]
        pub struct $name { $(pub $field: $type),* }
        const _: () = assert!(std::mem::size_of::<$name>() == $size);
        $(const _: () = assert!(std::mem::offset_of!($name, $field) == $offset);)*
    };
}

properties!(
    /// Properties of version 12.
    PropertiesV12 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, reg_is_global: c_int = 28, force_flush: c_int = 32,
        speed: c_int = 36, port: c_int = 40, latency: c_float = 44, max_comms: c_int = 48,
        max_recvs: c_int = 52, device_type: c_int = 56, device_version: c_int = 60,
        vprops: VProps<8> = 64, max_p2p_bytes: usize = 104, max_coll_bytes: usize = 112,
        max_multi_request: c_int = 120, rail: i16 = 124, plane: i16 = 126,
    } 128
);
properties!(
    /// Properties of version 11.
    PropertiesV11 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, reg_is_global: c_int = 28, force_flush: c_int = 32,
        speed: c_int = 36, port: c_int = 40, latency: c_float = 44, max_comms: c_int = 48,
        max_recvs: c_int = 52, device_type: c_int = 56, device_version: c_int = 60,
        vprops: VProps<4> = 64, max_p2p_bytes: usize = 88, max_coll_bytes: usize = 96,
        max_multi_request: c_int = 104,
    } 112
);
properties!(
    /// Properties of versions 9 and 10.
    PropertiesV10 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, reg_is_global: c_int = 28, force_flush: c_int = 32,
        speed: c_int = 36, port: c_int = 40, latency: c_float = 44, max_comms: c_int = 48,
        max_recvs: c_int = 52, device_type: c_int = 56, device_version: c_int = 60,
        vprops: VProps<4> = 64, max_p2p_bytes: usize = 88, max_coll_bytes: usize = 96,
    } 104
);
properties!(
    /// Properties of version 8.
    PropertiesV8 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, reg_is_global: c_int = 28, speed: c_int = 32, port: c_int = 36,
        latency: c_float = 40, max_comms: c_int = 44, max_recvs: c_int = 48,
        device_type: c_int = 52, device_version: c_int = 56,
    } 64
);
properties!(
    /// Properties of version 7.
    PropertiesV7 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, speed: c_int = 28, port: c_int = 32, latency: c_float = 36,
        max_comms: c_int = 40, max_recvs: c_int = 44, device_type: c_int = 48,
        device_version: c_int = 52,
    } 56
);
properties!(
    /// Properties of version 6.
    PropertiesV6 {
        name: *const c_char = 0, pci_path: *const c_char = 8, guid: u64 = 16,
        ptr_support: c_int = 24, speed: c_int = 28, port: c_int = 32, latency: c_float = 36,
        max_comms: c_int = 40, max_recvs: c_int = 44,
    } 48
);

macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($field:ident: ($($argument:ty),*)),* $(,)? } $size:literal) => {
        $(#[$doc])*
        #[repr(C)]
        #[allow(missing_docs, reason = "the names are NCCL's")]
        pub struct $name {
            pub name: *const c_char,
            $(pub $field: Option<unsafe extern "C" fn($($argument),*) -> NcclResult>),*
        }
        // SAFETY: the tables are constants: a name and functions.
        #[allow(unsafe_code, reason = "a constant that holds a pointer to a constant")]
        unsafe impl Sync for $name {}
        const _: () = assert!(std::mem::size_of::<$name>() == $size);
    };
}

table!(
    /// Table of version 12.
    TableV12 {
        init: (*mut *mut c_void, u64, *mut c_void, Logger, *mut c_void),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV12),
        listen: (*mut c_void, c_int, *mut c_void, Pointers),
        connect: (*mut c_void, c_int, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, usize, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut usize, *mut c_int, Pointers, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
        make_v_device: (*mut c_int, *mut VProps<8>),
        finalize: (*mut c_void),
        set_net_attr: (*mut c_void, *mut c_void),
    } 176
);
table!(
    /// Table of version 11.
    TableV11 {
        init: (*mut *mut c_void, u64, *mut c_void, Logger, *mut c_void),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV11),
        listen: (*mut c_void, c_int, *mut c_void, Pointers),
        connect: (*mut c_void, c_int, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, usize, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut usize, *mut c_int, Pointers, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
        make_v_device: (*mut c_int, *mut VProps<4>),
        finalize: (*mut c_void),
        set_net_attr: (*mut c_void, *mut c_void),
    } 176
);
table!(
    /// Table of version 10.
    TableV10 {
        init: (Logger, *mut c_void),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV10),
        listen: (c_int, *mut c_void, Pointers),
        connect: (c_int, *mut c_void, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, usize, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut usize, *mut c_int, Pointers, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
        make_v_device: (*mut c_int, *mut VProps<4>),
    } 160
);
table!(
    /// Table of version 9.
    TableV9 {
        init: (Logger),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV10),
        listen: (c_int, *mut c_void, Pointers),
        connect: (c_int, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, usize, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, usize, c_int, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut usize, *mut c_int, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
        make_v_device: (*mut c_int, *mut VProps<4>),
    } 160
);
table!(
    /// Table of version 8.
    TableV8 {
        init: (Logger),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV8),
        listen: (c_int, *mut c_void, Pointers),
        connect: (c_int, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, usize, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, c_int, c_int, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut c_int, *mut c_int, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
    } 152
);
table!(
    /// Table of version 7.
    TableV7 {
        init: (Logger),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV7),
        listen: (c_int, *mut c_void, Pointers),
        connect: (c_int, *mut c_void, Pointers, Pointers),
        accept: (*mut c_void, Pointers, Pointers),
        reg_mr: (*mut c_void, *mut c_void, c_int, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, c_int, c_int, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut c_int, *mut c_int, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
        get_device_mr: (*mut c_void, *mut c_void, Pointers),
        irecv_consumed: (*mut c_void, c_int, *mut c_void),
    } 152
);
table!(
    /// Table of version 6.
    TableV6 {
        init: (Logger),
        devices: (*mut c_int),
        get_properties: (c_int, *mut PropertiesV6),
        listen: (c_int, *mut c_void, Pointers),
        connect: (c_int, *mut c_void, Pointers),
        accept: (*mut c_void, Pointers),
        reg_mr: (*mut c_void, *mut c_void, c_int, c_int, Pointers),
        reg_mr_dma_buf: (*mut c_void, *mut c_void, usize, c_int, u64, c_int, Pointers),
        dereg_mr: (*mut c_void, *mut c_void),
        isend: (*mut c_void, *mut c_void, c_int, c_int, *mut c_void, Pointers),
        irecv: (*mut c_void, c_int, Pointers, *mut c_int, *mut c_int, Pointers, Pointers),
        iflush: (*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers),
        test: (*mut c_void, *mut c_int, *mut c_int),
        close_send: (*mut c_void),
        close_recv: (*mut c_void),
        close_listen: (*mut c_void),
    } 136
);
