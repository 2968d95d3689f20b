//! Writes a store's rows as of one instant.

use super::*;
use crate::error::{Result, io};
use crate::hash;
use crate::options::Keys;
use crate::shard::{Record, Saving};
use crate::table::{Clock, Table, lock, reading, writing};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;

/// The moment that a file is of: from here on what changes is copied aside first.
pub struct Instant {
    /// What is written.
    pub kind: Kind,
    clock: Clock,
    cut: u8,
    /// What went since the last file of the chain, and whether a shard gave its list up; empty for a file
    /// that is no part of the chain.
    removed: Vec<(Vec<i64>, bool)>,
}

impl Instant {
    /// The instant of the chain's next file. A delta becomes a full snapshot where what went is unknown.
    pub fn of_chain(table: &Table, kind: Kind, saver: &mut Saver) -> Instant {
        Instant::new(table, kind, true, saver)
    }

    /// The instant of a file of all rows that is no part of the chain.
    pub fn aside(table: &Table, saver: &mut Saver) -> Instant {
        Instant::new(table, Kind::Full, false, saver)
    }

    fn new(table: &Table, kind: Kind, chain: bool, saver: &mut Saver) -> Instant {
        let core = &table.core;
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
        let kind = match shards.iter().any(|shard| shard.untold) {
            true => Kind::Full,
            false => kind,
        };
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
                failed: None,
            });
            if chain {
                removed.push((
                    std::mem::take(&mut shard.removed),
                    std::mem::take(&mut shard.untold),
                ));
            }
        }
        if chain {
            core.tracking.store(true, Ordering::Relaxed);
        }
        Instant {
            kind,
            clock: *lock(&table.clock),
            cut: epoch,
            removed,
        }
    }

    /// The shards forget a snapshot that failed; what was removed before it is told to the next one.
    pub fn undo(mut self, table: &Table) {
        for (i, shard) in table.shards.iter().enumerate() {
            let mut shard = writing(shard);
            shard.saving = None;
            if let Some((keys, untold)) = self.removed.get_mut(i) {
                keys.append(&mut shard.removed);
                shard.removed = std::mem::take(keys);
                shard.untold |= *untold;
            }
        }
    }
}

/// Writes what a store had at an instant; `path` is for messages.
///
/// # Errors
/// Where the sink fails; the store goes on as if this had not been called.
pub fn write(
    table: &Table,
    instant: Instant,
    saver: &mut Saver,
    sink: &mut dyn Write,
    path: &Path,
) -> Result<Saved> {
    let id = new_id(&saver.id);
    let written = body(table, &instant, &id, &saver.id, sink)
        .map_err(io(format!("{} cannot be written", path.display())));
    match written {
        Ok((rows, bytes)) => {
            if !instant.removed.is_empty() {
                saver.saved = i16::from(instant.cut);
                saver.id.clone_from(&id);
            }
            Ok(Saved {
                path: path.to_owned(),
                rows,
                removed: match instant.kind {
                    Kind::Full => 0,
                    Kind::Delta => instant.removed.iter().map(|(k, _)| k.len() as u64).sum(),
                },
                bytes,
                step: instant.clock.step.unwrap_or(0),
                id,
            })
        }
        Err(error) => {
            instant.undo(table);
            Err(error)
        }
    }
}

/// All rows, as a file that is no part of the chain has them.
///
/// # Errors
/// As [`write`].
pub fn into_memory(table: &Table) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut saver = lock(&table.saver);
    let instant = Instant::aside(table, &mut saver);
    write(table, instant, &mut saver, &mut bytes, Path::new("memory"))?;
    Ok(bytes)
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
    instant: &Instant,
    id: &str,
    parent: &str,
    sink: &mut dyn Write,
) -> std::io::Result<(u64, u64)> {
    let core = &table.core;
    let (kind, clock) = (instant.kind, instant.clock);
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
        aged: clock.aged,
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
        for (number, (keys, _)) in instant.removed.iter().enumerate() {
            if keys.is_empty() {
                continue;
            }
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
            shard
                .save(core, &mut records)
                .map_err(std::io::Error::other)?;
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
