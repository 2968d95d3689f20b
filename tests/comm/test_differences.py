"""Weights as differences: any 16 bits arrive as they were, and all implementations agree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.comm.codecs import differences, rice

KINDS = [torch.bfloat16, torch.float16]


def any_bits(n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    bits = torch.randint(-32768, 32768, (n,), generator=drawn, dtype=torch.int16)
    return bits.view(dtype)


def moved(old: torch.Tensor, seed: int, share: float, by: int) -> torch.Tensor:
    """Some weights moved by a few ulps, and a few that jump anywhere."""
    drawn = torch.Generator().manual_seed(seed)
    bits = old.view(torch.int16).clone()
    which = torch.rand(bits.shape, generator=drawn) < share
    steps = torch.randint(-by, by + 1, bits.shape, generator=drawn, dtype=torch.int16)
    bits += torch.where(which, steps, torch.zeros_like(steps))
    jumps = torch.rand(bits.shape, generator=drawn) < 0.01
    return torch.where(
        jumps, any_bits(bits.numel(), seed + 1, torch.bfloat16).view(torch.int16), bits
    ).view(old.dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def message(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    headers = differences.plan(new, old)
    said = torch.full((3,), 5)
    first = differences.places(headers, said)
    assert said.tolist() == [int(differences.size(headers)), 0, 0]
    found = torch.full((int(said[0]),), -7, dtype=torch.int32)
    differences.write(new, old, headers, first, found)
    return found


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 20_000),
    seed=st.integers(0, 1 << 20),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    by=st.sampled_from([1, 3, 300, 20_000]),
    dtype=st.sampled_from(KINDS),
)
def test_what_is_read_is_what_was_written(
    n: int, seed: int, share: float, by: int, dtype: torch.dtype
) -> None:
    old = any_bits(n, seed, dtype)
    new = moved(old, seed, share, by)
    weights = old.clone()
    differences.read(message(new, old), weights)
    assert same(weights, new)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("n", [1, 33, 8191, 8193, 20_000])
def test_the_reference_writes_and_reads_the_same_bits(n: int, dtype: torch.dtype) -> None:
    old = any_bits(n, n, dtype)
    new = moved(old, n, 0.5, 5)
    new[: n // 2] = old[: n // 2]
    sent = message(new, old)
    headers = differences.plan_reference(new, old)
    assert torch.equal(headers, differences.plan(new, old))
    plain = torch.full_like(sent, 5)
    differences.write_reference(new, old, headers, plain)
    assert torch.equal(plain, sent)
    weights = old.clone()
    differences.read_reference(sent, weights)
    assert same(weights, new)


def test_every_pattern_arrives() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for old in (every.flip(0), torch.zeros_like(every), torch.full_like(every, float("nan"))):
        weights = old.clone()
        differences.read(message(every, old), weights)
        assert same(weights, every)


def test_nothing_changed_is_headers_alone() -> None:
    old = any_bits(100_000, 1, torch.bfloat16)
    assert message(old, old).numel() == rice.tiles(100_000)


def stepped(n: int, seed: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 weights after and before a step of this size; float32 ones lie behind them."""
    drawn = torch.Generator().manual_seed(seed)
    master = torch.randn(n, generator=drawn) * 0.02
    step = torch.randn(n, generator=drawn) * rate
    return (master + step).bfloat16(), master.bfloat16()


@pytest.mark.parametrize(
    # `entropy`: bits of the distance in ulps, given the old exponent.
    ("rate", "entropy", "most"),
    [(6e-5, 2.3, 2.65), (1e-5, 0.9, 1.22), (1e-6, 0.2, 0.52)],
)
def test_a_step_of_training_takes_a_few_bits(rate: float, entropy: float, most: float) -> None:
    new, old = stepped(200_000, 0, rate)
    found = message(new, old)
    assert entropy < 32 * found.numel() / 200_000 < most
    weights = old.clone()
    differences.read(found, weights)
    assert same(weights, new)


@pytest.mark.parametrize("rate", [1e-4, 1e-5, 1e-6])
def test_grouped_tiles_are_the_same_bits_too(rate: float) -> None:
    new, old = stepped(20_000, 1, rate)
    headers = differences.plan_reference(new, old)
    assert torch.equal(headers, differences.plan(new, old))
    assert (headers & 512 > 0).all() == (rate < 1e-4), "both kinds are looked at"
    sent = message(new, old)
    plain = torch.full_like(sent, 5)
    differences.write_reference(new, old, headers, plain)
    assert torch.equal(plain, sent)
    weights = old.clone()
    differences.read_reference(sent, weights)
    assert same(weights, new)


def test_a_grouped_tile_carries_a_jump_nan_and_minus_zero() -> None:
    new, old = stepped(8192, 2, 1e-6)
    new, old = new.clone(), old.clone()
    new[5], new[300], new[8000], old[8191] = float("nan"), -0.0, 1e30, 0.0
    headers = differences.plan(new, old)
    assert bool((headers & 512 > 0).all())
    weights = old.clone()
    differences.read(message(new, old), weights)
    assert same(weights, new)


def test_a_cut_message_is_refused() -> None:
    old = any_bits(20_000, 2, torch.bfloat16)
    sent = message(moved(old, 3, 1.0, 5), old)
    with pytest.raises(ValueError, match="ends within tile"):
        differences.read(sent[:-100].contiguous(), old.clone())


# A tile of eight steps: each one takes long in the interpreter.
INTERPRETED = """
from evener.comm.codecs import rice
rice.STEPS, rice.TILE = 8, 256
import torch
from evener.comm.codecs import differences, triton_differences
from tests import interpreted
from tests.comm.test_differences import any_bits, moved, same, stepped
interpreted.stay()
torch.set_num_threads(1)
kinds = set()
def check(new, old):
    headers = differences.plan_reference(new, old)
    kinds.update((headers >> 9 & 1).tolist())
    assert torch.equal(headers, triton_differences.plan(new, old))
    begins, told = torch.full((4,), 7), torch.full((4,), 7)
    first = triton_differences.places(headers, told)
    assert torch.equal(first, differences.places_reference(headers, begins))
    assert torch.equal(begins, told) and told[0] == differences.size(headers)
    sent = torch.full((int(differences.size(headers)),), -7, dtype=torch.int32)
    have = sent.clone()
    differences.write_reference(new, old, headers, sent)
    triton_differences.write(new, old, headers, first, have)
    assert torch.equal(sent, have)
    weights = old.clone()
    triton_differences.read(sent, weights)
    assert same(weights, new)
for n in (1, 257, 700):
    for dtype in (torch.bfloat16, torch.float16):
        old = any_bits(n, n, dtype)
        check(moved(old, n, 0.5, 5), old)
for rate in (1e-4, 1e-5, 1e-6):
    check(*stepped(700, 1, rate))
assert kinds == {0, 1}
triton_differences.BLOCK = 4  # several turns of the one program
for count in (1, 4, 9):
    headers = torch.randint(0, 1 << 23, (count,), dtype=torch.int32)
    want, have = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    first = differences.places_reference(headers, want)
    assert torch.equal(triton_differences.places(headers, have), first)
    assert torch.equal(want, have)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evener.comm.codecs import triton_differences
constants = {
    "SHIFT": 7, "MASK": 255, "ESCAPE": 12, "LOWEST": -3, "TRIES": 5, "STEPS": 256, "LANES": 32,
    "SAID": 3, "BLOCK": triton_differences.BLOCK,
}
types = {
    "new": "*bf16", "old": "*bf16", "weights": "*bf16", "headers": "*i32", "message": "*i32",
    "out": "*i32", "first": "*i64", "n": "i32", "count": "i32", "said": "*i64",
}
for name, warps in (("_choose", 8), ("_places", 8), ("_encode", 1), ("_decode", 1)):
    kernel = getattr(triton_differences, name)
    own = {n: constants[n] for n in kernel.arg_names if n in constants}
    signature = {n: "constexpr" if n in own else types[n] for n in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, signature, own),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    assert len(made.asm["cubin"]) > 1000, name
"""


def run(script: str, **env: str) -> None:
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, **env}, timeout=580
    )


@pytest.mark.timeout(600)
def test_the_kernels_in_the_interpreter_equal_the_reference() -> None:
    run(INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.timeout(600)
def test_the_kernels_compile_for_hopper() -> None:
    run(COMPILED)
