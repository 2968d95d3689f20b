//! How long what is submitted is gathered. A burst (one thread submits operation after operation, and
//! then waits for them) is announced, and launched, as a whole.
//!
//! Three clocks, in microseconds: `first`, when the oldest thing that waits was there; `last`, when
//! a caller submitted something; and the *cycle*, which the user chose. A caller who begins to wait
//! ends the gathering by himself; what is here is for when nobody does.

/// So soon after a submission the next one of a burst comes.
pub const PAUSE: u64 = 100;

/// When what is not announced since `first` has to be: after a cycle; in the midst of a burst at its
/// end, but another cycle later at the latest.
#[must_use]
pub fn announce(first: u64, last: u64, cycle: u64) -> u64 {
    let end = first.saturating_add(cycle);
    end.max(last.saturating_add(PAUSE).min(end.saturating_add(cycle)))
}

/// When what is ready since `first` is launched by the background thread: at once, but in the midst
/// of a burst at its end, or a cycle later at the latest. The thread that submits will often wait
/// next, and then it launches itself; were it done beside it, the two would fight for Python's lock.
#[must_use]
pub fn launch(first: u64, last: u64, cycle: u64) -> u64 {
    first.max(last.saturating_add(PAUSE).min(first.saturating_add(cycle)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A thread submits with gaps of less than a pause; the clock looks after every submission.
        #[test]
        fn a_burst_of_up_to_two_cycles_is_announced_whole(
            gaps in prop::collection::vec(1..PAUSE, 1..100),
            cycle in 0u64..5000,
        ) {
            let first = 1_000_000;
            let mut now = first;
            let mut announced = None;
            for gap in gaps {
                if announced.is_none() && announce(first, now, cycle) <= now + gap {
                    announced = Some(announce(first, now, cycle));
                }
                now += gap;
            }
            // What was announced before the last submission was so because of the bound.
            prop_assert!(announced.is_none_or(|at| at == first + 2 * cycle));
            prop_assert!(announce(first, now, cycle) >= first + cycle);
            prop_assert!(announce(first, now, cycle) <= first + 2 * cycle);
        }

        #[test]
        fn a_launch_waits_for_nothing_but_a_burst_and_never_beyond_a_cycle(
            first in 0u64..10_000,
            last in 0u64..10_000,
            cycle in 0u64..5000,
        ) {
            let at = launch(first, last, cycle);
            prop_assert!((first..=first + cycle).contains(&at));
            prop_assert!(at == first || at <= last + PAUSE);
        }
    }

    #[test]
    fn one_submission_by_itself_waits_a_cycle_and_its_launch_not_at_all() {
        assert_eq!(announce(500, 500, 1000), 1500);
        assert_eq!(launch(5000, 500, 1000), 5000);
        assert_eq!(announce(500, 500, 0), 500);
        assert_eq!(launch(500, 500, 0), 500);
    }
}
