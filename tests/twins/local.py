"""Local steps and the algorithm of the paper, which one process carries out for all ranks.

The reference knows nothing of Evener: plain modules, one per rank, each with its own optimizers,
schedule and GradScaler; shared weights whose gradient is the mean of how far the ranks went; and
`torch.optim.SGD(nesterov=True)` as the outer optimizer (DiLoCo, arXiv 2311.08105, algorithm 1).
Exact exchanges must give its weights and buffers bit for bit, after every step of the program. With
overlap the average is applied that number of steps later, and what a rank did in these is kept.

Forms round. There the reference takes the average that Evener found, which is checked by itself:
what a form with error feedback has sent and what it keeps must be all that there was, and a cast
may be off by its own rounding. All else is bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable, Set
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm import fragments, groups, rounds
from evener.comm.exchange import Exchange
from evener.ddp import accelerate, restore
from evener.ddp.local import LocalSteps
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin, often

RANKS = 2
# Of the largest magnitude in a fragment.
# Casts: each rank's BF16 has an error of 2^-8, and the sum as much of both.
KEPT, ROUNDED = 1e-5, 4 * 2.0**-8
CASTS = ("bf16", "fp16")
SMALLEST = 2.0**-25  # half of the smallest step of FP16: below 2^-14 steps do not shrink


# Averages by the parameter's number.
Means = dict[int, torch.Tensor]


class Net(nn.Module):
    """A norm with statistics, tied weights, and sizes that fill no line."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program["width"]
        torch.manual_seed(program["seed"])
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width) if program["norm"] else nn.LayerNorm(width)
        self.tied = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width)
        self.last.weight = self.tied.weight
        self.to(getattr(torch, program["dtype"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.tied(torch.relu(self.norm(self.first(x))))))

    def parts(self) -> list[nn.Module]:
        return [self.first, self.norm, self.tied]


def optimizers(net: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    params = list(net.parameters())
    if kind == "muon":
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(params, lr=1e-2),
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=1e-3),
    }
    return [made[kind]()]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class Trainee:
    """One rank's model and what trains it, as a user's program has it."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.net = Net(program)
        self.model: nn.Module = self.net
        self.optimizers = optimizers(self.net, program["optimizer"])
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(one, 3, 0.7) for one in self.optimizers
        ] * program["schedule"]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program["scaler"])

    def step(self, seed: int, micro: int, overflow: int) -> None:
        """One step of `micro` backwards; on rank `overflow` the loss is infinite."""
        dtype = next(self.net.parameters()).dtype
        for part in range(micro):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * part + self.rank)
            x = torch.randn(5, 8, generator=generator).to(dtype)
            loss = self.model(x).float().square().mean() / micro
            if overflow == self.rank and self.program["scaler"]:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
        if self.program["clip"]:
            for optimizer in self.optimizers:
                if _has_gradients(optimizer):
                    self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        for optimizer in self.optimizers:
            if _has_gradients(optimizer):
                self.scaler.step(optimizer)
            else:  # all of it is frozen, which a scaler refuses
                optimizer.step()
            optimizer.zero_grad()
        self.scaler.update()
        for schedule in self.schedules:
            schedule.step()

    def saved(self) -> dict[str, Any]:
        parts = [self.net, *self.optimizers, *self.schedules, self.scaler]
        return copy.deepcopy({str(i): part.state_dict() for i, part in enumerate(parts)})

    def load(self, state: dict[str, Any]) -> None:
        parts = [self.net, *self.optimizers, *self.schedules, self.scaler]
        for i, part in enumerate(parts):
            part.load_state_dict(copy.deepcopy(state[str(i)]))  # type: ignore[attr-defined]

    def values(self) -> list[torch.Tensor]:
        return [*(p.detach() for p in self.net.parameters()), *self.net.buffers()]


class Reference:
    """All ranks of the paper's algorithm, in one process."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks = [Trainee(program, rank) for rank in range(RANKS)]
        self.since, self.overlap = 0, overlap_of(program)
        # From the begin of an exchange until it is applied: the weights that each rank sent, and
        # the averages. `tried`: ranks that loaded weights and took theirs back meanwhile, which
        # wait for the next meeting; `asks`: not if that was since a checkpoint was loaded.
        self.sent: list[list[torch.Tensor] | None] | None = None
        self.means: list[torch.Tensor] | None = None
        self.tried: set[int] = set()
        self.asks = False
        self.begin()

    def begin(self) -> None:
        """Go on from the weights as they are, which all ranks have."""
        self.sent = None
        weights = self.ranks[0].net.parameters()  # those of the others are equal
        self.shared = [nn.Parameter(p.detach().float().clone()) for p in weights]
        momentum = self.program["momentum"]
        self.outer = torch.optim.SGD(
            self.shared, self.program["lr"], momentum, nesterov=momentum > 0
        )

    def step(self, seed: int, micro: int, overflow: int, means: Means) -> None:
        for one in self.ranks:
            one.step(seed, micro, overflow)
        self.since += 1
        if self.since >= self.overlap:
            self.land(means)
        if self.since >= self.program["every"]:
            self.depart()
            if not self.overlap:
                self.land(means)

    def depart(self) -> None:
        self.arrive()
        self.means, self.tried = [], set()
        weights = [list(one.net.parameters()) for one in self.ranks]
        for i, shared in enumerate(self.shared):
            began = shared.detach().to(weights[0][i].dtype).float()
            parts = [(began - each[i].detach().float()) / RANKS for each in weights]
            self.means.append(parts[0] + parts[1])
        self.sent = [[p.detach().clone() for p in each] for each in weights]
        self.since = 0

    def land(self, means: Means) -> None:
        """Apply the average; `means`: that of a form."""
        if self.means is None:
            return
        trained = [p.requires_grad for p in self.ranks[0].net.parameters()]
        if self.sent is not None:  # else other weights were loaded, and it is for nothing
            for i, shared in enumerate(self.shared):
                shared.grad = means.get(i, self.means[i])
            self._forget(trained)
            self.outer.step()
            self._forget(trained)
        self.means = None
        self.arrive(set() if self.asks else self.tried)
        self.asks = False
        with torch.no_grad():
            for one in self.ranks[1:]:
                pairs = zip(one.net.buffers(), self.ranks[0].net.buffers(), strict=True)
                for buffer, first in pairs:
                    buffer.copy_(first)

    @torch.no_grad()
    def arrive(self, waiting: Set[int] = frozenset()) -> None:
        """All ranks but those that are `waiting` go on from the shared weights."""
        if self.sent is None:
            return
        for rank, (one, sent) in enumerate(zip(self.ranks, self.sent, strict=True)):
            if sent is None or rank in waiting:
                continue
            for p, shared, before in zip(one.net.parameters(), self.shared, sent, strict=True):
                p.copy_(shared + (p.float() - before.float()))
            self.sent[rank] = None
        if not waiting:
            self.sent = None

    def end_round(self, means: Means, last: Means) -> None:
        """`means` and `last`: of a form, of what is on its way and of what follows."""
        self.land(means)
        if self.since:
            self.depart()
            self.land(last)
        self.arrive()

    def _forget(self, trained: list[bool]) -> None:
        """Momentum does not move what is frozen."""
        for shared, on in zip(self.shared, trained, strict=True):
            if not on:
                self.outer.state.pop(shared, None)

    def saved(self) -> Any:
        ranks = [one.saved() for one in self.ranks]
        shared = [p.detach().clone() for p in self.shared]
        flight = copy.deepcopy((self.sent, self.means, self.tried))
        return ranks, shared, copy.deepcopy(self.outer.state_dict()), self.since, flight

    def load(self, state: Any) -> None:
        ranks, shared, outer, self.since, flight = state
        self.sent, self.means, self.tried = copy.deepcopy(flight)
        self.asks = self.means is not None
        for one, saved in zip(self.ranks, ranks, strict=True):
            one.load(saved)
        with torch.no_grad():
            for mine, theirs in zip(self.shared, shared, strict=True):
                mine.copy_(theirs)
        self.outer.load_state_dict(copy.deepcopy(outer))


def overlap_of(program: Program) -> int:
    return min(program.get("overlap", 0), program["every"] - 1)


class Pair:
    """Evener's rank and the reference of all, which take every step of a program together."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.plain = Reference(program)
        self.ours = Trainee(program, rank)
        self.form = program["form"]
        self.means: list[Means] = []  # of Evener's outer steps, until the reference has them
        self.saved: Any = None
        self.count = 0
        self.wrong = ""  # of an average
        self._accelerate()

    def _accelerate(self) -> None:
        # What is frozen at the wrap is nothing to DDP, and to local steps as little.
        flags = [p.requires_grad for p in self.ours.net.parameters()]
        self.ours.net.requires_grad_(True)
        model = DistributedDataParallel(self.ours.net)
        program = self.program
        accelerate(
            model,
            self.ours.optimizers,
            every=program["every"],
            overlap=overlap_of(program),
            outer_lr=program["lr"],
            outer_momentum=program["momentum"],
            mode=program["form"],
            bucket_bytes=program["bucket_bytes"],
        )
        for p, on in zip(self.ours.net.parameters(), flags, strict=True):
            p.requires_grad_(on)
        self.ours.model = model
        self.evener: Any = model.evener
        if self.form != "exact":
            self.sends: dict[int, torch.Tensor] = {}
            for fragment in self.evener.fragments:
                fragment.gone = functools.partial(self._gone, fragment, fragment.gone)
                step = functools.partial(self._outer_step, fragment, fragment.outer_step)
                fragment.outer_step = step

    def _gone(self, fragment: Any, gone: Callable[[], torch.Tensor]) -> torch.Tensor:
        whole = gone()  # a share of the mean, as what is kept
        self.sends[id(fragment)] = whole + _kept(fragment)
        return whole

    def _outer_step(
        self, fragment: Any, step: Callable[..., None], whole: torch.Tensor, options: Any
    ) -> None:
        """Check the average `whole` of a form that rounds, and keep it for the reference."""
        sends = self.sends.pop(id(fragment), None)  # none: it comes from a checkpoint
        if sends is not None:
            mean = sends - _kept(fragment)
            dist.all_reduce(mean)
            bound = (ROUNDED if self.form in CASTS else KEPT) * _largest(sends)
            error = (mean - whole).abs().max().item()
            bound += SMALLEST if self.form == "fp16" else 0.0
            if error > 2 * bound:
                self.wrong = f"an average in {self.form} is off by {error}, and may be by {bound}"
        both = [torch.empty_like(whole) for _ in range(RANKS)]
        dist.all_gather(both, whole)
        if not torch.equal(both[0], both[1]):
            self.wrong = "the ranks' averages differ"
        number = {id(p): i for i, p in enumerate(self.ours.net.parameters())}
        if fragment is self.evener.fragments[0]:
            self.means.append({})
        for view, parameter in zip(fragment.views(whole), fragment.parameters, strict=True):
            self.means[-1][number[id(parameter)]] = view.clone()
        step(whole, options)

    def _found(self) -> Means:
        return self.means.pop(0) if self.means else {}

    # --- steps of a program ---

    def do_train(self, steps: int, micro: int, overflow: int) -> None:
        for _ in range(steps):
            self.count += 1
            self.ours.step(self.count, micro, overflow)
            self.plain.step(self.count, micro, overflow, self._found())
            self.compare()

    def do_freeze(self, part: int, on: bool) -> None:
        for one in (*self.plain.ranks, self.ours):
            one.net.parts()[part].requires_grad_(on)

    def do_evaluate(self) -> None:
        outputs = []
        for one in (self.plain.ranks[self.rank], self.ours):
            one.net.eval()
            with torch.no_grad():
                outputs.append(one.model(torch.ones(2, 8, dtype=next(one.net.parameters()).dtype)))
            one.net.train()
        assert torch.equal(*outputs), "outputs differ"

    def do_save(self) -> None:
        file = io.BytesIO()  # as a user has it: through a file
        torch.save({"trainee": self.ours.saved(), "evener": self.evener.state_dict()}, file)
        self.saved = self.plain.saved(), file.getvalue()

    def do_back(self, evener_first: bool, anew: bool) -> None:
        """Load on all ranks what each of them saved, into the same job or a new one."""
        if self.saved is None:
            return
        plain, file = self.saved
        self.sends = {}
        self.plain.load(plain)
        if anew:
            self.evener.close()
            self.ours.model = self.ours.net
            self._accelerate()
        state = torch.load(io.BytesIO(file), weights_only=False)
        loads = [
            lambda: self.evener.load_state_dict(state["evener"]),
            lambda: self.ours.load(state["trainee"]),
        ]
        for load in loads if evener_first else reversed(loads):
            load()

    def do_resume(self, evener_first: bool, anew: bool) -> None:
        """The end of one job and the beginning of the next."""
        self.do_save()
        self.do_back(evener_first, anew)

    def do_load(self, seed: int) -> None:
        """Other weights, on all ranks alike."""
        other = Net({**self.program, "seed": seed}).state_dict()
        for one in (*self.plain.ranks, self.ours):
            one.net.load_state_dict(other)
        self.plain.begin()

    def do_take(self) -> None:
        """All ranks load what rank 0 has saved in this moment: Accelerate's load_state."""
        first, *others = self.plain.ranks
        own = copy.deepcopy(first.net.state_dict())
        moved = False
        for one in others:
            pairs = zip(one.net.parameters(), first.net.parameters(), strict=True)
            moved |= not all(torch.equal(a, b) for a, b in pairs)
        for one in self.plain.ranks:
            one.net.load_state_dict(own)
        if moved:
            self.plain.begin()
        self.plain.tried = set(range(RANKS)) if self.plain.means is not None else set()
        box = [self.ours.net.state_dict()]
        dist.broadcast_object_list(box, src=0)
        self.ours.net.load_state_dict(box[0])

    def do_try(self, first: bool = False) -> None:
        """Evaluate with other weights, on all ranks or the `first`, and take the own back."""
        ranks = {0} if first else set(range(RANKS))
        mine = [self.ours] if self.rank in ranks else []
        for one in (*(self.plain.ranks[rank] for rank in ranks), *mine):
            own = copy.deepcopy(one.net.state_dict())
            one.net.load_state_dict({k: torch.zeros_like(v) for k, v in own.items()})
            one.net.load_state_dict(own)
        if self.plain.means is not None:
            self.plain.tried |= ranks

    def do_again(self) -> None:
        """Plain DDP for a moment."""
        on_its_way = self.plain.means is not None
        restore(self.ours.model)  # type: ignore[arg-type]
        self.plain.end_round(self._found() if on_its_way else {}, self._found())
        self.plain.since = 0
        self.plain.begin()
        self.ours.model = self.ours.net
        self._accelerate()

    def compare(self) -> None:
        theirs = self.plain.ranks[self.rank].values()
        names = [*dict(self.ours.net.named_parameters()), *dict(self.ours.net.named_buffers())]
        pairs = zip(names, theirs, self.ours.values(), strict=True)
        differ = [f"{name} differs" for name, a, b in pairs if not torch.equal(a, b)]
        agree(self.wrong or ", ".join(differ[:1]))


def agree(wrong: str) -> None:
    """Ranks go on together, or stop together: else one waits for the other."""
    found: list[str] = [""] * RANKS
    dist.all_gather_object(found, wrong)
    assert not any(found), found


def _kept(fragment: Any) -> torch.Tensor:
    residual = fragment.exchange.state.residual
    return torch.zeros_like(fragment.bucket.buffer) if residual is None else residual.clone()


def _largest(tensor: torch.Tensor) -> float:
    found = tensor.abs().max()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def run(rank: int, _size: int, program: Program, fault: str) -> None:
    """One rank: raises where something differs."""
    os.environ.update(LIGHT_TOPK_THRESHOLD="0", EVENER_TIMEOUT="20", EVENER_LOG="warning")
    nodes = mock.patch.object(groups, "host_identity", lambda: f"node{rank}")
    with nodes, FAULTS[fault]() if fault else contextlib.nullcontext():
        pair = Pair(program, rank)
        try:
            for kind, *given in [*program["steps"], ["train", program["every"], 1, -1]]:
                wrong = ""
                try:
                    getattr(pair, f"do_{kind}")(*given)
                except AssertionError as error:
                    wrong = str(error) or repr(error)
                agree(wrong or pair.wrong)
        finally:
            pair.evener.close()


# --- Faults ---------------------------------------------------------------------------------------


def _put(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


def _heavy_ball(mean: Any, momentum: Any, shared: Any, options: Any, trained: bool) -> None:
    if momentum is not None:
        momentum.mul_(options.outer_momentum).add_(mean)
        mean.copy_(momentum)
        if not trained:
            momentum.zero_()
            mean.zero_()
    shared.add_(mean, alpha=-options.outer_lr)


def _always_trained(*given: Any, step: Any = fragments.outer_step) -> None:
    step(*given[:4], True)


def _forgetful(self: Any, *given: Any, run: Any = Exchange.run, **more: Any) -> None:
    run(self, *given, **more)
    self.state.residual = None


def _without_momentum(self: Any, state: Any, load: Any = rounds.Rounds.load_state_dict) -> None:
    load(self, {**state, "momentum": {}})


def _round_begins(self: Any, state: Any, load: Any = rounds.Rounds.load_state_dict) -> None:
    load(self, {**state, "since": 0})


def _any_load(self: Any, settle: Any = rounds.Rounds.settle) -> None:
    if self._before is not None:
        self._before = [torch.full_like(each, torch.nan) for each in self._before]
    settle(self)


def _nothing(self: Any, *_: Any) -> None:
    """Nothing."""


def _only_shared(self: Any, _: Any = None, write: Any = fragments.Fragment.write) -> None:
    write(self)


def _later(self: Any, stepped: Any = rounds.Rounds.stepped) -> None:
    late = bool(self.overlap)
    self.overlap += late
    stepped(self)
    self.overlap -= late


def _over_loads(self: Any, land: Any = rounds.Rounds.land) -> None:
    self.settle()
    loaded, self._loaded = self._loaded, {}
    land(self)
    self._loaded = self._loaded or loaded


def _without_flight(self: Any, state: Any, load: Any = rounds.Rounds.load_state_dict) -> None:
    load(self, {**state, "flight": None})


def _sent_as_is(self: Any, state: Any, load: Any = rounds.Rounds.load_state_dict) -> None:
    load(self, state)
    if self._flight is not None:
        self._flight.sent = [list(fragment.shared) for fragment in self.fragments]


def _round_ends(self: Any) -> None:
    if self.since:
        self.exchange()


def _first_counts(self: Any, optimizer: Any, ends: Any = LocalSteps._ends) -> None:
    if self._optimizers[0] is optimizer:
        self._rounds.stepped()


FAULTS: dict[str, Callable[[], Any]] = {
    "momentum is not Nesterov's": _put(fragments, "outer_step", _heavy_ball),
    "momentum moves what is frozen": _put(fragments, "outer_step", _always_trained),
    "rounding to 16 bits is a step": _put(fragments, "rounded", lambda shared, _: shared),
    "what was not sent is forgotten": _put(Exchange, "run", _forgetful),
    "a checkpoint has no momentum": _put(rounds.Rounds, "load_state_dict", _without_momentum),
    "a checkpoint begins a round": _put(rounds.Rounds, "load_state_dict", _round_begins),
    "weights that are loaded are a step": _put(rounds.Rounds, "settle", _nothing),
    "weights that are tried begin a round": _put(rounds.Rounds, "settle", _any_load),
    "steps behind an exchange are lost": _put(fragments.Fragment, "write", _only_shared),
    "an exchange is applied a step late": _put(rounds.Rounds, "stepped", _later),
    "an exchange is not waited for": _put(rounds.Rounds, "_wait", _nothing),
    "weights that are loaded are moved": _put(rounds.Rounds, "land", _over_loads),
    "a checkpoint has no exchange": _put(rounds.Rounds, "load_state_dict", _without_flight),
    "a checkpoint has not what was sent": _put(rounds.Rounds, "load_state_dict", _sent_as_is),
    "a round ends with an exchange on its way": _put(rounds.Rounds, "end_round", _round_ends),
    "the first optimizer's step is the step": _put(LocalSteps, "_ends", _first_counts),
}
# Where one rank alone tries weights, the ranks disagree, and say so.
ENDS = {"weights that are tried begin a round": "has loaded other weights than rank 0"}
_switch = Switch()
_world = functools.cache(lambda: Ranks(RANKS, timeout=120))


def check(program: Program) -> None:
    """Run it on both ranks."""
    _world().run("tests.twins.local:run", program, _switch.fault)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), *given).map(list)


_train = _step("train", st.integers(1, 5), st.integers(1, 2), st.integers(-1, 1))
STEPS = often(
    _train,
    _train,
    _train,
    _step("freeze", st.integers(0, 2), st.booleans()),
    _step("evaluate"),
    _step("save"),
    _step("back", st.booleans(), st.booleans()),
    _step("resume", st.booleans(), st.booleans()),
    _step("load", st.integers(20, 25)),
    _step("take"),
    _step("try", st.booleans()),
    _step("again"),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 9),
        "width": st.sampled_from([1, 7, 33, 70]),
        "norm": st.booleans(),
        "dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
        "optimizer": st.sampled_from(["sgd", "adamw", "rmsprop", "muon"]),
        "schedule": st.booleans(),
        "scaler": st.booleans(),
        "clip": st.booleans(),
        "every": st.integers(1, 5),
        "overlap": st.sampled_from([0, 0, 1, 2, 4]),
        "lr": st.sampled_from([0.7, 1.0, 0.5]),
        "momentum": st.sampled_from([0.9, 0.9, 0.0]),
        "form": st.sampled_from(
            ["exact", "exact", "exact", "bf16", "fp16", "int8", "int4", "topk-chunk", "topk"]
        ),
        "bucket_bytes": st.sampled_from([0, 4096, 1 << 26]),
        "steps": st.lists(STEPS, min_size=1, max_size=8),
    }
)
TWIN = Twin(
    name="local",
    programs=PROGRAMS,
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    ends=ENDS,
    programs_per_round=60,
)
