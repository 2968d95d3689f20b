//! The thread that answers those who measure: it takes their load, and hears their words.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::load::MESSAGE;
use super::words::{self, Word};
use super::{LISTENER, Running};
use crate::callers::{Callers, Listener};
use crate::comm::Comm;
use crate::shared::Shared;
use crate::slots::Status;
use crate::sys::Memory;

/// Buffers that are posted at a time, for each who measures.
const DEPTH: usize = 8;
/// Most who measure at a time; others wait.
const MOST: usize = 16;
/// Between two looks.
const LOOK: Duration = Duration::from_micros(50);
/// Who says nothing for so long is let go.
const SILENCE: Duration = Duration::from_secs(5);

/// One who measures, or says a word.
struct Guest {
    comm: Arc<Comm>,
    buffers: Vec<Vec<u8>>,
    /// Requests and their buffers, in the order in which they were posted.
    posted: VecDeque<(u64, usize)>,
    free: Vec<usize>,
    heard: Instant,
}

impl Guest {
    fn new(comm: Arc<Comm>) -> Guest {
        Guest {
            comm,
            buffers: vec![vec![0; MESSAGE]; DEPTH],
            posted: VecDeque::new(),
            free: (0..DEPTH).collect(),
            heard: Instant::now(),
        }
    }

    /// Takes what came (`each` gets it), and posts its buffers again. `false`: it is over.
    fn turn(&mut self, callers: &Callers, each: &mut dyn FnMut(&[u8])) -> bool {
        while let Some((number, place)) = self.posted.front().copied() {
            match self.comm.slots.at(number).test() {
                Status::Pending => break,
                Status::Failed(_) => return false,
                Status::Done(length) => {
                    self.posted.pop_front();
                    self.free.push(place);
                    self.heard = Instant::now();
                    each(self.buffers[place].get(..length).unwrap_or_default());
                }
            }
        }
        while let (Some(place), Some(number)) = (self.free.last(), self.comm.slots.vacant()) {
            let memory = Memory::of(&mut self.buffers[*place]);
            // SAFETY: a buffer is not looked at before its request is finished, and lives until the comm
            // is released, which who has the guest does first. This thread alone posts.
            #[allow(unsafe_code, reason = "see above")]
            let posted = unsafe { callers.post(&self.comm, memory) };
            match posted {
                Ok(Some(_)) => {
                    self.posted.push_back((number, *place));
                    self.free.pop();
                }
                Ok(None) => break,
                Err(_) => return false,
            }
        }
        self.heard.elapsed() < SILENCE
    }
}

/// See the module.
pub(crate) struct Server {
    _running: Running,
    callers: Callers,
    listener: Listener,
}

impl Server {
    pub(crate) fn new(shared: Arc<Shared>) -> Server {
        let running = Running::new(&shared);
        let callers = Callers { shared };
        let listener = callers.listen_as(LISTENER);
        Server {
            _running: running,
            callers,
            listener,
        }
    }

    /// Runs until it is told to stop.
    pub(crate) fn run(self) {
        let shared = self.callers.shared.clone();
        let choosing = &shared.choosing;
        let _ = choosing.server.set(std::thread::current());
        let mut guests: Vec<Guest> = Vec::new();
        while !choosing.stops() {
            while guests.len() < MOST
                && let Ok(Some(comm)) = self.callers.accept(&self.listener)
            {
                guests.push(Guest::new(comm));
            }
            let (mut place, mut active) = (0, false);
            while let Some(guest) = guests.get_mut(place) {
                let mut hear = |bytes: &[u8]| {
                    active = true;
                    match words::parse(bytes) {
                        Some((Word::Ask, from)) => choosing.asked(&shared, &from),
                        Some((Word::Tell(carrier), from)) => {
                            choosing.told(&shared, from.process, carrier);
                        }
                        // A load: it is enough that it came.
                        None => {}
                    }
                };
                if guest.turn(&self.callers, &mut hear) {
                    place += 1;
                } else {
                    let guest = guests.swap_remove(place);
                    self.callers.release(&guest.comm);
                }
            }
            if guests.is_empty() && !self.listener.is_awaited() {
                std::thread::park_timeout(Duration::from_secs(1));
            } else if !active {
                std::thread::sleep(LOOK);
            }
        }
        for guest in guests {
            self.callers.release(&guest.comm);
        }
    }
}
