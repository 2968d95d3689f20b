"""Chunk-wise top-k: reference, Rust and Triton select the same entries and send the same bits."""

import pytest
import torch

from evener.comm.codecs import chunks
from evener.comm.codecs.payload import Payload
from tests.comm.cases import CASES, bits


def empty(n: int, k: int, device: str) -> tuple[torch.Tensor, Payload]:
    raw = torch.full((Payload.size(n, k),), 0x55, dtype=torch.uint8, device=device)
    return raw, Payload.of(raw, n, k)


def check(case: str, n: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(n * 31 + k)
    want_residual = torch.randn(n, generator=generator)
    have_residual = want_residual.to(device, copy=True)
    sent = []
    for _ in range(2):
        gradient = CASES[case](n, generator).to(dtype)
        _, want = empty(n, k, "cpu")
        raw, have = empty(n, k, device)
        chunks.select_reference(gradient.float(), want_residual, want)
        chunks.select(gradient.to(device), have_residual, have)
        assert torch.equal(have.indices.cpu().int(), want.indices.int())
        assert torch.equal(have.scales.cpu(), want.scales)
        assert torch.equal(bits(have.values), bits(want.values))
        assert torch.equal(have_residual.cpu(), want_residual)
        sent.append((raw, want))
    out = torch.full((n,), 3.0, device=device)
    chunks.add_in_order(torch.stack([raw for raw, _ in sent]), k, 0.5, out)
    total = torch.zeros(n)
    for _, payload in sent:
        chunks.add_reference(payload, 0.5, total)
    assert torch.equal(bits(out), bits(total))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (33, 40), (4096, 41), (4097, 41), (10007, 4096), (70001, 4)]
)
def test_rust_equals_the_reference(case: str, n: int, k: int) -> None:
    check(case, n, k, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    check("normal", 5000, 50, "cpu", dtype)


def test_empty() -> None:
    nothing = torch.empty(0)
    _, payload = empty(0, 41, "cpu")
    chunks.select(nothing, torch.empty(0), payload)
    chunks.add_in_order(torch.empty(2, 0, dtype=torch.uint8), 41, 1.0, nothing)


def test_every_chunk_sends_its_own_largest() -> None:
    """Where exact top-k would take all of one layer: each 4,096 entries get their share."""
    gradient = torch.cat([torch.full((4096,), 100.0), torch.arange(4096.0) / 4096])
    _, payload = empty(8192, 4, "cpu")
    chunks.select(gradient, torch.zeros(8192), payload)
    assert payload.indices.tolist() == [[0, 1, 2, 3], [4092, 4093, 4094, 4095]]


@pytest.mark.parametrize(("ratio", "k"), [(0.01, 41), (0.001, 4), (1e-9, 1), (1.0, 4096)])
def test_number_of_entries(ratio: float, k: int) -> None:
    assert chunks.entries(ratio) == k
    assert Payload.size(8192, k) == 2 * (4 + 4 * k)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 33, 4097, 70001, 1_000_000])
def test_triton_equals_the_reference_on_a_gpu(case: str, n: int) -> None:
    for k in (4, 41, 4096):
        check(case, n, k, "cuda")
    check(case, n, 41, "cuda", torch.bfloat16)
