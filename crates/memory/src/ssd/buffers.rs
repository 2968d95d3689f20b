//! The memory that blocks are brought to: one map, buffers of one size, each aligned for O_DIRECT.

use crate::ssd::{ALIGN, SsdError};
use memmap2::{Advice, MmapRaw};
use std::sync::Arc;

/// Cheap to clone: whoever may still write to a buffer holds one, so the map outlives it.
#[derive(Debug, Clone)]
pub struct Buffers {
    map: Arc<MmapRaw>,
    room: usize,
    count: usize,
}

impl Buffers {
    /// `count` buffers of at least `room` bytes.
    ///
    /// # Errors
    /// [`SsdError::Buffers`].
    pub fn new(count: usize, room: usize) -> Result<Buffers, SsdError> {
        let room = room.max(1).div_ceil(ALIGN) * ALIGN;
        let bytes = room.saturating_mul(count.max(1));
        let failed = |source| SsdError::Buffers { bytes, source };
        let mut map = memmap2::MmapMut::map_anon(bytes).map_err(failed)?;
        // A wish: where huge pages are off, small ones do.
        let _ = map.advise(Advice::HugePage);
        map.iter_mut().step_by(ALIGN).for_each(|byte| *byte = 0);
        Ok(Buffers {
            map: Arc::new(MmapRaw::from(map)),
            room,
            count: count.max(1),
        })
    }

    /// Bytes of each.
    pub fn room(&self) -> usize {
        self.room
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Where a buffer begins.
    pub fn address(&self, buffer: usize) -> usize {
        self.map.as_mut_ptr() as usize + buffer * self.room
    }
}
