"""INT4 in blocks: codes and residual are the whole gradient, within half a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.codecs import int4
from tests.comm.cases import CASES, bits


def plain(total: torch.Tensor) -> torch.Tensor:
    """What arrives, entry by entry, in Python's floats."""
    out = []
    for block in total.split(int4.BLOCK):
        if not block.isfinite().all():
            out.append(torch.full_like(block, torch.nan))
            continue
        largest = block.abs().max()
        if largest < 2.0**-100:
            out.append(torch.zeros_like(block))
            continue
        inverse, step = torch.tensor(7.0) / largest, largest / torch.tensor(7.0)
        out.append(torch.tensor([round(float(x * inverse)) for x in block]) * step)
    return torch.cat(out) if out else total


@pytest.mark.parametrize("case", [case for case in CASES if case != "huge"])
@pytest.mark.parametrize("n", [1, 33, 256, 1025])
def test_against_plain_arithmetic(case: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values, kept = CASES[case](n, generator), torch.randn(n, generator=generator) * 0.01
    residual, room = kept.clone(), int4.room(n)
    codes = torch.full((room // 2,), 99, dtype=torch.uint8)
    scales, out = torch.empty(room // int4.BLOCK), torch.empty(n)
    int4.quantize(values, residual, codes, scales)
    int4.dequantize_sum(codes[None], scales[None], 1.0, out)
    total = values + kept
    assert torch.equal(bits(out + 0.0), bits(plain(total) + 0.0))
    assert residual.isfinite().all()
    whole = out.isfinite()
    torch.testing.assert_close((out + residual)[whole], total[whole], atol=1e-30, rtol=1e-6)
    lost = ~whole & total.isfinite()
    assert torch.equal(residual[lost], total[lost]), "what is finite beside what is not is kept"


@given(st.integers(0, 2000), st.integers(1, 4), st.integers(-20, 20))
def test_sums_over_ranks(n: int, ranks: int, power: int) -> None:
    """No entry is further from the exact sum than half a step of each rank's."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(ranks, n, generator=generator) * 10.0**power
    room = int4.room(n)
    codes = torch.zeros(ranks, room // 2, dtype=torch.uint8)
    scales, out = torch.zeros(ranks, room // int4.BLOCK), torch.empty(n)
    for rank in range(ranks):
        int4.quantize(values[rank], torch.zeros(n), codes[rank], scales[rank])
    int4.dequantize_sum(codes, scales, 0.5, out)
    step = scales.sum(0).repeat_interleave(int4.BLOCK)[:n]
    assert ((out - values.sum(0) * 0.5).abs() <= 0.2501 * step + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_the_reference(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for case, make in CASES.items():
        for n in (1, 5001, 1 << 20):
            generator = torch.Generator().manual_seed(n)
            values, room = make(n, generator).to(dtype), int4.room(n)
            want, kept = torch.zeros(n), torch.randn(n, generator=generator) * 0.01
            want += kept
            have = kept.cuda()
            one = torch.empty(room // 2, dtype=torch.uint8), torch.empty(room // int4.BLOCK)
            other = tuple(torch.empty_like(t, device="cuda") for t in one)
            int4.quantize_reference(values, want, *one)
            int4.quantize(values.cuda(), have, *other)
            assert torch.equal(other[0].cpu(), one[0]), (case, n)
            assert torch.equal(bits(other[1]), bits(one[1])), (case, n)
            assert torch.equal(bits(have), bits(want)), (case, n)
            out, total = torch.empty(n, device="cuda"), torch.empty(n)
            int4.dequantize_sum(other[0][None], other[1][None], 0.5, out)
            int4.dequantize_sum_reference(one[0][None], one[1][None], 0.5, total)
            assert torch.equal(bits(out), bits(total)), (case, n)
