"""A pool of memory as CUDA's allocator has it, and what a step loses in its holes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from evener.zero.planner import WORKSPACE, lost
from evener.zero.pool import SMALL, Pool, holes
from evener.zero.profile import Profile
from evener.zero.trace import trace
from evener.zero.units import cut

MB = 1 << 20


def test_a_pool_grows_where_no_hole_is_large_enough() -> None:
    pool = Pool()
    for key in range(3):
        pool.take(key, 100)
    pool.give(1)
    pool.take(3, 60)  # into the hole
    assert pool.size == 300
    pool.take(4, 50)  # 40 are left of it
    assert pool.size == 350
    pool.give(3)
    pool.take(5, 100)
    assert pool.size == 350


def test_a_pool_grows_by_what_its_last_hole_lacks() -> None:
    pool = Pool()
    pool.take(0, 100)
    pool.take(1, 50)
    pool.give(1)
    pool.take(2, 80)
    assert pool.size == 180


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=60))
def test_a_pool_never_gives_memory_twice(asked: list[tuple[int, int]]) -> None:
    pool = Pool()
    for key, size in asked:
        if key in pool._used:
            pool.give(key)
        else:
            pool.take(key, size)
        places = sorted(pool._used.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        assert all(stop <= pool.size for _, stop in places)
        free = sum(end - begin for begin, end in pool._free)
        assert free + sum(end - begin for begin, end in places) == pool.size
        assert all(a[1] < b[0] for a, b in itertools.pairwise(pool._free)), "joined"


def test_holes_are_what_a_pool_has_and_a_step_does_not_use() -> None:
    # 2 MB, 4 MB; then 5 MB, which the hole of the first two is too small for while 3 are in use.
    step = [(0, 2 * MB), (1, 3 * MB), (2, 4 * MB), (0, 0), (2, 0), (3, 5 * MB), (3, 0), (1, 0)]
    assert holes(step) == 1 * MB  # 2 + 3 + 5 in the pool, 9 in use
    assert holes([(0, SMALL), (1, SMALL), (0, 0)]) == 0, "small ones have a pool of their own"


class Narrow(nn.Module):
    """Blocks whose one weight is far larger than what they compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.float().square().mean()


def test_a_trace_says_what_holes_take_and_the_plan_counts_it() -> None:
    """Gradients of 8 MiB beside activations of 2.5: they do not fit one another's holes."""
    model = Narrow(2048)
    units = cut(model)
    x = torch.randn(640, 2048, device="meta")
    cpu = torch.device("cpu")
    profile = trace(model, units, (x,), {}, device=cpu, dtype=torch.bfloat16)
    assert all(each > 0 for each in profile.holes), profile.holes
    blocks = profile.repeated
    assert profile.lost(set()) == profile.holes[0]
    assert profile.lost(blocks) == profile.holes[1]
    assert profile.lost({min(blocks)}) == max(profile.holes)
    assert lost(profile, blocks, 1000, 0.12) == WORKSPACE + profile.holes[1]
    assert lost(profile, blocks, 10**9, 0.12) == WORKSPACE + int(0.06 * 10**9)
    assert lost(profile, blocks, 1000, 0.12, pools=False) == WORKSPACE
    assert lost(profile, blocks, 1000, 0.0) == 0
    assert profile.times(2).holes == (2 * profile.holes[0], 2 * profile.holes[1])
    assert Profile((), (), frozenset()).holes == (0, 0)
