//! What a lane makes of the frames that come, and where the bytes of chunks belong.

use std::time::Duration;

use super::{Event, Lane, Statement, Violation, Why};
use crate::Side;
use crate::path::PathId;
use crate::receive::Place;
use crate::wire::Frame;

impl Lane {
    /// A frame came, after `since`, when the driver found nothing on the path. A chunk's bytes follow
    /// it: see [`Lane::place`] and [`Lane::filled`].
    ///
    /// # Errors
    /// [`Violation`] where no rule allows the chunk.
    pub fn receive(
        &mut self,
        id: PathId,
        frame: &Frame,
        since: Duration,
        now: Duration,
    ) -> Result<(), Violation> {
        match *frame {
            Frame::Open { comm, listener } => match self.receives.get(&comm) {
                Some(receive) if receive.accepted => {
                    self.unsaid.push_back(Statement::Opened(comm, true));
                }
                Some(_) => {}
                None => {
                    if !self.closing.contains(&(Side::Receive, comm)) && self.offered.insert(comm) {
                        self.events.push_back(Event::Open { comm, listener });
                    }
                }
            },
            Frame::Opened { comm, accepted } => {
                if let Some(send) = self.sends.get_mut(&comm)
                    && send.opening.take().is_some()
                {
                    self.events.push_back(Event::Opened { comm, accepted });
                }
            }
            Frame::Chunk {
                comm,
                message,
                length,
                total,
                stamp,
                heard,
                ..
            } => {
                if let Some(path) = self.paths.get_mut(&id) {
                    path.on_stamp((stamp, length), since, now, &mut self.quickest);
                }
                self.hear(id, heard, now);
                let Some(receive) = self.receives.get_mut(&comm) else {
                    return Ok(());
                };
                let whole = u64::from(length) == total && total <= self.config.eager_bytes;
                let outcome = receive
                    .chunk(message, total, whole)
                    .map_err(|_| Violation)?;
                self.settle(comm, message, outcome);
            }
            Frame::Heard { heard } => self.hear(id, heard, now),
            Frame::Credit {
                comm,
                message,
                room,
            } => {
                if let Some(send) = self.sends.get_mut(&comm)
                    && send.credit(message, room)
                    && let Some(outgoing) = send.get(message)
                {
                    self.backlog += outgoing.backlog();
                    self.ready.push_back((comm, message));
                }
            }
            Frame::Ack {
                comm,
                floor,
                beyond,
            } => {
                if let Some(send) = self.sends.get_mut(&comm) {
                    let (complete, granted) = send.acknowledged(floor, beyond);
                    for (message, length) in complete {
                        self.events.push_back(Event::Sent {
                            comm,
                            message,
                            length,
                        });
                    }
                    for message in granted {
                        self.backlog += send.get(message).map_or(0, |m| m.backlog());
                        self.ready.push_back((comm, message));
                    }
                }
            }
            Frame::Refuse {
                comm,
                message,
                room,
                ..
            } => {
                if let Some(send) = self.sends.get_mut(&comm)
                    && let Some(outgoing) = send.get(message)
                {
                    let total = outgoing.total;
                    self.events.push_back(Event::Failed {
                        comm,
                        side: Side::Send,
                        why: Why::Oversize { total, room },
                    });
                }
            }
            Frame::CloseSend { comm } => {
                self.unsaid.push_back(Statement::Closed(comm, true));
                self.offered.remove(&comm);
                if self.receives.contains_key(&comm) {
                    self.events.push_back(Event::Failed {
                        comm,
                        side: Side::Receive,
                        why: Why::PeerClosed,
                    });
                }
            }
            Frame::CloseReceive { comm } => {
                self.unsaid.push_back(Statement::Closed(comm, false));
                if self.sends.contains_key(&comm) {
                    self.events.push_back(Event::Failed {
                        comm,
                        side: Side::Send,
                        why: Why::PeerClosed,
                    });
                }
            }
            Frame::Closed { comm, of_send } => {
                let side = if of_send { Side::Send } else { Side::Receive };
                self.closing.remove(&(side, comm));
            }
            Frame::Ping { stamp } => {
                if let Some(path) = self.paths.get_mut(&id) {
                    path.own.push_back(Frame::Pong { stamp });
                }
            }
            Frame::Pong { stamp } => {
                if let Some(path) = self.paths.get_mut(&id)
                    && path.on_pong(stamp, now)
                {
                    self.count_live();
                    self.events.push_back(Event::Recovered(id));
                }
            }
            Frame::Gone { path } => {
                let path = PathId(path);
                if self.paths.contains_key(&path) {
                    self.events.push_back(Event::Died(path));
                    self.path_down(path, now);
                }
            }
        }
        Ok(())
    }

    /// The peer says how long chunks waited that went over a path.
    fn hear(&mut self, id: PathId, heard: u32, now: Duration) {
        if let Some(path) = self.paths.get_mut(&id)
            && heard != 0
        {
            // The mean of what is heard lately, over all paths.
            self.wait += (f64::from(heard - 1) - self.wait) / 64.0;
            path.window.heard(heard - 1, self.wait, self.rate, now);
        }
    }

    /// Where the bytes of a chunk belong now. Ask before each read.
    pub fn place(&self, comm: u64, message: u64) -> Place {
        self.receives
            .get(&comm)
            .map_or(Place::Nowhere, |receive| receive.place(message))
    }

    /// All bytes of a chunk are where [`Lane::place`] said.
    pub fn filled(&mut self, comm: u64, message: u64, offset: u64, length: u32) {
        if let Some(receive) = self.receives.get_mut(&comm) {
            let outcome = receive.filled(message, offset, length);
            self.settle(comm, message, outcome);
        }
    }
}
