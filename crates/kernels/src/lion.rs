//! Fused Lion: unscale, clip, update and the copy for the accelerator in one pass (Chen et al.,
//! "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675).
//! ```text
//! g = gradient * scale
//! w = w * (1 - lr * weight_decay)
//! w = w - lr * sign(beta1 * m + (1 - beta1) * g)        sign(0) = sign(NaN) = 0
//! m = beta2 * m + (1 - beta2) * g
//! ```
//! Scalars are computed in f64 and rounded once; each operation rounds once.

use crate::isa::{Isa, Work};
use crate::state::{Moment, Noise, StateError, Tensors, in_range};

/// The hyper-parameters of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Learning rate: the size of every change.
    pub lr: f64,
    /// Share of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Weight decay, apart from the gradient.
    pub weight_decay: f64,
    /// The gradient is multiplied by it first.
    pub scale: f64,
}

impl Lion {
    /// One step on one thread, by the instructions of `isa`. The momentum is `tensors.first`.
    ///
    /// # Errors
    /// [`StateError`] where lengths or hyper-parameters do not fit; nothing has been written then.
    pub fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        tensors.check()?;
        if matches!(tensors.first, Moment::Absent) {
            return Err(StateError::Absent {
                name: "the momentum",
            });
        }
        let finite = "0 or more, and finite";
        in_range("lr", self.lr as f32, 0.0, f32::INFINITY, finite)?;
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            in_range(name, beta as f32, 0.0, 1.0, "at least 0 and below 1")?;
        }
        let decay = self.weight_decay as f32;
        in_range("weight_decay", decay, 0.0, f32::INFINITY, finite)?;
        isa.run(Step {
            lion: *self,
            tensors,
            noise,
        });
        Ok(())
    }
}

struct Step<'a> {
    lion: Lion,
    tensors: Tensors<'a>,
    noise: Noise,
}

impl Work for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let Lion {
            lr,
            beta1,
            beta2,
            weight_decay,
            scale,
        } = self.lion;
        let shrink = (1.0 - lr * weight_decay) as f32;
        let (rest1, rest2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
        let (lr, beta1, beta2, scale) = (lr as f32, beta1 as f32, beta2 as f32, scale as f32);
        self.tensors.each(self.noise, |w, g, m, v| {
            let gradient = g * scale;
            let mixed = beta1 * m + rest1 * gradient;
            let sign = f32::from(mixed > 0.0) - f32::from(mixed < 0.0);
            (w * shrink - lr * sign, beta2 * m + rest2 * gradient, v)
        });
    }
}
