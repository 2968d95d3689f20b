//! Each library as a second tier would use it.

use crate::{CACHE, Failure, Library, ROW, row};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// As `crates/embedding/src/cold.rs`: segments of 128 KiB, one read per row at a known place.
pub struct Log {
    file: File,
    places: Vec<u64>,
    buffer: Vec<u8>,
    end: u64,
}

const SEGMENT: usize = 128 << 10;

impl Log {
    pub fn make(folder: &Path) -> Result<Box<dyn Library>, Failure> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(folder.join("log"))?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
        Ok(Box::new(Log {
            file,
            places: Vec::new(),
            buffer: Vec::new(),
            end: 0,
        }))
    }
}

impl Library for Log {
    fn write(&mut self, keys: &[u64]) -> Result<(), Failure> {
        for &key in keys {
            if self.buffer.len() + ROW > SEGMENT {
                self.filled()?;
            }
            let at = key as usize;
            if self.places.len() <= at {
                self.places.resize(at + 1, 0);
            }
            self.places[at] = self.end + self.buffer.len() as u64;
            self.buffer.extend_from_slice(&row(key));
        }
        Ok(())
    }

    fn read(&mut self, keys: &[u64], out: &mut [u8]) -> Result<(), Failure> {
        // In the order of the file; the device is asked for all before the first is waited for.
        let mut order: Vec<(u64, usize)> = (0..keys.len())
            .map(|i| (self.places[keys[i] as usize], i))
            .collect();
        order.sort_unstable();
        let mut late = Vec::new();
        for &(place, i) in &order {
            let row = &mut out[i * ROW..(i + 1) * ROW];
            let mut into = [rustix::io::IoSliceMut::new(row)];
            let flags = rustix::io::ReadWriteFlags::NOWAIT;
            if rustix::io::preadv2(&self.file, &mut into, place, flags) != Ok(ROW) {
                let length = std::num::NonZeroU64::new(ROW as u64);
                let ask = rustix::fs::Advice::WillNeed;
                rustix::fs::fadvise(&self.file, place, length, ask)?;
                late.push((place, i));
            }
        }
        for (place, i) in late {
            self.file
                .read_exact_at(&mut out[i * ROW..(i + 1) * ROW], place)?;
        }
        Ok(())
    }

    fn filled(&mut self) -> Result<(), Failure> {
        self.file.write_all_at(&self.buffer, self.end)?;
        self.end += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

const TABLE: redb::TableDefinition<u64, &[u8]> = redb::TableDefinition::new("rows");

pub struct Redb(redb::Database);

impl Redb {
    pub fn make(folder: &Path) -> Result<Box<dyn Library>, Failure> {
        let mut builder = redb::Database::builder();
        Ok(Box::new(Redb(
            builder.set_cache_size(CACHE).create(folder.join("redb"))?,
        )))
    }
}

impl Library for Redb {
    fn write(&mut self, keys: &[u64]) -> Result<(), Failure> {
        let mut change = self.0.begin_write()?;
        change.set_durability(redb::Durability::Eventual);
        {
            let mut table = change.open_table(TABLE)?;
            for &key in keys {
                table.insert(key, row(key).as_slice())?;
            }
        }
        change.commit()?;
        Ok(())
    }

    fn read(&mut self, keys: &[u64], out: &mut [u8]) -> Result<(), Failure> {
        let table = self.0.begin_read()?.open_table(TABLE)?;
        for (key, out) in keys.iter().zip(out.chunks_mut(ROW)) {
            out.copy_from_slice(table.get(key)?.ok_or("a row is missing")?.value());
        }
        Ok(())
    }
}

pub struct Fjall(fjall::Keyspace, fjall::PartitionHandle);

impl Fjall {
    pub fn make(folder: &Path) -> Result<Box<dyn Library>, Failure> {
        let space = fjall::Config::new(folder).cache_size(CACHE as u64).open()?;
        let rows = space.open_partition("rows", fjall::PartitionCreateOptions::default())?;
        Ok(Box::new(Fjall(space, rows)))
    }
}

impl Library for Fjall {
    fn write(&mut self, keys: &[u64]) -> Result<(), Failure> {
        let mut batch = self.0.batch();
        for key in keys {
            batch.insert(&self.1, key.to_be_bytes(), row(*key));
        }
        Ok(batch.commit()?)
    }

    fn read(&mut self, keys: &[u64], out: &mut [u8]) -> Result<(), Failure> {
        for (key, out) in keys.iter().zip(out.chunks_mut(ROW)) {
            out.copy_from_slice(&self.1.get(key.to_be_bytes())?.ok_or("a row is missing")?);
        }
        Ok(())
    }

    fn filled(&mut self) -> Result<(), Failure> {
        self.1.rotate_memtable_and_wait()?;
        Ok(())
    }
}

/// By RocksDB's C API.
#[cfg(feature = "rocksdb")]
pub mod rocks {
    use crate::{CACHE, Failure, Library, ROW};
    use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
    use std::path::Path;
    use std::ptr::{null, null_mut};

    type Handle = *mut c_void;

    #[link(name = "rocksdb")]
    unsafe extern "C" {
        fn rocksdb_options_create() -> Handle;
        fn rocksdb_options_set_create_if_missing(options: Handle, on: c_uchar);
        fn rocksdb_options_set_compression(options: Handle, kind: c_int);
        fn rocksdb_block_based_options_create() -> Handle;
        fn rocksdb_block_based_options_set_filter_policy(options: Handle, filter: Handle);
        fn rocksdb_block_based_options_set_block_cache(options: Handle, cache: Handle);
        fn rocksdb_options_set_block_based_table_factory(options: Handle, table: Handle);
        fn rocksdb_filterpolicy_create_bloom(bits: f64) -> Handle;
        fn rocksdb_cache_create_lru(bytes: usize) -> Handle;
        fn rocksdb_open(options: Handle, path: *const c_char, error: *mut *mut c_char) -> Handle;
        fn rocksdb_close(db: Handle);
        fn rocksdb_writeoptions_create() -> Handle;
        fn rocksdb_writeoptions_disable_WAL(options: Handle, on: c_int);
        fn rocksdb_readoptions_create() -> Handle;
        fn rocksdb_writebatch_create() -> Handle;
        fn rocksdb_writebatch_clear(batch: Handle);
        fn rocksdb_writebatch_put(
            batch: Handle,
            key: *const c_char,
            length: usize,
            value: *const c_char,
            size: usize,
        );
        fn rocksdb_write(db: Handle, options: Handle, batch: Handle, error: *mut *mut c_char);
        fn rocksdb_multi_get(
            db: Handle,
            options: Handle,
            count: usize,
            keys: *const *const c_char,
            lengths: *const usize,
            values: *mut *mut c_char,
            sizes: *mut usize,
            errors: *mut *mut c_char,
        );
        fn rocksdb_compact_range(
            db: Handle,
            start: *const c_char,
            length: usize,
            end: *const c_char,
            size: usize,
        );
        fn rocksdb_free(pointer: *mut c_void);
    }

    pub struct Rocks {
        db: Handle,
        write: Handle,
        read: Handle,
        batch: Handle,
    }

    fn checked(error: *mut c_char) -> Result<(), Failure> {
        match error.is_null() {
            true => Ok(()),
            // SAFETY: RocksDB's message, ended by a zero; the process ends with it.
            false => Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into()),
        }
    }

    impl Rocks {
        pub fn make(folder: &Path) -> Result<Box<dyn Library>, Failure> {
            let path = CString::new(folder.as_os_str().as_encoded_bytes())?;
            let mut error = null_mut();
            // SAFETY: handles of RocksDB, used as its header says; the path is ended by a zero.
            unsafe {
                let table = rocksdb_block_based_options_create();
                let filter = rocksdb_filterpolicy_create_bloom(10.0);
                rocksdb_block_based_options_set_filter_policy(table, filter);
                let cache = rocksdb_cache_create_lru(CACHE);
                rocksdb_block_based_options_set_block_cache(table, cache);
                let options = rocksdb_options_create();
                rocksdb_options_set_create_if_missing(options, 1);
                rocksdb_options_set_compression(options, 0);
                rocksdb_options_set_block_based_table_factory(options, table);
                let db = rocksdb_open(options, path.as_ptr(), &raw mut error);
                checked(error)?;
                let write = rocksdb_writeoptions_create();
                rocksdb_writeoptions_disable_WAL(write, 1);
                let read = rocksdb_readoptions_create();
                let batch = rocksdb_writebatch_create();
                Ok(Box::new(Rocks {
                    db,
                    write,
                    read,
                    batch,
                }))
            }
        }
    }

    impl Drop for Rocks {
        fn drop(&mut self) {
            // SAFETY: nobody uses it after.
            unsafe { rocksdb_close(self.db) }
        }
    }

    impl Library for Rocks {
        fn write(&mut self, keys: &[u64]) -> Result<(), Failure> {
            let mut error = null_mut();
            // SAFETY: keys and rows are copied into the batch.
            unsafe {
                rocksdb_writebatch_clear(self.batch);
                for key in keys {
                    let row = crate::row(*key);
                    let key = key.to_be_bytes();
                    rocksdb_writebatch_put(
                        self.batch,
                        key.as_ptr().cast(),
                        8,
                        row.as_ptr().cast(),
                        row.len(),
                    );
                }
                rocksdb_write(self.db, self.write, self.batch, &raw mut error);
            }
            checked(error)
        }

        fn read(&mut self, keys: &[u64], out: &mut [u8]) -> Result<(), Failure> {
            let bytes: Vec<[u8; 8]> = keys.iter().map(|key| key.to_be_bytes()).collect();
            let names: Vec<*const c_char> = bytes.iter().map(|key| key.as_ptr().cast()).collect();
            let lengths = vec![8usize; keys.len()];
            let mut values = vec![null_mut(); keys.len()];
            let mut sizes = vec![0usize; keys.len()];
            let mut errors = vec![null_mut(); keys.len()];
            // SAFETY: all arrays have a place for each key; values are RocksDB's until freed.
            unsafe {
                rocksdb_multi_get(
                    self.db,
                    self.read,
                    keys.len(),
                    names.as_ptr(),
                    lengths.as_ptr(),
                    values.as_mut_ptr(),
                    sizes.as_mut_ptr(),
                    errors.as_mut_ptr(),
                );
                for (i, row) in out.chunks_mut(ROW).enumerate() {
                    checked(errors[i])?;
                    if sizes[i] != ROW || values[i].is_null() {
                        return Err("a row is missing".into());
                    }
                    row.copy_from_slice(std::slice::from_raw_parts(values[i].cast(), ROW));
                    rocksdb_free(values[i].cast());
                }
            }
            Ok(())
        }

        fn filled(&mut self) -> Result<(), Failure> {
            // SAFETY: null for both ends is all keys.
            unsafe { rocksdb_compact_range(self.db, null(), 0, null(), 0) };
            Ok(())
        }
    }
}
