"""Weights as differences: any 16 bits arrive as they were, and all implementations agree."""

from __future__ import annotations

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
    found = torch.full((int(differences.size(headers)),), -7, dtype=torch.int32)
    differences.write(new, old, headers, found)
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


def test_a_step_of_training_takes_a_few_bits() -> None:
    drawn = torch.Generator().manual_seed(0)
    master = torch.randn(200_000, generator=drawn) * 0.02
    step = torch.randn(200_000, generator=drawn) * 6e-5
    sent = message((master + step).bfloat16(), master.bfloat16())
    # The entropy of such a step is 2.3 bits (the distance in ulps, given the old exponent).
    assert 32 * sent.numel() / 200_000 < 3.2


def test_a_cut_message_is_refused() -> None:
    old = any_bits(20_000, 2, torch.bfloat16)
    sent = message(moved(old, 3, 1.0, 5), old)
    with pytest.raises(ValueError, match="ends within tile"):
        differences.read(sent[:-100].contiguous(), old.clone())
