//! All-gather and all-to-all between processes, through host memory and Evener's engine: TCP, as a rule.
//!
//! NCCL moves data by a kernel. On a network that is slow beside the GPU that kernel does nothing
//! but wait, and holds multiprocessors meanwhile: kernels that were laid out to have one block on
//! each of them then take two rounds, twice the time. Here nothing waits on a multiprocessor:
//!
//! ```text
//! stream "out"   copy engine: payload -> send slot    wait: `sent`     then write: `ready`
//! pump (thread)  engine: send slot -> network         wait: `ready`    then write: `sent`
//! pump (thread)  engine: network -> receive slot      wait: `consumed` then write: `arrived`
//! stream "in"    copy engine: receive slot -> result  wait: `arrived`  then write: `consumed`
//! ```
//!
//! The four words count pieces, modulo 2^32, and lie in host memory that the GPU sees; piece `n` uses
//! slot `n % slots`. A stream waits for a word by the driver's stream memory operations ([`cuda`]),
//! so a whole collective is enqueued at once and no thread of the training process is woken for it.
//!
//! # Order
//! All ranks make the same calls in the same order. Pieces leave and arrive in that order on every
//! comm, so no piece carries a number.
//!
//! # Failure
//! A stream that waits for a dead peer would hang for ever. When the pump ends it sets `sent` and
//! `arrived` far ahead ([`PASSED`]), so that streams run on over whatever is in the slots; after a
//! failure that is NaN, which nobody takes for gradients. [`Exchange::failure`] says why: callers ask
//! before they use what was received.

mod comms;
pub mod cuda;
mod host;
mod pieces;
mod pump;
mod room;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::hello::HANDLE;
use evener_engine::{Engine, Listener};

use comms::Comms;
pub use pieces::Kind;
use pieces::{Piece, Pieces};
pub use room::{PASSED, Room, WORDS, Word};

/// Why an exchange cannot be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] evener_engine::Error),
    /// The settings of the engine.
    #[error(transparent)]
    Setting(#[from] evener_engine::settings::SettingError),
    /// A handle of the wrong length, or not one for each rank.
    #[error("the handles of {0} ranks are needed, in their order")]
    Handles(usize),
    /// Peers that did not connect.
    #[error("{missing} of {peers} peers did not connect within {seconds} s")]
    Connect {
        /// How many.
        missing: usize,
        /// How many there are in all.
        peers: usize,
        /// The time given.
        seconds: u64,
    },
    /// A rank, a size or a shape that cannot be.
    #[error("{0}")]
    Shape(&'static str),
    /// The pump stopped.
    #[error("{0}")]
    Failed(String),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] cuda::DriverError),
}

/// What callers have given to the pump.
#[derive(Debug, Default)]
struct Work {
    sends: VecDeque<Piece>,
    receives: VecDeque<Piece>,
    stop: bool,
}

#[derive(Debug)]
struct Inner {
    rank: u32,
    size: u32,
    room: Room,
    /// With a piece under way and nothing that moves for so long, a peer is taken for gone.
    patience: Duration,
    work: Mutex<Work>,
    bell: Condvar,
    failure: Mutex<Option<String>>,
}

/// Numbers of the next pieces. Whoever enqueues holds them, so that streams and pump agree.
#[derive(Debug, Default)]
struct Order {
    sends: u32,
    receives: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The way between the ranks of a group.
pub struct Exchange {
    inner: Arc<Inner>,
    engine: Arc<Engine>,
    /// One for each rank that will connect, and its handle.
    listeners: Vec<Listener>,
    handle: Vec<u8>,
    order: Mutex<Order>,
    pump: Mutex<Option<JoinHandle<()>>>,
    /// Where the payload is there, has left, and where the result has landed.
    marks: OnceLock<[cuda::Mark; 3]>,
}

impl Exchange {
    /// Listens. Peers learn [`Exchange::handle`] by other means, then [`Exchange::connect`].
    ///
    /// # Errors
    /// [`Error::Shape`].
    ///
    /// # Safety
    /// `room` is `slots * slot` bytes of each kind and [`WORDS`] zeroed bytes that live until
    /// [`Exchange::close`] has returned, and nobody else uses them.
    #[allow(unsafe_code, reason = "the contract is the caller's")]
    pub unsafe fn listen(
        engine: Arc<Engine>,
        rank: u32,
        size: u32,
        room: Room,
        patience: Duration,
    ) -> Result<Exchange, Error> {
        if rank >= size || size < 2 {
            return Err(Error::Shape(
                "a rank below the size is needed, and two at least",
            ));
        }
        if room.slot == 0 || room.slots < 2 || !room.words.is_multiple_of(4) {
            return Err(Error::Shape(
                "two slots of some bytes are needed, and aligned words",
            ));
        }
        let (listeners, handles): (Vec<_>, Vec<_>) = (0..size).map(|_| engine.listen()).unzip();
        Ok(Exchange {
            inner: Arc::new(Inner {
                rank,
                size,
                room,
                patience,
                work: Mutex::default(),
                bell: Condvar::new(),
                failure: Mutex::new(None),
            }),
            engine,
            listeners,
            handle: handles.concat(),
            order: Mutex::default(),
            pump: Mutex::new(None),
            marks: OnceLock::new(),
        })
    }

    /// What peers need to connect: bytes for everybody.
    pub fn handle(&self) -> Vec<u8> {
        self.handle.clone()
    }

    /// Connects to all and starts the pump. All ranks at once; `handles` by rank.
    ///
    /// # Errors
    /// [`Error::Handles`], [`Error::Connect`], [`Error::Engine`].
    pub fn connect(&self, handles: &[Vec<u8>], limit: Duration) -> Result<(), Error> {
        let (rank, size) = (self.inner.rank as usize, self.inner.size);
        if handles.len() != size as usize {
            return Err(Error::Handles(size as usize));
        }
        let mut mine = Vec::new();
        for handle in handles {
            let own = handle.chunks_exact(HANDLE).nth(rank);
            let own = own.filter(|_| handle.len() == HANDLE * size as usize);
            let own = own.and_then(|own| own.try_into().ok());
            mine.push(own.ok_or(Error::Handles(size as usize))?);
        }
        let mut comms = Comms::new(size);
        let met = self.meet(&mut mine, &mut comms, limit);
        for listener in &self.listeners {
            self.engine.close_listener(listener);
        }
        if let Err(error) = met {
            comms.release(&self.engine);
            return Err(error);
        }
        let (inner, engine) = (self.inner.clone(), self.engine.clone());
        let body = move || {
            evener_engine::sys::set_exact_timers();
            let run = std::panic::AssertUnwindSafe(|| pump::run(&inner, &engine, &comms));
            let end = std::panic::catch_unwind(run);
            let why = match end {
                Ok(Ok(())) => None,
                Ok(Err(why)) => Some(why),
                Err(_) => Some("the pump died: a bug in Evener".to_string()),
            };
            if let Some(why) = why {
                inner.fail(why);
            }
            comms.release(&engine);
            if lock(&inner.failure).is_some() {
                inner.room.spoil();
            }
            // Whatever waits for more would wait for ever.
            for word in [Word::Sent, Word::Arrived] {
                let value = inner.room.load(word).wrapping_add(PASSED);
                inner.room.store(word, value);
            }
        };
        let thread = std::thread::Builder::new().name("evener-staging".into());
        let thread = thread
            .spawn(body)
            .map_err(|error| Error::Failed(format!("no thread for the pump: {error}")))?;
        *lock(&self.pump) = Some(thread);
        Ok(())
    }

    fn meet(
        &self,
        handles: &mut [[u8; HANDLE]],
        comms: &mut Comms,
        limit: Duration,
    ) -> Result<(), Error> {
        let end = Instant::now() + limit;
        let peers = self.inner.size as usize - 1;
        loop {
            for (peer, listener) in self.listeners.iter().enumerate() {
                if peer == self.inner.rank as usize {
                    continue;
                }
                if comms.send[peer].is_none() {
                    comms.send[peer] = self.engine.connect(&mut handles[peer])?;
                }
                if comms.receive[peer].is_none() {
                    comms.receive[peer] = self.engine.accept(listener)?;
                }
            }
            let met = |side: &[Option<Arc<Comm>>]| side.iter().flatten().count();
            let known = met(&comms.send).min(met(&comms.receive));
            if known == peers {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(Error::Connect {
                    missing: peers - known,
                    peers,
                    seconds: limit.as_secs(),
                });
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Cuts a collective into pieces and hands them to the pump; `enqueue` has the device's part
    /// done in the same order. `bytes`: of what one rank has for another.
    fn submit<E>(
        &self,
        kind: Kind,
        bytes: usize,
        enqueue: impl FnOnce(&Pieces, &Order) -> Result<(), E>,
    ) -> Result<(), Error>
    where
        Error: From<E>,
    {
        let inner = &*self.inner;
        if let Some(why) = self.failure() {
            return Err(Error::Failed(why));
        }
        let pieces = Pieces::new(kind, inner.rank, inner.size, bytes, inner.room.slot);
        let mut order = lock(&self.order);
        {
            let mut work = lock(&inner.work);
            work.sends
                .extend(pieces.sends.iter().map(|part| part.piece));
            work.receives
                .extend(pieces.receives.iter().map(|part| part.piece));
        }
        inner.bell.notify_one();
        let done = enqueue(&pieces, &order);
        order.sends = order.sends.wrapping_add(pieces.sends.len() as u32);
        order.receives = order.receives.wrapping_add(pieces.receives.len() as u32);
        done.map_err(|error| {
            let error = Error::from(error);
            // Streams and pump no longer agree on what comes next.
            inner.fail(error.to_string());
            error
        })
    }

    /// Why nothing moves any more, if so.
    pub fn failure(&self) -> Option<String> {
        lock(&self.inner.failure).clone()
    }

    /// Ends the pump and the comms. When this returns the room is not used any more.
    pub fn close(&self) {
        lock(&self.inner.work).stop = true;
        self.inner.bell.notify_one();
        if let Some(thread) = lock(&self.pump).take() {
            // Its panics are caught inside.
            let _ = thread.join();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn fail(&self, why: String) {
        lock(&self.failure).get_or_insert(why);
        lock(&self.work).stop = true;
        self.bell.notify_one();
    }
}
