//! When a run is over: after this many messages, or when a file is there, for what has to outlast an event.
//!
//! Both sides must then agree on a number of messages while they exchange them. Rank 0 looks for the file;
//! when it is there, it posts nothing more and says how many messages the furthest of its comms has posted.
//! Rank 1 takes the greater of this and its own number, and answers with it: all comms go on to it.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::DriveError;
use crate::scenario::Control;

/// How often the file, or what the peer says, is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// See the module.
pub(crate) enum Until<'a> {
    /// This many messages on each comm.
    Count(usize),
    /// Not known yet.
    Open {
        control: &'a mut Control,
        /// What rank 0 looks for; the other waits for its word.
        file: Option<&'a Path>,
        /// What rank 0 has said.
        said: Option<usize>,
        looked: Instant,
    },
}

impl<'a> Until<'a> {
    /// Until `file` is there.
    pub fn file(rank: u32, file: &'a Path, control: &'a mut Control) -> Until<'a> {
        Until::Open {
            control,
            file: (rank == 0).then_some(file),
            said: None,
            looked: Instant::now(),
        }
    }

    /// As many messages may be posted on a comm.
    pub fn most(&self) -> usize {
        match self {
            Until::Count(count) => *count,
            Until::Open { said, .. } => said.unwrap_or(usize::MAX),
        }
    }

    /// How many messages a comm has in the end, where it is known.
    pub fn count(&self) -> Option<usize> {
        match self {
            Until::Count(count) => Some(*count),
            Until::Open { .. } => None,
        }
    }

    /// Looks whether it is time to end. `posted`: by the furthest of this side's comms.
    pub fn look(&mut self, now: Instant, posted: impl FnOnce() -> usize) -> Result<(), DriveError> {
        let Until::Open {
            control,
            file,
            said,
            looked,
        } = self
        else {
            return Ok(());
        };
        if now - *looked < LOOK {
            return Ok(());
        }
        *looked = now;
        if let (Some(file), None) = (file, &said) {
            if file.exists() {
                let posted = posted();
                control.say(posted as u64)?;
                *said = Some(posted);
            }
        } else if let Some(theirs) = control.heard()? {
            let mut count = theirs as usize;
            if said.is_none() {
                count = count.max(posted());
                control.say(count as u64)?;
            }
            *self = Until::Count(count);
        }
        Ok(())
    }
}
