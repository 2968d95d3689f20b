"""The plan of a pipeline: where it is cut, and the step, bubble and memory to expect.

    made = evener.pipeline.plan(model, example, stages=4, memory="24GB")
    print(made.cuts, made.step_seconds, made.bubble)

Nothing of the model is allocated: it may be on the meta device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from evener.base import units
from evener.base.given import given
from evener.errors import EvenerError, UsageError
from evener.pipeline import profile as profiles
from evener.pipeline import schedules, search, wire
from evener.pipeline.capture import Captured, capture
from evener.pipeline.example import Example
from evener.pipeline.operations import root_of, written_by
from evener.pipeline.profile import Profile, Rates
from evener.pipeline.search import Costs, Device, Found, Setting
from evener.pipeline.simulate import Link, Mark, Network, StageCost
from evener.pipeline.split import check_split_backward

VERSION = 1
# Bytes of optimizer state per byte of a parameter.
OPTIMIZERS = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0}


class NoFitError(EvenerError):
    """No cuts keep every stage within its memory."""


@dataclass
class StagePlan:
    """One stage. Times in seconds per microbatch on its own device, sizes in bytes.

    `first`, `last`: names of its first and last operation; `blocks`: of the model's own blocks.
    `in_flight`: microbatches that it holds at a time; `memory`: of all of it at the peak.
    """

    index: int
    rank: int
    first: str
    last: str
    blocks: str
    operations: int
    parameters: float
    forward: float
    input: float
    weight: float
    sent: float
    in_flight: int
    memory: float

    @property
    def seconds(self) -> float:
        return self.forward + self.input + self.weight


@dataclass
class Alternative:
    """What other cuts would give. `cuts` is None where the model cannot be cut so."""

    cuts: list[int] | None
    step_seconds: float = 0.0
    imbalance: float = 0.0
    bubble: float = 0.0
    memory: float = 0.0
    fits: bool = False


@dataclass
class Plan:
    """Where a model is cut, and what to expect of it.

    `cuts`: positions between operations. `rows`: of one microbatch. `bound`: the imbalance that the
    largest piece alone enforces (1: none). `operations`: a digest of the captured operations, by
    which ranks see that they cut the same. `tied`: names of shared parameters that lie on several
    stages: their gradients are summed over these. `activations`: how they go between nodes.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    microbatches: int
    rows: int
    cuts: list[int]
    recompute: bool
    stages: list[StagePlan]
    step_seconds: float
    bubble: float
    imbalance: float
    bound: float
    memory: list[float]
    budget: list[float]
    alternatives: dict[str, Alternative]
    profile: str
    estimated: list[str]
    parameters: int
    operations: str
    dynamic: bool
    tied: list[list[str]]
    marks: list[Mark] = field(default_factory=list)
    activations: str = "exact"

    def to_dict(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        record["version"] = VERSION
        record["budget"] = [None if size == float("inf") else size for size in self.budget]
        record["marks"] = [list(dataclasses.astuple(mark)) for mark in self.marks]
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Plan:
        """Raises UsageError where it is no plan of this version."""
        given = dict(record)
        try:
            version = given.pop("version")
            if version != VERSION:
                raise UsageError(f"a plan of version {version}", f"this Evener reads {VERSION}")
            given["stages"] = [StagePlan(**stage) for stage in given["stages"]]
            given["alternatives"] = {k: Alternative(**v) for k, v in given["alternatives"].items()}
            given["budget"] = [size or float("inf") for size in given["budget"]]
            given["marks"] = [Mark(*mark) for mark in given["marks"]]
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"this is no plan of a pipeline: {error}", "make one with `evener pipeline plan`"
            ) from None

    def costs(self) -> list[StageCost]:
        """The stages as the simulator takes them."""
        return [
            StageCost(s.forward, s.input, s.weight, s.sent, s.sent, 0.0, s.memory)
            for s in self.stages
        ]


@dataclass(frozen=True)
class Options:
    """What a pipeline is planned for; see `plan`."""

    stages: int = 2
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    microbatches: int | str = "auto"
    memory: str | Sequence[str] | float | None = None
    speeds: Sequence[float] | None = None
    optimizer: str | float = "adam"
    recompute: bool | str = "auto"
    network: Network = field(default_factory=Network)
    activations: str = "exact"
    tensor: int = 1

    def links(self, dtype: torch.dtype) -> Network:
        """The network as activations of `dtype` see it: fewer bytes are a faster link."""
        between = self.network.between
        faster = between.bandwidth / wire.ratio(wire.check(self.activations), dtype)
        return dataclasses.replace(self.network, between=Link(faster, between.latency))

    @property
    def local(self) -> int:
        kind = schedules.kind_of(self.schedule)
        return self.stages_per_rank or kind.local or 2

    @property
    def ranks(self) -> int:
        return self.stages

    @property
    def states(self) -> float:
        """Bytes of gradient and states per byte of a parameter."""
        if isinstance(self.optimizer, str):
            if self.optimizer not in OPTIMIZERS:
                raise UsageError(
                    f"optimizer {self.optimizer!r} is not known",
                    f"one of {', '.join(OPTIMIZERS)}, or bytes of state per byte of a parameter",
                )
            return 1 + OPTIMIZERS[self.optimizer]
        return 1 + float(self.optimizer)

    def devices(self) -> tuple[Device, ...]:
        sizes: Sequence[Any]
        if self.memory is None:
            sizes = [float("inf")] * self.ranks
        elif isinstance(self.memory, str | float | int):
            sizes = [self.memory] * self.ranks
        else:
            sizes = list(self.memory)
        speeds = list(self.speeds or [1.0] * self.ranks)
        for what, values in (("memory", sizes), ("speeds", speeds)):
            if len(values) != self.ranks:
                raise UsageError(
                    f"{what} of {len(values)} ranks is given for {self.ranks}",
                    "give one value, or one per rank",
                )
        if any(speed <= 0 for speed in speeds):
            raise UsageError(f"speeds {speeds} are not all above 0", "1.0 is the profiled device")
        # Ranks that share a stage are one device: larger and faster by their number.
        return tuple(Device(_bytes(size) * self.tensor, speed * self.tensor)
                     for size, speed in zip(sizes, speeds, strict=True))  # fmt: skip


def _bytes(size: Any) -> float:
    if isinstance(size, str):
        try:
            return float(units.parse_size(size))
        except ValueError as error:
            raise UsageError(f"memory: {error}", "write it as 80GB or 24GiB") from None
    return float(size)


@given
def network(inside: str = "", between: str = "", per_node: int = 0) -> Network:
    """Links from rates as people write them: `network("100GB/s", "25gbit", per_node=8)`."""
    made = Network(per_node=per_node)
    if inside:
        made = dataclasses.replace(made, inside=Link(units.parse_rate(inside) / 8, 10e-6))
    if between:
        made = dataclasses.replace(made, between=Link(units.parse_rate(between) / 8, 50e-6))
    return made


@dataclass
class Planned:
    """A plan with what it was made from."""

    plan: Plan
    captured: Captured
    profile: Profile


@given
def plan(model: nn.Module, example: Any, **given: Any) -> Plan:
    """Plan a pipeline for `model`; see `planned` for the arguments."""
    return planned(model, example, **given).plan


@given
def planned(
    model: nn.Module,
    example: Any,
    *,
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    rates: Rates | None = None,
    captured: Captured | None = None,
    **given: Any,
) -> Planned:
    """Capture, profile, search.

    example: the inputs of a whole step (its batch is divided into microbatches): a tensor, a tuple,
    or a dict. stages: ranks of the pipeline. schedule: see `schedules.KINDS`. stages_per_rank: for
    interleaved schedules. microbatches: a number, or "auto". memory: per rank, as "80GB", or one
    per rank. speeds: per rank, as multiples of the profiled device. optimizer: "adam", "momentum",
    "sgd", or bytes of state per byte of a parameter. recompute: True, False, or "auto" (where
    nothing fits without). network: `pipeline.network(...)`. activations: how they go between nodes:
    "exact", "bf16" or "int8" (see `wire`). tensor: ranks that share each stage; they count as one
    device, as if it all were divided evenly. device: on which operations are timed;
    rates: estimate from these and time nothing. captured: of this model and example, where that was
    done before. Raises UsageError, and NoFitError with what is nearest.
    """
    try:
        options = Options(**given)
    except TypeError as error:
        raise UsageError(f"plan: {error}", "see help(evener.pipeline.planned)") from None
    call = Example.of(example, target)
    kind = schedules.kind_of(options.schedule)
    wire.check(options.activations)
    if options.stages < 1:
        raise UsageError(f"{options.stages} stages are none", "give stages=2 or more")
    schedules.ranks_of(kind, options.ranks * options.local, options.local)
    counts = _microbatch_counts(options, call.rows)
    place = torch.device(device) if device is not None else _device()
    captures: dict[int, Captured] = {}
    measured: dict[int, Profile] = {}
    first = captured or capture(model, call, target=None, loss=loss)

    def captured_for(rows: int) -> Captured:
        if first.fits(rows):
            return first
        if rows not in captures:
            captures[rows] = capture(model, call.resized(rows), target=None, loss=loss)
        return captures[rows]

    def profiled(captured: Captured, rows: Sequence[int]) -> Profile:
        if rates is not None:
            return profiles.estimate(captured, rows, rates)
        return profiles.measure(captured, rows, place)

    sizes = [call.rows // count for count in counts]
    if first.dynamic and all(map(first.fits, sizes)):
        shared = profiled(first, sorted({min(sizes), max(sizes)}))
        measured = dict.fromkeys(sizes, shared)
    else:
        measured = {rows: profiled(captured_for(rows), [rows]) for rows in set(sizes)}
    best: tuple[Found, Setting, Costs, Captured, Profile] | None = None
    for again in _recomputes(options):
        if again and kind.split:
            continue  # torch's split backward cannot run a recomputed forward
        for count, rows in zip(counts, sizes, strict=True):
            captured, profile = captured_for(rows), measured[rows]
            if again and _writes_buffers(captured):
                continue
            costs = Costs.of(captured, profile, rows, options.states, again)
            setting = Setting(kind.name, options.ranks, options.local, count, options.devices(),
                              options.links(_dtype(captured)))  # fmt: skip
            found = search.search(costs, setting)
            if found and (best is None or found.result.step < best[0].result.step):
                best = (found, setting, costs, captured, profile)
        if best is not None:
            break
    if best is None:
        raise _no_fit(options, captured_for(sizes[0]), measured[sizes[0]], counts[0], sizes[0])
    found, setting, costs, captured, profile = best
    if kind.split:
        check_split_backward(captured, list(found.cuts))
    made = _made(found, setting, costs, captured, profile, call.rows)
    made.activations = options.activations
    return Planned(made, captured, profile)


def _dtype(captured: Captured) -> torch.dtype:
    """Data type of the model, and so of its activations."""
    floating = (p.dtype for p in captured.module.parameters() if p.dtype.is_floating_point)
    return next(floating, torch.float32)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _microbatch_counts(options: Options, rows: int) -> list[int]:
    kind = schedules.kind_of(options.schedule)
    if options.microbatches != "auto":
        count = options.microbatches
        if not isinstance(count, int) or count < 1 or rows % count:
            raise UsageError(
                f"a batch of {rows} rows cannot be divided into {count} microbatches",
                f"give one of {[c for c in range(1, rows + 1) if rows % c == 0]}, or a batch of "
                "other size",
            )
        if problem := schedules.check(kind, options.ranks, count):
            raise UsageError(f"{count} microbatches: {problem}", "give microbatches='auto'")
        return [count]
    divisors = [c for c in range(1, rows + 1) if rows % c == 0]
    fitting = [c for c in divisors if not schedules.check(kind, options.ranks, c)
               and c <= 16 * options.ranks]  # fmt: skip
    if not fitting:
        raise UsageError(
            f"a batch of {rows} rows is too small for {options.ranks} stages of {kind.name}",
            f"give an example with {options.ranks} rows or more (the batch of a whole step)",
        )
    # With fewer microbatches than ranks most of the time is bubble: only where there is no other.
    return [c for c in fitting if c >= options.ranks] or fitting[-1:]


def _recomputes(options: Options) -> tuple[bool, ...]:
    if options.recompute == "auto":
        return (False, True)
    if not isinstance(options.recompute, bool):
        raise UsageError(f"recompute={options.recompute!r}", "give True, False or 'auto'")
    return (options.recompute,)


def _writes_buffers(captured: Captured) -> bool:
    return any(
        root_of(one).op == "get_attr" for node in captured.ops for one in written_by(node)
    ) or any("batch_norm" in str(node.target) for node in captured.ops)


def _no_fit(
    options: Options, captured: Captured, profile: Profile, count: int, rows: int
) -> EvenerError:
    """Why: too few operations, or too little memory, with what would be needed."""
    costs = Costs.of(captured, profile, rows, options.states, options.recompute is True)
    stages = options.ranks * options.local
    if len(costs.positions) - 1 < stages:
        return UsageError(
            f"the model has {len(costs.positions) - 1} pieces, and {stages} stages are wanted",
            f"give stages={len(costs.positions) - 1} or fewer",
        )
    devices = tuple(Device(float("inf"), d.speed) for d in options.devices())
    setting = Setting(schedules.kind_of(options.schedule).name, options.ranks, options.local, count,
                      devices, options.network)  # fmt: skip
    found = search.search(costs, setting)
    need = max(found.result.memory) if found else 0.0
    has = min(d.memory for d in options.devices())
    return NoFitError(
        f"no cuts into {stages} stages fit {has / 1e9:.2f} GB per rank: the best balanced ones "
        f"need {need / 1e9:.2f} GB",
        "give more stages, more memory, a smaller batch, recompute=True or another optimizer",
    )


def _made(
    found: Found,
    setting: Setting,
    costs: Costs,
    captured: Captured,
    profile: Profile,
    batch: int,
) -> Plan:
    flight = schedules.in_flight(
        setting.schedule, setting.ranks, setting.local, setting.microbatches
    )
    edges = [0, *found.cuts, len(captured.ops)]
    stages = []
    for s, (begin, end) in enumerate(itertools.pairwise(edges)):
        cost = found.stages[s]
        stages.append(
            StagePlan(
                index=s,
                rank=setting.rank_of(s),
                first=captured.ops[begin].name,
                last=captured.ops[end - 1].name,
                blocks=_blocks(captured.blocks[begin:end]),
                operations=end - begin,
                parameters=costs.parameters(begin, end),
                forward=cost.forward,
                input=cost.input,
                weight=cost.weight,
                sent=cost.sent,
                in_flight=flight[s],
                memory=cost.fixed + flight[s] * cost.held + cost.peak,
            )
        )
    mean = float(costs.total().sum()) / setting.ranks
    bound = max(1.0, search.largest(costs) / max(d.speed for d in setting.devices) / mean)
    alternatives = {}
    for name, cuts in (
        ("uniform by block", search.uniform_by_block(costs, captured, setting.stages)),
        ("parameter count", search.by_parameters(costs, captured, setting.stages)),
    ):
        alternatives[name] = _alternative(costs, setting, cuts)
    return Plan(
        schedule=setting.schedule,
        ranks=setting.ranks,
        stages_per_rank=setting.local,
        microbatches=setting.microbatches,
        rows=batch // setting.microbatches,
        cuts=list(found.cuts),
        recompute=costs.recompute,
        stages=stages,
        step_seconds=found.result.step,
        bubble=found.result.bubble,
        imbalance=found.imbalance,
        bound=bound,
        memory=found.result.memory,
        budget=[d.memory for d in setting.devices],
        alternatives=alternatives,
        profile=profile.how,
        estimated=list(profile.estimated),
        parameters=sum(p.numel() for p in captured.module.parameters()),
        operations=digest(captured),
        dynamic=captured.dynamic,
        tied=_tied_over(captured, edges),
        marks=found.result.marks,
    )


def _alternative(costs: Costs, setting: Setting, cuts: list[int] | None) -> Alternative:
    if cuts is None:
        return Alternative(None)
    found = search.evaluate(costs, setting, cuts)
    return Alternative(list(cuts), found.result.step, found.imbalance, found.result.bubble,
                       max(found.result.memory), found.fits)  # fmt: skip


def _blocks(names: list[str]) -> str:
    """`h.0-h.5`: the first and the last block of a stage."""
    known = [name for name in names if name]
    if not known:
        return "-"
    return known[0] if known[0] == known[-1] else f"{known[0]} .. {known[-1]}"


def digest(captured: Captured) -> str:
    """Equal where two ranks captured the same operations, with the same constants."""

    def constant(value: Any) -> Any:
        return value.type if isinstance(value, torch.device) else value

    text = json.dumps([
        [node.name, str(node.target), repr(fx.node.map_aggregate(node.args, constant)),
         repr(fx.node.map_aggregate(node.kwargs, constant))]
        for node in captured.ops
    ])  # fmt: skip
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tied_over(captured: Captured, edges: list[int]) -> list[list[str]]:
    """Names of parameters that several stages use."""
    short = captured.module.meta["evener_short"]
    trained = {n for n, _ in captured.module.named_parameters(remove_duplicate=False)}
    where: dict[str, set[int]] = {}
    for s, (begin, end) in enumerate(itertools.pairwise(edges)):
        for node in captured.ops[begin:end]:
            for one in node.all_input_nodes:
                if one.op == "get_attr" and str(one.target) in trained:
                    where.setdefault(str(one.target), set()).add(s)
    by_first = {group[0]: list(group) for group in captured.tied}
    return [by_first.get(short[name], [short[name]]) for name, at in where.items() if len(at) > 1]
