"""Horovod's operations against what they are by definition, over two and three ranks.

A program is a step of operations and how often it comes again, as a training loop does: each rank
submits them in an order of its own and waits for all. Later steps have other data, and once in a
while other shapes; a rank may run out of data and join. Data are small whole numbers, so that sums
are the same bits in any order, in every type.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

import evener.horovod.torch as hvd
from evener.horovod import executor
from evener.horovod.executor import Executor
from tests.twins import _horovod
from tests.twins._ranks import Switch
from tests.twins.harness import Program, Twin, often

WORLDS = (2, 3)
WIDTH = 3
TYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
REDUCTIONS = {
    "sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product
}  # fmt: skip
# Among these ranks of three alone.
SET = hvd.ProcessSet([0, 2])


def _rows(op: Any, turn: int, rank: int) -> int:
    """Rows of a rank's tensor; operations that want the same of all have rank 0's."""
    more = 1 if op["grows"] and turn % 16 == 15 else 0
    return int(op["rows"][rank % len(op["rows"])]) + more


def _data(program: Program, number: int, turn: int, rank: int, rows: int) -> torch.Tensor:
    seed = ((program["seed"] * 31 + number) * 101 + turn) * 7 + rank
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, program["ops"][number]["dtype"])
    return torch.randint(0, 5, (rows, WIDTH), generator=draw).to(dtype)


def _members(op: Any, size: int) -> list[int]:
    return [0, 2] if op["set"] and size == 3 else list(range(size))


class Turn:
    """One step on one rank: what it submits, and what is right."""

    def __init__(self, program: Program, turn: int, rank: int, size: int, joined: set[int]) -> None:
        self.program, self.turn, self.rank, self.size = program, turn, rank, size
        self.joined = joined

    def given(self, number: int, rank: int) -> torch.Tensor:
        """What a rank gives to an operation: zeros if it has joined."""
        op = self.program["ops"][number]
        if op["kind"] == "alltoall":
            rows = sum(self.splits(op, rank))
        else:
            rows = _rows(op, self.turn, rank if op["kind"] == "gather" else 0)
        data = _data(self.program, number, self.turn, rank, rows)
        return torch.zeros_like(data) if rank in self.joined else data

    def splits(self, op: Any, rank: int) -> list[int]:
        members = _members(op, self.size)
        return [_rows(op, self.turn, rank + to) for to in members]

    def submit(self, number: int) -> int:
        op, mine = self.program["ops"][number], self.given(number, self.rank)
        among = SET if len(_members(op, self.size)) < self.size else hvd.global_process_set
        kind, name = op["kind"], f"op{number}"
        if kind == "gather":
            return hvd.allgather_async(mine, name, among)
        if kind == "broadcast":
            return hvd.broadcast_async(mine, _members(op, self.size)[-1], name, among)
        if kind == "alltoall":
            return hvd.alltoall_async(mine, self.splits(op, self.rank), name, among)
        factors = (0.5, 4.0) if op["scaled"] else (1.0, 1.0)
        if kind == "scatter":
            return hvd.reducescatter_async(mine, name, hvd.Sum, among, *factors)
        if op["grouped"]:
            given = [mine, mine + 1]
            return hvd.grouped_allreduce_async(given, None, name, REDUCTIONS[kind], *factors, among)
        return hvd.allreduce_async(mine, None, name, REDUCTIONS[kind], *factors, among)

    def wanted(self, number: int) -> list[torch.Tensor]:
        op = self.program["ops"][number]
        members = _members(op, self.size)
        all_of_them = [self.given(number, rank) for rank in members]
        kind, place = op["kind"], members.index(self.rank)
        if kind == "gather":
            return [torch.cat(all_of_them)]
        if kind == "broadcast":
            return [all_of_them[-1]]
        if kind == "alltoall":
            parts = [
                data.split(self.splits(op, rank))[place]
                for rank, data in zip(members, all_of_them, strict=True)
            ]
            return [
                torch.cat(parts),
                torch.tensor([len(part) for part in parts], dtype=torch.int32),
            ]
        # The second of a group is one more; nothing of a rank that has joined is.
        more = [0, 1] if op["grouped"] and kind != "scatter" else [0]
        wide = [
            [
                d.double() + m * (r not in self.joined)
                for r, d in zip(members, all_of_them, strict=True)
            ]
            for m in more
        ]
        return [self._reduced(op, each, place) for each in wide]

    def _reduced(self, op: Any, each: list[torch.Tensor], place: int) -> torch.Tensor:
        """In float64: all of it is exact there."""
        dtype, kind, stack = getattr(torch, op["dtype"]), op["kind"], torch.stack(each)
        # Whole numbers are scaled in floating point, and cut before they are sent.
        stack = (stack * 0.5).to(dtype).double() if op["scaled"] else stack
        found = {
            "sum": stack.sum(0), "scatter": stack.sum(0), "average": stack.sum(0) / len(each),
            "min": stack.amin(0), "max": stack.amax(0), "product": stack.prod(0),
        }[kind]  # fmt: skip
        if op["scaled"]:
            found = (found if dtype.is_floating_point else found.trunc()) * 4.0
        if kind == "scatter":
            found = found.tensor_split(len(each))[place]
        return (found if dtype.is_floating_point else found.trunc()).to(dtype)


def _same(what: str, one: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(one, right, check_dtype=True, msg=lambda text: f"{what}: {text}")


def _run(program: Program, rank: int, size: int) -> None:
    turns = [program["turns"] - (program["late"] if r else 0) for r in range(size)]
    for turn in range(turns[rank]):
        joined = {r for r in range(size) if turn >= turns[r]}
        now = Turn(program, turn, rank, size, joined)
        numbers = [
            number
            for number, op in enumerate(program["ops"])
            if rank in _members(op, size) and (not joined or _joins(op, size))
        ]
        random.Random(f"{program['seed']} {turn} {rank}").shuffle(numbers)
        handles = {number: now.submit(number) for number in numbers}
        for number in sorted(handles):
            found = hvd.synchronize(handles[number])
            got = list(found) if isinstance(found, (list, tuple)) else [found]
            for one, right in zip(got, now.wanted(number), strict=True):
                _same(f"turn {turn}, {program['ops'][number]}", one, right)
    last = hvd.join()
    goes_on = program["late"] and any(_joins(op, size) for op in program["ops"])
    assert not goes_on or last == 0, f"rank {last} joined last"


def _joins(op: Any, size: int) -> bool:
    """Whether it goes on when a rank has joined."""
    return op["kind"] in ("sum", "average") and len(_members(op, size)) == size


def _answer(question: tuple[Program, str]) -> None:
    program, fault = question
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        _run(program, hvd.rank(), hvd.size())


_switch = Switch()
_world = functools.cache(lambda size: _horovod.World(size, "tests.twins.horovod"))


def check(program: Program) -> None:
    """Each rank compares what it gets."""
    _world(program["ranks"]).run((program, _switch.fault))


@st.composite
def _ops(draw: Any) -> Any:
    reduction = st.sampled_from(sorted(REDUCTIONS))
    kind = often(
        reduction, reduction, st.sampled_from(["gather", "broadcast", "alltoall", "scatter"])
    )
    kind = draw(kind)
    return {
        "kind": kind,
        "dtype": draw(st.sampled_from(TYPES)),
        "rows": draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)),
        "grouped": draw(st.sampled_from([False, False, True])),
        "scaled": kind in ("sum", "scatter") and draw(st.booleans()),
        "grows": draw(st.sampled_from([False, False, False, True])),
        "set": draw(st.sampled_from([False, False, True])),
    }


PROGRAMS = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from(WORLDS),
        "ops": st.lists(_ops(), min_size=1, max_size=4),
        # Small all-reduces that come again are agreed on once.
        "turns": st.sampled_from([1, 2, 5, 40]),
        "late": st.sampled_from([0, 0, 1]),
        "seed": st.integers(0, 9999),
    }
)


# --- Faults ---------------------------------------------------------------------------------------


def _world_averages() -> Any:
    plain = executor._finished

    def finished(data: Any, answer: Any, size: int) -> Any:
        return plain(data, answer, hvd.size() if answer.set else size)

    return mock.patch.object(executor, "_finished", finished)


def _joined_with_ones() -> Any:
    plain = Executor.allreduce

    def allreduce(self: Any, *given: Any) -> bool:
        with mock.patch.object(executor.torch, "zeros", torch.ones):
            return plain(self, *given)

    return mock.patch.object(Executor, "allreduce", allreduce)


def _outputs_of(name: str, change: Callable[[Any], Any]) -> Any:
    """An operation's result is changed."""

    def run(self: Any, answers: Any, entries: Any) -> None:
        plain(self, answers, entries)
        for answer, entry in zip(answers, entries, strict=True):
            if executor.kinds.KINDS[answer.kind] == name and entry is not None:
                entry.outputs = [change(output) for output in entry.outputs]

    plain = Executor.run
    return mock.patch.object(Executor, "run", run)


FAULTS: dict[str, Callable[[], Any]] = {
    "averages in a set are of all ranks": _world_averages,
    "who has joined gives ones": _joined_with_ones,
    "factors are left out": lambda: mock.patch.object(executor, "_scaled", lambda data, _: data),
    "rows are gathered in another order": lambda: _outputs_of(
        "allgather", lambda rows: rows.flip(0)
    ),
    "rows come from another rank": lambda: _outputs_of("alltoall", lambda rows: rows.roll(1, 0)),
}
TWIN = Twin(
    name="horovod",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=100,
)

if __name__ == "__main__":
    from tests.twins import horovod

    torch.set_num_threads(1)
    three = os.environ["HOROVOD_SIZE"] == "3"
    hvd.init(process_sets=[horovod.SET] if three else None)
    _horovod.serve(horovod._answer)
