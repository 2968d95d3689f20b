"""Resident tables on several ranks, pooled by their owners, beside dense torch parameters.

Ranks are threads, as in `tables.py`, whose meetings and saves these are too. Batches are of any
size, of none too, so a table crosses as bags for one rank and whole for another. Values are
compared within 2e-5; which rank has a row, its version and the count of steps exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from hypothesis import strategies as st

from evener.embedding import forget
from evener.embedding.torch import (
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
    collections,
    no_sync,
    pooled,
    routes,
    sharded,
    table,
)
from evener.embedding.torch.pooled import Exchange
from evener.embedding.torch.resident import Pending, ResidentRows
from evener.embedding.torch.sharded import Ranks
from evener.embedding.torch.table import Table
from evener.errors import UsageError
from tests.twins import _dcp
from tests.twins._embedding_reference import KEYS, OPTIMIZERS, Reference, Saved, near
from tests.twins.harness import Program, Twin
from tests.twins.tables import World, load_states, states_of

_NUMBERS = itertools.count()


def names_of(program: Program) -> list[list[str]]:
    return [[f"{i}-{j}" for j in range(how["features"])] for i, how in enumerate(program["tables"])]


def draw(program: Program, seed: int, rank: int) -> tuple[int, dict[str, torch.Tensor], Jagged]:
    """A rank's batch: its size, ids of each feature by sample (-1: none), and the same jagged."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    batch = int(torch.randint(0, 12, (1,), generator=generator))
    found, ids, lengths = {}, [], []
    for name in itertools.chain(*names_of(program)):
        own = torch.randint(-3, KEYS, (batch, 3), generator=generator).clamp(min=-1)
        found[name] = own
        ids.append(own[own >= 0])
        lengths.append((own >= 0).sum(1))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return batch, found, Jagged(
        [list(found)[i] for i in order],
        torch.cat([ids[i] for i in order]),
        lengths=torch.cat([lengths[i] for i in order]),
    )  # fmt: skip


def weights_of(seed: int, rank: int, number: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed * 1000 + rank * 50 + number)
    )


@dataclass
class Seen:
    """What a rank had after an act. `rows`: (values, version, step) of the tables that it owns."""

    values: list[torch.Tensor]
    error: str
    rows: list[tuple[torch.Tensor, torch.Tensor, int] | None]


class Rank:
    """One rank of a program."""

    def __init__(self, program: Program, world: World, rank: int, name: str, folder: Path) -> None:
        self.program, self.rank, self.everyone = program, rank, world.everyone
        self.folder, self.saves = folder, 0
        configs, rates = [], {}
        for i, (how, features) in enumerate(zip(program["tables"], names_of(program), strict=True)):
            configs.append(
                EmbeddingBagConfig(
                    KEYS, how["dim"], str(i), feature_names=features, pooling=how["pooling"]
                )
            )
            rates[str(i)] = OPTIMIZERS[how["optimizer"]][0]
        fused = program["fused"]
        self.model = EmbeddingBagCollection(
            configs, optimizer=rates, prefix=f"{name}-{rank}-", resident=True, fused=fused
        )
        self.tables = [self.model.embedding_bags[config.name].table for config in configs]
        self.optimizer = None if fused else DynamicOptimizer(self.model)

    def act(self, op: list[Any]) -> Seen:
        name, *rest = op
        values: list[torch.Tensor] = []
        error = ""
        if name in ("look", "hold", "nan"):
            with no_sync(self.model) if name == "hold" else contextlib.nullcontext():
                values = self.look(*rest, bad=name == "nan")
            if name == "nan" and self.optimizer is not None:
                try:
                    self.optimizer.step()
                except UsageError as raised:
                    error = str(raised)
                self.optimizer.zero_grad()
        elif name == "eval":
            self.model.eval()
            values = list(self.model(draw(self.program, rest[0], self.rank)[2]).to_dict().values())
            self.model.train()
        elif name == "save":
            states = self.everyone._meet(states_of(self.tables))
            if self.rank == 0:
                _dcp.save(states, self.folder / str(self.saves))
            self.saves += 1
            self.everyone._meet(None)
        elif name == "load":
            if self.saves:
                load_states(self.tables, self.folder / str(max(0, self.saves - 1 - rest[0])))
        elif self.optimizer is not None:
            if name == "step":
                self.optimizer.step()
            self.optimizer.zero_grad()
        return Seen(values, error, [self.rows(each) for each in self.tables])

    def look(self, seed: int, used: int, ahead: bool, *, bad: bool) -> list[torch.Tensor]:
        _, _, given = draw(self.program, seed, self.rank)
        if ahead:
            self.model.prefetch(given)
        found = list(self.model(given).to_dict().values())
        losses = []
        for number, value in enumerate(found):
            if used >> number % 4 & 1:
                weights = weights_of(seed, self.rank, number, value.shape)
                if bad and self.rank == 0:
                    weights = weights * float("nan")
                losses.append((value * weights).sum())
        if losses:
            torch.stack(losses).sum().backward()
        return [value.detach() for value in found]

    def rows(self, of: Table) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        store = of.store
        if not isinstance(of.rows, ResidentRows):
            assert not len(store), f"rank {self.rank} has rows of {of.name}, which is another's"
            return None
        keys = torch.arange(KEYS)
        return store.lookup_infer(keys), torch.from_numpy(store.meta(keys)[1]), of.step


def run_ranks(program: Program, name: str, folder: Path) -> list[list[Seen]]:
    """What each rank saw. Raises what a rank raised."""
    world = World(program["hosts"], program["each"])
    found: list[Any] = [None] * world.size
    errors: list[BaseException] = []
    joined: dict[int, Ranks] = {}

    def body(rank: int) -> None:
        try:
            if world.size > 1:
                joined[threading.get_ident()] = world.join(rank)
            own = Rank(program, world, rank, name, folder)
            found[rank] = [own.act(op) for op in program["ops"]]
        except BaseException as error:  # noqa: BLE001 - raised below
            late = isinstance(error, threading.BrokenBarrierError)
            errors.insert(len(errors) if late else 0, error)
            world.break_up()

    meets = mock.Mock(
        wraps=dist,
        all_to_all_single=world.everyone.all_to_all,
        all_reduce=world.everyone.all_reduce,
        is_initialized=lambda: world.size > 1,
        get_world_size=lambda _group=None: world.size,
    )
    meets.ReduceOp = dist.ReduceOp
    with contextlib.ExitStack() as stack:
        for module in (sharded, table, collections, pooled):
            stack.enter_context(mock.patch.object(module, "dist", meets))
        of = staticmethod(lambda _device, _group: joined[threading.get_ident()])
        stack.enter_context(mock.patch.object(Ranks, "of", of))
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found


class Right:
    """The reference of each table."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.size = program, program["hosts"] * program["each"]
        self.tables: list[Reference] = []
        self.saves: list[list[Saved]] = []
        for i, how in enumerate(program["tables"]):
            config = EmbeddingBagConfig(KEYS, how["dim"], str(i), feature_names=["f"])
            made = EmbeddingBagCollection([config], prefix=f"{name}-right-")
            start = made.embedding_bags[str(i)].store.lookup_infer(torch.arange(KEYS))
            right = Reference(how["optimizer"], 0, 0, start.clone())
            right.there[:] = True
            self.tables.append(right)

    def pooled(self, seed: int, rank: int) -> list[tuple[int, torch.Tensor, set[int]]]:
        """(table, [batch, dim], rows) of each feature."""
        _, ids, _ = draw(self.program, seed, rank)
        found = []
        for i, features in enumerate(names_of(self.program)):
            for name in features:
                own = ids[name]
                there = (own >= 0).unsqueeze(2)
                rows = (F.embedding(own.clamp(min=0), self.tables[i].weight) * there).sum(1)
                if self.program["tables"][i]["pooling"] == "MEAN":
                    rows = rows / there.sum(1).clamp(min=1)
                found.append((i, rows, set(own[own >= 0].tolist())))
        return found

    def act(self, op: list[Any], seen: list[Seen]) -> None:
        name, *rest = op
        if name in ("look", "hold", "nan", "eval"):
            for rank in range(self.size):
                wanted = self.pooled(rest[0], rank)
                for value, (_, right, _) in zip(seen[rank].values, wanted, strict=True):
                    near("a lookup", value, right)
        if name in ("look", "hold", "nan"):
            self.look(rest, seen, name)
        elif name == "save":
            self.saves.append([right.saved() for right in self.tables])
        elif name == "load":
            if self.saves:
                for right, saved in zip(self.tables, self.saves[-1 - rest[0] :][0], strict=True):
                    right.load(saved)
        elif not self.program["fused"] and name in ("step", "skip"):
            for right in self.tables:
                right.apply() if name == "step" else right.forget()

    def look(self, rest: list[Any], seen: list[Seen], name: str) -> None:
        seed, used, _ = rest
        touched: set[int] = set()
        spoilt = False
        for rank in range(self.size):
            losses = []
            for number, (i, rows, _) in enumerate(self.pooled(seed, rank)):
                if used >> number % 4 & 1:
                    touched.add(i)
                    spoilt |= name == "nan" and rank == 0 and bool(rows.numel())
                    losses.append((rows * weights_of(seed, rank, number, rows.shape)).sum())
            if losses and not spoilt:
                (torch.stack(losses).sum() / self.size).backward()
        for rank in range(self.size):
            for i, _, ids in self.pooled(seed, rank):
                if i in touched:
                    self.tables[i].seen |= ids
        if name == "nan":
            for each in seen:
                assert bool(each.error) == spoilt, f"{each.error!r} of a gradient: {spoilt=}"
            for right in self.tables:
                right.forget() if spoilt else right.apply()
        elif self.program["fused"] and name == "look":
            for i, right in enumerate(self.tables):
                if i in touched or right.seen:
                    right.apply()

    def same(self, seen: list[Seen]) -> None:
        for i, right in enumerate(self.tables):
            owned = [each.rows[i] for each in seen if each.rows[i] is not None]
            assert len(owned) == 1, f"{len(owned)} ranks own table {i}"
            assert owned[0] is not None
            values, version, step = owned[0]
            near(f"rows of table {i}", values, right.weight)
            changed = right.version > 0
            assert torch.equal(version[changed], right.version[changed]), f"versions of table {i}"
            assert step == right.step, f"table {i}: step {step}, not {right.step}"


def check(program: Program) -> None:
    """Run a program on its ranks, then the reference beside what they saw."""
    name = f"resident-{next(_NUMBERS)}"
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        found = run_ranks(program, name, folder)
        right = Right(program, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for i in range(len(program["tables"])):
            for part in [*range(program["hosts"] * program["each"]), "right"]:
                forget(f"{name}-{part}-{i}")
    for number, op in enumerate(program["ops"]):
        try:
            seen = [each[number] for each in found]
            right.act(op, seen)
            right.same(seen)
        except AssertionError as error:
            raise AssertionError(f"act {number}, {op}: {error}") from error


_SEED = st.integers(0, 10_000)
_LOOK = (_SEED, st.integers(1, 15), st.booleans())
_NAMED = {
    "look": _LOOK,
    "hold": _LOOK,
    "nan": _LOOK,
    "step": (),
    "skip": (),
    "eval": (_SEED,),
    "save": (),
    "load": (st.integers(0, 1),),
}
_OPS = [
    "look",
    "look",
    "look",
    "step",
    "step",
    "hold",
    "nan",
    "skip",
    "eval",
    "save",
    "save",
    "load",
]
PROGRAMS = st.fixed_dictionaries(
    {
        "hosts": st.integers(1, 2),
        "each": st.integers(1, 2),
        "fused": st.sampled_from([False, False, True]),
        "tables": st.lists(
            st.fixed_dictionaries(
                {
                    # Often the same, for tables that lie in one arena.
                    "optimizer": st.sampled_from(["sgd"] * 4 + sorted(OPTIMIZERS)),
                    "dim": st.sampled_from([3, 3, 3, 1, 18]),
                    "features": st.sampled_from([1, 1, 2]),
                    "pooling": st.sampled_from(["SUM", "SUM", "MEAN"]),
                }
            ),
            min_size=1,
            max_size=4,
        ),
        "ops": st.lists(
            st.sampled_from(_OPS).flatmap(
                lambda name: st.tuples(st.just(name), *_NAMED[name]).map(list)
            ),
            min_size=1,
            max_size=8,
        ),
    }
).filter(
    lambda program: (
        program["hosts"] * program["each"] > 1
        and not (program["fused"] and any(op[0] in ("nan", "hold") for op in program["ops"]))
    )
)


# --- faults ---


def _last_only(self: Exchange, way: Any, whole: Any, gradients: Any) -> Any:
    """What waits from an earlier backward pass is forgotten."""
    for each in self.tables:
        each.waiting.pieces = []
    return _GIVE(self, way, whole, gradients)


def _first_table(values: Any, ends: Any, layout: Any, start: Any) -> Any:
    """Rows that are asked for are those of an arena's first table."""
    bags = [replace(side, bases=torch.zeros_like(side.bases)) for side in layout.bags]
    return _FILL(values, ends, replace(layout, bags=bags), start)


def _own_batch(self: Exchange, group: Any, owner: int, batch: int) -> int:
    """Where a table is sent whole is said by this rank's first batch."""
    self.__dict__.setdefault("first_batch", batch)
    return _FIRST(self, group, owner, self.__dict__["first_batch"])


_GIVE, _FIRST, _FILL = Exchange.give, Exchange.first_whole, routes.fill
FAULTS: dict[str, Any] = {
    "a later pass replaces an earlier one": lambda: mock.patch.object(Exchange, "give", _last_only),
    "an arena is stepped with its last pass alone": lambda: mock.patch.object(
        Pending, "whole", True
    ),
    "ranks do not agree what is sent whole": lambda: mock.patch.object(
        Exchange, "first_whole", _own_batch
    ),
    "rows that changed stay on the device": lambda: mock.patch.object(
        ResidentRows, "flush", lambda _: None
    ),
    "rows are those of another table": lambda: mock.patch.object(routes, "fill", _first_table),
    "MEAN is not divided": lambda: mock.patch.object(
        Exchange, "_divided", lambda _self, _side, rows, _lengths: rows
    ),
    "a load leaves what is on the device": lambda: mock.patch.object(
        ResidentRows, "reload", lambda self: setattr(self, "_there", True)
    ),
}
TWIN = Twin("resident", PROGRAMS, check, FAULTS, programs_per_round=100)
