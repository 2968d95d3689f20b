//! The comms to and from all ranks, and the first packet over each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Engine, Memory, Slot, Status};

use crate::Error;
use crate::framing::Framing;

/// A comm in each direction, by rank.
pub(crate) struct Comms {
    pub(crate) send: Vec<Option<Arc<Comm>>>,
    pub(crate) receive: Vec<Option<Arc<Comm>>>,
}

impl Comms {
    pub(crate) fn new(size: u32) -> Comms {
        Comms {
            send: vec![None; size as usize],
            receive: vec![None; size as usize],
        }
    }

    /// Memory of all requests is in frames; `false`: of a comm it cannot be.
    pub(crate) fn frame(&self, engine: &Engine, framing: &Framing) -> bool {
        let mut all = self.send.iter().chain(&self.receive).flatten();
        all.all(|comm| engine.frame(comm, framing.framed()))
    }

    /// One whole packet to each rank and from each: a link between may take no packets of this size, and that is to be
    /// known before anything depends on it.
    #[allow(unsafe_code, reason = "frames and words are lent to the engine")]
    pub(crate) fn try_frames(
        &self,
        engine: &Engine,
        framing: &Framing,
        limit: Duration,
    ) -> Result<(), Error> {
        let end = Instant::now() + limit;
        let mut waited: Vec<(usize, &Arc<Comm>, Memory, Option<&Slot>)> = Vec::new();
        for (place, side) in [&self.receive, &self.send].into_iter().enumerate() {
            for (peer, comm) in side.iter().enumerate() {
                let (frame, word) = framing.trial(peer);
                let memory = if place == 0 { word } else { frame };
                waited.extend(comm.iter().map(|comm| (peer, comm, memory, None)));
            }
        }
        loop {
            let (mut failed, mut left) = (None, Vec::new());
            for (peer, comm, memory, slot) in waited {
                let slot = match slot {
                    Some(slot) => Some(slot),
                    // SAFETY: frames and words are this exchange's until the request is finished, or its comm is
                    // released by the caller of this.
                    None => unsafe { engine.post(comm, memory) }?,
                };
                match slot.map(Slot::test) {
                    Some(Status::Done(_)) => {}
                    Some(Status::Failed(_)) => failed = Some(peer),
                    Some(Status::Pending) | None => left.push((peer, comm, memory, slot)),
                }
            }
            let late = left.first().map(|(peer, ..)| *peer);
            if failed.is_none() && late.is_none() {
                framing.give_all_back();
                return Ok(());
            }
            if let Some(peer) = failed.or(late.filter(|_| Instant::now() > end)) {
                return Err(Error::Failed(format!(
                    "no whole packet passes between this rank and rank {peer} of the group{}",
                    framing.doubt()
                )));
            }
            waited = left;
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    pub(crate) fn release(&self, engine: &Engine) {
        for comm in self.send.iter().chain(&self.receive).flatten() {
            engine.release(comm);
        }
    }
}
