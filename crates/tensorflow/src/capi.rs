//! The part of TensorFlow's C API that the ops stand on, found in the process at load time.
//!
//! Only functions of `tensorflow/c/ops.h`, `kernels.h`, `tf_tensor.h` and `tf_status.h` that 2.16 and
//! all later releases export; those of `kernels_experimental.h` are gone in 2.21. Nothing is linked
//! and no header is needed: whoever loads this library (`tf.load_op_library`, a server) has
//! TensorFlow in its process already. In the wheels the functions are in
//! `libtensorflow_framework.so.2`; a server that is one binary has them in itself.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_void};
use std::sync::OnceLock;

/// `TF_DataType`.
pub type DataType = c_int;
/// `TF_INT32`.
pub const INT32: DataType = 3;
/// `TF_FLOAT`.
pub const FLOAT: DataType = 1;
/// `TF_UINT8`.
pub const UINT8: DataType = 4;
/// `TF_STRING`.
pub const STRING: DataType = 7;
/// `TF_INT64`.
pub const INT64: DataType = 9;

/// `TF_Code`: what an exception in Python is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// UnknownError
    Unknown = 2,
    /// InvalidArgumentError
    InvalidArgument = 3,
    /// NotFoundError
    NotFound = 5,
    /// ResourceExhaustedError
    ResourceExhausted = 8,
    /// FailedPreconditionError
    FailedPrecondition = 9,
    /// InternalError
    Internal = 13,
    /// UnavailableError
    Unavailable = 14,
    /// DataLossError
    DataLoss = 15,
}

/// A C string of a macro's parts: `concat!(..., "\0")`.
///
/// # Panics
/// Where its only zero is not at its end; in a constant the build says so.
pub const fn c(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a C string ends in its only zero"),
    }
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])* #[repr(C)] pub struct $name { _private: [u8; 0] })*
    };
}

opaque!(
    /// `TF_Status`
    Status,
    /// `TF_Tensor`
    Tensor,
    /// `TF_OpDefinitionBuilder`
    OpBuilder,
    /// `TF_KernelBuilder`
    KernelBuilder,
    /// `TF_OpKernelConstruction`
    Construction,
    /// `TF_OpKernelContext`
    Context,
    /// `TF_ShapeInferenceContext`
    ShapeContext,
    /// `TF_ShapeHandle`
    ShapeHandle,
    /// `TF_AsyncOpKernelDoneCallback`
    AsyncDone,
);

/// Makes a kernel's state when TensorFlow builds a node; null after a failure.
pub type Create = unsafe extern "C" fn(*mut Construction) -> *mut c_void;
/// Runs a kernel once. TensorFlow may call it from many threads at once.
pub type Compute = unsafe extern "C" fn(*mut c_void, *mut Context);
/// Starts a kernel's run, whose end the callback tells.
pub type ComputeAsync = unsafe extern "C" fn(*mut c_void, *mut Context, *mut AsyncDone);
/// Frees a kernel's state.
pub type Delete = unsafe extern "C" fn(*mut c_void);
/// Reads an attribute of a fixed size.
pub type GetAttribute<T> =
    unsafe extern "C" fn(*mut Construction, *const c_char, *mut T, *mut Status);
/// Says the shapes of an op's outputs.
pub type Shape = unsafe extern "C" fn(*mut ShapeContext, *mut Status);

/// `TF_StringView`: not ended by a zero, and TensorFlow's.
#[repr(C)]
pub struct StringView {
    /// Its first byte.
    pub data: *const c_char,
    /// How many there are.
    pub len: usize,
}

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// TensorFlow's functions by their C names.
        #[allow(non_snake_case, missing_docs)]
        pub struct Api { $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Api {
            fn find(symbol: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self { $($name: {
                    const NAME: &CStr = c(concat!(stringify!($name), "\0"));
                    let found = symbol(NAME);
                    if found.is_null() {
                        return Err(stringify!($name));
                    }
                    // SAFETY: the symbol is TensorFlow's function of this name, and the type is
                    // its declaration in the headers of 2.16 to 2.21.
                    unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found)
                    }
                },)* })
            }
        }
    };
}

functions! {
    TF_NewStatus: fn() -> *mut Status;
    TF_DeleteStatus: fn(*mut Status);
    TF_SetStatus: fn(*mut Status, c_int, *const c_char);
    TF_GetCode: fn(*const Status) -> c_int;
    TF_Message: fn(*const Status) -> *const c_char;

    TF_DeleteTensor: fn(*mut Tensor);
    TF_TensorType: fn(*const Tensor) -> DataType;
    TF_NumDims: fn(*const Tensor) -> c_int;
    TF_Dim: fn(*const Tensor, c_int) -> i64;
    TF_TensorByteSize: fn(*const Tensor) -> usize;
    TF_TensorData: fn(*const Tensor) -> *mut c_void;

    TF_NewOpDefinitionBuilder: fn(*const c_char) -> *mut OpBuilder;
    TF_RegisterOpDefinition: fn(*mut OpBuilder, *mut Status);
    TF_OpDefinitionBuilderAddAttr: fn(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderAddInput: fn(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderAddOutput: fn(*mut OpBuilder, *const c_char);
    TF_OpDefinitionBuilderSetIsStateful: fn(*mut OpBuilder, bool);
    TF_OpDefinitionBuilderSetShapeInferenceFunction: fn(*mut OpBuilder, Shape);

    TF_NewShapeHandle: fn() -> *mut ShapeHandle;
    TF_DeleteShapeHandle: fn(*mut ShapeHandle);
    TF_ShapeInferenceContextGetInput: fn(*mut ShapeContext, c_int, *mut ShapeHandle, *mut Status);
    TF_ShapeInferenceContextSetOutput: fn(*mut ShapeContext, c_int, *mut ShapeHandle, *mut Status);
    TF_ShapeInferenceContextNumInputs: fn(*mut ShapeContext) -> i64;
    TF_ShapeInferenceContextVectorFromSize: fn(*mut ShapeContext, usize) -> *mut ShapeHandle;
    TF_ShapeInferenceContextSubshape:
        fn(*mut ShapeContext, *mut ShapeHandle, i64, i64, *mut ShapeHandle, *mut Status);
    TF_ShapeInferenceContextScalar: fn(*mut ShapeContext) -> *mut ShapeHandle;
    TF_ShapeInferenceContextConcatenateShapes:
        fn(*mut ShapeContext, *mut ShapeHandle, *mut ShapeHandle, *mut ShapeHandle, *mut Status);
    TF_ShapeInferenceContextSetUnknownShape: fn(*mut ShapeContext, *mut Status);

    TF_NewKernelBuilder: fn(*const c_char, *const c_char, Create, Compute, Delete) -> *mut KernelBuilder;
    TF_NewAsyncKernelBuilder:
        fn(*const c_char, *const c_char, Create, ComputeAsync, Delete) -> *mut KernelBuilder;
    TF_RunAsyncOpKernelDoneCallback: fn(*mut AsyncDone);
    TF_KernelBuilder_HostMemory: fn(*mut KernelBuilder, *const c_char);
    TF_RegisterKernelBuilder: fn(*const c_char, *mut KernelBuilder, *mut Status);
    TF_OpKernelConstruction_GetAttrSize:
        fn(*mut Construction, *const c_char, *mut i32, *mut i32, *mut Status);
    TF_OpKernelConstruction_GetAttrString:
        fn(*mut Construction, *const c_char, *mut c_char, usize, *mut Status);
    TF_OpKernelConstruction_GetName: fn(*mut Construction) -> StringView;
    TF_OpKernelConstruction_GetAttrInt64:
        fn(*mut Construction, *const c_char, *mut i64, *mut Status);
    TF_OpKernelConstruction_GetAttrFloat:
        fn(*mut Construction, *const c_char, *mut f32, *mut Status);
    TF_OpKernelConstruction_GetAttrBool:
        fn(*mut Construction, *const c_char, *mut c_uchar, *mut Status);
    TF_OpKernelConstruction_Failure: fn(*mut Construction, *mut Status);
    TF_OpKernelContext_Failure: fn(*mut Context, *mut Status);
    TF_NumInputs: fn(*mut Context) -> c_int;
    TF_GetInput: fn(*mut Context, c_int, *mut *mut Tensor, *mut Status);
    TF_AllocateOutput:
        fn(*mut Context, c_int, DataType, *const i64, c_int, usize, *mut Status) -> *mut Tensor;
}

static API: OnceLock<Result<Api, &'static str>> = OnceLock::new();

/// TensorFlow's functions, or the name of the first one that this process lacks.
pub fn find() -> Result<&'static Api, &'static str> {
    API.get_or_init(|| {
        let mut missing = "TF_NewStatus";
        for library in libraries() {
            // SAFETY: the handle is of a library that stays loaded, the name is a C string.
            match Api::find(|name| unsafe { libc::dlsym(library, name.as_ptr()) }) {
                Ok(api) => return Ok(api),
                Err(name) => missing = name,
            }
        }
        Err(missing)
    })
    .as_ref()
    .map_err(|name| *name)
}

/// Where the functions may be. Python loads TensorFlow's libraries with local scope, so they are
/// asked for by name; a server of one binary has them in the global scope. Nothing is loaded here.
fn libraries() -> impl Iterator<Item = *mut c_void> {
    const NAMES: [&CStr; 4] = [
        c"libtensorflow_framework.so.2",
        c"libtensorflow_cc.so.2",
        c"libtensorflow.so.2",
        c"libtensorflow_framework.2.dylib",
    ];
    NAMES
        .into_iter()
        // SAFETY: RTLD_NOLOAD loads nothing and runs no code; the names are C strings. The handle's
        // reference is kept for ever, as TensorFlow's libraries are.
        .map(|name| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) })
        .filter(|handle| !handle.is_null())
        .chain(std::iter::once(libc::RTLD_DEFAULT))
}

/// The functions, in code that runs only after [`find`] has found them.
///
/// # Panics
/// Where TensorFlow was not found; then no op is registered, and none of this code can run.
pub fn api() -> &'static Api {
    find().unwrap_or_else(|name| panic!("TensorFlow's function {name} is not in this process"))
}
