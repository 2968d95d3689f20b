//! The sending half of a comm in one lane: messages between `isend` and the peer's acknowledgement.
//!
//! A message is *granted* once it may be sent: its credit is there, or it is small and an eager slot
//! is free. A granted message has bytes that were never sent (from `next` on) and pieces that must
//! go again (`again`); what was pulled by a path and is not acknowledged is in `out`.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::line::{self, LINE};
use crate::path::{PathId, SLOW};
use crate::wire::{MAX_CHUNK, WHOLE};

/// Messages of one comm and lane that may be unfinished at a time.
pub const WINDOW: u64 = 64;

/// Bytes `offset..offset + length` of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub length: u32,
}

/// A piece that a path has taken.
#[derive(Debug, Clone, Copy)]
struct Carried {
    path: PathId,
    piece: Piece,
    /// The path's count of bytes at the piece's end.
    end: u64,
    /// From then on it is late, where its path stands still.
    due: Duration,
    /// When it was given to it, and how much all paths had to deliver then, with it: see [`Pace`].
    given: (Duration, u64),
    /// It was offered to others.
    again: bool,
}

/// How quick all paths are together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Bytes per second, above 0.
    pub rate: f64,
    /// The shortest round trip.
    pub trip: Duration,
}

impl Pace {
    /// When a piece is late that was given to a path that moves: half as long again as all paths take
    /// for what was ahead of it, and two round trips.
    fn late(&self, (at, ahead): (Duration, u64)) -> Duration {
        let fair = Duration::from_secs_f64((ahead as f64 / self.rate).min(60.0));
        at.saturating_add(SLOW.max(fair * 3 / 2 + self.trip * 2))
    }
}

#[derive(Debug)]
pub(crate) struct Outgoing {
    pub total: u64,
    pub done: bool,
    granted: bool,
    eager: bool,
    next: u64,
    again: Vec<Piece>,
    out: Vec<Carried>,
}

impl Outgoing {
    fn new(total: u64) -> Self {
        Outgoing {
            total,
            done: false,
            granted: false,
            eager: false,
            next: 0,
            // A message without bytes is one chunk without bytes.
            again: if total == 0 {
                vec![Piece {
                    offset: 0,
                    length: 0,
                }]
            } else {
                Vec::new()
            },
            out: Vec::new(),
        }
    }

    pub fn pending(&self) -> bool {
        self.granted && !self.done && (!self.again.is_empty() || self.next < self.total)
    }

    /// Bytes that wait for a path.
    pub fn backlog(&self) -> u64 {
        if self.granted && !self.done {
            self.total - self.next + self.again.iter().map(|p| u64::from(p.length)).sum::<u64>()
        } else {
            0
        }
    }

    /// The next piece, of `limit` bytes at most, for `path`.
    pub fn take(&mut self, path: PathId, limit: u32) -> Option<Piece> {
        if !self.pending() {
            return None;
        }
        let piece = if let Some(piece) = self.again.pop() {
            piece
        } else {
            let left = self.total - self.next;
            let limit = u64::from(limit.max(LINE as u32));
            let length = if self.total <= WHOLE || left <= limit {
                left
            } else if left < 2 * limit {
                // Not a crumb at the end.
                line::half(left)
            } else {
                line::cut(limit, left)
            };
            let length = length.min(u64::from(MAX_CHUNK)) as u32;
            let piece = Piece {
                offset: self.next,
                length,
            };
            self.next += u64::from(length);
            piece
        };
        self.out.push(Carried {
            path,
            piece,
            end: u64::MAX,
            due: Duration::MAX,
            given: (Duration::MAX, 0),
            again: false,
        });
        Some(piece)
    }

    /// Where the piece that was taken last ends in its path's count of bytes, when it is late if that
    /// stands still; when it was given, and how much all paths had to deliver then.
    pub fn taken(&mut self, end: u64, due: Duration, given: (Duration, u64)) {
        if let Some(last) = self.out.last_mut() {
            (last.end, last.due, last.given) = (end, due, given);
        }
    }

    /// Pieces that are late, and that their path has not confirmed, go again, once: the paths they were
    /// on. `standing`: what a path has confirmed, and whether it stands still; `pace`: where there is
    /// nothing else to send, how long pieces may take on a path that moves.
    pub fn offer_late(
        &mut self,
        pace: Option<Pace>,
        now: Duration,
        standing: impl Fn(PathId) -> Option<(u64, bool)>,
        slow: &mut Vec<PathId>,
    ) -> bool {
        let before = self.again.len();
        for carried in &mut self.out {
            let behind = pace.is_some_and(|pace| pace.late(carried.given) <= now);
            if carried.again || !(behind || carried.due <= now) {
                continue;
            }
            // Of a path that is gone, all has gone again.
            let Some((confirmed, still)) = standing(carried.path) else {
                continue;
            };
            let late = behind || (still && carried.due <= now);
            if late && confirmed < carried.end {
                carried.again = true;
                self.again.push(carried.piece);
                slow.push(carried.path);
            }
        }
        self.again.len() > before
    }

    /// What `path` carried goes again. Whether there was any.
    pub fn give_back(&mut self, path: PathId) -> bool {
        let before = self.again.len();
        let again = &mut self.again;
        self.out.retain(|carried| {
            if carried.path == path {
                again.push(carried.piece);
            }
            carried.path != path
        });
        self.again.len() > before
    }
}

#[derive(Debug)]
pub(crate) struct SendComm {
    /// Number of `messages[0]`.
    pub base: u64,
    pub messages: VecDeque<Outgoing>,
    /// Credits that came before their message.
    credits: BTreeMap<u64, u64>,
    eager_slots: usize,
    eager_bytes: u64,
    eager_used: usize,
    /// The listener, until the peer has answered.
    pub opening: Option<u64>,
}

impl SendComm {
    pub fn new(eager_slots: usize, eager_bytes: u64, opening: Option<u64>) -> Self {
        SendComm {
            base: 0,
            messages: VecDeque::new(),
            credits: BTreeMap::new(),
            eager_slots,
            eager_bytes,
            eager_used: 0,
            opening,
        }
    }

    pub fn get(&mut self, message: u64) -> Option<&mut Outgoing> {
        let index = message.checked_sub(self.base)?;
        self.messages.get_mut(usize::try_from(index).ok()?)
    }

    /// Takes a message; its number, or `None` where the window is full.
    pub fn push(&mut self, total: u64) -> Option<u64> {
        if self.messages.len() as u64 >= WINDOW {
            return None;
        }
        let number = self.base + self.messages.len() as u64;
        self.messages.push_back(Outgoing::new(total));
        if let Some(room) = self.credits.remove(&number) {
            self.grant(number, room);
        } else if total <= self.eager_bytes && self.eager_used < self.eager_slots {
            self.eager_used += 1;
            let message = self.messages.back_mut()?;
            message.granted = true;
            message.eager = true;
        }
        Some(number)
    }

    fn grant(&mut self, number: u64, room: u64) {
        if let Some(message) = self.get(number)
            && !message.granted
        {
            message.granted = true;
            if room < message.total {
                // Nothing of it fits: say how long it is, and let the receiver refuse.
                message.next = message.total;
                message.again = vec![Piece {
                    offset: 0,
                    length: 0,
                }];
            }
        }
    }

    /// A credit came. Whether the message can be sent now and could not before.
    pub fn credit(&mut self, number: u64, room: u64) -> bool {
        if number < self.base {
            return false;
        }
        match self.get(number) {
            Some(message) if message.done || message.granted => false,
            Some(_) => {
                self.grant(number, room);
                true
            }
            None => {
                if number < self.base + WINDOW {
                    self.credits.insert(number, room);
                }
                false
            }
        }
    }

    /// The peer has everything below `floor` and what `beyond` names. The messages that this
    /// completes, and those that an eager slot is free for now.
    pub fn acknowledged(&mut self, floor: u64, beyond: u64) -> (Vec<(u64, u64)>, Vec<u64>) {
        let (mut complete, base) = (Vec::new(), self.base);
        for (index, message) in self.messages.iter_mut().enumerate() {
            let number = base + index as u64;
            let known = number < floor
                || (number > floor
                    && number - floor <= 64
                    && beyond >> (number - floor - 1) & 1 == 1);
            if known && !message.done {
                message.done = true;
                message.out.clear();
                message.again.clear();
                self.eager_used -= usize::from(message.eager);
                complete.push((number, message.total));
            }
        }
        while self.messages.front().is_some_and(|message| message.done) {
            self.messages.pop_front();
            self.base += 1;
        }
        let mut granted = Vec::new();
        for (index, message) in self.messages.iter_mut().enumerate() {
            if self.eager_used >= self.eager_slots {
                break;
            }
            if !message.granted && message.total <= self.eager_bytes {
                self.eager_used += 1;
                message.granted = true;
                message.eager = true;
                granted.push(self.base + index as u64);
            }
        }
        (complete, granted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{HEADER, PACKET};

    /// The lengths of the pieces of a message, cut by a limit of this many packets.
    fn pieces(total: u64, packets: u32) -> Vec<u32> {
        let mut message = Outgoing::new(total);
        message.granted = true;
        let next = || message.take(PathId(0), packets * PACKET);
        let pieces: Vec<Piece> = std::iter::from_fn(next).collect();
        for (one, next) in pieces.iter().zip(&pieces[1..]) {
            assert_eq!(one.offset + u64::from(one.length), next.offset);
            assert_eq!(next.offset % LINE, 0);
        }
        pieces.iter().map(|piece| piece.length).collect()
    }

    #[test]
    fn pieces_with_their_headers_fit_into_packets_and_none_is_a_crumb() {
        for total in [1 << 20, (1 << 20) + 100, 65_537, 100_000, 122_880, 122_881] {
            for packets in 1..=4 {
                let pieces = pieces(total, packets);
                assert_eq!(pieces.iter().map(|one| u64::from(*one)).sum::<u64>(), total);
                for length in &pieces {
                    // MTUs of 1500 and of 9000.
                    for packet in [45 * 1448, 7 * 8948] {
                        let bytes = *length as usize + HEADER;
                        assert!(bytes.div_ceil(packet) <= packets as usize, "{length}");
                    }
                    assert!(u64::from(*length) >= total.min(u64::from(PACKET) / 2 - LINE));
                }
            }
        }
        assert_eq!(pieces(1 << 16, 1), [1 << 16], "never split");
    }
}
