"""FP16 and BF16, scaled in the same pass: Rust and Triton against plain torch."""

import pytest
import torch

from evener.comm.codecs import casts
from tests.comm.cases import CASES, bits


def check(case: str, n: int, half: torch.dtype, device: str) -> None:
    values = CASES[case](n, torch.Generator().manual_seed(n)).to(device)
    for scale in (1.0, 0.25, 1 / 3):
        have, want = torch.empty(n, dtype=half, device=device), torch.empty(n, dtype=half)
        casts.narrow(values, scale, have)
        casts.narrow_reference(values.cpu(), scale, want)
        assert torch.equal(bits(have), bits(want))
        back, wanted = torch.empty(n, device=device), torch.empty(n)
        casts.widen(have, scale, back)
        casts.widen_reference(want, scale, wanted)
        assert torch.equal(bits(back), bits(wanted))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [0, 1, 4099])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_rust_equals_the_reference(case: str, n: int, half: torch.dtype) -> None:
    check(case, n, half, "cpu")


def test_the_scale_comes_before_the_cast() -> None:
    out = torch.empty(1, dtype=torch.float16)
    casts.narrow(torch.tensor([80_000.0]), 0.5, out)
    assert out.item() == 40_000.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_triton_equals_the_reference_on_a_gpu(case: str, half: torch.dtype) -> None:
    for n in (0, 1, 4099, 1_000_001):
        check(case, n, half, "cuda")
