//! The ops: what they take and give, and their kernels.
//!
//! A collective's kernel turns its inputs into a request and a [`Tensors`], submits both and returns.
//! On a GPU the same kernel is registered with all its tensors in the host's memory: TensorFlow copies
//! them there and back.

use super::done::Done;
use super::job::{End, Tensors, Waiter, number};
use super::world;
use crate::capi::{self, AsyncDone, Code, api};
use crate::kernel::{Input, Node, Result, Status, caught};
use evener_collectives::{Failure, Job};
use evener_negotiate::{Kind, Meta, Request};
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

/// What is known of the outputs' shapes in a graph.
#[derive(Clone, Copy, PartialEq)]
enum Shapes {
    /// Each output is like its input.
    Same,
    /// Like its input but for the number of rows. An output without an input is a vector.
    Rows,
    /// Scalars.
    Scalars,
}

/// A collective as an op.
trait Collective: 'static {
    const NAME: &'static CStr;
    const KIND: Kind;
    const ATTRIBUTES: &'static [&'static CStr];
    const INPUTS: &'static [&'static CStr];
    const OUTPUTS: &'static [&'static CStr];
    const SHAPES: Shapes;
}

const TYPE: &CStr =
    c"T: {uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool}";
/// Attributes of all collectives. `urgent`: whoever runs it waits for it.
const COMMON: [&CStr; 3] = [
    c"ignore_name_scope: bool = false",
    c"process_set_id: int = 0",
    c"urgent: bool = false",
];
const COUNT: &CStr = c"num_tensors: int >= 1";
const OP: &CStr = c"reduce_op: int";
const BEFORE: &CStr = c"prescale_factor: float = 1.0";
const AFTER: &CStr = c"postscale_factor: float = 1.0";
/// Which gradient it is, for what is kept of it from step to step; 0: it is none.
const MARK: &CStr = c"gradient: int = 0";

macro_rules! collective {
    ($type:ident, $name:literal, $kind:ident, $shapes:ident, [$($attribute:expr),*],
     [$($input:literal),*] -> [$($output:literal),*]) => {
        struct $type;
        impl Collective for $type {
            const NAME: &'static CStr = $name;
            const KIND: Kind = Kind::$kind;
            const ATTRIBUTES: &'static [&'static CStr] = &[$($attribute),*];
            const INPUTS: &'static [&'static CStr] = &[$($input),*];
            const OUTPUTS: &'static [&'static CStr] = &[$($output),*];
            const SHAPES: Shapes = Shapes::$shapes;
        }
    };
}

collective!(Allreduce, c"EvenerAllreduce", Allreduce, Same, [TYPE, OP, BEFORE, AFTER, MARK],
    [c"tensor: T"] -> [c"sum: T"]);
collective!(GroupedAllreduce, c"EvenerGroupedAllreduce", Allreduce, Same,
    [TYPE, COUNT, OP, BEFORE, AFTER, MARK],
    [c"tensors: num_tensors * T"] -> [c"sums: num_tensors * T"]);
collective!(Allgather, c"EvenerAllgather", Allgather, Rows, [TYPE],
    [c"tensor: T"] -> [c"output: T"]);
collective!(GroupedAllgather, c"EvenerGroupedAllgather", Allgather, Rows, [TYPE, COUNT],
    [c"tensors: num_tensors * T"] -> [c"outputs: num_tensors * T"]);
collective!(Broadcast, c"EvenerBroadcast", Broadcast, Same, [TYPE, c"root_rank: int"],
    [c"tensor: T"] -> [c"output: T"]);
collective!(Alltoall, c"EvenerAlltoall", Alltoall, Rows, [TYPE],
    [c"tensor: T", c"splits: int32"] -> [c"output: T", c"received_splits: int32"]);
collective!(Reducescatter, c"EvenerReducescatter", Reducescatter, Rows, [TYPE, OP, BEFORE, AFTER],
    [c"tensor: T"] -> [c"output: T"]);
collective!(GroupedReducescatter, c"EvenerGroupedReducescatter", Reducescatter, Rows,
    [TYPE, COUNT, OP, BEFORE, AFTER],
    [c"tensors: num_tensors * T"] -> [c"outputs: num_tensors * T"]);
collective!(Join, c"EvenerJoin", Join, Scalars, [], [] -> [c"last: int32"]);

/// Tells TensorFlow of all of them.
///
/// # Errors
/// TensorFlow's own words.
pub fn register() -> std::result::Result<(), String> {
    collective::<Allreduce>()?;
    collective::<GroupedAllreduce>()?;
    collective::<Allgather>()?;
    collective::<GroupedAllgather>()?;
    collective::<Broadcast>()?;
    collective::<Alltoall>()?;
    collective::<Reducescatter>()?;
    collective::<GroupedReducescatter>()?;
    collective::<Join>()?;
    place()
}

fn collective<C: Collective>() -> std::result::Result<(), String> {
    define(
        C::NAME,
        &[C::ATTRIBUTES, &COMMON].concat(),
        C::INPUTS,
        C::OUTPUTS,
        shapes::<C>,
        |device| {
            // SAFETY: names are C strings that live for ever, the functions have the types that the
            // API declares.
            unsafe {
                (api().TF_NewAsyncKernelBuilder)(
                    C::NAME.as_ptr(),
                    device.as_ptr(),
                    create::<C>,
                    compute::<C>,
                    delete,
                )
            }
        },
    )
}

fn define(
    name: &'static CStr,
    attributes: &[&CStr],
    inputs: &[&CStr],
    outputs: &[&CStr],
    shapes: capi::Shape,
    kernel: impl Fn(&CStr) -> *mut capi::KernelBuilder,
) -> std::result::Result<(), String> {
    let api = api();
    let status = Status::new();
    // SAFETY: the builders are fresh and are given to TensorFlow once, which frees them; names are C
    // strings, which TensorFlow copies; the functions have the types that the API declares.
    unsafe {
        let op = (api.TF_NewOpDefinitionBuilder)(name.as_ptr());
        for attribute in attributes {
            (api.TF_OpDefinitionBuilderAddAttr)(op, attribute.as_ptr());
        }
        for input in inputs {
            (api.TF_OpDefinitionBuilderAddInput)(op, input.as_ptr());
        }
        for output in outputs {
            (api.TF_OpDefinitionBuilderAddOutput)(op, output.as_ptr());
        }
        // Never folded into a constant, never merged with its twin: the other ranks count on it.
        (api.TF_OpDefinitionBuilderSetIsStateful)(op, true);
        (api.TF_OpDefinitionBuilderSetShapeInferenceFunction)(op, shapes);
        (api.TF_RegisterOpDefinition)(op, status.0);
        status.check()?;
        for device in [c"CPU", c"GPU"] {
            let kernel = kernel(device);
            if device == c"GPU" {
                for argument in inputs.iter().chain(outputs) {
                    let argument = argument.to_string_lossy();
                    let argument = argument.split(':').next().unwrap_or_default().trim();
                    let argument = CString::new(argument).unwrap_or_default();
                    (api.TF_KernelBuilder_HostMemory)(kernel, argument.as_ptr());
                }
            }
            (api.TF_RegisterKernelBuilder)(name.as_ptr(), kernel, status.0);
            status.check()?;
        }
    }
    Ok(())
}

/// A node of a graph: what of a request does not change.
struct State {
    name: String,
    op: u8,
    root: u32,
    set: u32,
    factors: (f64, f64),
    urgent: bool,
}

fn state<C: Collective>(node: &Node) -> Result<State> {
    let has = |name: &CStr| C::ATTRIBUTES.contains(&name);
    let whole = node.name();
    let name = if node.flag(c"ignore_name_scope")? {
        whole.rsplit('/').next().unwrap_or_default().to_owned()
    } else {
        whole
    };
    let wrong = |what: &str| (Code::InvalidArgument, format!("{name}: {what}"));
    let (op, root) = (
        if has(OP) {
            node.integer(c"reduce_op")?
        } else {
            0
        },
        if C::KIND == Kind::Broadcast {
            node.integer(c"root_rank")?
        } else if has(MARK) {
            node.integer(c"gradient")?
        } else {
            0
        },
    );
    let (before, after) = if has(BEFORE) {
        (
            node.number(c"prescale_factor")?,
            node.number(c"postscale_factor")?,
        )
    } else {
        (1.0, 1.0)
    };
    Ok(State {
        op: u8::try_from(op)
            .ok()
            .filter(|op| *op <= 5)
            .ok_or_else(|| wrong("no such reduction"))?,
        root: u32::try_from(root).map_err(|_| wrong("no such root rank, or gradient"))?,
        set: u32::try_from(node.integer(c"process_set_id")?)
            .map_err(|_| wrong("no such process set"))?,
        // A factor that was written with few digits is meant, and not its float32.
        factors: (exact(before), exact(after)),
        urgent: node.flag(c"urgent")?,
        name,
    })
}

/// The shortest decimal number that is this float32.
fn exact(value: f32) -> f64 {
    value
        .to_string()
        .parse()
        .unwrap_or_else(|_| f64::from(value))
}

unsafe extern "C" fn create<C: Collective>(node: *mut capi::Construction) -> *mut c_void {
    match caught(|| state::<C>(&Node(node))) {
        Ok(state) => Box::into_raw(Box::new(state)).cast(),
        Err(error) => {
            let status = Status::of(&error);
            // SAFETY: TensorFlow's pointer, for the time of this call; the status is set.
            unsafe { (api().TF_OpKernelConstruction_Failure)(node, status.0) };
            std::ptr::null_mut()
        }
    }
}

unsafe extern "C" fn delete(state: *mut c_void) {
    if !state.is_null() {
        // SAFETY: it came from `create`, and TensorFlow deletes a kernel once.
        drop(unsafe { Box::from_raw(state.cast::<State>()) });
    }
}

unsafe extern "C" fn compute<C: Collective>(
    state: *mut c_void,
    context: *mut capi::Context,
    done: *mut AsyncDone,
) {
    // SAFETY: `state` came from `create`, and is freed by `delete` only, after the last run.
    let state = unsafe { state.cast::<State>().as_ref() };
    let prepared = caught(|| {
        let state = state.ok_or((Code::Internal, "the kernel was not made".to_owned()))?;
        let Some(world) = world() else {
            let text = format!(
                "{}: Horovod has not been initialized; use hvd.init().",
                state.name
            );
            return Err((Code::FailedPrecondition, text));
        };
        let inputs = inputs(context)?;
        let size = world
            .engine
            .members(state.set)
            .map_or(1, |members| members.len());
        let request = request::<C>(state, &inputs, size)?;
        Ok((world, state, inputs, request))
    });
    let (world, state, inputs, request) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            let status = Status::of(&error);
            // SAFETY: TensorFlow's pointers, for the time of this call; the status is set.
            unsafe {
                (api().TF_OpKernelContext_Failure)(context, status.0);
                (api().TF_RunAsyncOpKernelDoneCallback)(done);
            }
            return;
        }
    };
    // SAFETY: TensorFlow's callback of this very call.
    let (end, waiter) = match unsafe { Done::take(done) } {
        Some(done) => (End::Later(done), None),
        None => {
            let waiter = Arc::<Waiter>::default();
            (End::Here(waiter.clone()), Some(waiter))
        }
    };
    let outputs = Vec::new();
    let job = Box::new(Tensors {
        context,
        inputs,
        outputs,
        end,
        name: format!("Horovod{:?} {}", C::KIND, state.name),
        value: C::KIND == Kind::Join,
        splits: C::KIND == Kind::Alltoall,
    });
    submit(&world, request, job, state.urgent);
    if let Some(waiter) = waiter {
        // SAFETY: TensorFlow's callback of this very call.
        unsafe { waiter.wait(done) };
    }
}

/// Nothing of the kernel may be touched after it: it may have ended.
fn submit(world: &super::World, request: Request, job: Box<Tensors>, urgent: bool) {
    if request.kind == Kind::Alltoall
        && let Some(problem) = split_problem(&request)
    {
        job.finish(Err(Failure::Refused(problem)));
        return;
    }
    world.engine.submit(request, job, urgent);
}

fn split_problem(request: &Request) -> Option<String> {
    let rows = request.tensors[0].shape.first().copied().unwrap_or(0);
    let sum = request
        .splits
        .iter()
        .try_fold(0u64, |sum, n| sum.checked_add(*n));
    (sum != Some(rows) && !request.tensors[0].shape.is_empty()).then(|| {
        format!(
            "Sum of splits {:?} is not the first dimension {rows}",
            request.splits
        )
    })
}

fn inputs(context: *mut capi::Context) -> Result<Vec<Input>> {
    // SAFETY: TensorFlow's pointer, while the kernel has not ended.
    let count = unsafe { (api().TF_NumInputs)(context) };
    (0..count)
        .map(|index| {
            let status = Status::new();
            let mut tensor = std::ptr::null_mut();
            // SAFETY: as above; the tensor is freed by `Input`.
            unsafe { (api().TF_GetInput)(context, index, &raw mut tensor, status.0) };
            status.checked()?;
            Ok(Input(tensor))
        })
        .collect()
}

fn request<C: Collective>(state: &State, inputs: &[Input], size: usize) -> Result<Request> {
    let wrong = |text: String| (Code::InvalidArgument, format!("{}: {text}", state.name));
    let mut splits = Vec::new();
    let mut data = inputs;
    if C::KIND == Kind::Alltoall {
        let [tensor, given] = inputs else {
            return Err(wrong("it takes a tensor and splits".to_owned()));
        };
        data = std::slice::from_ref(tensor);
        let rows = tensor.shape().first().copied().unwrap_or(0) as u64;
        let given = given.values::<i32>()?;
        if given.is_empty() {
            if !rows.is_multiple_of(size as u64) {
                return Err(wrong(format!(
                    "splits were not given, but the first dimension {rows} cannot be parted evenly \
                     among {size} processes"
                )));
            }
            splits = vec![rows / size as u64; size];
        } else if given.len() != size {
            return Err(wrong(format!(
                "there are {} splits for {size} processes",
                given.len()
            )));
        } else {
            for split in given {
                let split = u64::try_from(*split);
                splits.push(split.map_err(|_| wrong(format!("splits {given:?}")))?);
            }
        }
    }
    let mut tensors = Vec::with_capacity(data.len());
    for input in data {
        let dtype = number(input.dtype())
            .ok_or_else(|| wrong(format!("TensorFlow's type {} is not served", input.dtype())))?;
        let shape = input.shape().iter().map(|d| *d as u64).collect();
        tensors.push(Meta {
            dtype,
            shape,
            label: String::new(),
        });
    }
    let kind = match C::KIND {
        Kind::Allreduce if state.op == evener_collectives::number::ADASUM => Kind::Adasum,
        kind => kind,
    };
    Ok(Request {
        name: state.name.clone(),
        set: state.set,
        kind,
        tensors,
        gpu: false,
        op: state.op,
        root: state.root,
        factors: state.factors,
        splits,
    })
}

unsafe extern "C" fn shapes<C: Collective>(
    context: *mut capi::ShapeContext,
    status: *mut capi::Status,
) {
    let api = api();
    // SAFETY: TensorFlow's pointers, for the time of this call; each handle is freed once.
    unsafe {
        let put = |index: i64, shape: *mut capi::ShapeHandle| {
            (api.TF_ShapeInferenceContextSetOutput)(context, index as c_int, shape, status);
            (api.TF_DeleteShapeHandle)(shape);
        };
        // Of a size that is not known: TensorFlow's kUnknownDim is -1.
        let rows = || (api.TF_ShapeInferenceContextVectorFromSize)(context, usize::MAX);
        if C::SHAPES == Shapes::Scalars {
            return put(0, (api.TF_ShapeInferenceContextScalar)(context));
        }
        let count = match C::KIND {
            Kind::Alltoall => 1,
            _ => (api.TF_ShapeInferenceContextNumInputs)(context),
        };
        for index in 0..count {
            let shape = (api.TF_NewShapeHandle)();
            (api.TF_ShapeInferenceContextGetInput)(context, index as c_int, shape, status);
            if C::SHAPES == Shapes::Same {
                put(index, shape);
                continue;
            }
            let (first, rest) = (rows(), (api.TF_NewShapeHandle)());
            let whole = (api.TF_NewShapeHandle)();
            (api.TF_ShapeInferenceContextSubshape)(context, shape, 1, i64::MAX, rest, status);
            if (api.TF_GetCode)(status) == 0 {
                (api.TF_ShapeInferenceContextConcatenateShapes)(
                    context, first, rest, whole, status,
                );
                (api.TF_ShapeInferenceContextSetOutput)(context, index as c_int, whole, status);
            }
            for handle in [shape, first, rest, whole] {
                (api.TF_DeleteShapeHandle)(handle);
            }
        }
        if C::KIND == Kind::Alltoall {
            put(1, rows());
        }
    }
}

/// `EvenerPlace`: rank (0), size (1), local rank (2), local size (3) when it runs, or whether this
/// rank is in a process set (4), or the size of one (1). In an elastic job they change.
fn place() -> std::result::Result<(), String> {
    const NAME: &CStr = c"EvenerPlace";
    define(
        NAME,
        &[c"what: int", c"process_set_id: int = 0"],
        &[],
        &[c"value: int32"],
        scalar_shape,
        |device| {
            // SAFETY: as in `collective`.
            unsafe {
                (api().TF_NewKernelBuilder)(
                    NAME.as_ptr(),
                    device.as_ptr(),
                    place_create,
                    place_compute,
                    place_delete,
                )
            }
        },
    )
}

unsafe extern "C" fn scalar_shape(context: *mut capi::ShapeContext, status: *mut capi::Status) {
    // SAFETY: TensorFlow's pointers, for the time of this call; the handle is freed once.
    unsafe {
        let shape = (api().TF_ShapeInferenceContextScalar)(context);
        (api().TF_ShapeInferenceContextSetOutput)(context, 0, shape, status);
        (api().TF_DeleteShapeHandle)(shape);
    }
}

unsafe extern "C" fn place_create(node: *mut capi::Construction) -> *mut c_void {
    let node = Node(node);
    let asked = caught(|| Ok((node.integer(c"what")?, node.integer(c"process_set_id")?)));
    Box::into_raw(Box::new(asked.unwrap_or((-1, 0)))).cast()
}

unsafe extern "C" fn place_delete(state: *mut c_void) {
    if !state.is_null() {
        // SAFETY: it came from `place_create`, and TensorFlow deletes a kernel once.
        drop(unsafe { Box::from_raw(state.cast::<(i64, i64)>()) });
    }
}

unsafe extern "C" fn place_compute(state: *mut c_void, context: *mut capi::Context) {
    // SAFETY: it came from `place_create`, and is freed after the last run only.
    let (what, set) = unsafe { state.cast::<(i64, i64)>().as_ref() }
        .copied()
        .unwrap_or((-1, 0));
    let outcome = caught(|| {
        let Some(world) = world() else {
            let text = "Horovod has not been initialized; use hvd.init().".to_owned();
            return Err((Code::FailedPrecondition, text));
        };
        let members = u32::try_from(set)
            .ok()
            .and_then(|set| world.engine.members(set));
        let Some(members) = members else {
            return Err((
                Code::InvalidArgument,
                format!("process set {set} does not exist"),
            ));
        };
        let place = &world.place;
        let value = match what {
            0 => place.rank,
            1 => members.len() as i32,
            2 => place.local_rank,
            3 => place.local_size,
            _ => i32::from(members.contains(&(place.rank as usize))),
        };
        crate::kernel::Run::of(context).scalar(0, value)
    });
    if let Err(error) = outcome {
        let status = Status::of(&error);
        // SAFETY: TensorFlow's pointer, for the time of this call; the status is set.
        unsafe { (api().TF_OpKernelContext_Failure)(context, status.0) };
    }
}
