//! Memory from the system, full of zeros, that begins on a huge page.

use crate::error::{Result, io};
use memmap2::MmapMut;

const PAGE: usize = 2 << 20;

/// What the system gave, and where in it `bytes` begin that lie on huge pages if `wished`. `what` they
/// are for goes into the error.
///
/// # Errors
/// Where the system has no memory.
pub fn map(bytes: usize, what: &str, wished: bool) -> Result<(MmapMut, *mut u8)> {
    let mut map =
        MmapMut::map_anon(bytes + PAGE).map_err(io(format!("{bytes} bytes for {what}")))?;
    if wished {
        // A wish: where huge pages are off, small ones do. Miri has none.
        #[cfg(not(miri))]
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    let skip = map.as_ptr().align_offset(PAGE);
    // Taken once: to take it again would be to claim all of the map.
    let start = map[skip..].as_mut_ptr();
    Ok((map, start))
}
