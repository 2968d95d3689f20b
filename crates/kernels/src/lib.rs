//! CPU kernels of Evener. Each is a plain function over slices: no allocation that the caller
//! cannot see, no thread of its own, no unsafe code.

pub mod topk;
