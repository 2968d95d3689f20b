//! Fewer bytes between nodes: sums in two levels, and the largest entries alone.
//!
//! **Two levels.** The ranks of a node (the *inner* group) reduce and scatter, so that each has a shard
//! of their sum. Ranks with the same place in their nodes (the *outer* group) reduce that shard across
//! the network, and the node gathers. With m ranks per node a node sends 1/m of what a ring over all
//! ranks would make it send per rank.
//!
//! Nodes may have different numbers of ranks. A sum is then cut into as many shards as the smallest has
//! ranks, and the first ranks of each node own one each. Inside a node nothing changes but the last and
//! the first move: reduced parts go on to the shards' owners, and come back after the exchange. A rank
//! that owns no shard sends nothing to other nodes, and has no residual.
//!
//! **Top-k.** Of a gradient's shard each rank of the outer group sends the entries of largest magnitude
//! to all others of it, and adds up what came in rank order, so that all have the same bits. What it
//! does not send stays in the residual, and is added to the same gradient of the next step (Lin et
//! al., "Deep Gradient Compression", arXiv 1712.01887). A residual belongs to a gradient and not to a
//! place in a fused buffer: what is fused differs from step to step. Its key is in the agreed request
//! (`root`, which an all-reduce has no other use for), so a rank that has joined, and brings zeros, takes part with its residual.
//!
//! **Guard.** In some steps the ranks of an outer group tell each other how large their residuals are
//! beside the gradient. Past a limit, which is far smaller for optimizers that are not linear in the
//! gradients, the residual is sent at once and the gradient goes whole from then on. All ranks of the
//! group have the same numbers, so they decide the same. The rule is the torch door's
//! (`evener.comm.guard`), which says where its limits come from; here each shard of a gradient is
//! judged by itself.

use crate::algorithms::{Members, even};
use crate::mesh::{Lost, Mesh};
use crate::number;
use evener_kernels::topk;
use half::f16;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of float32, the one type of which top-k sends a part.
const FLOAT32: u8 = 7;
/// DGC begins with a quarter of the entries and divides by four four times.
const WARM: f64 = 0.25;
const STAGES: u64 = 5;
/// Up to this many bytes two levels cost more delay than they save bytes.
const SMALL: usize = 16 << 10;

/// What is asked for; the same on all ranks but for the groups.
#[derive(Debug, Clone, Default)]
pub struct Light {
    /// Ranks of this node, this one among them; one for all in one level.
    pub inner: Vec<usize>,
    /// Ranks with the same place in their nodes, or all of them in one level; this one alone where it
    /// owns no shard.
    pub outer: Vec<usize>,
    /// Sizes of all inner groups, the same on all ranks, which decide alike by them.
    pub sizes: Vec<usize>,
    /// Larger sums, in bytes, go in one level.
    pub two_level_max: usize,
    /// Gradients are sent in part.
    pub topk: Option<TopK>,
}

/// Which part of a gradient is sent.
#[derive(Debug, Clone, Copy)]
pub struct TopK {
    /// Share of the entries, above 0 and at most 1.
    pub ratio: f64,
    /// Smaller shards, in bytes, are sent whole.
    pub least: usize,
    /// Values are float16, for all gradients.
    pub halves: bool,
    /// Steps within which the share comes down from a quarter.
    pub warmup: u64,
    /// When and by what it is judged.
    pub guard: Guard,
}

/// The norm of the residual over that of the gradient may be at most this.
#[derive(Debug, Clone, Copy)]
pub struct Guard {
    /// Steps between two looks; 0: never.
    pub every: u64,
    /// Where the optimizer is linear in the gradients, as SGD is.
    pub linear: f64,
    /// For all others, and where the optimizer is not known.
    pub strict: f64,
}

impl Guard {
    /// Whether `step`, from 1, is looked at: every `every`-th, and the sixth, if that is before them;
    /// under the strict limit, where a gradient is still sent in part, some more.
    fn due(&self, step: u64, strict: bool) -> bool {
        let every = self.every;
        if every == 0 || step.is_multiple_of(every) {
            return every > 0;
        }
        let early = [6, every / 8, every / 2];
        1 < step && step < every && early[..if strict { 3 } else { 1 }].contains(&step)
    }
}

/// A gradient that goes whole from now on.
#[derive(Debug, Clone, PartialEq)]
pub struct Fall {
    /// Mark of the gradient's request.
    pub mark: u32,
    /// From 1, of this gradient.
    pub step: u64,
    /// The residual, over the gradient.
    pub ratio: f64,
    /// What that may be.
    pub limit: f64,
}

/// Which gradient a residual is of: the request's mark, and the tensor's number in it.
pub type Key = (u32, usize);

/// A mark's lowest bit: this gradient's values are sent as float16.
const HALVES: u32 = 1;

#[derive(Default)]
struct Kept {
    entries: Vec<f32>,
    steps: u64,
    whole: bool, // the guard has said so
}

/// How a sum goes: the groups of this rank, and what is the same on all ranks.
#[derive(Clone, Copy)]
struct Groups<'a> {
    inner: &'a [usize],
    outer: &'a [usize],
    shards: usize,
    /// There is a reduction inside nodes.
    two_level: bool,
    /// There is an exchange.
    crosses: bool,
}

/// [`Light`] with what it remembers.
#[derive(Default)]
pub struct Reducer {
    light: Light,
    every: Vec<usize>,
    own: [usize; 1],
    kept: Mutex<HashMap<Key, Kept>>,
    linear: Mutex<HashSet<u32>>,
    falls: Mutex<Vec<Fall>>,
    two_level: AtomicU64,
    sparse: AtomicU64,
}

impl Reducer {
    /// For `rank` of `size` ranks. Groups that do not hold this rank are those of one level.
    #[must_use]
    pub fn new(mut light: Light, rank: usize, size: usize) -> Self {
        let every: Vec<usize> = (0..size).collect();
        if !light.inner.contains(&rank) || !light.outer.contains(&rank) {
            light.inner = vec![rank];
            light.outer.clone_from(&every);
            light.sizes = vec![1; size];
        }
        Self {
            light,
            every,
            own: [rank],
            ..Self::default()
        }
    }

    /// How many sums went in two levels, and how many gradients in part.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.two_level), read(&self.sparse))
    }

    /// The gradient of this mark is for an optimizer that is linear in it.
    pub fn is_linear(&self, mark: u32) {
        let mut linear = self.linear.lock().unwrap_or_else(|held| held.into_inner());
        linear.insert(mark);
    }

    /// What the guard has decided since the last call; of each group its first rank says it.
    #[must_use]
    pub fn falls(&self) -> Vec<Fall> {
        let mut falls = self.falls.lock().unwrap_or_else(|held| held.into_inner());
        std::mem::take(&mut *falls)
    }

    /// The groups for a sum of `bytes` bytes.
    fn groups(&self, bytes: usize) -> Groups<'_> {
        let sizes = &self.light.sizes;
        if bytes > self.light.two_level_max {
            Groups {
                inner: &self.own,
                outer: &self.every,
                shards: 1,
                two_level: false,
                crosses: self.every.len() > 1,
            }
        } else {
            Groups {
                inner: &self.light.inner,
                outer: &self.light.outer,
                shards: sizes.iter().copied().min().unwrap_or(1),
                two_level: sizes.iter().any(|size| *size > 1),
                crosses: sizes.len() > 1,
            }
        }
    }

    /// Whether only a part of this gradient is sent; the same on all ranks. Norms and biases, which
    /// have one dimension, are sent whole: they are small, and errors in them cost most.
    #[must_use]
    pub fn takes_part(&self, mark: u32, dtype: u8, op: u8, shape: &[u64]) -> bool {
        let Some(topk) = self.light.topk else {
            return false;
        };
        let count: u64 = shape.iter().product();
        let bytes = usize::try_from(count.saturating_mul(4)).unwrap_or(usize::MAX);
        let groups = self.groups(bytes);
        mark != 0
            && dtype == FLOAT32
            && matches!(op, number::SUM | number::AVERAGE)
            && shape.len() > 1
            && i32::try_from(count).is_ok()
            && groups.crosses
            && bytes / 4 / groups.shards * 4 >= topk.least
    }

    /// `data` becomes the sum of all ranks', as `all_reduce` of [`Members`] does it.
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn all_reduce(&self, mesh: &Mesh, data: &mut [u8], dtype: u8, op: u8) -> Result<(), Lost> {
        let groups = self.groups(data.len());
        if !groups.two_level || data.len() <= SMALL {
            return self.members(mesh, &self.every).all_reduce(data, dtype, op);
        }
        self.two_level.fetch_add(1, Ordering::Relaxed);
        self.through(mesh, groups, data, dtype, op, |outer, shard| {
            outer.all_reduce(shard, dtype, op)
        })
    }

    /// The same for a float32 gradient that [`Reducer::takes_part`].
    ///
    /// # Errors
    /// See [`Lost`].
    pub fn sparse(&self, mesh: &Mesh, data: &mut [u8], key: Key) -> Result<(), Lost> {
        let Some(topk) = self.light.topk else {
            return self.all_reduce(mesh, data, FLOAT32, number::SUM);
        };
        let groups = self.groups(data.len());
        let mut kept = self.kept.lock().unwrap_or_else(|held| held.into_inner());
        let kept = kept.entry(key).or_default();
        let halves = topk.halves || key.0 & HALVES != 0;
        let linear = {
            let marks = self.linear.lock().unwrap_or_else(|held| held.into_inner());
            marks.contains(&key.0)
        };
        self.through(mesh, groups, data, FLOAT32, number::SUM, |outer, shard| {
            if kept.whole {
                return outer.all_reduce(shard, FLOAT32, number::SUM);
            }
            self.sparse.fetch_add(1, Ordering::Relaxed);
            // Which limit holds is known when all have said what they know: it may be the strict one.
            let looks = topk.guard.due(kept.steps + 1, true);
            let gradient = looks.then(|| square(&floats(shard)));
            exchange(&topk, halves, outer, shard, kept)?;
            let Some(gradient) = gradient else {
                return Ok(());
            };
            let Some((ratio, limit)) = judge(&topk.guard, linear, gradient, outer, kept)? else {
                return Ok(());
            };
            // The residual goes with this step's sum: nothing of it is lost, and nothing is kept.
            let mut owed = bytes(&kept.entries);
            outer.all_reduce(&mut owed, FLOAT32, number::SUM)?;
            add(shard, &owed);
            kept.entries = Vec::new();
            kept.whole = true;
            if outer.place == 0 {
                let mut falls = self.falls.lock().unwrap_or_else(|held| held.into_inner());
                falls.push(Fall {
                    mark: key.0,
                    step: kept.steps,
                    ratio,
                    limit,
                });
            }
            Ok(())
        })
    }

    fn members<'a>(&self, mesh: &'a Mesh, ranks: &'a [usize]) -> Members<'a> {
        let place = ranks.iter().position(|rank| *rank == self.own[0]);
        Members {
            mesh,
            ranks,
            place: place.unwrap_or(0), // `new` has looked
        }
    }

    fn through(
        &self,
        mesh: &Mesh,
        groups: Groups,
        data: &mut [u8],
        dtype: u8,
        op: u8,
        across: impl FnOnce(&Members, &mut [u8]) -> Result<(), Lost>,
    ) -> Result<(), Lost> {
        let inner = self.members(mesh, groups.inner);
        let element = number::size(dtype);
        let count = data.len() / element;
        let parts = even(count, inner.ranks.len(), element);
        let mut shards = even(count, groups.shards, element);
        shards.resize(inner.ranks.len(), (data.len(), data.len()));
        inner.ring_reduce(data, &parts, dtype, op)?;
        inner.hand_over(data, &parts, &shards)?;
        if inner.place < groups.shards {
            let (start, end) = shards[inner.place];
            let outer = self.members(mesh, groups.outer);
            across(&outer, &mut data[start..end])?;
        }
        inner.hand_over(data, &shards, &parts)?;
        inner.ring_gather(data, &parts)
    }
}

/// How many of `count` entries are sent in step `step` of a gradient.
fn entries(count: usize, topk: &TopK, step: u64) -> usize {
    let mut ratio = topk.ratio;
    if step < topk.warmup && ratio < WARM {
        let stage = (step * STAGES / topk.warmup) as f64 / STAGES as f64;
        ratio = WARM * (ratio / WARM).powf(stage);
    }
    ((count as f64 * ratio) as usize)
        .clamp(1, count.max(1))
        .min(count)
}

/// In a step that is looked at: the ratio and the limit of a gradient that must go whole.
fn judge(
    guard: &Guard,
    linear: bool,
    square_of_gradient: f64,
    outer: &Members,
    kept: &Kept,
) -> Result<Option<(f64, f64)>, Lost> {
    let mine = [
        square(&kept.entries),
        square_of_gradient,
        f64::from(!linear),
    ];
    let size = 8 * mine.len();
    let mut all = vec![0; size * outer.ranks.len()];
    let own = &mut all[outer.place * size..][..size];
    for (bytes, value) in own.as_chunks_mut::<8>().0.iter_mut().zip(mine) {
        *bytes = value.to_ne_bytes();
    }
    outer.all_gather(&mut all, &vec![size; outer.ranks.len()])?;
    let mut sums = [0.0; 3];
    for (index, bytes) in all.as_chunks::<8>().0.iter().enumerate() {
        sums[index % 3] += f64::from_ne_bytes(*bytes);
    }
    let [owed, gradient, others] = sums;
    let strict = others > 0.0;
    let limit = if strict { guard.strict } else { guard.linear };
    let ratio = (owed / gradient).sqrt();
    let judged = guard.due(kept.steps, strict) && gradient > 0.0 && gradient.is_finite();
    Ok((judged && (ratio > limit || ratio.is_nan())).then_some((ratio, limit)))
}

fn square(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

/// `shard` += `more`, both float32.
fn add(shard: &mut [u8], more: &[u8]) {
    let more = more.as_chunks::<4>().0;
    for (sum, value) in shard.as_chunks_mut::<4>().0.iter_mut().zip(more) {
        *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*value)).to_ne_bytes();
    }
}

/// `shard` becomes the sum of what all members of `outer` send of theirs and of their residuals.
///
/// A message is the places, int32, and then the values.
fn exchange(
    topk: &TopK,
    halves: bool,
    outer: &Members,
    shard: &mut [u8],
    kept: &mut Kept,
) -> Result<(), Lost> {
    let gradient: Vec<f32> = floats(shard);
    if kept.entries.len() != gradient.len() {
        kept.entries = vec![0.0; gradient.len()];
    }
    let count = entries(gradient.len(), topk, kept.steps);
    kept.steps += 1;
    let (mut values, mut places) = (vec![0.0f32; count], vec![0i32; count]);
    topk::select_with_feedback(&gradient, &mut kept.entries, &mut values, &mut places)
        .map_err(|error| Lost::Meeting(error.to_string()))?;
    drop(gradient);
    let width = if halves { 2 } else { 4 };
    let size = count * (4 + width);
    let mut all = vec![0; size * outer.ranks.len()];
    let own = &mut all[outer.place * size..][..size];
    let (head, tail) = own.split_at_mut(4 * count);
    for (bytes, place) in head.as_chunks_mut::<4>().0.iter_mut().zip(&places) {
        *bytes = place.to_ne_bytes();
    }
    if halves {
        let rounded = values.iter().zip(&places).zip(tail.as_chunks_mut::<2>().0);
        for ((value, place), bytes) in rounded {
            let half = f16::from_f32(*value);
            *bytes = half.to_ne_bytes();
            let left = value - half.to_f32();
            if left.is_finite() {
                kept.entries[*place as usize] += left; // an overflow is sent, never kept
            }
        }
    } else {
        for (bytes, value) in tail.as_chunks_mut::<4>().0.iter_mut().zip(&values) {
            *bytes = value.to_ne_bytes();
        }
    }
    outer.all_gather(&mut all, &vec![size; outer.ranks.len()])?;
    shard.fill(0);
    let sums = shard.as_chunks_mut::<4>().0;
    for (member, message) in all.chunks_exact(size.max(1)).enumerate() {
        let (head, tail) = message.split_at(4 * count);
        let halved = tail.as_chunks::<2>().0;
        let whole = tail.as_chunks::<4>().0;
        for (index, place) in head.as_chunks::<4>().0.iter().enumerate() {
            let value = if halves {
                f16::from_ne_bytes(halved[index]).to_f32()
            } else {
                f32::from_ne_bytes(whole[index])
            };
            let place = u32::from_ne_bytes(*place) as usize;
            let Some(sum) = sums.get_mut(place) else {
                let rank = outer.ranks[member];
                return Err(Lost::Meeting(format!(
                    "rank {rank} sent entry {place} of {}",
                    sums.len()
                )));
            };
            *sum = (f32::from_ne_bytes(*sum) + value).to_ne_bytes();
        }
    }
    Ok(())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.as_chunks::<4>().0.iter();
    values.map(|value| f32::from_ne_bytes(*value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: Guard = Guard {
        every: 0,
        linear: 100.0,
        strict: 0.25,
    };

    #[test]
    fn when_the_guard_looks() {
        let guard = Guard {
            every: 200,
            ..NEVER
        };
        let due = |strict| -> Vec<u64> { (0..=400).filter(|s| guard.due(*s, strict)).collect() };
        assert_eq!(due(false)[1..], [6, 200, 400]);
        assert_eq!(due(true)[1..], [6, 25, 100, 200, 400]);
        assert!((0..400).all(|step| !NEVER.due(step, true)));
        let each = Guard { every: 3, ..NEVER };
        assert!(!each.due(1, true) && each.due(3, true) && each.due(6, false));
    }

    #[test]
    fn the_share_comes_down_from_a_quarter() {
        let topk = TopK {
            ratio: 0.01,
            least: 0,
            halves: false,
            warmup: 10,
            guard: NEVER,
        };
        let sent: Vec<usize> = (0..12).map(|step| entries(10_000, &topk, step)).collect();
        assert_eq!(sent[0], 2500);
        assert!(sent.is_sorted_by(|a, b| a >= b), "{sent:?}");
        assert_eq!(&sent[10..], &[100, 100]);
        assert_eq!(entries(3, &topk, 99), 1);
        assert_eq!(entries(0, &topk, 99), 0);
    }

    #[test]
    fn what_is_sent_in_part() {
        let light = Light {
            inner: vec![0, 1],
            outer: vec![0, 2],
            sizes: vec![2, 2],
            two_level_max: 1 << 20,
            topk: Some(TopK {
                ratio: 0.1,
                least: 4000,
                halves: false,
                warmup: 0,
                guard: NEVER,
            }),
        };
        let reducer = Reducer::new(light, 0, 4);
        let asked = |mark, dtype, op, shape: &[u64]| reducer.takes_part(mark, dtype, op, shape);
        assert!(asked(1, 7, number::SUM, &[20, 100]));
        assert!(!asked(1, 7, number::SUM, &[19, 100]), "its shard is small");
        assert!(!asked(0, 7, number::SUM, &[20, 100]), "no gradient");
        assert!(!asked(1, 8, number::SUM, &[20, 100]), "float64");
        assert!(!asked(1, 7, number::MAX, &[20, 100]), "no sum");
        assert!(!asked(1, 7, number::SUM, &[2000]), "a bias");
        let alone = Reducer::new(Light::default(), 0, 4);
        assert!(
            !alone.takes_part(1, 7, number::SUM, &[2000, 100]),
            "not asked for"
        );
    }
}
