"""Tables that grow beside a dense torch parameter of all keys, stepped by torch's own optimizers.

The reference holds every key that a program may use as a row of one dense weight. A row that the
store would not have (never admitted, evicted, removed) has its first values and empty slots; a row
that a step does not see is put back after it. So the reference is torch's optimizer on a dict of
rows. Values are compared within 2e-5; which rows there are, their steps and what admission has
counted exactly.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from hypothesis import strategies as st
from torch import nn

from evener.embedding import (
    Adagrad,
    Adam,
    AdamW,
    Counter,
    Lamb,
    LazyAdam,
    Options,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    Sgd,
    Store,
    Ttl,
    folders,
    forget,
    parts,
)
from evener.embedding import store as store_module
from evener.embedding.torch import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicOptimizer,
    dcp,
    inputs,
    load,
    save,
)
from evener.embedding.torch import state as table_state
from evener.embedding.torch.dcp import TableLoadPlanner
from evener.embedding.torch.lookups import _Backward, _Pass
from evener.embedding.torch.modules import DynamicEmbeddingBag as Bag
from evener.embedding.torch.table import Table
from evener.errors import UsageError
from tests.embedding import formulas
from tests.twins import _dcp
from tests.twins.harness import Program, Twin

torch.set_num_threads(1)  # rows of 3 numbers; threads would wait for each other
DIM, KEYS, LR, EPS, DECAY = 3, 10, 0.1, 1e-3, 0.2
UNIVERSE = torch.tensor([0, -1, 1, 2**62, -(2**62), 2**63 - 1, -(2**63), 77, -12345, 10**15])
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (Sgd(LR), lambda p: torch.optim.SGD(p, LR)),
    "sgd decay": (Sgd(LR, DECAY), lambda p: torch.optim.SGD(p, LR, weight_decay=DECAY)),
    "adagrad": (Adagrad(LR, EPS), lambda p: torch.optim.Adagrad(p, LR, eps=EPS)),
    "adagrad decay": (
        Adagrad(LR, EPS, weight_decay=DECAY),
        lambda p: torch.optim.Adagrad(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "adam": (Adam(LR, eps=EPS), lambda p: torch.optim.Adam(p, LR, eps=EPS)),
    "adam decay": (
        Adam(LR, eps=EPS, weight_decay=DECAY),
        lambda p: torch.optim.Adam(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "adam_w": (
        AdamW(LR, eps=EPS, weight_decay=DECAY),
        lambda p: torch.optim.AdamW(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "row_wise_adagrad": (
        RowWiseAdagrad(LR, EPS, DECAY),
        lambda p: formulas.RowWiseAdagrad(p, LR, eps=EPS, weight_decay=DECAY, decoupled=False),
    ),
    "row_wise_adagrad decoupled": (
        RowWiseAdagrad(LR, EPS, DECAY, decoupled=True),
        lambda p: formulas.RowWiseAdagrad(p, LR, eps=EPS, weight_decay=DECAY, decoupled=True),
    ),
    "partial_row_wise_adam": (
        PartialRowWiseAdam(LR, eps=EPS, weight_decay=DECAY),
        lambda p: formulas.PartialRowWiseAdam(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "lamb": (
        Lamb(LR, eps=EPS, weight_decay=DECAY),
        lambda p: formulas.Lamb(p, LR, eps=EPS, weight_decay=DECAY),
    ),
    "lazy_adam": (LazyAdam(LR, eps=EPS), lambda p: torch.optim.SparseAdam(p, LR, eps=EPS)),
}
_NUMBERS = itertools.count()


class Fails(torch.autograd.Function):
    """A layer whose backward pass fails."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> Any:
        raise RuntimeError("a layer that fails")


@dataclass
class Saved:
    """What the reference has, all of it."""

    weight: torch.Tensor
    slots: dict[str, torch.Tensor]
    there: torch.Tensor
    version: torch.Tensor
    counts: dict[int, int]
    steps: int
    step: int
    aged: int


@dataclass
class Reference:
    """A dense weight, and what admission and expiry do to its rows."""

    kind: str
    count: int
    life: int
    start: torch.Tensor
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.weight = nn.Parameter(self.start.clone())
        self.optimizer = OPTIMIZERS[self.kind][1]([self.weight])
        self.there = torch.zeros(KEYS, dtype=torch.bool)
        self.version = torch.zeros(KEYS, dtype=torch.int64)
        self.counts: dict[int, int] = {}
        self.fresh: set[int] = set()  # counts of the generation that is now
        self.steps = self.step = self.aged = 0

    def slots(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[self.weight]
        return {k: v for k, v in state.items() if torch.is_tensor(v) and v.ndim == 2}

    def begin(self, at: int) -> None:
        """A row that is not there."""
        self.there[at] = False
        with torch.no_grad():
            self.weight[at] = self.start[at]
            for slot in self.slots().values():
                slot[at] = 0

    def insert(self, at: int) -> None:
        self.there[at] = True
        self.version[at] = self.step

    def look(self, ids: list[int], train: bool) -> None:
        for at in ids if train else ():
            if self.there[at]:
                continue
            n = self.counts.pop(at, 0) + 1
            self.fresh.discard(at)
            if n >= self.count:
                self.insert(at)
            else:
                self.counts[at] = n
                self.fresh.add(at)

    def forget(self) -> None:
        self.seen = set()
        self.weight.grad = None

    def apply(self) -> None:
        """One step of torch's optimizer."""
        if self.count < 2:
            for at in self.seen:
                if not self.there[at]:
                    self.insert(at)
        seen = torch.zeros(KEYS, dtype=torch.bool)
        seen[[at for at in self.seen if self.there[at]]] = True
        given = self.weight.grad
        gradient = torch.zeros_like(self.weight) if given is None else given.detach().clone()
        gradient[~seen] = 0
        before = self.weight.detach().clone()
        slots = {name: slot.clone() for name, slot in self.slots().items()}
        if self.kind == "lazy_adam":
            at = seen.nonzero().T
            gradient = torch.sparse_coo_tensor(at, gradient[seen], gradient.shape).coalesce()
        self.weight.grad = gradient
        self.optimizer.step()
        with torch.no_grad():
            self.weight[~seen] = before[~seen]
            for name, slot in self.slots().items():
                old = slots.get(name, torch.zeros_like(slot))
                fade = 1.0
                if self.kind.startswith("adam") and not self.kind.startswith("adam_w"):
                    fade = {"exp_avg": 0.9, "exp_avg_sq": 0.999}[name]
                slot[~seen] = old[~seen] * fade
                slot[~self.there] = 0
        self.version[seen] = self.step
        self.forget()
        self.steps += 1
        self.step += 1

    def evict(self) -> None:
        for at in range(KEYS):
            if self.there[at] and self.step - int(self.version[at]) > self.life:
                self.begin(at)
        if self.step - self.aged >= self.life:
            self.aged = self.step
            self.counts = {at: n for at, n in self.counts.items() if at in self.fresh}
            self.fresh = set()

    def saved(self) -> Saved:
        return Saved(
            self.weight.detach().clone(),
            {name: slot.clone() for name, slot in self.slots().items()},
            self.there.clone(),
            self.version.clone(),
            dict(self.counts),
            self.steps,
            self.step,
            self.aged,
        )

    def load(self, saved: Saved) -> None:
        self.forget()
        with torch.no_grad():
            self.weight.copy_(saved.weight)
        state = self.optimizer.state[self.weight]
        for name, slot in self.slots().items():
            slot.copy_(saved.slots.get(name, torch.zeros_like(slot)))
        if "step" in state:
            if torch.is_tensor(state["step"]):
                state["step"].fill_(float(saved.steps))
            else:
                state["step"] = saved.steps
        self.there = saved.there.clone()
        self.version = saved.version.clone()
        self.counts, self.fresh = dict(saved.counts), set(saved.counts)
        self.steps, self.step, self.aged = saved.steps, saved.step, saved.aged


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


def near(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape, f"{what}: {list(found.shape)}, not {list(right.shape)}"
    if found.numel():
        off = (found.detach() - right.detach()).abs().max()
        assert off <= 2e-5 * (1 + right.detach().abs().max()), f"{what}: off by {float(off):.2g}"


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


# --- programs ---

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


# --- faults: what was wrong once ---


def _options(of: type, **options: Any) -> Any:
    """Options of a kind of optimizer are others than the program says."""
    plain = of.to_dict

    def to_dict(self: Any) -> dict[str, Any]:
        return {**plain(self), **options}

    return mock.patch.object(of, "to_dict", to_dict)


def _old_pass() -> Any:
    """What a pass touched stays where it ended with an error, and no later one ends."""
    left: list[_Pass] = []

    def current(_self: _Backward) -> _Pass:
        if not left:
            left.append(_Pass())
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: left.pop().end())
        return left[0]

    return mock.patch.object(_Backward, "current", current)


@contextlib.contextmanager
def _one_chain() -> Iterator[None]:
    """A checkpoint is the store's last file, and a delta follows that file alone."""
    last: dict[str, Path] = {}

    def writes(call: Any, place: Any) -> Any:
        def write(self: Store, path: Path) -> Any:
            folder = place(Path(path))
            if call is delta and last.get(self.name, folder) != folder:
                raise ValueError(f"the last file of {self.name} is not in {folder}")
            last[self.name] = folder
            return call(self, path)

        return write

    delta = Store.delta
    with (
        mock.patch.object(Store, "save", writes(Store.save, lambda path: path.parent)),
        mock.patch.object(Store, "snapshot", writes(Store.snapshot, lambda path: path)),
        mock.patch.object(Store, "delta", writes(delta, lambda path: path)),
    ):
        yield


def _own_counts() -> Any:
    """Keys that this store has not counted itself are not counted when other ranks' come."""
    plain = Store.set_counts

    def set_counts(self: Store, keys: Any, counts: Any) -> None:
        at = np.isin(keys, self.counts()[0])
        plain(self, keys[at], counts[at])

    return mock.patch.object(Store, "set_counts", set_counts)


def _old_pool(self: Any, values: torch.Tensor, inverse: Any, of: Any) -> torch.Tensor:
    if inverse is None and of.length:
        rows = values.view(of.count, of.length, -1)
        return rows.sum(1) if self.mode == "sum" else rows.mean(1)
    return _POOL(self, values, inverse, of)


def _old_output(out: Any, shape: Any, dtype: Any, _what: str) -> Any:
    return np.empty(shape, dtype) if out is None else np.asarray(out)


def _by_step(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"step-*/{folders.MANIFEST}"))


def _values_alone(table: Table, rows: Any) -> bytes:
    """What another rank wrote, without slots."""
    with parts.aside(table_state.held(table), table_state._bytes(rows)) as other:
        for chunk in list(other.export_rows()):
            values = chunk.values.copy()
            values[:, DIM:] = 0
            other.put_rows(chunk.keys, values, chunk.frequencies, chunk.versions)
        return other.save_bytes()


def _own_table(cls: Any, options: Options, name: str | None, **how: Any) -> Table:
    return Table(next(_NUMBERS), Store(name or f"own-{next(_NUMBERS)}", options), **how)


_POOL = Bag._pool
FAULTS: dict[str, Any] = {
    "checkpoints are in the order of their steps": lambda: mock.patch.object(
        folders, "_whole", _by_step
    ),
    "checkpoints are in the chain of deltas": _one_chain,
    "torch.distributed.checkpoint keeps one rank's rows": lambda: mock.patch.object(
        table_state, "part", lambda *_: "0-of-1"
    ),
    "slots do not go to other ranks": lambda: mock.patch.object(dcp, "own_rows", _values_alone),
    "rows of other owners stay": lambda: mock.patch.object(parts, "keep_own", lambda *_: None),
    "a failed backward pass stays": _old_pass,
    "modules of one name step each": lambda: mock.patch.object(
        Table, "named", classmethod(_own_table)
    ),
    "LazyAdam adds epsilon after the correction": lambda: _options(
        LazyAdam, kind="adam_w", weight_decay=0.0
    ),
    "Adagrad has no weight decay": lambda: _options(Adagrad, weight_decay=0.0),
    "Adam has no weight decay": lambda: _options(Adam, weight_decay=0.0),
    "row-wise Adagrad always decays decoupled": lambda: _options(RowWiseAdagrad, decoupled=True),
    "batches without rows fail": lambda: mock.patch.object(Bag, "_pool", _old_pool),
    "features with batches of their own are pooled": lambda: mock.patch.object(
        inputs, "_one_batch", lambda *_: None
    ),
    "read-only memory is written": lambda: mock.patch.object(store_module, "_output", _old_output),
    "counts are lost on other ranks": _own_counts,
}
TWIN = Twin("embedding", PROGRAMS, check, FAULTS, programs_per_round=300)
