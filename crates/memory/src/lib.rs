//! Memory in pages of one size (4 MiB by default), a tier at a time: [`pages`] says which pages are
//! whose, [`arena`] is host memory that is mapped once and cut into such pages.
//!
//! A chunk of a model is a list of runs of pages. Runs are as long as the free space allows, and a
//! chunk that is computed with (and must be one tensor) asks for a single run; states that are only
//! updated element by element take any.

pub mod arena;
pub mod pages;

/// Bytes of a page where nothing else is asked for: two huge pages.
pub const PAGE: usize = 4 << 20;
