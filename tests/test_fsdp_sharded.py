"""FSDP2 over all ranks: weights as differences and gradients in INT8, beside plain FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import evener.fsdp
from evener.base import torch_names
from evener.comm import mirrors
from evener.comm.errors import CommError
from evener.comm.sharded import Sharded
from evener.errors import UsageError
from tests import worlds
from tests.comm import models
from tests.test_fsdp import batch, model

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(
    size: int, policy: MixedPrecisionPolicy | None = BF16, again: Any = True, seed: int = 0
) -> nn.Module:
    mesh = init_device_mesh(models.device().type, (size,))
    module = model(seed).to(models.device())
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": again}
    if policy is not None:
        options["mp_policy"] = policy
    for block in module.children():
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module


def train(
    module: nn.Module,
    rank: int,
    optimizer: torch.optim.Optimizer,
    steps: range = range(6),
    passes: int = 1,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            module(batch(passes * step + part, rank)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().cpu() for p in module.parameters()]  # type: ignore[attr-defined]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def exact(rank: int, size: int, **how: Any) -> tuple[bool, float]:
    passes = how.pop("passes", 1)
    plain, ours = sharded(size, **how), sharded(size, **how)
    evener.fsdp.accelerate(ours)
    for module in (plain, ours):
        adam = torch.optim.AdamW(module.parameters(), lr=1e-3)
        train(module, rank, adam, passes=passes)
    return alike(weights(plain), weights(ours)), ours.evener.traffic.share()  # type: ignore[union-attr, operator]


EXACT: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": {"policy": None},
    "weights kept after the forward pass": {"again": False},
    "four micro-batches": {"passes": 4},
    "fp16": {"policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
}


def all_exact(rank: int, size: int) -> dict[str, tuple[bool, float]]:
    return {name: exact(rank, size, **how) for name, how in EXACT.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_exact_is_fsdp2_to_the_bit(size: int) -> None:
    for found in worlds.run((1,) * size, all_exact):
        assert all(same for same, _ in found.values()), found
        # One gather of differences where plain FSDP2 has two, or eight, of whole weights.
        assert found["four micro-batches"][1] < found["bf16"][1] < 0.5
        assert found["float32"][1] < 0.6


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_exact_is_fsdp2_to_the_bit_on_gpus() -> None:
    for found in worlds.run((1, 1), all_exact, gpu=True):
        assert all(same for same, _ in found.values()), found


def changes_by_hand(rank: int, size: int) -> list[bool]:
    """A loaded checkpoint, a frozen block, a weight that one rank alone writes into, NaN."""
    plain, ours = sharded(size), sharded(size)
    evener.fsdp.accelerate(ours)
    found = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]

    def both() -> None:
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            train(module, rank, optimizer, range(2))
        with torch.no_grad():
            outputs = [m(batch(99, rank)) for m in (plain, ours)]
        found.append(alike(weights(plain), weights(ours)) and outputs[0].equal(outputs[1]))

    both()
    loaded = copy.deepcopy(get_model_state_dict(sharded(size, seed=5)))
    for module in (plain, ours):
        set_model_state_dict(module, loaded)
    both()
    for module in (plain, ours):
        for p in module[0].parameters():  # type: ignore[index]
            p.requires_grad_(False)
    both()
    for module in (plain, ours):
        if rank == 1:
            with torch.no_grad():
                next(module.parameters()).to_local()[:1].mul_(-3)  # type: ignore[attr-defined]
    both()
    return found


def test_whoever_changes_weights_they_arrive() -> None:
    assert worlds.run((1, 1), changes_by_hand) == [[True] * 4] * 2


def moved(plain: nn.Module, ours: nn.Module, before: list[torch.Tensor]) -> float:
    """How far the two have come apart, of how far plain FSDP2 has come."""
    far = sum(float((a - b).square().sum()) for a, b in zip(weights(plain), before, strict=True))
    pairs = zip(weights(plain), weights(ours), strict=True)
    return float((sum(float((a - b).square().sum()) for a, b in pairs) / far) ** 0.5)


def close_enough(rank: int, size: int, mode: str) -> tuple[float, bool]:
    # Gradients of bf16 weights are bf16 already: there that form would lose nothing.
    policy = None if mode == "bf16" else BF16
    plain, ours = sharded(size, policy), sharded(size, policy)
    before = weights(plain)
    evener.fsdp.accelerate(ours, mode=mode)
    for module in (plain, ours):
        train(module, rank, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    off = moved(plain, ours, before)
    evener.fsdp.release(ours)
    for module in (plain, ours):
        train(module, rank, torch.optim.SGD(module.parameters(), lr=0.1), range(1))
    return off, getattr(ours, "evener", None) is None


@pytest.mark.parametrize(
    ("shape", "mode", "limit"),
    [((1, 1, 1), "int8", 0.05), ((1, 1), "bf16", 0.01), ((1, 1), "int4", 0.2)],
)
def test_gradients_in_a_form_are_near_and_release_gives_back(
    shape: tuple[int, ...], mode: str, limit: float
) -> None:
    for off, released in worlds.run(shape, close_enough, mode):
        assert 0 < off < limit
        assert released


def two_levels(rank: int, size: int) -> tuple[bool, int, float, int]:
    plain, exact, coded = sharded(size), sharded(size), sharded(size)
    before = weights(plain)
    evener.fsdp.accelerate(exact)
    evener.fsdp.accelerate(coded, mode="int8")
    for module in (plain, exact, coded):
        train(module, rank, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    nodes = exact.evener.ahead.gathers[0].mirror.spread.outer.size  # type: ignore[union-attr]
    reduction = coded.evener.reductions[0]  # type: ignore[union-attr, index]
    return (
        alike(weights(plain), weights(exact)),
        nodes,
        moved(plain, coded, before),
        reduction.nodes,
    )


@pytest.mark.parametrize(("shape", "outer"), [((2, 2), 2), ((2, 1), 3)])
def test_between_nodes_everything_goes_once(shape: tuple[int, ...], outer: int) -> None:
    """Nodes with as many ranks each have two levels; others have one."""
    for same, gathers, off, reduces in worlds.run(shape, two_levels):
        assert same
        assert gathers == reduces == outer
        assert 0 < off < 0.05


def one_layer(size: int, mode: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24)).to(models.device())
    fully_shard(module, mesh=init_device_mesh(models.device().type, (size,)))
    evener.fsdp.accelerate(module, mode=mode)
    return module


def owed(rank: int, size: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """SGD, gradients that do not depend on the weights: sent and kept add up to all of them."""
    found = []
    for mode in ("exact", "int4"):
        module = one_layer(size, mode)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for step in range(4):
            made = torch.Generator().manual_seed(10 * step + rank)
            x, y = torch.randn(2, 5, 24, generator=made)
            optimizer.zero_grad()
            (module(x) * y).mean().backward()
            optimizer.step()
        found.append(module)
    exact, coded = found
    state = {name: value.full_tensor() for name, value in coded.evener.state_dict().items()}
    left, weight = (m[0].weight.full_tensor() for m in (exact, coded))  # type: ignore[index, union-attr]
    return (
        (weight - state["0.weight"] - left).abs().max().item(),
        ((weight - left).abs().max().item()),
        state,
    )


def loaded(rank: int, size: int, state: dict[str, torch.Tensor]) -> float:
    module = one_layer(size, "int4")
    names = dict(module.named_parameters())
    module.evener.load_state_dict(  # type: ignore[union-attr, operator]
        {
            name: distribute_tensor(value, names[name].device_mesh, names[name].placements)  # type: ignore[attr-defined]
            for name, value in state.items()
        }
    )
    again = module.evener.state_dict()  # type: ignore[union-attr, operator]
    return max((again[n].full_tensor() - t).abs().max().item() for n, t in state.items())


def test_what_int4_owes_is_what_is_missing_and_goes_into_another_world() -> None:
    found = worlds.run((1, 1, 1), owed)
    for left, without, state in found:
        assert set(state) == {"0.weight"}
        assert without > 1e-4
        assert left < without / 50  # kept in bf16
    largest = float(found[0][2]["0.weight"].abs().max())
    for shape in ((1, 1), (2, 2)):
        assert max(worlds.run(shape, loaded, found[0][2])) < largest / 100


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
    "bf16, float32": BF16,
    "float32, bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def dtypes(rank: int, size: int) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """The dtype that a unit is taken to reduce, and the one in which its gradients came."""
    found = []
    for name, policy in POLICIES.items():
        ours, came = sharded(size, policy), []
        evener.fsdp.accelerate(ours)
        group = torch_names.fsdp_group(ours[0]._get_fsdp_state(), "")  # type: ignore[index, union-attr, operator]
        group._all_reduce_hook = lambda output, came=came: came.append(output.dtype)
        ours(batch(0, rank)).float().square().mean().backward()
        taken = torch_names.fsdp_reduce_dtype(group, group.fsdp_params[0])
        found.append((name, taken, came[0]))
    return found


def test_the_dtype_of_a_reduction_is_known_before_it() -> None:
    for name, taken, came in worlds.run((1, 1), dtypes)[0]:
        assert taken == came, name


class Ledger:
    """What went into a unit's reduce-scatter beside what came out, both added up in float64."""

    def __init__(self, reduction: Any) -> None:
        self.reduction = reduction
        self.given = torch.zeros(reduction.unit.numel, dtype=torch.float64)
        self.came = torch.zeros_like(self.given)
        self.call, self.end = type(reduction).__call__, reduction.finish
        self.calls = 0

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any) -> None:
        self.calls += 1
        every = input_tensor.double()
        torch.distributed.all_reduce(every, group=group)
        self.given += every.view(group.size(), -1)[group.rank()]
        self.call(self.reduction, output_tensor, input_tensor, group, op)

    def finish(self, output: torch.Tensor) -> None:
        self.end(output)
        self.came += output.double()

    def __getattr__(self, name: str) -> Any:  # what FSDP2 and Evener ask of a reduction besides
        return getattr(self.reduction, name)


def kept_book(
    rank: int, size: int, passes: int, late: bool, wide: bool
) -> list[tuple[float, float]]:
    """Adam, clipping, micro-batches: what came is what was given but for what is owed.

    `wide`: kept in float32, so that nothing but the sums' own rounding is lost.
    """
    ours = sharded(size)
    evener.fsdp.accelerate(ours, mode="int4")
    ledgers = []
    for module in (ours, *ours.children()):
        group = torch_names.fsdp_group(module._get_fsdp_state(), "")  # type: ignore[attr-defined, operator]
        if group is None:
            continue
        ledgers.append(Ledger(group._reduce_scatter_comm))
        group._reduce_scatter_comm = ledgers[-1]
        group._all_reduce_hook = ledgers[-1].finish
        if wide:
            reduction = ledgers[-1].reduction
            shape = (reduction.nodes - 1, reduction.unit.numel)
            reduction.residual = torch.zeros(shape)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    for step in range(12):
        optimizer.zero_grad()
        for part in range(passes):
            ours.set_requires_gradient_sync(not late or part == passes - 1)  # type: ignore[operator]
            ours(batch(passes * step + part, rank)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
    found = []
    for ledger in ledgers:
        assert ledger.calls == (12 if late else 12 * passes)
        owed = ledger.reduction.owed().double()
        wrong = (ledger.given - ledger.came - owed).norm().item()
        found.append((wrong, owed.norm().item()))
    return found


@pytest.mark.parametrize(
    ("shape", "passes", "late", "wide", "limit"),
    [
        ((1, 1), 1, False, False, 0.05),  # kept in bf16, step for step
        ((1, 1, 1), 2, False, True, 1e-4),
        ((1, 1), 3, True, True, 1e-4),
        ((2, 2), 2, False, True, 1e-4),
    ],
)
def test_what_int4_sent_and_owes_is_the_sum_of_all_gradients(
    shape: tuple[int, ...], passes: int, late: bool, wide: bool, limit: float
) -> None:
    for found in worlds.run(shape, kept_book, passes, late, wide):
        for wrong, owed in found:
            assert owed > 0
            assert wrong < limit * owed


def arrives(rank: int, size: int, policy: str) -> tuple[float, float]:
    """What is owed comes with the next gradient, which is zero, in the mean's own units."""
    dtype = {"fp16": torch.float16, "float32": None}[policy]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24, bias=False)).to(models.device())
    mesh = init_device_mesh(models.device().type, (size,))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    evener.fsdp.accelerate(module, mode="int4")
    weight = module[0].weight
    state = distribute_tensor(torch.full((24, 24), 0.5), weight.device_mesh, weight.placements)
    module.evener.load_state_dict({"0.weight": state})  # type: ignore[union-attr, operator]
    (0.0 * module(torch.ones(1, 24, dtype=dtype)).sum()).backward()
    gradient = weight.grad.full_tensor()
    return gradient.min().item(), gradient.max().item()


@pytest.mark.parametrize("policy", ["float32", "fp16"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_owed_arrives_in_the_units_of_the_gradient(policy: str, size: int) -> None:
    for least, most in worlds.run((1,) * size, arrives, policy):
        assert least == pytest.approx(0.5, rel=0.01)
        assert most == pytest.approx(0.5, rel=0.01)


def after_loading(rank: int, size: int) -> list[bool]:
    """Whether something is owed after a step, a load of weights, loads of both in either order."""
    ours = sharded(size)
    evener.fsdp.accelerate(ours, mode="int4")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    found = []

    def owes() -> None:
        state = ours.evener.state_dict()  # type: ignore[union-attr, operator]
        found.append(any(bool(value.full_tensor().any()) for value in state.values()))

    train(ours, rank, optimizer, range(2))
    weights = copy.deepcopy(get_model_state_dict(ours))
    owed = copy.deepcopy(ours.evener.state_dict())  # type: ignore[union-attr, operator]
    owes()
    set_model_state_dict(ours, weights)
    owes()
    ours.evener.load_state_dict(owed)  # type: ignore[union-attr, operator]
    set_model_state_dict(ours, weights)
    owes()
    train(ours, rank, optimizer, range(2))
    set_model_state_dict(ours, weights)
    ours.evener.load_state_dict(owed)  # type: ignore[union-attr, operator]
    owes()
    train(ours, rank, optimizer, range(2))
    ours.evener.load_state_dict({})  # type: ignore[union-attr, operator]
    owes()
    return found


def test_loaded_weights_owe_nothing_of_another_training() -> None:
    assert worlds.run((1, 1), after_loading) == [[True, False, True, True, False]] * 2


def named_while_gathered(rank: int, size: int) -> bool:
    """A program may have called unshard(); what is owed has its parameters' names all the same."""
    ours = sharded(size)
    expected = {name for name, p in ours.named_parameters() if p.dim() > 1}
    for block in (ours, *ours.children()):
        block.unshard()  # type: ignore[operator]
    evener.fsdp.accelerate(ours, mode="int4")
    train(ours, rank, torch.optim.SGD(ours.parameters(), lr=0.1), range(1))
    return set(ours.evener.state_dict()) == expected  # type: ignore[union-attr, operator]


def test_what_is_owed_has_names_where_weights_were_gathered_first() -> None:
    assert worlds.run((1, 1), named_while_gathered) == [True, True]


def one_wrong_bit(rank: int, size: int) -> str:
    ours = sharded(size)
    evener.fsdp.accelerate(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    train(ours, rank, optimizer, range(2))
    read = mirrors.differences.read

    def wrong(message: torch.Tensor, into: torch.Tensor) -> None:
        read(message, into)
        into.view(torch.int16)[0] ^= 1

    if rank == 1:
        mirrors.differences.read = wrong
    try:
        train(ours, rank, optimizer, range(2, 4))
    except CommError as error:
        return str(error)
    finally:
        mirrors.differences.read = read
    return ""


def test_a_wrong_bit_stops_all_ranks() -> None:
    for said in worlds.run((1, 1), one_wrong_bit):
        assert "rank 1" in said and "do not match" in said


def refused(rank: int, size: int) -> list[str]:
    said = []
    for given in (
        {"mode": "topk"},
        {"mirror": "ssd"},
        {"floor": "int8"},
        {"mode": "int8" if rank else "exact"},
    ):
        module = sharded(size)
        with pytest.raises(UsageError) as error:
            evener.fsdp.accelerate(module, **given)
        said.append(str(error.value))
        assert getattr(module, "evener", None) is None
    return said


def test_what_cannot_be_is_refused_with_the_value() -> None:
    for said in worlds.run((1, 1), refused):
        for part, text in zip(("'topk'", "'ssd'", "floor=", "rank 1"), said, strict=True):
            assert part in text


def kept_gradients(rank: int, size: int) -> bool:
    """A gradient that is not finite on one rank arrives on all as not finite, also in INT8."""
    ours = sharded(size)
    evener.fsdp.accelerate(ours, mode="int8")
    loss = ours(batch(0, rank)).float().square().mean()
    (loss * (float("inf") if rank == 0 else 1.0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return not bool(torch.isfinite(norm))


def test_an_overflow_is_seen() -> None:
    assert all(worlds.run((1, 1), kept_gradients))


def planned(
    rank: int, size: int, costs: dict[str, list[float]], passes: int
) -> tuple[list[str], bool, str, list[bool]]:
    """Train under `auto` with a clock that a way's step moves on by `costs[way][rank]`."""
    from evener.comm.sharded_plan import ShardedPlanner

    clock = [0.0]
    begins, use = ShardedPlanner.begins, Sharded.use
    way = ["fsdp2"]

    def ticking(self: ShardedPlanner) -> None:
        clock[0] += costs[way[0]][rank] / passes
        begins(self)

    def used(self: Sharded, name: str) -> None:
        way[0] = name
        use(self, name)

    ShardedPlanner.begins, Sharded.use = ticking, used  # type: ignore[method-assign]
    ShardedPlanner._now = lambda _: clock[0]  # type: ignore[method-assign]
    ours = sharded(size)
    defaults = [_comms(module) for module in (ours, *ours.children())]
    evener.fsdp.accelerate(ours, mode="auto", floor="int8")
    door = ours.evener
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    train(ours, rank, optimizer, range(40), passes=passes)
    again = [
        all(a is b for a, b in zip(one, _comms(module), strict=True))
        for one, module in zip(defaults, (ours, *ours.children()), strict=True)
    ]
    forms = [reduction.form for reduction in door.reductions]  # type: ignore[union-attr]
    assert door.planner.settled  # type: ignore[union-attr]
    return forms, door.ahead is None, way[0], again  # type: ignore[union-attr]


def _comms(module: Any) -> tuple[Any, Any]:
    group = torch_names.fsdp_group(module._get_fsdp_state(), "")
    return (group._all_gather_comm, group._reduce_scatter_comm) if group else (None, None)


PLANS: dict[str, tuple[dict[str, list[float]], str]] = {
    "the harshest": ({"fsdp2": [9, 9], "exact": [6, 6], "bf16": [5, 5], "int8": [4, 4]}, "int8"),
    "the mildest of two": (
        {"fsdp2": [9, 9], "exact": [6, 6], "bf16": [4, 4], "int8": [4, 3.9]},
        "bf16",
    ),
    "the slowest rank decides": (
        {"fsdp2": [5, 5], "exact": [1, 6], "bf16": [1, 1], "int8": [1, 1]},
        "fsdp2",
    ),
    "a fast network": ({"fsdp2": [5, 5], "exact": [6, 6]}, "fsdp2"),
}


@pytest.mark.parametrize("name", PLANS)
def test_auto_keeps_what_is_quickest_when_tried(name: str) -> None:
    costs, kept = PLANS[name]
    passes = 2 if name == "the harshest" else 1
    for forms, aside, last, again in worlds.run((1, 1), planned, costs, passes):
        assert last == kept
        if kept == "fsdp2":
            assert aside
            assert all(again)
        else:
            assert set(forms) == {kept}
