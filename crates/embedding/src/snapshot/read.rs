//! Reads snapshots and deltas, and checks all of a file before any of it counts.

use super::files::files;
use super::*;
use crate::error::{Error, Result, invalid, io};
use crate::shard::Record;
use crate::table::{Clock, Table, lock, writing};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::atomic::Ordering;

/// Rows that a lock is held for.
const HELD: usize = 256;

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

/// By which name a delta would follow a file; none where it cannot be read.
pub fn id_of(path: &Path) -> Option<String> {
    let reader = Reader::open(open(path).ok()?, path).ok()?;
    Some(reader.header.id)
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
                for (at, part) in block.payload.chunks_exact(record).enumerate() {
                    let Some(row) = Record::parse(part) else {
                        continue;
                    };
                    let home = table.home(row.key);
                    // Those who look up meanwhile wait for a few rows, not for a block.
                    let other = held.as_ref().is_none_or(|(number, _)| *number != home);
                    if other || at.is_multiple_of(HELD) {
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
        aged: header.aged,
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
        let mut shard = writing(shard);
        shard.removed.clear();
        shard.untold = false;
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
