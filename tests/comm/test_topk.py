"""The three implementations of top-k select the same entries: reference, Rust, Triton."""

import pytest
import torch

from evener.comm.codecs import topk
from tests.comm.cases import CASES, bits


def check(
    case: str,
    n: int,
    k: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    sent: torch.dtype = torch.float32,
) -> None:
    """Three steps with one residual."""
    generator = torch.Generator().manual_seed(n * 31 + k)
    want_residual = torch.randn(n, generator=generator)
    have_residual = want_residual.to(device, copy=True)
    for _ in range(3):
        gradient = CASES[case](n, generator).to(dtype)
        want = torch.empty(k, dtype=sent), torch.empty(k, dtype=torch.int32)
        topk.select_reference(gradient.float(), want_residual, *want)
        values = torch.full((k,), 7.0, device=device, dtype=sent)
        indices = torch.full((k,), -1, dtype=torch.int32, device=device)
        topk.select(gradient.to(device), have_residual, values, indices)
        if device != "cpu":  # a GPU writes them as they come
            indices, order = torch.sort(indices)
            values = values[order]
        assert torch.equal(indices.cpu(), want[1])
        assert torch.equal(bits(values), bits(want[0]))
        assert torch.equal(have_residual.cpu(), want_residual)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 5), (4096, 40), (10007, 10007), (70001, 700)])
def test_rust_equals_the_reference(case: str, n: int, k: int) -> None:
    check(case, n, k, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    check("normal", 5000, 50, "cpu", dtype)


@pytest.mark.parametrize("case", CASES)
def test_values_of_half_precision(case: str) -> None:
    check(case, 5000, 50, "cpu", sent=torch.float16)


def test_adding_entries_scales_and_leaves_the_rest() -> None:
    out = torch.arange(6, dtype=torch.float32)
    topk.add_entries(out, torch.tensor([2.0, -4.0]), torch.tensor([5, 1], dtype=torch.int32), 0.5)
    assert out.tolist() == [0.0, -1.0, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("n", "ratio", "k"), [(100, 0.01, 1), (99, 0.01, 1), (1, 0.001, 1), (0, 0.5, 0), (8, 1.0, 8)]
)
def test_number_of_entries(n: int, ratio: float, k: int) -> None:
    assert topk.entries(n, ratio) == k


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 33, 70001, 1_000_000])
def test_triton_equals_the_reference_on_a_gpu(case: str, n: int) -> None:
    for ratio in (0.001, 0.01, 1.0):
        check(case, n, topk.entries(n, ratio), "cuda")
    check(case, n, topk.entries(n, 0.01), "cuda", torch.bfloat16, torch.float16)
