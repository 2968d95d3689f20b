//! NCCL's reader, on a processor: it polls posted buffers while they fill, and takes each line as soon as
//! its flag has come. A line is *torn* where its data is not there then. A message is *early* where its
//! request is finished, or has another length, before all of its lines are there.

#![allow(
    unsafe_code,
    reason = "memory is lent to the engine, and read meanwhile"
)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use evener_engine::comm::Comm;
use evener_engine::{Engine, Memory, Slot, Status};

/// Messages under way, as many as NCCL has.
const SLOTS: usize = 8;
/// Bytes of a line of LL128, and what every message is a multiple of.
pub const LINE: usize = 128;
const WORDS: usize = LINE / 8;
/// Nothing takes longer, on a busy machine either.
const LIMIT: Duration = Duration::from_secs(90);

/// Which of NCCL's protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Words of 4 bytes of data and 4 of flag.
    Ll,
    /// 120 bytes of data and 8 of flag.
    Ll128,
}

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub form: Form,
    /// Most bytes of a message; each has a random number of lines.
    pub most: usize,
    /// Lines of all messages.
    pub lines: u64,
    pub seed: u64,
}

/// What the reader saw.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    pub lines: u64,
    pub torn: u64,
    pub messages: u64,
    pub early: u64,
}

fn random(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Job {
    /// Lines of 128 bytes of each message, of which all are sent.
    fn messages(self) -> impl Iterator<Item = (u64, usize)> {
        let mut left = self.lines;
        (0..).map_while(move |step| {
            let most = (self.most / LINE) as u64;
            let lines = (random(self.seed ^ step << 8) % most + 1).min(left);
            left -= lines;
            (lines > 0).then_some((step, lines as usize))
        })
    }

    /// What 8 bytes of a message are; the flag is its number, from 1.
    fn word(self, step: u64, at: usize) -> u64 {
        let flag = step + 1;
        match self.form {
            Form::Ll128 if at % WORDS == WORDS - 1 => flag,
            Form::Ll128 => random(self.seed ^ flag << 32 ^ at as u64),
            Form::Ll => random(self.seed ^ flag << 32 ^ at as u64) >> 32 | flag << 32,
        }
    }

    fn flag(self, word: u64) -> u64 {
        match self.form {
            Form::Ll => word >> 32,
            Form::Ll128 => word,
        }
    }
}

/// Words that begin at a multiple of 4 KiB, as NCCL's buffers do.
struct Aligned {
    words: Vec<AtomicU64>,
    skip: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Aligned {
        let words: Vec<AtomicU64> = (0..bytes / 8 + 512).map(|_| AtomicU64::new(0)).collect();
        let skip = words.as_ptr().align_offset(4096);
        Aligned { words, skip }
    }

    fn words(&self, bytes: usize) -> &[AtomicU64] {
        &self.words[self.skip..self.skip + bytes / 8]
    }

    fn memory(&self, bytes: usize) -> Memory {
        Memory {
            start: self.words(bytes).as_ptr().cast_mut().cast(),
            length: bytes,
        }
    }
}

fn post<'a>(engine: &Engine, comm: &'a Comm, memory: Memory) -> Option<&'a Slot> {
    // SAFETY: the buffers live until their request is finished or the comm released.
    unsafe { engine.post(comm, memory) }.expect("the comm is open")
}

/// How many bytes a finished request had.
fn finished(slot: &Slot) -> Option<usize> {
    match slot.test() {
        Status::Pending => None,
        Status::Done(length) => Some(length),
        Status::Failed(_) => panic!("a request failed"),
    }
}

/// Sends all messages of a job, and waits until they have arrived.
pub fn send(engine: &Engine, comm: &Comm, job: Job) {
    let buffers: Vec<Aligned> = (0..SLOTS).map(|_| Aligned::new(job.most)).collect();
    let mut flying: VecDeque<&Slot> = VecDeque::new();
    let mut end = Instant::now() + LIMIT;
    let mut wait = |slot: &Slot| {
        while finished(slot).is_none() {
            assert!(Instant::now() < end, "a message has not arrived");
            std::thread::sleep(Duration::from_micros(20));
        }
        end = Instant::now() + LIMIT;
    };
    for (step, lines) in job.messages() {
        if flying.len() == SLOTS
            && let Some(first) = flying.pop_front()
        {
            wait(first);
        }
        let buffer = &buffers[step as usize % SLOTS];
        for (at, word) in buffer.words(lines * LINE).iter().enumerate() {
            word.store(job.word(step, at), Ordering::Relaxed);
        }
        let memory = buffer.memory(lines * LINE);
        let slot = loop {
            if let Some(slot) = post(engine, comm, memory) {
                break slot;
            }
            std::thread::yield_now();
        };
        flying.push_back(slot);
    }
    flying.into_iter().for_each(wait);
}

/// A message that is not read to its end.
struct Waiting<'a> {
    step: u64,
    slot: &'a Slot,
    words: &'a [AtomicU64],
    /// Lines that were not seen: the first words of each.
    fresh: Vec<usize>,
    /// Its request is finished.
    done: bool,
}

impl Waiting<'_> {
    /// Looks once at every line that was not seen: how many have come, and are torn.
    fn look(&mut self, job: Job) -> (u64, u64) {
        let (mut came, mut torn) = (0, 0);
        let (step, words) = (self.step, self.words);
        let is_new = |word: u64| job.flag(word) == step + 1;
        self.fresh.retain(|start| {
            let line = match job.form {
                Form::Ll => &words[*start..*start + 2],
                Form::Ll128 => &words[*start..*start + WORDS],
            };
            // The flags first, as the processor sees them; what is read after them is no older.
            let read = |at: usize| line[at].load(Ordering::Acquire);
            let good = match job.form {
                Form::Ll => {
                    let (low, high) = (read(0), read(1));
                    if !is_new(low) || !is_new(high) {
                        return true;
                    }
                    low == job.word(step, *start) && high == job.word(step, *start + 1)
                }
                Form::Ll128 => {
                    if !is_new(read(WORDS - 1)) {
                        return true;
                    }
                    (0..WORDS - 1).all(|at| read(at) == job.word(step, *start + at))
                }
            };
            came += 1;
            torn += u64::from(!good);
            false
        });
        (came, torn)
    }
}

/// Receives all messages of a job, and reads them while they come.
pub fn receive(engine: &Engine, comm: &Comm, job: Job) -> Seen {
    let buffers: Vec<Aligned> = (0..SLOTS).map(|_| Aligned::new(job.most)).collect();
    let (mut seen, mut waiting) = (Seen::default(), VecDeque::new());
    let mut messages = job.messages().peekable();
    let mut end = Instant::now() + LIMIT;
    let each = match job.form {
        Form::Ll => 2,
        Form::Ll128 => WORDS,
    };
    loop {
        while waiting.len() < SLOTS
            && let Some((step, lines)) = messages.peek().copied()
        {
            let buffer = &buffers[step as usize % SLOTS];
            let Some(slot) = post(engine, comm, buffer.memory(lines * LINE)) else {
                break;
            };
            messages.next();
            waiting.push_back(Waiting {
                step,
                slot,
                words: buffer.words(lines * LINE),
                fresh: (0..lines * WORDS).step_by(each).collect(),
                done: false,
            });
        }
        for one in &mut waiting {
            // Before its lines: all of them are there when this is.
            let length = if one.done { None } else { finished(one.slot) };
            let (came, torn) = one.look(job);
            seen.lines += came;
            seen.torn += torn;
            if let Some(length) = length {
                one.done = true;
                seen.early += u64::from(!one.fresh.is_empty() || length != size_of_val(one.words));
                one.fresh.clear(); // nobody waits for them
            }
            if came > 0 {
                end = Instant::now() + LIMIT;
            }
        }
        let Some(first) = waiting.front() else {
            return seen;
        };
        if first.done {
            waiting.pop_front();
            seen.messages += 1;
        }
        assert!(Instant::now() < end, "nothing has come: {seen:?}");
    }
}
