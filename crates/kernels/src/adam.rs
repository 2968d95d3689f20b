//! Fused AdamW and Adam: unscale, clip, update and the copy for the accelerator in one pass over
//! memory (Kingma & Ba, arXiv 1412.6980; Loshchilov & Hutter, arXiv 1711.05101).
//!
//! The operations and their order, each rounded to f32 (no fused multiply-add), so that a loop in
//! plain torch which does the same gives the same bits:
//! ```text
//! g = gradient * scale                      scale = clip coefficient / loss scale
//! g = g + weight_decay * w                  Adam (coupled)
//! w = w * (1 - lr * weight_decay)           AdamW (decoupled)
//! m = beta1 * m + (1 - beta1) * g
//! v = beta2 * v + (1 - beta2) * (g * g)
//! w = w - (lr / (1 - beta1^t)) * (m / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + epsilon))
//! ```
//! Scalars are computed in f64 and rounded once.

use crate::isa::{Isa, Work};
use crate::state::{Moment, Noise, StateError, Tensors, in_range};

/// The hyper-parameters of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// AdamW where true, Adam with an L2 term where false.
    pub decoupled: bool,
    /// The gradient is multiplied by it first.
    pub scale: f64,
    /// This step's number, from 1.
    pub step: u64,
}

/// The scalars of the loop.
#[derive(Clone, Copy)]
struct Scalars {
    scale: f32,
    coupled: f32,
    shrink: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    root: f32,
    epsilon: f32,
    rate: f32,
}

impl Adam {
    fn scalars(&self) -> Result<Scalars, StateError> {
        in_range(
            "lr",
            self.lr as f32,
            0.0,
            f32::INFINITY,
            "0 or more, and finite",
        )?;
        in_range(
            "beta1",
            self.beta1 as f32,
            0.0,
            1.0,
            "at least 0 and below 1",
        )?;
        in_range(
            "beta2",
            self.beta2 as f32,
            0.0,
            1.0,
            "at least 0 and below 1",
        )?;
        in_range(
            "epsilon",
            self.epsilon as f32,
            0.0,
            f32::INFINITY,
            "0 or more, and finite",
        )?;
        let decay = self.weight_decay as f32;
        in_range(
            "weight_decay",
            decay,
            0.0,
            f32::INFINITY,
            "0 or more, and finite",
        )?;
        in_range("step", self.step as f32, 1.0, f32::INFINITY, "1 or more")?;
        let power = |beta: f64| 1.0 - beta.powf(self.step as f64);
        Ok(Scalars {
            scale: self.scale as f32,
            coupled: if self.decoupled { 0.0 } else { decay },
            shrink: if self.decoupled {
                (1.0 - self.lr * self.weight_decay) as f32
            } else {
                1.0
            },
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            root: (1.0 / power(self.beta2).sqrt()) as f32,
            epsilon: self.epsilon as f32,
            rate: (self.lr / power(self.beta1)) as f32,
        })
    }

    /// One step on one thread, by the instructions of `isa`.
    ///
    /// # Errors
    /// [`StateError`] where lengths or hyper-parameters do not fit; nothing has been written then.
    pub fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        tensors.check()?;
        for (name, moment) in [
            ("the first moment", &tensors.first),
            ("the second moment", &tensors.second),
        ] {
            if matches!(moment, Moment::Absent) {
                return Err(StateError::Absent { name });
            }
        }
        let scalars = self.scalars()?;
        isa.run(Step {
            scalars,
            tensors,
            noise,
        });
        Ok(())
    }
}

struct Step<'a> {
    scalars: Scalars,
    tensors: Tensors<'a>,
    noise: Noise,
}

impl Work for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let s = self.scalars;
        if s.coupled == 0.0 {
            // Not only faster: 0 * w is NaN where w is infinite.
            self.tensors
                .each(self.noise, |w, g, m, v| update::<false>(s, w, g, m, v));
        } else {
            self.tensors
                .each(self.noise, |w, g, m, v| update::<true>(s, w, g, m, v));
        }
    }
}

/// New weight, first and second moment of one element.
#[inline(always)]
fn update<const COUPLED: bool>(s: Scalars, w: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
    let mut gradient = g * s.scale;
    if COUPLED {
        gradient += s.coupled * w;
    }
    let first = s.beta1 * m + s.rest1 * gradient;
    let second = s.beta2 * v + s.rest2 * (gradient * gradient);
    let new = w * s.shrink - s.rate * (first / (second.sqrt() * s.root + s.epsilon));
    (new, first, second)
}
