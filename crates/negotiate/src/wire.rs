//! What ranks and the coordinator say to each other, and its form as bytes.
//!
//! Numbers are LEB128 varints (signed ones zigzag), texts and lists carry their length first. A
//! reader checks every length against what is left, so that no input makes it panic or allocate more
//! than it was sent.

use std::sync::Arc;
use thiserror::Error;

/// Bytes that are no message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a message between ranks is malformed at byte {0}")]
pub struct WireError(pub usize);

/// What a request wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Reduce over all ranks.
    Allreduce,
    /// Concatenate along the first dimension.
    Allgather,
    /// Copy from one rank.
    Broadcast,
    /// Reduce by the Adasum rule.
    Adasum,
    /// Send a slice to each rank.
    Alltoall,
    /// Reduce, and keep a part.
    Reducescatter,
    /// Wait for all.
    Barrier,
    /// This rank has no more data.
    Join,
    /// Make a process set.
    AddSet,
    /// Forget a process set.
    RemoveSet,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Allreduce,
        Self::Allgather,
        Self::Broadcast,
        Self::Adasum,
        Self::Alltoall,
        Self::Reducescatter,
        Self::Barrier,
        Self::Join,
        Self::AddSet,
        Self::RemoveSet,
    ];

    /// The kind of that number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Horovod's name for it, as in its messages and timelines.
    #[must_use]
    pub fn name(self) -> &'static str {
        [
            "ALLREDUCE",
            "ALLGATHER",
            "BROADCAST",
            "ADASUM",
            "ALLTOALL",
            "REDUCESCATTER",
            "BARRIER",
            "JOIN",
            "ADD_PROCESS_SET",
            "REMOVE_PROCESS_SET",
        ][self as usize]
    }
}

/// One tensor of a request. `label` is its name where a request has several.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Index into [`crate::check::DTYPES`].
    pub dtype: u8,
    /// Sizes of its dimensions.
    pub shape: Vec<u64>,
    /// Must be equal on all ranks.
    pub label: String,
}

impl Meta {
    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// What one rank wants done: a group of tensors under one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The same on all ranks; unique among what a rank has in flight in this process set.
    pub name: String,
    /// The process set.
    pub set: u32,
    /// The operation.
    pub kind: Kind,
    /// Its tensors.
    pub tensors: Vec<Meta>,
    /// Whether they are on a GPU.
    pub gpu: bool,
    /// The reduction; index of Horovod's operations.
    pub op: u8,
    /// The root as a global rank; for `RemoveSet` the set's number.
    pub root: u32,
    /// Factors before and after a reduction.
    pub factors: (f64, f64),
    /// For `Alltoall` the rows for each member; for `AddSet` the ranks.
    pub splits: Vec<u64>,
}

/// What was agreed on a request. Equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The request of the first member; where ranks may differ, `rows` and `splits` say how.
    pub request: Request,
    /// `Allgather`: first dimensions, a list a member, an entry a tensor. `Alltoall`: the splits of
    /// each member.
    pub rows: Vec<Vec<u64>>,
    /// `Join`: the last rank. `AddSet`: the new set's number, or -1 where it exists already.
    pub value: i64,
    /// Why it cannot be; empty where it can.
    pub error: String,
}

/// One answer of a fused launch, by number where the ranks have it already.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// The cached answer of that number.
    Known(u32),
    /// A new one; cached under the number unless that is 0.
    New(u32, Arc<Answer>),
}

/// From a rank to the coordinator.
#[derive(Debug, Clone, PartialEq)]
pub enum Up {
    /// What the rank has submitted: cached numbers, and requests.
    Announce {
        /// The epoch in which it holds.
        epoch: u32,
        /// Numbers of answers that would be repeated.
        hits: Vec<u32>,
        /// Everything else.
        requests: Vec<Request>,
    },
    /// The rank leaves the frozen schedule of that epoch.
    Thaw(u32),
    /// The rank ends. Holds in that epoch.
    Shutdown(u32),
    /// The rank cannot go on, and why.
    Failed(String),
}

/// From the coordinator to every rank, in one order.
#[derive(Debug, Clone, PartialEq)]
pub enum Down {
    /// Launch these together.
    Launch(Vec<Part>),
    /// Forget these cached answers.
    Evict(Vec<u32>),
    /// The schedule from now on: steps of fused cached answers, again and again.
    Freeze(u32, Vec<Vec<u32>>),
    /// Some rank leaves the frozen schedule of that epoch.
    Thaw(u32),
    /// A rank ended; to itself, that nothing more is launched.
    Shutdown(u32),
    /// Nothing more can be launched, and why.
    Abort(String),
}

/// Appends values to a buffer.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value as u8) | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
    fn signed(&mut self, value: i64) {
        self.number(((value << 1) ^ (value >> 63)) as u64);
    }
    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }
    fn real(&mut self, value: f64) {
        self.0.extend_from_slice(&value.to_bits().to_le_bytes());
    }
    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.number(items.len() as u64);
        for item in items {
            each(self, item);
        }
    }
    fn numbers(&mut self, items: &[u64]) {
        self.list(items, |w, n| w.number(*n));
    }
    fn short(&mut self, items: &[u32]) {
        self.list(items, |w, n| w.number(u64::from(*n)));
    }
    fn request(&mut self, r: &Request) {
        self.text(&r.name);
        self.number(u64::from(r.set));
        self.0.push(r.kind as u8);
        self.list(&r.tensors, |w, meta| {
            w.0.push(meta.dtype);
            w.numbers(&meta.shape);
            w.text(&meta.label);
        });
        self.0.push(u8::from(r.gpu));
        self.0.push(r.op);
        self.number(u64::from(r.root));
        self.real(r.factors.0);
        self.real(r.factors.1);
        self.numbers(&r.splits);
    }
    fn answer(&mut self, a: &Answer) {
        self.request(&a.request);
        self.list(&a.rows, |w, row| w.numbers(row));
        self.signed(a.value);
        self.text(&a.error);
    }
}

/// Takes values from a buffer.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn bad<T>(&self) -> Result<T, WireError> {
        Err(WireError(self.at))
    }
    fn byte(&mut self) -> Result<u8, WireError> {
        let Some(&byte) = self.bytes.get(self.at) else {
            return self.bad();
        };
        self.at += 1;
        Ok(byte)
    }
    fn number(&mut self) -> Result<u64, WireError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        self.bad()
    }
    fn short(&mut self) -> Result<u32, WireError> {
        u32::try_from(self.number()?).map_err(|_| WireError(self.at))
    }
    fn signed(&mut self) -> Result<i64, WireError> {
        let value = self.number()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }
    fn slice(&mut self, length: usize) -> Result<&[u8], WireError> {
        let end = self.at.checked_add(length).ok_or(WireError(self.at))?;
        let Some(slice) = self.bytes.get(self.at..end) else {
            return self.bad();
        };
        self.at = end;
        Ok(slice)
    }
    fn text(&mut self) -> Result<String, WireError> {
        let at = self.at;
        let length = usize::try_from(self.number()?).map_err(|_| WireError(at))?;
        String::from_utf8(self.slice(length)?.to_vec()).map_err(|_| WireError(at))
    }
    fn real(&mut self) -> Result<f64, WireError> {
        let mut bits = [0; 8];
        bits.copy_from_slice(self.slice(8)?);
        Ok(f64::from_bits(u64::from_le_bytes(bits)))
    }
    fn list<T>(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.number()?;
        // Every item takes a byte at least.
        if count > (self.bytes.len() - self.at) as u64 {
            return self.bad();
        }
        (0..count).map(|_| each(self)).collect()
    }
    fn numbers(&mut self) -> Result<Vec<u64>, WireError> {
        self.list(Self::number)
    }
    fn shorts(&mut self) -> Result<Vec<u32>, WireError> {
        self.list(Self::short)
    }
    fn request(&mut self) -> Result<Request, WireError> {
        Ok(Request {
            name: self.text()?,
            set: self.short()?,
            kind: {
                let number = self.byte()?;
                Kind::from_number(number).ok_or(WireError(self.at))?
            },
            tensors: self.list(|r| {
                Ok(Meta {
                    dtype: r.byte()?,
                    shape: r.numbers()?,
                    label: r.text()?,
                })
            })?,
            gpu: self.byte()? != 0,
            op: self.byte()?,
            root: self.short()?,
            factors: (self.real()?, self.real()?),
            splits: self.numbers()?,
        })
    }
    fn answer(&mut self) -> Result<Answer, WireError> {
        Ok(Answer {
            request: self.request()?,
            rows: self.list(Self::numbers)?,
            value: self.signed()?,
            error: self.text()?,
        })
    }
    fn end<T>(self, value: T) -> Result<T, WireError> {
        if self.at == self.bytes.len() {
            Ok(value)
        } else {
            self.bad()
        }
    }
}

impl Up {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Announce {
                epoch,
                hits,
                requests,
            } => {
                w.0.push(0);
                w.number(u64::from(*epoch));
                w.short(hits);
                w.list(requests, Writer::request);
            }
            Self::Thaw(epoch) => {
                w.0.push(1);
                w.number(u64::from(*epoch));
            }
            Self::Shutdown(epoch) => {
                w.0.push(2);
                w.number(u64::from(*epoch));
            }
            Self::Failed(reason) => {
                w.0.push(3);
                w.text(reason);
            }
        }
        w.0
    }

    /// From bytes.
    ///
    /// # Errors
    /// Where they are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader { bytes, at: 0 };
        let message = match r.byte()? {
            0 => Self::Announce {
                epoch: r.short()?,
                hits: r.shorts()?,
                requests: r.list(Reader::request)?,
            },
            1 => Self::Thaw(r.short()?),
            2 => Self::Shutdown(r.short()?),
            3 => Self::Failed(r.text()?),
            _ => return r.bad(),
        };
        r.end(message)
    }
}

impl Down {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Launch(parts) => {
                w.0.push(0);
                w.list(parts, |w, part| match part {
                    Part::Known(number) => w.number(u64::from(*number) << 1),
                    Part::New(number, answer) => {
                        w.number(u64::from(*number) << 1 | 1);
                        w.answer(answer);
                    }
                });
            }
            Self::Evict(numbers) => {
                w.0.push(1);
                w.short(numbers);
            }
            Self::Freeze(epoch, steps) => {
                w.0.push(2);
                w.number(u64::from(*epoch));
                w.list(steps, |w, step| w.short(step));
            }
            Self::Thaw(epoch) => {
                w.0.push(3);
                w.number(u64::from(*epoch));
            }
            Self::Shutdown(rank) => {
                w.0.push(4);
                w.number(u64::from(*rank));
            }
            Self::Abort(reason) => {
                w.0.push(5);
                w.text(reason);
            }
        }
        w.0
    }

    /// From bytes.
    ///
    /// # Errors
    /// Where they are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader { bytes, at: 0 };
        let message = match r.byte()? {
            0 => Self::Launch(r.list(|r| {
                let number = r.number()?;
                let id = u32::try_from(number >> 1).map_err(|_| WireError(r.at))?;
                Ok(if number & 1 == 0 {
                    Part::Known(id)
                } else {
                    Part::New(id, Arc::new(r.answer()?))
                })
            })?),
            1 => Self::Evict(r.shorts()?),
            2 => Self::Freeze(r.short()?, r.list(Reader::shorts)?),
            3 => Self::Thaw(r.short()?),
            4 => Self::Shutdown(r.short()?),
            5 => Self::Abort(r.text()?),
            _ => return r.bad(),
        };
        r.end(message)
    }
}
