//! Memory in tiers. Host memory is pages of one size (4 MiB by default): [`pages`] says which pages
//! are whose, [`arena`] is memory that is mapped once and cut into such pages. [`ssd`] is one
//! preallocated file, read and written past the page cache.
//!
//! A chunk of a model is a list of runs of pages. Runs are as long as the free space allows, and a
//! chunk that is computed with (and must be one tensor) asks for a single run; states that are only
//! updated element by element take any.

pub mod arena;
pub mod pages;
pub mod ssd;

/// Bytes of a page where nothing else is asked for: two huge pages.
pub const PAGE: usize = 4 << 20;
