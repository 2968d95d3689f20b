"""The memory engine on two or three ranks against plain torch on one: stages 1 to 3, over Gloo.

Each rank trains on a batch of its own. The plain model, on every rank, trains on all. A rank may
leave out a branch or a block, or run blocks in another order. That is right at stages 1 and 2. At
stage 3 it is refused where ranks could compute with the weights of another block. With Muon each
rank has a part of every matrix.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
from evener.zero.chunk import Chunk, Run
from evener.zero.gradients import Gradients
from evener.zero.loading import Loading
from evener.zero.matrices import Shared
from evener.zero.owners import Cut, Exchange
from evener.zero.ranks import Ranks as Shares
from evener.zero.rules import Muon
from evener.zero.updates import Updates
from tests.twins import _moments
from tests.twins import zero as one
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin

RANKS, MOST, ROWS, LENGTH = 2, 3, 2, 3
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


def _ranks_of(program: Program) -> int:
    ranks: int = program.get("ranks", RANKS)
    return ranks


class Pair:
    """One rank's engine, and the plain model of all."""

    prefix = ""

    def __init__(self, program: Program, rank: int, folder: str) -> None:
        self.program, self.rank, self.folder = program, rank, Path(folder)
        self.ranks = _ranks_of(program)
        self.engines: list[zero.Engine] = []
        self.saved: Any = None
        torch.manual_seed(program["seed"])
        self.plain = self._net()
        self.plain_optimizer = one._optimizer(program["optimizer"], self.plain.parameters())
        self._start(copy.deepcopy(self.plain))
        self.bytes = program.get("moments") == "int8" and self.given is None
        if self.bytes:
            trained = dict(self.plain.named_parameters())
            _moments.coarse(self.plain_optimizer, trained, lambda: self.engine)

    def _net(self) -> Net:
        given = self.program
        return Net(given["blocks"], given["norm"], given["tied"])

    def _start(self, model: Net) -> None:
        program = self.program
        optimizer = one._optimizer(program["optimizer"], model.parameters())
        self.given = optimizer if isinstance(optimizer, one.Several) else None
        moments = program.get("moments", "fp32")
        self.engine, self.optimizer, *_ = zero.initialize(
            model=model,
            optimizer=optimizer if self.given is None else self.given.each,
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
                    "moments": moments if self.given is None else "fp32",
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
            groups = {engine.ranks.weights, engine.ranks.gradients, engine.ranks.matrices}
            if isinstance(saving, checkpoint.Save):
                groups |= {saving._group, saving._writers}
            for group in sorted(groups - {None}, key=lambda g: g.group_name):
                dist.destroy_process_group(group)

    def train(
        self, seed: int, loss: str = "plain", sides: Any = (True,) * MOST,
        skips: Any = (-1,) * MOST, backs: Any = (False,) * MOST,
    ) -> None:  # fmt: skip
        accumulate = self.program["accumulate"]
        for micro in range(accumulate):
            losses = []
            for rank in range(self.ranks):
                x, y = _data(seed, rank, micro)
                given = sides[rank], skips[rank], backs[rank]
                losses.append(one.LOSSES[loss](self.plain(x, *given), y))
            x, y = _data(seed, self.rank, micro)
            given = sides[self.rank], skips[self.rank], backs[self.rank]
            mine = one.LOSSES[loss](self.engine(x, *given), y)
            if self.program["stage"] < 3 or len({*backs}) == 1:
                torch.testing.assert_close(mine.detach(), losses[self.rank].detach(), **one.CLOSE)
            self.engine.backward(mine)
            if self.given is None:
                self.engine.step()
            (torch.stack(losses).mean() / accumulate).backward()
        if self.given is not None:
            for each in self.given.each:
                each.step()
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
        """A block that one rank leaves out; at stage 3 all leave out the same."""
        self.train(seed, skips=skips if self.program["stage"] < 3 else [skips[0]] * MOST)

    def do_evaluate(self, seed: int) -> None:
        x, _ = _data(seed, self.rank, 0)
        with torch.no_grad():
            torch.testing.assert_close(self.engine(x), self.plain(x), **one.CLOSE)

    def do_forget(self, seed: int) -> None:
        """A backward pass of which nothing is used."""
        x, y = _data(seed, self.rank, 0)
        one._ce(self.engine(x), y).backward()
        self.optimizer.zero_grad()

    def do_part(self, seed: int, which: int) -> None:
        """A backward pass of which one of several optimizers forgets its part."""
        if self.given is None:
            return
        losses = []
        for rank in range(self.ranks):
            x, y = _data(seed, rank, 0)
            losses.append(one._ce(self.plain(x), y))
        torch.stack(losses).mean().backward()
        x, y = _data(seed, self.rank, 0)
        one._ce(self.engine(x), y).backward()
        self.given.each[which].zero_grad()
        self.plain_optimizer.each[which].zero_grad()
        self.train(seed + 1)

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
        self.train(seed, backs=(False, *(True,) * (MOST - 1)))

    def compare(self) -> None:
        self.engine.drain()
        wanted = dict(self.plain.named_parameters())
        for chunk in self.engine.chunks():
            mine = chunk.states.full()
            whole = torch.empty(mine.numel() * self.ranks)
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


def _own_moves(self: Updates, chunks: list[Chunk]) -> list[set[int]]:
    """But where ranks would then wait for each other: in gathers of chunks that moved, and in
    exchanges of matrices."""
    found = _moving(self, chunks)
    mine = [set() if chunk.group.matrices else places & chunk.given
            for chunk, places in zip(chunks, found, strict=True)]  # fmt: skip
    return [own or places for own, places in zip(mine, found, strict=True)]


_moving = Updates.moving


def _change(self: Shared, cut: Cut) -> torch.Tensor:
    return self._change(Run(cut.begin, cut.end, 1, place=cut.place))


def _own_parts(self: Shared) -> None:
    """Each rank takes the products of what it has."""
    for cut in self._plan.mine:
        change = _change(self, cut)
        change.copy_(self._rule.products(change.clone().view(1, -1), self._hyper).view(-1))


def _one_way(self: Shared) -> None:
    """What the products made stays with the owner."""
    sent = {cut: _change(self, cut).clone() for cut in self._plan.mine}
    _exchange(self)
    for cut, change in sent.items():
        if cut.owner != cut.rank:
            _change(self, cut).copy_(change)


def _turned(found: list[Cut], rank: int, world: int) -> Exchange:
    """The parts that come to an owner are put together in another order."""
    made = _parts(found, rank, world)
    return dataclasses.replace(made, owned=made.owned[::-1])


def _forgetful(self: Muon, momentum: torch.Tensor, *given: Any) -> torch.Tensor:
    """The momentum is that of this step alone."""
    return _first_half(self, momentum.zero_(), *given)


def _clear_all(self: Gradients, _groups: Any = None) -> None:
    _clear(self)


_clear = Gradients.clear
_exchange, _parts, _first_half = Shared.exchange, Exchange.of, Muon.first_half
FAULTS: dict[str, Callable[[], Any]] = {
    "chunks are reduced as they come": _put(Gradients, "_release", _as_it_comes),
    "gradients are summed, and not averaged": _put(Shares, "reduce", _summed),
    "a rank clips by its own norm": _put(Shares, "total", lambda _, value: value.clone()),
    "a rank moves what it had a gradient of": _put(Updates, "moving", _own_moves),
    "Muon: a rank takes the products of its own part": _put(Shared, "exchange", _own_parts),
    "Muon: what the products made stays with the owner": _put(Shared, "exchange", _one_way),
    "Muon: parts are put together in another order": _put(Exchange, "of", _turned),
    "Muon: momentum is that of this step alone": _put(Muon, "first_half", _forgetful),
    "Muon: one optimizer forgets the sums of all": _put(Gradients, "clear", _clear_all),
    "the order of gathers is not compared": lambda: mock.patch.object(
        Loading, "order", property(lambda _: 0, lambda *_: None), create=True
    ),
}
_switch = Switch()
_world = functools.cache(lambda ranks: Ranks(ranks, timeout=60))


def check(program: Program) -> None:
    """Run it on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        found = _world(_ranks_of(program)).run(
            "tests.twins.zero_ranks:run", program, _switch.fault, folder
        )
    assert len({*found}) == 1, found


_seeds = st.integers(0, 100)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), _seeds, *given).map(list)


def _each(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, min_size=MOST, max_size=MOST)


STEPS = st.one_of(
    _step("train", st.sampled_from(LOSSES)),
    _step("branch", _each(st.booleans())),
    _step("branch", _each(st.booleans())),
    _step("skip", _each(st.integers(-1, 2))),
    _step("evaluate"),
    _step("forget"),
    _step("part", st.integers(0, 1)),
    _step("bad"),
    _step("resume", st.booleans()),
    _step("order"),
)


def _bounded(program: Program) -> Program:
    """Without what docs/reference/limits.md says of stage 3: other gathers than those that are
    refused before the step wait until the group's timeout. Orders differ in the first step alone.
    """
    program = {**program, "steps": sorted(program["steps"], key=lambda step: step[0] != "order")}
    # Over Gloo nobody outlives gathers of other sizes: a block of Muon's has two chunks.
    apart = program["optimizer"] == "Muon" and program["resident"]
    if program["stage"] == 3 and (apart or program["blocks"] - program["resident"] < 3):
        steps = [step for step in program["steps"] if step[0] != "order"]
        return {**program, "steps": steps or [["train", 0, "plain"]]}
    return program


PROGRAMS = st.fixed_dictionaries(
    {
        "seed": _seeds,
        "ranks": st.sampled_from([RANKS, RANKS, MOST]),
        "stage": st.integers(1, 3),
        "blocks": st.integers(1, 4),
        "norm": st.sampled_from(["none", "layer"]),
        "tied": st.booleans(),
        "moments": st.sampled_from(["fp32", "fp32", "int8"]),
        "optimizer": st.sampled_from(["SGD", "AdamW", "Muon", "Muon"]),
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
