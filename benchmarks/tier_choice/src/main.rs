//! Point reads and writes of cold rows: a log whose index knows the place, beside kept libraries.
//!
//!     cd benchmarks/tier_choice
//!     cargo run --release --features rocksdb -- FOLDER ../results/embedding-tier-choice.json
//!
//! Rows of 144 bytes, batches of 5,000 distinct keys, one thread. Each library is filled, then reads
//! batches with its files in the system's cache, then with the files dropped from that cache before
//! each batch, then writes batches. A figure is the median of 12 batches in microseconds per row. Caches
//! of the libraries hold 32 MiB: rows that are worth memory are in the store's own.

mod libraries;

use libraries::{Fjall, Log, Redb};
use rustix::fs::{Advice, fadvise};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Instant;

pub const ROW: usize = 144;
pub const CACHE: usize = 32 << 20;
const ROWS: u64 = 3_200_000;
const BATCH: u64 = 5_000;
const BATCHES: u64 = 12;

pub type Failure = Box<dyn std::error::Error>;

/// What a second tier asks of a library. Keys are numbers; a row is read into its place of `out`.
pub trait Library {
    fn write(&mut self, keys: &[u64]) -> Result<(), Failure>;
    fn read(&mut self, keys: &[u64], out: &mut [u8]) -> Result<(), Failure>;
    fn filled(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// splitmix64.
fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 31)
}

/// The row of a key: bytes that nothing compresses.
pub fn row(key: u64) -> [u8; ROW] {
    let mut row = [0; ROW];
    for (i, bytes) in row.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&mix(key * 18 + i as u64).to_le_bytes());
    }
    row
}

/// Distinct keys, a stride apart from one that the number of the batch gives.
fn batch(number: u64) -> Vec<u64> {
    let start = mix(number) % ROWS;
    // 1,234,577 has no divisor in common with the number of rows.
    (0..BATCH).map(|i| (start + i * 1_234_577) % ROWS).collect()
}

fn bytes(folder: &Path) -> std::io::Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        sum += match entry.file_type()?.is_dir() {
            true => bytes(&entry.path())?,
            false => entry.metadata()?.len(),
        };
    }
    Ok(sum)
}

/// The system forgets what it has of the files of a folder.
fn drop_cache(folder: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            drop_cache(&entry.path())?;
        } else if let Ok(file) = std::fs::File::open(entry.path()) {
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

fn median(mut each: Vec<f64>) -> f64 {
    each.sort_by(f64::total_cmp);
    (each[each.len() / 2] * 1000.0).round() / 1000.0
}

fn measure(
    folder: &Path,
    make: impl FnOnce(&Path) -> Result<Box<dyn Library>, Failure>,
) -> Result<(Value, u64), Failure> {
    std::fs::create_dir_all(folder)?;
    let mut library = make(folder)?;
    for start in (0..ROWS).step_by(BATCH as usize) {
        let keys: Vec<u64> = (start..start + BATCH).collect();
        library.write(&keys)?;
    }
    library.filled()?;
    let mut out = vec![0u8; BATCH as usize * ROW];
    let mut read = |library: &mut dyn Library, number: u64| -> Result<f64, Failure> {
        out.fill(0);
        let keys = batch(number);
        let began = Instant::now();
        library.read(&keys, &mut out)?;
        let took = began.elapsed().as_secs_f64() * 1e6 / BATCH as f64;
        let mut both = keys.iter().zip(out.chunks(ROW));
        match both.all(|(&key, found)| found == row(key)) {
            true => Ok(took),
            false => Err("a row is not what was written".into()),
        }
    };
    let mut cached = Vec::new();
    for number in 0..2 * BATCHES {
        cached.push(read(&mut *library, number % BATCHES)?);
    }
    let cached = cached.split_off(BATCHES as usize); // the first round warms
    let mut device = Vec::new();
    for number in 0..BATCHES {
        drop_cache(folder)?;
        device.push(read(&mut *library, 100 + number)?);
    }
    let mut wrote = Vec::new();
    for number in 0..BATCHES {
        let began = Instant::now();
        library.write(&batch(200 + number))?;
        wrote.push(began.elapsed().as_secs_f64() * 1e6 / BATCH as f64);
    }
    let disk = bytes(folder)? >> 20;
    drop(library);
    std::fs::remove_dir_all(folder)?;
    let figures = json!({
        "read, page cache": median(cached), "read, device": median(device), "write": median(wrote),
    });
    Ok((figures, disk))
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let Some(folder) = arguments.next() else {
        return Err("usage: tier-choice FOLDER [JSON]; FOLDER needs 4 GB".into());
    };
    let folder = Path::new(&folder).join("tier-choice");
    let (mut found, mut disk) = (Map::new(), Map::new());
    type Make = fn(&Path) -> Result<Box<dyn Library>, Failure>;
    let mut all: Vec<(&str, Make)> = vec![
        ("own log", Log::make),
        ("redb", Redb::make),
        ("fjall", Fjall::make),
    ];
    #[cfg(feature = "rocksdb")]
    all.push(("rocksdb", libraries::rocks::Rocks::make));
    for (name, make) in all {
        let (figures, mebibytes) = measure(&folder.join(name.replace(' ', "-")), make)?;
        println!("{name}: {figures}, {mebibytes} MiB");
        found.insert(name.into(), figures);
        disk.insert(name.into(), mebibytes.into());
    }
    disk.insert("rows".into(), (ROWS * ROW as u64 >> 20).into());
    let result = json!({
        "what": "point reads and writes of cold rows: 3.2M rows of 144 bytes, batches of 5,000 \
                 distinct keys, one thread; median of 12 batches, microseconds per row",
        "libraries": found,
        "versions": {
            "redb": "2.6", "fjall": "2.11",
            "rocksdb": "Debian's librocksdb (MultiGet, no compression, Bloom filter, no \
                        write-ahead log)",
        },
        "disk_mib": disk,
    });
    if let Some(path) = arguments.next() {
        std::fs::write(path, format!("{result:#}\n"))?;
    }
    Ok(())
}
