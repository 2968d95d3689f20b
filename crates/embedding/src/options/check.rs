//! Which options cannot be. Values are checked here, once for all doors.

use super::{Admission, Eviction, Init, Optimizer, Options};
use crate::error::{Result, invalid};

impl Options {
    /// # Errors
    /// [`crate::Error::Invalid`], which names the field and its value.
    pub fn check(&self) -> Result<()> {
        if self.dim == 0 || self.dim > 65_536 {
            return invalid(format!("dim {} cannot be: 1 to 65536", self.dim));
        }
        if !self.shards.is_power_of_two() || self.shards > 4096 {
            return invalid(format!(
                "shards {} cannot be: a power of two, at most 4096",
                self.shards
            ));
        }
        let finite = |name: &str, value: f32| match value.is_finite() {
            true => Ok(()),
            false => invalid(format!("{name} {value} cannot be: it must be finite")),
        };
        let at_least = |name: &str, value: f32, least: f32| match value >= least {
            true => finite(name, value),
            false => invalid(format!("{name} {value} cannot be: at least {least}")),
        };
        let share = |name: &str, value: f32| match (0.0..1.0).contains(&value) {
            true => Ok(()),
            false => invalid(format!("{name} {value} cannot be: 0 up to, not with, 1")),
        };
        match self.init {
            Init::Zeros => {}
            Init::Constant { value } => finite("init.value", value)?,
            Init::Uniform { low, high } => {
                finite("init.low", low)?;
                at_least("init.high", high, low)?;
            }
            Init::Normal { mean, std } | Init::TruncatedNormal { mean, std } => {
                finite("init.mean", mean)?;
                at_least("init.std", std, 0.0)?;
            }
        }
        at_least("optimizer.lr", self.optimizer.lr(), 0.0)?;
        match self.optimizer {
            Optimizer::Sgd { weight_decay, .. } => {
                at_least("optimizer.weight_decay", weight_decay, 0.0)?;
            }
            Optimizer::Adagrad {
                eps,
                initial_accumulator,
                weight_decay,
                ..
            } => {
                at_least("optimizer.eps", eps, 0.0)?;
                at_least("optimizer.weight_decay", weight_decay, 0.0)?;
                at_least("optimizer.initial_accumulator", initial_accumulator, 0.0)?;
            }
            Optimizer::RowWiseAdagrad {
                eps, weight_decay, ..
            } => {
                at_least("optimizer.eps", eps, 0.0)?;
                at_least("optimizer.weight_decay", weight_decay, 0.0)?;
            }
            Optimizer::LazyAdam {
                beta1, beta2, eps, ..
            } => {
                share("optimizer.beta1", beta1)?;
                share("optimizer.beta2", beta2)?;
                at_least("optimizer.eps", eps, 0.0)?;
            }
            Optimizer::PartialRowWiseAdam {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            }
            | Optimizer::Lamb {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            }
            | Optimizer::Adam {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            }
            | Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            } => {
                share("optimizer.beta1", beta1)?;
                share("optimizer.beta2", beta2)?;
                at_least("optimizer.eps", eps, 0.0)?;
                at_least("optimizer.weight_decay", weight_decay, 0.0)?;
            }
            Optimizer::Ftrl {
                lr,
                lr_power,
                l1,
                l2,
                initial_accumulator,
                beta,
            } => {
                if lr_power > 0.0 {
                    return invalid(format!(
                        "optimizer.lr_power {lr_power} cannot be: at most 0"
                    ));
                }
                positive("optimizer.lr", lr)?;
                for (name, value) in [
                    ("optimizer.l1", l1),
                    ("optimizer.l2", l2),
                    ("optimizer.beta", beta),
                ] {
                    at_least(name, value, 0.0)?;
                }
                positive("optimizer.initial_accumulator", initial_accumulator)?;
            }
            Optimizer::GroupAdam {
                lr,
                beta1,
                beta2,
                eps,
                l1,
                l2,
                l21,
            } => {
                positive("optimizer.lr", lr)?;
                share("optimizer.beta1", beta1)?;
                share("optimizer.beta2", beta2)?;
                for (name, value) in [
                    ("optimizer.eps", eps),
                    ("optimizer.l1", l1),
                    ("optimizer.l2", l2),
                    ("optimizer.l21", l21),
                ] {
                    at_least(name, value, 0.0)?;
                }
            }
            Optimizer::GroupFtrl {
                lr,
                l1,
                l2,
                l21,
                initial_accumulator,
                beta,
            } => {
                positive("optimizer.lr", lr)?;
                positive("optimizer.initial_accumulator", initial_accumulator)?;
                for (name, value) in [
                    ("optimizer.l1", l1),
                    ("optimizer.l2", l2),
                    ("optimizer.l21", l21),
                    ("optimizer.beta", beta),
                ] {
                    at_least(name, value, 0.0)?;
                }
            }
        }
        match self.admission {
            Admission::None => {}
            Admission::Counter { count: 0 } => {
                return invalid("admission.count 0 cannot be: at least 1");
            }
            Admission::Counter { .. } => {}
            Admission::Bloom {
                count,
                capacity,
                false_positives,
            } => {
                if count == 0 || count > 255 {
                    return invalid(format!("admission.count {count} cannot be: 1 to 255"));
                }
                if capacity == 0 {
                    return invalid("admission.capacity 0 cannot be: at least 1");
                }
                if !(false_positives > 0.0 && false_positives < 1.0) {
                    return invalid(format!(
                        "admission.false_positives {false_positives} cannot be: between 0 and 1"
                    ));
                }
            }
            Admission::Probability { p } => {
                if !(p > 0.0 && p <= 1.0) {
                    return invalid(format!("admission.p {p} cannot be: above 0, at most 1"));
                }
            }
        }
        if let Some(tier) = &self.tier {
            if tier.path.is_empty() {
                return invalid("tier.path is empty: name a folder for cold rows");
            }
            if tier.rows == 0 {
                return invalid("tier.rows 0 cannot be: at least 1");
            }
        }
        match self.eviction {
            Eviction::Ttl { steps: 0 } => invalid("eviction.steps 0 cannot be: at least 1"),
            Eviction::Lru { rows: 0 } | Eviction::Lfu { rows: 0 } => {
                invalid("eviction.rows 0 cannot be: at least 1")
            }
            Eviction::L2 { norm } => at_least("eviction.norm", norm, 0.0),
            _ => Ok(()),
        }
    }
}

fn positive(name: &str, value: f32) -> Result<()> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => invalid(format!("{name} {value} cannot be: above 0")),
    }
}
