//! The SSD tier on a real file by both ways, and on a disk that fails.

use evener_memory::ssd::backend::{Backend, Done};
use evener_memory::ssd::measure::measure;
use evener_memory::ssd::requests::{Op, Span};
use evener_memory::ssd::store::{Store, Way};
use evener_memory::ssd::{ALIGN, SsdError};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

const ROOM: usize = 16 * ALIGN;
const PATIENCE: Duration = Duration::from_secs(20);

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn span(buffer: usize, block: usize) -> Span {
    Span {
        buffer,
        offset: (block * ROOM) as u64,
        length: ROOM,
    }
}

fn fill(store: &Store, buffer: usize, value: u8) {
    let address = store.buffers().address(buffer) as *mut u8;
    #[allow(unsafe_code, reason = "the test owns the buffer")]
    // SAFETY: the buffer has ROOM bytes and no request is under way on it.
    unsafe {
        std::ptr::write_bytes(address, value, ROOM);
    }
}

fn holds(store: &Store, buffer: usize, value: u8) -> bool {
    let address = store.buffers().address(buffer) as *const u8;
    #[allow(unsafe_code, reason = "the test owns the buffer")]
    // SAFETY: as in `fill`.
    let bytes = unsafe { std::slice::from_raw_parts(address, ROOM) };
    bytes.iter().all(|byte| *byte == value)
}

#[test]
fn blocks_come_back_as_they_were_by_both_ways_on_both_file_systems() {
    let mine = folder().join("names");
    std::fs::create_dir_all(&mine).unwrap();
    for folder in [mine, PathBuf::from("/dev/shm")] {
        if !folder.is_dir() {
            continue;
        }
        for way in [Way::Uring, Way::Threads] {
            let mut one = match Store::new(&folder, (9 * ROOM) as u64, 4, ROOM, 4, PATIENCE, way) {
                Ok(one) => one,
                Err(error) if way == Way::Uring => {
                    println!("skipped: io_uring is refused here: {error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let prefix = format!(".evener-ssd-{}-", std::process::id());
            let names: Vec<_> = std::fs::read_dir(&folder)
                .unwrap()
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with(&prefix))
                .collect();
            assert!(names.is_empty(), "the file has no name: {names:?}");
            for round in 0..3u8 {
                // Written behind and read ahead at once, the file longer than the buffers.
                let mut tickets = Vec::new();
                for block in 0..9 {
                    if tickets.len() == 2 {
                        one.wait(tickets.remove(0)).unwrap();
                    }
                    let buffer = block % 2;
                    fill(&one, buffer, round * 16 + block as u8);
                    tickets.push(one.submit(true, span(buffer, block)).unwrap());
                    if block > 0 {
                        let ticket = one.submit(false, span(2, block)).unwrap();
                        one.wait(ticket).unwrap(); // after the write of the same block
                        assert!(holds(&one, 2, round * 16 + block as u8));
                    }
                }
                for ticket in tickets {
                    one.wait(ticket).unwrap();
                }
            }
            let mut other = one.beside(1, ROOM, 1).unwrap();
            let ticket = other.submit(false, span(0, 4)).unwrap();
            other.wait(ticket).unwrap();
            assert!(holds(&other, 0, 2 * 16 + 4));
            assert_eq!(one.moved().written, 27 * ROOM as u64);
            assert_eq!(one.moved().read, 24 * ROOM as u64);
            let busy = one.submit(false, span(0, 0)).unwrap();
            assert!(
                one.submit(false, span(0, 1)).is_err(),
                "one request for a buffer"
            );
            one.wait(busy).unwrap();
            assert!(one.submit(false, span(7, 1)).is_err(), "no such buffer");
        }
    }
}

#[test]
fn what_cannot_be_had_is_an_error_that_names_the_folder() {
    let nowhere = folder().join("not-there");
    let error = Store::new(&nowhere, 1 << 20, 2, ROOM, 2, PATIENCE, Way::Auto).unwrap_err();
    assert!(matches!(error, SsdError::Open { .. }), "{error}");
    assert_eq!(error.code(), libc_enoent());
    let error = Store::new(&folder(), 1 << 60, 2, ROOM, 2, PATIENCE, Way::Auto).unwrap_err();
    assert!(matches!(error, SsdError::Full { .. }), "{error}");
    assert!(error.to_string().contains("are free"), "{error}");
}

fn libc_enoent() -> i32 {
    io::Error::from(io::ErrorKind::NotFound)
        .raw_os_error()
        .unwrap_or(2)
}

/// What a disk may do: fail, move little, or say nothing.
#[derive(Clone, Copy, Debug)]
enum Disk {
    Fails,
    Creeps,
    Silent,
}

struct Faulty {
    disk: Disk,
    queue: Vec<Op>,
}

impl Backend for Faulty {
    fn begin(&mut self, op: Op) -> io::Result<()> {
        self.queue.push(op);
        Ok(())
    }

    fn collect(&mut self, wait: Duration, into: &mut Vec<Done>) -> io::Result<()> {
        if matches!(self.disk, Disk::Silent) || self.queue.is_empty() {
            std::thread::sleep(wait.min(Duration::from_millis(20)));
            return Ok(());
        }
        let op = self.queue.remove(0);
        let result = match self.disk {
            Disk::Fails if op.write => Err(io::Error::from_raw_os_error(5)),
            _ => Ok(op.length.min(ALIGN)),
        };
        into.push(Done {
            ticket: op.ticket,
            result,
        });
        Ok(())
    }

    fn name(&self) -> &'static str {
        "a faulty disk"
    }
}

#[test]
fn a_disk_that_fails_creeps_or_is_silent_never_hangs() {
    for disk in [Disk::Fails, Disk::Creeps, Disk::Silent] {
        let queue = Vec::new();
        let patience = Duration::from_millis(300);
        let mut one = Store::new(&folder(), 1 << 20, 2, ROOM, 2, patience, Way::Threads)
            .unwrap()
            .with_backend(Box::new(Faulty { disk, queue }));
        let write = one.submit(true, span(0, 0)).unwrap();
        let read = one.submit(false, span(1, 1)).unwrap();
        let (wrote, found) = (one.wait(write), one.wait(read));
        match disk {
            Disk::Fails => {
                let error = wrote.unwrap_err();
                assert_eq!(error.code(), 5);
                assert!(
                    error.to_string().starts_with("writing 65536 bytes at 0"),
                    "{error}"
                );
                found.unwrap();
            }
            Disk::Creeps => {
                wrote.unwrap();
                found.unwrap();
            }
            Disk::Silent => {
                assert!(matches!(wrote.unwrap_err(), SsdError::Stalled { .. }));
                assert!(
                    one.submit(true, span(0, 3)).is_err(),
                    "it takes nothing more"
                );
            }
        }
    }
}

#[test]
fn rates_are_measured_with_the_operations_that_are_made() {
    let size = (32 * ROOM) as u64;
    let mut one = Store::new(&folder(), size, 4, ROOM, 4, PATIENCE, Way::Auto).unwrap();
    let rates = measure(&mut one, u64::MAX, 1.0).unwrap();
    assert!(rates.read > 0.0 && rates.write > 0.0 && rates.both > 0.0);
    assert_eq!(one.moved().written, (2 * 32 + 16) * ROOM as u64);
}
