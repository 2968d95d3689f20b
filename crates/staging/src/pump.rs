//! The thread between the slots and the network.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Engine, Memory, Slot, Status};

use crate::comms::Comms;
use crate::pieces::Piece;
use crate::room::reached;
use crate::{Inner, Word, lock};

/// Nothing moved for this long: look less often. A piece takes longer than a nap.
const SPIN: Duration = Duration::from_micros(30);
const NAP: Duration = Duration::from_micros(20);
/// So long the last pieces have to leave when the exchange is closed.
const DRAIN: Duration = Duration::from_secs(5);

/// Pieces on their way, oldest first; each with its requests, and the bytes of each.
type Flights<'a> = VecDeque<(Vec<&'a Slot>, usize)>;

/// Moves pieces until it is told to stop. The error says why it could not.
pub fn run(inner: &Inner, engine: &Engine, comms: &Comms) -> Result<(), String> {
    let room = inner.room;
    let mut sends: VecDeque<Piece> = VecDeque::new();
    let mut receives: VecDeque<Piece> = VecDeque::new();
    let (mut leaving, mut coming) = (Flights::new(), Flights::new());
    let (mut posted, mut sent) = (0u32, 0u32);
    let (mut awaited, mut arrived) = (0u32, 0u32);
    // A piece where some ranks have no request yet.
    let mut begun: Vec<&Slot> = Vec::new();
    let mut moved_at = Instant::now();
    let mut stopped: Option<Instant> = None;
    loop {
        let idle =
            sends.is_empty() && receives.is_empty() && leaving.is_empty() && coming.is_empty();
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
                let next = sends.front().or(work.sends.front());
                let ready = next.is_some() && !reached(posted, room.load(Word::Ready));
                let drained = (leaving.is_empty() && !ready)
                    || *stopped.get_or_insert_with(Instant::now) + DRAIN < Instant::now();
                if drained || lock(&inner.failure).is_some() {
                    return Ok(());
                }
            }
            sends.extend(work.sends.drain(..));
            receives.extend(work.receives.drain(..));
        }
        let mut moved = false;
        while let Some(piece) = receives.front() {
            if reached(awaited, room.load(Word::Consumed).wrapping_add(room.slots)) {
                break;
            }
            let memory = room.slot(room.receive, awaited, piece.length);
            let peer = piece.peer.unwrap_or_default() as usize;
            let Some(slot) = post(engine, &comms.receive, peer, memory)? else {
                break;
            };
            coming.push_back((vec![slot], piece.length));
            awaited = awaited.wrapping_add(1);
            receives.pop_front();
            moved = true;
        }
        while let Some(piece) = sends.front() {
            if reached(posted, room.load(Word::Ready)) {
                break;
            }
            let memory = room.slot(room.send, posted, piece.length);
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
            leaving.push_back((std::mem::take(&mut begun), piece.length));
            posted = posted.wrapping_add(1);
            sends.pop_front();
            moved = true;
        }
        while landed(&mut coming)? {
            arrived = arrived.wrapping_add(1);
            room.store(Word::Arrived, arrived);
            moved = true;
        }
        loop {
            match landed(&mut leaving) {
                Ok(false) => break,
                Ok(true) => {
                    sent = sent.wrapping_add(1);
                    room.store(Word::Sent, sent);
                    moved = true;
                }
                // A peer that has all it wants may be gone before its last word has come. That is
                // an error only if there is more.
                Err(why) if coming.is_empty() && receives.is_empty() && sends.is_empty() => {
                    leave(inner, &mut leaving);
                    // A caller waits until its pieces have left, or never will.
                    room.store(Word::Sent, posted);
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
        let under_way = !leaving.is_empty() || !coming.is_empty();
        if under_way && quiet > inner.patience {
            return Err(format!(
                "nothing came or went between nodes for {:.0} s, with {} pieces awaited and {} not \
                 acknowledged: a rank has died or hangs",
                quiet.as_secs_f64(),
                coming.len(),
                leaving.len(),
            ));
        }
        if quiet > SPIN {
            std::thread::sleep(NAP);
        } else {
            std::hint::spin_loop();
        }
    }
}

/// One peer is gone: waits until those that are not have the last pieces, not for long where the exchange is
/// closed meanwhile.
fn leave(inner: &Inner, leaving: &mut Flights<'_>) {
    let began = Instant::now();
    let limit = || match lock(&inner.work).stop {
        true => DRAIN,
        false => inner.patience,
    };
    while !leaving.is_empty() && began.elapsed() < limit() {
        leaving.retain_mut(|(slots, _)| {
            slots.retain(|slot| matches!(slot.test(), Status::Pending));
            !slots.is_empty()
        });
        std::thread::sleep(NAP);
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

/// Whether the oldest piece has landed, which is then no flight any more.
fn landed(flights: &mut Flights<'_>) -> Result<bool, String> {
    let Some((slots, length)) = flights.front_mut() else {
        return Ok(false);
    };
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
            Ok(true)
        }
        None => Ok(false),
    }
}
