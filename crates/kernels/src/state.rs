//! The tensors of one optimizer step: master weights, gradient, moments and the copy that the
//! accelerator computes with, each in the format that it is stored in. Formats are chosen at run
//! time, once a block; a block is staged as f32 in the first-level cache, unless it is f32 already.
//! The usual formats have loops without that stop, in `fused`.

use crate::formats::{
    BLOCK, FIRST, Grid, SECOND, counter_hash, from_bf16, from_f16, from_first, from_second, join,
    mix, split, to_bf16, to_bf16_stochastic, to_f16, to_first, to_second,
};

/// Why a call was refused. Nothing has been written when it is returned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StateError {
    /// Two tensors of one step differ in length.
    #[error("{name} has {got} elements, the master weights {expected}: they must be equal")]
    Length {
        /// The tensor that does not fit.
        name: &'static str,
        /// Its elements.
        got: usize,
        /// Elements of the master weights.
        expected: usize,
    },
    /// Moments of one byte come in whole blocks.
    #[error("{name} has {elements} elements and {scales} scales: one scale for each 256 elements")]
    Blocks {
        /// The tensor that does not fit.
        name: &'static str,
        /// Elements.
        elements: usize,
        /// Scales.
        scales: usize,
    },
    /// The optimizer needs a tensor that was not given.
    #[error("{name} is missing")]
    Absent {
        /// The tensor.
        name: &'static str,
    },
    /// A hyper-parameter cannot be.
    #[error("{name} = {value} is not {allowed}")]
    Hyper {
        /// Its name.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        allowed: &'static str,
    },
}

/// Refuses a hyper-parameter that is not in `[low, high)`; NaN is in no range.
pub(crate) fn in_range(
    name: &'static str,
    value: f32,
    low: f32,
    high: f32,
    allowed: &'static str,
) -> Result<(), StateError> {
    if value >= low && value < high {
        return Ok(());
    }
    Err(StateError::Hyper {
        name,
        value: value.into(),
        allowed,
    })
}

/// Master weights.
#[derive(Debug)]
pub enum Master<'a> {
    /// 4 bytes.
    F32(&'a mut [f32]),
    /// An f32 in two halves of 2 bytes, the upper one of which is the bf16 weight itself.
    Split {
        /// The bf16 weights.
        upper: &'a mut [u16],
        /// What they lack of the f32.
        lower: &'a mut [u16],
    },
    /// 2 bytes, rounded stochastically.
    Bf16(&'a mut [u16]),
}

/// A moment (running mean) of the gradient.
#[derive(Debug)]
pub enum Moment<'a> {
    /// 4 bytes.
    F32(&'a mut [f32]),
    /// 2 bytes, rounded stochastically.
    Bf16(&'a mut [u16]),
    /// 1 byte, rounded stochastically. Lengths are whole blocks.
    Int8 {
        /// The codes.
        codes: &'a mut [u8],
        /// One for each block.
        scales: &'a mut [u8],
    },
    /// None: SGD without momentum, and the second moment of SGD.
    Absent,
}

/// The gradient as it comes from the accelerator.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [u16]),
    /// f16.
    F16(&'a [u16]),
}

/// The copy of the new weights for the accelerator, rounded to nearest even.
#[derive(Debug)]
pub enum Output<'a> {
    /// The master copy is what the accelerator reads.
    Absent,
    /// bf16.
    Bf16(&'a mut [u16]),
    /// f16.
    F16(&'a mut [u16]),
}

/// All tensors of one step, of equal length.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// Read and written.
    pub master: Master<'a>,
    /// Read.
    pub gradient: Gradient<'a>,
    /// Read and written.
    pub first: Moment<'a>,
    /// Read and written.
    pub second: Moment<'a>,
    /// Written.
    pub output: Output<'a>,
}

/// Where the random bits of stochastic rounding come from: `formats::key`, and the index of the
/// first element, so that a part of a tensor gets the bits that it gets in the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Noise {
    /// Key of this tensor in this step.
    pub key: u32,
    /// Index of the first element.
    pub offset: u32,
}

impl Noise {
    /// 32 random bits of the element `at` of these tensors: 16 for each moment.
    #[inline(always)]
    pub(crate) fn bits(self, at: u32) -> u32 {
        counter_hash(self.offset.wrapping_add(at), self.key)
    }

    #[inline(always)]
    pub(crate) fn fill(self, at: usize, random: &mut [u32]) {
        for (i, bits) in (at as u32..).zip(random) {
            *bits = self.bits(i);
        }
    }
}

impl<'a> Tensors<'a> {
    /// Elements of the master weights.
    pub fn len(&self) -> usize {
        match &self.master {
            Master::F32(x) => x.len(),
            Master::Split { upper, .. } => upper.len(),
            Master::Bf16(x) => x.len(),
        }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refuses tensors of unequal length.
    ///
    /// # Errors
    /// [`StateError::Length`] with the first that does not fit.
    pub fn check(&self) -> Result<(), StateError> {
        let expected = self.len();
        let lower = match &self.master {
            Master::Split { lower, .. } => lower.len(),
            _ => expected,
        };
        let gradient = match self.gradient {
            Gradient::F32(x) => x.len(),
            Gradient::Bf16(x) | Gradient::F16(x) => x.len(),
        };
        let moment = |moment: &Moment<'_>| match moment {
            Moment::F32(x) => x.len(),
            Moment::Bf16(x) => x.len(),
            Moment::Int8 { codes, .. } => codes.len(),
            Moment::Absent => expected,
        };
        let output = match &self.output {
            Output::Absent => expected,
            Output::Bf16(x) | Output::F16(x) => x.len(),
        };
        for (name, got) in [
            ("the lower half", lower),
            ("the gradient", gradient),
            ("the first moment", moment(&self.first)),
            ("the second moment", moment(&self.second)),
            ("the output", output),
        ] {
            if got != expected {
                return Err(StateError::Length {
                    name,
                    got,
                    expected,
                });
            }
        }
        for (name, moment) in [
            ("the first moment", &self.first),
            ("the second moment", &self.second),
        ] {
            if let Moment::Int8 { codes, scales } = moment
                && codes.len() != scales.len() * BLOCK
            {
                return Err(StateError::Blocks {
                    name,
                    elements: codes.len(),
                    scales: scales.len(),
                });
            }
        }
        Ok(())
    }

    /// The first `middle` elements, which are whole blocks, and the rest. Panics past the end, as
    /// slices do.
    pub fn split_at(self, middle: usize) -> (Tensors<'a>, Tensors<'a>) {
        let (master, master_rest) = match self.master {
            Master::F32(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Master::F32(a), Master::F32(b))
            }
            Master::Bf16(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Master::Bf16(a), Master::Bf16(b))
            }
            Master::Split { upper, lower } => {
                let (upper, upper_rest) = upper.split_at_mut(middle);
                let (lower, lower_rest) = lower.split_at_mut(middle);
                let rest = Master::Split {
                    upper: upper_rest,
                    lower: lower_rest,
                };
                (Master::Split { upper, lower }, rest)
            }
        };
        let (gradient, gradient_rest) = match self.gradient {
            Gradient::F32(x) => {
                let (a, b) = x.split_at(middle);
                (Gradient::F32(a), Gradient::F32(b))
            }
            Gradient::Bf16(x) => {
                let (a, b) = x.split_at(middle);
                (Gradient::Bf16(a), Gradient::Bf16(b))
            }
            Gradient::F16(x) => {
                let (a, b) = x.split_at(middle);
                (Gradient::F16(a), Gradient::F16(b))
            }
        };
        let (first, first_rest) = self.first.split_at(middle);
        let (second, second_rest) = self.second.split_at(middle);
        let (output, output_rest) = match self.output {
            Output::Absent => (Output::Absent, Output::Absent),
            Output::Bf16(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Output::Bf16(a), Output::Bf16(b))
            }
            Output::F16(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Output::F16(a), Output::F16(b))
            }
        };
        (
            Tensors {
                master,
                gradient,
                first,
                second,
                output,
            },
            Tensors {
                master: master_rest,
                gradient: gradient_rest,
                first: first_rest,
                second: second_rest,
                output: output_rest,
            },
        )
    }
}

impl<'a> Moment<'a> {
    fn split_at(self, middle: usize) -> (Moment<'a>, Moment<'a>) {
        match self {
            Moment::Absent => (Moment::Absent, Moment::Absent),
            Moment::F32(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Moment::F32(a), Moment::F32(b))
            }
            Moment::Bf16(x) => {
                let (a, b) = x.split_at_mut(middle);
                (Moment::Bf16(a), Moment::Bf16(b))
            }
            Moment::Int8 { codes, scales } => {
                let (codes, codes_rest) = codes.split_at_mut(middle);
                let (scales, scales_rest) = scales.split_at_mut(middle / BLOCK);
                let rest = Moment::Int8 {
                    codes: codes_rest,
                    scales: scales_rest,
                };
                (Moment::Int8 { codes, scales }, rest)
            }
        }
    }

    /// One block, or the rest of a tensor that is none. `SIGNED`: it is the first moment.
    #[inline(always)]
    pub(crate) fn load<'b, const SIGNED: bool>(
        &'b mut self,
        at: usize,
        stage: &'b mut [f32],
    ) -> &'b mut [f32] {
        match self {
            Moment::F32(x) => &mut x[at..at + stage.len()],
            Moment::Bf16(x) => {
                widen(&x[at..at + stage.len()], stage, from_bf16);
                stage
            }
            Moment::Int8 { codes, scales } => {
                let scale = scales[at / BLOCK];
                let codes = &codes[at..at + stage.len()];
                if SIGNED {
                    let grid = Grid::new(scale);
                    widen(codes, stage, |code| from_first(code, grid));
                } else {
                    let grid = Grid::new(scale);
                    widen(codes, stage, |code| from_second(code, grid));
                }
                stage
            }
            Moment::Absent => stage,
        }
    }

    #[inline(always)]
    pub(crate) fn store<const SIGNED: bool>(&mut self, at: usize, stage: &[f32], random: &[u32]) {
        match self {
            Moment::Bf16(x) => {
                let x = &mut x[at..at + stage.len()];
                for ((to, from), random) in x.iter_mut().zip(stage).zip(random) {
                    let random = if SIGNED { *random } else { random >> 16 };
                    *to = to_bf16_stochastic(*from, random);
                }
            }
            Moment::Int8 { codes, scales } => {
                let codes = &mut codes[at..at + stage.len()];
                scales[at / BLOCK] = encode::<SIGNED>(codes, stage, random);
            }
            Moment::F32(_) | Moment::Absent => {}
        }
    }
}

impl Gradient<'_> {
    #[inline(always)]
    pub(crate) fn load<'b>(&'b self, at: usize, stage: &'b mut [f32]) -> &'b [f32] {
        match self {
            Gradient::F32(x) => &x[at..at + stage.len()],
            Gradient::Bf16(x) => {
                widen(&x[at..at + stage.len()], stage, from_bf16);
                stage
            }
            Gradient::F16(x) => {
                widen(&x[at..at + stage.len()], stage, from_f16);
                stage
            }
        }
    }
}

impl Master<'_> {
    #[inline(always)]
    pub(crate) fn load<'b>(&'b mut self, at: usize, stage: &'b mut [f32]) -> &'b mut [f32] {
        let end = at + stage.len();
        match self {
            Master::F32(x) => &mut x[at..end],
            Master::Bf16(x) => {
                widen(&x[at..end], stage, from_bf16);
                stage
            }
            Master::Split { upper, lower } => {
                let halves = upper[at..end].iter().zip(&lower[at..end]);
                for (to, (upper, lower)) in stage.iter_mut().zip(halves) {
                    *to = join(*upper, *lower);
                }
                stage
            }
        }
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, at: usize, stage: &[f32], random: &[u32]) {
        let end = at + stage.len();
        match self {
            Master::F32(_) => {}
            Master::Bf16(x) => {
                for ((to, from), random) in x[at..end].iter_mut().zip(stage).zip(random) {
                    // The moments have used up these bits: mix them once more.
                    *to = to_bf16_stochastic(*from, mix(*random));
                }
            }
            Master::Split { upper, lower } => {
                let halves = upper[at..end].iter_mut().zip(&mut lower[at..end]);
                for (from, (upper, lower)) in stage.iter().zip(halves) {
                    (*upper, *lower) = split(*from);
                }
            }
        }
    }
}

impl Output<'_> {
    #[inline(always)]
    pub(crate) fn store(&mut self, at: usize, weights: &[f32]) {
        match self {
            Output::Absent => {}
            Output::Bf16(x) => narrow(weights, &mut x[at..at + weights.len()], to_bf16),
            Output::F16(x) => narrow(weights, &mut x[at..at + weights.len()], to_f16),
        }
    }
}

/// The codes of a block of moments, and its scale.
#[inline(always)]
pub(crate) fn encode<const SIGNED: bool>(codes: &mut [u8], from: &[f32], random: &[u32]) -> u8 {
    let mut largest = 0;
    for x in from {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let pairs = codes.iter_mut().zip(from).zip(random);
    if SIGNED {
        let scale = Grid::<FIRST>::scale(largest);
        let grid = Grid::new(scale);
        pairs.for_each(|((to, from), random)| *to = to_first(*from, grid, *random));
        scale
    } else {
        let scale = Grid::<SECOND>::scale(largest);
        let grid = Grid::new(scale);
        pairs.for_each(|((to, from), random)| *to = to_second(*from, grid, random >> 16));
        scale
    }
}

#[inline(always)]
fn widen<T: Copy>(from: &[T], to: &mut [f32], convert: impl Fn(T) -> f32) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = convert(*from);
    }
}

#[inline(always)]
fn narrow(from: &[f32], to: &mut [u16], convert: impl Fn(f32) -> u16) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = convert(*from);
    }
}
