//! What was asked for and how far it is.
//!
//! A request is waiting, running, or finished. It runs when the backend has room and nothing that
//! was asked for before, and is not finished, touches the same bytes (unless both only read). What
//! was moved in part goes on with the rest; an interrupted call is made again. Nothing here calls
//! the system: a test plays the disk.

use crate::ssd::ALIGN;
use std::collections::VecDeque;
use std::io;

/// How often one request is made again after `EINTR` or `EAGAIN`.
const AGAIN: u32 = 1000;

/// A piece of the file and of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Number of the buffer.
    pub buffer: usize,
    /// Place in the file.
    pub offset: u64,
    /// Bytes.
    pub length: usize,
}

/// What the backend is to do: `span` from `done` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    /// Comes back with the completion.
    pub ticket: u64,
    /// Into the file, or out of it.
    pub write: bool,
    /// Number of the buffer.
    pub buffer: usize,
    /// Place in the buffer.
    pub at: usize,
    /// Place in the file.
    pub offset: u64,
    /// Bytes.
    pub length: usize,
}

/// Why a request failed.
#[derive(Debug)]
pub struct Fault {
    /// Into the file, or out of it.
    pub write: bool,
    /// What was asked for.
    pub span: Span,
    /// Why.
    pub source: io::Error,
}

#[derive(Debug)]
enum State {
    Waiting,
    Running,
    Finished(Option<io::Error>),
}

#[derive(Debug)]
struct Request {
    ticket: u64,
    write: bool,
    span: Span,
    done: usize,
    again: u32,
    state: State,
}

impl Request {
    fn unfinished(&self) -> bool {
        !matches!(self.state, State::Finished(_))
    }

    fn conflicts(&self, other: &Request) -> bool {
        let (a, b) = (self.span, other.span);
        let same_bytes =
            a.offset < b.offset + b.length as u64 && b.offset < a.offset + a.length as u64;
        same_bytes && (self.write || other.write)
    }
}

/// All requests of one store; see the head of this file.
#[derive(Debug)]
pub struct Requests {
    list: VecDeque<Request>,
    next: u64,
    running: usize,
    depth: usize,
    size: u64,
    room: usize,
}

impl Requests {
    /// For a file of `size` bytes, buffers of `room` bytes, and at most `depth` running at a time.
    pub fn new(size: u64, room: usize, depth: usize) -> Requests {
        Requests {
            list: VecDeque::new(),
            next: 0,
            running: 0,
            depth: depth.max(1),
            size,
            room,
        }
    }

    /// Asks for a read or a write; the ticket is to be taken back with [`Requests::take`].
    ///
    /// # Errors
    /// A sentence, where the span cannot be or its buffer is in use.
    pub fn submit(&mut self, write: bool, span: Span) -> Result<u64, String> {
        let aligned = span.offset.is_multiple_of(ALIGN as u64) && span.length.is_multiple_of(ALIGN);
        if !aligned || span.length == 0 {
            return Err(format!("{span:?} is not a multiple of {ALIGN} bytes"));
        }
        if span.length > self.room {
            return Err(format!("{span:?} is longer than a buffer of {}", self.room));
        }
        if span
            .offset
            .checked_add(span.length as u64)
            .is_none_or(|end| end > self.size)
        {
            return Err(format!("{span:?} is outside of the file of {}", self.size));
        }
        let busy = |r: &Request| r.unfinished() && r.span.buffer == span.buffer;
        if self.list.iter().any(busy) {
            return Err(format!("buffer {} is in use", span.buffer));
        }
        let ticket = self.next;
        self.next += 1;
        self.list.push_back(Request {
            ticket,
            write,
            span,
            done: 0,
            again: 0,
            state: State::Waiting,
        });
        Ok(ticket)
    }

    /// The next operation for the backend, now running; None where none may run now.
    pub fn start(&mut self) -> Option<Op> {
        if self.running >= self.depth {
            return None;
        }
        let free = |at: usize| {
            let mine = &self.list[at];
            let earlier = self.list.iter().take(at);
            matches!(mine.state, State::Waiting)
                && !earlier
                    .into_iter()
                    .any(|r| r.unfinished() && r.conflicts(mine))
        };
        let at = (0..self.list.len()).find(|&at| free(at))?;
        let request = &mut self.list[at];
        request.state = State::Running;
        self.running += 1;
        Some(Op {
            ticket: request.ticket,
            write: request.write,
            buffer: request.span.buffer,
            at: request.done,
            offset: request.span.offset + request.done as u64,
            length: request.span.length - request.done,
        })
    }

    /// What became of an operation: bytes that were moved, or why none were.
    pub fn complete(&mut self, ticket: u64, result: io::Result<usize>) {
        let found = self.list.iter_mut().find(|r| r.ticket == ticket);
        let Some(request) = found.filter(|r| matches!(r.state, State::Running)) else {
            return; // of a request that was given up
        };
        self.running -= 1;
        request.state = match result {
            Ok(0) => State::Finished(Some(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "nothing was moved: the file is shorter than it was made",
            ))),
            Ok(moved) => {
                request.again = 0;
                let done = request.done + moved;
                if done >= request.span.length {
                    request.done = request.span.length;
                    State::Finished(None)
                } else {
                    // The rest must be aligned too: what is over is moved again.
                    request.done = done / ALIGN * ALIGN;
                    if request.done < done {
                        request.again += 1;
                    }
                    State::Waiting
                }
            }
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EINTR) | Some(libc::EAGAIN))
                    && request.again < AGAIN =>
            {
                request.again += 1;
                State::Waiting
            }
            Err(error) => State::Finished(Some(error)),
        };
    }

    /// What the backend refused to begin: it fails.
    pub fn refuse(&mut self, ticket: u64, error: io::Error) {
        if let Some(request) = self.list.iter_mut().find(|r| r.ticket == ticket) {
            if matches!(request.state, State::Running) {
                self.running -= 1;
            }
            request.state = State::Finished(Some(error));
        }
    }

    /// Whether a request is finished.
    pub fn finished(&self, ticket: u64) -> bool {
        !self
            .list
            .iter()
            .any(|r| r.ticket == ticket && r.unfinished())
    }

    /// Forgets a finished request: what became of it. None where it is not finished.
    pub fn take(&mut self, ticket: u64) -> Option<Result<(), Fault>> {
        let at = self.list.iter().position(|r| r.ticket == ticket)?;
        if self.list[at].unfinished() {
            return None;
        }
        let request = self.list.remove(at)?;
        Some(match request.state {
            State::Finished(Some(source)) => Err(Fault {
                write: request.write,
                span: request.span,
                source,
            }),
            _ => Ok(()),
        })
    }

    /// Operations that the backend has.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Requests that are not finished.
    pub fn unfinished(&self) -> usize {
        self.list.iter().filter(|r| r.unfinished()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOM: usize = 4 * ALIGN;
    const BLOCKS: u64 = 6;

    #[derive(Debug, Clone)]
    enum Act {
        Ask {
            write: bool,
            buffer: usize,
            block: u64,
            blocks: usize,
        },
        Start,
        /// The `which`-th running operation moves this many bytes, or fails so.
        End {
            which: usize,
            moved: usize,
        },
        Interrupt {
            which: usize,
        },
        Fail {
            which: usize,
        },
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            3 => (any::<bool>(), 0..5usize, 0..BLOCKS, 1..3usize).prop_map(
                |(write, buffer, block, blocks)| Act::Ask { write, buffer, block, blocks }
            ),
            4 => Just(Act::Start),
            4 => (0..4usize, 1..=ROOM).prop_map(|(which, moved)| Act::End { which, moved }),
            1 => (0..4usize).prop_map(|which| Act::Interrupt { which }),
            1 => (0..4usize).prop_map(|which| Act::Fail { which }),
        ];
        prop::collection::vec(act, 0..120)
    }

    proptest! {
        /// Whatever order things end in: nothing runs beside what it conflicts with, at most
        /// `depth` run, a buffer has one request, all of them end, and the file is as if they had
        /// been done one after the other.
        #[test]
        fn the_file_is_as_if_all_was_done_in_order(acts in acts(), depth in 1..4usize) {
            let size = (BLOCKS as usize * ALIGN) as u64;
            let mut requests = Requests::new(size, ROOM, depth);
            // Each ALIGN bytes are one cell; a cell's value is the ticket that wrote it.
            let mut disk = vec![0u64; BLOCKS as usize];
            let mut wanted = disk.clone();
            let mut running: Vec<Op> = Vec::new();
            let mut asked: Vec<(u64, bool, Span, bool)> = Vec::new(); // and whether it failed
            let step = |requests: &mut Requests, running: &mut Vec<Op>, disk: &mut Vec<u64>,
                            asked: &mut Vec<(u64, bool, Span, bool)>, act: Act,
                            wanted: &mut Vec<u64>| {
                match act {
                    Act::Ask { write, buffer, block, blocks } => {
                        let span = Span {
                            buffer,
                            offset: block * ALIGN as u64,
                            length: blocks * ALIGN,
                        };
                        let busy = asked.iter().any(|(t, _, s, _)| {
                            s.buffer == buffer && !requests.finished(*t)
                        });
                        match requests.submit(write, span) {
                            Ok(ticket) => {
                                prop_assert!(!busy && block + blocks as u64 <= BLOCKS);
                                asked.push((ticket, write, span, false));
                                if write {
                                    wanted[block as usize..][..blocks].fill(ticket + 1);
                                }
                            }
                            Err(_) => prop_assert!(busy || block + blocks as u64 > BLOCKS),
                        }
                    }
                    Act::Start => {
                        if let Some(op) = requests.start() {
                            for other in running.iter() {
                                let apart = op.offset + op.length as u64 <= other.offset
                                    || other.offset + other.length as u64 <= op.offset;
                                prop_assert!(apart || !(op.write || other.write));
                            }
                            prop_assert!(op.offset.is_multiple_of(ALIGN as u64));
                            prop_assert!(op.at.is_multiple_of(ALIGN) && op.length > 0);
                            running.push(op);
                        }
                    }
                    Act::End { which, moved } if !running.is_empty() => {
                        let op = running.remove(which % running.len());
                        let moved = moved.min(op.length);
                        if op.write {
                            for cell in 0..moved / ALIGN {
                                disk[op.offset as usize / ALIGN + cell] = op.ticket + 1;
                            }
                        }
                        requests.complete(op.ticket, Ok(moved));
                    }
                    Act::Interrupt { which } if !running.is_empty() => {
                        let op = running.remove(which % running.len());
                        requests.complete(op.ticket, Err(io::Error::from_raw_os_error(libc::EINTR)));
                    }
                    Act::Fail { which } if !running.is_empty() => {
                        let op = running.remove(which % running.len());
                        requests.complete(op.ticket, Err(io::Error::from_raw_os_error(libc::EIO)));
                        if let Some(entry) = asked.iter_mut().find(|e| e.0 == op.ticket) {
                            entry.3 = true;
                        }
                    }
                    _ => {}
                }
                prop_assert!(requests.running() <= depth && requests.running() == running.len());
                Ok(())
            };
            for act in acts {
                step(&mut requests, &mut running, &mut disk, &mut asked, act, &mut wanted)?;
            }
            let mut rounds = 0;
            while requests.unfinished() > 0 {
                step(&mut requests, &mut running, &mut disk, &mut asked, Act::Start, &mut wanted)?;
                let act = Act::End { which: 0, moved: ROOM };
                step(&mut requests, &mut running, &mut disk, &mut asked, act, &mut wanted)?;
                rounds += 1;
                prop_assert!(rounds < 1000);
            }
            let failed = asked.iter().any(|e| e.3 && e.1);
            for (ticket, write, span, fails) in &asked {
                match requests.take(*ticket) {
                    Some(Ok(())) => prop_assert!(!fails),
                    Some(Err(fault)) => {
                        prop_assert!(*fails);
                        prop_assert_eq!(fault.write, *write);
                        prop_assert_eq!(fault.span, *span);
                    }
                    None => prop_assert!(false, "request {} never ended", ticket),
                }
                prop_assert!(requests.take(*ticket).is_none());
            }
            if !failed {
                prop_assert_eq!(disk, wanted);
            }
        }
    }

    #[test]
    fn what_ends_early_is_an_error_and_not_a_loop() {
        let mut requests = Requests::new(1 << 20, ROOM, 2);
        let span = Span {
            buffer: 0,
            offset: 0,
            length: ROOM,
        };
        let ticket = requests.submit(false, span).unwrap();
        let op = requests.start().unwrap();
        requests.complete(op.ticket, Ok(ALIGN + 7));
        let rest = requests.start().unwrap();
        assert_eq!((rest.at, rest.length), (ALIGN, ROOM - ALIGN));
        requests.complete(rest.ticket, Ok(0));
        let fault = requests.take(ticket).unwrap().unwrap_err();
        assert_eq!(fault.source.kind(), io::ErrorKind::UnexpectedEof);
        let ticket = requests.submit(true, span).unwrap();
        let mut tries = 0;
        while let Some(op) = requests.start() {
            tries += 1;
            requests.complete(op.ticket, Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        }
        assert_eq!(tries, AGAIN + 1);
        assert!(requests.take(ticket).unwrap().is_err());
        assert!(requests.submit(true, Span { offset: 1, ..span }).is_err());
        assert!(requests.submit(true, Span { length: 0, ..span }).is_err());
        let beyond = Span {
            offset: 1 << 20,
            ..span
        };
        assert!(requests.submit(true, beyond).is_err());
    }
}
