//! One run of a collective's kernel: TensorFlow's tensors, from the kernel's call to the callback.

use super::done::Done;
use crate::capi::{self, AsyncDone, Code, DataType, api};
use crate::kernel::{Input, Status};
use evener_collectives::{Failure, Job, Outcome};
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// TensorFlow's number of each type of `evener_negotiate::check::DTYPES`.
const TYPES: [DataType; 11] = [4, 6, 17, 5, 3, 9, 19, 1, 2, 10, 14];

/// The negotiation's number of TensorFlow's type.
pub fn number(dtype: DataType) -> Option<u8> {
    TYPES
        .iter()
        .position(|known| *known == dtype)
        .map(|index| index as u8)
}

/// How the end is told.
pub enum End {
    /// By TensorFlow's callback, wherever it happens.
    Later(Done),
    /// To the kernel, which waits.
    Here(Arc<Waiter>),
}

/// For a kernel that waits inside its call.
#[derive(Default)]
pub struct Waiter {
    ended: Mutex<bool>,
    told: Condvar,
}

impl Waiter {
    /// Returns when the operation has ended, and tells TensorFlow.
    ///
    /// # Safety
    /// `done` is what TensorFlow gave to the kernel that is being called.
    pub unsafe fn wait(&self, done: *mut AsyncDone) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self
                .told
                .wait(ended)
                .unwrap_or_else(PoisonError::into_inner);
        }
        // SAFETY: promised by the caller; it lives until the kernel returns.
        unsafe { (api().TF_RunAsyncOpKernelDoneCallback)(done) };
    }
}

/// What an op's kernel has handed over.
pub struct Tensors {
    pub context: *mut capi::Context,
    pub inputs: Vec<Input>,
    /// By index, once they are made.
    pub outputs: Vec<Option<Input>>,
    pub end: End,
    /// The op's name, for errors.
    pub name: String,
    /// Whether the value is the output (a join's), or output 1 is the received splits.
    pub value: bool,
    pub splits: bool,
}

// SAFETY: TensorFlow lets a kernel that has not ended be used by any thread, one at a time.
unsafe impl Send for Tensors {}

impl Tensors {
    fn make(&mut self, index: usize, dtype: DataType, shape: &[u64]) -> Result<&mut [u8], String> {
        let size = number(dtype).map_or(1, evener_negotiate::check::element_bytes);
        let elements = shape
            .iter()
            .try_fold(1u64, |product, d| product.checked_mul(*d));
        let bytes = elements
            .and_then(|elements| elements.checked_mul(size))
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| format!("an output of shape {shape:?}"))?;
        let dims: Vec<i64> = shape.iter().map(|d| *d as i64).collect();
        let status = Status::new();
        // SAFETY: the context lives until the callback; the shape has the length that is said. The
        // tensor's reference is freed by `Input`.
        let tensor = Input(unsafe {
            (api().TF_AllocateOutput)(
                self.context,
                index as c_int,
                dtype,
                dims.as_ptr(),
                dims.len() as c_int,
                bytes,
                status.0,
            )
        });
        status.check()?;
        if self.outputs.len() <= index {
            self.outputs.resize_with(index + 1, || None);
        }
        let tensor = self.outputs[index].insert(tensor);
        let (data, _) = tensor.memory();
        if bytes == 0 {
            return Ok(&mut []);
        }
        // SAFETY: fresh memory of this many bytes that nobody else sees before the callback.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, bytes) })
    }

    fn dtype(&self, index: usize) -> DataType {
        self.inputs.get(index).map_or(capi::INT32, Input::dtype)
    }

    fn told(&mut self, outcome: &Outcome) -> Result<(), String> {
        if self.value {
            let value = outcome.value as i32;
            self.make(0, capi::INT32, &[])?
                .copy_from_slice(&value.to_ne_bytes());
        }
        if self.splits {
            let count = outcome.received.len() as u64;
            let bytes = outcome
                .received
                .iter()
                .flat_map(|n| (*n as i32).to_ne_bytes());
            let bytes: Vec<u8> = bytes.collect();
            self.make(1, capi::INT32, &[count])?.copy_from_slice(&bytes);
        }
        Ok(())
    }
}

impl Job for Tensors {
    fn input(&self, index: usize) -> &[u8] {
        let (data, bytes) = self.inputs[index].memory();
        if bytes == 0 {
            return &[];
        }
        // SAFETY: a live tensor, whose bytes are there; nobody writes to an input of a kernel that
        // has not ended.
        unsafe { std::slice::from_raw_parts(data, bytes) }
    }

    fn output(&mut self, index: usize, shape: &[u64]) -> Result<&mut [u8], String> {
        self.make(index, self.dtype(index), shape)
    }

    fn begin(&mut self, index: usize, shape: &[u64], start: usize) -> Result<&mut [u8], String> {
        let (from, bytes) = self.inputs[index].memory();
        let output = self.output(index, shape)?;
        if bytes > 0 {
            // SAFETY: as in `input`; the output is another tensor.
            let input = unsafe { std::slice::from_raw_parts(from, bytes) };
            output[start..start + bytes].copy_from_slice(input);
        }
        Ok(output)
    }

    fn finish(mut self: Box<Self>, outcome: Result<Outcome, Failure>) {
        let error = match outcome {
            Ok(outcome) => self
                .told(&outcome)
                .err()
                .map(|problem| (Code::ResourceExhausted, problem)),
            Err(Failure::Refused(text)) => Some((Code::InvalidArgument, text)),
            Err(Failure::Mismatch(text)) => Some((Code::FailedPrecondition, text)),
            Err(Failure::Broken(text)) => {
                Some((Code::Unknown, format!("Horovod has been shut down: {text}")))
            }
        };
        if let Some((code, text)) = error {
            let status = Status::of(&(code, format!("{}: {text}", self.name)));
            // SAFETY: the context lives until the callback.
            unsafe { (api().TF_OpKernelContext_Failure)(self.context, status.0) };
        }
        let Self {
            inputs,
            outputs,
            end,
            ..
        } = *self;
        drop((inputs, outputs));
        match end {
            End::Later(done) => done.run(),
            End::Here(waiter) => {
                *waiter.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
                waiter.told.notify_all();
            }
        }
    }
}
