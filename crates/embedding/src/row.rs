//! What lies where in a row: the values in their dtype, filled up to 4 bytes, then the optimizer's
//! slots in f32.

use crate::arena::{copy_floats, floats, floats_mut};
use crate::options::{Dtype, Options};
use evener_kernels::formats::{from_bf16, from_f16, to_bf16, to_f16};

/// The layout of a store's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Values per row.
    pub dim: usize,
    /// Data type of the values.
    pub dtype: Dtype,
    /// Values that the optimizer keeps.
    pub slots: usize,
}

impl Layout {
    /// The layout of a store with these options.
    pub fn of(options: &Options) -> Layout {
        Layout {
            dim: options.dim as usize,
            dtype: options.dtype,
            slots: options.optimizer.slots(options.dim as usize),
        }
    }

    /// Bytes of the values.
    pub fn value_bytes(self) -> usize {
        (self.dim * self.dtype.bytes()).next_multiple_of(4)
    }

    /// Bytes that carry something.
    pub fn bytes(self) -> usize {
        self.value_bytes() + self.slots * 4
    }

    /// Bytes from one row to the next: rows of some size begin on 16 bytes.
    pub fn stride(self) -> usize {
        match self.bytes() {
            small @ ..=32 => small,
            large => large.next_multiple_of(16),
        }
    }

    /// Reads the values.
    #[inline(always)]
    pub fn read(self, row: &[u8], out: &mut [f32]) {
        let row = &row[..self.dim * self.dtype.bytes()];
        match self.dtype {
            Dtype::F32 => copy_floats(row, out),
            Dtype::F16 => decode(row, out, from_f16),
            Dtype::Bf16 => decode(row, out, from_bf16),
        }
    }

    /// Writes the values.
    #[inline(always)]
    pub fn write(self, row: &mut [u8], values: &[f32]) {
        let row = &mut row[..self.dim * self.dtype.bytes()];
        match self.dtype {
            Dtype::F32 => {
                for (bytes, value) in row.chunks_exact_mut(4).zip(values) {
                    bytes.copy_from_slice(&value.to_ne_bytes());
                }
            }
            Dtype::F16 => encode(row, values, to_f16),
            Dtype::Bf16 => encode(row, values, to_bf16),
        }
    }

    /// Values and slots of a row, counted.
    pub fn width(self) -> usize {
        self.dim + self.slots
    }

    /// Values and slots as f32: [`Layout::width`] of them.
    pub fn unpack(self, row: &[u8], out: &mut [f32]) {
        let (values, slots) = out.split_at_mut(self.dim);
        self.read(row, values);
        slots.copy_from_slice(floats(&row[self.value_bytes()..self.bytes()]));
    }

    /// The bytes of a row, of what [`Layout::unpack`] gave.
    pub fn pack(self, whole: &[f32], row: &mut [u8]) {
        let (values, slots) = whole.split_at(self.dim);
        let (start, rest) = row.split_at_mut(self.value_bytes());
        // An odd number of halves leaves two bytes, which are zero in every row.
        start.fill(0);
        self.write(start, values);
        for (bytes, slot) in rest.chunks_exact_mut(4).zip(slots) {
            bytes.copy_from_slice(&slot.to_ne_bytes());
        }
    }

    /// Values and slots, to be changed. Halves are widened into `wide` first and narrowed after.
    #[inline(always)]
    pub fn change(
        self,
        row: &mut [u8],
        wide: &mut [f32],
        change: impl FnOnce(&mut [f32], &mut [f32]),
    ) {
        let (values, slots) = row.split_at_mut(self.value_bytes());
        let slots = floats_mut(&mut slots[..self.slots * 4]);
        if self.dtype == Dtype::F32 {
            change(floats_mut(values), slots);
        } else {
            self.read(values, wide);
            change(wide, slots);
            self.write(values, wide);
        }
    }
}

#[inline(always)]
fn decode(row: &[u8], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    for (value, bytes) in out.iter_mut().zip(row.chunks_exact(2)) {
        *value = convert(u16::from_le_bytes([bytes[0], bytes[1]]));
    }
}

#[inline(always)]
fn encode(row: &mut [u8], values: &[f32], convert: impl Fn(f32) -> u16) {
    for (value, bytes) in values.iter().zip(row.chunks_exact_mut(2)) {
        bytes.copy_from_slice(&convert(*value).to_le_bytes());
    }
}
