//! The device's part against a driver that stands for CUDA's (`driver/driver.c`): streams are threads, and the
//! order of commands, words and copies is the real one. What a GPU does besides is for `tests/gpu`.
//!
//! The driver is found at run time by its name, so each test runs itself again with a library path. Skipped without a
//! C compiler.

#![allow(unsafe_code, reason = "memory and streams are lent to the exchange")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ffi::{c_int, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use evener_engine::{Choice, Config, Engine};
use evener_staging::cuda::Streams;
use evener_staging::{Exchange, Kind, Room, WORDS};
use libloading::Library;

const SLOT: usize = 1 << 20;
const SLOTS: u32 = 4;
const INSIDE: &str = "EVENER_TEST_DRIVER";

/// Whether this process has the driver. If not, another one runs this test with it.
fn has_driver(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&directory).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver/driver.c");
    let made = Command::new("cc")
        .args([
            "-std=c11", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread",
        ])
        .arg("-D_GNU_SOURCE")
        .args([source, "-o"])
        .arg(directory.join("libcuda.so.1"))
        .output();
    match made {
        Ok(made) => assert!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        ),
        Err(error) => {
            eprintln!("skipped: no C compiler here ({error})");
            return false;
        }
    }
    let done = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", &directory)
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(done.success(), "it failed with the driver");
    false
}

/// The driver, as a caller has it.
struct Driver(Library);

impl Driver {
    fn open() -> Driver {
        // SAFETY: the library that `has_driver` has made.
        Driver(unsafe { Library::new("libcuda.so.1") }.unwrap())
    }

    /// This thread has the device from here on.
    fn enter(&self) {
        // SAFETY: a function of this type is there.
        let code = unsafe {
            let enter = self
                .0
                .get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxSetCurrent");
            enter.unwrap()(64 as *mut c_void)
        };
        assert_eq!(code, 0);
    }

    fn stream(&self) -> usize {
        type New = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
        let mut stream = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe {
            let new = self.0.get::<New>(b"new_stream");
            new.unwrap()(&raw mut stream)
        };
        assert_eq!(code, 0);
        stream as usize
    }

    fn finish(&self, stream: usize) {
        // SAFETY: as above.
        let code = unsafe {
            let finish = self
                .0
                .get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuStreamSynchronize");
            finish.unwrap()(stream as *mut c_void)
        };
        assert_eq!(code, 0);
    }

    /// The stream waits until the word is 1.
    fn hold(&self, stream: usize, word: &u32) {
        type Wait = unsafe extern "C" fn(*mut c_void, u64, u32, c_uint) -> c_int;
        // SAFETY: as above.
        let code = unsafe {
            let wait = self.0.get::<Wait>(b"cuStreamWaitValue32_v2");
            wait.unwrap()(stream as *mut c_void, std::ptr::from_ref(word) as u64, 1, 0)
        };
        assert_eq!(code, 0);
    }
}

struct Rank {
    exchange: Exchange,
    streams: Streams,
    _memory: Vec<u64>,
}

/// Called where the device is: a rank with an engine of its own.
fn rank(driver: &Driver, index: u32, patience: Duration) -> Rank {
    let config = Config {
        engine: Choice::Tcp,
        interfaces: Some("lo".into()),
        workers: 1,
        flows: 4,
        most_flows: 8,
        ..Config::default()
    };
    let engine = Arc::new(Engine::start(config, Box::new(|_, _| {})).unwrap());
    let each = SLOT * SLOTS as usize;
    let memory = vec![0u64; (2 * each + WORDS) / 8];
    let base = memory.as_ptr() as usize;
    let room = Room {
        send: base,
        receive: base + each,
        words: base + 2 * each,
        slot: SLOT,
        slots: SLOTS,
    };
    let streams = Streams {
        current: driver.stream(),
        out: driver.stream(),
        back: driver.stream(),
    };
    // SAFETY: the memory lives as long as the exchange, which is dropped first.
    let exchange = unsafe { Exchange::listen(engine.clone(), index, 2, room, patience) };
    let exchange = exchange.unwrap();
    exchange.try_device(streams.out).unwrap();
    Rank {
        exchange,
        streams,
        _memory: memory,
    }
}

/// Two ranks over loopback.
fn pair(driver: &Driver, patience: Duration) -> Vec<Rank> {
    let ranks: Vec<Rank> = (0..2).map(|index| rank(driver, index, patience)).collect();
    connect(&ranks);
    ranks
}

fn connect(ranks: &[Rank]) {
    let handles: Vec<Vec<u8>> = ranks.iter().map(|one| one.exchange.handle()).collect();
    std::thread::scope(|scope| {
        for one in ranks {
            let handles = &handles;
            scope.spawn(move || {
                one.exchange
                    .connect(handles, Duration::from_secs(20))
                    .unwrap();
            });
        }
    });
}

fn bytes(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ (seed * 37) as u8)
        .collect()
}

const SIZES: [usize; 7] = [1, 0, 1408, 1409, 3_000_001, 300_000, 5_000_000];

/// All sizes in both forms, enqueued at once and then compared.
fn exchanges(driver: &Driver, ranks: &[Rank]) {
    std::thread::scope(|scope| {
        for (index, one) in ranks.iter().enumerate() {
            scope.spawn(move || {
                driver.enter();
                let mut all = Vec::new();
                for (turn, each) in SIZES.into_iter().enumerate() {
                    for kind in [Kind::Gather, Kind::Parts] {
                        let payload = match kind {
                            Kind::Gather => bytes(turn * 10 + index, each),
                            Kind::Parts => (0..2)
                                .flat_map(|to| bytes(turn * 10 + 2 * index + to + 3, each))
                                .collect(),
                        };
                        all.push((turn, kind, each, payload, vec![0u8; 2 * each]));
                    }
                }
                for (_, kind, each, payload, received) in &mut all {
                    let (from, to) = (payload.as_ptr() as usize, received.as_mut_ptr() as usize);
                    // SAFETY: the memory lives until the stream was waited for below.
                    unsafe { one.exchange.enqueue(*kind, *each, from, to, one.streams) }.unwrap();
                }
                driver.finish(one.streams.current);
                assert_eq!(one.exchange.failure(), None);
                for (turn, kind, each, _, received) in &all {
                    for from in 0..2 {
                        let seed = match kind {
                            Kind::Gather => turn * 10 + from,
                            Kind::Parts => turn * 10 + 2 * from + index + 3,
                        };
                        let part = &received[from * each..][..*each];
                        assert!(part == bytes(seed, *each), "{each} of {from}, {kind:?}");
                    }
                }
            });
        }
    });
}

/// What is not there yet may not be written, and a peer that is gone is an error.
fn order_and_failure(driver: &Driver, mut ranks: Vec<Rank>) {
    const EACH: usize = 400_000;
    let word = Box::new(std::sync::atomic::AtomicU32::new(0));
    let payload = bytes(1, EACH);
    let mut results = [vec![0x77u8; 2 * EACH], vec![0x77u8; 2 * EACH]];
    // SAFETY: a word of the same size, which outlives the stream's use of it.
    driver.hold(ranks[0].streams.current, unsafe { &*word.as_ptr() });
    let enqueue = |one: &Rank, to: &mut Vec<u8>| {
        let (from, to) = (payload.as_ptr() as usize, to.as_mut_ptr() as usize);
        // SAFETY: the memory lives until the stream was waited for.
        unsafe {
            one.exchange
                .enqueue(Kind::Gather, EACH, from, to, one.streams)
        }
    };
    for (one, result) in ranks.iter().zip(&mut results) {
        enqueue(one, result).unwrap();
    }
    // All of the other's payload has had time to come.
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        results[0].iter().all(|byte| *byte == 0x77),
        "written too early"
    );
    word.store(1, std::sync::atomic::Ordering::SeqCst);
    for (one, result) in ranks.iter().zip(&results) {
        driver.finish(one.streams.current);
        assert!(result[..EACH] == payload && result[EACH..] == payload);
    }
    drop(ranks.pop());
    let one = &ranks[0];
    let result = &mut results[0];
    result.fill(0x77);
    let mut failed = enqueue(one, result).is_err();
    driver.finish(one.streams.current);
    failed |= one.exchange.failure().is_some();
    assert!(failed);
    one.exchange.close();
}

#[test]
fn ranks_exchange_in_order_and_fail_in_words() {
    if has_driver("ranks_exchange_in_order_and_fail_in_words") {
        let driver = Driver::open();
        driver.enter();
        let ranks = pair(&driver, Duration::from_secs(20));
        exchanges(&driver, &ranks);
        drop(ranks);
        order_and_failure(&driver, pair(&driver, Duration::from_millis(700)));
    }
}
