"""The three implementations of top-k select the same entries: reference, Rust, Triton."""

import os

import pytest
import torch

from evener.comm import topk

CASES = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "equal": lambda n, _: torch.ones(n),
    "zero": lambda n, _: torch.zeros(n),
    "ties": lambda n, g: torch.randn(n, generator=g).round(),
    "denormal": lambda n, g: torch.randn(n, generator=g) * 1e-41,
    "wide": lambda n, g: torch.exp(20 * torch.randn(n, generator=g)),
    "infinite": lambda n, g: torch.where(
        torch.rand(n, generator=g) < 0.02, -torch.inf, torch.randn(n, generator=g)
    ),
    "nan": lambda n, g: torch.where(
        torch.rand(n, generator=g) < 0.02, torch.nan, torch.randn(n, generator=g)
    ),
}


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(values.isnan(), torch.nan).view(torch.int32)


def check(case: str, n: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(n * 31 + k)
    gradient = CASES[case](n, generator).to(dtype)
    residual = torch.randn(n, generator=generator)
    want_residual = residual.clone()
    want = torch.empty(k), torch.empty(k, dtype=torch.int32)
    topk.select_reference(gradient.float(), want_residual, *want)

    have_residual = residual.to(device)
    values = torch.full((k,), 7.0, device=device)
    indices = torch.full((k,), -1, dtype=torch.int32, device=device)
    topk.select(gradient.to(device), have_residual, values, indices)
    assert torch.equal(indices.cpu(), want[1])
    # Bit by bit, but for which NaN it is: processors differ in that.
    assert torch.equal(bits(values.cpu()), bits(want[0]))
    assert torch.equal(have_residual.cpu(), want_residual)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 5), (4096, 40), (10007, 10007), (70001, 700)])
def test_rust_equals_the_reference(case: str, n: int, k: int) -> None:
    check(case, n, k, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    check("normal", 5000, 50, "cpu", dtype)


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
@pytest.mark.parametrize("n", [1, 33, 4096, 70001, 5_000_000])
def test_triton_equals_the_reference_on_a_gpu(case: str, n: int) -> None:
    for ratio in (0.001, 0.01, 1.0):
        check(case, n, topk.entries(n, ratio), "cuda")


INTERPRETED = """
import torch
from evener.comm import topk, triton_topk
from tests.comm.test_topk import CASES

triton_topk.PROGRAMS = 3
for case, make in CASES.items():
    for n, k in ((1, 1), (700, 7), (9001, 90), (9001, 9001)):
        generator = torch.Generator().manual_seed(n)
        gradient, residual = make(n, generator), torch.randn(n, generator=generator)
        want_residual = residual.clone()
        want = torch.empty(k), torch.empty(k, dtype=torch.int32)
        topk.select_reference(gradient, want_residual, *want)
        have = torch.full((k,), 7.0), torch.full((k,), -1, dtype=torch.int32)
        triton_topk.select(gradient, residual, *have)
        assert torch.equal(have[1], want[1]), (case, n, k)
        assert torch.equal(have[0].view(torch.int32), want[0].view(torch.int32)), (case, n, k)
        assert torch.equal(residual, want_residual), (case, n, k)
        out = torch.zeros(n)
        triton_topk.add_entries(out, have[0], have[1], 0.25)
        wanted = torch.zeros(n)
        wanted[want[1].long()] = want[0] * 0.25
        assert torch.equal(out.nan_to_num(), wanted.nan_to_num()), (case, n, k)
"""


def test_triton_kernels_in_the_interpreter() -> None:
    """The same kernels without a GPU: Triton's interpreter is chosen when triton is imported."""
    import subprocess
    import sys

    subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=150,
    )


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.comm import triton_topk as kernels

constants = {"BLOCK": kernels.BLOCK, "BINS": kernels.BINS, "SHIFT": 15, "ABOVE": 23}
types = {
    "gradient": "*bf16", "residual": "*fp32", "counts": "*i32", "state": "*i32", "above": "*i32",
    "equal": "*i32", "values": "*fp32", "indices": "*i32", "out": "*fp32", "n": "i32", "k": "i32",
    "scale": "fp32",
}
for kernel in (kernels._accumulate, kernels._count_digit, kernels._descend,
               kernels._count_taken, kernels._take, kernels._add_entries):
    own = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {n: "constexpr" if n in own else types[n] for n in kernel.arg_names}
    source = ASTSource(kernel, signature, own)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert len(made.asm["cubin"]) > 1000, kernel
"""


def test_triton_kernels_compile_for_hopper() -> None:
    """No GPU is needed to compile: what the interpreter accepts, the compiler may not."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=150)
