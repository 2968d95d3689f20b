//! Snapshots and deltas: what a store writes so that nothing is lost.
//!
//! **One instant.** Every change of a row marks it with the current epoch. A snapshot locks all shards
//! for a moment, takes the epoch as its `cut`, and opens the next one; from then on a row that belongs
//! to the snapshot and changes is copied aside first. The shards are then read one after another, while
//! training goes on. A delta is the same with a lower bound: rows marked after the epoch of the file
//! before it, and the keys that were removed since.
//!
//! **Whole or not there.** A file is written under another name, synced, and renamed; then its folder is
//! synced. Whatever goes wrong before leaves older files as they are, and the epoch of the last file
//! where it was, so that the next delta has what the lost one would have had.
//!
//! **The format**, version 1, little-endian (docs/reference/embedding-snapshots.md):
//! `EVENEREM`, version u32, header length u32, header (JSON), CRC-32 of all before it; then blocks: kind
//! u32, shard u32, count u64, length u64, CRC-32 of these 24 bytes and the payload, payload. The last
//! block says how many blocks and rows there were.

use crate::error::{Error, Result, invalid, io};
use crate::hash;
use crate::options::{Keys, Options};
use crate::shard::{Record, Saving};
use crate::table::{Clock, Table, lock, reading, writing};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

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
    /// Of the file that a delta follows; empty: an empty store.
    parent: String,
    step: Option<u32>,
    steps: u64,
    evicted: u32,
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

/// The last file of a store.
#[derive(Debug, Default)]
pub struct Saver {
    /// Marks up to this are in it.
    saved: i16,
    id: String,
}

impl Saver {
    /// Comes after the same file as another, with nothing saved since.
    pub fn follow(&mut self, other: &Saver) {
        self.id.clone_from(&other.id);
        self.saved = 0;
    }
}

/// Writes a store; `path` is for messages.
///
/// # Errors
/// Where the sink fails; the store goes on as if this had not been called.
pub fn write(table: &Table, kind: Kind, sink: &mut dyn Write, path: &Path) -> Result<Saved> {
    let mut saver = lock(&table.saver);
    let core = &table.core;

    // The instant.
    let (clock, cut, removed) = {
        let mut shards: Vec<_> = table.shards.iter().map(writing).collect();
        let mut epoch = core.epoch.load(Ordering::Relaxed);
        if epoch == u8::MAX {
            // The marks are used up: 1 for what the next delta has, 0 for the rest.
            let saved = saver.saved.max(0) as u8;
            shards
                .iter_mut()
                .for_each(|shard| shard.remark(core, saved));
            saver.saved = 0;
            epoch = 1;
        }
        core.epoch.store(epoch + 1, Ordering::Relaxed);
        core.tracking.store(true, Ordering::Relaxed);
        let since = match kind {
            Kind::Full => -1,
            Kind::Delta => saver.saved,
        };
        let mut removed = Vec::new();
        for shard in &mut shards {
            shard.saving = Some(Saving {
                since,
                cut: epoch,
                before: Vec::new(),
            });
            removed.push(std::mem::take(&mut shard.removed));
        }
        (*lock(&table.clock), epoch, removed)
    };

    let id = new_id(&saver.id);
    let written = body(table, kind, &id, &saver.id, clock, &removed, sink)
        .map_err(io(format!("{} cannot be written", path.display())));
    match written {
        Ok((rows, bytes)) => {
            saver.saved = i16::from(cut);
            saver.id.clone_from(&id);
            Ok(Saved {
                path: path.to_owned(),
                rows,
                removed: match kind {
                    Kind::Full => 0,
                    Kind::Delta => removed.iter().map(|keys| keys.len() as u64).sum(),
                },
                bytes,
                step: clock.step.unwrap_or(0),
                id,
            })
        }
        Err(error) => {
            undo(table, removed);
            Err(error)
        }
    }
}

/// The shards forget a snapshot that failed; what was removed before it is told to the next one.
fn undo(table: &Table, removed: Vec<Vec<i64>>) {
    for (shard, mut keys) in table.shards.iter().zip(removed) {
        let mut shard = writing(shard);
        shard.saving = None;
        keys.append(&mut shard.removed);
        shard.removed = keys;
    }
}

fn new_id(before: &str) -> String {
    // Unique enough to tell files apart: time, process, and the file before.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as i64);
    let text = hash::text(before.as_bytes());
    let low = hash::mix(now ^ text);
    let high = hash::mix(now.rotate_left(32) ^ i64::from(std::process::id()));
    format!("{high:016x}{low:016x}")
}

struct Blocks<'a> {
    sink: &'a mut dyn Write,
    bytes: u64,
    blocks: u64,
}

impl Blocks<'_> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.sink.write_all(bytes)
    }

    fn block(&mut self, kind: u32, shard: u32, count: u64, payload: &[u8]) -> std::io::Result<()> {
        let mut head = Vec::with_capacity(28);
        head.extend_from_slice(&kind.to_le_bytes());
        head.extend_from_slice(&shard.to_le_bytes());
        head.extend_from_slice(&count.to_le_bytes());
        head.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&head);
        crc.update(payload);
        head.extend_from_slice(&crc.finalize().to_le_bytes());
        self.put(&head)?;
        self.put(payload)?;
        self.blocks += 1;
        Ok(())
    }
}

fn body(
    table: &Table,
    kind: Kind,
    id: &str,
    parent: &str,
    clock: Clock,
    removed: &[Vec<i64>],
    sink: &mut dyn Write,
) -> std::io::Result<(u64, u64)> {
    let core = &table.core;
    let header = Header {
        kind,
        id: id.to_owned(),
        parent: match kind {
            Kind::Full => String::new(),
            Kind::Delta => parent.to_owned(),
        },
        step: clock.step,
        steps: clock.count,
        evicted: clock.evicted,
        record: core.record() as u64,
        options: core.options.clone(),
    };
    let json = serde_json::to_vec(&header)?;
    let mut head = MAGIC.to_vec();
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&(json.len() as u32).to_le_bytes());
    head.extend_from_slice(&json);
    let crc = crc32fast::hash(&head);
    head.extend_from_slice(&crc.to_le_bytes());
    let mut out = Blocks {
        sink,
        bytes: 0,
        blocks: 0,
    };
    out.put(&head)?;

    if kind == Kind::Delta {
        for (number, keys) in removed.iter().enumerate().filter(|(_, k)| !k.is_empty()) {
            let payload: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
            out.block(REMOVED, number as u32, keys.len() as u64, &payload)?;
        }
    }
    let record = core.record();
    let names = core.options.keys == Keys::String;
    let (mut rows, mut records) = (0u64, Vec::new());
    for (number, shard) in table.shards.iter().enumerate() {
        records.clear();
        let (mut counts, mut bloom) = (Vec::new(), Vec::new());
        {
            let shard = reading(shard);
            shard.save(core, &mut records);
            if kind == Kind::Full {
                counts = shard.filter.counts();
                bloom.extend_from_slice(shard.filter.counters());
            }
        }
        // What changed in between was kept aside although it had been read: it goes here.
        writing(shard).saving = None;
        for part in records.chunks((BLOCK / record).max(1) * record) {
            let n = (part.len() / record) as u64;
            out.block(ROWS, number as u32, n, part)?;
            rows += n;
            if names {
                let mut payload = Vec::new();
                let mut n = 0;
                for record in part.chunks_exact(record).filter_map(Record::parse) {
                    if let Some(name) = table.strings.name(record.key) {
                        payload.extend_from_slice(&record.key.to_le_bytes());
                        payload.extend_from_slice(&(name.len() as u32).to_le_bytes());
                        payload.extend_from_slice(&name);
                        n += 1;
                    }
                }
                out.block(STRINGS, number as u32, n, &payload)?;
            }
        }
        if !counts.is_empty() {
            let mut payload = Vec::with_capacity(counts.len() * 12);
            for (key, n) in &counts {
                payload.extend_from_slice(&key.to_le_bytes());
                payload.extend_from_slice(&n.to_le_bytes());
            }
            out.block(COUNTS, number as u32, counts.len() as u64, &payload)?;
        }
        if !bloom.is_empty() {
            out.block(BLOOM, number as u32, table.shards.len() as u64, &bloom)?;
        }
    }
    let mut payload = rows.to_le_bytes().to_vec();
    payload.extend_from_slice(&(out.blocks + 1).to_le_bytes());
    out.block(END, 0, rows, &payload)?;
    out.sink.flush()?;
    Ok((rows, out.bytes))
}

/// A block that was read, and whose checksum is right.
struct Block {
    kind: u32,
    shard: u32,
    count: u64,
    payload: Vec<u8>,
}

/// Reads a file of this format, checking all of it.
struct Reader<R> {
    from: R,
    path: PathBuf,
    at: u64,
    blocks: u64,
    rows: u64,
    header: Header,
}

impl<R: Read> Reader<R> {
    fn open(mut from: R, path: &Path) -> Result<Reader<R>> {
        let bad = |what: String| Error::Corrupt {
            path: path.to_owned(),
            what,
        };
        let mut head = vec![0u8; 16];
        fill(&mut from, &mut head, path, 0, "the head")?;
        if &head[..8] != MAGIC {
            return Err(bad("this is not a snapshot of an embedding".to_owned()));
        }
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (version, length) = (number(8), number(12) as usize);
        if version != VERSION {
            return Err(bad(format!(
                "the format has version {version}, and this Evener reads version {VERSION}"
            )));
        }
        if length > 1 << 20 {
            return Err(bad(format!("the header claims {length} bytes")));
        }
        head.resize(16 + length, 0);
        fill(&mut from, &mut head[16..], path, 16, "the header")?;
        let mut crc = [0; 4];
        fill(&mut from, &mut crc, path, 16 + length as u64, "the header")?;
        if crc32fast::hash(&head) != u32::from_le_bytes(crc) {
            return Err(bad("the checksum of the header is wrong".to_owned()));
        }
        let header: Header = serde_json::from_slice(&head[16..])
            .map_err(|error| bad(format!("the header cannot be read: {error}")))?;
        Ok(Reader {
            from,
            path: path.to_owned(),
            at: 20 + length as u64,
            blocks: 0,
            rows: 0,
            header,
        })
    }

    fn bad<T>(&self, what: String) -> Result<T> {
        Err(Error::Corrupt {
            path: self.path.clone(),
            what,
        })
    }

    /// The next block; none after the last.
    fn next(&mut self) -> Result<Option<Block>> {
        let mut head = [0u8; 28];
        fill(&mut self.from, &mut head, &self.path, self.at, "a block")?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let (kind, shard, count, length, crc) = (word(0), word(4), long(8), long(16), word(24));
        if length > LONGEST {
            return self.bad(format!(
                "the block at byte {} claims {length} bytes",
                self.at
            ));
        }
        // As it comes, so that a length that is wrong takes no memory.
        let mut payload = Vec::new();
        let got = (&mut self.from)
            .take(length)
            .read_to_end(&mut payload)
            .map_err(io(format!("{} cannot be read", self.path.display())))?;
        if got as u64 != length {
            return self.bad(format!(
                "the file ends in the block at byte {}: {got} of {length} bytes are there",
                self.at
            ));
        }
        let mut check = crc32fast::Hasher::new();
        check.update(&head[..24]);
        check.update(&payload);
        if check.finalize() != crc {
            return self.bad(format!(
                "the checksum of the block at byte {} is wrong",
                self.at
            ));
        }
        let record = self.header.record;
        let fits = match kind {
            ROWS => count.checked_mul(record) == Some(length),
            REMOVED => count.checked_mul(8) == Some(length),
            COUNTS => count.checked_mul(12) == Some(length),
            END => length == 16,
            STRINGS | BLOOM => true,
            _ => false,
        };
        if !fits {
            return self.bad(format!(
                "the block at byte {} (kind {kind}, {count} entries) has {length} bytes",
                self.at
            ));
        }
        self.at += 28 + length;
        self.blocks += 1;
        match kind {
            ROWS => self.rows += count,
            END => {
                let number = |part: &[u8]| part.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
                let (rows, blocks) = (number(&payload[..8]), number(&payload[8..]));
                if (rows, blocks) != (self.rows, self.blocks) {
                    return self.bad(format!(
                        "{rows} rows in {blocks} blocks were written, {} in {} are there",
                        self.rows, self.blocks
                    ));
                }
                return Ok(None);
            }
            _ => {}
        }
        Ok(Some(Block {
            kind,
            shard,
            count,
            payload,
        }))
    }

    /// Whether rows of this file are rows of a store with these options.
    fn fits(&self, options: &Options) -> Result<()> {
        let has = &self.header.options;
        let kind = |options: &Options| {
            serde_json::to_value(options.optimizer).map_or(String::new(), |v| v["kind"].to_string())
        };
        let pairs = [
            ("dim", has.dim.to_string(), options.dim.to_string()),
            (
                "dtype",
                format!("{:?}", has.dtype),
                format!("{:?}", options.dtype),
            ),
            (
                "keys",
                format!("{:?}", has.keys),
                format!("{:?}", options.keys),
            ),
            ("optimizer", kind(has), kind(options)),
        ];
        match pairs.iter().find(|(_, has, wants)| has != wants) {
            None => Ok(()),
            Some((field, has, wants)) => invalid(format!(
                "{}: its {field} is {has}, and that of the store {wants}",
                self.path.display()
            )),
        }
    }
}

fn fill(from: &mut impl Read, out: &mut [u8], path: &Path, at: u64, what: &str) -> Result<()> {
    from.read_exact(out).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::Corrupt {
            path: path.to_owned(),
            what: format!("the file ends in {what} at byte {at}"),
        },
        _ => io(format!("{} cannot be read", path.display()))(error),
    })
}

fn open(path: &Path) -> Result<BufReader<File>> {
    match File::open(path) {
        Ok(file) => Ok(BufReader::with_capacity(1 << 20, file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::NotFound(
            format!("there is no snapshot {}", path.display()),
        )),
        Err(error) => Err(io(format!("{} cannot be read", path.display()))(error)),
    }
}

/// Puts what a file holds into a table.
fn load<R: Read>(table: &Table, reader: &mut Reader<R>) -> Result<Saved> {
    let core = &table.core;
    let record = core.record();
    if reader.header.record != record as u64 {
        return reader.bad(format!(
            "a record has {} bytes, and {record} are needed",
            reader.header.record
        ));
    }
    let mut removed = 0;
    while let Some(block) = reader.next()? {
        match block.kind {
            ROWS => {
                // Rows of a block are of one shard of the store that wrote it: where that had as many
                // shards they are of one shard here too, and its lock is held once for all.
                let mut held: Option<(usize, _)> = None;
                for part in block.payload.chunks_exact(record) {
                    let Some(row) = Record::parse(part) else {
                        continue;
                    };
                    let home = table.home(row.key);
                    if held.as_ref().is_none_or(|(number, _)| *number != home) {
                        drop(held.take());
                        held = Some((home, writing(&table.shards[home])));
                    }
                    if let Some((_, shard)) = &mut held {
                        shard.put(core, &row)?;
                    }
                }
            }
            REMOVED => {
                let keys: Vec<i64> = block
                    .payload
                    .chunks_exact(8)
                    .filter_map(|bytes| bytes.first_chunk().map(|key| i64::from_le_bytes(*key)))
                    .collect();
                removed += table.remove(&keys);
            }
            COUNTS => {
                for part in block.payload.chunks_exact(12) {
                    if let Some((key, n)) = part.split_first_chunk::<8>() {
                        let key = i64::from_le_bytes(*key);
                        let n = u32::from_le_bytes([n[0], n[1], n[2], n[3]]);
                        writing(&table.shards[table.home(key)]).filter.set(key, n)?;
                    }
                }
            }
            STRINGS => {
                let mut rest = block.payload.as_slice();
                for _ in 0..block.count {
                    let parsed = rest.split_first_chunk::<8>().and_then(|(key, rest)| {
                        let (length, rest) = rest.split_first_chunk::<4>()?;
                        let name = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
                        Some((i64::from_le_bytes(*key), name))
                    });
                    let Some((key, (name, after))) = parsed else {
                        return reader.bad("a block of strings ends too early".to_owned());
                    };
                    table.strings.put(key, name);
                    rest = after;
                }
            }
            // Its counters lie by shard: they mean nothing to another number of shards, where keys
            // are counted anew.
            BLOOM if block.count == table.shards.len() as u64 => {
                if let Some(shard) = table.shards.get(block.shard as usize) {
                    writing(shard).filter.set_counters(&block.payload);
                }
            }
            _ => {}
        }
    }
    let header = &reader.header;
    *lock(&table.clock) = Clock {
        step: header.step,
        count: header.steps,
        evicted: header.evicted,
    };
    Ok(Saved {
        path: reader.path.clone(),
        rows: reader.rows,
        removed,
        bytes: reader.at,
        step: header.step.unwrap_or(0),
        id: header.id.clone(),
    })
}

/// A table that was just read is what its file says: the next delta has what changes from here on.
fn settle(table: &Table, saved: &Saved) {
    let mut saver = lock(&table.saver);
    saver.id.clone_from(&saved.id);
    saver.saved = 1;
    for shard in &table.shards {
        writing(shard).removed.clear();
    }
    table.core.epoch.store(2, Ordering::Relaxed);
    table.core.tracking.store(true, Ordering::Relaxed);
}

fn read_full<R: Read>(options: &Options, from: R, path: &Path) -> Result<(Table, Saved)> {
    let mut reader = Reader::open(from, path)?;
    reader.fits(options)?;
    if reader.header.kind == Kind::Delta && !reader.header.parent.is_empty() {
        return invalid(format!(
            "{} is a delta: restore the snapshot that it follows ({}) first",
            path.display(),
            reader.header.parent
        ));
    }
    let table = Table::new(options.clone())?;
    let saved = load(&table, &mut reader)?;
    Ok((table, saved))
}

/// A table from a file or a folder.
///
/// # Errors
/// See [`crate::Store::restore`].
pub fn restore(options: &Options, path: &Path) -> Result<(Table, Saved)> {
    if !path.is_dir() {
        let (table, saved) = read_full(options, open(path)?, path)?;
        settle(&table, &saved);
        return Ok((table, saved));
    }
    let files = files(path)?;
    // The last full snapshot, or a first delta, which has all rows too.
    let first = files
        .iter()
        .rposition(|(_, kind, _)| *kind == Kind::Full)
        .unwrap_or(0);
    let Some((_, _, full)) = files.get(first) else {
        return Err(Error::NotFound(format!(
            "there is no snapshot in {}: files are named full-N.evs and delta-N.evs",
            path.display()
        )));
    };
    let (table, mut saved) = read_full(options, open(full)?, full)?;
    for (_, _, delta) in &files[first + 1..] {
        let mut reader = Reader::open(open(delta)?, delta)?;
        reader.fits(options)?;
        follows(&reader, &saved.id)?;
        let next = load(&table, &mut reader)?;
        saved = Saved {
            bytes: saved.bytes + next.bytes,
            removed: saved.removed + next.removed,
            ..next
        };
    }
    settle(&table, &saved);
    saved.rows = table.len();
    Ok((table, saved))
}

/// A table from the bytes of a file.
///
/// # Errors
/// See [`crate::Store::restore`].
pub fn from_bytes(options: &Options, bytes: &[u8]) -> Result<(Table, Saved)> {
    let (table, saved) = read_full(options, bytes, Path::new("memory"))?;
    settle(&table, &saved);
    Ok((table, saved))
}

fn follows<R>(reader: &Reader<R>, id: &str) -> Result<()> {
    let header = &reader.header;
    if header.kind == Kind::Delta && header.parent != id {
        let name = |id: &str| match id {
            "" => "an empty store".to_owned(),
            id => format!("snapshot {id}"),
        };
        return invalid(format!(
            "{} follows {}, and this is {}: a file between them is missing",
            reader.path.display(),
            name(&header.parent),
            name(id)
        ));
    }
    Ok(())
}

/// Takes a delta into a table that others use.
///
/// # Errors
/// See [`crate::Store::apply_delta`].
pub fn apply_delta(table: &Table, path: &Path) -> Result<Saved> {
    let mut saver = lock(&table.saver);
    // All of it is checked before any of it counts.
    let mut reader = Reader::open(open(path)?, path)?;
    reader.fits(&table.core.options)?;
    if reader.header.kind != Kind::Delta {
        return invalid(format!("{} is a full snapshot: restore it", path.display()));
    }
    follows(&reader, &saver.id)?;
    if reader.header.record != table.core.record() as u64 {
        return reader.bad(format!("a record has {} bytes", reader.header.record));
    }
    while reader.next()?.is_some() {}
    let mut reader = Reader::open(open(path)?, path)?;
    let saved = load(table, &mut reader)?;
    saver.id.clone_from(&saved.id);
    Ok(saved)
}

/// The files of a folder in their order.
fn files(folder: &Path) -> Result<Vec<(u64, Kind, PathBuf)>> {
    let mut found = Vec::new();
    let entries =
        std::fs::read_dir(folder).map_err(io(format!("{} cannot be read", folder.display())))?;
    for entry in entries {
        let path = entry
            .map_err(io(format!("{} cannot be read", folder.display())))?
            .path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let parsed = name.strip_suffix(".evs").and_then(|name| {
            let (kind, number) = name.split_once('-')?;
            let kind = match kind {
                "full" => Kind::Full,
                "delta" => Kind::Delta,
                _ => return None,
            };
            Some((number.parse().ok()?, kind))
        });
        if let Some((number, kind)) = parsed {
            found.push((number, kind, path));
        }
    }
    found.sort_by_key(|(number, _, _)| *number);
    Ok(found)
}

/// Takes away what processes that were killed left half written.
fn sweep(folder: &Path) -> Result<()> {
    let entries =
        std::fs::read_dir(folder).map_err(io(format!("{} cannot be read", folder.display())))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let owner = name
            .strip_prefix('.')
            .and_then(|name| name.strip_suffix(".part"))
            .and_then(|name| name.rsplit_once(".evs."))
            .and_then(|(_, pid)| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Writes the next file of a folder.
///
/// # Errors
/// See [`crate::Store::snapshot`].
pub fn into_folder(table: &Table, folder: &Path, kind: Kind) -> Result<Saved> {
    std::fs::create_dir_all(folder).map_err(io(format!("{} cannot be made", folder.display())))?;
    sweep(folder)?;
    let before = files(folder)?;
    let number = before.last().map_or(1, |(number, _, _)| number + 1);
    let name = match kind {
        Kind::Full => "full",
        Kind::Delta => "delta",
    };
    let path = folder.join(format!("{name}-{number:06}.evs"));
    let saved = into_file(table, &path, kind);
    if saved.is_err() {
        // Where only the folder could not be synced the file has its name, but is not in the chain.
        let _ = std::fs::remove_file(&path);
    }
    let saved = saved?;
    if kind == Kind::Full {
        // The full snapshot before this one and its deltas stay; what is older goes.
        let last = before.iter().rposition(|(_, kind, _)| *kind == Kind::Full);
        for (_, _, old) in &before[..last.unwrap_or(0)] {
            // It would be tidier without it, no more: it goes at the next snapshot.
            let _ = std::fs::remove_file(old);
        }
    }
    Ok(saved)
}

/// Writes a file that is whole or not there.
///
/// # Errors
/// See [`crate::Store::save`].
pub fn into_file(table: &Table, path: &Path, kind: Kind) -> Result<Saved> {
    let what = || format!("{} cannot be written", path.display());
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or("snapshot");
    let part = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let file = File::create(&part).map_err(io(what()))?;
    let mut sink = Durable {
        file: BufWriter::with_capacity(1 << 20, file),
        part: part.clone(),
        path: path.to_owned(),
    };
    let saved = write(table, kind, &mut sink, path);
    if saved.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    saved
}

/// A file under another name, which takes its name when it is flushed: the last act of [`body`], so that
/// a failure of the rename is a failure of the snapshot.
struct Durable {
    file: BufWriter<File>,
    part: PathBuf,
    path: PathBuf,
}

impl Write for Durable {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.part, &self.path)?;
        if let Some(folder) = self.path.parent() {
            let folder = match folder.as_os_str().is_empty() {
                true => Path::new("."),
                false => folder,
            };
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    }
}
