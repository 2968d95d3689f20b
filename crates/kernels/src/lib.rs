//! CPU kernels of Evener. Each is a plain function over slices: no allocation that the caller
//! cannot see, and no thread but those of a [`pool::Pool`]. The only unsafe code is in [`isa`], which
//! chooses the instructions at run time.

pub mod adam;
pub mod casts;
pub mod chunks;
pub mod differences;
pub mod formats;
mod fused;
pub mod int8;
pub mod isa;
pub mod lion;
pub mod norm;
pub mod pool;
pub mod sgd;
pub mod state;
pub mod topk;
