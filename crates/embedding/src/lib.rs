//! The feature store: embedding tables whose keys come and go.
//!
//! A table maps any int64 (or any string) to a row: values, and beside them the slots of the optimizer
//! that the store itself steps. Memory is taken as keys come, keys never collide, nothing is retrained
//! when they go.
//!
//! ```
//! use evener_embedding::{Options, Store};
//!
//! let store = Store::new(Options::new(4))?;
//! let mut values = [0.0; 8];
//! store.lookup(&[7, -7], 1, &mut values)?; // rows are made
//! store.apply(&[7, 7], &[0.1; 8], 1, None)?; // duplicates are summed, then one step
//! assert_eq!(store.len(), 2);
//! # Ok::<(), evener_embedding::Error>(())
//! ```
//!
//! How it is built, from the outside in: [`abi`] lets several shared objects use the stores of one;
//! [`registry`] finds them by name; [`store`](Store) cuts batches over `shard`s; a shard has a `map`
//! from keys to rows, which is an `index` that grows in steps; rows lie in the `arena` and never move, or,
//! where a second tier is asked for, in a file (`cold`).
//! `row` says what lies where in a row, `optimizer` what a step does to it, `philox` how it begins,
//! `admission` who gets one, `snapshot` how it outlives the process.
//!
//! Unsafe code is in `arena`, `index`, `batch`, `shard`, `pool` and `abi`, and in single calls of
//! `store` and `table`.

pub mod abi;
mod admission;
mod arena;
mod batch;
mod cold;
mod error;
mod hash;
mod huge;
mod index;
mod map;
mod optimizer;
mod options;
mod philox;
mod pool;
pub mod registry;
mod row;
mod saver;
mod shard;
mod snapshot;
mod store;
mod strings;
mod table;

pub use error::{Error, Result};
pub use options::{Admission, Dtype, Eviction, Init, Keys, Missing, Optimizer, Options, Tier};
pub use snapshot::Saved;
pub use store::Store;
pub use table::{Exported, Stats};
