"""The Triton kernels: interpreted and compiled for Hopper where there is no GPU, and on one.

The first two run in a process of their own: Triton chooses its interpreter when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from evener.moe import gate, grouped, permute
from tests.moe import dense

CHECK = """
import torch
from evener.moe import gate, grouped, permute, triton_gate, triton_grouped, triton_permute

def close(have, want, rows=slice(None)):
    have, want = have[rows].float(), want[rows].float()
    assert (have - want).norm() <= TOLERANCE[DTYPE] * want.norm() + 1e-6, (have, want)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

def same(have, want):
    for a, b in zip((have.rows, have.source, have.ends), (want.rows, want.source, want.ends)):
        assert torch.equal(a, b), (a, b)

def check(tokens, slots, experts, width, inner, capacity):
    torch.manual_seed(tokens)
    to = torch.stack([torch.randperm(experts, device=DEVICE)[:slots] for _ in range(tokens)])
    to[torch.rand(to.shape, device=DEVICE) < 0.2] = -1
    to[to == 0] = -1  # an expert without rows
    want = permute.positions_reference(to, experts, capacity)
    at = triton_permute.positions(to, experts, capacity)
    same(at, want)
    used = int(want.ends[-1])
    x = torch.randn(tokens, width, device=DEVICE).to(DTYPE)
    rows = triton_permute.gather(x, at.source, slots)
    assert torch.equal(rows, permute.gather_reference(x, want))
    whole = torch.arange(tokens * 8, dtype=torch.int32, device=DEVICE).view(tokens, 8)
    assert torch.equal(triton_permute.gather(whole, at.source, slots),
                       permute.gather_reference(whole, want))
    y = torch.randn(len(at.source), width + 8, device=DEVICE).to(DTYPE)[:, :width]
    y[used:] = torch.nan
    close(triton_permute.combine(y, at.rows), permute.combine_reference(y, want))
    weights = torch.rand(to.shape, device=DEVICE)
    both = torch.randn(len(at.source), 2 * inner, device=DEVICE).to(DTYPE)
    silu = torch.nn.functional.silu
    hidden = triton_gate.forward(both, weights, at)
    close(hidden, gate.forward_reference(both, weights, want, silu), slice(used))
    come = torch.randn_like(hidden)
    mine = triton_gate.backward(both, weights, at, come.clone())
    theirs = gate.backward_reference(both, weights, want, silu, come)
    close(mine[0], theirs[0], slice(used))
    close(mine[1], theirs[1], slice(used))
    close(mine[2], theirs[2])
    matrices = torch.randn(experts, width, inner, device=DEVICE).to(DTYPE)
    for turned in (matrices, matrices.transpose(1, 2).contiguous().transpose(1, 2)):
        close(triton_grouped.times(x := rows, turned, at.ends),
              grouped.times_reference(x, turned, at.ends), slice(used))
    close(triton_grouped.outer(rows, hidden, at.ends),
          grouped.outer_reference(rows, hidden, at.ends))

for shape in SHAPES:
    check(*shape)
"""

# The interpreter's loops over bounds that are arguments fail with numpy 2.4: an array of one
# element is no index any more.
INTERPRETER = """
import torch
from triton.runtime import interpreter
from tests import interpreted
torch.set_num_threads(1)
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
interpreter._patch_lang_tensor = patched
interpreted.stay()
"""

INTERPRETED = (
    INTERPRETER + "DEVICE, DTYPE = 'cpu', torch.float32\n"
    "SHAPES = [(150, 2, 5, 24, 40, None), (150, 2, 5, 24, 40, 30), (3, 1, 3, 16, 16, None)]\n"
    + CHECK
)

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.moe import triton_gate, triton_grouped, triton_permute

INTS = {"to", "within", "counts", "starts", "firsts", "rows", "source", "ends"}
DATA = {"x", "y", "out", "both", "gradient", "to_both", "matrices", "a", "b"}
FLOATS = {"weights", "to_weights"}

def compile(kernel, data="*bf16", **constants):
    signature = {
        name: "constexpr" if name in constants else "*i32" if name in INTS
        else data if name in DATA else "*fp32" if name in FLOATS else "i32"
        for name in kernel.arg_names
    }
    made = triton.compile(ASTSource(kernel, signature, constants),
                          target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert len(made.asm["cubin"]) > 1000

import triton.language as tl
compile(triton_permute._count, BLOCK=128)
compile(triton_permute._place, BLOCK=128, CAPPED=True)
compile(triton_permute._gather, BLOCK=2048)
compile(triton_permute._gather, "*i32", BLOCK=2048)
compile(triton_permute._combine, SLOTS=6, WIDE=tl.float32, BLOCK=1024)
compile(triton_gate._forward, BLOCK=1024)
compile(triton_gate._backward, BLOCK=1024)
compile(triton_grouped._times, EXPERTS=64, M=128, N=128, K=64)
compile(triton_grouped._outer, ROWS=64, N=128, K=128)
"""


def run(script: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **env}, timeout=170,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_in_the_interpreter_equal_the_references() -> None:
    run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_hopper() -> None:
    run(COMPILED)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernels_on_a_gpu_equal_the_references(dtype: str) -> None:
    shapes = [
        (5000, 2, 8, 256, 512, None), (3000, 6, 64, 128, 72, 200), (777, 8, 256, 96, 64, None),
    ]  # fmt: skip
    run(f"import torch\nDEVICE, DTYPE = 'cuda', torch.{dtype}\nSHAPES = {shapes}\n" + CHECK)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(4096, 512, 1024, 8, 2), (4096, 256, 128, 64, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_layer_on_a_gpu_equals_the_dense_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, x, chosen, weights = dense.case(*shape, dtype, device="cuda", absent=True)
    seed = torch.randn_like(x)
    of = (x, weights, layer.gate_up_proj, layer.down_proj)
    ours, *mine = (out := layer(x, chosen, weights)), *dense.gradients(out, seed, *of)
    wide = layer.double()
    others = (x.detach().double().requires_grad_(), weights, wide.gate_up_proj, wide.down_proj)
    out = dense.dense(others[0], chosen, weights.double(), wide)
    theirs, *wanted = out, *dense.gradients(out, seed.double(), *others)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float64: 1e-6}[dtype]
    for one, other in zip((ours, *mine), (theirs, *wanted), strict=True):
        assert (one.double() - other).norm() < tolerance * other.norm()


@pytest.mark.gpu
@needs_gpu
def test_the_host_waits_for_nothing() -> None:
    """Forward and backward of a layer enqueue only: no sync."""
    if grouped.way(torch.empty(8, 8, device="cuda", dtype=torch.bfloat16)) == "loop":
        pytest.skip("this GPU multiplies in a loop")
    layer, x, chosen, weights = dense.case(512, 256, 512, 8, 2, torch.bfloat16, device="cuda")
    layer(x, chosen, weights).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, chosen, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ways_on_a_cpu() -> None:
    assert grouped.way(torch.zeros(2, 2)) == "loop"
    assert gate.is_silu(torch.nn.SiLU()) and not gate.is_silu(torch.nn.functional.gelu)
    assert permute.positions(torch.zeros(0, 2, dtype=torch.int32), 3).ends.tolist() == [0] * 3
