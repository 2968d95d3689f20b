"""The Triton kernels of resident rows: interpreted and compiled for Hopper, and on a GPU.

The first two run in a process of their own: Triton chooses its interpreter when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from evener.embedding import Options, RowWiseAdagrad, Sgd
from evener.embedding.torch import kernels
from evener.embedding.torch.rows import as_options

# A step must give the reference's bits with every optimizer, dim and dtype, a sum the same number.
CHECK = """
import sys, torch
from evener.embedding import *
from evener.embedding.torch import kernels, routes
from evener.embedding.torch.rows import as_options

OPTIMIZERS = [
    Sgd(), Sgd(weight_decay=0.2), Adagrad(), Adagrad(weight_decay=0.1), RowWiseAdagrad(),
    RowWiseAdagrad(weight_decay=0.1), RowWiseAdagrad(weight_decay=0.1, decoupled=True),
    Adam(), Adam(weight_decay=0.1), Adam(eps_hat=True), AdamW(), LazyAdam(),
    PartialRowWiseAdam(weight_decay=0.1), Lamb(weight_decay=0.1),
]
torch.set_num_threads(1)
device = torch.device(sys.argv[1])
for dim, dtype in CASES:
    for optimizer in OPTIMIZERS:
        kind = as_options(Options(dim, optimizer=optimizer, dtype=dtype))["optimizer"]
        assert kernels.try_step(dim, dtype, kind, device), (dim, dtype, optimizer)
for dim in DIMS:
    assert kernels.try_add(dim, device), dim
    assert kernels.try_pool(dim, device), dim
assert kernels.try_number(device)
assert routes.try_routes(device)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.embedding.torch import triton_bags, triton_route, triton_step as t

KINDS = {
    **dict.fromkeys(
        ("places", "version", "frequency", "index", "starts", "columns", "tables", "limits", "head",
         "mask", "inputs", "bases", "counts", "values"), "*i64"),
    **dict.fromkeys(("of", "ids", "ends", "largest"), "*i32"),
    **dict.fromkeys(("n", "step", "batch", "stride"), "i32"),
    **dict.fromkeys(
        ("gradients", "weight", "slots", "bags", "pieces", "out", "rows", "given"), "*fp32"),
}

def compile(kernel, kinds=(), **constants):
    known = KINDS | dict(kinds)
    signature = {
        name: "constexpr" if name in constants else known.get(name, "fp32")
        for name in kernel.arg_names
    }
    made = triton.compile(ASTSource(kernel, signature, constants),
                          target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert len(made.asm["cubin"]) > 1000
    assert "fma" not in made.asm["ptx"], "a multiplication and an addition were contracted"

for kind in ("sgd", "adagrad", "row_wise_adagrad", "partial_row_wise_adam", "lamb", "adam"):
    compile(t._step, DIM=40, SLOTS=80, KIND=kind, DECAYS=True, DECOUPLED=False, DTYPE="bf16",
            ROWS=t.ROWS, WIDE=64)
compile(t._pieces, DIM=128, PART=t.PART, BLOCK=128)
compile(t._whole, DIM=128, PART=t.PART, BLOCK=128, TILE=t.TILE)
for named in (True, False):
    compile(triton_bags._pool, DIM=128, BLOCK=128, NAMED=named, PUT=named)
compile(triton_bags._take, DIM=128, BLOCK=128, SAMPLES=triton_bags.SAMPLES, BOUND=True)
compile(triton_bags._number, {"out": "*i32"}, BLOCK=32)
size = dict(BLOCK=triton_route.BLOCK, SPREAD=triton_route.SPREAD)
compile(triton_route._look, INPUTS=26, **size)
compile(triton_route._tell, INPUTS=26, BLOCK=32)
compile(triton_route._fill, {"out": "*i32"}, **size)
"""


def run(script: str, *arguments: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env={**os.environ, **env}, timeout=170,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_the_kernels_in_the_interpreter_equal_the_references() -> None:
    cases = "CASES, DIMS = [(5, 'f32'), (18, 'bf16'), (18, 'f16')], [5, 130]\n"
    stay = "from tests import interpreted; interpreted.stay()\n"
    run(cases + stay + CHECK, "cpu", TRITON_INTERPRET="1")


@pytest.mark.timeout(180)
def test_the_kernels_compile_for_hopper() -> None:
    run(COMPILED)


def test_a_kernel_that_gives_other_bits_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = as_options(Options(4, optimizer=RowWiseAdagrad(lr=0.1)))["optimizer"]

    def other(rows: kernels.Held, places: torch.Tensor, *rest: object) -> None:
        kernels.step_reference(rows, places, *rest)  # type: ignore[arg-type]
        rows.weight[places[0], 0] += 1e-6

    module = mock.Mock(step=other)
    name = "evener.embedding.torch.triton_step"
    with (
        mock.patch.dict(sys.modules, {name: module}),
        mock.patch.object(
            sys.modules["evener.embedding.torch"], "triton_step", module, create=True
        ),
    ):
        assert not kernels.tried(
            "it", lambda: kernels.try_step(4, "f32", optimizer, torch.device("cpu"))
        )
    assert "no kernel for it" in caplog.text and "other numbers" in caplog.text


def test_kernels_of_one_kind_are_tried_once() -> None:
    """Learning rates do not count: schedulers change them."""
    kinds = {kernels._kind(as_options(Options(4, optimizer=each))) for each in (Sgd(0.1), Sgd(0.2))}
    assert len(kinds) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_on_a_gpu_equal_the_references() -> None:
    cases = (
        "CASES, DIMS = [(d, t) for d in (5, 16, 128) for t in ('f32', 'f16', 'bf16')], [5, 128]\n"
    )
    run(cases + CHECK, "cuda")
