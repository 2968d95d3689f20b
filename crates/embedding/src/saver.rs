//! Where a store's chain of snapshots and deltas stands.

/// The last file of a store's chain.
#[derive(Debug, Default)]
pub struct Saver {
    /// Marks up to this are in it.
    pub(crate) saved: i16,
    pub(crate) id: String,
}

impl Saver {
    /// Comes after the same file as another, with nothing saved since.
    pub fn follow(&mut self, other: &Saver) {
        self.id.clone_from(&other.id);
        self.saved = 0;
    }
}
