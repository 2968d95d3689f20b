//! What a store is made with. The same JSON comes from every door (Python, the TensorFlow shim) and
//! goes into every snapshot.

mod check;

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How values are kept. What comes in and goes out is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 4 bytes.
    #[default]
    F32,
    /// IEEE half: 2 bytes, rounded to nearest even.
    F16,
    /// The upper half of an f32: 2 bytes, rounded to nearest even.
    Bf16,
}

impl Dtype {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

/// What keys are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Keys {
    /// Any int64.
    #[default]
    Int,
    /// Strings of bytes; each gets an int64 of its own, see [`crate::Store::intern`].
    String,
}

/// Values of a row that nothing has trained yet.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    rename_all_fields = "snake_case"
)]
pub enum Init {
    /// 0.
    Zeros,
    /// The same everywhere.
    Constant {
        /// It.
        value: f32,
    },
    /// Uniform between two bounds.
    Uniform {
        /// The least.
        low: f32,
        /// The bound above.
        high: f32,
    },
    /// Normal.
    Normal {
        /// Mean.
        #[serde(default)]
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Normal, drawn again beyond two deviations.
    TruncatedNormal {
        /// Mean.
        #[serde(default)]
        mean: f32,
        /// Standard deviation before the cut.
        std: f32,
    },
}

impl Default for Init {
    fn default() -> Init {
        Init::Normal {
            mean: 0.0,
            std: 0.05,
        }
    }
}

fn one_tenth() -> f32 {
    0.1
}
fn beta1() -> f32 {
    0.9
}
fn beta2() -> f32 {
    0.999
}
fn tiny() -> f32 {
    1e-8
}
fn milli() -> f32 {
    1e-3
}
fn half() -> f32 {
    -0.5
}
fn centi() -> f32 {
    1e-2
}
fn micro() -> f32 {
    1e-6
}
fn adagrad_eps() -> f32 {
    1e-10
}

/// The optimizer whose step the store does, with its slots in the row. `lr` may be given anew with
/// each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    rename_all_fields = "snake_case"
)]
pub enum Optimizer {
    /// `w -= lr (g + weight_decay w)`.
    Sgd {
        /// Learning rate.
        #[serde(default = "one_tenth")]
        lr: f32,
        /// L2 term, of rows that are seen.
        #[serde(default)]
        weight_decay: f32,
    },
    /// `a += g^2; w -= lr g / (sqrt(a) + eps)` (Duchi et al., 2011).
    Adagrad {
        /// Learning rate.
        #[serde(default = "one_tenth")]
        lr: f32,
        /// Added to the root.
        #[serde(default = "adagrad_eps")]
        eps: f32,
        /// Where `a` starts.
        #[serde(default)]
        initial_accumulator: f32,
        /// L2 term, of rows that are seen: times the weights it is added to the gradient.
        #[serde(default)]
        weight_decay: f32,
    },
    /// Adagrad with one sum for a row, the mean of its squared gradients, as FBGEMM has it:
    /// `s += mean(g^2); w -= lr g / (sqrt(s) + eps)`.
    RowWiseAdagrad {
        /// Learning rate.
        #[serde(default = "centi")]
        lr: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
        /// Of rows that are seen.
        #[serde(default)]
        weight_decay: f32,
        /// Whether weights decay by `lr weight_decay`; else the decay times the weights counts as a
        /// part of the gradient.
        #[serde(default)]
        decoupled: bool,
    },
    /// Adam with one second moment for a row, the mean over it, as FBGEMM has it. A row that is not
    /// seen does not change.
    PartialRowWiseAdam {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
        /// Decoupled decay.
        #[serde(default)]
        weight_decay: f32,
    },
    /// You et al., "Large Batch Optimization for Deep Learning", 2020, with a row as a layer: the step
    /// of [`Optimizer::AdamW`] is scaled to the length of the row. Where one of them has no length it
    /// is not scaled. A row that is not seen does not change.
    Lamb {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "micro")]
        eps: f32,
        /// Decoupled decay, a part of the step that is scaled.
        #[serde(default)]
        weight_decay: f32,
    },
    /// Kingma and Ba, 2015. The moments of a row decay in the steps in which the row is not seen, as
    /// they would with gradients of zero; its weights rest in them.
    Adam {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
        /// Whether `eps` is added before the correction of the second moment ("epsilon hat" of the
        /// paper), as Keras and TensorFlow do, or after it, as PyTorch does.
        #[serde(default)]
        eps_hat: bool,
        /// L2 term, of rows that are seen: times the weights it is added to the gradient.
        #[serde(default)]
        weight_decay: f32,
    },
    /// [`Optimizer::LazyAdam`] and `w -= lr weight_decay w` first (Loshchilov and Hutter, 2019), on
    /// the rows that are seen.
    AdamW {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
        /// Whether `eps` is added before the correction of the second moment ("epsilon hat" of the
        /// paper), as Keras and TensorFlow do, or after it, as PyTorch does.
        #[serde(default)]
        eps_hat: bool,
        /// Decoupled decay.
        #[serde(default = "centi")]
        weight_decay: f32,
    },
    /// Adam in which a row that is not seen does not change at all (`torch.optim.SparseAdam`,
    /// TensorFlow's LazyAdam). `eps` is added before the correction of the second moment, as both do.
    LazyAdam {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
    },
    /// FTRL-proximal (McMahan et al., 2013), as TensorFlow writes it.
    Ftrl {
        /// Learning rate.
        #[serde(default = "one_tenth")]
        lr: f32,
        /// The power of the learning rate: at most 0.
        #[serde(default = "half")]
        lr_power: f32,
        /// L1.
        #[serde(default)]
        l1: f32,
        /// L2.
        #[serde(default)]
        l2: f32,
        /// Where the accumulator starts.
        #[serde(default = "one_tenth")]
        initial_accumulator: f32,
        /// Added to l2 (TensorFlow's `beta`), over twice the learning rate.
        #[serde(default)]
        beta: f32,
    },
    /// Adam with a sparse group lasso over the row (Yue et al., "Adaptive Optimizers with Sparse
    /// Group Lasso for Neural Networks in CTR Prediction", 2021).
    GroupAdam {
        /// Learning rate.
        #[serde(default = "milli")]
        lr: f32,
        /// Decay of the first moment.
        #[serde(default = "beta1")]
        beta1: f32,
        /// Decay of the second moment.
        #[serde(default = "beta2")]
        beta2: f32,
        /// Added to the root.
        #[serde(default = "tiny")]
        eps: f32,
        /// L1 per entry.
        #[serde(default)]
        l1: f32,
        /// L2 per entry.
        #[serde(default)]
        l2: f32,
        /// L2 of the whole row, times the root of its length: rows below it become zero.
        #[serde(default)]
        l21: f32,
    },
    /// FTRL with the same sparse group lasso.
    GroupFtrl {
        /// Learning rate.
        #[serde(default = "one_tenth")]
        lr: f32,
        /// L1 per entry.
        #[serde(default)]
        l1: f32,
        /// L2 per entry.
        #[serde(default)]
        l2: f32,
        /// L2 of the whole row, times the root of its length.
        #[serde(default)]
        l21: f32,
        /// Where the accumulator starts.
        #[serde(default = "one_tenth")]
        initial_accumulator: f32,
        /// Added to l2, over the learning rate.
        #[serde(default)]
        beta: f32,
    },
}

impl Optimizer {
    /// Reads JSON: `{"kind": "adam", "lr": 0.001}`.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the field.
    pub fn parse(json: &str) -> Result<Optimizer> {
        let optimizer = serde_json::from_str(json)
            .map_err(|error| Error::Invalid(format!("optimizer of an embedding: {error}")))?;
        Options {
            optimizer,
            ..Options::new(1)
        }
        .check()?;
        Ok(optimizer)
    }
}

impl Default for Optimizer {
    fn default() -> Optimizer {
        Optimizer::Adagrad {
            lr: one_tenth(),
            eps: adagrad_eps(),
            initial_accumulator: 0.0,
            weight_decay: 0.0,
        }
    }
}

fn four() -> u32 {
    4
}
fn false_positives() -> f64 {
    0.01
}

/// Which keys get a row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    rename_all_fields = "snake_case"
)]
pub enum Admission {
    /// Every key that is looked up in training.
    #[default]
    None,
    /// A key that was looked up `count` times, counted exactly.
    Counter {
        /// How often, itself included: 1 admits at once.
        count: u32,
    },
    /// A key that was looked up `count` times, by a counting Bloom filter: 1 byte per counter
    /// however long keys are; some are admitted early, none late.
    Bloom {
        /// How often.
        #[serde(default = "four")]
        count: u32,
        /// How many different keys are expected.
        capacity: u64,
        /// The share of keys that may be admitted early.
        #[serde(default = "false_positives")]
        false_positives: f64,
    },
    /// With this probability each time, drawn from (seed, key, step).
    Probability {
        /// Probability of one look-up.
        p: f64,
    },
}

/// Which rows go.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    rename_all_fields = "snake_case"
)]
pub enum Eviction {
    /// None.
    #[default]
    None,
    /// Those that no step has updated for more than `steps` steps.
    Ttl {
        /// Life in steps.
        steps: u32,
    },
    /// The longest not updated, down to `rows`.
    Lru {
        /// How many stay.
        rows: u64,
    },
    /// The least often updated, down to `rows`.
    Lfu {
        /// How many stay.
        rows: u64,
    },
    /// Those whose values have a Euclidean norm below `norm`.
    L2 {
        /// The bound.
        norm: f32,
    },
}

/// What a lookup gives for a key that has no row and gets none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Missing {
    /// The values with which its row would start: what training saw.
    #[default]
    Initial,
    /// Zeros.
    Zeros,
}

/// A second tier for rows that are seldom used: a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tier {
    /// The folder of the file, which is gone when the process is: snapshots hold what is in it.
    pub path: String,
    /// How many rows stay in memory, besides those that one batch brings back.
    pub rows: u64,
}

fn shards() -> u32 {
    64
}

/// What a store is made with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Values per row.
    pub dim: u32,
    /// How they are kept.
    #[serde(default)]
    pub dtype: Dtype,
    /// How many parts are locked and grown by themselves: a power of two, at most 4096.
    #[serde(default = "shards")]
    pub shards: u32,
    /// The step that the store does.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Values of a new row.
    #[serde(default)]
    pub init: Init,
    /// Which keys get a row.
    #[serde(default)]
    pub admission: Admission,
    /// Which rows go.
    #[serde(default)]
    pub eviction: Eviction,
    /// Eviction runs by itself after this many steps; 0: only when asked.
    #[serde(default)]
    pub evict_every: u32,
    /// Seed of the initial values and of admission by probability.
    #[serde(default)]
    pub seed: u64,
    /// What keys are.
    #[serde(default)]
    pub keys: Keys,
    /// What a lookup without a row gives.
    #[serde(default)]
    pub missing: Missing,
    /// Threads of a batch; 0: as many as this process may use CPUs.
    #[serde(default)]
    pub threads: u32,
    /// Rows to make room for at once.
    #[serde(default)]
    pub reserve: u64,
    /// A file for cold rows; none: all rows are in memory.
    #[serde(default)]
    pub tier: Option<Tier>,
}

impl Options {
    /// All defaults.
    pub fn new(dim: u32) -> Options {
        Options {
            dim,
            dtype: Dtype::default(),
            shards: shards(),
            optimizer: Optimizer::default(),
            init: Init::default(),
            admission: Admission::default(),
            eviction: Eviction::default(),
            evict_every: 0,
            seed: 0,
            keys: Keys::default(),
            missing: Missing::default(),
            threads: 0,
            reserve: 0,
            tier: None,
        }
    }

    /// Reads JSON.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the field.
    pub fn parse(json: &str) -> Result<Options> {
        let options: Options = serde_json::from_str(json)
            .map_err(|error| Error::Invalid(format!("options of an embedding: {error}")))?;
        options.check()?;
        Ok(options)
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_round_trips_and_has_defaults() {
        let options = Options::parse(r#"{"dim": 8}"#).unwrap();
        assert_eq!(options, Options::new(8));
        assert_eq!(Options::parse(&options.to_json()).unwrap(), options);
        let text = r#"{"dim": 8, "optimizer": {"kind": "lazy_adam"}, "init": {"kind": "zeros"},
            "admission": {"kind": "bloom", "capacity": 10}, "eviction": {"kind": "ttl", "steps": 3}}"#;
        let options = Options::parse(text).unwrap();
        assert_eq!(Options::parse(&options.to_json()).unwrap(), options);
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (json, word) in [
            (r#"{"dim": 0}"#, "dim 0"),
            (r#"{"dim": 4, "shards": 3}"#, "shards 3"),
            (r#"{"dim": 4, "colour": 3}"#, "colour"),
            (
                r#"{"dim": 4, "optimizer": {"kind": "adam", "beta1": 1.0}}"#,
                "beta1 1",
            ),
            (
                r#"{"dim": 4, "admission": {"kind": "counter", "count": 0}}"#,
                "admission.count",
            ),
            (
                r#"{"dim": 4, "eviction": {"kind": "lru", "rows": 0}}"#,
                "eviction.rows",
            ),
            (r#"{"dim": 4, "dtype": "f64"}"#, "f64"),
        ] {
            let message = Options::parse(json).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
