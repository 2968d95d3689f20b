//! One op as a Rust type: its definition, its state, its work. TensorFlow's side of the C API stays
//! in this file: the ops in [`crate::ops`] see slices and results.
//!
//! A kernel is made once for a node of a graph (in eager mode once for a combination of attributes)
//! and then runs from many threads at once, so its state is shared and read only. An error becomes
//! the exception of its code in Python; a panic is caught and becomes an InternalError, because it
//! must not cross into C++.

use crate::capi::{self, Code, DataType, api};
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why an op failed: the class of the exception, and the sentence in it.
pub type Result<T> = std::result::Result<T, (Code, String)>;

/// An op with its kernel for the CPU.
pub trait Op: Sized + Send + Sync + 'static {
    /// As TensorFlow calls it, in CamelCase. Python's function is the same in snake_case.
    const NAME: &'static CStr;
    /// Attributes as TensorFlow writes them (`insert: bool = true`).
    const ATTRIBUTES: &'static [&'static CStr];
    /// Inputs as TensorFlow writes them (`keys: int64`).
    const INPUTS: &'static [&'static CStr];
    /// Outputs as TensorFlow writes them.
    const OUTPUTS: &'static [&'static CStr];
    /// What is known of the outputs' shapes before the op runs.
    const SHAPES: Shapes;

    /// The state of one node.
    fn new(node: &Node) -> Result<Self>;
    /// One run.
    fn run(&self, run: &Run) -> Result<()>;
}

/// What is known of the outputs' shapes. The C API reads no attribute but types, so a dimension can
/// only come from the shape of an input.
#[derive(Clone, Copy)]
pub enum Shapes {
    /// One output: the shape of input 0, then that of input 1.
    Joined,
    /// All outputs: the shape of input 0.
    Same,
    /// All outputs are scalars; or there are none.
    Scalars,
    /// Known when the op has run.
    Unknown,
}

/// Tells TensorFlow of an op and its kernel.
///
/// # Errors
/// TensorFlow's own words.
pub fn register<O: Op>() -> std::result::Result<(), String> {
    let api = api();
    let status = Status::new();
    // SAFETY: the builders are fresh and are given to TensorFlow once, which frees them; names are
    // C strings that live for ever; the functions have the types that the API declares.
    unsafe {
        let op = (api.TF_NewOpDefinitionBuilder)(O::NAME.as_ptr());
        for attribute in O::ATTRIBUTES {
            (api.TF_OpDefinitionBuilderAddAttr)(op, attribute.as_ptr());
        }
        for input in O::INPUTS {
            (api.TF_OpDefinitionBuilderAddInput)(op, input.as_ptr());
        }
        for output in O::OUTPUTS {
            (api.TF_OpDefinitionBuilderAddOutput)(op, output.as_ptr());
        }
        // Never folded into a constant, never merged with its twin: it reads and writes a store.
        (api.TF_OpDefinitionBuilderSetIsStateful)(op, true);
        (api.TF_OpDefinitionBuilderSetShapeInferenceFunction)(op, shapes::<O>);
        (api.TF_RegisterOpDefinition)(op, status.0);
        status.check()?;
        let kernel = (api.TF_NewKernelBuilder)(
            O::NAME.as_ptr(),
            c"CPU".as_ptr(),
            create::<O>,
            compute::<O>,
            delete::<O>,
        );
        (api.TF_RegisterKernelBuilder)(O::NAME.as_ptr(), kernel, status.0);
    }
    status.check()
}

unsafe extern "C" fn create<O: Op>(node: *mut capi::Construction) -> *mut c_void {
    match caught(|| O::new(&Node(node))) {
        Ok(op) => Box::into_raw(Box::new(op)).cast(),
        Err(error) => {
            let status = Status::of(&error);
            // SAFETY: TensorFlow's pointer, for the time of this call; the status is set.
            unsafe { (api().TF_OpKernelConstruction_Failure)(node, status.0) };
            std::ptr::null_mut()
        }
    }
}

unsafe extern "C" fn compute<O: Op>(state: *mut c_void, context: *mut capi::Context) {
    // SAFETY: `state` came from `create::<O>` and is freed by `delete` only, after the last run.
    let outcome = match unsafe { state.cast::<O>().as_ref() } {
        Some(op) => caught(|| {
            op.run(&Run {
                context,
                status: Status::new(),
            })
        }),
        None => Err((Code::Internal, "the kernel was not made".to_owned())),
    };
    if let Err(error) = outcome {
        let status = Status::of(&error);
        // SAFETY: TensorFlow's pointer, for the time of this call; the status is set.
        unsafe { (api().TF_OpKernelContext_Failure)(context, status.0) };
    }
}

unsafe extern "C" fn delete<O: Op>(state: *mut c_void) {
    if !state.is_null() {
        // SAFETY: it came from `create::<O>`, and TensorFlow deletes a kernel once.
        drop(unsafe { Box::from_raw(state.cast::<O>()) });
    }
}

unsafe extern "C" fn shapes<O: Op>(context: *mut capi::ShapeContext, status: *mut capi::Status) {
    let api = api();
    // SAFETY: TensorFlow's pointers, for the time of this call; each handle is freed once.
    unsafe {
        let set = |shape| {
            for output in 0..O::OUTPUTS.len() {
                (api.TF_ShapeInferenceContextSetOutput)(context, output as c_int, shape, status);
            }
            (api.TF_DeleteShapeHandle)(shape);
        };
        let input = |index| {
            let shape = (api.TF_NewShapeHandle)();
            (api.TF_ShapeInferenceContextGetInput)(context, index, shape, status);
            shape
        };
        match O::SHAPES {
            Shapes::Scalars => set((api.TF_ShapeInferenceContextScalar)(context)),
            Shapes::Same => set(input(0)),
            Shapes::Joined => {
                let (first, second) = (input(0), input(1));
                let joined = (api.TF_NewShapeHandle)();
                (api.TF_ShapeInferenceContextConcatenateShapes)(
                    context, first, second, joined, status,
                );
                (api.TF_DeleteShapeHandle)(first);
                (api.TF_DeleteShapeHandle)(second);
                set(joined);
            }
            Shapes::Unknown => (api.TF_ShapeInferenceContextSetUnknownShape)(context, status),
        }
    }
}

/// A panic as an error.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let words = panic
            .downcast_ref::<&str>()
            .map(|words| (*words).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Err((Code::Internal, format!("a bug in Evener: {words}")))
    })
}

pub(crate) struct Status(pub(crate) *mut capi::Status);

impl Status {
    pub(crate) fn new() -> Self {
        // SAFETY: no arguments; freed by drop.
        Self(unsafe { (api().TF_NewStatus)() })
    }

    pub(crate) fn of((code, message): &(Code, String)) -> Self {
        let status = Self::new();
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        // SAFETY: a live status and a C string, which TensorFlow copies.
        unsafe { (api().TF_SetStatus)(status.0, *code as c_int, message.as_ptr()) };
        status
    }

    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        // SAFETY: a live status; its message lives until the status changes.
        unsafe {
            if (api().TF_GetCode)(self.0) == 0 {
                return Ok(());
            }
            Err(CStr::from_ptr((api().TF_Message)(self.0))
                .to_string_lossy()
                .into_owned())
        }
    }

    pub(crate) fn checked(&self) -> Result<()> {
        self.check().map_err(|words| (Code::Internal, words))
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (api().TF_DeleteStatus)(self.0) };
    }
}

/// A node of a graph while its kernel is made.
pub struct Node(pub(crate) *mut capi::Construction);

impl Node {
    /// An attribute of type string.
    pub fn string(&self, name: &CStr) -> Result<String> {
        let status = Status::new();
        let (mut list, mut length) = (0, 0);
        // SAFETY: TensorFlow's pointer; both integers are written.
        unsafe {
            (api().TF_OpKernelConstruction_GetAttrSize)(
                self.0,
                name.as_ptr(),
                &raw mut list,
                &raw mut length,
                status.0,
            );
        }
        status.checked()?;
        let mut bytes = vec![0u8; usize::try_from(length).unwrap_or(0)];
        // SAFETY: the buffer has the length that is said.
        unsafe {
            (api().TF_OpKernelConstruction_GetAttrString)(
                self.0,
                name.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                status.0,
            );
        }
        status.checked()?;
        String::from_utf8(bytes).map_err(|_| {
            (
                Code::InvalidArgument,
                format!("attribute {name:?} is not UTF-8"),
            )
        })
    }

    /// An attribute of type int.
    pub fn integer(&self, name: &CStr) -> Result<i64> {
        // SAFETY: the function writes an int64.
        unsafe { self.attribute(api().TF_OpKernelConstruction_GetAttrInt64, name) }
    }

    /// An attribute of type float.
    pub fn number(&self, name: &CStr) -> Result<f32> {
        // SAFETY: the function writes a float.
        unsafe { self.attribute(api().TF_OpKernelConstruction_GetAttrFloat, name) }
    }

    /// An attribute of type bool.
    pub fn flag(&self, name: &CStr) -> Result<bool> {
        // SAFETY: the function writes a byte.
        let value: u8 = unsafe { self.attribute(api().TF_OpKernelConstruction_GetAttrBool, name) }?;
        Ok(value != 0)
    }

    /// An attribute of a fixed size.
    ///
    /// # Safety
    /// `get` is one of TensorFlow's functions, and writes one `T`.
    unsafe fn attribute<T: Default>(&self, get: capi::GetAttribute<T>, name: &CStr) -> Result<T> {
        let status = Status::new();
        let mut value = T::default();
        // SAFETY: TensorFlow's pointer; the value is written.
        unsafe { get(self.0, name.as_ptr(), &raw mut value, status.0) };
        status.checked()?;
        Ok(value)
    }

    /// The node's own name in its graph.
    pub fn name(&self) -> String {
        // SAFETY: TensorFlow's pointer; the view is of memory that lives as long as the node.
        unsafe {
            let view = (api().TF_OpKernelConstruction_GetName)(self.0);
            if view.data.is_null() {
                return String::new();
            }
            let bytes = std::slice::from_raw_parts(view.data.cast::<u8>(), view.len);
            String::from_utf8_lossy(bytes).into_owned()
        }
    }
}

/// One run of a kernel.
pub struct Run {
    context: *mut capi::Context,
    status: Status,
}

impl Run {
    /// The run of the context that TensorFlow gave to the kernel that is being called.
    pub(crate) fn of(context: *mut capi::Context) -> Self {
        let status = Status::new();
        Self { context, status }
    }

    /// Input `index`.
    pub fn input(&self, index: c_int) -> Result<Input> {
        let mut tensor = std::ptr::null_mut();
        // SAFETY: TensorFlow's pointer; the tensor is freed by `Input`.
        unsafe { (api().TF_GetInput)(self.context, index, &raw mut tensor, self.status.0) };
        self.status.checked()?;
        Ok(Input(tensor))
    }

    /// Makes output `index` and fills it.
    pub fn output<T: Element>(
        &self,
        index: c_int,
        shape: &[i64],
        fill: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<()> {
        let elements = shape
            .iter()
            .try_fold(1usize, |product, &dimension| {
                product.checked_mul(usize::try_from(dimension).ok()?)
            })
            .filter(|elements| elements.checked_mul(size_of::<T>()).is_some())
            .ok_or_else(|| {
                (
                    Code::ResourceExhausted,
                    format!("an output of shape {shape:?}"),
                )
            })?;
        // SAFETY: TensorFlow's pointer; the shape has the length that is said. The tensor is freed
        // below: TensorFlow keeps its own reference to the output.
        let tensor = Input(unsafe {
            (api().TF_AllocateOutput)(
                self.context,
                index,
                T::TYPE,
                shape.as_ptr(),
                shape.len() as c_int,
                elements * size_of::<T>(),
                self.status.0,
            )
        });
        self.status.checked()?;
        if elements == 0 {
            return fill(&mut []);
        }
        // SAFETY: fresh memory for `elements` values of T, aligned for any type, seen by no one
        // else before the kernel returns. Any bytes are a valid T.
        fill(unsafe {
            std::slice::from_raw_parts_mut((api().TF_TensorData)(tensor.0).cast::<T>(), elements)
        })
    }

    /// A scalar output.
    pub fn scalar<T: Element>(&self, index: c_int, value: T) -> Result<()> {
        self.output(index, &[], |out| {
            out[0] = value;
            Ok(())
        })
    }

    /// A vector output.
    pub fn vector<T: Element>(&self, index: c_int, values: &[T]) -> Result<()> {
        self.output(index, &[values.len() as i64], |out: &mut [T]| {
            out.copy_from_slice(values);
            Ok(())
        })
    }
}

/// A type of plain numbers that tensors hold.
///
/// # Safety
/// `TYPE` is TensorFlow's type with the layout of `Self`, of which all bytes are valid.
pub unsafe trait Element: Copy {
    /// TensorFlow's name of it.
    const TYPE: DataType;
}

// SAFETY: TF_FLOAT is an IEEE single.
unsafe impl Element for f32 {
    const TYPE: DataType = capi::FLOAT;
}
// SAFETY: TF_INT32 is a 32-bit integer.
unsafe impl Element for i32 {
    const TYPE: DataType = capi::INT32;
}
// SAFETY: TF_INT64 is a 64-bit integer.
unsafe impl Element for i64 {
    const TYPE: DataType = capi::INT64;
}
// SAFETY: TF_UINT8 is a byte.
unsafe impl Element for u8 {
    const TYPE: DataType = capi::UINT8;
}

/// An input: TensorFlow's tensor, for as long as the kernel runs.
pub struct Input(pub(crate) *mut capi::Tensor);

impl Input {
    /// The sizes of its dimensions.
    pub fn shape(&self) -> Vec<i64> {
        // SAFETY: a live tensor, and indices within its rank.
        unsafe {
            (0..(api().TF_NumDims)(self.0))
                .map(|index| (api().TF_Dim)(self.0, index))
                .collect()
        }
    }

    /// Its values, in row-major order.
    pub fn values<T: Element>(&self) -> Result<&[T]> {
        self.typed(T::TYPE)?;
        // SAFETY: a live tensor of this type: the bytes that it says it has are there, aligned, and
        // nobody writes to an input while a kernel runs.
        unsafe {
            let bytes = (api().TF_TensorByteSize)(self.0);
            if bytes == 0 {
                return Ok(&[]);
            }
            Ok(std::slice::from_raw_parts(
                (api().TF_TensorData)(self.0).cast::<T>(),
                bytes / size_of::<T>(),
            ))
        }
    }

    /// The value of a scalar, or of a vector of one.
    pub fn scalar<T: Element>(&self, what: &str) -> Result<T> {
        match self.values::<T>()? {
            [value] => Ok(*value),
            _ => Err((
                Code::InvalidArgument,
                format!("{what} must be a scalar, not of shape {:?}", self.shape()),
            )),
        }
    }

    /// TensorFlow's type of it.
    pub fn dtype(&self) -> DataType {
        // SAFETY: a live tensor.
        unsafe { (api().TF_TensorType)(self.0) }
    }

    /// Its bytes: where, and how many.
    pub fn memory(&self) -> (*mut u8, usize) {
        // SAFETY: a live tensor.
        unsafe {
            let bytes = (api().TF_TensorByteSize)(self.0);
            ((api().TF_TensorData)(self.0).cast::<u8>(), bytes)
        }
    }

    /// Its strings, in row-major order.
    pub fn strings(&self) -> Result<Vec<&[u8]>> {
        self.typed(capi::STRING)?;
        // SAFETY: a live tensor of TF_STRING: its bytes are an array of TF_TString, 24 bytes each.
        unsafe {
            let count = (api().TF_TensorByteSize)(self.0) / size_of::<[u8; 24]>();
            let first = (api().TF_TensorData)(self.0).cast::<[u8; 24]>();
            Ok((0..count).map(|index| text(first.add(index))).collect())
        }
    }

    fn typed(&self, wanted: DataType) -> Result<()> {
        // SAFETY: a live tensor.
        let found = unsafe { (api().TF_TensorType)(self.0) };
        if found == wanted {
            return Ok(());
        }
        Err((
            Code::InvalidArgument,
            format!("an input has TensorFlow's type {found}, not {wanted}"),
        ))
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: this reference is freed once.
            unsafe { (api().TF_DeleteTensor)(self.0) };
        }
    }
}

/// The bytes of a `TF_TString`. Its functions are in another library than those of the ops, so the
/// layout is read here; it is fixed by `ctstring_internal.h`, the same from 2.3 on. The low two bits
/// of the first byte say the kind, the rest of the first word the size (of the first byte, for a
/// short string, which lies in the struct itself).
///
/// # Safety
/// `string` points to a live TF_TString of a little-endian machine, which outlives the result.
unsafe fn text<'a>(string: *const [u8; 24]) -> &'a [u8] {
    // SAFETY: promised by the caller; the fields lie as the header above says.
    unsafe {
        let base = string.cast::<u8>();
        let word = |at: usize| base.add(at).cast::<u64>().read_unaligned();
        let half = |at: usize| base.add(at).cast::<u32>().read_unaligned();
        let (data, length) = match *base & 3 {
            0 => (base.add(1), usize::from(*base >> 2)),
            1 => (word(16) as *const u8, (word(0) >> 2) as usize),
            2 => (base.add(half(4) as usize), (half(0) >> 2) as usize),
            _ => (word(8) as *const u8, (word(0) >> 2) as usize),
        };
        if length == 0 {
            return &[];
        }
        std::slice::from_raw_parts(data, length)
    }
}
