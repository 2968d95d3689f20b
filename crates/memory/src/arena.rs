//! Host memory in pages: one anonymous map, touched before anyone waits for it, so that a budget
//! that the machine cannot give shows at start and not in the middle of a step. torch's allocator
//! of pinned memory rounds each tensor up to a power of two; here a tensor takes whole pages.
//!
//! The map lives as long as the [`Arena`]; `address` is stable. Whoever hands out pointers into it
//! keeps the arena alive.

use crate::pages::{Pages, PagesError, Run};
use memmap2::{Advice, MmapMut};

/// Why there is no arena, or no memory from it.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The kernel gave no memory.
    #[error("{bytes} bytes of host memory cannot be mapped: {source}")]
    Map {
        /// Asked for.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A page size that cannot be.
    #[error("a page of {0} bytes cannot be: it must be a multiple of 4096, and not 0")]
    PageSize(usize),
    /// The arena is full, or pages were given back that are not in use.
    #[error(transparent)]
    Pages(#[from] PagesError),
}

/// Host memory in pages.
#[derive(Debug)]
pub struct Arena {
    map: MmapMut,
    page: usize,
    pages: Pages,
}

impl Arena {
    /// At least `bytes` in pages of `page` bytes, touched by `threads` threads (0: not touched).
    ///
    /// # Errors
    /// [`ArenaError::Map`] or [`ArenaError::PageSize`].
    pub fn new(bytes: usize, page: usize, threads: usize) -> Result<Arena, ArenaError> {
        if page == 0 || !page.is_multiple_of(4096) {
            return Err(ArenaError::PageSize(page));
        }
        let pages = bytes.div_ceil(page);
        let bytes = pages.saturating_mul(page);
        let failed = |source| ArenaError::Map { bytes, source };
        let mut map = MmapMut::map_anon(bytes.max(1)).map_err(failed)?;
        // A wish: where huge pages are off, small ones do.
        let _ = map.advise(Advice::HugePage);
        if threads > 0 && bytes > 0 {
            let share = pages.div_ceil(threads) * page;
            std::thread::scope(|scope| {
                for part in map.chunks_mut(share) {
                    scope.spawn(|| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
                }
            });
        }
        Ok(Arena {
            map,
            page,
            pages: Pages::new(pages),
        })
    }

    /// Where it begins.
    pub fn address(&self) -> usize {
        self.map.as_ptr() as usize
    }

    /// Bytes of a page.
    pub fn page(&self) -> usize {
        self.page
    }

    /// The bookkeeping.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// One run of pages that holds `bytes`.
    ///
    /// # Errors
    /// [`ArenaError::Pages`] where there is none.
    pub fn take(&mut self, bytes: usize) -> Result<Run, ArenaError> {
        Ok(self.pages.take_run(bytes.div_ceil(self.page))?)
    }

    /// Takes a run back.
    ///
    /// # Errors
    /// [`ArenaError::Pages`] where it is not in use.
    pub fn give_back(&mut self, run: Run) -> Result<(), ArenaError> {
        Ok(self.pages.give_back(run)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_gives_whole_pages_and_refuses_with_numbers() {
        let mut arena = Arena::new(10_000, 4096, 2).unwrap();
        assert_eq!(arena.pages().total(), 3);
        let run = arena.take(4097).unwrap();
        assert_eq!(run.pages, 2);
        let refused = arena.take(8192).unwrap_err();
        assert_eq!(refused.to_string(), "2 pages wanted, 1 of 3 are free");
        arena.give_back(run).unwrap();
        assert_eq!(arena.take(3 * 4096).unwrap().pages, 3);
        assert_eq!(arena.pages().peak(), 3);
        assert!(Arena::new(1, 1000, 0).is_err());
        assert!(matches!(
            Arena::new(usize::MAX / 2, 4096, 0),
            Err(ArenaError::Map { .. })
        ));
    }
}
