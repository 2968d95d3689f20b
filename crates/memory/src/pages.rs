//! Which pages of a tier are free. Pure bookkeeping: no memory is touched.
//!
//! Free pages are kept as runs in the order of their place, merged where they touch, so the list is
//! as short as the fragmentation is low. A run is taken from the smallest free run that holds it
//! (best fit); chunks of a training run have few sizes, so a freed place is soon taken again whole.

use std::collections::BTreeMap;

/// Pages one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first page.
    pub first: usize,
    /// How many.
    pub pages: usize,
}

impl Run {
    fn end(self) -> usize {
        self.first + self.pages
    }
}

/// Why pages were not given or not taken back. Nothing has changed when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PagesError {
    /// There is not enough.
    #[error("{wanted} pages wanted, {free} of {total} are free")]
    Full {
        /// Asked for.
        wanted: usize,
        /// Free in all.
        free: usize,
        /// Total of the tier.
        total: usize,
    },
    /// There is enough, but not in one run.
    #[error("{wanted} pages in one run wanted: {free} are free, the longest run is {longest}")]
    Fragmented {
        /// Asked for.
        wanted: usize,
        /// Free in all.
        free: usize,
        /// The longest free run.
        longest: usize,
    },
    /// Pages that are not in use, or not of this tier, were given back.
    #[error("pages {first}..{end} were given back, but are not in use")]
    NotInUse {
        /// The first of them.
        first: usize,
        /// After the last.
        end: usize,
    },
}

/// The pages of one tier.
#[derive(Debug, Clone)]
pub struct Pages {
    total: usize,
    used: usize,
    peak: usize,
    /// Free runs: first page to number of pages. No two touch.
    free: BTreeMap<usize, usize>,
}

impl Pages {
    /// `total` pages, all free.
    pub fn new(total: usize) -> Pages {
        let free = if total == 0 {
            BTreeMap::new()
        } else {
            BTreeMap::from([(0, total)])
        };
        Pages {
            total,
            used: 0,
            peak: 0,
            free,
        }
    }

    /// Pages of the tier.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Pages in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The most that were ever in use.
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// The longest free run.
    pub fn longest(&self) -> usize {
        self.free.values().copied().max().unwrap_or(0)
    }

    /// One run of `pages`.
    ///
    /// # Errors
    /// [`PagesError::Full`] or [`PagesError::Fragmented`].
    pub fn take_run(&mut self, pages: usize) -> Result<Run, PagesError> {
        if pages == 0 {
            return Ok(Run { first: 0, pages: 0 });
        }
        let free = self.total - self.used;
        if pages > free {
            return Err(PagesError::Full {
                wanted: pages,
                free,
                total: self.total,
            });
        }
        let fits = self.free.iter().filter(|(_, length)| **length >= pages);
        let Some((&first, &length)) = fits.min_by_key(|(first, length)| (**length, **first)) else {
            return Err(PagesError::Fragmented {
                wanted: pages,
                free,
                longest: self.longest(),
            });
        };
        self.cut(first, length, pages);
        Ok(Run { first, pages })
    }

    /// `pages` in as few runs as there are: one where possible, else the longest free runs.
    ///
    /// # Errors
    /// [`PagesError::Full`].
    pub fn take(&mut self, pages: usize) -> Result<Vec<Run>, PagesError> {
        let free = self.total - self.used;
        if pages > free {
            return Err(PagesError::Full {
                wanted: pages,
                free,
                total: self.total,
            });
        }
        if let Ok(run) = self.take_run(pages) {
            return Ok(if pages == 0 { Vec::new() } else { vec![run] });
        }
        let mut left = pages;
        let mut runs = Vec::new();
        while left > 0 {
            // Checked above: what is left is free, so there is a run.
            let Some((&first, &length)) = self.free.iter().max_by_key(|(_, length)| **length)
            else {
                break;
            };
            let pages = length.min(left);
            self.cut(first, length, pages);
            runs.push(Run { first, pages });
            left -= pages;
        }
        runs.sort_unstable();
        Ok(runs)
    }

    fn cut(&mut self, first: usize, length: usize, pages: usize) {
        self.free.remove(&first);
        if length > pages {
            self.free.insert(first + pages, length - pages);
        }
        self.used += pages;
        self.peak = self.peak.max(self.used);
    }

    /// Takes a run back, or a part of one.
    ///
    /// # Errors
    /// [`PagesError::NotInUse`].
    pub fn give_back(&mut self, run: Run) -> Result<(), PagesError> {
        if run.pages == 0 {
            return Ok(());
        }
        let wrong = PagesError::NotInUse {
            first: run.first,
            end: run.first.saturating_add(run.pages),
        };
        if run
            .first
            .checked_add(run.pages)
            .is_none_or(|end| end > self.total)
        {
            return Err(wrong);
        }
        let before = self
            .free
            .range(..run.end())
            .next_back()
            .map(|(first, length)| (*first, *length));
        if before.is_some_and(|(first, length)| first + length > run.first) {
            return Err(wrong);
        }
        let (mut first, mut pages) = (run.first, run.pages);
        if let Some((start, length)) = before
            && start + length == run.first
        {
            self.free.remove(&start);
            (first, pages) = (start, pages + length);
        }
        if let Some(length) = self.free.remove(&run.end()) {
            pages += length;
        }
        self.free.insert(first, pages);
        self.used -= run.pages;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Act {
        Take(usize),
        TakeRun(usize),
        GiveBack(prop::sample::Index),
        GiveBackTwice(prop::sample::Index),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        prop::collection::vec(
            prop_oneof![
                (0usize..20).prop_map(Act::Take),
                (0usize..20).prop_map(Act::TakeRun),
                any::<prop::sample::Index>().prop_map(Act::GiveBack),
                any::<prop::sample::Index>().prop_map(Act::GiveBackTwice),
            ],
            0..80,
        )
    }

    proptest! {
        /// Against a map of every page: no page has two owners, none is lost, a refusal is true
        /// and changes nothing, and all is one run again in the end.
        #[test]
        fn pages_have_one_owner_and_none_is_lost(total in 0usize..64, acts in acts()) {
            let mut pages = Pages::new(total);
            let mut used = vec![false; total];
            let mut held: Vec<Run> = Vec::new();
            for act in acts {
                let free = used.iter().filter(|used| !**used).count();
                let longest = used.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0);
                prop_assert_eq!(pages.used(), total - free);
                prop_assert_eq!(pages.longest(), longest);
                let taken = match act {
                    Act::Take(n) => match pages.take(n) {
                        Ok(runs) => {
                            prop_assert_eq!(runs.iter().map(|run| run.pages).sum::<usize>(), n);
                            prop_assert!(runs.len() <= 1 || longest < n);
                            runs
                        }
                        Err(error) => {
                            prop_assert_eq!(error, PagesError::Full { wanted: n, free, total });
                            prop_assert!(n > free);
                            vec![]
                        }
                    },
                    Act::TakeRun(n) => match pages.take_run(n) {
                        Ok(run) => vec![run],
                        Err(PagesError::Full { .. }) => { prop_assert!(n > free); vec![] }
                        Err(_) => { prop_assert!(n > longest && n <= free); vec![] }
                    },
                    Act::GiveBack(_) | Act::GiveBackTwice(_) if held.is_empty() => vec![],
                    Act::GiveBack(index) | Act::GiveBackTwice(index) => {
                        let run = held.swap_remove(index.index(held.len()));
                        pages.give_back(run).unwrap();
                        used[run.first..run.first + run.pages].fill(false);
                        if run.pages > 0 {
                            let before = pages.used();
                            prop_assert!(pages.give_back(run).is_err());
                            prop_assert_eq!(pages.used(), before);
                        }
                        vec![]
                    }
                };
                for run in taken {
                    for page in &mut used[run.first..run.first + run.pages] {
                        prop_assert!(!*page, "a page has two owners");
                        *page = true;
                    }
                    held.push(run);
                }
            }
            for run in held {
                pages.give_back(run).unwrap();
            }
            prop_assert_eq!(pages.longest(), total);
            prop_assert_eq!(pages.used(), 0);
            for (first, length) in [(total, 1), (usize::MAX, 2)] {
                let refused = pages.give_back(Run { first, pages: length });
                prop_assert!(refused.is_err());
            }
        }
    }
}
