"""Evener under a DistributedDataParallel that nobody told of it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from evener.door import agree, enter, models, optimizers
from evener.door.pace import compared
from evener.errors import UsageError
from evener.tools.launch.command import launch
from tests import worlds

PLAIN = 4
ENV = {"EVENER_DDP": "exact", "EVENER_DDP_PLAIN": str(PLAIN), "EVENER_TRIAL_STEPS": "1"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    model: nn.Module, steps: int, rank: int, optimizer: torch.optim.Optimizer, clip: bool = False
) -> None:
    for step in range(steps):
        model(data(step, rank)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def weights(*nets: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for each in nets for p in each.parameters()]).clone()


@contextlib.contextmanager
def opened() -> Any:
    """The door, as `enter` opens it; closed again."""
    inner = DistributedDataParallel.forward
    models.follow(DistributedDataParallel)
    try:
        yield
    finally:
        DistributedDataParallel.forward = inner


def alike(tensor: torch.Tensor) -> bool:
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor)
    return all(torch.equal(tensor, other) for other in both)


def is_evener(model: nn.Module) -> bool:
    return hasattr(model, "evener")


# --- it trains as DDP does ---


def _one_model(rank: int, size: int) -> dict[str, Any]:
    plain = net()
    train(ddp := DistributedDataParallel(plain), 14, rank, adamw(ddp), clip=True)
    ours = net()
    model = DistributedDataParallel(ours)
    with opened():
        train(model, PLAIN, rank, optimizer := adamw(model), clip=True)
        before = is_evener(model)
        train_more(model, PLAIN, 14, rank, optimizer)
        found = model.evener_steps.overlap is not None
    return {
        "equal": torch.equal(weights(plain), weights(ours)),
        "alike": alike(weights(ours)),
        "before": before,
        "after": is_evener(model),
        "overlap": found,
        "listeners": len(optimizers._listeners),
        "report": [report() for report in models._reports],
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_more(
    model: nn.Module, first: int, last: int, rank: int, optimizer: torch.optim.Optimizer
) -> None:
    for step in range(first, last):
        model(data(step, rank)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_weights_are_ddps_and_the_optimizer_is_found() -> None:
    for rank, found in enumerate(worlds.run((1, 1), _one_model, env=ENV)):
        assert found["equal"] and found["alike"], found
        assert (found["before"], found["after"]) == (False, True)
        assert found["overlap"], "the optimizer was seen to step, and not taken"
        assert found["listeners"] == 0, "hooks of every optimizer's step are left behind"
        if rank == 0:
            (line,) = found["report"]
            assert "Sequential" in line and "DDP's own" in line


def _local(rank: int, size: int) -> dict[str, Any]:
    """Accumulation without no_sync, several optimizers, and a model whose optimizer is refused."""
    ours = net()
    model = DistributedDataParallel(ours)
    both = [torch.optim.SGD(ours[0].parameters(), 0.1), torch.optim.AdamW(ours[2].parameters())]
    other = net()
    refused = DistributedDataParallel(other)
    newton = torch.optim.LBFGS(other.parameters(), max_iter=1)
    equal = []
    with opened():
        for step in range(7):
            for part in range(5):
                model(data(10 * step + part, rank)).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            equal.append(alike(weights(ours)))
        for step in range(3):

            def closure(step: int = step) -> Any:
                newton.zero_grad()
                loss = refused(data(step, rank)).square().mean()
                loss.backward()
                return loss

            newton.step(closure)
    return {"equal": equal, "is": is_evener(model), "refused": not is_evener(refused)}


def test_local_steps_begin_after_one_of_ddps_own() -> None:
    env = {"EVENER_DDP": "exact", "EVENER_EVERY": "3"}
    for found in worlds.run((1, 1), _local, env=env):
        assert found["is"] and found["refused"]
        assert found["equal"] == [True, False, False, True, False, False, True]


def _too_few(rank: int, size: int) -> list[str]:
    model = DistributedDataParallel(net())
    with opened():
        train(model, PLAIN - 1, rank, adamw(model))
    return [line for report in models._reports if (line := report())]


def test_one_line_says_that_it_never_took_over() -> None:
    first, second = worlds.run((1, 1), _too_few, env=ENV)
    assert first == [
        f"Sequential: plain DDP to the end: it took {PLAIN - 1} steps, and Evener takes over after "
        f"{PLAIN} (EVENER_DDP_PLAIN)"
    ]
    assert second == []


@pytest.mark.parametrize(
    ("own", "ours", "said"),
    [
        ([200.0, 204, 198, 202, 201], [100.0, 101, 99, 102, 98] * 6, "1.96 to 2.06 times as fast"),
        ([200.0, 204, 198, 202, 201], [200.0, 201, 199] * 9, "no difference that these steps show"),
        ([200.0, 90, 400, 202, 150], [100.0] * 20, "too uneven to compare"),
        ([200.0] * 4, [100.0] * 20, "4 and 20 steps are too few to compare"),
        ([100.0] * 9, [125.0] * 20, "0.80 to 0.80 times as fast"),
    ],
)
def test_a_ratio_has_its_range_or_none_is_said(
    own: list[float], ours: list[float], said: str
) -> None:
    assert compared(own, ours).endswith(said), compared(own, ours)


def test_the_range_of_equal_jobs_holds_one() -> None:
    draw = random.Random(1)
    wrong = 0
    for _ in range(300):
        one, other = ([draw.gauss(100, 12) for _ in range(n)] for n in (5, 90))
        wrong += "times as fast" in compared(one, other)
    assert wrong < 30


def _several(rank: int, size: int, door: bool) -> tuple[torch.Tensor, list[bool]]:
    """Two models and three optimizers: one model has two of them."""
    one, two = net(), net()
    a, b = DistributedDataParallel(one), DistributedDataParallel(two)
    matrices = torch.optim.SGD([p for p in one.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    rest = torch.optim.AdamW([p for p in one.parameters() if p.dim() < 2], lr=1e-2)
    other = torch.optim.Adam(two.parameters(), lr=1e-2)
    with opened() if door else contextlib.nullcontext():
        for step in range(12):
            a(data(step, rank)).square().mean().backward()
            matrices.step()
            rest.step()
            matrices.zero_grad()
            rest.zero_grad()
            b(data(step, rank)).abs().mean().backward()
            other.step()
            other.zero_grad()
    return weights(one, two), [is_evener(a), is_evener(b)]


def _both_ways(rank: int, size: int) -> tuple[bool, bool, list[bool]]:
    (plain, _), (ours, there) = _several(rank, size, False), _several(rank, size, True)
    return torch.equal(plain, ours), alike(ours), there


def test_several_models_and_optimizers() -> None:
    assert worlds.run((1, 1), _both_ways, env=ENV) == [(True, True, [True, True])] * 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import torch", True),
        ("pass", True),
        ("import evener.ddp; evener.ddp.accelerate", False),  # the script's own affair
        ("raise SystemExit", True),
        ("raise ValueError", False),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])", True),
    ],
)
def test_one_line_says_that_there_was_nothing_to_take_over(code: str, said: bool) -> None:
    rank0 = {"EVENER_DDP": "exact", "RANK": "0"}
    done = python(code, [str(enter.SITE)], **rank0)
    line = "evener 0: EVENER_DDP=exact never took over: the program ran no DistributedDataParallel"
    assert done.stderr.splitlines().count(line) == said, done.stderr
    assert "never took over" not in python(code, [str(enter.SITE)], **rank0 | {"RANK": "1"}).stderr


# --- what is left as it is ---


def _refused(rank: int, size: int, case: str) -> tuple[bool, bool, bool]:
    def once(door: bool) -> tuple[torch.Tensor, DistributedDataParallel]:
        inner = net()
        model = DistributedDataParallel(inner)
        accelerate, refusal = models.Follower._accelerate, models._refusal
        with opened() if door else contextlib.nullcontext():
            if case == "hook":
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            elif case == "one rank" and rank == 1:
                models._refusal = lambda _: "it cannot be here"
            elif case == "fails on one rank" and rank == 1:
                models.Follower._accelerate = lambda self, model: (
                    accelerate(self, model) or "it went wrong here"
                )
            try:
                train(model, 10, rank, adamw(model))
            finally:
                models.Follower._accelerate, models._refusal = accelerate, refusal
        return weights(inner), model

    (plain, _), (ours, model) = once(False), once(True)
    return torch.equal(plain, ours), alike(ours), is_evener(model)


@pytest.mark.parametrize("case", ["hook", "one rank", "fails on one rank"])
def test_what_cannot_be_accelerated_is_left_on_every_rank(case: str) -> None:
    assert worlds.run((1, 1), _refused, case, env=ENV) == [(True, True, False)] * 2


def _hook_later(rank: int, size: int) -> tuple[bool, bool, bool, bool]:
    def once(door: bool) -> tuple[torch.Tensor, DistributedDataParallel, bool]:
        inner = net()
        model = DistributedDataParallel(inner)
        optimizer = adamw(model)
        with opened() if door else contextlib.nullcontext():
            train(model, 8, rank, optimizer)
            before = is_evener(model)
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            train(model, 8, rank, optimizer)
        return weights(inner), model, before

    (plain, _, _), (ours, model, before) = once(False), once(True)
    return torch.equal(plain, ours), alike(ours), before, is_evener(model)


def test_a_communication_hook_that_comes_later_gets_plain_ddp_back() -> None:
    assert worlds.run((1, 1), _hook_later, env=ENV) == [(True, True, True, False)] * 2


def _compiled(rank: int, size: int) -> tuple[bool, bool, bool]:
    def once(door: bool) -> tuple[torch.Tensor, DistributedDataParallel]:
        torch._dynamo.reset()
        inner = net()
        model = DistributedDataParallel(inner)
        with opened() if door else contextlib.nullcontext():
            compiled = torch.compile(model, backend="eager")
            train(compiled, 12, rank, adamw(model))
        return weights(inner), model

    (plain, _), (ours, model) = once(False), once(True)
    return torch.equal(plain, ours), alike(ours), is_evener(model)


def test_a_compiled_model() -> None:
    assert worlds.run((1, 1), _compiled, env=ENV) == [(True, True, True)] * 2


def _sparse(rank: int, size: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened():
        for _ in range(8):
            model(torch.arange(4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return is_evener(model), alike(weights(inner))


def test_sparse_gradients_are_left_to_ddp() -> None:
    assert worlds.run((1, 1), _sparse, env=ENV) == [(False, True)] * 2


def _votes(rank: int, size: int) -> list[str]:
    absent = agree.agree("absent", "", None, 1.0) if rank == 0 else ""
    dist.barrier()
    late = agree.agree("absent", "", None, 1.0) if rank == 1 else absent
    return [
        late,
        agree.agree("all", "", None, 20.0),
        agree.agree("one", "not me" if rank else "", None, 20.0),
    ]


def test_all_ranks_get_the_same_answer_in_bounded_time() -> None:
    one, other = worlds.run((1, 1), _votes)
    assert one == other
    assert "waited 1 s" in one[0]
    assert one[1:] == ["", "not me (rank 1)"]


# --- how it gets in ---


def python(code: str, path: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EVENER_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": os.pathsep.join(path), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_process_that_did_not_ask_imports_nothing_of_eveners(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('their own')")
    code = "import sys; print(any(name.startswith('evener') for name in sys.modules))"
    done = python(code, [str(enter.SITE), str(tmp_path)])
    assert done.stdout.split("\n")[:2] == ["their own", "False"], done


def test_it_waits_for_torch_and_leaves_another_sitecustomize_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('their own')")
    code = (
        "import sys; print('torch' in sys.modules);"
        "from torch.nn.parallel import DistributedDataParallel as D;"
        "left = {f.name for f in sys.meta_path if type(f).__name__ == '_Finder'};"
        "print(D.forward.__module__, left)"
    )
    done = python(code, [str(enter.SITE), str(tmp_path)], EVENER_DDP="exact")
    assert done.stdout.split("\n")[:3] == [
        "their own",
        "False",
        "evener.door.enter {'transformers.trainer'}",
    ], done


def test_a_wrong_variable_leaves_ddp_as_it_is_and_says_so() -> None:
    code = (
        "import torch, torch.distributed as d;"
        "from torch.nn.parallel import DistributedDataParallel as D;"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
        "m = D(torch.nn.Linear(2, 2)); m(torch.ones(1, 2)).sum().backward();"
        "m(torch.ones(1, 2)).sum().backward(); print('trained')"
    )
    done = python(code, [str(enter.SITE)], EVENER_DDP="fast", GLOO_SOCKET_IFNAME="lo")
    assert done.stdout.splitlines()[-1] == "trained", done  # Gloo of torch 2.9 talks before it
    assert done.stderr.count("EVENER_DDP='fast' is not off or exact or auto") == 1, done.stderr


def test_a_program_that_puts_a_function_in_place_of_ddp_is_followed() -> None:
    """ultralytics on a CPU: its script makes DDP's models by a function of that name."""
    code = (
        "import torch, torch.distributed as d; from torch.nn import parallel;"
        "real = parallel.DistributedDataParallel;"
        "parallel.DistributedDataParallel = lambda module, **given: real(module);"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
        "m = parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0]);"
        "m(torch.ones(1, 2)).sum().backward(); print(real.forward.__module__)"
    )
    done = python(code, [str(enter.SITE)], EVENER_DDP="exact", GLOO_SOCKET_IFNAME="lo")
    assert done.stdout.splitlines()[-1] == "evener.door.models", done
    assert "has no effect" not in done.stderr, done.stderr


def test_the_variables_of_a_job() -> None:
    assert enter.variables({}) == {"EVENER_DDP": "exact", "PYTHONPATH": str(enter.SITE)}
    opened = enter.variables({"PYTHONPATH": f"/a{os.pathsep}{enter.SITE}"}, "int8")
    assert opened["EVENER_DDP"] == "auto" and opened["EVENER_FLOOR"] == "int8"
    assert opened["PYTHONPATH"].split(os.pathsep) == [str(enter.SITE), "/a"]
    assert enter.variables({"EVENER_DDP": "auto"})["EVENER_DDP"] == "auto"
    with pytest.raises(UsageError, match="is off"):
        enter.variables({"EVENER_DDP": "off"})
    with pytest.raises(UsageError, match="int9"):
        enter.variables({}, "int9")


def test_launch_opens_it_on_every_host() -> None:
    words = ["-np", "2", "--dry-run", "-x", "PYTHONPATH=/theirs", "python", "train.py"]
    done = CliRunner().invoke(launch, ["--ddp", *words])
    assert done.exit_code == 0, done.output
    assert f"PYTHONPATH={enter.SITE}{os.pathsep}/theirs" in done.output
    assert "EVENER_DDP=exact" in done.output
    for option in (["--floor", "int8"], ["--every", "auto"], ["--overlap", "4"]):
        done = CliRunner().invoke(launch, [*option, *words])
        assert isinstance(done.exception, UsageError) and "--ddp" in done.exception.fix
    told = CliRunner().invoke(launch, ["--ddp", "--every", "16", "--overlap", "4", *words])
    assert "EVENER_EVERY=16" in told.output and "EVENER_OVERLAP=4" in told.output
    done = CliRunner().invoke(launch, ["--ddp", "--overlap", "4", *words])
    assert isinstance(done.exception, UsageError) and "--every" in done.exception.fix
    done = CliRunner().invoke(launch, ["--ddp", "--min-np", "1", *words])
    assert isinstance(done.exception, UsageError)
    assert done.exception.problem.startswith("--ddp and an elastic job")
    told = CliRunner().invoke(launch, ["--ddp", "--every", "auto", *words])
    assert "EVENER_EVERY=auto" in told.output and "EVENER_OVERLAP" not in told.output
