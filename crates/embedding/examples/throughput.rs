//! Lookups, inserts and steps per second of a store, alone: for work on its loops. Two bounds beside it:
//! `static` is a gather from a matrix with the memory of later rows asked for, which no table of keys can
//! beat; `a line more` reads one line of an index first, as every table must that finds keys and keeps
//! its rows elsewhere, and computes nothing. The comparison with other libraries is
//! `benchmarks/embedding_store.py`.
//!
//! cargo run --release -p evener-embedding --example throughput -- ROWS DIM SHARDS THREADS SLOTS ZEROS

#![allow(missing_docs)]

use evener_embedding::{Error, Init, Optimizer, Options, Store};
use std::time::Instant;

const BATCH: usize = 65_536;
const BATCHES: usize = 16;
const ROUNDS: usize = 7;

fn key(i: u64) -> i64 {
    (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7) as i64
}

/// Numbers of rows: uniform, or of about Zipf 1.05 (the inverse of x^-0.05 between 1 and `rows`).
fn draw(rows: u64, zipf: bool) -> Vec<Vec<u64>> {
    let end = (rows as f64).powf(-0.05);
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        if !zipf {
            return (state >> 33) % rows;
        }
        let u = (state >> 11) as f64 / (1u64 << 53) as f64;
        let rank = (1.0 - u * (1.0 - end)).powf(-20.0) as u64;
        rank.wrapping_mul(0x2545_f491_4f6c_dd1d) % rows
    };
    (0..BATCHES)
        .map(|_| (0..BATCH).map(|_| next()).collect())
        .collect()
}

/// A line of an index: five keys, five numbers.
type Line = [u64; 8];

fn prefetch<T>(at: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program can see.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<3>(std::ptr::from_ref(at).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Rows of a matrix by number. With `index`, the line of a hash is read first, and the number of the row
/// is known when it is there: lines hold zeros, which are added.
fn gather(
    table: &[f32],
    index: Option<&[Line]>,
    dim: usize,
    ids: &[u64],
    out: &mut [f32],
    threads: usize,
) {
    const AHEAD: usize = 16;
    let line = |id: u64| {
        index.map(|lines| {
            let hash = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            &lines[((u128::from(hash) * lines.len() as u128) >> 64) as usize]
        })
    };
    let row = |id: u64| &table[id as usize * dim..(id as usize + 1) * dim];
    let part = ids.len().div_ceil(threads);
    rayon::in_place_scope(|scope| {
        for (ids, out) in ids.chunks(part).zip(out.chunks_mut(part * dim)) {
            scope.spawn(move |_| {
                for (i, (out, &id)) in out.chunks_exact_mut(dim).zip(ids).enumerate() {
                    if let Some(line) = ids.get(i + 2 * AHEAD).and_then(|&id| line(id)) {
                        prefetch(line);
                    }
                    if let Some(&id) = ids.get(i + AHEAD) {
                        let start = &row(id + line(id).map_or(0, |line| line[id as usize % 8]))[0];
                        prefetch(start);
                    }
                    out.copy_from_slice(row(id));
                }
            });
        }
    });
}

fn main() -> Result<(), Error> {
    let args: Vec<u64> = std::env::args().skip(1).flat_map(|a| a.parse()).collect();
    let get = |i: usize, default: u64| args.get(i).copied().unwrap_or(default);
    let (rows, dim) = (get(0, 1_000_000), get(1, 16) as usize);
    let mut options = Options::new(dim as u32);
    options.shards = get(2, 64) as u32;
    options.threads = get(3, 1) as u32;
    let threads = options.threads as usize;
    options.optimizer = match get(4, 0) {
        0 => Optimizer::Sgd {
            lr: 0.1,
            weight_decay: 0.0,
        },
        _ => Optimizer::default(),
    };
    if get(5, 0) == 1 {
        options.init = Init::Zeros;
    }
    let store = Store::new(options)?;
    let batch = 131_072;
    let mut out = vec![0.0; batch * dim];
    let mut times = Vec::new();
    for start in (0..rows).step_by(batch) {
        let keys: Vec<i64> = (start..rows.min(start + batch as u64)).map(key).collect();
        let begin = Instant::now();
        store.lookup(&keys, 1, &mut out[..keys.len() * dim])?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let stats = store.stats();
    println!(
        "insert of {batch}: best {:.1} ms, median {:.1} ms, worst {:.1} ms; {:.1} bytes per row ({:.1} index)",
        times[0],
        times[times.len() / 2],
        times[times.len() - 1],
        stats.bytes as f64 / rows as f64,
        stats.index_bytes as f64 / rows as f64
    );
    let table = vec![0.5f32; rows as usize * dim];
    // Written, so that it has memory of its own.
    let mut index: Vec<Line> = vec![[1; 8]; (rows * 2 / 9) as usize];
    index.fill([0; 8]);
    let mut out = vec![0.0; BATCH * dim];
    let gradients = vec![1e-3; BATCH * dim];
    for (name, zipf) in [("uniform", false), ("Zipf 1.05", true)] {
        let ids = draw(rows, zipf);
        let keys: Vec<Vec<i64>> = ids
            .iter()
            .map(|ids| ids.iter().map(|&id| key(id)).collect())
            .collect();
        // In turns, the best of each: other programs run on the machine.
        let mut best = [f64::MAX; 5];
        for _ in 0..ROUNDS {
            for i in 0..BATCHES {
                for (what, best) in best.iter_mut().enumerate() {
                    let begin = Instant::now();
                    match what {
                        0 => gather(&table, None, dim, &ids[i], &mut out, threads),
                        1 => gather(&table, Some(&index), dim, &ids[i], &mut out, threads),
                        2 => store.lookup(&keys[i], 1, &mut out)?,
                        3 => store.lookup_infer(&keys[i], &mut out, None)?,
                        _ => store.apply(&keys[i], &gradients, 2, None)?,
                    }
                    *best = best.min(begin.elapsed().as_secs_f64());
                }
            }
        }
        let rate = best.map(|seconds| BATCH as f64 / seconds / 1e6);
        println!(
            "{name}: static {:.1}, a line more {:.1} ({:.2} x), lookup {:.1} ({:.2} x), infer {:.1} \
             ({:.2} x), apply {:.1} M keys/s",
            rate[0],
            rate[1],
            rate[1] / rate[0],
            rate[2],
            rate[2] / rate[0],
            rate[3],
            rate[3] / rate[0],
            rate[4]
        );
    }
    let begin = Instant::now();
    for i in 0..200_000 {
        store.lookup(&[key(i % 1000)], 1, &mut out[..dim])?;
    }
    println!(
        "one key: {:.0} ns",
        begin.elapsed().as_secs_f64() / 200_000.0 * 1e9
    );
    Ok(())
}
