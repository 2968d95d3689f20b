//! placeholder

/// The chain of snapshots of a store.
#[derive(Debug, Default)]
pub struct Saver {}
