//! The thread between the slots and the network. Where slots are frames it also has a device copy out of them
//! what has come ([`framing`](crate::framing)).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Engine, Memory, Slot, Status};

use crate::comms::Comms;
use crate::framing::Framing;
use crate::plan::Piece;
use crate::room::reached;
use crate::{Inner, Word, lock};

/// Nothing moved for this long: look less often. A piece takes longer than a nap.
const SPIN: Duration = Duration::from_micros(30);
const NAP: Duration = Duration::from_micros(20);
/// So long the last pieces have to leave when the exchange is closed.
const DRAIN: Duration = Duration::from_secs(5);
/// And copies that a device has begun.
const SETTLE: Duration = Duration::from_secs(1);

/// Pieces on their way, oldest first; each with its requests, the bytes of each, and its place in the result.
type Flights<'a> = VecDeque<(Vec<&'a Slot>, usize, usize)>;

/// What has come and is taken out of frames: how far each part of that is, in pieces.
#[derive(Default)]
struct Taking {
    /// Came, with its place, and is not copied out yet (on a device).
    waiting: VecDeque<(u32, usize, usize)>,
    came: u32,
    /// Pieces whose copies were issued to a device.
    issued: u32,
    /// Number of the next piece whose frames go back.
    emptied: u32,
}

/// Moves pieces until it is told to stop. The error says why it could not.
pub fn run(inner: &Inner, engine: &Engine, comms: &Comms) -> Result<(), String> {
    let mut taking = Taking::default();
    let end = carry(inner, engine, comms, &mut taking);
    taking.settle(inner);
    end
}

fn carry(inner: &Inner, engine: &Engine, comms: &Comms, taking: &mut Taking) -> Result<(), String> {
    let room = inner.room;
    let mut sends: VecDeque<Piece> = VecDeque::new();
    let mut receives: VecDeque<(Piece, usize)> = VecDeque::new();
    if let Some(gatherer) = inner.gatherer.get() {
        gatherer.enter().map_err(|error| error.to_string())?;
    }
    let (mut leaving, mut coming) = (Flights::new(), Flights::new());
    let (mut posted, mut sent) = (0u32, 0u32);
    let (mut awaited, mut arrived) = (0u32, 0u32);
    // A piece where some ranks have no request yet.
    let mut begun: Vec<&Slot> = Vec::new();
    let mut moved_at = Instant::now();
    let mut stopped: Option<Instant> = None;
    loop {
        let idle = sends.is_empty()
            && receives.is_empty()
            && leaving.is_empty()
            && coming.is_empty()
            && taking.is_done(inner, arrived);
        {
            let mut work = lock(&inner.work);
            while idle && !work.stop && work.sends.is_empty() && work.receives.is_empty() {
                work = inner
                    .bell
                    .wait(work)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                moved_at = Instant::now();
            }
            if work.stop {
                let drained = leaving.is_empty()
                    || *stopped.get_or_insert_with(Instant::now) + DRAIN < Instant::now();
                if drained || lock(&inner.failure).is_some() {
                    return Ok(());
                }
            }
            sends.extend(work.sends.drain(..));
            receives.extend(work.receives.drain(..));
        }
        let mut moved = taking.empty(inner);
        while let Some((piece, to)) = receives.front() {
            if reached(awaited, taking.free(inner).wrapping_add(inner.slots())) {
                break;
            }
            let memory = inner.receive(awaited, piece.length);
            let peer = piece.peer.unwrap_or_default() as usize;
            let Some(slot) = post(engine, &comms.receive, peer, memory)? else {
                break;
            };
            coming.push_back((vec![slot], piece.length, *to));
            awaited = awaited.wrapping_add(1);
            receives.pop_front();
            moved = true;
        }
        while let Some(piece) = sends.front() {
            if reached(posted, room.load(Word::Ready)) {
                break;
            }
            let memory = inner.send(posted, piece.length);
            let peers: Vec<usize> = match piece.peer {
                Some(peer) => vec![peer as usize],
                None => (1..inner.size)
                    .map(|distance| ((inner.rank + distance) % inner.size) as usize)
                    .collect(),
            };
            while let Some(peer) = peers.get(begun.len()) {
                let Some(slot) = post(engine, &comms.send, *peer, memory)? else {
                    break;
                };
                begun.push(slot);
            }
            if begun.len() < peers.len() {
                break;
            }
            leaving.push_back((std::mem::take(&mut begun), piece.length, 0));
            posted = posted.wrapping_add(1);
            sends.pop_front();
            moved = true;
        }
        while let Some((length, to)) = landed(&mut coming)? {
            taking.came(length, to);
            moved = true;
        }
        let now = taking.take(inner)?;
        if now != arrived {
            arrived = now;
            room.store(Word::Arrived, arrived);
            moved = true;
        }
        loop {
            match landed(&mut leaving) {
                Ok(None) => break,
                Ok(Some(_)) => {
                    sent = sent.wrapping_add(1);
                    room.store(Word::Sent, sent);
                    moved = true;
                }
                // A peer that has all it wants may be gone before its last word has come. That is
                // an error only if there is more.
                Err(why) if coming.is_empty() && receives.is_empty() && sends.is_empty() => {
                    taking.finish(inner, &mut arrived)?;
                    return if more(inner) { Err(why) } else { Ok(()) };
                }
                Err(why) => return Err(why),
            }
        }
        if moved {
            moved_at = Instant::now();
            continue;
        }
        let quiet = moved_at.elapsed();
        let copying = inner.gatherer.get().is_some() && taking.issued != arrived;
        if copying && quiet > inner.patience {
            return Err(format!(
                "the device has not copied for {:.0} s what came between nodes: other streams hold its copies up",
                quiet.as_secs_f64(),
            ));
        }
        let under_way = !leaving.is_empty() || !coming.is_empty();
        if under_way && quiet > inner.patience {
            return Err(format!(
                "nothing came or went between nodes for {:.0} s, with {} pieces awaited and {} not \
                 acknowledged: a rank has died or hangs{}",
                quiet.as_secs_f64(),
                coming.len(),
                leaving.len(),
                inner.framing.get().map_or(String::new(), Framing::doubt),
            ));
        }
        if quiet > SPIN {
            std::thread::sleep(NAP);
        } else {
            std::hint::spin_loop();
        }
    }
}

impl Taking {
    /// A piece has come, of this many bytes, for this place.
    fn came(&mut self, length: usize, to: usize) {
        self.waiting.push_back((self.came, length, to));
        self.came = self.came.wrapping_add(1);
    }

    /// Has a device copy out of frames what it may: how many pieces have arrived. Where slots are no frames, or the
    /// calling thread stands for the device, that is all that came.
    fn take(&mut self, inner: &Inner) -> Result<u32, String> {
        let room = inner.room;
        let (Some(framing), Some(gatherer)) = (inner.framing.get(), inner.gatherer.get()) else {
            self.waiting.clear();
            return Ok(self.came);
        };
        while let Some((piece, length, to)) = self.waiting.front().copied() {
            if !reached(room.load(Word::Begun), piece.wrapping_add(1)) {
                break;
            }
            let runs = framing.runs(piece, length);
            gatherer
                .copy_in(framing.stride(), &runs, to)
                .and_then(|()| gatherer.write(room.address(Word::Consumed), piece.wrapping_add(1)))
                .map_err(|error| error.to_string())?;
            self.waiting.pop_front();
            self.issued = piece.wrapping_add(1);
        }
        Ok(room.load(Word::Consumed))
    }

    /// Takes out what has come, before a pump that has no more to do ends. A device that does not get to it in time is
    /// told by the patience of those who wait.
    fn finish(&mut self, inner: &Inner, arrived: &mut u32) -> Result<(), String> {
        let began = Instant::now();
        loop {
            self.empty(inner);
            let now = self.take(inner)?;
            if now != *arrived {
                *arrived = now;
                inner.room.store(Word::Arrived, now);
            }
            let over = began.elapsed() > inner.patience || lock(&inner.work).stop;
            if self.is_done(inner, *arrived) || over {
                return Ok(());
            }
            std::thread::sleep(NAP);
        }
    }

    /// Waits for the copies that were issued: callers may use the result's memory for something else when they hear of
    /// the end. Not for long: the device may wait for the words that tell of the end.
    fn settle(&self, inner: &Inner) {
        let began = Instant::now();
        while inner.gatherer.get().is_some()
            && !reached(inner.room.load(Word::Consumed), self.issued)
            && began.elapsed() < SETTLE
        {
            std::thread::sleep(NAP);
        }
    }

    /// Frames of pieces that were taken out go back to the card; whether there were any.
    fn empty(&mut self, inner: &Inner) -> bool {
        let Some(framing) = inner.framing.get() else {
            return false;
        };
        let consumed = inner.room.load(Word::Consumed);
        let mut any = false;
        while self.emptied != consumed && reached(consumed, self.emptied) {
            framing.give_back(self.emptied);
            self.emptied = self.emptied.wrapping_add(1);
            any = true;
        }
        any
    }

    /// Receive slots that were free again, counted from the start.
    fn free(&self, inner: &Inner) -> u32 {
        match inner.framing.get() {
            Some(_) => self.emptied,
            None => inner.room.load(Word::Consumed),
        }
    }

    /// Whether all that came was taken out, and its frames went back.
    fn is_done(&self, inner: &Inner, arrived: u32) -> bool {
        inner.framing.get().is_none() || (arrived == self.came && self.emptied == self.came)
    }
}

/// Waits for work, or for the end: whether there is work.
fn more(inner: &Inner) -> bool {
    let mut work = lock(&inner.work);
    while !work.stop && work.sends.is_empty() && work.receives.is_empty() {
        work = inner
            .bell
            .wait(work)
            .unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    !work.stop
}

#[allow(unsafe_code, reason = "slots are lent to the engine")]
fn post<'a>(
    engine: &Engine,
    comms: &'a [Option<std::sync::Arc<Comm>>],
    peer: usize,
    memory: Memory,
) -> Result<Option<&'a Slot>, String> {
    let Some(Some(comm)) = comms.get(peer) else {
        return Err(format!(
            "there is no comm with rank {peer}: a bug in Evener"
        ));
    };
    // SAFETY: the slot is the pump's until `sent` or `arrived` says otherwise, which is after the
    // request is finished; at the end all comms are released before the exchange is closed. Only
    // this thread posts.
    unsafe { engine.post(comm, memory) }
        .map_err(|error| format!("rank {peer} of the group cannot be reached: {error}"))
}

/// The oldest piece, if it has landed: its bytes, and its place in the result.
fn landed(flights: &mut Flights<'_>) -> Result<Option<(usize, usize)>, String> {
    let Some((slots, length, to)) = flights.front_mut() else {
        return Ok(None);
    };
    let piece = (*length, *to);
    let mut wrong = None;
    slots.retain(|slot| match slot.test() {
        Status::Pending => true,
        Status::Done(bytes) if bytes == *length => false,
        Status::Done(bytes) => {
            wrong = Some(format!(
                "a piece of {bytes} bytes came, not of {length}: ranks disagree"
            ));
            false
        }
        Status::Failed(_) => {
            wrong = Some("the connection to a peer failed: it has died, or no path is left".into());
            false
        }
    });
    match wrong {
        Some(why) => Err(why),
        None if slots.is_empty() => {
            flights.pop_front();
            Ok(Some(piece))
        }
        None => Ok(None),
    }
}
