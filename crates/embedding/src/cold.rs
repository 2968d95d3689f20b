//! The second tier: rows that are seldom used, in a file.
//!
//! The index keeps the keys of all rows in memory. The number of a row in memory is an id of the arena;
//! that of a cold row has [`COLD`] set and says in which segment of its shard it lies, and where in it.
//! So a cold row is read by one access to the file, and nothing in the file has to be searched.
//!
//! The file is a log in segments. A shard fills one segment at a time in memory and writes it when it is
//! full; the system writes it to the disk behind. A row that comes back to memory, or goes, leaves a gap.
//! A segment of gaps alone is used anew; where half of a shard's places are gaps, the rows of the
//! emptiest segments move ([`Cold::emptiest`]).
//!
//! The file has no name: it is gone when the process is, however that ends. What must outlive it is in
//! snapshots, which hold cold rows too. A child of a fork must not use the file: what its parent
//! writes later would be under the rows that the child knows.
//!
//! docs/benchmarks/embeddings.md has why this is not a kept library: their point reads take ten times as
//! long, because they search for keys that the index has found already.

use crate::arena::Meta;
use crate::error::{Error, Result, invalid, io};
use rustix::fs::Advice;
use rustix::io::{IoSliceMut, ReadWriteFlags};
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Set in the number of a row that is not in memory.
pub const COLD: u32 = 1 << 31;
/// Bytes of a segment, about.
const SEGMENT: usize = 128 << 10;

/// The file of a store, which hands segments to its shards.
#[derive(Debug)]
pub struct Disk {
    file: File,
    folder: String,
    /// Bytes of a record: key, version, frequency and mark, row.
    record: usize,
    /// Records of a segment.
    records: u32,
    places: Mutex<Places>,
    owner: u32,
}

#[derive(Debug, Default)]
struct Places {
    next: u32,
    free: Vec<u32>,
}

impl Disk {
    /// A file without a name in `folder`, which is made if it is not there, for rows of `row` bytes.
    ///
    /// # Errors
    /// Where the folder or a file in it cannot be made.
    pub fn new(folder: &str, row: usize) -> Result<Disk> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let path = Path::new(folder);
        std::fs::create_dir_all(path).map_err(io(format!("{folder} cannot be made")))?;
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = path.join(format!(".evener-cold-{}-{number}", std::process::id()));
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&name)
            .map_err(io(format!("{} cannot be made", name.display())))?;
        std::fs::remove_file(&name).map_err(io(format!("{} cannot be made", name.display())))?;
        Ok(Disk::on(file, folder, row))
    }

    /// On a file that is there.
    pub fn on(file: File, folder: &str, row: usize) -> Disk {
        // Rows are read one by one: what lies after one is not wanted. A wish.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        let record = 16 + row;
        Disk {
            file,
            folder: folder.to_owned(),
            record,
            records: (SEGMENT / record).max(16) as u32,
            places: Mutex::default(),
            owner: std::process::id(),
        }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        u64::from(places.next) * self.segment()
    }

    fn segment(&self) -> u64 {
        u64::from(self.records) * self.record as u64
    }

    fn take(&self) -> u32 {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.free.pop().unwrap_or_else(|| {
            places.next += 1;
            places.next - 1
        })
    }

    fn give(&self, place: u32) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.free.push(place);
    }

    fn owned(&self) -> Result<()> {
        match std::process::id() == self.owner {
            true => Ok(()),
            false => invalid(format!(
                "cold rows in {} belong to process {}: a child of its fork cannot use them",
                self.folder, self.owner
            )),
        }
    }

    fn write(&self, place: u32, bytes: &[u8]) -> Result<()> {
        self.owned()?;
        self.file
            .write_all_at(bytes, u64::from(place) * self.segment())
            .map_err(io(format!(
                "cold rows cannot be written to {} ({} MiB are there; no row is lost): free space \
                 there, or restore a snapshot with another tier",
                self.folder,
                self.bytes() >> 20
            )))
    }

    /// What was read is another row.
    pub fn broken<T>(&self) -> Result<T> {
        Err(Error::Corrupt {
            path: self.folder.clone().into(),
            what: "a cold row is not what was written: something else wrote to the file".to_owned(),
        })
    }

    fn failed(&self) -> impl FnOnce(std::io::Error) -> Error {
        io(format!("cold rows in {} cannot be read", self.folder))
    }
}

/// A segment of one shard.
#[derive(Debug)]
struct Segment {
    /// Which of the file.
    place: u32,
    /// Records that were put in.
    filled: u32,
    /// How many of those are still rows.
    live: u32,
    /// The highest mark of its records, when they were put in.
    mark: u8,
    /// The lowest version of its records.
    oldest: u32,
    /// How many times marks had been set anew before it was begun.
    remarks: usize,
    /// Its records, until they are in the file.
    buffer: Vec<u8>,
}

/// What a look at all cold rows may leave out, by what is known of a segment.
#[derive(Debug, Clone, Copy)]
pub enum Wanted {
    /// Nothing.
    All,
    /// Segments of which no row has a mark above this.
    Above(i16),
    /// Segments of which no row has a version of at most this.
    Until(u32),
}

/// The cold rows of a shard.
#[derive(Debug, Default)]
pub struct Cold {
    segments: Vec<Option<Segment>>,
    open: Option<u32>,
    rows: usize,
    /// Each time that marks were set anew: marks up to this became 0, the others 1.
    remarks: Vec<u8>,
}

/// A row as the file has it.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    /// Whose.
    pub key: i64,
    /// What is known of it.
    pub meta: Meta,
    /// Values and slots.
    pub row: &'a [u8],
}

impl Cold {
    /// How many.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of memory: what is not written yet.
    pub fn bytes(&self) -> usize {
        let kept = self.segments.iter().flatten().map(|s| s.buffer.capacity());
        kept.sum()
    }

    fn parse<'a>(&self, segment: &Segment, record: &'a [u8]) -> Option<Found<'a>> {
        let (key, rest) = record.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let (packed, row) = rest.split_first_chunk()?;
        let packed = u32::from_le_bytes(*packed);
        let mut mark = packed as u8;
        for &saved in &self.remarks[segment.remarks..] {
            mark = u8::from(mark > saved);
        }
        Some(Found {
            key: i64::from_le_bytes(*key),
            meta: Meta::new(u32::from_le_bytes(*version), packed >> 8, mark),
            row,
        })
    }

    /// Puts a row in; its number.
    ///
    /// # Errors
    /// Where a full segment cannot be written; nothing has changed then, and the next call tries again.
    pub fn push(&mut self, disk: &Disk, key: i64, meta: Meta, row: &[u8]) -> Result<u32> {
        if let Some(open) = self.open {
            let segment = self.at_mut(open)?;
            if segment.filled == disk.records {
                disk.write(segment.place, &segment.buffer)?;
                segment.buffer = Vec::new();
                self.open = None;
            }
        }
        let remarks = self.remarks.len();
        let open = match self.open {
            Some(open) if self.at(open)?.remarks == remarks => open,
            _ => {
                // One that is open still was begun before marks were set anew: it stays in memory until
                // it is empty.
                let fresh = Segment {
                    place: disk.take(),
                    filled: 0,
                    live: 0,
                    mark: 0,
                    oldest: u32::MAX,
                    remarks,
                    buffer: Vec::with_capacity(disk.segment() as usize),
                };
                let free = self.segments.iter().position(Option::is_none);
                let number = free.unwrap_or(self.segments.len());
                // The last number of all means something else (`map::OPEN`).
                if (number as u64 + 1) * u64::from(disk.records) >= u64::from(COLD - 1) {
                    disk.give(fresh.place);
                    return Err(Error::Exhausted(format!(
                        "a shard has {} cold rows, as many as it can: use more shards",
                        self.rows
                    )));
                }
                match free {
                    Some(free) => self.segments[free] = Some(fresh),
                    None => self.segments.push(Some(fresh)),
                }
                self.open = Some(number as u32);
                number as u32
            }
        };
        let records = disk.records;
        let segment = self.at_mut(open)?;
        segment.buffer.extend_from_slice(&key.to_le_bytes());
        segment
            .buffer
            .extend_from_slice(&meta.version.to_le_bytes());
        let packed = meta.frequency() << 8 | u32::from(meta.mark());
        segment.buffer.extend_from_slice(&packed.to_le_bytes());
        segment.buffer.extend_from_slice(row);
        segment.mark = segment.mark.max(meta.mark());
        segment.oldest = segment.oldest.min(meta.version);
        segment.filled += 1;
        segment.live += 1;
        let id = COLD | (open * records + segment.filled - 1);
        self.rows += 1;
        Ok(id)
    }

    fn at(&self, number: u32) -> Result<&Segment> {
        match self.segments.get(number as usize) {
            Some(Some(segment)) => Ok(segment),
            _ => invalid("a bug in Evener: a cold row lies nowhere"),
        }
    }

    fn at_mut(&mut self, number: u32) -> Result<&mut Segment> {
        match self.segments.get_mut(number as usize) {
            Some(Some(segment)) => Ok(segment),
            _ => invalid("a bug in Evener: a cold row lies nowhere"),
        }
    }

    /// The rows of numbers, in order. Those that the system has in memory are read at once; it is asked
    /// for the others together before the first of them is waited for.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn read(
        &self,
        disk: &Disk,
        ids: &[u32],
        mut each: impl FnMut(usize, Found<'_>) -> Result<()>,
    ) -> Result<()> {
        disk.owned()?;
        let mut bytes = vec![0u8; disk.record];
        let mut late = Vec::new();
        let mut held = None;
        for (i, &id) in ids.iter().enumerate() {
            if let Some((at, segment)) = held
                && at == id
            {
                // A batch may name a row many times.
                if let Some(found) = self.parse(segment, &bytes) {
                    each(i, found)?;
                }
                continue;
            }
            held = None;
            let segment = self.at((id & !COLD) / disk.records)?;
            let start = ((id & !COLD) % disk.records) as usize * disk.record;
            if !segment.buffer.is_empty() {
                let record = &segment.buffer[start..start + disk.record];
                if let Some(found) = self.parse(segment, record) {
                    each(i, found)?;
                }
                continue;
            }
            let offset = u64::from(segment.place) * disk.segment() + start as u64;
            let mut into = [IoSliceMut::new(&mut bytes)];
            match rustix::io::preadv2(&disk.file, &mut into, offset, ReadWriteFlags::NOWAIT) {
                Ok(n) if n == disk.record => {
                    held = Some((id, segment));
                    if let Some(found) = self.parse(segment, &bytes) {
                        each(i, found)?;
                    }
                }
                _ => {
                    let length = NonZeroU64::new(disk.record as u64);
                    let _ = rustix::fs::fadvise(&disk.file, offset, length, Advice::WillNeed);
                    late.push((i, segment, offset));
                }
            }
        }
        for (i, segment, offset) in late {
            disk.file
                .read_exact_at(&mut bytes, offset)
                .map_err(disk.failed())?;
            if let Some(found) = self.parse(segment, &bytes) {
                each(i, found)?;
            }
        }
        Ok(())
    }

    /// A row has left its place.
    pub fn forget(&mut self, disk: &Disk, id: u32) {
        let number = (id & !COLD) / disk.records;
        let Ok(segment) = self.at_mut(number) else {
            return;
        };
        segment.live -= 1;
        if segment.live == 0 {
            disk.give(segment.place);
            self.segments[number as usize] = None;
            if self.open == Some(number) {
                self.open = None;
            }
        }
        self.rows -= 1;
    }

    /// All records, gaps too, with the number that a row there would have; segments that are not wanted
    /// are left out.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn each(
        &self,
        disk: &Disk,
        wanted: Wanted,
        mut each: impl FnMut(u32, Found<'_>),
    ) -> Result<()> {
        for number in 0..self.segments.len() as u32 {
            let Some(segment) = &self.segments[number as usize] else {
                continue;
            };
            let mark = self.remarks[segment.remarks..]
                .iter()
                .fold(segment.mark, |mark, &saved| u8::from(mark > saved));
            let skip = match wanted {
                Wanted::All => false,
                Wanted::Above(since) => i16::from(mark) <= since,
                Wanted::Until(version) => segment.oldest > version,
            };
            if !skip {
                self.segment(disk, number, &mut each)?;
            }
        }
        Ok(())
    }

    /// The records of one segment.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn segment(
        &self,
        disk: &Disk,
        number: u32,
        mut each: impl FnMut(u32, Found<'_>),
    ) -> Result<()> {
        let segment = self.at(number)?;
        let mut bytes = Vec::new();
        let records = match segment.buffer.is_empty() {
            false => &segment.buffer,
            true => {
                disk.owned()?;
                bytes.resize(segment.filled as usize * disk.record, 0);
                disk.file
                    .read_exact_at(&mut bytes, u64::from(segment.place) * disk.segment())
                    .map_err(disk.failed())?;
                &bytes
            }
        };
        for (at, record) in records.chunks_exact(disk.record).enumerate() {
            if let Some(found) = self.parse(segment, record) {
                each(COLD | (number * disk.records + at as u32), found);
            }
        }
        Ok(())
    }

    /// The segment with the most gaps, where more than half of all places are gaps.
    pub fn emptiest(&self, disk: &Disk) -> Option<u32> {
        let there = self.segments.iter().flatten().count();
        let places = there * disk.records as usize;
        if places <= 2 * self.rows + 4 * disk.records as usize {
            return None;
        }
        let closed = |&(number, _): &(usize, &Segment)| self.open != Some(number as u32);
        self.segments
            .iter()
            .enumerate()
            .filter_map(|(number, segment)| Some((number, segment.as_ref()?)))
            .filter(closed)
            .min_by_key(|(_, segment)| segment.live)
            .map(|(number, _)| number as u32)
    }

    /// Marks up to `saved` are 0 from now on, and the others 1.
    pub fn remark(&mut self, saved: u8) {
        if self.rows > 0 {
            self.remarks.push(saved);
        } else {
            self.remarks.clear();
        }
    }

    /// Gives all places back.
    pub fn clear(&mut self, disk: &Disk) {
        for segment in self.segments.drain(..).flatten() {
            disk.give(segment.place);
        }
        *self = Cold::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(cold: &mut Cold, disk: &Disk, keys: std::ops::Range<i64>) -> Result<Vec<u32>> {
        keys.map(|key| cold.push(disk, key, Meta::new(key as u32, 3, 9), &key.to_le_bytes()))
            .collect()
    }

    fn keys(cold: &Cold, disk: &Disk, ids: &[u32]) -> Vec<i64> {
        let mut found = vec![0; ids.len()];
        cold.read(disk, ids, |i, row| {
            assert_eq!(row.row, row.key.to_le_bytes());
            assert_eq!(
                (row.meta.frequency(), row.meta.version),
                (3, row.key as u32)
            );
            found[i] = row.key;
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no preadv2")]
    fn rows_come_back_and_places_are_used_anew() {
        let folder = std::env::temp_dir();
        let disk = Disk::new(folder.to_str().unwrap(), 8).unwrap();
        let mut cold = Cold::default();
        let ids = put(&mut cold, &disk, 0..20_000).unwrap();
        assert_eq!(keys(&cold, &disk, &ids), (0..20_000).collect::<Vec<_>>());
        let full = disk.bytes();
        // Every second row goes: the emptiest segment is named only when more do.
        ids.iter().step_by(2).for_each(|&id| cold.forget(&disk, id));
        assert_eq!((cold.rows(), cold.emptiest(&disk)), (10_000, None));
        let odd: Vec<u32> = ids.iter().skip(1).step_by(2).copied().collect();
        assert_eq!(
            keys(&cold, &disk, &odd[..50]),
            (0..50).map(|i| 2 * i + 1).collect::<Vec<_>>()
        );
        odd.iter().for_each(|&id| cold.forget(&disk, id));
        assert_eq!(cold.rows(), 0);
        let again = put(&mut cold, &disk, 0..20_000).unwrap();
        assert_eq!(disk.bytes(), full);
        let mut seen = 0;
        cold.each(&disk, Wanted::All, |id, row| {
            seen += usize::from(again[row.key as usize] == id);
        })
        .unwrap();
        assert_eq!(seen, 20_000);
        cold.each(&disk, Wanted::Above(9), |_, _| panic!("no mark is above 9"))
            .unwrap();
        cold.remark(9);
        cold.read(&disk, &again[..1], |_, row| {
            assert_eq!(row.meta.mark(), 0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no posix_fadvise")]
    fn a_full_disk_is_an_error_and_no_row_is_lost() {
        let Ok(file) = File::options().read(true).write(true).open("/dev/full") else {
            println!("skipped: no /dev/full here");
            return;
        };
        let disk = Disk::on(file, "/cold", 8);
        let mut cold = Cold::default();
        let fits = i64::from(disk.records);
        let ids = put(&mut cold, &disk, 0..fits).unwrap();
        let message = put(&mut cold, &disk, fits..fits + 1)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("/cold") && message.contains("no row is lost"),
            "{message}"
        );
        assert_eq!(keys(&cold, &disk, &ids), (0..fits).collect::<Vec<_>>());
        assert_eq!(cold.rows(), fits as usize);
    }
}
