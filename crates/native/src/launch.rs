//! NCCL's calls in a loop, for `evener.tools.bench.collectives`: what a benchmark repeats inside the time.
//!
//! Python finds the functions in the library that torch loaded and says once what is called with
//! which arguments; here is only the repetition. From Python each call costs a microsecond or more,
//! which at four GPUs of one thread is a fifth of a small all-reduce. The GIL is given up, so that
//! threads start their GPUs side by side.
//!
//! [`Launcher::timed`] is a whole measurement, without the interpreter between the call that comes
//! before the time and the end: what Python runs there takes its caches and branch predictions away
//! from the first of twenty calls, which at 23 µs each shows in the mean.
//!
//! Call number n works on piece n modulo `pieces` of the buffers, as in nccl-tests, so that small
//! messages are not measured out of a cache.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::mem::transmute;
use std::time::{Duration, Instant};

/// cudaErrorNotReady, ncclInProgress: neither done nor failed.
const NOT_READY: i32 = 600;
const IN_PROGRESS: i32 = 7;

/// How long to wait without the interpreter, which is how late an interrupt and a limit may come.
const PATIENCE: Duration = Duration::from_millis(100);

type Nothing = unsafe extern "C" fn() -> i32;
type Query = unsafe extern "C" fn(usize) -> i32;
type Look = unsafe extern "C" fn(usize, *mut i32) -> i32;
type Select = unsafe extern "C" fn(i32) -> i32;

/// ncclSend, ncclRecv: buffer, count, type, peer, comm, stream.
type Point = unsafe extern "C" fn(usize, usize, i32, i32, usize, usize) -> i32;
/// ncclAllGather, ncclAlltoAll: send, receive, count, type, comm, stream.
type Gather = unsafe extern "C" fn(usize, usize, usize, i32, usize, usize) -> i32;
/// ncclAllReduce, ncclReduceScatter (type, operation), ncclBroadcast, ncclGather, ncclScatter (type,
/// root).
type Reduce = unsafe extern "C" fn(usize, usize, usize, i32, i32, usize, usize) -> i32;
/// ncclReduce: type, operation, root.
type Rooted = unsafe extern "C" fn(usize, usize, usize, i32, i32, i32, usize, usize) -> i32;

/// NCCL's functions by their shape. Pointers and handles are passed as `usize`, which the C ABIs of
/// x86-64 and AArch64 pass alike.
#[derive(Clone, Copy)]
enum Function {
    Point(Point),
    Gather(Gather),
    Reduce(Reduce),
    Rooted(Rooted),
}

impl Function {
    /// The function at `address` with this many buffers and whole numbers among its arguments.
    ///
    /// # Safety
    /// `address` is that of a function of this shape, for as long as the result is called.
    unsafe fn at(address: usize, buffers: usize, numbers: usize) -> PyResult<Function> {
        if address == 0 {
            return Err(PyValueError::new_err("a function at address 0"));
        }
        // SAFETY: not null, and of this type: promised by the caller.
        unsafe {
            match (buffers, numbers) {
                (1, 2) => Ok(Function::Point(transmute::<usize, Point>(address))),
                (2, 1) => Ok(Function::Gather(transmute::<usize, Gather>(address))),
                (2, 2) => Ok(Function::Reduce(transmute::<usize, Reduce>(address))),
                (2, 3) => Ok(Function::Rooted(transmute::<usize, Rooted>(address))),
                _ => Err(PyValueError::new_err(format!(
                    "no function of NCCL takes {buffers} buffers and {numbers} numbers"
                ))),
            }
        }
    }
}

struct Call {
    function: Function,
    buffers: [usize; 2],
    count: usize,
    numbers: [i32; 3],
    comm: usize,
    stream: usize,
}

impl Call {
    /// # Safety
    /// As for [`Launcher::new`], for the piece `shift` bytes into the buffers.
    unsafe fn start(&self, shift: usize) -> i32 {
        let [a, b] = self.buffers.map(|address| address.wrapping_add(shift));
        let [x, y, z] = self.numbers;
        let (n, comm, stream) = (self.count, self.comm, self.stream);
        // SAFETY: promised by the caller.
        unsafe {
            match self.function {
                Function::Point(call) => call(a, n, x, y, comm, stream),
                Function::Gather(call) => call(a, b, n, x, comm, stream),
                Function::Reduce(call) => call(a, b, n, x, y, comm, stream),
                Function::Rooted(call) => call(a, b, n, x, y, z, comm, stream),
            }
        }
    }
}

/// One function call as Python says it: address of the function, buffers, count, whole numbers in
/// their order, communicator, stream.
type Said = (usize, Vec<usize>, usize, Vec<i32>, usize, usize);

/// A collective on all GPUs of a thread, ready to be repeated.
#[pyclass(frozen)]
pub struct Launcher {
    begin: Nothing,
    end: Nothing,
    /// Each in a group of its own, but a single call.
    steps: Vec<Vec<Call>>,
    piece: usize,
    pieces: usize,
}

impl Launcher {
    /// Runs `work` inside ncclGroupStart and ncclGroupEnd, or just runs it. The first status that is
    /// not success.
    ///
    /// # Safety
    /// As for [`Launcher::new`].
    unsafe fn group(&self, grouped: bool, work: impl FnOnce() -> i32) -> i32 {
        if !grouped {
            return work();
        }
        // SAFETY: promised by the caller.
        let begun = unsafe { (self.begin)() };
        if begun != 0 {
            return begun;
        }
        let status = work();
        // After a failure too: an open group would swallow the calls that close everything.
        // SAFETY: promised by the caller.
        let ended = unsafe { (self.end)() };
        if status == 0 { ended } else { status }
    }

    /// # Safety
    /// As for [`Launcher::new`].
    unsafe fn once(&self, number: usize) -> i32 {
        let shift = number % self.pieces * self.piece;
        let grouped = !matches!(&self.steps[..], [step] if step.len() == 1);
        let start = |step: &Vec<Call>| {
            // SAFETY: promised by the caller.
            let each = step.iter().map(|call| unsafe { call.start(shift) });
            first_failure(each)
        };
        // SAFETY: promised by the caller.
        let steps = self
            .steps
            .iter()
            .map(|step| unsafe { self.group(grouped, || start(step)) });
        first_failure(steps)
    }

    /// # Safety
    /// As for [`Launcher::new`].
    unsafe fn repeat(&self, first: usize, count: usize, together: usize) -> (i32, usize) {
        let (mut number, end) = (first, first.saturating_add(count));
        while number < end {
            let mut last = number;
            let batch = number..end.min(number.saturating_add(together));
            number = batch.end;
            let work = || {
                first_failure(batch.map(|one| {
                    last = one;
                    // SAFETY: promised by the caller.
                    unsafe { self.once(one) }
                }))
            };
            // SAFETY: promised by the caller.
            let status = unsafe { self.group(together > 1, work) };
            if status != 0 {
                return (status, last);
            }
        }
        (0, end)
    }
}

/// Goes on as long as there is success (0).
fn first_failure(mut statuses: impl Iterator<Item = i32>) -> i32 {
    statuses.find(|&status| status != 0).unwrap_or(0)
}

#[pymethods]
impl Launcher {
    /// `begin`, `end`: ncclGroupStart and ncclGroupEnd. `steps`: groups of calls that follow one
    /// another, for the piece at the beginning of the buffers; further pieces, `pieces` in all, lie
    /// `piece` bytes apart.
    ///
    /// What holds for the pointers is the caller's to keep until the last `run` has returned and its
    /// work on the GPUs is done: functions are those of NCCL that the numbers of buffers and of
    /// whole numbers tell, or have their C signature; buffers hold all pieces; communicators and
    /// streams are alive, and no other thread calls with them meanwhile.
    #[new]
    fn new(
        begin: usize,
        end: usize,
        steps: Vec<Vec<Said>>,
        piece: usize,
        pieces: usize,
    ) -> PyResult<Launcher> {
        if begin == 0 || end == 0 || pieces == 0 || steps.is_empty() {
            return Err(PyValueError::new_err(
                "a launcher needs ncclGroupStart, ncclGroupEnd, a step and a piece",
            ));
        }
        let call = |(function, buffers, count, numbers, comm, stream): Said| {
            // SAFETY: promised by the caller, see above.
            let function = unsafe { Function::at(function, buffers.len(), numbers.len()) }?;
            let at = |i: usize| buffers.get(i).copied().unwrap_or_default();
            let number = |i: usize| numbers.get(i).copied().unwrap_or_default();
            Ok(Call {
                function,
                buffers: [at(0), at(1)],
                count,
                numbers: [number(0), number(1), number(2)],
                comm,
                stream,
            })
        };
        let steps = steps
            .into_iter()
            .map(|step| step.into_iter().map(call).collect())
            .collect::<PyResult<_>>()?;
        // SAFETY: not null, and ncclGroupStart and ncclGroupEnd: promised by the caller.
        let (begin, end) = unsafe {
            (
                transmute::<usize, Nothing>(begin),
                transmute::<usize, Nothing>(end),
            )
        };
        Ok(Launcher {
            begin,
            end,
            steps,
            piece,
            pieces,
        })
    }

    /// Starts `count` collectives, numbered from `first`, `together` in one more group. Returns the
    /// first ncclResult_t that is not success and the number of its call, or 0 and `first + count`.
    /// Calls after a failure are not made.
    fn run(&self, py: Python<'_>, first: usize, count: usize, together: usize) -> (i32, usize) {
        // SAFETY: what holds for the pointers was promised to `new`.
        py.detach(|| unsafe { self.repeat(first, count, together.max(1)) })
    }

    /// Call 0, waited for; then the time of `count` calls as in `run` and of waiting for them.
    /// Returns what `run` returns, what [`Streams::wait`] returns, and the seconds until all were
    /// started and until all were done. After a failure nothing more is started.
    fn timed(
        &self,
        py: Python<'_>,
        streams: &Streams,
        count: usize,
        together: usize,
        limit: f64,
    ) -> PyResult<(i32, usize, Option<Told>, f64, f64)> {
        let failed = |status, number, said| Ok((status, number, said, 0.0, 0.0));
        let measure = || {
            let began = Instant::now();
            // SAFETY: what holds for the pointers was promised to `new`.
            let (status, number) = unsafe { self.repeat(0, count, together.max(1)) };
            let started = began.elapsed();
            let state = if status == 0 {
                streams.poll(PATIENCE)
            } else {
                State::Done
            };
            (status, number, state, began, started, began.elapsed())
        };
        let (status, number, state, measured) = py.detach(|| {
            // SAFETY: as above.
            let (status, number) = unsafe { self.repeat(0, 1, 1) };
            if status != 0 {
                return (status, number, State::Done, None);
            }
            let state = streams.poll(PATIENCE);
            let measured = matches!(state, State::Done).then(measure);
            (0, 0, state, measured)
        });
        if status != 0 {
            return failed(status, number, None);
        }
        let (status, number, state, began, started, done) = if let Some(measured) = measured {
            measured
        } else {
            if let Some(said) = streams.after(py, state, limit)? {
                return failed(0, 0, Some(said));
            }
            py.detach(measure)
        };
        if status != 0 {
            return failed(status, number, None);
        }
        // Calls longer than the patience: what the interpreter adds is nothing beside them.
        let done = if matches!(state, State::Done) {
            done
        } else {
            if let Some(said) = streams.after(py, state, limit)? {
                return failed(0, 0, Some(said));
            }
            began.elapsed()
        };
        Ok((0, number, None, started.as_secs_f64(), done.as_secs_f64()))
    }
}

/// A rank that is not done: its number, what CUDA and what NCCL said; zeros when time ran out.
type Told = (usize, i32, i32);

enum State {
    Done,
    /// Rank of the first that is not done.
    Waiting(usize),
    Failed(Told),
}

/// The streams of a thread's GPUs, to wait for.
#[pyclass(frozen)]
pub struct Streams {
    query: Query,
    look: Look,
    select: Select,
    /// (device, stream, communicator)
    ranks: Vec<(i32, usize, usize)>,
}

impl Streams {
    /// Asks the streams in turn until all are done, at most `limit`.
    fn poll(&self, limit: Duration) -> State {
        let began = Instant::now();
        let mut left: Vec<usize> = (0..self.ranks.len()).collect();
        loop {
            let mut failed = None;
            let before = left.len();
            left.retain(|&rank| {
                let (device, stream, comm) = self.ranks[rank];
                // Each device has a null stream, and 0 means the current device's.
                let cuda = if stream == 0 {
                    // SAFETY: promised to `new`.
                    unsafe { (self.select)(device) }
                } else {
                    0
                };
                let cuda = if cuda == 0 {
                    // SAFETY: promised to `new`.
                    unsafe { (self.query)(stream) }
                } else {
                    cuda
                };
                if cuda == 0 {
                    return false;
                }
                let (mut said, mut status) = (0, 0);
                if cuda == NOT_READY {
                    // SAFETY: promised to `new`; `said` outlives the call.
                    status = unsafe { (self.look)(comm, &raw mut said) };
                }
                let nccl = if status == 0 { said } else { status };
                if cuda != NOT_READY {
                    failed = failed.or(Some((rank, cuda, 0)));
                } else if nccl != 0 && nccl != IN_PROGRESS {
                    failed = failed.or(Some((rank, 0, nccl)));
                }
                true
            });
            if let Some(told) = failed {
                return State::Failed(told);
            }
            let Some(&first) = left.first() else {
                return State::Done;
            };
            if began.elapsed() >= limit {
                return State::Waiting(first);
            }
            if left.len() == before {
                std::thread::yield_now();
            }
        }
    }

    /// Goes on waiting after `state`, with an ear for interrupts.
    fn after(&self, py: Python<'_>, mut state: State, limit: f64) -> PyResult<Option<Told>> {
        let began = Instant::now();
        loop {
            match state {
                State::Done => return Ok(None),
                State::Failed(told) => return Ok(Some(told)),
                State::Waiting(rank) => {
                    py.check_signals()?;
                    if limit > 0.0 && began.elapsed().as_secs_f64() >= limit {
                        return Ok(Some((rank, 0, 0)));
                    }
                }
            }
            state = py.detach(|| self.poll(PATIENCE));
        }
    }
}

#[pymethods]
impl Streams {
    /// `query`: cudaStreamQuery, `look`: ncclCommGetAsyncError, `select`: cudaSetDevice, or functions
    /// of their C signatures. Streams and communicators live until the last `wait` has returned.
    #[new]
    fn new(
        query: usize,
        look: usize,
        select: usize,
        ranks: Vec<(i32, usize, usize)>,
    ) -> PyResult<Streams> {
        if query == 0 || look == 0 || select == 0 {
            return Err(PyValueError::new_err("a function at address 0"));
        }
        // SAFETY: not null, and these functions: promised by the caller.
        let (query, look, select) = unsafe {
            (
                transmute::<usize, Query>(query),
                transmute::<usize, Look>(look),
                transmute::<usize, Select>(select),
            )
        };
        Ok(Streams {
            query,
            look,
            select,
            ranks,
        })
    }

    /// Waits until all streams are done, `limit` seconds at most where it is not 0. Returns `None`
    /// when they are, else the number of a rank that is not, what CUDA and what NCCL said of it;
    /// zeros when time ran out. Interrupts are heard.
    fn wait(&self, py: Python<'_>, limit: f64) -> PyResult<Option<Told>> {
        let state = py.detach(|| self.poll(PATIENCE));
        self.after(py, state, limit)
    }
}
