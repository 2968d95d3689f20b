//! Sending without the kernel's copy (MSG_ZEROCOPY, Documentation/networking/msg_zerocopy.rst of
//! Linux), tried on each connection and dropped where it is no faster.
//!
//! # Trying
//! The first large piece of a message that a connection sends, once its path is known to be quick, goes
//! without a copy. The kernel says
//! later that it has done with the memory, and whether it had to copy after all: it does where the
//! bytes stay on the machine (loopback, a veth of a container) and where the card cannot gather. Then
//! the call was dearer than a plain one, and the connection goes back to plain ones for good; so it
//! does where the kernel refuses (memory that it cannot pin, the limit of locked memory).
//!
//! # Why the memory is safe
//! The kernel reads the memory until its notice comes, or until the socket has let go of what it has
//! queued. A message stays pinned ([`link`](crate::link)) for as long: it is finished, and NCCL gets its
//! buffer back, with the last notice and not with the peer's acknowledgement. Notices come when the
//! peer's kernel has acknowledged, so on a path that is gone they would come late: a path that is
//! suspect and holds memory is closed. Closing disconnects the socket first, which empties its queue.
//! A packet that is in a card's queue at that moment may still go out with newer bytes; its connection
//! is reset right behind it, and at the other end the message is over.
//!
//! Headers are small and of this process: they are always copied.

use std::collections::VecDeque;

use crate::sys::Notice;

/// A piece must be so large that pinning pages costs less than copying them: a packet of the protocol.
pub const LEAST: usize = evener_proto::wire::PACKET as usize;

/// When to send without a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Never.
    #[default]
    Off,
    /// Where the kernel does not copy.
    Auto,
    /// Even where it does: for tests.
    Always,
}

/// How a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verdict {
    /// Not asked yet, or never to be.
    #[default]
    Untried,
    /// One piece is under way, its notice has not come.
    Asked,
    /// The kernel does not copy.
    Works,
    /// The kernel copies.
    Copied,
    /// The kernel does not want to.
    Refused,
}

impl Verdict {
    /// All, in their order.
    pub const ALL: [Verdict; 5] = [
        Verdict::Untried,
        Verdict::Asked,
        Verdict::Works,
        Verdict::Copied,
        Verdict::Refused,
    ];

    /// As in the statistics.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Untried => "untried",
            Verdict::Asked => "asked",
            Verdict::Works => "works",
            Verdict::Copied => "copied",
            Verdict::Refused => "refused",
        }
    }
}

/// Calls whose memory the kernel may still read, all of one piece of a message.
#[derive(Debug, Clone, Copy)]
struct Flight {
    comm: u64,
    message: u64,
    /// Number of the first call.
    first: u32,
    calls: u32,
    /// Calls for which a notice came.
    over: u32,
}

/// The part of a connection that sends without a copy.
#[derive(Debug, Default)]
pub struct ZeroCopy {
    mode: Mode,
    verdict: Verdict,
    /// The path was quick at the last look.
    quick: bool,
    /// The number that the kernel gives to the next call.
    next: u32,
    /// The piece that is being written.
    open: Option<Flight>,
    /// Pieces that are written.
    flying: VecDeque<Flight>,
}

impl ZeroCopy {
    /// For a connection on which the kernel allows it.
    pub fn new(mode: Mode) -> ZeroCopy {
        ZeroCopy {
            mode,
            ..ZeroCopy::default()
        }
    }

    /// Whether a piece with this many bytes left goes without a copy.
    pub fn wants(&self, left: usize) -> bool {
        let tries = match self.verdict {
            Verdict::Untried => self.mode != Mode::Off,
            Verdict::Works => true,
            Verdict::Asked | Verdict::Copied | Verdict::Refused => false,
        };
        tries && left >= LEAST && (self.quick || self.mode == Mode::Always)
    }

    /// Whether the path is quick: on a slow one the kernel would keep memory for long.
    pub fn set_quick(&mut self, quick: bool) {
        self.quick = quick;
    }

    /// How it stands.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Whether the kernel may read memory.
    pub fn is_lent(&self) -> bool {
        self.open.is_some() || !self.flying.is_empty()
    }

    /// A call took something of a message.
    pub fn called(&mut self, comm: u64, message: u64) {
        let flight = self.open.get_or_insert(Flight {
            comm,
            message,
            first: self.next,
            calls: 0,
            over: 0,
        });
        flight.calls += 1;
        self.next = self.next.wrapping_add(1);
        if self.verdict == Verdict::Untried {
            self.verdict = match self.mode {
                Mode::Always => Verdict::Works,
                Mode::Auto | Mode::Off => Verdict::Asked,
            };
        }
    }

    /// The kernel refused a call.
    pub fn refused(&mut self) {
        self.verdict = Verdict::Refused;
    }

    /// No more of the present piece will be written without a copy. Whether the kernel may still read
    /// it: then it is pinned until [`ZeroCopy::noticed`] names it.
    pub fn close(&mut self) -> bool {
        match self.open.take() {
            Some(flight) if flight.over < flight.calls => {
                self.flying.push_back(flight);
                true
            }
            _ => false,
        }
    }

    /// The kernel has done with some calls: `done` gets (comm, message) of pieces it has done with.
    pub fn noticed(&mut self, notice: &Notice, done: &mut Vec<(u64, u64)>) {
        if self.mode != Mode::Always {
            match self.verdict {
                Verdict::Asked | Verdict::Works if notice.copied => self.verdict = Verdict::Copied,
                Verdict::Asked => self.verdict = Verdict::Works,
                _ => {}
            }
        }
        // Numbers wrap around: all that counts is how far one is behind another.
        let count = notice.last.wrapping_sub(notice.first).wrapping_add(1);
        let within = |flight: &Flight| {
            let calls = 0..flight.calls;
            let of = |call: u32| flight.first.wrapping_add(call).wrapping_sub(notice.first) < count;
            calls.filter(|call| of(*call)).count() as u32
        };
        for flight in self.open.iter_mut().chain(&mut self.flying) {
            flight.over += within(flight);
        }
        self.flying.retain(|flight| {
            let over = flight.over >= flight.calls;
            if over {
                done.push((flight.comm, flight.message));
            }
            !over
        });
    }

    /// The socket has let go of everything: `done` gets what was pinned for written pieces.
    pub fn abandon(&mut self, done: &mut Vec<(u64, u64)>) {
        self.open = None;
        let flying = self.flying.drain(..);
        done.extend(flying.map(|flight| (flight.comm, flight.message)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(first: u32, last: u32, copied: bool) -> Notice {
        Notice {
            first,
            last,
            copied,
        }
    }

    #[test]
    fn a_piece_is_lent_until_every_call_has_its_notice() {
        let mut zero = ZeroCopy::new(Mode::Auto);
        assert!(!zero.wants(LEAST), "nothing is known of the path");
        zero.set_quick(true);
        assert!(zero.wants(LEAST) && !zero.wants(LEAST - 1));
        zero.next = u32::MAX;
        zero.called(1, 5);
        assert!(!zero.wants(LEAST), "one piece is tried");
        zero.called(1, 5);
        assert!(zero.close() && zero.is_lent());
        let mut done = Vec::new();
        zero.noticed(&notice(u32::MAX, u32::MAX, false), &mut done);
        assert!(done.is_empty() && zero.is_lent());
        zero.noticed(&notice(0, 0, false), &mut done);
        assert_eq!(done, [(1, 5)]);
        assert!(!zero.is_lent() && zero.wants(LEAST));
        // One that was copied ends it, whenever it comes.
        zero.called(1, 6);
        zero.called(1, 6);
        zero.noticed(&notice(1, 1, false), &mut done);
        assert!(zero.close());
        zero.called(1, 7);
        assert!(zero.close());
        zero.noticed(&notice(2, 3, true), &mut done);
        assert_eq!(done, [(1, 5), (1, 6), (1, 7)]);
        assert_eq!(zero.verdict(), Verdict::Copied);
        assert!(!zero.wants(LEAST));
    }

    #[test]
    fn what_was_noticed_before_the_piece_was_written_needs_no_waiting() {
        let mut zero = ZeroCopy::new(Mode::Auto);
        zero.called(1, 1);
        let mut done = Vec::new();
        zero.noticed(&notice(0, 0, false), &mut done);
        assert!(done.is_empty());
        assert!(!zero.close() && !zero.is_lent());
    }
}
