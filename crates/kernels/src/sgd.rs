//! Fused SGD with momentum: unscale, clip, update and the copy for the accelerator in one pass
//! (Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, in
//! the form that torch uses).
//! ```text
//! g = gradient * scale + weight_decay * w
//! m = momentum * m + (1 - dampening) * g    in the first step m = g
//! w = w - lr * m                            Nesterov: w - lr * (g + momentum * m)
//! ```

use crate::isa::{Isa, Work};
use crate::state::{Moment, Noise, StateError, Tensors, in_range};

/// The hyper-parameters of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the buffer. 0: plain SGD.
    pub momentum: f64,
    /// Share of the gradient that is kept out of the buffer.
    pub dampening: f64,
    /// L2 term.
    pub weight_decay: f64,
    /// Look ahead by one application of the momentum.
    pub nesterov: bool,
    /// The gradient is multiplied by it first.
    pub scale: f64,
    /// This step's number, from 1.
    pub step: u64,
}

impl Sgd {
    /// One step on one thread, by the instructions of `isa`. The buffer is `tensors.first`.
    ///
    /// # Errors
    /// [`StateError`] where lengths or hyper-parameters do not fit; nothing has been written then.
    pub fn step(&self, isa: Isa, tensors: Tensors<'_>, noise: Noise) -> Result<(), StateError> {
        tensors.check()?;
        if self.momentum != 0.0 && matches!(tensors.first, Moment::Absent) {
            return Err(StateError::Absent {
                name: "the momentum buffer",
            });
        }
        in_range(
            "lr",
            self.lr as f32,
            0.0,
            f32::INFINITY,
            "0 or more, and finite",
        )?;
        in_range(
            "momentum",
            self.momentum as f32,
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
        isa.run(Step {
            sgd: *self,
            tensors,
            noise,
        });
        Ok(())
    }
}

struct Step<'a> {
    sgd: Sgd,
    tensors: Tensors<'a>,
    noise: Noise,
}

impl Work for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (lr, scale) = (self.sgd.lr as f32, self.sgd.scale as f32);
        let (momentum, decay) = (self.sgd.momentum as f32, self.sgd.weight_decay as f32);
        let new = if self.sgd.step == 1 {
            1.0
        } else {
            (1.0 - self.sgd.dampening) as f32
        };
        let nesterov = self.sgd.nesterov;
        self.tensors.each(self.noise, |w, g, m, v| {
            let mut gradient = g * scale;
            if decay != 0.0 {
                gradient += decay * w;
            }
            let (mut direction, mut buffer) = (gradient, m);
            if momentum != 0.0 {
                buffer = momentum * m + new * gradient;
                direction = if nesterov {
                    gradient + momentum * buffer
                } else {
                    buffer
                };
            }
            (w - lr * direction, buffer, v)
        });
    }
}
