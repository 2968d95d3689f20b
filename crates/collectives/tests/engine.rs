//! Engines of ranks in one process: orders that differ, mismatches, joins, the end.

use evener_collectives::engine::{Engine, Failure, Job, Options, Outcome};
use evener_collectives::light::{Guard, Light, TopK};
use evener_negotiate::{Kind, Meta, Policy, Request};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

const SIZE: u32 = 3;

type Ended = (Vec<f32>, Result<Outcome, Failure>);

/// float32 data that comes back to the test.
struct Data {
    input: Vec<u8>,
    output: Vec<u8>,
    send: Sender<Ended>,
}

impl Job for Data {
    fn input(&self, _index: usize) -> &[u8] {
        &self.input
    }

    fn output(&mut self, _index: usize, shape: &[u64]) -> Result<&mut [u8], String> {
        self.output = vec![0; 4 * shape.iter().product::<u64>() as usize];
        Ok(&mut self.output)
    }

    fn begin(&mut self, index: usize, shape: &[u64], start: usize) -> Result<&mut [u8], String> {
        self.output(index, shape)?;
        let end = start + self.input.len();
        self.output[start..end].copy_from_slice(&self.input);
        Ok(&mut self.output)
    }

    fn finish(self: Box<Self>, outcome: Result<Outcome, Failure>) {
        let values = self.output.as_chunks::<4>().0.iter();
        let values = values.map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        let _ = self.send.send((values, outcome));
    }
}

fn request(name: &str, kind: Kind, shape: &[u64]) -> Request {
    let tensor = Meta {
        dtype: 7,
        shape: shape.to_vec(),
        label: String::new(),
    };
    Request {
        name: name.to_owned(),
        set: 0,
        kind,
        tensors: if shape.is_empty() {
            vec![]
        } else {
            vec![tensor]
        },
        gpu: false,
        op: 1,
        root: 0,
        factors: (1.0, 1.0),
        splits: vec![],
    }
}

fn submit(engine: &Engine, request: Request, values: &[f32]) -> Receiver<Ended> {
    let (send, receive) = channel();
    let input = values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    engine.submit(
        request,
        Box::new(Data {
            input,
            output: vec![],
            send,
        }),
        false,
    );
    receive
}

fn reduced(engine: &Engine, name: &str, values: &[f32]) -> Receiver<Ended> {
    submit(
        engine,
        request(name, Kind::Allreduce, &[values.len() as u64]),
        values,
    )
}

fn world(repeats: usize, run: impl Fn(usize, &Engine) + Sync) {
    world_with(SIZE, repeats, |_| None, run);
}

fn world_with(
    size: u32,
    repeats: usize,
    light: impl Fn(usize) -> Option<Light>,
    run: impl Fn(usize, &Engine) + Sync,
) {
    let engines: Vec<Engine> = (0..size)
        .map(|rank| {
            let policy = Policy {
                fusion: 1 << 20,
                cache: 64,
                repeats,
                frozen_bytes: 1 << 20,
                stall_warn: 0,
                stall_abort: 20_000_000,
                record: false,
            };
            let (cycle, timeout) = (0.001, 20.0);
            Engine::new(Options {
                rank,
                size,
                sets: vec![vec![0, 2]],
                policy,
                cycle,
                timeout,
            })
            .expect("listens")
        })
        .collect();
    let control = engines[0].ports().0;
    let place = |engine: &Engine| (vec!["127.0.0.1".to_owned()], engine.ports().1);
    let places: Vec<_> = engines.iter().map(place).collect();
    thread::scope(|scope| {
        for (rank, engine) in engines.iter().enumerate() {
            let (places, run) = (&places, &run);
            if let Some(light) = light(rank) {
                engine.lighten(light);
            }
            scope.spawn(move || {
                engine.connect(places, control, "secret").expect("connects");
                run(rank, engine);
                engine.close(5.0)
            });
        }
    });
}

/// Ranks submit in orders of their own, and again and again, so that schedules freeze and thaw.
#[test]
fn any_order_and_frozen_schedules() {
    world(2, |rank, engine| {
        for round in 0..30 {
            let mut waiting = Vec::new();
            for step in 0..4 {
                let index = (step * (rank + 1) + rank + round) % 4; // not always all four
                let index = if rank == 1 { step } else { index };
                let name = format!("t{}", (index + step) % 4);
                if waiting.iter().any(|(other, _)| *other == name) {
                    continue;
                }
                waiting.push((name, ()));
            }
            for index in 0..4 {
                let name = format!("t{index}");
                if !waiting.iter().any(|(other, ())| *other == name) {
                    waiting.push((name, ()));
                }
            }
            let sent: Vec<_> = waiting
                .iter()
                .map(|(name, ())| {
                    let value = name[1..].parse::<f32>().expect("a number") + rank as f32;
                    (value, reduced(engine, name, &[value, round as f32]))
                })
                .collect();
            for (value, ended) in sent {
                let (values, outcome) = ended.recv().expect("an end");
                assert_eq!(outcome, Ok(Outcome::default()));
                let want = 3.0 * (value - rank as f32) + 3.0;
                assert_eq!(values, [want, 3.0 * round as f32]);
            }
        }
    });
}

#[test]
fn what_does_not_fit_is_an_error_on_all_and_the_next_works() {
    world(8, |rank, engine| {
        let values = [1.0, 2.0, 3.0];
        let (_, outcome) = reduced(engine, "a", &values[..1 + rank])
            .recv()
            .expect("an end");
        let Err(Failure::Mismatch(text)) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(
            text.contains("Mismatched ALLREDUCE tensor shapes"),
            "{text}"
        );
        let first = reduced(engine, "b", &values);
        let second = engine.wait(Request {
            set: 9,
            ..request("c", Kind::Barrier, &[])
        });
        assert!(matches!(second, Err(Failure::Refused(_))), "{second:?}");
        assert_eq!(first.recv().expect("an end").0, [3.0, 6.0, 9.0]);
        assert_eq!(
            engine.wait(request("d", Kind::Barrier, &[])),
            Ok(Outcome::default())
        );
    });
}

#[test]
fn a_joined_rank_brings_zeros() {
    world(0, |rank, engine| {
        if rank != 1 {
            let (values, _) = reduced(engine, "a", &[1.0]).recv().expect("an end");
            assert_eq!(values, [2.0]);
        }
        let outcome = engine
            .wait(request("join", Kind::Join, &[]))
            .expect("joins");
        assert!(outcome.value != 1);
        assert_eq!(engine.joins(), 1);
    });
}

#[test]
fn a_set_of_its_own() {
    world(0, |rank, engine| {
        let asked = Request {
            set: 1,
            ..request("a", Kind::Allgather, &[1 + rank as u64])
        };
        let (values, outcome) = submit(engine, asked, &vec![rank as f32; 1 + rank])
            .recv()
            .expect("an end");
        if rank == 1 {
            assert!(matches!(outcome, Err(Failure::Refused(_))), "{outcome:?}");
        } else {
            assert_eq!(values, [0.0, 2.0, 2.0, 2.0]);
        }
        let add = Request {
            splits: vec![0, 1],
            ..request("add", Kind::AddSet, &[])
        };
        let number = engine.wait(add).expect("a set").value;
        assert_eq!(engine.members(number as u32), Some(vec![0, 1]));
    });
}

/// The others hear of a rank that has given up, whatever they wait for.
#[test]
fn an_end_reaches_all() {
    world(0, |rank, engine| {
        if rank == 1 {
            engine.node().fail("rank 1 is out of memory");
            engine.abort("rank 1 is out of memory");
            return;
        }
        let (_, outcome) = reduced(engine, "a", &[1.0]).recv().expect("an end");
        let Err(Failure::Broken(text)) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(text.contains("rank 1"), "{text}");
        let (_, again) = reduced(engine, "b", &[1.0]).recv().expect("an end");
        assert!(matches!(again, Err(Failure::Broken(_))), "{again:?}");
    });
}

/// Two nodes of two ranks.
fn two_by_two(rank: usize, topk: Option<TopK>) -> Light {
    nodes(&[2, 2], rank, topk)
}

/// Nodes of `sizes` ranks.
fn nodes(sizes: &[usize], rank: usize, topk: Option<TopK>) -> Light {
    let starts: Vec<usize> = (0..sizes.len()).map(|n| sizes[..n].iter().sum()).collect();
    let node = starts
        .iter()
        .rposition(|start| *start <= rank)
        .expect("a node");
    let place = rank - starts[node];
    let owns = sizes.iter().all(|size| place < *size);
    Light {
        inner: (starts[node]..starts[node] + sizes[node]).collect(),
        outer: if owns {
            starts.iter().map(|start| start + place).collect()
        } else {
            vec![rank]
        },
        sizes: sizes.to_vec(),
        two_level_max: 1 << 30,
        topk,
    }
}

const UNEVEN: [&[usize]; 5] = [&[2, 1], &[1, 3], &[3, 2], &[1, 2, 1], &[4, 3, 2]];

/// In two levels, where the length is no multiple of the ranks; and small ones beside it. Values whose
/// sum depends on the order: all ranks have the same bits, whichever node they are on.
#[test]
fn two_levels_give_the_sum() {
    for sizes in [&[2, 2][..]].into_iter().chain(UNEVEN) {
        let size: usize = sizes.iter().sum();
        let light = |rank| Some(nodes(sizes, rank, None));
        let rounded = Mutex::new(Vec::new());
        world_with(size as u32, 0, light, |rank, engine| {
            for count in [5, 10_001] {
                let value = |i: usize, rank: usize| ((i * 7 + rank * 3) % 5) as f32;
                let mine: Vec<f32> = (0..count).map(|i| value(i, rank)).collect();
                let want: Vec<f32> = (0..count)
                    .map(|i| (0..size).map(|rank| value(i, rank)).sum())
                    .collect();
                let name = format!("sum {count}");
                let (got, outcome) = reduced(engine, &name, &mine).recv().expect("an end");
                assert_eq!(outcome, Ok(Outcome::default()));
                assert_eq!(got, want, "{sizes:?}");
            }
            let mine: Vec<f32> = (0..9001).map(|i| 1.0 / (1 + i + rank) as f32).collect();
            let (got, _) = reduced(engine, "rounded", &mine).recv().expect("an end");
            rounded.lock().expect("a list").push(got);
            assert_eq!(engine.lightened(), (2, 0));
        });
        let rounded = rounded.into_inner().expect("a list");
        assert!(rounded.iter().all(|got| *got == rounded[0]), "{sizes:?}");
    }
}

/// On uneven nodes each form: what waits arrives, and what the guard lets fall goes whole. Ranks
/// without a shard send no part of a gradient, and say nothing of the guard.
#[test]
fn uneven_nodes_lose_nothing() {
    const COUNT: usize = 4096;
    let value = |i: usize, rank: usize| ((i * 7 + rank * 3) % 11) as f32 - 5.0;
    for (sizes, halves) in UNEVEN.into_iter().zip([false, true, false, true, true]) {
        let size: usize = sizes.iter().sum();
        let shards = *sizes.iter().min().expect("a node");
        for every in [0, 2] {
            let topk = TopK {
                ratio: 0.25,
                least: 1024,
                halves,
                warmup: 0,
                guard: guard(every),
            };
            let light = |rank| Some(nodes(sizes, rank, Some(topk)));
            world_with(size as u32, 2, light, |rank, engine| {
                let mut total = vec![0.0; COUNT];
                for step in 0..5 {
                    let mine: Vec<f32> = (0..COUNT)
                        .map(|i| if step == 0 { value(i, rank) } else { 0.0 })
                        .collect();
                    let asked = Request {
                        root: 2,
                        ..request("w", Kind::Allreduce, &[64, 64])
                    };
                    let (got, outcome) = submit(engine, asked, &mine).recv().expect("an end");
                    assert_eq!(outcome, Ok(Outcome::default()));
                    for (total, got) in total.iter_mut().zip(&got) {
                        *total += got;
                    }
                }
                for (i, total) in total.iter().enumerate() {
                    let want: f32 = (0..size).map(|rank| value(i, rank)).sum();
                    assert_eq!(*total, want, "entry {i} on rank {rank} of {sizes:?}");
                }
                let light = nodes(sizes, rank, None);
                let place = light.inner.iter().position(|each| *each == rank);
                let owns = place.is_some_and(|place| place < shards);
                assert_eq!(engine.lightened().1 > 0, owns, "rank {rank} of {sizes:?}");
            });
        }
    }
}

fn guard(every: u64) -> Guard {
    Guard {
        every,
        linear: 100.0,
        strict: 0.25,
    }
}

/// Past its limit a gradient goes whole, with its residual, on all ranks in the same step. Rank 0
/// alone knows of an optimizer that is linear for the mark 2, all of them do so for the mark 4.
#[test]
fn the_guard_sends_what_is_owed() {
    const COUNT: usize = 4096;
    let topk = TopK {
        ratio: 0.01,
        least: 1024,
        halves: false,
        warmup: 0,
        guard: guard(200),
    };
    let light = |rank| Some(two_by_two(rank, Some(topk)));
    let value = |i: usize, rank: usize| ((i * 7 + rank * 3) % 11) as f32 - 5.0;
    world_with(4, 2, light, |rank, engine| {
        engine.is_linear(4);
        if rank == 0 {
            engine.is_linear(2);
        }
        let mut totals = [vec![0.0; COUNT], vec![0.0; COUNT]];
        for step in 1..=8 {
            for (total, mark) in totals.iter_mut().zip([2, 4]) {
                let mine: Vec<f32> = (0..COUNT).map(|i| value(i, rank)).collect();
                let asked = Request {
                    root: mark,
                    ..request(&format!("w{mark}"), Kind::Allreduce, &[64, 64])
                };
                let (got, outcome) = submit(engine, asked, &mine).recv().expect("an end");
                assert_eq!(outcome, Ok(Outcome::default()));
                for (total, got) in total.iter_mut().zip(&got) {
                    *total += got;
                }
                let sum = |i: usize| (0..4).map(|other| value(i, other)).sum::<f32>();
                let all = (0..COUNT).all(|i| total[i] == step as f32 * sum(i));
                assert_eq!(all, mark == 2 && step >= 6, "mark {mark}, step {step}");
            }
        }
        let falls = engine.falls();
        let said: Vec<(u32, u64)> = falls.iter().map(|fall| (fall.mark, fall.step)).collect();
        // Ranks with the same place in their nodes decide together, and the first of them says it.
        assert_eq!(said, if rank < 2 { vec![(2, 6)] } else { vec![] });
        assert!(
            falls
                .iter()
                .all(|fall| fall.ratio > 0.25 && fall.limit == 0.25)
        );
        assert!(engine.falls().is_empty());
    });
}

/// What is not sent in one step is sent in the next ones: nothing is lost, and all ranks get the same.
/// Rank 3 has joined after the first step: it brings no gradient, and still sends its residual.
#[test]
fn entries_that_wait_arrive() {
    const COUNT: usize = 4096;
    const STEPS: usize = 6;
    for halves in [false, true] {
        let topk = TopK {
            ratio: 0.25,
            least: 1024,
            halves: false,
            warmup: 0,
            guard: guard(0),
        };
        let light = |rank| Some(two_by_two(rank, Some(topk)));
        let value = |i: usize, rank: usize| ((i * 7 + rank * 3) % 11) as f32 - 5.0;
        world_with(4, 2, light, |rank, engine| {
            let mut total = vec![0.0; COUNT];
            let steps = if rank == 3 { 1 } else { STEPS };
            for step in 0..steps {
                let mine: Vec<f32> = (0..COUNT)
                    .map(|i| if step == 0 { value(i, rank) } else { 0.0 })
                    .collect();
                let asked = Request {
                    root: 2 + u32::from(halves),
                    ..request("w", Kind::Allreduce, &[64, 64])
                };
                let (got, outcome) = submit(engine, asked, &mine).recv().expect("an end");
                assert_eq!(outcome, Ok(Outcome::default()));
                let sent = got.iter().filter(|value| **value != 0.0).count();
                assert!(sent <= COUNT / 2, "{sent} of {COUNT} in step {step}");
                for (total, got) in total.iter_mut().zip(&got) {
                    *total += got;
                }
            }
            let join = request("join", Kind::Join, &[]);
            engine.wait(join).expect("joins");
            assert_eq!(engine.lightened(), (0, STEPS as u64));
            if rank != 3 {
                for (i, total) in total.iter().enumerate() {
                    let want: f32 = (0..4).map(|rank| value(i, rank)).sum();
                    assert_eq!(*total, want, "entry {i} on rank {rank}");
                }
            }
        });
    }
}
