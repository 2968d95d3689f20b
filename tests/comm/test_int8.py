"""INT8 in blocks: reference, Rust and Triton give the same codes; rounding is fair."""

import pytest
import torch

from evener.comm.codecs import int8
from tests.comm.cases import CASES, bits


def check(case: str, n: int, device: str, feedback: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    kept = torch.randn(n, generator=generator) * 0.01
    want_residual = kept.clone() if feedback else None
    have_residual = kept.to(device, copy=True) if feedback else None
    room = int8.room(n)
    sent = []
    for step in range(2):
        values = CASES[case](n, generator).to(dtype)
        key = int8.key(step, 3)
        want = torch.empty(room, dtype=torch.int8), torch.empty(room // int8.BLOCK)
        have = tuple(torch.full_like(t, 9, device=device) for t in want)
        int8.quantize_reference(values, want_residual, *want, key)
        int8.quantize(values.to(device), have_residual, *have, key)
        assert torch.equal(have[0].cpu(), want[0])
        assert torch.equal(bits(have[1]), bits(want[1]))
        if feedback:
            assert torch.equal(have_residual.cpu(), want_residual)  # type: ignore[union-attr]
        sent.append(have)
    codes, scales = (torch.stack(parts) for parts in zip(*sent, strict=True))
    out, total = torch.full((n,), 5.0, device=device), torch.empty(n)
    int8.dequantize_sum(codes, scales, 0.5, out)
    int8.dequantize_sum_reference(codes.cpu(), scales.cpu(), 0.5, total)
    assert torch.equal(bits(out), bits(total))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [0, 1, 33, 1024, 5001])
@pytest.mark.parametrize("feedback", [True, False])
def test_rust_equals_the_reference(case: str, n: int, feedback: bool) -> None:
    check(case, n, "cpu", feedback, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    check("normal", 5000, "cpu", True, dtype)


def test_rounding_is_right_on_the_mean() -> None:
    """300 roundings of one tensor: the mean is nearer than one rounding could be."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    step = values.abs().view(-1, int8.BLOCK).amax(1).repeat_interleave(int8.BLOCK) / 127
    codes, scales = torch.empty(4096, dtype=torch.int8), torch.empty(4)
    total, out = torch.zeros(4096), torch.empty(4096)
    for i in range(300):
        int8.quantize(values, None, codes, scales, int8.key(i))
        int8.dequantize_sum(codes[None], scales[None], 1.0, out)
        assert ((out - values).abs() <= step * 1.001).all()
        total += out
    # The error of the mean of 300 uniform errors is below 0.3 steps by ten deviations.
    assert ((total / 300 - values).abs() < 0.3 * step).all()
    assert ((total / 300 - values) / step).mean().abs() < 0.01


def test_what_is_not_finite_arrives_and_is_not_kept() -> None:
    values = torch.ones(2048)
    values[3], values[7] = torch.inf, torch.nan
    residual, codes, scales = torch.zeros(2048), torch.empty(2048, dtype=torch.int8), torch.empty(2)
    int8.quantize(values, residual, codes, scales, 1)
    out = torch.empty(2048)
    int8.dequantize_sum(codes[None], scales[None], 1.0, out)
    assert out[:1024].isnan().all() and out[1024:].isfinite().all()
    assert residual[[3, 7]].tolist() == [0.0, 0.0]
    assert residual[:3].tolist() == [1.0] * 3  # kept back: its block was not delivered


def test_keys_differ() -> None:
    keys = {
        int8.key(step, bucket, rank)
        for step in range(50)
        for bucket in range(5)
        for rank in range(4)
    }
    assert len(keys) == 1000
    assert all(0 <= key < 1 << 32 for key in keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [0, 1, 33, 4097, 1_000_001])
def test_triton_equals_the_reference_on_a_gpu(case: str, n: int) -> None:
    for feedback in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            check(case, n, "cuda", feedback, dtype)
