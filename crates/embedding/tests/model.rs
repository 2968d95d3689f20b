//! The store against a model of it: a `HashMap` and the arithmetic of one row at a time.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use evener_embedding::{Admission, Eviction, Init, Optimizer, Options, Stats, Store, Tier};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};

const DIM: usize = 3;

#[derive(Debug, Clone)]
enum Action {
    Lookup(Vec<i64>),
    Apply(Vec<i64>),
    Upsert(Vec<i64>),
    Remove(Vec<i64>),
    Evict,
    SaveAndRestore,
    Clear,
}

fn keys(most: usize) -> impl Strategy<Value = Vec<i64>> {
    let key = prop_oneof![
        8 => -30i64..30,
        1 => prop_oneof![Just(i64::MIN), Just(i64::MAX), Just(-1)],
        2 => any::<i64>(),
    ];
    prop::collection::vec(key, 0..most)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => keys(80).prop_map(Action::Lookup),
        6 => keys(80).prop_map(Action::Apply),
        2 => keys(40).prop_map(Action::Upsert),
        2 => keys(20).prop_map(Action::Remove),
        2 => Just(Action::Evict),
        1 => Just(Action::SaveAndRestore),
        1 => Just(Action::Clear),
    ]
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    values: [f32; DIM],
    sums: [f32; DIM],
    frequency: u32,
    version: u32,
}

/// Adagrad with a counter of 2 and a life of 3 steps, one key at a time.
#[derive(Debug, Default)]
struct Model {
    rows: HashMap<i64, Row>,
    /// How often, and in which generation last.
    seen: HashMap<i64, (u32, u32)>,
    generation: u32,
    aged: u32,
    fresh: HashMap<i64, [f32; DIM]>,
}

const LR: f32 = 0.5;
const COUNT: u32 = 2;
const LIFE: u32 = 3;

fn options(shards: u32, threads: u32) -> Options {
    Options {
        shards,
        threads,
        optimizer: Optimizer::Adagrad {
            lr: LR,
            eps: 1e-10,
            initial_accumulator: 0.1,
            weight_decay: 0.0,
        },
        init: Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
        admission: Admission::Counter { count: COUNT },
        eviction: Eviction::Ttl { steps: LIFE },
        ..Options::new(DIM as u32)
    }
}

fn gradient(key: i64, at: usize) -> [f32; DIM] {
    std::array::from_fn(|i| ((key % 17) as f32 + i as f32 - at as f32 * 0.25) * 0.125)
}

impl Model {
    fn start(&mut self, key: i64) -> [f32; DIM] {
        *self.fresh.entry(key).or_insert_with(|| {
            // The initial values are the store's own: philox.rs has known answers for them.
            let store = Store::new(options(1, 1)).unwrap();
            let mut out = [0.0; DIM];
            store.lookup_infer(&[key], &mut out, None).unwrap();
            out
        })
    }

    fn lookup(&mut self, key: i64, step: u32) -> [f32; DIM] {
        if let Some(row) = self.rows.get(&key) {
            return row.values;
        }
        let values = self.start(key);
        let seen = self.seen.entry(key).or_insert((0, 0));
        *seen = (seen.0 + 1, self.generation);
        if seen.0 >= COUNT {
            self.seen.remove(&key);
            self.insert(key, values, step);
        }
        values
    }

    fn insert(&mut self, key: i64, values: [f32; DIM], step: u32) {
        self.rows.insert(
            key,
            Row {
                values,
                sums: [0.1; DIM],
                frequency: 0,
                version: step,
            },
        );
    }

    fn apply(&mut self, keys: &[i64], step: u32) {
        let mut sums: BTreeMap<i64, ([f32; DIM], u32)> = BTreeMap::new();
        for (at, &key) in keys.iter().enumerate() {
            let g = gradient(key, at);
            sums.entry(key)
                .and_modify(|(sum, n)| {
                    for (sum, g) in sum.iter_mut().zip(g) {
                        *sum += g;
                    }
                    *n += 1;
                })
                .or_insert((g, 1));
        }
        for (key, (g, n)) in sums {
            if let Some(row) = self.rows.get_mut(&key) {
                for (i, g) in g.into_iter().enumerate() {
                    row.sums[i] += g * g;
                    row.values[i] -= LR * g / (row.sums[i].sqrt() + 1e-10);
                }
                row.frequency += n;
                row.version = step;
            }
        }
    }
}

fn rows(store: &Store) -> HashMap<i64, Row> {
    let mut found = HashMap::new();
    for shard in 0..store.options().shards as usize {
        let part = store.export_shard(shard).unwrap();
        for (i, &key) in part.keys.iter().enumerate() {
            let whole = &part.rows[i * 2 * DIM..(i + 1) * 2 * DIM];
            let row = Row {
                values: whole[..DIM].try_into().unwrap(),
                sums: whole[DIM..].try_into().unwrap(),
                frequency: part.frequencies[i],
                version: part.versions[i],
            };
            assert_eq!(found.insert(key, row), None, "key {key} is there twice");
        }
    }
    found
}

/// A second tier, with this many rows in memory.
fn tier(rows: Option<u64>) -> Option<Tier> {
    rows.map(|rows| Tier {
        path: std::env::temp_dir().to_string_lossy().into_owned(),
        rows,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn it_does_what_the_model_does(
        actions in prop::collection::vec(action(), 1..40),
        bits in 0u32..5,
        threads in 1u32..3,
        warm in prop::option::of(1u64..60),
    ) {
        let options = |shards, threads| Options { tier: tier(warm), ..options(shards, threads) };
        let mut store = Store::new(options(1 << bits, threads)).unwrap();
        let mut model = Model::default();
        for (step, action) in (1u32..).zip(actions) {
            match action {
                Action::Lookup(keys) => {
                    let mut out = vec![0.0; keys.len() * DIM];
                    store.lookup(&keys, step, &mut out).unwrap();
                    for (i, &key) in keys.iter().enumerate() {
                        let wanted = model.lookup(key, step);
                        prop_assert_eq!(&out[i * DIM..(i + 1) * DIM], &wanted[..]);
                    }
                }
                Action::Apply(keys) => {
                    let gradients: Vec<f32> =
                        keys.iter().enumerate().flat_map(|(at, &key)| gradient(key, at)).collect();
                    store.apply(&keys, &gradients, step, None).unwrap();
                    model.apply(&keys, step);
                }
                Action::Upsert(keys) => {
                    let values: Vec<f32> = (0..keys.len() * DIM).map(|i| i as f32).collect();
                    store.upsert(&keys, &values, step).unwrap();
                    for (i, &key) in keys.iter().enumerate() {
                        let values = values[i * DIM..(i + 1) * DIM].try_into().unwrap();
                        if !model.rows.contains_key(&key) {
                            model.insert(key, values, step);
                        }
                        let row = model.rows.get_mut(&key).unwrap();
                        row.values = values;
                        row.version = step;
                        row.frequency += 1;
                    }
                }
                Action::Remove(keys) => {
                    let mut gone = 0;
                    for key in &keys {
                        gone += u64::from(model.rows.remove(key).is_some());
                    }
                    prop_assert_eq!(store.remove(&keys), gone);
                }
                Action::Evict => {
                    let before = model.rows.len();
                    model.rows.retain(|_, row| step - row.version <= LIFE);
                    // Counts that rested go once per life of a row.
                    if step - model.aged >= LIFE {
                        let now = model.generation;
                        model.seen.retain(|_, seen| seen.1 == now);
                        (model.generation, model.aged) = (now + 1, step);
                    }
                    let gone = store.evict(step).unwrap();
                    prop_assert_eq!(gone, (before - model.rows.len()) as u64);
                }
                Action::SaveAndRestore => {
                    let bytes = store.save_bytes().unwrap();
                    let other = Store::new(options(1 << (4 - bits), 1)).unwrap();
                    other.upsert(&[1, 2, 3], &[0.0; 9], 1).unwrap();
                    other.restore_bytes(&bytes).unwrap();
                    store = other;
                    let now = model.generation;
                    model.seen.values_mut().for_each(|seen| seen.1 = now);
                }
                Action::Clear => {
                    store.clear().unwrap();
                    model.rows.clear();
                    model.seen.clear();
                    model.aged = 0;
                }
            }
            prop_assert_eq!(rows(&store), model.rows.clone());
            prop_assert_eq!(store.stats().pending, model.seen.len() as u64);
        }
    }
}

fn plain(dim: u32, shards: u32, threads: u32) -> Options {
    Options {
        shards,
        threads,
        ..Options::new(dim)
    }
}

#[test]
fn shards_and_threads_change_no_bit() {
    let optimizers = [
        r#"{"kind": "sgd", "weight_decay": 0.01}"#,
        r#"{"kind": "adagrad"}"#,
        r#"{"kind": "adam"}"#,
        r#"{"kind": "adam_w"}"#,
        r#"{"kind": "lazy_adam"}"#,
        r#"{"kind": "ftrl", "l1": 0.001}"#,
        r#"{"kind": "group_adam", "l21": 0.0001}"#,
        r#"{"kind": "group_ftrl", "l1": 0.001, "l21": 0.001}"#,
    ];
    for (dtype, optimizer) in optimizers.iter().enumerate() {
        let ways = [
            (1, 1, None),
            (64, 1, None),
            (16, 3, None),
            (4, 2, Some(300)),
        ];
        let all: Vec<BTreeMap<i64, Vec<u32>>> = ways
            .iter()
            .map(|&(shards, threads, warm)| {
                let mut options = plain(5, shards, threads);
                options.tier = tier(warm);
                options.optimizer = Optimizer::parse(optimizer).unwrap();
                options.dtype = [
                    evener_embedding::Dtype::F32,
                    evener_embedding::Dtype::F16,
                    evener_embedding::Dtype::Bf16,
                ][dtype % 3];
                let store = Store::new(options).unwrap();
                let n = 6000;
                let mut out = vec![0.0; n * 5];
                for step in 0..4u32 {
                    let keys: Vec<i64> = (0..n as i64)
                        .map(|i| (i * i + 7 * i64::from(step)) % 2500 - 1000)
                        .collect();
                    store.lookup(&keys, step, &mut out).unwrap();
                    let gradients: Vec<f32> =
                        out.iter().map(|v| v * 0.3 + 0.01 * step as f32).collect();
                    store.apply(&keys, &gradients, step, Some(0.01)).unwrap();
                }
                let mut rows = BTreeMap::new();
                for shard in 0..shards as usize {
                    let part = store.export_shard(shard).unwrap();
                    let width = part.rows.len() / part.keys.len().max(1);
                    for (i, &key) in part.keys.iter().enumerate() {
                        let whole = &part.rows[i * width..(i + 1) * width];
                        assert!(whole.iter().all(|v| v.is_finite()), "{optimizer}");
                        rows.insert(key, whole.iter().map(|v| v.to_bits()).collect());
                    }
                }
                rows
            })
            .collect();
        assert!(all[0].len() > 1000);
        assert!(all.iter().all(|one| *one == all[0]), "{optimizer}");
    }
}

#[test]
fn rows_beyond_the_bound_go_to_the_second_tier_and_the_used_ones_stay() {
    let mut options = plain(4, 4, 2);
    options.tier = tier(Some(1000));
    let store = Store::new(options).unwrap();
    let hot: Vec<i64> = (0..400).collect();
    let mut out = vec![0.0; 400 * 4];
    for step in 1..=40u32 {
        let rare: Vec<i64> = (0..400i64)
            .map(|i| 1000 + 400 * i64::from(step) + i)
            .collect();
        for keys in [&hot, &rare] {
            store.lookup(keys, step, &mut out).unwrap();
            store.apply(keys, &out, step, None).unwrap();
        }
    }
    let stats = store.stats();
    assert_eq!(stats.rows, 400 * 41);
    assert!(stats.rows - stats.cold_rows <= 1000 + 400, "{stats:?}");
    assert!(stats.cold_bytes > stats.cold_rows * 40 && stats.bytes > stats.cold_buffer_bytes);
    // What was in every step never left; what came once is read without moving.
    let before = stats.warmed;
    store.lookup(&hot, 41, &mut out).unwrap();
    assert_eq!(store.stats().warmed, before);
    let all: Vec<i64> = (1400..1400 + 400 * 40).collect();
    let (mut rows, mut found) = (vec![0.0; all.len() * 4], vec![0; all.len()]);
    store
        .lookup_infer(&all, &mut rows, Some(&mut found))
        .unwrap();
    assert!(found.iter().all(|&found| found == 1) && store.stats().warmed == before);
    assert!(
        store
            .meta(&all)
            .unwrap()
            .iter()
            .all(|meta| meta.is_some_and(|(n, _)| n == 1))
    );
    // Gaps are used anew: the file does not grow with what comes back and goes.
    let (mut out, size) = (vec![0.0; 4000], store.stats().cold_bytes);
    for round in 0..60usize {
        let keys = &all[round % 15 * 1000..][..1000];
        store.lookup(keys, 42, &mut out).unwrap();
    }
    assert!(
        store.stats().cold_bytes <= 3 * size,
        "{} {size}",
        store.stats().cold_bytes
    );
    let refused = Store::new(Options {
        tier: Some(Tier {
            path: "/proc/none".into(),
            rows: 5,
        }),
        ..plain(4, 4, 1)
    });
    assert!(refused.unwrap_err().to_string().contains("/proc/none"));
}

#[test]
fn what_is_refused_changes_nothing() {
    let store = Store::new(plain(2, 4, 1)).unwrap();
    store.upsert(&[1, 2], &[1.0, 2.0, 3.0, 4.0], 1).unwrap();
    let before = store.save_bytes().unwrap();
    let stats = |s: &Store| -> (u64, u64) {
        let Stats { rows, updated, .. } = s.stats();
        (rows, updated)
    };
    let first = stats(&store);
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for value in bad {
        let message = store
            .apply(&[1, 9], &[0.0, 0.0, 0.0, value], 2, None)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("key 9") && message.contains("column 1"),
            "{message}"
        );
        assert!(store.upsert(&[5], &[value, 0.0], 2).is_err());
    }
    assert!(store.apply(&[1], &[0.0; 3], 2, None).is_err());
    assert!(store.apply(&[1], &[0.0; 2], 2, Some(f32::NAN)).is_err());
    assert!(store.apply(&[1], &[0.0; 2], 2, Some(-1.0)).is_err());
    assert!(store.lookup(&[1], 2, &mut [0.0; 3]).is_err());
    assert!(
        store
            .lookup_infer(&[1, 7], &mut [0.0; 4], Some(&mut [0; 1]))
            .is_err()
    );
    assert!(store.restore_bytes(&before[..before.len() - 1]).is_err());
    store.lookup_infer(&[77; 40], &mut [0.0; 80], None).unwrap();
    assert_eq!(stats(&store), first);
    let mut out = [0.0; 4];
    store.lookup_infer(&[1, 2], &mut out, None).unwrap();
    assert_eq!(out, [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_key_that_was_evicted_comes_back_as_it_began() {
    // torchrec's issue 3030: rows of zeros after eviction.
    let store = Store::new(Options {
        eviction: Eviction::Lru { rows: 50 },
        evict_every: 10,
        ..plain(4, 4, 1)
    })
    .unwrap();
    let mut first = [0.0; 4];
    store.lookup(&[7], 0, &mut first).unwrap();
    for step in 1..=30u32 {
        let keys: Vec<i64> = (0..20).map(|i| i64::from(step) * 100 + i).collect();
        store.lookup(&keys, step, &mut [0.0; 80]).unwrap();
        store.apply(&keys, &[0.5; 80], step, None).unwrap();
        assert!(store.len() <= 50 + 20 * 10);
    }
    assert_eq!(store.len(), 50);
    let mut again = [0.0; 4];
    let mut found = [9];
    store
        .lookup_infer(&[7], &mut again, Some(&mut found))
        .unwrap();
    assert_eq!((again, found), (first, [0]));
    store.lookup(&[7], 31, &mut again).unwrap();
    assert_eq!(again, first);
    assert!(first.iter().any(|&v| v != 0.0));
}

#[test]
fn lru_lfu_and_l2_take_what_they_name_on_any_number_of_shards() {
    let fill = |eviction, shards| {
        let store = Store::new(Options {
            eviction,
            optimizer: Optimizer::Sgd {
                lr: 1.0,
                weight_decay: 0.0,
            },
            init: Init::Zeros,
            ..plain(2, shards, 2)
        })
        .unwrap();
        // Key i is updated in steps 1 to 1 + i % 10, and its norm is that number times the root of 2.
        for step in 1..=10u32 {
            let keys: Vec<i64> = (0..1000)
                .filter(|i| i % 10 + 1 >= i64::from(step))
                .collect();
            store
                .apply(&keys, &vec![1.0; keys.len() * 2], step, None)
                .unwrap();
        }
        let gone = store.evict(10).unwrap();
        let mut left: Vec<i64> = Vec::new();
        store.export(|key, _, _, _| left.push(key)).unwrap();
        left.sort_unstable();
        assert_eq!(gone + left.len() as u64, 1000);
        left
    };
    for shards in [1, 8] {
        let wanted: Vec<i64> = (0..1000).filter(|i| i % 10 >= 7).collect();
        assert_eq!(fill(Eviction::Lru { rows: 300 }, shards), wanted);
        assert_eq!(fill(Eviction::Lfu { rows: 300 }, shards), wanted);
        let wanted: Vec<i64> = (0..1000).filter(|i| i % 10 >= 2).collect();
        assert_eq!(fill(Eviction::L2 { norm: 4.0 }, shards), wanted);
        let wanted: Vec<i64> = (0..1000).filter(|i| i % 10 >= 3).collect();
        assert_eq!(fill(Eviction::Ttl { steps: 6 }, shards), wanted);
    }
    let odd = Eviction::Lru { rows: 333 };
    assert_eq!(fill(odd, 1), fill(odd, 16));
    assert_eq!(fill(odd, 1).len(), 333);
}

#[test]
fn slots_are_where_the_formulas_put_them() {
    // Two steps of each against the formula in f64, one value.
    let step = |json: &str, w0: f32, gradients: &[f32]| {
        let store = Store::new(Options {
            optimizer: Optimizer::parse(json).unwrap(),
            init: Init::Constant { value: w0 },
            ..plain(1, 1, 1)
        })
        .unwrap();
        for (t, g) in (1u32..).zip(gradients) {
            store.apply(&[3], &[*g], t, None).unwrap();
        }
        let mut out = [0.0];
        store.lookup_infer(&[3], &mut out, None).unwrap();
        f64::from(out[0])
    };
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * (1.0 + b.abs()), "{a} {b}");
    let g = [0.5f64, -0.25, 0.125];
    let g32 = g.map(|x| x as f32);
    near(
        step(r#"{"kind": "sgd", "lr": 0.1}"#, 1.0, &g32),
        1.0 - 0.1 * 0.375,
    );
    let (mut w, mut a) = (1.0, 0.0);
    for g in g {
        a += g * g;
        w -= 0.1 * g / (f64::sqrt(a) + 1e-10);
    }
    near(step(r#"{"kind": "adagrad", "lr": 0.1}"#, 1.0, &g32), w);
    // Kind and options, decoupled decay, decay in the gradient, whether eps comes before the correction.
    for (options, off, l2, hat) in [
        (r#""adam", "eps": 1e-2"#, 0.0, 0.0, false),
        (r#""adam", "eps": 1e-2, "eps_hat": true"#, 0.0, 0.0, true),
        (
            r#""adam", "eps": 1e-2, "weight_decay": 0.3"#,
            0.0,
            0.3,
            false,
        ),
        (r#""lazy_adam", "eps": 1e-2"#, 0.0, 0.0, true),
        (r#""adam_w", "eps": 1e-2"#, 0.01, 0.0, false),
        (r#""adam_w", "eps": 1e-2, "eps_hat": true"#, 0.01, 0.0, true),
    ] {
        let (mut w, mut m, mut v) = (1.0, 0.0, 0.0);
        for (t, g) in (1..).zip(g) {
            w *= 1.0 - 0.1 * off;
            let g = g + l2 * w;
            m = 0.9 * m + 0.1 * g;
            v = 0.999 * v + 0.001 * g * g;
            let (first, second) = (1.0 - 0.9f64.powi(t), 1.0 - 0.999f64.powi(t));
            let eps = if hat { 1e-2 / second.sqrt() } else { 1e-2 };
            w -= 0.1 * m / first / ((v / second).sqrt() + eps);
        }
        let json = format!(r#"{{"kind": {options}, "lr": 0.1}}"#);
        near(step(&json, 1.0, &g32), w);
    }
    let (mut w, mut a) = (1.0, 0.0);
    for g in g {
        let g = g + 0.3 * w;
        a += g * g;
        w -= 0.1 * g / (f64::sqrt(a) + 1e-10);
    }
    near(
        step(
            r#"{"kind": "adagrad", "lr": 0.1, "weight_decay": 0.3}"#,
            1.0,
            &g32,
        ),
        w,
    );
    let (mut w, mut a, mut z) = (1.0, 0.1, 0.0);
    for g in g {
        let next: f64 = a + g * g;
        z += g - (next.sqrt() - f64::sqrt(a)) / 0.1 * w;
        a = next;
        w = if z.abs() <= 0.01 {
            0.0
        } else {
            (0.01 * z.signum() - z) / (a.sqrt() / 0.1 + 2.0 * 0.02)
        };
    }
    near(
        step(
            r#"{"kind": "ftrl", "lr": 0.1, "l1": 0.01, "l2": 0.02}"#,
            1.0,
            &g32,
        ),
        w,
    );
    // Without a lasso the group forms start from the row's values and step as their plain forms do.
    let (mut w, mut m, mut v) = (1.0, 0.0, 0.0);
    let (mut z, mut old) = (0.0, 0.0);
    for (t, g) in (1..).zip(g) {
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        let new = f64::sqrt(v / (1.0 - 0.999f64.powi(t))) + 1e-8;
        z += m / (1.0 - 0.9f64.powi(t)) - f64::max(new - old, 0.0) / 0.1 * w;
        w = -z / (new / 0.1);
        old = new;
    }
    near(step(r#"{"kind": "group_adam", "lr": 0.1}"#, 1.0, &g32), w);
    assert_eq!(
        step(
            r#"{"kind": "group_adam", "lr": 0.1, "l21": 1e6}"#,
            1.0,
            &g32
        ),
        0.0
    );
    assert_eq!(
        step(
            r#"{"kind": "group_ftrl", "lr": 0.1, "l21": 1e6}"#,
            1.0,
            &g32
        ),
        0.0
    );
    let (mut w, mut a, mut z) = (1.0, 0.1, -(0.1f64.sqrt()) / 0.1);
    for g in g {
        let next: f64 = a + g * g;
        z += g - (next.sqrt() - f64::sqrt(a)) / 0.1 * w;
        a = next;
        w = -z / (a.sqrt() / 0.1);
    }
    near(step(r#"{"kind": "group_ftrl", "lr": 0.1}"#, 1.0, &g32), w);
    // Of a row of one value the mean is the value.
    assert_eq!(
        step(
            r#"{"kind": "row_wise_adagrad", "lr": 0.1, "eps": 1e-10}"#,
            1.0,
            &g32
        ),
        step(r#"{"kind": "adagrad", "lr": 0.1}"#, 1.0, &g32)
    );
    near(
        step(
            r#"{"kind": "partial_row_wise_adam", "lr": 0.1, "weight_decay": 0.5}"#,
            1.0,
            &g32,
        ),
        step(
            r#"{"kind": "adam_w", "lr": 0.1, "weight_decay": 0.5}"#,
            1.0,
            &g32,
        ),
    );
    // The step is as long as the row, whose sign it has here: a tenth goes each time.
    near(
        step(r#"{"kind": "lamb", "lr": 0.1}"#, 1.0, &[0.5; 3]),
        0.729,
    );
    // A row of zero is not scaled.
    near(step(r#"{"kind": "lamb", "lr": 0.1}"#, 0.0, &[0.5]), -0.1);
}

#[test]
fn adam_differs_from_lazy_adam_only_in_rows_that_rested() {
    let run = |kind: &str, rest: u32| {
        // Both with eps where the lazy one has it.
        let hat = if kind == "adam" {
            r#", "eps_hat": true"#
        } else {
            ""
        };
        let json = format!(r#"{{"kind": "{kind}"{hat}}}"#);
        let store = Store::new(Options {
            optimizer: Optimizer::parse(&json).unwrap(),
            init: Init::Zeros,
            ..plain(1, 1, 1)
        })
        .unwrap();
        store.apply(&[1], &[1.0], 1, None).unwrap();
        for step in 2..2 + rest {
            store.apply(&[2], &[1.0], step, None).unwrap();
        }
        store.apply(&[1], &[-0.5], 2 + rest, None).unwrap();
        let mut out = [0.0];
        store.lookup_infer(&[1], &mut out, None).unwrap();
        out[0]
    };
    assert_eq!(run("adam", 0), run("lazy_adam", 0));
    assert_ne!(run("adam", 5), run("lazy_adam", 5));
}
