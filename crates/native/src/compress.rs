//! The compressors' kernels for Python. `evener.base.kernels` is the only caller; it has checked devices,
//! dtypes and contiguity, and holds the tensors until a call returns. All are addresses of contiguous
//! CPU memory, and no two that are written overlap.

use crate::Span;
use evener_kernels::casts::{self, Half};
use evener_kernels::{chunks, differences, int8};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

fn span(address: usize, length: usize) -> Span {
    Span { address, length }
}

/// Room for `k` entries in each chunk of `elements`.
fn places(elements: usize, k: usize) -> PyResult<(usize, usize)> {
    let count = elements.div_ceil(chunks::CHUNK);
    let all = count
        .checked_mul(k)
        .ok_or_else(|| PyValueError::new_err(format!("k = {k} is too large")))?;
    Ok((count, all))
}

/// `evener_kernels::chunks::select`: f32 gradient and residual of `elements`; f32 scales, one a chunk;
/// f16 values and u16 indices, `k` a chunk.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one a tensor")]
pub fn chunks_select(
    py: Python<'_>,
    gradient: usize,
    residual: usize,
    elements: usize,
    k: usize,
    scales: usize,
    values: usize,
    indices: usize,
) -> PyResult<()> {
    let (count, all) = places(elements, k)?;
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            let payload = chunks::Payload {
                scales: span(scales, count).write(),
                values: span(values, all).write(),
                indices: span(indices, all).write(),
            };
            chunks::select(
                span(gradient, elements).read(),
                span(residual, elements).write(),
                k,
                payload,
            )
        }
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// `evener_kernels::chunks::add`: adds what one rank sent to the f32 `out` of `elements`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one a tensor")]
pub fn chunks_add(
    py: Python<'_>,
    scales: usize,
    values: usize,
    indices: usize,
    k: usize,
    factor: f32,
    out: usize,
    elements: usize,
) -> PyResult<()> {
    let (count, all) = places(elements, k)?;
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            let payload = chunks::Payload {
                scales: span(scales, count).read(),
                values: span(values, all).read(),
                indices: span(indices, all).read(),
            };
            chunks::add(&payload, k, factor, span(out, elements).write())
        }
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// `evener_kernels::int8::quantize`: f32 values of `elements`, f32 residual of as many or address 0,
/// `room` codes, one f32 scale a block.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one a tensor")]
pub fn int8_quantize(
    py: Python<'_>,
    values: usize,
    residual: usize,
    elements: usize,
    codes: usize,
    room: usize,
    scales: usize,
    key: u32,
) -> PyResult<()> {
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            let residual = (residual != 0).then(|| span(residual, elements).write());
            int8::quantize(
                span(values, elements).read(),
                residual,
                span(codes, room).write(),
                span(scales, room / int8::BLOCK).write(),
                key,
            )
        }
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// `evener_kernels::int8::dequantize_sum`: `room` codes and their scales for each of `peers`, into the
/// f32 `out` of `elements`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one a tensor")]
pub fn int8_dequantize_sum(
    py: Python<'_>,
    codes: usize,
    scales: usize,
    room: usize,
    peers: usize,
    factor: f32,
    out: usize,
    elements: usize,
) -> PyResult<()> {
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            int8::dequantize_sum(
                span(codes, room * peers).read(),
                span(scales, room / int8::BLOCK * peers).read(),
                peers,
                factor,
                span(out, elements).write(),
            )
        }
    })
    .map_err(|error| PyValueError::new_err(error.to_string()))
}

fn half(name: &str) -> PyResult<Half> {
    match name {
        "f16" => Ok(Half::F16),
        "bf16" => Ok(Half::Bf16),
        other => Err(PyValueError::new_err(format!("no 16-bit form {other:?}"))),
    }
}

/// `evener_kernels::casts::narrow`: `elements` f32 to f16 or bf16, scaled.
#[pyfunction]
pub fn cast_narrow(
    py: Python<'_>,
    values: usize,
    elements: usize,
    scale: f32,
    form: &str,
    out: usize,
) -> PyResult<()> {
    let form = half(form)?;
    // SAFETY: see the head of this file.
    py.detach(|| unsafe {
        casts::narrow(
            span(values, elements).read(),
            scale,
            form,
            span(out, elements).write(),
        );
    });
    Ok(())
}

/// `evener_kernels::casts::widen`: `elements` f16 or bf16 to f32, scaled.
#[pyfunction]
pub fn cast_widen(
    py: Python<'_>,
    values: usize,
    elements: usize,
    scale: f32,
    form: &str,
    out: usize,
) -> PyResult<()> {
    let form = half(form)?;
    // SAFETY: see the head of this file.
    py.detach(|| unsafe {
        casts::widen(
            span(values, elements).read(),
            scale,
            form,
            span(out, elements).write(),
        );
    });
    Ok(())
}

fn refused(error: differences::DifferenceError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// `evener_kernels::differences::plan`: `elements` weights of 16 bits each, one i32 header a tile.
#[pyfunction]
pub fn differences_plan(
    py: Python<'_>,
    new: usize,
    old: usize,
    elements: usize,
    shift: u32,
    mask: u32,
    headers: usize,
) -> PyResult<()> {
    let exponent = differences::Exponent { shift, mask };
    let tiles = elements.div_ceil(differences::TILE);
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            differences::plan(
                span(new, elements).read(),
                span(old, elements).read(),
                exponent,
                span(headers, tiles).write(),
            )
        }
    })
    .map_err(refused)
}

/// `evener_kernels::differences::write`, to `words` i32 at `out`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "one a tensor")]
pub fn differences_write(
    py: Python<'_>,
    new: usize,
    old: usize,
    elements: usize,
    shift: u32,
    mask: u32,
    headers: usize,
    out: usize,
    words: usize,
) -> PyResult<()> {
    let exponent = differences::Exponent { shift, mask };
    let tiles = elements.div_ceil(differences::TILE);
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            differences::write(
                span(new, elements).read(),
                span(old, elements).read(),
                exponent,
                span(headers, tiles).read(),
                span(out, words).write(),
            )
        }
    })
    .map_err(refused)
}

/// `evener_kernels::differences::read`, of `words` i32 at `message`.
#[pyfunction]
pub fn differences_read(
    py: Python<'_>,
    message: usize,
    words: usize,
    shift: u32,
    mask: u32,
    weights: usize,
    elements: usize,
) -> PyResult<()> {
    let exponent = differences::Exponent { shift, mask };
    py.detach(|| {
        // SAFETY: see the head of this file.
        unsafe {
            differences::read(
                span(message, words).read(),
                exponent,
                span(weights, elements).write(),
            )
        }
    })
    .map_err(refused)
}
