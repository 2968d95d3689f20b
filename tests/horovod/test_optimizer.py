"""`hvd.DistributedOptimizer` and the broadcasts around it, against plain training."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import evener.horovod.torch as hvd
from tests import worlds


def model_of(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def reference(size: int, steps: int, passes: int = 1, total: bool = False) -> nn.Module:
    """The same training by one process that sees every rank's batches, in float64."""
    model = model_of().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            for part in range(passes):
                loss = loss_of(model, batch(rank, step * passes + part).double())
                (loss if total else loss / size).backward()
        optimizer.step()
    return model


def same(model: nn.Module, want: nn.Module, tolerance: float) -> None:
    for have, expected in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(have.double(), expected, rtol=tolerance, atol=tolerance / 10)


class Flat:
    """A user's own: another dtype and another shape are sent."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double().flatten() / 4, (tensor.dtype, tensor.shape)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor * 4).to(ctx[0]).view(ctx[1])


CASES: list[dict[str, Any]] = [
    {},
    {"op": hvd.Sum},
    {"gradient_predivide_factor": 2.0},
    {"backward_passes_per_step": 2},
    {"num_groups": 2, "compression": hvd.Compression.fp16},
    {"compression": Flat, "op": hvd.Sum},
    {"compression": Flat, "gradient_predivide_factor": 2.0, "backward_passes_per_step": 2},
]


def trains(rank: int, size: int) -> None:
    hvd.init()
    for number, arguments in enumerate(CASES):
        # One bucket a tensor, several, one.
        os.environ["HOROVOD_FUSION_THRESHOLD"] = ("0", "100", "1M")[number % 3]
        train(rank, size, arguments, to_none=number % 2 == 0)


def train(rank: int, size: int, arguments: dict[str, Any], to_none: bool) -> None:
    model = model_of(seed=rank)
    if rank == 0:
        model = model_of()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes = arguments.get("backward_passes_per_step", 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **arguments)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(passes):
            loss_of(model, batch(rank, step * passes + part)).backward()
        if step == 1:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    tolerance = 1e-4 if "compression" not in arguments else 2e-3
    same(model, reference(size, 3, passes, total=arguments.get("op") == hvd.Sum), tolerance)


TWO_LEVELS = {"LIGHT_2D_ALLREDUCE": "1"}


@pytest.mark.parametrize("shape", [[1], [1, 1], [2, 2], [2, 1]])
def test_training_is_that_of_one_process(shape: list[int]) -> None:
    worlds.run(shape, trains, env=TWO_LEVELS if shape[0] == 2 else {})


def overlaps(rank: int, size: int) -> None:
    hvd.init()
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    model = model_of()
    shared = nn.Parameter(torch.ones(3))  # comes first in the model and in backward
    named = [("shared", shared), *model.named_parameters()]
    inner = torch.optim.SGD([p for _, p in named], lr=0.05)
    optimizer = hvd.DistributedOptimizer(inner, named)
    gone: list[int] = []

    def counts(_gradient: torch.Tensor) -> None:
        gone.append(optimizer._reducer.arrivals.place if optimizer._reducer else 0)

    model[0].weight.register_hook(counts)
    for step in range(3):
        optimizer.zero_grad()
        (model(batch(rank, step)) * shared).square().mean().backward()
        optimizer.step()
    order = [named[i][0] for i in optimizer._reducer.buckets.order]
    assert order[0] == "shared" and order[-1] in ("0.weight", "0.bias"), order
    assert gone[-1] >= 5, "buckets waited for the end of backward"


def test_buckets_leave_while_backward_runs() -> None:
    """In the order of the first backward, which ran before there were buckets."""
    worlds.run([1, 1], overlaps)


def holds_gradients(rank: int, size: int, passes: int, drops: bool, to_none: bool) -> None:
    hvd.init()
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        backward_passes_per_step=passes,
    )
    for step in range(4):
        want = copy.deepcopy(model)
        want.zero_grad()
        for part in range(passes):
            if part and drops:
                want.zero_grad()
            for other in range(size):
                (loss_of(want, batch(other, step * passes + part)) / size).backward()
        optimizer.zero_grad(set_to_none=to_none)
        for part in range(passes):
            loss_of(model, batch(rank, step * passes + part)).backward()
            if not part:
                held = [p.grad for p in model.parameters()]
                was = [g.clone() for g in held]
                for p in model.parameters() if drops else ():
                    p.grad = None
        optimizer.synchronize()
        for p, other, held_one, old in zip(
            model.parameters(), want.parameters(), held, was, strict=True
        ):
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-5, atol=1e-6)
            # What was dropped stays what it was; what was not is where the average comes.
            assert torch.equal(held_one, old if drops else p.grad), (step, drops)
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("passes", "drops"), [(1, False), (2, False), (2, True)])
def test_gradients_that_the_program_holds(passes: int, drops: bool, to_none: bool) -> None:
    worlds.run((1, 1), holds_gradients, passes, drops, to_none)


def autotunes(rank: int, size: int) -> str:
    hvd.init()
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(inner, model.named_parameters())
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    planner = optimizer._steps.planner
    assert planner.forms == ("exact",) and planner.decision is not None
    same(model, reference(size, 6), 1e-5)
    return str(optimizer._reducer.describe())


def test_autotune_is_the_planners_and_loses_nothing() -> None:
    for description in worlds.run([1, 1], autotunes, env={"HOROVOD_AUTOTUNE": "1"}):
        assert "flat" in description or "2-D" in description


def plans(rank: int, size: int) -> list[tuple[tuple[str, ...], bool, int]]:
    hvd.init()
    found = []
    for passes in (1, 2):
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer: Any = hvd.DistributedOptimizer(
            inner, model.named_parameters(), backward_passes_per_step=passes, mode="auto"
        )
        planned = 0
        for step in range(8):
            optimizer.zero_grad()
            for part in range(passes):
                loss_of(model, batch(rank, step * passes + part)).backward()
            if step % 2:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            planned += optimizer._steps.planner.decision is not None
        planner = optimizer._steps.planner
        same(model, reference(size, 8, passes), 2e-3)
        forms = {choice.form for choice in planner.decision.choices}
        assert forms <= {"exact", "bf16"} and planner.decision.step_ms > 0
        found.append((planner.forms, planner.decision.overlap, planned))
        del optimizer
    return found


@pytest.mark.parametrize("shape", [[1, 1], [2, 2], [2, 1]])
def test_a_planner_decides_in_the_fifth_step_and_training_is_the_same(shape: list[int]) -> None:
    env = TWO_LEVELS if shape[0] == 2 else {}
    found = worlds.run(shape, plans, env=env)
    assert found == [[(("exact", "bf16"), False, 4)] * 2] * sum(shape)


def habits(rank: int, size: int) -> None:
    hvd.init()
    model = model_of()
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    loss_of(model, batch(rank, 0)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    assert model.extra.grad is not None  # nobody used it: zeros, as upstream
    assert model.extra.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    loss_of(model, batch(rank, 0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, 1))
        loss.backward()
        return loss

    before = [p.clone() for p in model.parameters()]
    assert optimizer.step(closure).requires_grad
    assert not torch.equal(before[-1], list(model.parameters())[-1])
    gathered = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    assert torch.equal(gathered[0], gathered[-1])
    # Saved and loaded, as checkpoints are.
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.set_backward_passes_per_step(2)
    for part in range(2):
        loss_of(model, batch(rank, part)).backward()
    optimizer.step()
    assert optimizer._parameter_names[model.extra] == "extra"
    # Another optimizer of the same model: the first one's hooks must be gone with it.
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    loss_of(model, batch(rank, 2)).backward()
    optimizer.step()
    assert size == hvd.size()
    hvd.shutdown()


def test_habits_of_scripts() -> None:
    worlds.run([2], habits)


def refusals(rank: int, size: int) -> str:
    del size
    hvd.init()
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    wrap = hvd.DistributedOptimizer
    for arguments, text in (
        ({"named_parameters": named[:-1]}, "not named"),
        ({"named_parameters": [*named, named[0]]}, "unique"),
        ({"named_parameters": list(model.parameters())}, "tuples"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op != Average"),
        ({"groups": -1}, "non-negative"),
        ({"groups": [[1]]}, r"torch\.Tensor"),
        ({"compression": object}, "has no compress and decompress"),
    ):
        with pytest.raises(ValueError, match=text):
            wrap(inner, **arguments)  # type: ignore[arg-type]
    by_adasum = wrap(inner, named, op=hvd.Adasum)
    with pytest.raises(AssertionError, match="skip_synchronize"), by_adasum.skip_synchronize():
        pass
    other = model_of() if rank == 0 else nn.Sequential(nn.Linear(6, 9))
    inner = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(hvd.HorovodInternalError, match="has other parameters"):
        wrap(inner, other.named_parameters(), compression=Flat).synchronize()  # type: ignore[arg-type]
    with pytest.raises(hvd.HorovodInternalError) as refused:
        wrap(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters()).synchronize()
    return refused.value.problem


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    first, second = worlds.run([2], refusals)
    assert first == second
    assert "do not agree" in first


def states(rank: int, size: int) -> None:
    del size
    hvd.init()
    model = model_of(seed=rank)
    model.register_buffer("count", torch.tensor(rank))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    model.append(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    stride = model[4].weight.stride()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    want = model_of(seed=1)
    assert torch.equal(model[0].weight, want[0].weight)
    assert model[4].weight.stride() == stride
    assert (model.count.item(), model.mask.tolist()) == (1, [False, True])
    both = hvd.allgather(model[4].weight.detach().contiguous().view(1, -1))
    assert torch.equal(both[0], both[1])

    # The root has stepped and the other has not, and their options differ.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (rank + 1), betas=(0.8, 0.9))
    if rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = optimizer.state[model[0].weight]
    assert state["step"].item() == 1
    torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], 0.2))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    # And back: the step of a fresh root counts, and it alone takes it.
    fresh = torch.optim.SGD(model.parameters(), lr=0.5 + rank, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(fresh)
    hvd.broadcast_optimizer_state(wrapped, root_rank=1)
    assert wrapped.param_groups[0]["lr"] == 1.5
    for bad in ({"x": 3}, 3):
        with pytest.raises(ValueError, match=r"tensor|invalid params"):
            hvd.broadcast_parameters(bad, 0)  # type: ignore[arg-type]


def test_broadcast_of_parameters_and_optimizer_states() -> None:
    worlds.run([2], states)


def schedulers(rank: int, _size: int) -> None:
    """One that was made on the plain optimizer reaches the wrapped one, whatever was broadcast."""
    hvd.init()
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=1.0 + rank, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    groups, state = optimizer.param_groups, optimizer.state
    state_of = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    def step() -> float:
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates: list[float] = hvd.allgather(torch.tensor([optimizer.param_groups[0]["lr"]])).tolist()
        assert rates[0] == rates[1]
        return rates[0]

    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert step() == pytest.approx(0.1)
    state_of.sync()  # commits
    assert step() == pytest.approx(0.01)
    momentum = state[model[0].weight]["momentum_buffer"]
    state_of.restore()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    # The scheduler was not restored; what it sets must arrive.
    assert step() == pytest.approx(0.01)
    assert state[model[0].weight]["momentum_buffer"] is momentum
    assert optimizer.param_groups is groups
    assert optimizer.state is state


def zero_steps(rank: int, _size: int) -> None:
    """Adam's first step after the broadcast is its second, as after upstream's."""
    hvd.init()
    for zero_step in (True, False):
        os.environ["EVENER_HOROVOD_ZERO_STEP"] = str(int(zero_step))
        model, want = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
            model.named_parameters(),
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        plain = torch.optim.AdamW(want.parameters(), lr=0.1, weight_decay=0.5)
        if zero_step:
            for parameter in want.parameters():
                parameter.grad = torch.zeros_like(parameter)
            plain.step()
        for both, of in ((optimizer, model), (plain, want)):
            both.zero_grad()
            loss_of(of, batch(0, 0)).backward()
            both.step()
        for have, expected in zip(model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(have, expected)
        # A root with a state: nobody's parameters move, weight decay or not.
        late = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        if rank == 0:
            late.load_state_dict(optimizer.state_dict())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(late, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert late.state[model[0].weight]["step"].item() == 1 + zero_step


def before_wrapping(_rank: int, _size: int) -> None:
    """As most scripts do: upstream drops the zero step's state at wrapping, so Adam's first step
    is its first. A state that was trained or loaded goes along."""
    hvd.init()
    os.environ["EVENER_HOROVOD_ZERO_STEP"] = "1"
    for kind in ("new", "trained", "loaded"):
        model = model_of()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(optimizer: Any, model: nn.Module = model) -> None:
            optimizer.zero_grad()
            loss_of(model, batch(0, 0)).backward()
            optimizer.step()

        hvd.broadcast_optimizer_state(inner, root_rank=0)
        if kind == "trained":
            step(inner)
        if kind == "loaded":
            inner.load_state_dict(inner.state_dict())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        step(optimizer)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        counts = {int(state["step"]) for state in optimizer.state.values()}
        assert counts == {{"new": 1, "trained": 3, "loaded": 2}[kind]}, (kind, counts)


def broadcast_states(rank: int, size: int) -> None:
    schedulers(rank, size)
    zero_steps(rank, size)
    before_wrapping(rank, size)


def test_broadcast_states_reach_schedulers_and_count_the_zero_step() -> None:
    worlds.run([2], broadcast_states)


def learns(rank: int, size: int) -> tuple[float, float]:
    """Top-k with error feedback by LightCC's variables alone, no line of the script changed."""
    del size
    hvd.init()
    torch.manual_seed(0)
    truth = nn.Linear(40, 10)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters()
    )
    optimizer._arm()
    assert "topk" in optimizer._reducer.describe()
    assert optimizer._reducer.optimizers.linear  # the guard knows an SGD in our clothes
    losses = []
    for step in range(100):
        x = torch.randn(32, 40, generator=torch.Generator().manual_seed(step * 2 + rank))
        optimizer.zero_grad()
        loss = ((model(x) - truth(x).detach()) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    both = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    assert torch.equal(both[0], both[1])
    return losses[0], losses[-1]


def test_lightccs_variables_are_honoured() -> None:
    env = {
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_THRESHOLD": "1",
        "LIGHT_TOPK_RATIO": "0.05",
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
    for first, last in worlds.run([1, 1], learns, env=env):
        assert last < first / 4


def modes(rank: int, size: int) -> None:
    """Evener's own arguments choose the form between nodes; the largest entries are sent first."""
    hvd.init()
    for given in ({"mode": "bf16"}, {"mode": "topk", "ratio": 0.25}):
        model = nn.Linear(512, 1024, bias=False)  # 2 MB: more than what goes dense in any mode
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **given)
        for _ in range(2):  # what keeps a residual sends the first step exactly
            optimizer.zero_grad()
            (model.weight * torch.rand(1024, 512)).sum().backward()
            optimizer.step()
        gradient = model.weight.grad
        assert gradient is not None
        if given["mode"] == "bf16":
            assert torch.equal(gradient, gradient.bfloat16().float())
        else:
            assert 0.2 < (gradient != 0).float().mean() < 0.5
        assert torch.equal(*hvd.allgather(gradient[None]))
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for wrong in (
        {"mode": "auto", "op": hvd.Adasum},
        {"mode": "int8", "compression": hvd.Compression.fp16},
        {"mode": "int8", "op": hvd.Adasum},
    ):
        with pytest.raises(ValueError, match="mode="):
            hvd.DistributedOptimizer(plain, **wrong)
    for wrong in ({"floor": "int8"}, {"mode": "auto", "floor": "int7"}):
        with pytest.raises(ValueError, match="floor="):
            hvd.DistributedOptimizer(plain, **wrong)


def test_the_mode_of_an_optimizer() -> None:
    worlds.run([1, 1], modes)


def sparse(rank: int, size: int) -> None:
    hvd.init()
    for as_dense in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
        want = copy.deepcopy(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), sparse_as_dense=as_dense
        )
        plain = torch.optim.SGD(want.parameters(), lr=0.5)
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            model(torch.tensor([rank, step % 6, 5])).square().sum().backward()
            for r in range(size):
                (want(torch.tensor([r, step % 6, 5])).square().sum() / size).backward()
            optimizer.step()
            assert model[0].weight.grad is not None
            assert model[0].weight.grad.is_sparse
            plain.step()
        for have, expected in zip(model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(have, expected)


def test_sparse_gradients() -> None:
    worlds.run([2], sparse)


def combines(rank: int, _size: int) -> None:
    hvd.init()
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compression, op=hvd.Adasum
        )
        # Updates that are orthogonal add up; ones that are parallel are averaged.
        apart = torch.tensor([[1.0, 0, 0, 0]] if rank == 0 else [[0, 2.0, 0, 0]])
        model(apart).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[-1.0, -2.0, 0.0, 0.0]]
        optimizer.zero_grad()
        model(torch.tensor([[0, 0, 0, 3.0]])).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[-1.0, -2.0, 0.0, -3.0]]


def test_adasum_combines_the_updates() -> None:
    worlds.run([2], combines)
