"""The CPU kernels through Python: against plain torch, and what they refuse."""

import pytest
import torch

from evener.base import kernels as _kernels


def reference(gradient: torch.Tensor, residual: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest magnitudes of the sum, lowest index first among equals."""
    total = (residual + gradient).abs()
    order = torch.sort(total, descending=True, stable=True).indices[:k]
    return torch.sort(order).values


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 65537])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_topk_with_feedback_equals_a_stable_sort(n: int, share: float) -> None:
    generator = torch.Generator().manual_seed(n)
    gradient = torch.randn(n, generator=generator)
    residual = torch.randn(n, generator=generator).round()  # many equal magnitudes
    k = int(n * share)
    want = reference(gradient, residual, k)
    total = residual + gradient
    values, indices = torch.empty(k), torch.empty(k, dtype=torch.int32)
    _kernels.topk_with_feedback(gradient, residual, values, indices)
    assert torch.equal(indices.long(), want)
    assert torch.equal(values, total[want])
    # Nothing is lost: what was sent and what stayed add up to the sum, exactly.
    residual[want] += values
    assert torch.equal(residual, total)


def test_what_the_native_side_relies_on_is_checked() -> None:
    good = torch.zeros(4)
    out = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"gradient must be a contiguous torch\.float32"):
        _kernels.topk_with_feedback(torch.zeros(4, dtype=torch.float64), good, *out)
    with pytest.raises(ValueError, match="residual must be"):
        _kernels.topk_with_feedback(good, torch.zeros(8)[::2], *out)
    with pytest.raises(ValueError, match="residual has 3 elements, expected 4"):
        _kernels.topk_with_feedback(good, torch.zeros(3), *out)
    with pytest.raises(ValueError, match="indices must be"):
        _kernels.topk_with_feedback(good, good.clone(), out[0], out[0])
