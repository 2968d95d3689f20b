//! Lookups, inserts and steps per second of a store, alone: for work on its loops. The comparison with
//! other libraries is `benchmarks/embedding_store.py`.
//!
//! cargo run --release -p evener-embedding --example throughput -- ROWS DIM SHARDS THREADS

#![allow(missing_docs)]

use evener_embedding::{Init, Optimizer, Options, Store};
use std::time::Instant;

fn main() -> Result<(), evener_embedding::Error> {
    let args: Vec<u64> = std::env::args().skip(1).flat_map(|a| a.parse()).collect();
    let get = |i: usize, default: u64| args.get(i).copied().unwrap_or(default);
    let (rows, dim) = (get(0, 1_000_000), get(1, 16) as usize);
    let mut options = Options::new(dim as u32);
    options.shards = get(2, 64) as u32;
    options.threads = get(3, 1) as u32;
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
    let key = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7) as i64;
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
        "insert of {batch}: median {:.1} ms, worst {:.1} ms; {:.1} bytes per row ({:.1} index)",
        times[times.len() / 2],
        times[times.len() - 1],
        stats.bytes as f64 / rows as f64,
        stats.index_bytes as f64 / rows as f64
    );
    let mut state = 1u64;
    let batches: Vec<Vec<i64>> = (0..16)
        .map(|_| {
            (0..65_536)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    key((state >> 33) % rows)
                })
                .collect()
        })
        .collect();
    let mut out = vec![0.0; 65_536 * dim];
    let gradients = vec![1e-3; 65_536 * dim];
    type Call<'a> = &'a mut dyn FnMut(&[i64]) -> Result<(), evener_embedding::Error>;
    let measure = |what: &str, call: Call<'_>| -> Result<(), evener_embedding::Error> {
        let mut best = f64::MAX;
        for _ in 0..5 {
            let begin = Instant::now();
            for keys in &batches {
                call(keys)?;
            }
            best = best.min(begin.elapsed().as_secs_f64());
        }
        println!("{what}: {:.1} M keys/s", 16.0 * 65.536e-3 / best);
        Ok(())
    };
    measure("lookup", &mut |keys| store.lookup(keys, 1, &mut out))?;
    let mut out = vec![0.0; 65_536 * dim];
    measure("infer", &mut |keys| {
        store.lookup_infer(keys, &mut out, None)
    })?;
    measure("apply", &mut |keys| store.apply(keys, &gradients, 2, None))?;
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
