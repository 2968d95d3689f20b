//! What ranks and the coordinator say to each other, and its form as bytes.
//!
//! The bytes are postcard's: varints, texts and lists behind their length. No input makes a reader
//! panic, or allocate much more than it was sent.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use thiserror::Error;

/// Bytes that are not a message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// Its fields cannot be read.
    #[error("a message between ranks is malformed: {0}")]
    Malformed(#[from] postcard::Error),
    /// Bytes follow it.
    #[error("a message between ranks is malformed: {0} bytes follow its end")]
    Rest(usize),
}

/// What a request wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The request of the first member; where ranks may differ, `rows` and `splits` say how.
    pub request: Request,
    /// `Allgather`: first dimensions, a list per member, an entry per tensor. `Alltoall`: the splits of
    /// each member.
    pub rows: Vec<Vec<u64>>,
    /// `Join`: the last rank. `AddSet`: the new set's number, or -1 where it exists already.
    pub value: i64,
    /// Why it cannot be; empty where it can.
    pub error: String,
}

/// One answer of a fused launch, by number where the ranks have it already.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Part {
    /// The cached answer of that number.
    Known(u32),
    /// A new one; cached under the number unless that is 0.
    New(u32, Arc<Answer>),
}

/// From a rank to the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

fn encode(message: &impl Serialize) -> Vec<u8> {
    // A list knows its length and memory grows, so nothing is left that can fail.
    postcard::to_allocvec(message).expect("memory grows")
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        (_, rest) => Err(WireError::Rest(rest.len())),
    }
}

impl Up {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From bytes.
    ///
    /// # Errors
    /// Where they are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        decode(bytes)
    }
}

impl Down {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From bytes.
    ///
    /// # Errors
    /// Where they are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        decode(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> impl Strategy<Value = Request> {
        let meta = (any::<u8>(), prop::collection::vec(any::<u64>(), 0..4), ".*");
        let meta = meta.prop_map(|(dtype, shape, label)| Meta {
            dtype,
            shape,
            label,
        });
        (
            ".*",
            any::<(u32, bool, u8, u32)>(),
            0..Kind::ALL.len() as u8,
            prop::collection::vec(meta, 0..4),
            any::<(u64, u64)>(),
            prop::collection::vec(any::<u64>(), 0..4),
        )
            .prop_map(
                |(name, (set, gpu, op, root), kind, tensors, factors, splits)| Request {
                    name,
                    set,
                    kind: Kind::from_number(kind).expect("a kind"),
                    tensors,
                    gpu,
                    op,
                    root,
                    factors: (factors.0 as f64, 1.0 / (factors.1 as f64 + 0.5)),
                    splits,
                },
            )
    }

    fn answer() -> impl Strategy<Value = Arc<Answer>> {
        let rows = prop::collection::vec(prop::collection::vec(any::<u64>(), 0..4), 0..4);
        (request(), rows, any::<i64>(), ".*").prop_map(|(request, rows, value, error)| {
            Arc::new(Answer {
                request,
                rows,
                value,
                error,
            })
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            requests in prop::collection::vec(request(), 0..4),
            answers in prop::collection::vec(answer(), 0..4),
            hits in prop::collection::vec(any::<u32>(), 0..9),
            epoch: u32,
        ) {
            let up = Up::Announce { epoch, hits: hits.clone(), requests };
            prop_assert_eq!(Up::decode(&up.encode()), Ok(up));
            let new = answers.into_iter().map(|answer| Part::New(epoch, answer));
            let parts = hits.iter().map(|hit| Part::Known(*hit)).chain(new).collect();
            let down = Down::Launch(parts);
            prop_assert_eq!(Down::decode(&down.encode()), Ok(down));
            let down = Down::Freeze(epoch, vec![hits; 2]);
            prop_assert_eq!(Down::decode(&down.encode()), Ok(down));
        }

        /// Strangers may send anything: no panic, and nothing that is cut off or goes on is taken.
        #[test]
        fn other_bytes_are_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
            request in request(),
            at: prop::sample::Index,
            to: u8,
        ) {
            let _ = (Up::decode(&bytes), Down::decode(&bytes));
            let good = Up::Announce { epoch: 1, hits: vec![], requests: vec![request] }.encode();
            prop_assert!(Up::decode(&good[..at.index(good.len())]).is_err());
            prop_assert!(Up::decode(&[&good[..], &[to]].concat()).is_err());
            let mut other = good.clone();
            other[at.index(good.len())] = to;
            let _ = Up::decode(&other);
        }
    }

    /// A length is believed only as far as bytes follow.
    #[test]
    fn a_length_alone_takes_no_memory() {
        let mut bytes = vec![0, 1]; // Announce, epoch 1
        bytes.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]); // 2^63 hits
        assert!(Up::decode(&bytes).is_err());
    }
}
