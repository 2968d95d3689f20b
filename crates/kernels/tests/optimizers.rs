//! Fused optimizers: every variant gives the bits of a loop that anyone can read, for every format,
//! length and number of threads.

use evener_kernels::adam::Adam;
use evener_kernels::formats::{
    self, BLOCK, Grid, from_bf16, from_f16, from_first, from_second, join, mix, split, to_bf16,
    to_first, to_second,
};
use evener_kernels::isa::Isa;
use evener_kernels::lion::Lion;
use evener_kernels::pool::{Optimizer, Pool};
use evener_kernels::sgd::Sgd;
use evener_kernels::state::{Gradient, Master, Moment, Noise, Output, StateError, Tensors};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Weights {
    F32,
    Split,
    Bf16,
}

#[derive(Debug, Clone, Copy)]
enum Format {
    F32,
    Bf16,
    F16,
    /// Of moments alone.
    Int8,
}

/// Owned tensors of a step.
#[derive(Debug, Clone, PartialEq)]
struct Owned {
    wide: Vec<f32>,
    upper: Vec<u16>,
    lower: Vec<u16>,
    gradient: Vec<f32>,
    narrow_gradient: Vec<u16>,
    moments: [Vec<f32>; 2],
    narrow_moments: [Vec<u16>; 2],
    codes: [Vec<u8>; 2],
    scales: [Vec<u8>; 2],
    output: Vec<u16>,
}

/// The scales of blocks of moments.
fn scales<const TOP: u32>(values: &[f32]) -> Vec<u8> {
    let blocks = values.chunks(BLOCK);
    blocks.map(|b| Grid::<TOP>::scale(largest(b))).collect()
}

/// Their codes, rounded down.
fn codes<const TOP: u32>(values: &[f32], code: impl Fn(f32, Grid<TOP>) -> u8) -> Vec<u8> {
    let pairs = values.chunks(BLOCK).zip(scales::<TOP>(values));
    pairs
        .flat_map(|(b, scale)| b.iter().map(move |x| (*x, Grid::new(scale))))
        .map(|(x, grid)| code(x, grid))
        .collect()
}

/// The largest of a block's numbers without their signs, as bits.
fn largest(block: &[f32]) -> u32 {
    block.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0)
}

impl Owned {
    fn new(values: &[(f32, f32, f32, f32)]) -> Owned {
        let weights: Vec<f32> = values.iter().map(|x| x.0).collect();
        let first: Vec<f32> = values.iter().map(|x| x.2).collect();
        let second: Vec<f32> = values.iter().map(|x| x.3.abs()).collect();
        let narrow = |x: &[f32]| x.iter().map(|x| to_bf16(*x)).collect::<Vec<_>>();
        Owned {
            upper: weights.iter().map(|x| split(*x).0).collect(),
            lower: weights.iter().map(|x| split(*x).1).collect(),
            wide: weights,
            narrow_gradient: values.iter().map(|x| to_bf16(x.1)).collect(),
            gradient: values.iter().map(|x| x.1).collect(),
            narrow_moments: [narrow(&first), narrow(&second)],
            scales: [
                scales::<{ formats::FIRST }>(&first),
                scales::<{ formats::SECOND }>(&second),
            ],
            codes: [
                codes(&first, |x, grid| to_first(x, grid, 0)),
                codes(&second, |x, grid| to_second(x, grid, 0)),
            ],
            moments: [first, second],
            output: vec![0; values.len()],
        }
    }

    fn tensors(&mut self, weights: Weights, gradient: Format, moments: Format) -> Tensors<'_> {
        let [first, second] = &mut self.moments;
        let [narrow_first, narrow_second] = &mut self.narrow_moments;
        let [codes, codes2] = &mut self.codes;
        let [scales, scales2] = &mut self.scales;
        let moment = |wide, narrow, codes, scales| match moments {
            Format::Bf16 => Moment::Bf16(narrow),
            Format::Int8 => Moment::Int8 { codes, scales },
            _ => Moment::F32(wide),
        };
        Tensors {
            master: match weights {
                Weights::F32 => Master::F32(&mut self.wide),
                Weights::Bf16 => Master::Bf16(&mut self.upper),
                Weights::Split => Master::Split {
                    upper: &mut self.upper,
                    lower: &mut self.lower,
                },
            },
            gradient: match gradient {
                Format::F32 => Gradient::F32(&self.gradient),
                Format::Bf16 => Gradient::Bf16(&self.narrow_gradient),
                _ => Gradient::F16(&self.narrow_gradient),
            },
            first: moment(first, narrow_first, codes, scales),
            second: moment(second, narrow_second, codes2, scales2),
            output: if weights == Weights::F32 {
                Output::Bf16(&mut self.output)
            } else {
                Output::Absent
            },
        }
    }

    /// Bits, with one pattern for every NaN: which NaN an operation gives is not defined.
    fn bits(&self) -> Vec<u32> {
        let wide = |x: &f32| {
            if x.is_nan() {
                f32::NAN.to_bits()
            } else {
                x.to_bits()
            }
        };
        let mut bits: Vec<u32> = self.wide.iter().map(wide).collect();
        bits.extend(
            self.upper
                .iter()
                .zip(&self.lower)
                .map(|(u, l)| wide(&join(*u, *l))),
        );
        bits.extend(self.moments.iter().flatten().map(wide));
        bits.extend(
            self.narrow_moments
                .iter()
                .flatten()
                .map(|x| wide(&from_bf16(*x))),
        );
        bits.extend(
            self.codes
                .iter()
                .chain(&self.scales)
                .flatten()
                .map(|x| u32::from(*x)),
        );
        bits.extend(self.output.iter().map(|x| wide(&from_bf16(*x))));
        bits
    }
}

/// AdamW with f32 states, one element, in the order that the documentation gives.
fn adamw(a: &Adam, w: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
    let mut g = g * a.scale as f32;
    let mut w = w;
    if a.decoupled {
        w *= (1.0 - a.lr * a.weight_decay) as f32;
    } else if a.weight_decay != 0.0 {
        g += a.weight_decay as f32 * w;
    }
    let m = a.beta1 as f32 * m + (1.0 - a.beta1) as f32 * g;
    let v = a.beta2 as f32 * v + (1.0 - a.beta2) as f32 * (g * g);
    let root = (1.0 / (1.0 - a.beta2.powf(a.step as f64)).sqrt()) as f32;
    let rate = (a.lr / (1.0 - a.beta1.powf(a.step as f64))) as f32;
    (w - rate * (m / (v.sqrt() * root + a.epsilon as f32)), m, v)
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![8 => -2f32..2.0, 1 => any::<u32>().prop_map(f32::from_bits), 1 => Just(0.0)]
}

fn values() -> impl Strategy<Value = Vec<(f32, f32, f32, f32)>> {
    prop::collection::vec((number(), number(), number(), number()), 0..700)
}

fn adam() -> impl Strategy<Value = Adam> {
    (
        any::<bool>(),
        1u64..1000,
        prop_oneof![Just(0.0), 0.0..0.5],
        0.01f64..2.0,
    )
        .prop_map(|(decoupled, step, weight_decay, scale)| Adam {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay,
            decoupled,
            scale,
            step,
        })
}

fn weights() -> impl Strategy<Value = Weights> {
    prop::sample::select(vec![Weights::F32, Weights::Split, Weights::Bf16])
}

fn format() -> impl Strategy<Value = Format> {
    prop::sample::select(vec![Format::F32, Format::Bf16, Format::F16])
}

/// Whole blocks.
fn blocks() -> impl Strategy<Value = Vec<(f32, f32, f32, f32)>> {
    (values(), 0usize..4).prop_map(|(mut values, count)| {
        values.resize(count * BLOCK, (0.5, 1e-3, 0.0, 1e-9));
        values
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn moments_of_a_byte_are_those_of_f32_rounded(
        values in blocks(), adam in adam(), weights in weights(), gradient in format(),
        key in any::<u32>(), offset in any::<u32>(),
    ) {
        let noise = Noise { key, offset };
        let mut got = Owned::new(&values);
        // f32 moments that begin as what the bytes say.
        let mut want = got.clone();
        for (at, x) in want.moments[0].iter_mut().enumerate() {
            *x = from_first(got.codes[0][at], Grid::new(got.scales[0][at / BLOCK]));
        }
        for (at, x) in want.moments[1].iter_mut().enumerate() {
            *x = from_second(got.codes[1][at], Grid::new(got.scales[1][at / BLOCK]));
        }
        adam.step(Isa::detect(), got.tensors(weights, gradient, Format::Int8), noise).unwrap();
        adam.step(Isa::detect(), want.tensors(weights, gradient, Format::F32), noise).unwrap();
        prop_assert_eq!(&got.upper, &want.upper);
        prop_assert_eq!(&got.lower, &want.lower);
        for at in 0..values.len() {
            let block = at / BLOCK * BLOCK..at / BLOCK * BLOCK + BLOCK;
            let random = formats::counter_hash(offset.wrapping_add(at as u32), key);
            let scale = Grid::<{ formats::FIRST }>::scale(largest(&want.moments[0][block.clone()]));
            prop_assert_eq!(got.scales[0][at / BLOCK], scale);
            let code = to_first(want.moments[0][at], Grid::new(scale), random);
            prop_assert_eq!(got.codes[0][at], code);
            let scale = Grid::<{ formats::SECOND }>::scale(largest(&want.moments[1][block]));
            prop_assert_eq!(got.scales[1][at / BLOCK], scale);
            let code = to_second(want.moments[1][at], Grid::new(scale), random >> 16);
            prop_assert_eq!(got.codes[1][at], code);
        }
        for isa in Isa::available() {
            let mut other = Owned::new(&values);
            adam.step(isa, other.tensors(weights, gradient, Format::Int8), noise).unwrap();
            prop_assert_eq!(other.bits(), got.bits(), "{}", isa.name());
        }
    }

    #[test]
    fn all_instructions_and_threads_give_the_same_bits(
        values in values(), adam in adam(), weights in weights(), gradient in format(),
        moments in format(), key in any::<u32>(), offset in any::<u32>(),
    ) {
        let noise = Noise { key, offset };
        let mut want = Owned::new(&values);
        adam.step(Isa::BASELINE, want.tensors(weights, gradient, moments), noise).unwrap();
        for isa in Isa::available() {
            let mut got = Owned::new(&values);
            adam.step(isa, got.tensors(weights, gradient, moments), noise).unwrap();
            prop_assert_eq!(got.bits(), want.bits(), "{}", isa.name());
        }
    }

    #[test]
    fn adam_equals_a_plain_loop(values in values(), adam in adam(), gradient in format()) {
        let mut got = Owned::new(&values);
        let before = got.clone();
        adam.step(Isa::detect(), got.tensors(Weights::F32, gradient, Format::F32), Noise::default())
            .unwrap();
        let mut want = before.clone();
        for i in 0..values.len() {
            let g = match gradient {
                Format::F32 => before.gradient[i],
                Format::Bf16 => from_bf16(before.narrow_gradient[i]),
                _ => from_f16(before.narrow_gradient[i]),
            };
            let (w, m, v) = adamw(&adam, before.wide[i], g, before.moments[0][i], before.moments[1][i]);
            (want.wide[i], want.moments[0][i], want.moments[1][i]) = (w, m, v);
            want.output[i] = to_bf16(w);
        }
        prop_assert_eq!(got.bits(), want.bits());
        // A split master copy goes the same way, as long as nothing is NaN.
        let mut halves = before;
        adam.step(Isa::detect(), halves.tensors(Weights::Split, gradient, Format::F32), Noise::default())
            .unwrap();
        for i in 0..values.len() {
            let (a, b) = (got.wide[i], join(halves.upper[i], halves.lower[i]));
            prop_assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
        }
    }
}

#[test]
fn threads_change_nothing() {
    let values: Vec<_> = (0..100_001u32)
        .map(|i| {
            let x = |k| (mix(i * 4 + k) as f32 / u32::MAX as f32) - 0.5;
            (x(0), x(1), x(2), x(3))
        })
        .collect();
    let adam = Adam {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        scale: 0.5,
        step: 3,
    };
    let sgd = Sgd {
        lr: 1e-3,
        momentum: 0.9,
        dampening: 0.1,
        weight_decay: 0.1,
        nesterov: true,
        scale: 0.5,
        step: 3,
    };
    let lion = Lion {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.99,
        weight_decay: 0.1,
        scale: 0.5,
    };
    let noise = Noise {
        key: formats::key(7, 3, 0),
        offset: u32::MAX - 5,
    };
    fn compare(optimizer: &impl Optimizer, values: &[(f32, f32, f32, f32)], noise: Noise) {
        for (moments, n) in [(Format::Bf16, 100_001), (Format::Int8, 390 * BLOCK)] {
            let values = &values[..n];
            let mut want = Owned::new(values);
            let tensors = want.tensors(Weights::Split, Format::Bf16, moments);
            optimizer.step(Isa::BASELINE, tensors, noise).unwrap();
            for threads in [1, 3] {
                let pool = Pool::new(threads).unwrap();
                let mut got = Owned::new(values);
                let tensors = got.tensors(Weights::Split, Format::Bf16, moments);
                pool.step(optimizer, Isa::detect(), tensors, noise).unwrap();
                assert_eq!(got.bits(), want.bits());
            }
        }
    }
    compare(&adam, &values, noise);
    compare(&sgd, &values, noise);
    compare(&lion, &values, noise);
    let gradient: Vec<f32> = values.iter().map(|x| x.1).collect();
    let exact: f64 = gradient.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let (one, three) = (Pool::new(1).unwrap(), Pool::new(3).unwrap());
    let sum = one.squares(Isa::BASELINE, Gradient::F32(&gradient));
    assert_eq!(sum, three.squares(Isa::detect(), Gradient::F32(&gradient)));
    assert!((sum / exact - 1.0).abs() < 1e-12);
}

#[test]
fn what_cannot_be_is_refused_with_nothing_written() {
    let good = Adam {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.0,
        decoupled: true,
        scale: 1.0,
        step: 1,
    };
    let pool = Pool::new(2).unwrap();
    for bad in [
        Adam {
            lr: f64::NAN,
            ..good
        },
        Adam { beta1: 1.0, ..good },
        Adam {
            beta2: -0.1,
            ..good
        },
        Adam {
            epsilon: -1.0,
            ..good
        },
        Adam {
            weight_decay: f64::INFINITY,
            ..good
        },
        Adam { step: 0, ..good },
    ] {
        let mut owned = Owned::new(&[(1.0, 1.0, 1.0, 1.0); 9]);
        let before = owned.clone();
        let tensors = owned.tensors(Weights::F32, Format::F32, Format::F32);
        let refused = pool
            .step(&bad, Isa::detect(), tensors, Noise::default())
            .unwrap_err();
        assert!(matches!(refused, StateError::Hyper { .. }), "{refused}");
        assert_eq!(owned, before);
    }
    let mut owned = Owned::new(&[(1.0, 1.0, 1.0, 1.0); 9]);
    owned.moments[1].pop();
    let tensors = owned.tensors(Weights::F32, Format::F32, Format::F32);
    let refused = good
        .step(Isa::detect(), tensors, Noise::default())
        .unwrap_err();
    assert_eq!(
        refused,
        StateError::Length {
            name: "the second moment",
            got: 8,
            expected: 9
        }
    );
    owned.moments[1].push(1.0);
    let tensors = owned.tensors(Weights::F32, Format::F32, Format::Int8);
    let refused = good
        .step(Isa::detect(), tensors, Noise::default())
        .unwrap_err();
    assert_eq!(
        refused,
        StateError::Blocks {
            name: "the first moment",
            elements: 9,
            scales: 1
        }
    );
    let tensors = Tensors {
        second: Moment::Absent,
        ..owned.tensors(Weights::F32, Format::F32, Format::F32)
    };
    let refused = good
        .step(Isa::detect(), tensors, Noise::default())
        .unwrap_err();
    assert_eq!(
        refused,
        StateError::Absent {
            name: "the second moment"
        }
    );
}
