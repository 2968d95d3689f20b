//! The frozen schedule's flag, for ranks that share a machine: reduced in shared memory.
//!
//! [`Gate::exchange`] is an all-reduce (or) of one bit. It comes before the collective of a frozen
//! step, so that the collective itself carries nothing more than the data, and is launched only where
//! its result will count: nobody has to wait for the device to learn that.
//!
//! A rank has two slots, for odd and even steps, each in a cache line of its own. A slot holds the
//! step's number and the flag. A peer is at most one step ahead (to go on it needs this rank's word),
//! so it never overwrites what was not read yet. Beside them stands how many wait for the slot asleep:
//! both sides write first and read then, in one order for all (SeqCst), so that either the sleeper
//! sees the word or its writer sees the sleeper.

#![allow(unsafe_code, reason = "atomics in shared memory")]

use crate::sys;
use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LINE: usize = 64;
/// So long a waiting rank burns its core, then it offers it to others, then it sleeps until it is
/// woken: on a busy machine the one that it waits for may need that core.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(60);
/// So often a sleeper looks whether all has ended. In tests never: what is not woken stays asleep.
const LOOK: Duration = Duration::from_millis(if cfg!(test) { 3_600_000 } else { 10 });

/// One rank's side.
pub struct Gate {
    memory: MmapRaw,
    rank: usize,
    size: usize,
    step: AtomicU64,
}

impl Gate {
    /// Bytes that the file must have.
    #[must_use]
    pub fn bytes(size: usize) -> usize {
        size * 2 * LINE
    }

    /// `file`: the same for all `size` ranks, zeros.
    ///
    /// # Errors
    /// Where it is too short, or cannot be mapped.
    pub fn new(file: &File, rank: usize, size: usize) -> io::Result<Self> {
        if file.metadata()?.len() < Self::bytes(size) as u64 || rank >= size {
            let problem = format!("the shared file is too short for rank {rank} of {size}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let memory = MmapOptions::new().len(Self::bytes(size)).map_raw(file)?;
        Ok(Self {
            memory,
            rank,
            size,
            step: AtomicU64::new(0),
        })
    }

    fn slot(&self, rank: usize, step: u64) -> &AtomicU64 {
        let offset = Self::line(rank, step);
        // Safety: rank < size, so it lies inside the mapping, which lives as long as self; a line's
        // start is aligned; all processes access it as an atomic only.
        unsafe { AtomicU64::from_ptr(self.memory.as_mut_ptr().add(offset).cast()) }
    }

    /// The half of the slot that differs from step to step: what the kernel compares.
    fn low(&self, rank: usize, step: u64) -> &AtomicU32 {
        let half = if cfg!(target_endian = "big") { 4 } else { 0 };
        let offset = Self::line(rank, step) + half;
        // Safety: as above. It is given to the kernel, and never read or written here.
        unsafe { AtomicU32::from_ptr(self.memory.as_mut_ptr().add(offset).cast()) }
    }

    /// How many sleep until the slot is written.
    fn sleepers(&self, rank: usize, step: u64) -> &AtomicU32 {
        let offset = Self::line(rank, step) + size_of::<u64>();
        // Safety: as above.
        unsafe { AtomicU32::from_ptr(self.memory.as_mut_ptr().add(offset).cast()) }
    }

    fn line(rank: usize, step: u64) -> usize {
        (rank * 2 + (step & 1) as usize) * LINE
    }

    /// Whether any rank's `flag` is up in this step. Every rank calls it once a step, in one thread
    /// at a time. None: `stop` was true while others had not come.
    pub fn exchange(&self, flag: bool, mut stop: impl FnMut() -> bool) -> Option<bool> {
        let step = self.step.fetch_add(1, Ordering::Relaxed) + 1;
        self.slot(self.rank, step)
            .store(step << 1 | u64::from(flag), Ordering::SeqCst);
        if self.sleepers(self.rank, step).load(Ordering::SeqCst) > 0 {
            sys::wake(self.low(self.rank, step));
        }
        let mut any = flag;
        let mut since: Option<Instant> = None;
        for rank in (0..self.size).filter(|rank| *rank != self.rank) {
            let slot = self.slot(rank, step);
            let said = loop {
                let said = slot.load(Ordering::Acquire);
                if said >> 1 == step {
                    break said;
                }
                let waited = since.get_or_insert_with(Instant::now).elapsed();
                if waited < SPIN {
                    std::hint::spin_loop();
                } else if waited < YIELD {
                    thread::yield_now();
                } else if stop() {
                    return None;
                } else {
                    let sleepers = self.sleepers(rank, step);
                    sleepers.fetch_add(1, Ordering::SeqCst);
                    if slot.load(Ordering::SeqCst) == said {
                        sys::sleep_while(self.low(rank, step), said as u32, LOOK);
                    }
                    sleepers.fetch_sub(1, Ordering::SeqCst);
                }
            };
            any |= said & 1 == 1;
        }
        Some(any)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test")]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn gates(size: usize) -> Vec<Gate> {
        let path = std::env::temp_dir().join(format!("evener-gate-{}-{size}", std::process::id()));
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        file.set_len(Gate::bytes(size) as u64).unwrap();
        let made = (0..size)
            .map(|rank| Gate::new(&file, rank, size).unwrap())
            .collect();
        std::fs::remove_file(path).unwrap();
        made
    }

    #[test]
    fn all_ranks_see_the_same_flag_in_every_step() {
        let flags = |rank: u64, step: u64| (step * 7 + rank * 3).is_multiple_of(11);
        let seen: Vec<Vec<bool>> = thread::scope(|scope| {
            let threads: Vec<_> = gates(3)
                .into_iter()
                .enumerate()
                .map(|(rank, gate)| {
                    scope.spawn(move || {
                        (0..3000)
                            .map(|step| gate.exchange(flags(rank as u64, step), || false).unwrap())
                            .collect()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let expected: Vec<bool> = (0..3000)
            .map(|step| (0..3).any(|rank| flags(rank, step)))
            .collect();
        assert!(seen.iter().all(|rank| *rank == expected));
    }

    #[test]
    fn who_sleeps_is_woken() {
        let (done, all) = mpsc::channel();
        for (rank, gate) in gates(4).into_iter().enumerate() {
            let done = done.clone();
            thread::spawn(move || {
                for step in 0..20 {
                    if step % 4 == rank {
                        thread::sleep(YIELD * 50); // the others are asleep by then
                    }
                    assert_eq!(gate.exchange(false, || false), Some(false));
                }
                done.send(()).unwrap();
            });
        }
        for _ in 0..4 {
            all.recv_timeout(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn a_rank_that_nobody_meets_is_let_go() {
        let gates = gates(2);
        assert_eq!(gates[0].exchange(false, || true), None);
    }

    #[test]
    fn a_short_file_is_refused() {
        let path = std::env::temp_dir().join(format!("evener-gate-{}-short", std::process::id()));
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        assert!(Gate::new(&file, 0, 2).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
