"""The memory engine on two ranks against plain torch on one: stages 1 to 3, over Gloo.

Each rank trains on a batch of its own. The plain model, on every rank, trains on both. A rank may
leave out a branch or a block, or run blocks in another order. That is right at stages 1 and 2. At
stage 3 it is refused where ranks could compute with the weights of another block.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero import checkpoint, units
from evener.zero.gradients import Gradients
from evener.zero.loading import Loading
from evener.zero.ranks import Ranks as Shares
from tests.twins import _moments
from tests.twins import zero as one
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin

RANKS, ROWS, LENGTH = 2, 2, 3
LOSSES = ("plain", "smooth", "sum", "weighted", "ignored", "z", "own", "shifted")


class Net(one.Net):
    """Blocks may also run in the other order."""

    def body(  # type: ignore[override]
        self, x: torch.Tensor, side: bool = True, skip: int = -1, back: bool = False
    ) -> torch.Tensor:
        x = self.embed(x)
        layers = list(enumerate(self.layers))
        for number, layer in reversed(layers) if back else layers:
            if number != skip:
                x = layer(x, side)
        return x * self.scale

    def forward(self, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(*args))
        return out


def _data(seed: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * seed + 10 * micro + rank)
    x = torch.randint(0, one.WORDS, (ROWS, LENGTH), generator=made)
    return x, torch.randint(0, one.WORDS, (ROWS, LENGTH), generator=made)


class Pair:
    """One rank's engine, and the plain model of both."""

    prefix = ""

    def __init__(self, program: Program, rank: int, folder: str) -> None:
        self.program, self.rank, self.folder = program, rank, Path(folder)
        self.engines: list[zero.Engine] = []
        self.saved: Any = None
        torch.manual_seed(program["seed"])
        self.plain = self._net()
        self.plain_optimizer = one._optimizer(program["optimizer"], self.plain.parameters())
        self._start(copy.deepcopy(self.plain))
        self.bytes = program.get("moments") == "int8"
        if self.bytes:
            trained = dict(self.plain.named_parameters())
            _moments.coarse(self.plain_optimizer, trained, lambda: self.engine)

    def _net(self) -> Net:
        given = self.program
        return Net(given["blocks"], given["norm"], given["tied"])

    def _start(self, model: Net) -> None:
        program = self.program
        self.engine, self.optimizer, *_ = zero.initialize(
            model=model,
            optimizer=one._optimizer(program["optimizer"], model.parameters()),
            config={
                "gradient_accumulation_steps": program["accumulate"],
                "gradient_clipping": program["clip"],
                "zero_optimization": {
                    "stage": program["stage"],
                    "stage3_param_persistence_threshold": 0,
                },
                "evener": {
                    "device": "cpu",
                    "loss": "fused",
                    "checkpointing": program["recompute"],
                    "moments": program.get("moments", "fp32"),
                },
            },
            resident={f"{self.prefix}layers.{n}/0" for n in range(program["resident"])},
            machine=one.MACHINE,
        )
        self.engine.threads = 1
        self.engines.append(self.engine)

    def close(self) -> None:
        """Groups are given back too: a world runs thousands of programs."""
        for engine in self.engines:
            with contextlib.suppress(Exception):
                engine.close()
            saving = engine.saving
            groups = {engine.ranks.weights, engine.ranks.gradients}
            if isinstance(saving, checkpoint.Save):
                groups |= {saving._group, saving._writers}
            for group in sorted(groups - {None}, key=lambda g: g.group_name):
                dist.destroy_process_group(group)

    def train(
        self, seed: int, loss: str = "plain", sides: Any = (True, True), skips: Any = (-1, -1),
        backs: Any = (False, False),
    ) -> None:  # fmt: skip
        accumulate = self.program["accumulate"]
        for micro in range(accumulate):
            losses = []
            for rank in range(RANKS):
                x, y = _data(seed, rank, micro)
                given = sides[rank], skips[rank], backs[rank]
                losses.append(one.LOSSES[loss](self.plain(x, *given), y))
            x, y = _data(seed, self.rank, micro)
            given = sides[self.rank], skips[self.rank], backs[self.rank]
            mine = one.LOSSES[loss](self.engine(x, *given), y)
            if self.program["stage"] < 3 or len({*backs}) == 1:
                torch.testing.assert_close(mine.detach(), losses[self.rank].detach(), **one.CLOSE)
            self.engine.backward(mine)
            self.engine.step()
            (torch.stack(losses).mean() / accumulate).backward()
        if self.program["clip"]:
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.program["clip"])
            if self.program["stage"] < 3 or len({*backs}) == 1:
                assert abs(self.engine.get_global_grad_norm() - norm) <= 1e-2 * norm, "the norm"
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def do_train(self, seed: int, loss: str) -> None:
        self.train(seed, loss)

    def do_branch(self, seed: int, sides: list[bool]) -> None:
        """A branch that one rank leaves out: its parameters have a gradient on the other."""
        self.train(seed, sides=sides)

    def do_skip(self, seed: int, skips: list[int]) -> None:
        """A block that one rank leaves out; at stage 3 both leave out the same."""
        self.train(seed, skips=skips if self.program["stage"] < 3 else [skips[0]] * RANKS)

    def do_evaluate(self, seed: int) -> None:
        x, _ = _data(seed, self.rank, 0)
        with torch.no_grad():
            torch.testing.assert_close(self.engine(x), self.plain(x), **one.CLOSE)

    def do_forget(self, seed: int) -> None:
        """A backward pass of which nothing is used."""
        x, y = _data(seed, self.rank, 0)
        one._ce(self.engine(x), y).backward()
        self.optimizer.zero_grad()

    def do_bad(self, seed: int) -> None:
        """A loss that is not finite on one rank: nobody steps."""
        for micro in range(self.program["accumulate"]):
            x, y = _data(seed, self.rank, micro)
            loss = one._ce(self.engine(x), y)
            self.engine.backward(loss * float("nan") if self.rank == 0 else loss)
            self.engine.step()

    def do_resume(self, seed: int, elsewhere: bool) -> None:
        """Save, go on, and go back, here or in an engine of a model that was drawn anew."""
        zero.save_checkpoint(self.engine, self.folder, keep=1)
        saved = copy.deepcopy(self._kept())
        self.train(seed + 1)
        if elsewhere:
            self.engine.close()
            self._start(self._net())
        zero.load_checkpoint(self.engine, self.folder)
        self._back(saved)

    def _kept(self) -> Any:
        return self.plain.state_dict(), self.plain_optimizer.state_dict()

    def _back(self, saved: Any) -> None:
        self.plain.load_state_dict(saved[0])
        self.plain_optimizer.load_state_dict(saved[1])

    def do_order(self, seed: int) -> None:
        """Ranks run blocks in different orders, in the first step."""
        self.train(seed, backs=(False, True))

    def compare(self) -> None:
        self.engine.drain()
        wanted = dict(self.plain.named_parameters())
        for chunk in self.engine.chunks():
            mine = chunk.states.full()
            whole = torch.empty(mine.numel() * RANKS)
            dist.all_gather_into_tensor(whole, mine)
            for piece in chunk.group.pieces:
                found = whole[piece.offset : piece.offset + piece.numel].view(piece.shape)
                mine, theirs = {"": found}, {"": wanted[piece.name].detach()}
                close = _moments.close if self.bytes else torch.testing.assert_close
                close(mine, theirs, **one.CLOSE)


def run(rank: int, _size: int, program: Program, fault: str, folder: str) -> str:
    """One rank: "" or "refused"; raises where something differs."""
    logging.getLogger("evener").setLevel(logging.ERROR)
    small = mock.patch.object(units, "LEAST", _moments.LEAST)
    with small, FAULTS[fault]() if fault else contextlib.nullcontext():
        pair = Pair(program, rank, folder)
        try:
            return follow(pair, program)
        finally:
            pair.close()


def follow(pair: Pair, program: Program) -> str:
    """Take the program's steps, and one more: "" or "refused"."""
    for number, (kind, *given) in enumerate(program["steps"]):
        if kind == "order" and number:
            continue
        mixed = kind == "order" and program["stage"] == 3 and program["blocks"] > 1
        try:
            getattr(pair, f"do_{kind}")(*given)
        except UsageError:
            if mixed:
                return "refused"
            raise
        assert not mixed, "ranks gathered other weights, and nothing was said"
    pair.train(1)
    pair.compare()
    return ""


# --- Faults ---------------------------------------------------------------------------------------


def _put(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


def _as_it_comes(self: Gradients, all_of_them: bool = False) -> None:
    """Each rank reduces chunks of the same size in the order in which they come to it."""
    if self._after and not all_of_them:
        return
    known = {chunk.index: chunk for chunk in self._chunks}
    done: set[int] = vars(self).setdefault("done", set())
    while self._next < len(self._chunks):
        size = self._chunks[self._next].flat.numel()
        left = [*self._ready, *(known if all_of_them else ())]
        fits = [i for i in left if i not in done and known[i].flat.numel() == size]
        if not fits:
            return
        done.add(fits[0])
        self._next += 1
        chunk, whole = known[fits[0]], self._ready.pop(fits[0], None)
        self._deliver(chunk, self._zeros(chunk) if whole is None else whole)
    if all_of_them:
        self._next = 0
        done.clear()


def _summed(self: Shares, share: torch.Tensor, whole: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(share, whole, group=self.gradients)


FAULTS: dict[str, Callable[[], Any]] = {
    "chunks are reduced as they come": _put(Gradients, "_release", _as_it_comes),
    "gradients are summed, and not averaged": _put(Shares, "reduce", _summed),
    "a rank clips by its own norm": _put(Shares, "total", lambda _, value: value.clone()),
    "a rank moves what it had a gradient of": _put(Shares, "any", lambda _, mine: mine),
    "the order of gathers is not compared": lambda: mock.patch.object(
        Loading, "order", property(lambda _: 0, lambda *_: None), create=True
    ),
}
_switch = Switch()
_world = functools.cache(lambda: Ranks(RANKS, timeout=60))


def check(program: Program) -> None:
    """Run it on both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        found = _world().run("tests.twins.zero_ranks:run", program, _switch.fault, folder)
    assert len({*found}) == 1, found


_seeds = st.integers(0, 100)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), _seeds, *given).map(list)


def _each(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=RANKS, max_size=RANKS)


STEPS = st.one_of(
    _step("train", st.sampled_from(LOSSES)),
    _step("branch", _each(st.booleans())),
    _step("branch", _each(st.booleans())),
    _step("skip", _each(st.integers(-1, 2))),
    _step("evaluate"),
    _step("forget"),
    _step("bad"),
    _step("resume", st.booleans()),
    _step("order"),
)


def _bounded(program: Program) -> Program:
    """Without what docs/reference/limits.md says of stage 3: other gathers than those that are
    refused before the step wait until the group's timeout. Orders differ in the first step alone.
    """
    program = {**program, "steps": sorted(program["steps"], key=lambda step: step[0] != "order")}
    if program["stage"] == 3 and program["blocks"] - program["resident"] < 3:
        steps = [step for step in program["steps"] if step[0] != "order"]
        return {**program, "steps": steps or [["train", 0, "plain"]]}
    return program


PROGRAMS = st.fixed_dictionaries(
    {
        "seed": _seeds,
        "stage": st.integers(1, 3),
        "blocks": st.integers(1, 4),
        "norm": st.sampled_from(["none", "layer"]),
        "tied": st.booleans(),
        "moments": st.sampled_from(["fp32", "fp32", "int8"]),
        "optimizer": st.sampled_from(["SGD", "AdamW"]),
        "accumulate": st.integers(1, 2),
        "clip": st.sampled_from([0.0, 0.5]),
        "recompute": st.booleans(),
        "resident": st.sampled_from([0, 0, 0, 1, 2]),
        "steps": st.lists(STEPS, min_size=1, max_size=6),
    }
).map(_bounded)
TWIN = Twin(
    name="zero_ranks",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=50,
)
