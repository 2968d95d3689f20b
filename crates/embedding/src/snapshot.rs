//! Snapshots and deltas: what a store writes so that nothing is lost.
//!
//! **One instant.** Every change of a row marks it with the current epoch. A snapshot locks all shards
//! for a moment, takes the epoch as its `cut`, and opens the next one; from then on a row that belongs
//! to the snapshot and changes is copied aside first. The shards are then read one after another, while
//! training goes on. A delta is the same with a lower bound: rows marked after the epoch of the file
//! before it, and the keys that were removed since.
//!
//! **One chain.** Snapshots and deltas of a folder follow each other; files elsewhere ([`aside`],
//! [`into_memory`]) are no part of it. A delta that could not follow the last file of its folder, or
//! that would be larger than all rows, is written as a full snapshot.
//!
//! **Whole or not there.** A file is written under another name, synced, and renamed; then its folder is
//! synced. Whatever goes wrong before leaves older files as they are, and the epoch of the last file
//! where it was, so that the next delta has what the lost one would have had.
//!
//! **The format**, version 1, little-endian (docs/reference/embedding-snapshots.md):
//! `EVENEREM`, version u32, header length u32, header (JSON), CRC-32 of all before it; then blocks: kind
//! u32, shard u32, count u64, length u64, CRC-32 of these 24 bytes and the payload, payload. The last
//! block says how many blocks and rows there were.

mod files;
mod folder;
mod read;
mod write;

pub use folder::{aside, into_folder};
pub use read::{apply_delta, from_bytes, restore};
pub use write::into_memory;

use crate::options::Options;
use crate::saver::Saver;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const MAGIC: &[u8; 8] = b"EVENEREM";
const VERSION: u32 = 1;
/// Payload of a block, about.
const BLOCK: usize = 4 << 20;
/// A block that claims more is not one of ours.
const LONGEST: u64 = 1 << 32;

const ROWS: u32 = 1;
const REMOVED: u32 = 2;
const COUNTS: u32 = 3;
const STRINGS: u32 = 4;
const BLOOM: u32 = 5;
const END: u32 = 6;

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// All rows.
    Full,
    /// What changed since another file.
    Delta,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Header {
    kind: Kind,
    id: String,
    /// Id of the file that a delta follows; empty: an empty store.
    parent: String,
    step: Option<u32>,
    steps: u64,
    evicted: u32,
    #[serde(default)]
    aged: u32,
    record: u64,
    options: Options,
}

/// What was written or read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Saved {
    /// The file; of a folder the last that was read.
    pub path: PathBuf,
    /// Rows in it, or in the store after a folder was read.
    pub rows: u64,
    /// Keys that a delta takes away.
    pub removed: u64,
    /// Bytes of the file or files.
    pub bytes: u64,
    /// The last step.
    pub step: u32,
    /// The name by which a delta says what it follows.
    pub id: String,
}
