//! What a measurement is made of: what is asked for, the control connection over which the two
//! processes agree, and the memory that messages come from and go to.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use crate::DriveError;

/// What is sent when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Messages of one size without end.
    Steady,
    /// All-reduces, as NCCL's ring of two ranks does them.
    Ring,
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// 0 or 1. Rank 0 waits for rank 1 at `control`.
    pub rank: u32,
    /// `address:port` of rank 0, for the agreement.
    pub control: String,
    /// The plug-in; without one, plain TCP streams.
    pub plugin: Option<PathBuf>,
    /// Plain streams a comm each way. A single one is moved by the progress thread, as NCCL's sockets
    /// do by default; of several, each has threads of its own.
    pub streams: usize,
    /// Version of the interface.
    pub version: u32,
    /// Comms in each direction.
    pub comms: usize,
    /// What is sent when.
    pub pattern: Pattern,
    /// Messages in flight on each. A ring has its own.
    pub depth: usize,
    /// Bytes of a message, or of an all-reduce; one run each.
    pub sizes: Vec<usize>,
    /// About how long a run takes, seconds.
    pub seconds: f64,
    /// Whether what arrives is compared with what was sent.
    pub verify: bool,
    /// A steady run lasts until this file is there, which rank 0 looks for. `seconds` is then that of the
    /// measurements before it.
    pub until: Option<PathBuf>,
}

pub(crate) struct Control(pub TcpStream);

impl Control {
    pub fn say(&mut self, number: u64) -> std::io::Result<()> {
        self.0.write_all(&number.to_le_bytes())
    }

    pub fn hear(&mut self) -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// What the peer has said, if it has said something.
    pub fn heard(&mut self) -> std::io::Result<Option<u64>> {
        self.0.set_nonblocking(true)?;
        let there = self.0.peek(&mut [0; 8]);
        self.0.set_nonblocking(false)?;
        match there {
            Ok(1..8) => Ok(None),
            Ok(_) => self.hear().map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn meet(&mut self) -> std::io::Result<()> {
        self.say(0)?;
        self.hear().map(|_| ())
    }
}

/// Buffers: for each comm and place in flight, one to send and one to receive.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    stride: usize,
    depth: usize,
    comms: usize,
    turn: u8,
}

impl Memory {
    /// For `comms` in each direction, with `depth` messages of `most` bytes in flight on each.
    pub fn new(comms: usize, depth: usize, most: usize) -> Memory {
        let stride = most.next_multiple_of(4096);
        let count = comms * depth * 2;
        Memory {
            bytes: vec![0; stride * count],
            stride,
            depth,
            comms,
            turn: 0,
        }
    }

    /// Other bytes from now on, so that what was left of the last run is no message of this one.
    pub fn turn(&mut self) {
        self.turn = self.turn.wrapping_add(1);
    }

    pub fn at(&mut self, sending: bool, comm: usize, number: usize) -> *mut u8 {
        let place = (usize::from(sending) * self.comms + comm) * self.depth + number % self.depth;
        self.bytes[place * self.stride..].as_mut_ptr()
    }

    fn pattern(&self, comm: usize, number: usize) -> u8 {
        (number * 7 + comm * 31 + 1) as u8 ^ self.turn
    }

    pub fn write(&mut self, comm: usize, number: usize, size: usize) {
        let byte = self.pattern(comm, number);
        let place = (self.comms + comm) * self.depth + number % self.depth;
        let at = place * self.stride;
        for (index, cell) in self.bytes[at..at + size].iter_mut().enumerate() {
            *cell = byte.wrapping_add((index >> 6) as u8);
        }
    }

    pub fn check(&self, comm: usize, number: usize, size: usize) -> Result<(), DriveError> {
        let byte = self.pattern(comm, number);
        let at = (comm * self.depth + number % self.depth) * self.stride;
        let good = self.bytes[at..at + size]
            .iter()
            .enumerate()
            .all(|(index, cell)| *cell == byte.wrapping_add((index >> 6) as u8));
        if good {
            Ok(())
        } else {
            Err(DriveError::Content(number as u64))
        }
    }
}
