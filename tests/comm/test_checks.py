"""Checksums of weights: what they see, and that Triton's kernel gives the reference's number."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from evener.comm.codecs import checks

KERNEL = """
import sys, torch
from evener.comm.codecs import checks, triton_checks

device = torch.device(sys.argv[1])
for n in (1, 5, 4096, 4097, 9000):
    words = torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(n))
    words[0] = -(2**63)
    words = words.to(device)
    sum_ = checks.checksum_reference(words)
    off = torch.zeros(5, dtype=torch.int64, device=device)
    triton_checks.add(words, off[1])
    triton_checks.hold(words, sum_, off, 2)
    triton_checks.hold(words, sum_ + 3, off, 3)
    triton_checks.hold(words, sum_ - 1, off, 4)
    assert off.tolist() == [0, sum_.item(), 0, -3, 1], n
    told = torch.zeros(3, dtype=torch.int64, device=device)
    triton_checks.tell(words, off, told[1:])
    assert told.tolist() == [0, sum_.item(), 3] and not off.any(), n
    triton_checks.tell(words.view(torch.bfloat16), off, told.zero_())
    assert told.tolist() == [sum_.item(), 0, 0], n
for dtype in (torch.uint8, torch.bfloat16, torch.float32):
    for n in (1, 3, 1001, 4095, 9001):
        for start in (0, 1):  # aligned, and not
            chance = torch.Generator().manual_seed(n)
            bits = torch.randint(-128, 128, (4 * n + 4,), generator=chance)
            weights = bits.to(torch.int8).view(dtype)[start : start + n]
            want = checks.checksum_reference(weights).item()
            there = bits.to(torch.int8).to(device).view(dtype)[start : start + n]
            off = torch.zeros(2, dtype=torch.int64, device=device)
            triton_checks.add(there, off[1])
            assert off.tolist() == [0, want], (dtype, n, start)
            triton_checks.hold(there, off[1] + 5, off, 0)
            told = torch.zeros(2, dtype=torch.int64, device=device)
            triton_checks.tell(there, off, told)
            assert told.tolist() == [want, 2 - (want == 0)], (dtype, n, start)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.comm.codecs import triton_checks as t

types = {"weights": "*bf16", "n": "i32", "place": "i32", "many": "i32",
         "BLOCK": "constexpr", "MANY": "constexpr", "EACH": "constexpr"}
for kernel in (t._add, t._hold, t._tell):
    signature = {name: types.get(name, "*i64") for name in kernel.arg_names}
    values = {"BLOCK": t.BLOCK, "MANY": 64}
    for each, weights in ((1, "*bf16"), (2, "*fp32"), (4, "*bf16"), (8, "*u8")):
        values["EACH"], signature["weights"] = each, weights
        constants = {name: values[name] for name in kernel.arg_names if name in values}
        made = triton.compile(ASTSource(kernel, signature, constants),
                              target=GPUTarget("cuda", 90, 32))
        assert len(made.asm["cubin"]) > 1000
"""


def run(script: str, *arguments: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env={**os.environ, **env}, timeout=110,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_in_the_interpreter_equals_the_reference() -> None:
    stay = "from tests import interpreted; interpreted.stay()\n"
    run(stay + KERNEL, "cpu", TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_hopper() -> None:
    run(COMPILED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_on_a_gpu_equals_the_reference() -> None:
    run(KERNEL, "cuda")
    for n in (1, 3, 4, 1000, 1001):  # 1, 3 and 1001 have no whole number of words
        weights = torch.randn(n).bfloat16()
        assert checks.checksum(weights.cuda()).item() == checks.checksum(weights).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 33])
def test_every_bit_and_every_place_count(dtype: torch.dtype, n: int) -> None:
    weights = torch.randint(1, 200, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)
    stated = checks.checksum(weights)
    raw = checks.bits(weights)
    for place in range(n):
        for bit in range(8):  # of the first and the last byte
            for byte in (0, raw.element_size() - 1):
                other = raw.clone()
                other.view(torch.uint8).view(n, -1)[place, byte] ^= 1 << bit
                off = torch.zeros(2, dtype=torch.int64)
                checks.hold(other.view(dtype), stated, off, 1)
                assert off[1].item() and not off[0]
    off = torch.zeros(2, dtype=torch.int64)
    checks.hold(weights, stated, off, 0)
    assert not off.any()
    if n > 1 and not torch.equal(weights[:1], weights[-1:]):
        swapped = weights.clone()
        swapped[0], swapped[-1] = weights[-1].clone(), weights[0].clone()
        assert checks.checksum(swapped).item() != stated.item()
