"""Programs that nobody here chose train under the door as with plain DDP."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.comm.planner import choose
from tests import worlds
from tests.door.programs import PROGRAMS, Result
from tests.door.test_door import opened

STEPS = 30


@contextlib.contextmanager
def harshest(lossy: bool) -> Iterator[list[str]]:
    """The planner takes the harshest form that it may, whatever that gains; the forms taken."""
    taken: list[str] = []
    inner = choose.choose

    def chosen(profile: Any, costs: Any, forms: Sequence[str], **more: Any) -> Any:
        made = inner(profile, costs, forms[-1:] if lossy else forms, **more)
        taken.extend(choice.form for choice in made.choices)
        return made

    choose.choose = chosen
    try:
        yield taken
    finally:
        choose.choose = inner


def compare(rank: int, size: int, lossy: bool, names: tuple[str, ...]) -> dict[str, str]:
    """By program what differs from plain DDP, or between the ranks."""
    found: dict[str, str] = {}
    for program in PROGRAMS:
        if program.__name__ not in names:
            continue
        try:
            torch.manual_seed(0)
            plain = program(rank, STEPS)
            torch.manual_seed(0)
            with opened(), harshest(lossy) as taken:
                under = program(rank, STEPS)
        except Exception as error:  # noqa: BLE001 - on both ranks alike, or the next one hangs
            traceback.print_exc()
            found[program.__name__] = repr(error)
            continue
        if rank == 0 and ("int8" if lossy else "exact") not in taken:
            found[program.__name__] = f"was not taken over: {taken}"
        for name, (plains, ours) in everywhere(plain, under, size).items():
            if len(plains) == 1 and len(ours) > 1:
                found[program.__name__] = f"{name} differs between the ranks"
        for name, value in plain.items():
            if not lossy and not torch.equal(value, under[name]):
                found.setdefault(program.__name__, f"{name} differs from plain DDP's")
            far = (value - under[name]).double().norm()
            apart = float(far / value.double().norm().clamp_min(1e-3))
            if not apart < 0.3:
                found.setdefault(program.__name__, f"{name} is {apart} of its length away")
    return found


def everywhere(
    plain: Result, under: Result, size: int
) -> dict[str, tuple[frozenset[bytes], frozenset[bytes]]]:
    """By name what the ranks have, without and with Evener: buffers may be each rank's own."""
    mine = {name: [digest(both[name]) for both in (plain, under)] for name in plain}
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, mine)
    return {
        name: (frozenset(r[name][0] for r in ranks), frozenset(r[name][1] for r in ranks))
        for name in plain
    }


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.numpy().tobytes()).digest()


@pytest.mark.parametrize("lossy", [False, True])
def test_programs_of_others_train_as_with_ddp(lossy: bool) -> None:
    """Bit for bit; with INT8 close to it, and on both ranks alike."""
    env = {
        "EVENER_DDP": "auto" if lossy else "exact",
        "EVENER_FLOOR": "int8" if lossy else "",
        "EVENER_DDP_PLAIN": "4",
        "EVENER_TRIAL_STEPS": "0" if lossy else "1",
        "LIGHT_TOPK_THRESHOLD": "0",  # the buckets of tests are small
    }
    names = tuple(program.__name__ for program in PROGRAMS)
    for wrong in worlds.run((1, 1), compare, lossy, names, env=env):
        assert not wrong, wrong
