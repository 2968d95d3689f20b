//! What a lane hands to its paths: their own frames first, then what must be said, then chunks.

use std::time::Duration;

use super::{Lane, Statement, Transmit};
use crate::Side;
use crate::path::{PathId, PathState};
use crate::wire::{Frame, HEADER, PACKET};

impl Lane {
    /// The next frame for a path that has room. For a chunk, its bytes follow the header.
    pub fn transmit(&mut self, id: PathId, now: Duration) -> Option<Transmit> {
        debug_assert_eq!(
            self.live,
            self.paths
                .values()
                .filter(|path| path.state == PathState::Live)
                .count()
        );
        let live = self.live as u64;
        let least = self.least_piece();
        let path = self.paths.get_mut(&id)?;
        let own = path.own.pop_front();
        let limit = path.window.chunk(least);
        let usable = path.is_awake(now) || live == 0;
        let frame = match own {
            Some(frame) => Some(frame),
            None if !usable => None,
            None => self.next_statement().or_else(|| {
                let share = self.backlog / live.max(1);
                let share = u32::try_from(share).unwrap_or(u32::MAX) / PACKET * PACKET;
                let share = share.max(least as u32);
                self.next_chunk(id, limit.min(share), now)
            }),
        }?;
        self.hand(id, frame, now)
    }

    /// The next frame for a path that must not have chunks now.
    pub fn transmit_statement(&mut self, id: PathId, now: Duration) -> Option<Transmit> {
        if !self.paths.get(&id)?.is_awake(now) {
            return None;
        }
        let frame = self.next_statement()?;
        self.hand(id, frame, now)
    }

    /// Whether there is anything to be said, chunks left aside.
    pub fn has_statement(&self) -> bool {
        !self.unsaid.is_empty()
    }

    /// The next frame that belongs to this path and no other.
    pub fn transmit_own(&mut self, id: PathId, now: Duration) -> Option<Transmit> {
        let path = self.paths.get_mut(&id)?;
        let frame = path.own.pop_front()?;
        self.hand(id, frame, now)
    }

    /// Whether [`Lane::transmit`] would find something for any live path.
    pub fn has_work(&self) -> bool {
        self.has_frames() || self.paths.values().any(|path| !path.own.is_empty())
    }

    /// The same, without what belongs to one path alone.
    pub fn has_frames(&self) -> bool {
        !self.unsaid.is_empty() || !self.ready.is_empty()
    }

    /// About how many bytes wait for a path.
    pub fn backlog(&self) -> u64 {
        self.backlog
    }

    fn next_statement(&mut self) -> Option<Frame> {
        while let Some(statement) = self.unsaid.pop_front() {
            let frame = match statement {
                Statement::Open(comm) => self
                    .sends
                    .get(&comm)
                    .and_then(|send| send.opening)
                    .map(|listener| Frame::Open { comm, listener }),
                Statement::Opened(comm, accepted) => Some(Frame::Opened { comm, accepted }),
                Statement::Ack(comm) => self.receives.get_mut(&comm).map(|receive| {
                    receive.ack_queued = false;
                    Frame::Ack {
                        comm,
                        floor: receive.floor,
                        beyond: receive.beyond(),
                    }
                }),
                Statement::Credit(comm, message) => self
                    .incoming(comm, message)
                    .filter(|incoming| !incoming.complete)
                    .and_then(|incoming| incoming.room)
                    .map(|room| Frame::Credit {
                        comm,
                        message,
                        room,
                    }),
                Statement::Refuse(comm, message) => self
                    .incoming(comm, message)
                    .and_then(|incoming| Some((incoming.total?, incoming.room?)))
                    .map(|(total, room)| Frame::Refuse {
                        comm,
                        message,
                        total,
                        room,
                    }),
                Statement::CloseSend(comm) => self
                    .closing
                    .contains(&(Side::Send, comm))
                    .then_some(Frame::CloseSend { comm }),
                Statement::CloseReceive(comm) => self
                    .closing
                    .contains(&(Side::Receive, comm))
                    .then_some(Frame::CloseReceive { comm }),
                Statement::Closed(comm, of_send) => Some(Frame::Closed { comm, of_send }),
                Statement::Gone(path) => Some(Frame::Gone { path: path.0 }),
            };
            if frame.is_some() {
                return frame;
            }
        }
        None
    }

    fn incoming(&self, comm: u64, message: u64) -> Option<&crate::receive::Incoming> {
        self.receives.get(&comm)?.get(message)
    }

    fn next_chunk(&mut self, id: PathId, limit: u32, now: Duration) -> Option<Frame> {
        while let Some(&(comm, number)) = self.ready.front() {
            let message = self
                .sends
                .get_mut(&comm)
                .and_then(|send| send.get(number))
                .filter(|message| message.pending());
            let Some(message) = message else {
                self.ready.pop_front();
                continue;
            };
            let total = message.total;
            let piece = message.take(id, limit)?;
            if let Some(path) = self.paths.get(&id) {
                let bytes = HEADER as u64 + u64::from(piece.length);
                let due = path.due(piece.length, now);
                message.taken(path.given + bytes, due, (now, self.ahead + bytes));
            }
            if !message.pending() {
                self.ready.pop_front();
            }
            self.backlog = self.backlog.saturating_sub(u64::from(piece.length));
            return Some(Frame::Chunk {
                comm,
                message: number,
                offset: piece.offset,
                length: piece.length,
                total,
                // Its path's: see `on_sent`.
                stamp: 0,
                heard: 0,
            });
        }
        self.backlog = 0;
        None
    }
}
