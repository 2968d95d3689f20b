"""Tables that grow beside a dense torch parameter of all keys, stepped by torch's own optimizers:
`_embedding_reference`.

Values are compared within 2e-5; which rows there are, their steps and what admission has counted
exactly.
"""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from hypothesis import strategies as st
from torch import nn

from evener.embedding import (
    Counter,
    Options,
    Store,
    Ttl,
    forget,
)
from evener.embedding.torch import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicOptimizer,
    load,
    save,
)
from evener.embedding.torch import state as table_state
from evener.embedding.torch.dcp import TableLoadPlanner
from evener.embedding.torch.table import Table
from evener.errors import UsageError
from tests.twins import _dcp
from tests.twins._embedding_faults import ENDS, FAULTS
from tests.twins._embedding_reference import DIM, KEYS, OPTIMIZERS, UNIVERSE, Reference, Saved, near
from tests.twins.harness import Program, Twin

_NUMBERS = itertools.count()


class Fails(torch.autograd.Function):
    """A layer whose backward pass fails."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> Any:
        raise RuntimeError("a layer that fails")


class Shards:
    """As much of a table's ranks as checkpoints use, in one process."""

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    def owner(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.remainder(self.size)


class Jagged:
    """As torchrec's KeyedJaggedTensor."""

    def __init__(self, ids: torch.Tensor, lengths: list[int], strides: list[int]) -> None:
        self._ids, self._strides = ids, strides
        self._ends = torch.tensor([0, *itertools.accumulate(lengths)])

    def keys(self) -> list[str]:
        return [str(i) for i in range(len(self._strides))]

    def values(self) -> torch.Tensor:
        return self._ids

    def offsets(self) -> torch.Tensor:
        return self._ends

    def stride_per_key(self) -> list[int]:
        return self._strides


class Run:
    """One program, run both ways."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.how, self.folder = program, folder
        self.name = f"twin-{next(_NUMBERS)}"
        count, life = program["count"], program["life"]
        self.options = Options(
            DIM,
            shards=2,
            threads=1,
            optimizer=OPTIMIZERS[program["optimizer"]][0],
            admission=Counter(count) if count > 1 else None,
            eviction=Ttl(life) if life else None,
        )
        self.fused, self.cache = program["fused"], program["cache"]
        how = {"fused": self.fused, "cache_rows": 64 if self.cache else 0}
        mode = program["mode"]
        made = [
            DynamicEmbeddingBag(self.options, self.name, mode=mode, **how)
            if mode
            else DynamicEmbedding(self.options, self.name, **how)
            for _ in range(program["modules"])
        ]
        self.model = nn.ModuleList(made)
        self.table: Table = made[0].table
        self.optimizer = None if self.fused else DynamicOptimizer(self.model)
        start = self.table.store.lookup_infer(UNIVERSE)
        self.right = Reference(program["optimizer"], count, life, start.clone())
        self.names = [self.name]
        self.checkpoints: list[tuple[Path, Saved]] = []
        self.states: list[tuple[bytes, Saved]] = []
        self.turn = 0

    # --- lookups ---

    def batch(self, shape: list[Any], seed: int) -> tuple[Any, list[int], torch.Tensor, Any]:
        """What a module is given, its keys by number, and the reference's result."""
        draw = np.random.default_rng(seed)
        kind, *sizes = shape
        weight, mode = self.right.weight, self.how["mode"]
        if kind == "jagged":
            features, batch, most = sizes
            strides = [batch] * features
            if most < 0:  # batches of their own
                strides, most = [batch + i for i in range(features)], -most
            lengths = draw.integers(0, most + 1, sum(strides)).tolist()
            numbers = draw.integers(0, KEYS, sum(lengths)).tolist()
            ids = torch.tensor(numbers, dtype=torch.int64)
            given = Jagged(UNIVERSE[ids], lengths, strides)
            if not mode or len(set(strides)) > 1:
                return given, numbers, weight, None
            right = self.bags(ids, [0, *itertools.accumulate(lengths)])
            right = right.view(features, batch, DIM).transpose(0, 1).reshape(batch, -1)
            return given, numbers, right, True
        ids = torch.from_numpy(draw.integers(0, KEYS, sizes))
        numbers = ids.flatten().tolist()
        if not mode:
            return UNIVERSE[ids], numbers, F.embedding(ids, weight), True
        if kind == "1d":
            return UNIVERSE[ids], numbers, weight, None  # needs offsets
        rows, length = sizes
        right = self.bags(ids.flatten(), [i * length for i in range(rows + 1)])
        return UNIVERSE[ids], numbers, right, True

    def bags(self, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
        if not len(ids):
            return torch.zeros(len(ends) - 1, DIM) + self.right.weight.sum() * 0
        return F.embedding_bag(
            ids,
            self.right.weight,
            torch.tensor(ends),
            mode=self.how["mode"],
            include_last_offset=True,
        )

    def module(self) -> Any:
        self.turn += 1
        return self.model[self.turn % len(self.model)]

    def look(self, shape: list[Any], seed: int, fail: str = "") -> None:
        given, numbers, right, fits = self.batch(shape, seed)
        module = self.module()
        if fits is None:
            try:
                found = module(given)
            except UsageError:
                return
            raise AssertionError(f"{shape} gives {list(found.shape)}, and is to be refused")
        # A layer that fails in the backward pass after the lookup's was made before it.
        late = Fails.apply(torch.zeros(1, requires_grad=True)) if fail == "layer" else 0
        found = module(given)
        self.right.look(self.known(numbers), True)
        near("a lookup", found, right)
        weights = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=found.shape)).float()
        if fail == "nan" and weights.numel():
            weights.fill_(float("nan"))
        if fail:
            self.failed(found, weights, late, numbers, fail)
            return
        (found * weights).sum().backward()
        if right.requires_grad:
            (right * weights).sum().backward()
        self.right.seen |= set(numbers)
        if self.fused:
            self.right.apply()

    def known(self, numbers: list[int]) -> list[int]:
        """Keys as a table counts them: once each in a batch where rows are cached."""
        return sorted(set(numbers)) if self.cache else numbers

    def failed(
        self, found: torch.Tensor, weights: torch.Tensor, late: Any, numbers: list[int], fail: str
    ) -> None:
        """The program catches the error and goes on, as if the pass had not been."""
        nothing = fail == "nan" and not numbers
        try:
            (found * weights + late).sum().backward()
            if self.optimizer is not None and not nothing and fail == "nan":
                self.optimizer.step()
            error: Exception | None = None
        except (RuntimeError, ValueError, UsageError) as caught:
            error = caught
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.right.forget()
        if self.fused and nothing:  # a batch without a key is a step of its own
            self.right.apply()
        elif error is None and not nothing:
            raise AssertionError(f"{fail}: no error came")

    # --- what a program does ---

    def step(self) -> None:
        if self.optimizer is None:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.right.apply()

    def act(self, op: list[Any]) -> None:
        name, *rest = op
        if name in ("look", "nan", "layer"):
            if name != "look":
                if self.optimizer is not None:
                    self.optimizer.zero_grad()
                self.right.forget()
            if name == "nan" and self.cache:
                name = "layer"  # a cache says it one call late
            if rest[0][0] == "1d" and self.how["mode"]:
                rest = [["2d", 1, rest[0][1]], rest[1]]
            if name == "layer" and not self.grows(rest[0]):
                return
            self.look(*rest, fail="" if name == "look" else name)
        elif name == "step":
            self.step()
        elif name == "skip":
            if self.optimizer is not None:
                self.optimizer.zero_grad()
                self.right.forget()
        elif name == "train":
            self.train(*rest)
        elif name == "eval":
            given, _, right, fits = self.batch(*rest)
            if fits:
                near("an evaluation", self.module().eval()(given), right)
                self.model.train()
        elif name == "remove":
            keys = [at for at in range(KEYS) if rest[0] >> at & 1]
            self.table.rows.forget()
            self.table._store.remove(UNIVERSE[keys])
            for at in keys:
                self.right.begin(at)
        elif name == "evict" and self.how["life"]:
            self.table.evict()
            self.right.evict()
        elif name == "read-only":
            out = np.frombuffer(bytes(KEYS * DIM * 4), np.float32).reshape(KEYS, DIM)
            try:
                self.table.store.lookup_infer(UNIVERSE.numpy(), out=out)
            except UsageError:
                return
            raise AssertionError("immutable bytes were written")
        else:
            self.persist(name, rest)

    def train(self, steps: int, seed: int) -> None:
        for each in range(steps):
            self.look(["2d", 2, 3], seed + each)
            self.step()

    def branch(self, steps: list[int], seed: int, keep: int) -> None:
        """Save, go on, save; go back, go on from there, save; what is loaded then?"""
        self.persist("save", [keep])
        self.train(steps[0], seed)
        self.persist("save", [keep])
        self.persist("back", [0])
        self.train(steps[1], seed + 50)
        self.persist("save", [keep])
        self.train(1, seed + 99)
        self.persist("load", [])

    def grows(self, shape: list[Any]) -> bool:
        """Whether a shape has keys: without any no layer's backward pass runs."""
        return shape[0] != "jagged" and 0 not in shape[1:]

    def persist(self, name: str, rest: list[Any]) -> None:
        if name in ("load", "back", "unstate", "ranks") and self.optimizer is not None:
            self.optimizer.zero_grad()
            self.right.forget()
        if name == "branch":
            self.branch(*rest)
        elif name == "save":
            keep = rest[0]
            path = save(self.model, self.folder / "checkpoints", keep=keep)
            self.checkpoints = [each for each in self.checkpoints if each[0] != path]
            self.checkpoints = [*self.checkpoints, (path, self.right.saved())][-keep:]
        elif name in ("load", "back") and self.checkpoints:
            place = -1 if name == "load" else rest[0] % len(self.checkpoints)
            path, saved = self.checkpoints[place]
            load(self.model, self.folder / "checkpoints" if name == "load" else path)
            self.right.load(saved)
        elif name == "state":
            data = io.BytesIO()
            torch.save(self.model.state_dict(), data)
            self.states.append((data.getvalue(), self.right.saved()))
        elif name == "unstate" and self.states:
            data, saved = self.states[rest[0] % len(self.states)]
            self.model.load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
            self.right.load(saved)
        elif name in ("snapshot", "delta"):
            rows = self.folder / "rows"
            rows.mkdir(exist_ok=True)
            getattr(self.table.store, name)(rows)
            served = self.store(f"{self.name}-served")
            served.restore(rows)
            self.same_rows(served)
        elif name == "ranks":
            self.ranks(*rest)

    def store(self, name: str) -> Store:
        forget(name)
        self.names.append(name)
        return Store(name, self.options)

    def ranks(self, size: int, way: str) -> None:
        """The table goes to `size` ranks and comes back."""
        how = {"cache_rows": 0, "fused": False}
        ranks = [DynamicEmbedding(self.options, f"{self.name}-{r}", **how) for r in range(size)]
        self.names += [rank.table.name for rank in ranks]
        for place, rank in enumerate(ranks):
            rank.table._sharded = Shards(place, size) if size > 1 else None
        there, back = [rank.table for rank in ranks], [self.table]
        if way == "parts":
            one = [self.table.store.save_bytes()]
            for table in there:
                table_state.restore(table, one)
            table_state.restore(self.table, [table.store.save_bytes() for table in there])
        else:  # torch.distributed.checkpoint
            self.by_dcp(back, there, "there")
            self.by_dcp(there, back, "back")
        saved = self.right.saved()
        self.right.load(saved)

    def by_dcp(self, before: list[Table], after: list[Table], folder: str) -> None:
        """What some ranks save others load."""
        place = self.folder / f"{folder}-{next(_NUMBERS)}"
        _dcp.save([{"t": table_state.state(table, rows=True)} for table in before], place)
        for table in after:
            state = {"t": table_state.state(table, rows=True)}
            _dcp.load(state, place, TableLoadPlanner)
            table_state.set_state(table, state["t"])
        found, right = sum(len(table.store) for table in after), int(self.right.there.sum())
        assert found == right, f"{len(after)} ranks have {found} rows, and {right} are right"

    # --- what is compared ---

    def same_rows(self, store: Store) -> None:
        there = self.right.there
        frequency, version = store.meta(UNIVERSE)
        found = torch.from_numpy(frequency >= 0)
        assert torch.equal(found, there), f"rows {found.tolist()}, and {there.tolist()} are right"
        assert len(store) == int(there.sum())
        near("rows", store.lookup_infer(UNIVERSE), self.right.weight)
        at = there.numpy()
        wrong = version[at] != self.right.version.numpy()[at]
        assert not wrong.any(), f"versions {version[at]}, and {self.right.version[there]} are right"

    def same(self) -> None:
        self.same_rows(self.table.store)
        assert self.table.step == self.right.step, f"{self.table.step}, not {self.right.step}"
        keys, counts = self.table.store.counts()
        found = {
            int((key == UNIVERSE).nonzero()): int(n) for key, n in zip(keys, counts, strict=True)
        }
        assert found == self.right.counts, f"counts {found}, and {self.right.counts} are right"

    def close(self) -> None:
        for name in self.names:
            forget(name)


def check(program: Program) -> None:
    """Run a program both ways and compare after each act."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(dir=place))
    run = Run(program, folder)
    try:
        for number, op in enumerate(program["ops"]):
            try:
                run.act(op)
                run.same()
            except AssertionError as error:
                raise AssertionError(f"act {number}, {op}: {error}") from error
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


_SEED = st.integers(0, 10_000)
_SHAPE = st.one_of(
    st.tuples(st.just("1d"), st.integers(0, 12)),
    st.tuples(st.just("2d"), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("jagged"), st.integers(1, 3), st.integers(1, 3), st.integers(-3, 3)),
).map(list)
_NAMED = {
    "look": (_SHAPE, _SEED),
    "step": (),
    "train": (st.integers(1, 3), _SEED),
    "skip": (),
    "nan": (_SHAPE, _SEED),
    "layer": (_SHAPE, _SEED),
    "eval": (_SHAPE, _SEED),
    "remove": (st.integers(0, 2**KEYS - 1),),
    "evict": (),
    "read-only": (),
    "save": (st.integers(1, 3),),
    "load": (),
    "back": (st.integers(0, 3),),
    "branch": (
        st.lists(st.integers(0, 3), min_size=2, max_size=2),
        _SEED,
        st.integers(1, 3),
    ),
    "state": (),
    "unstate": (st.integers(0, 3),),
    "snapshot": (),
    "delta": (),
    "ranks": (st.integers(1, 3), st.sampled_from(["parts", "dcp"])),
}
_OFTEN = {"look": 5, "step": 4, "train": 3, "layer": 2, "save": 2, "delta": 2, "ranks": 2}
_OPS = st.sampled_from([name for name in _NAMED for _ in range(_OFTEN.get(name, 1))]).flatmap(
    lambda name: st.tuples(st.just(name), *_NAMED[name]).map(list)
)
PROGRAMS = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "mode": st.sampled_from(["", "sum", "mean"]),
        "fused": st.booleans(),
        "cache": st.sampled_from([False, False, True]),
        "modules": st.integers(1, 2),
        "count": st.integers(1, 3),
        "life": st.integers(0, 3),
        "ops": st.lists(_OPS, min_size=1, max_size=12),
    }
)
TWIN = Twin("embedding", PROGRAMS, check, FAULTS, ENDS, programs_per_round=300)
