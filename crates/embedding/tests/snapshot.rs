//! Nothing is lost: files that are cut, changed, full or killed; deltas; training that goes on.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use evener_embedding::{Eviction, Init, Optimizer, Options, Store, Tier};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("evener-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn options(shards: u32) -> Options {
    Options {
        shards,
        threads: 1,
        ..Options::new(4)
    }
}

/// Most rows are in the second tier.
fn tiered(options: Options) -> Options {
    let path = std::env::temp_dir().to_string_lossy().into_owned();
    Options {
        tier: Some(Tier { path, rows: 150 }),
        ..options
    }
}

type Rows = BTreeMap<i64, (Vec<u32>, u32, u32)>;

fn rows(store: &Store) -> Rows {
    let mut all = BTreeMap::new();
    for shard in 0..store.options().shards as usize {
        let part = store.export_shard(shard).unwrap();
        let width = 8;
        for (i, &key) in part.keys.iter().enumerate() {
            let row = part.rows[i * width..(i + 1) * width]
                .iter()
                .map(|v| v.to_bits())
                .collect();
            all.insert(key, (row, part.frequencies[i], part.versions[i]));
        }
    }
    all
}

fn train(store: &Store, step: u32) {
    let keys: Vec<i64> = (0..300)
        .map(|i| (i * 37 + i64::from(step) * 101) % 2000)
        .collect();
    let mut out = vec![0.0; keys.len() * 4];
    store.lookup(&keys, step, &mut out).unwrap();
    out.iter_mut().for_each(|v| *v = *v * 0.5 + 0.01);
    store.apply(&keys, &out, step, None).unwrap();
}

#[test]
fn fifty_deltas_into_an_empty_store_give_the_same_bits() {
    fifty_deltas("deltas", options);
}

#[test]
fn fifty_deltas_of_cold_rows_do_too() {
    fifty_deltas("cold-deltas", |shards| tiered(options(shards)));
}

fn fifty_deltas(name: &str, options: impl Fn(u32) -> Options) {
    let folder = folder(name);
    let store = Store::new(options(8)).unwrap();
    for step in 1..=50 {
        train(&store, step);
        if step % 7 == 0 {
            store.remove(
                &(0..40)
                    .map(|i| i * 13 + i64::from(step))
                    .collect::<Vec<_>>(),
            );
        }
        if step == 33 {
            store.clear().unwrap();
            train(&store, step);
        }
        store.delta(&folder).unwrap();
    }
    let replay = Store::new(options(2)).unwrap();
    for n in 1..=50 {
        replay
            .apply_delta(&folder.join(format!("delta-{n:06}.evs")))
            .unwrap();
    }
    assert!(rows(&replay) == rows(&store));
    assert_eq!(replay.stats().steps, store.stats().steps);
    // The folder as a whole, onto yet another number of shards; then both go on alike.
    let whole = Store::new(options(32)).unwrap();
    whole.restore(&folder).unwrap();
    for one in [&store, &replay, &whole] {
        train(one, 51);
    }
    assert!(rows(&whole) == rows(&store) && rows(&replay) == rows(&store));
    // DeepRec's issue 999: a delta that does not follow is refused, with nothing changed.
    let before = rows(&whole);
    let message = whole
        .apply_delta(&folder.join("delta-000007.evs"))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("missing") && message.contains("delta-000007"),
        "{message}"
    );
    std::fs::remove_file(folder.join("delta-000020.evs")).unwrap();
    assert!(whole.restore(&folder).is_err());
    assert!(rows(&whole) == before);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn more_files_than_a_mark_has_values() {
    let folder = folder("marks");
    let mut with_tier = tiered(options(4));
    with_tier.tier.as_mut().unwrap().rows = 8;
    let store = Store::new(with_tier).unwrap();
    let replay = Store::new(options(1)).unwrap();
    for step in 1..=600u32 {
        let key = i64::from(step % 50);
        store.apply(&[key], &[1.0; 4], step, None).unwrap();
        let saved = store.delta(&folder).unwrap();
        assert_eq!(saved.rows, 1, "step {step}");
        replay.apply_delta(&saved.path).unwrap();
    }
    assert!(rows(&replay) == rows(&store));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_snapshot_is_of_one_instant_while_training_goes_on() {
    // DeepRec's issue 1023: weights and slots of different instants. Every step adds 1 to all rows, and
    // with SGD the value says how many steps a row has seen; all rows of a file must have seen the same.
    let options = Options {
        optimizer: Optimizer::Sgd {
            lr: 1.0,
            weight_decay: 0.0,
        },
        init: Init::Zeros,
        shards: 8,
        threads: 1,
        ..Options::new(4)
    };
    let store = Store::new(options.clone()).unwrap();
    let keys: Vec<i64> = (0..3000).collect();
    store.lookup(&keys, 0, &mut vec![0.0; 12_000]).unwrap();
    let stop = AtomicBool::new(false);
    let files: Vec<Vec<u8>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut step = 0;
            while !stop.load(Ordering::Relaxed) {
                step += 1;
                // One key: one lock, so that each update is one instant.
                for &key in &keys {
                    store.apply(&[key], &[-1.0; 4], step, None).unwrap();
                }
                let extra = 1_000_000 + i64::from(step);
                store.upsert(&[extra], &[-1.0; 4], step).unwrap();
                store.remove(&[extra - 2]);
            }
        });
        // Until training has gone on under ten of them.
        let mut files: Vec<Vec<u8>> = Vec::new();
        let mut steps = 0;
        while files.len() < 12 {
            let before = store.stats().updated;
            files.push(store.save_bytes().unwrap());
            steps += usize::from(store.stats().updated > before);
            if steps < 10 && files.len() == 12 {
                files.remove(1);
            }
        }
        stop.store(true, Ordering::Relaxed);
        files
    });
    let mut seen = Vec::new();
    for file in &files {
        let copy = Store::new(options.clone()).unwrap();
        copy.restore_bytes(file).unwrap();
        let mut values = vec![0.0; 12_000];
        copy.lookup_infer(&keys, &mut values, None).unwrap();
        // Keys are updated in their order: at one instant the counts fall once, by one.
        let counts: Vec<f32> = values.chunks(4).map(|row| row[0]).collect();
        assert!(values.chunks(4).all(|row| row.iter().all(|v| *v == row[0])));
        let falls = counts.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!(falls <= 1, "rows of different instants");
        assert!(counts[0] - counts[2999] <= 1.0 && counts[0] >= counts[2999]);
        assert!((3000..=3003).contains(&copy.len()), "{}", copy.len());
        seen.push(counts[0]);
    }
    assert!(seen.windows(2).all(|pair| pair[0] <= pair[1]));
    assert!(seen.len() == 12);
}

#[test]
fn a_file_that_is_cut_or_changed_anywhere_is_refused_by_place() {
    let store = Store::new(options(2)).unwrap();
    (1..=3).for_each(|step| train(&store, step));
    let whole = store.save_bytes().unwrap();
    let target = Store::new(options(2)).unwrap();
    target.upsert(&[5], &[1.0; 4], 1).unwrap();
    let before = rows(&target);
    let step = whole.len() / 97;
    for end in (0..whole.len()).step_by(step) {
        let message = target.restore_bytes(&whole[..end]).unwrap_err().to_string();
        assert!(message.contains("byte"), "cut at {end}: {message}");
    }
    for at in (0..whole.len()).step_by(step) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        assert!(target.restore_bytes(&bytes).is_err(), "changed at {at}");
    }
    assert!(rows(&target) == before);
    let mut later = whole.clone();
    later[8] = 9;
    let message = target.restore_bytes(&later).unwrap_err().to_string();
    assert!(message.contains("version 9"), "{message}");
    for (field, other) in [
        (
            "dim",
            Options {
                dim: 5,
                ..options(2)
            },
        ),
        (
            "dtype",
            Options {
                dtype: evener_embedding::Dtype::Bf16,
                ..options(2)
            },
        ),
        (
            "optimizer",
            Options {
                optimizer: Optimizer::parse(r#"{"kind": "adam"}"#).unwrap(),
                ..options(2)
            },
        ),
    ] {
        let message = Store::new(other)
            .unwrap()
            .restore_bytes(&whole)
            .unwrap_err()
            .to_string();
        assert!(message.contains(field), "{message}");
    }
}

#[test]
fn a_full_disk_leaves_the_last_snapshot_and_loses_nothing_of_the_next() {
    // /dev/full gives ENOSPC to every write: the folder's next file is a link to it.
    if !Path::new("/dev/full").exists() {
        println!("skipped: no /dev/full here");
        return;
    }
    let folder = folder("full");
    let store = Store::new(options(4)).unwrap();
    (1..=5).for_each(|step| train(&store, step));
    store.snapshot(&folder).unwrap();
    train(&store, 6);
    store.remove(&[74]);
    let part = folder.join(format!(".delta-000002.evs.{}.part", std::process::id()));
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let message = store.delta(&folder).unwrap_err().to_string();
    assert!(
        message.contains("delta-000002") && message.contains("No space"),
        "{message}"
    );
    assert!(!part.exists());
    train(&store, 7);
    store.delta(&folder).unwrap();
    let copy = Store::new(options(4)).unwrap();
    copy.restore(&folder).unwrap();
    assert!(rows(&copy) == rows(&store));
    std::fs::remove_dir_all(folder).unwrap();
}

/// The process that the next test kills: it trains and writes for as long as it lives.
#[test]
fn the_one_that_is_killed() {
    let Ok(folder) = std::env::var("EVENER_TEST_KILLED") else {
        return;
    };
    let store = match std::env::var("EVENER_TEST_TIER") {
        Ok(_) => Store::new(tiered(options(8))).unwrap(),
        Err(_) => Store::new(options(8)).unwrap(),
    };
    for step in 1.. {
        train(&store, step);
        let saved = match step % 5 {
            1 => store.snapshot(Path::new(&folder)).unwrap(),
            _ => store.delta(Path::new(&folder)).unwrap(),
        };
        println!("saved {}", saved.step);
    }
}

#[test]
fn kill_at_any_moment_leaves_a_whole_snapshot() {
    use std::io::{BufRead, BufReader};
    let folder = folder("killed");
    for round in 0..6u32 {
        let _ = std::fs::remove_dir_all(&folder);
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        if round % 2 == 1 {
            command.env("EVENER_TEST_TIER", "1");
        }
        let mut child = command
            .args(["--exact", "the_one_that_is_killed", "--nocapture"])
            .env("EVENER_TEST_KILLED", &folder)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut last = 0;
        while last < 3 + round * 2 {
            let line = lines.next().unwrap().unwrap();
            if let Some((_, step)) = line.rsplit_once("saved ") {
                last = step.trim().parse().unwrap();
            }
        }
        // Anywhere in the next step or file.
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = Store::new(options(2)).unwrap();
        let saved = store.restore(&folder).unwrap();
        assert!(
            saved.step >= last,
            "{} was promised, {} is there",
            last,
            saved.step
        );
        let again = Store::new(options(8)).unwrap();
        (1..=saved.step).for_each(|step| train(&again, step));
        assert!(rows(&store) == rows(&again));
        // What was half written goes with the next file.
        store.snapshot(&folder).unwrap();
        let left = std::fs::read_dir(&folder).unwrap();
        assert!(
            left.flatten()
                .all(|f| !f.file_name().to_string_lossy().ends_with(".part"))
        );
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn old_snapshots_go_and_the_last_but_one_stays() {
    let folder = folder("keep");
    let store = Store::new(options(2)).unwrap();
    for step in 1..=9 {
        train(&store, step);
        match step % 3 {
            1 => store.snapshot(&folder).unwrap(),
            _ => store.delta(&folder).unwrap(),
        };
    }
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .flatten()
        .map(|f| f.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names.len(), 6, "{names:?}");
    assert!(names[5].starts_with("full-000007") && !names.contains(&"full-000001.evs".into()));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn strings_counts_and_other_optimizers_come_through() {
    let admission = r#"{"dim": 4, "keys": "string", "shards": 4,
        "admission": {"kind": "counter", "count": 3}}"#;
    let options = Options::parse(admission).unwrap();
    let store = Store::new(options.clone()).unwrap();
    let names = ["a", "b", "color=red", ""];
    let bytes = names.concat().into_bytes();
    let mut offsets = vec![0u64];
    for name in names {
        offsets.push(offsets[offsets.len() - 1] + name.len() as u64);
    }
    let mut keys = [0; 4];
    store.intern(&bytes, &offsets, true, &mut keys).unwrap();
    let mut out = [0.0; 16];
    for step in 0..2 {
        store.lookup(&keys, step, &mut out).unwrap();
    }
    assert_eq!((store.len(), store.stats().pending), (0, 4));
    store.lookup(&keys[1..], 2, &mut out[4..]).unwrap();
    let copy = Store::new(Options {
        shards: 1,
        ..options
    })
    .unwrap();
    copy.restore_bytes(&store.save_bytes().unwrap()).unwrap();
    assert_eq!((copy.len(), copy.stats().pending), (3, 1));
    let mut again = [0; 4];
    copy.intern(&bytes, &offsets, false, &mut again).unwrap();
    assert_eq!(again, keys);
    assert_eq!(copy.name(keys[2]).as_deref(), Some(&b"color=red"[..]));
    // A key that was seen twice needs one more.
    copy.lookup(&keys[..1], 3, &mut out[..4]).unwrap();
    assert_eq!(copy.len(), 4);
    // No step was done: another optimizer takes its place, and the rows stay.
    copy.set_optimizer(Optimizer::parse(r#"{"kind": "adam"}"#).unwrap())
        .unwrap();
    let mut now = [0.0; 16];
    copy.lookup_infer(&keys, &mut now, None).unwrap();
    assert_eq!(now, out);
    copy.apply(&keys, &[1.0; 16], 4, None).unwrap();
    let refused = copy
        .set_optimizer(Optimizer::default())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("adam") && refused.contains("adagrad"),
        "{refused}"
    );
}

#[test]
fn threads_that_insert_step_look_evict_and_save_agree_with_what_they_wrote() {
    agree(|options| options);
}

#[test]
fn threads_that_insert_and_move_cold_rows_agree_with_what_they_wrote() {
    agree(tiered);
}

fn agree(with: impl Fn(Options) -> Options) {
    // Each thread has keys of its own and knows what they must be; evictions and snapshots run across.
    let options = Options {
        optimizer: Optimizer::Sgd {
            lr: 1.0,
            weight_decay: 0.0,
        },
        init: Init::Zeros,
        eviction: Eviction::Ttl { steps: 1 << 30 },
        shards: 4,
        threads: 2,
        ..Options::new(4)
    };
    let options = with(options);
    let store = Store::new(options.clone()).unwrap();
    // About 130 steps in all for each second, and 800 where it is optimized (two busy cores).
    let seconds = std::env::var("EVENER_SOAK_SECONDS").map_or(6, |s| s.parse().unwrap());
    let end = std::time::Instant::now() + std::time::Duration::from_secs(seconds);
    std::thread::scope(|scope| {
        for thread in 0..6i64 {
            let store = &store;
            scope.spawn(move || {
                let mut model: BTreeMap<i64, f32> = BTreeMap::new();
                let mut state = thread as u64 + 1;
                let mut random = move |n: u64| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(99);
                    (state >> 33) % n
                };
                let mut step = 0;
                while std::time::Instant::now() < end {
                    step += 1;
                    let span = 200 << random(5);
                    // Large batches go over several threads.
                    let most = if random(8) == 0 { 6000 } else { 300 };
                    let keys: Vec<i64> = (0..1 + random(most))
                        .map(|_| random(span) as i64 * 6 + thread)
                        .collect();
                    match random(6) {
                        0 => {
                            let gone = keys.iter().filter(|k| model.remove(k).is_some()).count();
                            assert_eq!(store.remove(&keys), gone as u64);
                        }
                        1 | 2 => {
                            store
                                .apply(&keys, &vec![-1.0; keys.len() * 4], step, None)
                                .unwrap();
                            for key in keys {
                                *model.entry(key).or_insert(0.0) += 1.0;
                            }
                        }
                        3 => {
                            let mut out = vec![9.0; keys.len() * 4];
                            store.lookup(&keys, step, &mut out).unwrap();
                            for (key, row) in keys.iter().zip(out.chunks(4)) {
                                let wanted = *model.entry(*key).or_insert(0.0);
                                assert!(row.iter().all(|v| *v == wanted), "{row:?} {wanted}");
                            }
                        }
                        _ => {
                            let mut out = vec![9.0; keys.len() * 4];
                            let mut found = vec![7; keys.len()];
                            store
                                .lookup_infer(&keys, &mut out, Some(&mut found))
                                .unwrap();
                            for ((key, row), found) in keys.iter().zip(out.chunks(4)).zip(found) {
                                let wanted = model.get(key);
                                assert_eq!(found == 1, wanted.is_some());
                                let wanted = wanted.copied().unwrap_or(0.0);
                                assert!(row.iter().all(|v| *v == wanted), "{row:?} {wanted}");
                            }
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            while std::time::Instant::now() < end {
                assert_eq!(store.evict(5).unwrap(), 0);
            }
        });
        scope.spawn(|| {
            while std::time::Instant::now() < end {
                let bytes = store.save_bytes().unwrap();
                let copy = Store::new(options.clone()).unwrap();
                copy.restore_bytes(&bytes).unwrap();
                copy.export(|_, values, _, _| assert!(values.iter().all(|v| *v == values[0])))
                    .unwrap();
            }
        });
    });
}
