"""Several tables on several ranks, looked up and stepped together, beside dense torch parameters.

Ranks are threads, and their collectives meet in memory, so a program takes milliseconds; all else
is the real code: stages, passes of autograd, stores. Each rank runs the whole program and keeps
what it saw. Then the reference of `embedding.py`, one for each table, does the same with the ids of
all ranks. Values are compared within 2e-5; which rows there are, who has them, their steps exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from hypothesis import strategies as st
from torch import nn

from evener.embedding import Counter, Options, forget, parts
from evener.embedding.torch import DynamicEmbedding, DynamicOptimizer, lookups, no_sync, sharded
from evener.embedding.torch import state as table_state
from evener.embedding.torch.dcp import TableLoadPlanner
from evener.embedding.torch.sharded import Given, Here, Ranks, Sharded, Stage
from evener.embedding.torch.table import Table
from evener.errors import UsageError
from tests.twins import _dcp
from tests.twins._embedding_reference import KEYS, OPTIMIZERS, UNIVERSE, Reference, Saved, near
from tests.twins.harness import Program, Twin

_NUMBERS = itertools.count()


class Meeting:
    """A group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.ranks: dict[int, int] = {}
        self.told: list[Any] = [None] * size

    def _meet(self, mine: Any) -> list[Any]:
        self.told[self.ranks[threading.get_ident()]] = mine
        self.barrier.wait()
        all_told = list(self.told)
        self.barrier.wait()
        return all_told

    def all_to_all(
        self,
        out: torch.Tensor,
        data: torch.Tensor,
        came: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        *,
        group: Meeting,
    ) -> None:
        mine = group.ranks[threading.get_ident()]
        n = len(data) // group.size
        parts = data.clone().split(list(sent) if sent is not None else n)
        received = [of[mine] for of in group._meet(parts)]
        wanted = list(came) if came is not None else [n] * group.size
        assert [len(part) for part in received] == wanted, "ranks disagree on what is sent"
        torch.cat(received, out=out)

    def all_reduce(self, data: torch.Tensor, op: Any = None, *, group: Meeting) -> None:
        told = torch.stack(group._meet(data.clone()))
        data.copy_(told.amax(0) if op == dist.ReduceOp.MAX else told.sum(0))


@dataclass
class World:
    """Hosts with `each` ranks; the meetings of every stage."""

    hosts: int
    each: int

    def __post_init__(self) -> None:
        self.size = self.hosts * self.each
        self.everyone = Meeting(self.size)
        self.outer = [Meeting(self.hosts) for _ in range(self.each)]
        self.inner = [Meeting(self.each) for _ in range(self.hosts)]

    def join(self, rank: int) -> Ranks:
        """What `Ranks` makes of torch's groups."""
        host, place = divmod(rank, self.each)
        thread = threading.get_ident()
        self.everyone.ranks[thread] = rank
        self.outer[place].ranks[thread] = host
        self.inner[host].ranks[thread] = place
        ranks: Any = object.__new__(Ranks)
        ranks.rank, ranks.size = rank, self.size
        remote = [other != host for other in range(self.hosts)]
        ranks.first = Stage(self.outer[place], host, self.each, Here(), remote)  # type: ignore[arg-type]
        if self.each > 1:
            near_by = [False] * self.each
            ranks.first = Stage(self.inner[host], place, 1, ranks.first, near_by)  # type: ignore[arg-type]
        ranks._groups = SimpleNamespace(control=SimpleNamespace(handle=self.everyone))
        ranks._levels = SimpleNamespace(
            inner=[host * self.each + i for i in range(self.each)],
            outer=[h * self.each + place for h in range(self.hosts)],
        )
        ranks.hosts = self.hosts
        ranks.everyone = self.everyone
        ranks.remote = [other // self.each != host for other in range(self.size)]
        return ranks

    def break_up(self) -> None:
        for meeting in (self.everyone, *self.outer, *self.inner):
            meeting.barrier.abort()


def ids_of(seed: int, rank: int, table: int) -> torch.Tensor:
    """Numbers of keys, once each, ascending; none now and then."""
    draw = torch.Generator().manual_seed(seed * 100 + rank * 10 + table)
    n = int(torch.randint(0, 7, (1,), generator=draw))
    return torch.unique(torch.randint(0, KEYS, (n,), generator=draw))


def weights_of(seed: int, rank: int, table: int, shape: torch.Size) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed * 100 + rank * 10 + table + 7)
    return torch.randn(shape, generator=draw)


def bits(mask: int, n: int) -> list[int]:
    return [i for i in range(n) if mask >> i & 1]


@dataclass
class Seen:
    """What a rank had after an act. `rows`: of each table (there, values, version, step)."""

    values: dict[int, torch.Tensor]
    error: str
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]


class Rank:
    """One rank of a program."""

    def __init__(self, program: Program, world: World, rank: int, name: str, folder: Path) -> None:
        self.program, self.rank, self.everyone = program, rank, world.everyone
        self.name, self.folder, self.saves = name, folder, 0
        ranks = world.join(rank)
        self.model = nn.ModuleList()
        for i, how in enumerate(program["tables"]):
            module = DynamicEmbedding(
                options_of(how),
                f"{name}-{rank}-{i}",
                fused=how["fused"],
                cache_rows=64 if how["cache"] else 0,
            )
            table = module.table
            table._sharded = Sharded(table.rows, table.dim, table._forms, table.traffic, ranks)
            self.model.append(module)
        self.tables: list[Table] = [module.table for module in self.model]
        waits = any(not how["fused"] for how in program["tables"])
        self.optimizer = DynamicOptimizer(self.model) if waits else None

    def run(self) -> list[Seen]:
        return [self.act(op) for op in self.program["ops"]]

    def act(self, op: list[Any]) -> Seen:
        name, *rest = op
        values: dict[int, torch.Tensor] = {}
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
            ids = [UNIVERSE[ids_of(rest[0], self.rank, i)] for i in range(len(self.tables))]
            found = lookups.look(list(zip(self.tables, ids, strict=True)), False)
            values = dict(enumerate(found))
        elif name == "save":
            self.save()
        elif name == "load":
            self.load(*rest)
        elif self.optimizer is not None:
            if name == "step":
                self.optimizer.step()
            self.optimizer.zero_grad()
        return Seen(values, error, [self.rows(table) for table in self.tables])

    def look(
        self, seed: int, mask: int, used: int, together: bool, ahead: str, *, bad: bool
    ) -> dict[int, torch.Tensor]:
        which = bits(mask, len(self.tables))
        keys = {i: UNIVERSE[ids_of(seed, self.rank, i)] for i in which}
        if ahead and not any(self.tables[i]._looked for i in which):  # else it is of the next step
            given = keys if ahead == "same" else {i: key.flip(0)[:1] for i, key in keys.items()}
            # A cache that fetches counts its keys: what another batch brought would count twice.
            first = [i for i in which if ahead == "same" or not self.program["tables"][i]["cache"]]
            lookups.prefetch([(self.tables[i], given[i], given[i]) for i in first])
        if ahead:
            keys = {i: self.tables[i].unique(key, key)[0] for i, key in keys.items()}
        groups = [which] if together else [[i] for i in which]
        values: dict[int, torch.Tensor] = {}
        for group in groups:
            asked = [(self.tables[i], keys[i]) for i in group]
            values |= zip(group, lookups.look(asked, True), strict=True)
        losses = []
        for i in which:
            if used >> i & 1:
                order = torch.argsort(torch.argsort(keys[i]))
                weights = weights_of(seed, self.rank, i, values[i].shape)[order]
                if bad and self.rank == 0 and i == min(bits(mask & used, len(self.tables))):
                    weights = weights * float("nan")
                losses.append((values[i] * weights).sum())
        if losses:
            torch.stack(losses).sum().backward()
        # By ascending key, as the reference has them.
        return {i: value.detach() for i, value in values.items()}

    def save(self) -> None:
        """By torch.distributed.checkpoint, whose files the first rank writes for all."""
        states = self.everyone._meet(states_of(self.tables))
        if self.rank == 0:
            _dcp.save(states, self.folder / str(self.saves))
        self.saves += 1
        self.everyone._meet(None)

    def load(self, back: int, through: int) -> None:
        """One of the last saves; it came from `through` ranks if not 0, which had loaded it."""
        if not self.saves:
            return
        place = self.folder / str(max(0, self.saves - 1 - back))
        if through:
            if self.rank == 0:
                self.pass_on(place, through)
            place = place.with_name(f"{place.name}-{through}")
            self.everyone._meet(None)
        load_states(self.tables, place)

    def pass_on(self, place: Path, size: int) -> None:
        """`size` ranks load what is in `place`, and save it beside it."""
        names: list[str] = []
        states = []
        for rank in range(size):
            tables = []
            for i, how in enumerate(self.program["tables"]):
                names.append(f"{self.name}-between-{rank}-{i}")
                tables.append(DynamicEmbedding(options_of(how), names[-1]).table)
                if size > 1:
                    ranks: Any = SimpleNamespace(size=size, place=rank)
                    table = tables[-1]
                    table._sharded = Sharded(table.rows, 1, table._forms, table.traffic, ranks)
            load_states(tables, place)
            states.append(states_of(tables))
        other = place.with_name(f"{place.name}-{size}")
        shutil.rmtree(other, ignore_errors=True)
        _dcp.save(states, other)
        for name in names:
            forget(name)

    def rows(self, table: Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        store = table.store
        frequency, version = store.meta(UNIVERSE)
        there = torch.from_numpy(frequency >= 0)
        return there, store.lookup_infer(UNIVERSE), torch.from_numpy(version), table.step


def states_of(tables: Sequence[Table]) -> dict[str, Any]:
    return {str(i): table_state.state(table, rows=True) for i, table in enumerate(tables)}


def load_states(tables: Sequence[Table], place: Path) -> None:
    states = states_of(tables)
    _dcp.load(states, place, TableLoadPlanner)
    for i, table in enumerate(tables):
        table_state.set_state(table, states[str(i)])


def options_of(how: Any) -> Options:
    return Options(
        how["dim"],
        shards=1,
        threads=1,
        optimizer=OPTIMIZERS[how["optimizer"]][0],
        admission=Counter(how["count"]) if how["count"] > 1 else None,
    )


def run_ranks(program: Program, name: str, folder: Path) -> list[list[Seen]]:
    """What each rank saw. Raises what a rank raised."""
    world = World(program["hosts"], program["each"])
    found: list[Any] = [None] * world.size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            found[rank] = Rank(program, world, rank, name, folder).run()
        except BaseException as error:  # noqa: BLE001 - raised below
            if not isinstance(error, threading.BrokenBarrierError):
                errors.insert(0, error)
            else:
                errors.append(error)
            world.break_up()

    meets = mock.Mock(
        wraps=dist,
        all_to_all_single=world.everyone.all_to_all,
        all_reduce=world.everyone.all_reduce,
    )
    meets.ReduceOp = dist.ReduceOp
    with mock.patch.object(sharded, "dist", meets):
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found


class Right:
    """The reference of each table, and who owns which key."""

    def __init__(self, program: Program) -> None:
        self.program, self.size = program, program["hosts"] * program["each"]
        self.tables = []
        for i, how in enumerate(program["tables"]):
            name = f"right-{next(_NUMBERS)}-{i}"
            start = DynamicEmbedding(options_of(how), name).store.lookup_infer(UNIVERSE)
            forget(name)
            self.tables.append(Reference(how["optimizer"], how["count"], 0, start.clone()))
        self.owner = sharded.hashes(UNIVERSE) % self.size
        self.fused = [how["fused"] for how in program["tables"]]
        self.saves: list[list[Saved]] = []

    def act(self, op: list[Any], seen: list[Seen]) -> None:
        name, *rest = op
        if name in ("look", "hold", "nan"):
            self.look(rest, seen, name)
        elif name == "eval":
            for i, right in enumerate(self.tables):
                for rank in range(self.size):
                    wanted = right.weight[ids_of(rest[0], rank, i)]
                    near("an evaluation", seen[rank].values[i], wanted)
        elif name == "save":
            self.saves.append([right.saved() for right in self.tables])
        elif name == "load":
            if self.saves:
                for right, saved in zip(self.tables, self.saves[-1 - rest[0] :][0], strict=True):
                    right.load(saved)
        else:
            for right, fused in zip(self.tables, self.fused, strict=True):
                if not fused:
                    right.apply() if name == "step" else right.forget()

    def look(self, rest: list[Any], seen: list[Seen], name: str) -> None:
        seed, mask, used, together, ahead = rest
        which = bits(mask, len(self.tables))
        for i in which:
            right = self.tables[i]
            ids = [ids_of(seed, rank, i) for rank in range(self.size)]
            every = sorted({int(at) for each in ids for at in each})
            right.look(every, True)
            for rank, own in enumerate(ids):
                order = torch.argsort(UNIVERSE[own]) if ahead else slice(None)
                near("a lookup", seen[rank].values[i], right.weight[own[order]])
            brings = self.fused[i] and name != "hold"
            if not used >> i & 1:
                # Looked up with what a loss used: what was held comes with it.
                if brings and together and bits(used & mask, len(self.tables)) and right.seen:
                    right.apply()
                continue
            for rank, own in enumerate(ids):
                sums = F.embedding(own, right.weight)
                weights = weights_of(seed, rank, i, sums.shape)
                by = torch.argsort(torch.argsort(UNIVERSE[own]))
                ((sums * weights[by]).sum() / self.size).backward()
            right.seen |= set(every)
            if brings:
                right.apply()
        if name == "nan":
            bad = [i for i in which if used >> i & 1]
            wrong = bool(bad) and bool(len(ids_of(seed, 0, min(bad))))
            for each in seen:
                assert bool(each.error) == wrong, f"{each.error!r} of a gradient that is {wrong=}"
            for right in self.tables:
                if not wrong:
                    right.apply()
                right.forget()

    def same(self, seen: list[Seen]) -> None:
        for i, right in enumerate(self.tables):
            for rank, each in enumerate(seen):
                there, values, version, step = each.rows[i]
                own = right.there & (self.owner == rank)
                assert torch.equal(there, own), f"rank {rank}, table {i}: {there} for {own}"
                near(f"rows of table {i}", values[own], right.weight[own])
                assert torch.equal(version[own], right.version[own]), f"versions of table {i}"
                assert step == right.step, f"table {i}: step {step}, not {right.step}"


def check(program: Program) -> None:
    """Run a program on its ranks, then the reference beside what they saw."""
    name = f"tables-{next(_NUMBERS)}"
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        found = run_ranks(program, name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for rank in range(program["hosts"] * program["each"]):
            for i in range(len(program["tables"])):
                forget(f"{name}-{rank}-{i}")
    right = Right(program)
    for number, op in enumerate(program["ops"]):
        try:
            seen = [each[number] for each in found]
            right.act(op, seen)
            right.same(seen)
        except AssertionError as error:
            raise AssertionError(f"act {number}, {op}: {error}") from error


_SEED, _MASK = st.integers(0, 10_000), st.integers(1, 15)
_LOOK = (
    _SEED,
    _MASK,
    st.integers(0, 15),
    st.booleans(),
    st.sampled_from(["", "", "same", "other"]),
)
_TABLE = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "dim": st.sampled_from([1, 3, 3, 18]),
        "count": st.sampled_from([1, 1, 2]),
        "fused": st.sampled_from([False, False, True]),
        "cache": st.sampled_from([False, False, True]),
    }
)
_NAMED = {
    "look": _LOOK,
    "hold": _LOOK,
    "nan": _LOOK,
    "step": (),
    "skip": (),
    "eval": (_SEED,),
    "save": (),
    "load": (st.integers(0, 1), st.sampled_from([0, 1, 3])),
}
_OPS = st.sampled_from(
    ["look", "look", "look", "step", "step", "hold", "nan", "skip", "eval", "save", "save", "load"]
)


def _fits(program: Program) -> bool:
    """Whether there are several ranks, and a gradient that is not finite is of tables that wait."""
    fused = any(how["fused"] for how in program["tables"])
    cached = any(how["cache"] for how in program["tables"])
    several = program["hosts"] * program["each"] > 1
    return several and not ((fused or cached) and any(op[0] == "nan" for op in program["ops"]))


PROGRAMS = st.fixed_dictionaries(
    {
        "hosts": st.integers(1, 2),
        "each": st.integers(1, 2),
        "tables": st.lists(_TABLE, min_size=1, max_size=4),
        "ops": st.lists(
            _OPS.flatmap(lambda name: st.tuples(st.just(name), *_NAMED[name]).map(list)),
            min_size=1,
            max_size=8,
        ),
    }
).filter(_fits)


# --- faults ---


def _own_sums() -> Any:
    """Each rank looks at its own sums for what is not finite."""
    give: Callable[..., Any] = Ranks.give

    def own(self: Ranks, ways: Any, gradients: Any) -> Any:
        given, _ = give(self, ways, gradients)
        return given, [bool(each.sums.isfinite().all()) for each in given]

    return mock.patch.object(Ranks, "give", own)


def _any_way(self: Table, keys: torch.Tensor) -> Any:
    """The way of as many keys."""
    ahead, self._ahead = self._ahead, None
    as_many = ahead is not None and ahead.keys is not None and len(ahead.keys) == len(keys)
    return ahead.way if as_many else None


def _turned(self: Stage, parts: Any, sent: Any, came: Any) -> Any:
    """Parts of one length change places where all ranks have as many."""
    moved = _MOVE(self, parts, sent, came)
    return moved[::-1] if len({len(part) for part in moved}) == 1 else moved


def _steps_stay(table: Table, found: dict[str, Any]) -> None:
    """A table counts its steps on as if nothing had been loaded."""
    step = table.step
    _SET(table, found)
    table.step = step


def _gradients_stay(table: Table, found: dict[str, Any]) -> None:
    with mock.patch.object(table, "discard", lambda: None):
        _SET(table, found)


_MOVE, _SET = Stage._move, table_state.set_state
FAULTS: dict[str, Any] = {
    "what no loss uses is stepped": lambda: mock.patch.object(Given, "there", True),
    "each rank knows its own sums alone": _own_sums,
    "other keys take the way that was prefetched": lambda: mock.patch.object(
        Table, "ahead_of", _any_way
    ),
    "parts change places": lambda: mock.patch.object(Stage, "_move", _turned),
    "ranks keep rows of other owners": lambda: mock.patch.object(
        parts, "keep_own", lambda *_: None
    ),
    "a load leaves the count of steps": lambda: mock.patch.object(
        table_state, "set_state", _steps_stay
    ),
    "a load leaves gradients that wait": lambda: mock.patch.object(
        table_state, "set_state", _gradients_stay
    ),
}
TWIN = Twin("tables", PROGRAMS, check, FAULTS, programs_per_round=100)
