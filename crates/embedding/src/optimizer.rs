//! The step of each optimizer on one row. Plain loops over f32, element by element and without fused
//! multiply-add, so that the bits are the same on every machine and for every door. Its settings are in
//! [`options`](crate::options); rows on a GPU take the same step in `evener.embedding.torch.updates`.

use crate::options::Optimizer;

/// What a step has in common for all rows.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    optimizer: Optimizer,
    lr: f32,
    /// 1 - beta1^t, 1 - beta2^t, 1 - beta2^(t - 1); 1 for optimizers without them.
    corrections: [f64; 3],
}

fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

impl Optimizer {
    /// How many f32 values it keeps for a row of `dim` values.
    pub fn slots(&self, dim: usize) -> usize {
        match self {
            Optimizer::Sgd { .. } => 0,
            Optimizer::RowWiseAdagrad { .. } => 1,
            Optimizer::Adagrad { .. } => dim,
            Optimizer::PartialRowWiseAdam { .. } => dim + 1,
            Optimizer::Adam { .. }
            | Optimizer::AdamW { .. }
            | Optimizer::LazyAdam { .. }
            | Optimizer::Lamb { .. }
            | Optimizer::Ftrl { .. }
            | Optimizer::GroupFtrl { .. } => 2 * dim,
            Optimizer::GroupAdam { .. } => 3 * dim,
        }
    }

    /// The learning rate that it was made with.
    pub fn lr(&self) -> f32 {
        match *self {
            Optimizer::Sgd { lr, .. }
            | Optimizer::Adagrad { lr, .. }
            | Optimizer::RowWiseAdagrad { lr, .. }
            | Optimizer::PartialRowWiseAdam { lr, .. }
            | Optimizer::Lamb { lr, .. }
            | Optimizer::Adam { lr, .. }
            | Optimizer::AdamW { lr, .. }
            | Optimizer::LazyAdam { lr, .. }
            | Optimizer::Ftrl { lr, .. }
            | Optimizer::GroupAdam { lr, .. }
            | Optimizer::GroupFtrl { lr, .. } => lr,
        }
    }

    /// Writes the slots of a new row that starts with `values`.
    pub fn start(&self, values: &[f32], slots: &mut [f32]) {
        slots.fill(0.0);
        let dim = values.len();
        match *self {
            Optimizer::Adagrad {
                initial_accumulator,
                ..
            } => slots.fill(initial_accumulator),
            Optimizer::Ftrl {
                initial_accumulator,
                ..
            } => slots[..dim].fill(initial_accumulator),
            Optimizer::GroupFtrl {
                lr,
                initial_accumulator,
                ..
            } => {
                slots[..dim].fill(initial_accumulator);
                // The linear term that the initial values would have come from.
                let root = initial_accumulator.sqrt() / lr;
                for (linear, value) in slots[dim..].iter_mut().zip(values) {
                    *linear = -value * root;
                }
            }
            _ => {}
        }
    }

    /// The `t`-th step (from 1) with this learning rate.
    pub fn step(&self, t: u64, lr: f32) -> Step {
        let corrections = match *self {
            Optimizer::Adam { beta1, beta2, .. }
            | Optimizer::AdamW { beta1, beta2, .. }
            | Optimizer::LazyAdam { beta1, beta2, .. }
            | Optimizer::PartialRowWiseAdam { beta1, beta2, .. }
            | Optimizer::Lamb { beta1, beta2, .. }
            | Optimizer::GroupAdam { beta1, beta2, .. } => [
                1.0 - power(f64::from(beta1), t),
                1.0 - power(f64::from(beta2), t),
                1.0 - power(f64::from(beta2), t.saturating_sub(1)),
            ],
            _ => [1.0; 3],
        };
        Step {
            optimizer: *self,
            lr,
            corrections,
        }
    }
}

impl Step {
    /// One row: `absent` is the number of steps since its last update that it was not in.
    #[inline(always)]
    pub fn update(&self, w: &mut [f32], slots: &mut [f32], g: &[f32], absent: u64) {
        let lr = self.lr;
        let dim = g.len();
        let w = &mut w[..dim];
        match self.optimizer {
            Optimizer::Sgd { weight_decay, .. } => {
                for (w, g) in w.iter_mut().zip(g) {
                    *w -= lr * (g + weight_decay * *w);
                }
            }
            Optimizer::Adagrad {
                eps, weight_decay, ..
            } => {
                for ((w, a), g) in w.iter_mut().zip(slots).zip(g) {
                    let g = joined(*g, *w, weight_decay);
                    *a += g * g;
                    *w -= lr * g / (a.sqrt() + eps);
                }
            }
            Optimizer::RowWiseAdagrad {
                eps,
                weight_decay,
                decoupled,
                ..
            } => {
                let l2 = if decoupled { 0.0 } else { weight_decay };
                let square = |i: usize| joined(g[i], w[i], l2) * joined(g[i], w[i], l2);
                slots[0] += total(dim, square) / dim as f32;
                let size = lr / (slots[0].sqrt() + eps);
                let keep = 1.0 - weight_decay * if decoupled { lr } else { size };
                for (w, g) in w.iter_mut().zip(g) {
                    *w = keep * *w - size * g;
                }
            }
            Optimizer::PartialRowWiseAdam {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            } => {
                let [first, second, _] = self.corrections.map(|c| c as f32);
                let (m, v) = slots.split_at_mut(dim);
                let mean = total(dim, |i| g[i] * g[i]) / dim as f32;
                v[0] = beta2 * v[0] + (1.0 - beta2) * mean;
                let root = (v[0] / second).sqrt() + eps;
                for ((w, m), g) in w.iter_mut().zip(m).zip(g) {
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *w -= lr * (*m / first / root + weight_decay * *w);
                }
            }
            Optimizer::Lamb {
                beta1,
                beta2,
                eps,
                weight_decay,
                ..
            } => {
                let [first, second, _] = self.corrections.map(|c| c as f32);
                let (m, v) = slots.split_at_mut(dim);
                for ((m, v), g) in m.iter_mut().zip(&mut *v).zip(g) {
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *v = beta2 * *v + (1.0 - beta2) * (g * g);
                }
                let change = |i: usize, w: f32| {
                    m[i] / first / ((v[i] / second).sqrt() + eps) + weight_decay * w
                };
                let length = total(dim, |i| w[i] * w[i]).sqrt();
                let way = total(dim, |i| change(i, w[i]) * change(i, w[i])).sqrt();
                let trust = match length > 0.0 && way > 0.0 {
                    true => length / way,
                    false => 1.0,
                };
                let size = lr * trust;
                for (i, w) in w.iter_mut().enumerate() {
                    *w -= size * change(i, *w);
                }
            }
            Optimizer::Adam {
                beta1,
                beta2,
                eps,
                eps_hat,
                weight_decay,
                ..
            } => {
                if absent > 0 {
                    let (m, v) = slots.split_at_mut(dim);
                    let first = power(f64::from(beta1), absent) as f32;
                    let second = power(f64::from(beta2), absent) as f32;
                    m.iter_mut().for_each(|m| *m *= first);
                    v.iter_mut().for_each(|v| *v *= second);
                }
                let eps = self.eps(eps, eps_hat);
                self.adam(w, slots, g, [beta1, beta2], eps, weight_decay);
            }
            Optimizer::LazyAdam {
                beta1, beta2, eps, ..
            } => self.adam(w, slots, g, [beta1, beta2], self.eps(eps, true), 0.0),
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                eps_hat,
                weight_decay,
                ..
            } => {
                let keep = 1.0 - lr * weight_decay;
                w.iter_mut().for_each(|w| *w *= keep);
                self.adam(w, slots, g, [beta1, beta2], self.eps(eps, eps_hat), 0.0);
            }
            Optimizer::Ftrl {
                lr_power,
                l1,
                l2,
                beta,
                ..
            } => {
                let (a, linear) = slots.split_at_mut(dim);
                let l2 = l2 + beta / (2.0 * lr);
                // x^0.5 by the root, which is exact on every machine; other powers by the system.
                let raise = |x: f32| match lr_power == -0.5 {
                    true => x.sqrt(),
                    false => x.powf(-lr_power),
                };
                for (((w, a), z), g) in w.iter_mut().zip(a).zip(linear).zip(g) {
                    let next = *a + g * g;
                    let (before, after) = (raise(*a), raise(next));
                    *z += g - (after - before) / lr * *w;
                    let quadratic = after / lr + 2.0 * l2;
                    *w = (z.clamp(-l1, l1) - *z) / quadratic;
                    *a = next;
                }
            }
            Optimizer::GroupFtrl {
                l1, l2, l21, beta, ..
            } => {
                let (a, linear) = slots.split_at_mut(dim);
                for (((w, a), z), g) in w.iter_mut().zip(&mut *a).zip(&mut *linear).zip(g) {
                    let next = *a + g * g;
                    *z += g - (next.sqrt() - a.sqrt()) / lr * *w;
                    *a = next;
                }
                lasso(w, linear, l1, l21, |i| (beta + a[i].sqrt()) / lr + 2.0 * l2);
            }
            Optimizer::GroupAdam {
                beta1,
                beta2,
                eps,
                l1,
                l2,
                l21,
                ..
            } => {
                let (m, rest) = slots.split_at_mut(dim);
                let (v, z) = rest.split_at_mut(dim);
                let [first, second, before] = self.corrections.map(|c| c as f32);
                for i in 0..dim {
                    let old = match before > 0.0 {
                        true => (v[i] / before).sqrt() + eps,
                        false => 0.0,
                    };
                    m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
                    v[i] = beta2 * v[i] + (1.0 - beta2) * (g[i] * g[i]);
                    let new = (v[i] / second).sqrt() + eps;
                    // A row that has rested has a smaller v now than its last step used: the
                    // proximal weight never shrinks.
                    let grown = (new - old).max(0.0);
                    z[i] += m[i] / first - grown / lr * w[i];
                }
                lasso(w, z, l1, l21, |i| {
                    ((v[i] / second).sqrt() + eps) / lr + 2.0 * l2
                });
            }
        }
    }

    /// What is added to the corrected root of the second moment.
    #[inline(always)]
    fn eps(&self, eps: f32, hat: bool) -> f32 {
        match hat {
            true => (f64::from(eps) / self.corrections[1].sqrt()) as f32,
            false => eps,
        }
    }

    #[inline(always)]
    fn adam(
        &self,
        w: &mut [f32],
        slots: &mut [f32],
        g: &[f32],
        [beta1, beta2]: [f32; 2],
        eps: f32,
        l2: f32,
    ) {
        let [first, second, _] = self.corrections;
        let size = (f64::from(self.lr) / first) as f32;
        let root = (1.0 / second.sqrt()) as f32;
        let (m, v) = slots.split_at_mut(g.len());
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            let g = joined(*g, *w, l2);
            *m = beta1 * *m + (1.0 - beta1) * g;
            *v = beta2 * *v + (1.0 - beta2) * (g * g);
            *w -= size * *m / (v.sqrt() * root + eps);
        }
    }
}

/// How many sums of its own a sum over a row is made of: enough to be taken at once.
const LANES: usize = 16;

/// A sum over a row: every sixteenth term by itself, and then these sums by halves. Rows on a GPU are
/// summed in the same order.
#[inline(always)]
fn total(dim: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    for i in 0..dim {
        sums[i % LANES] += term(i);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// A gradient with its part of the decay; the same bits where there is none.
#[inline(always)]
fn joined(g: f32, w: f32, l2: f32) -> f32 {
    match l2 == 0.0 {
        true => g,
        false => g + l2 * w,
    }
}

/// The solution of the sparse group lasso for a linear term and a quadratic one.
#[inline(always)]
fn lasso(w: &mut [f32], z: &[f32], l1: f32, l21: f32, quadratic: impl Fn(usize) -> f32) {
    let soft = |z: f32| z.signum() * (z.abs() - l1).max(0.0);
    let norm = z.iter().map(|&z| soft(z) * soft(z)).sum::<f32>().sqrt();
    let bound = l21 * (w.len() as f32).sqrt();
    if norm <= bound {
        w.fill(0.0);
        return;
    }
    let keep = 1.0 - bound / norm;
    for (i, w) in w.iter_mut().enumerate() {
        *w = -soft(z[i]) * keep / quadratic(i);
    }
}
