"""Forms that keep a residual: nothing is lost, whatever happens between steps."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evener.base import settings
from evener.comm import wires
from evener.comm.exchange import Exchange
from evener.comm.options import Options
from evener.comm.reducer import Reducer
from evener.comm.state import LossScale
from evener.comm.wires.topk import ratio_at
from evener.ddp import MODES, accelerate
from evener.errors import UsageError
from tests import worlds
from tests.comm import models

FEEDBACK = [name for name in wires.names() if wires.get(name).feedback]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def options(form: str, guard_steps: int = 0, **more: Any) -> Options:
    """A form that stays, unless the guard is asked for."""
    more["guard_steps"] = guard_steps
    return Options(wire=form, ratio=0.05, topk_min_bytes=0, bucket_bytes=4096, **more)


PARTS = {"partition_bytes": 4000}  # the weight's 12,800 bytes in four, the last one smaller


class Run:
    """A model whose gradients are given, a reducer, and float64 sums of what should arrive."""

    def __init__(self, rank: int, form: str, dtype: torch.dtype = torch.float32, **more: Any):
        self.rank = rank
        torch.manual_seed(3)
        self.model = torch.nn.Linear(64, 50, device=models.device(), dtype=dtype)
        self.reducer = Reducer(self.model.named_parameters(), options(form, **more))
        self.named = dict(self.model.named_parameters())
        self.applied = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self.named.items()}
        self.wanted = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self.named.items()}

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return {n: torch.randn(p.shape, generator=generator).to(p) for n, p in self.named.items()}

    def step(self, step: int, scale: float = 1.0, skip: bool = False, absent: bool = False) -> None:
        own = self.gradients(step)
        self.model.zero_grad()
        if not absent:
            sum((p * own[n]).sum() * scale for n, p in self.named.items()).backward()  # type: ignore[union-attr]
        self.reducer.flush()
        self.reducer.apply()
        assert models.same_on_all_ranks(self.model)
        if absent:
            own = {n: torch.zeros_like(g) for n, g in own.items()}
        for name, mean in models.mean_over_ranks(own).items():  # type: ignore[arg-type]
            if skip and name == "bias":
                continue  # dense: a skipped step loses it, as without compression
            self.wanted[name] += mean
            gradient = self.named[name].grad
            assert gradient is not None
            if not skip:
                self.applied[name] += gradient.cpu().double() / scale

    def exchange(self, name: str) -> Exchange:
        return next(e for e in self.reducer.exchanges if e.names == [name])

    def owed(self, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """What is still to come, by the checkpoint's account. Collective."""
        found = self.reducer.state_dict()["residual"]
        return {n: found.get(n, torch.zeros(p.shape)) / scale for n, p in self.named.items()}

    def check(self, owed: dict[str, torch.Tensor], tolerance: float) -> None:
        for name, wanted in self.wanted.items():
            error = (self.applied[name] + owed[name].double() - wanted).abs().max().item()
            assert error <= tolerance * max(wanted.abs().max().item(), 1.0), (name, error)


def loses_nothing(rank: int, size: int, cases: list[tuple[str, str, bool, bool]]) -> None:
    """Over any number of steps: what was applied and what was kept back add up to the means."""
    for form, dtype, half, parts in cases:
        kind = getattr(torch, dtype)
        run = Run(rank, form, kind, topk_fp16=half, **(PARTS if parts else {}))
        for step in range(6):
            run.step(step, absent=step == 3 and rank == size - 1)
            weight = run.named["weight"].grad
            assert weight is not None
            # The first step is dense; chunks are larger than the parts here.
            if form.startswith("topk") and step > 0 and not (parts and form == "topk-chunk"):
                assert (weight != 0).float().mean() < 0.05 * size + 0.05
            bias = run.named["bias"].grad
            assert bias is not None and (bias != 0).all()  # norms and biases stay dense
        run.check(run.owed(), TOLERANCE[kind])
        if not run.reducer.communicators.route.levels.owns:
            assert not run.reducer.residuals()
            run.reducer.close()
            continue
        pieces = run.reducer.residuals()["weight"]
        assert len(pieces) == (4 if parts and dtype == "float32" else 2 if parts else 1)
        assert len({first for first, _ in pieces}) == len(pieces)
        if size == run.reducer.communicators.route.outer.size:  # no shards: all of it is here
            assert sum(len(part) for _, part in pieces) == run.named["weight"].numel()
        run.reducer.close()


@pytest.mark.parametrize("shape", [[1, 1], [2, 2], [1, 1, 1], [2, 1], [3, 2], [1] * 4], ids=str)
def test_error_feedback_loses_nothing(shape: list[int]) -> None:
    """Also where a rank has no gradient in a step, as one that has run out of data."""
    cases = [(form, "float32", False, shape == [2, 1]) for form in FEEDBACK]
    if shape == [1] * 4:  # sparse forms in two halves
        cases = [("topk", "float32", half, half) for half in (False, True)]
        cases += [("topk-chunk", "float32", False, False), ("topk", "bfloat16", False, False)]
    if shape in ([1, 1], [2, 2]):
        cases += [("topk", "float32", True, True), ("topk", "bfloat16", False, False)]
        cases += [("topk-chunk", "float16", False, True), ("int8", "bfloat16", False, False)]
        cases += [("int8", "float32", False, True)]
    worlds.run(shape, loses_nothing, cases)


def accumulation(rank: int, size: int) -> None:
    """Under no_sync gradients add up; error feedback sees their sum once."""
    for form in FEEDBACK:
        torch.manual_seed(1)
        own, inner = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))
        inner.load_state_dict(own.state_dict())
        model = accelerate(DistributedDataParallel(inner), mode=form, ratio=0.05)
        model.evener.options.__dict__["topk_min_bytes"] = 0  # before the first step settles it
        total = torch.zeros(32, 32, dtype=torch.float64)
        wanted = torch.zeros(32, 32, dtype=torch.float64)
        for step in range(4):
            model.zero_grad()
            own.zero_grad()
            for i in range(3):
                generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
                x = torch.randn(4, 32, generator=generator)
                own(x).square().mean().backward()
                if i < 2:
                    with model.no_sync():
                        model(x).square().mean().backward()
                else:
                    model(x).square().mean().backward()
            assert inner.weight.grad is not None
            total += inner.weight.grad.double()
            wanted += models.mean_over_ranks(models.gradients(own))["weight"]
        state = model.evener.state_dict()
        assert state["forms"]["weight"] == form
        total += state["residual"]["weight"].double()
        torch.testing.assert_close(total, wanted, atol=1e-6, rtol=1e-5)
        model.evener.close()


def test_gradient_accumulation() -> None:
    worlds.run([1, 1], accumulation)


def scaled(rank: int, size: int) -> None:
    """The scale grows, a step overflows and is skipped, the scale shrinks."""
    for form in ("topk", "topk-chunk", "lowrank2"):
        run = Run(rank, form)
        run.reducer.set_loss_scale(8.0)
        run.step(0, 8.0)
        run.step(1, 8.0)
        run.reducer.set_loss_scale(32.0)
        run.step(2, 32.0)
        run.step(3, 32.0, skip=True)
        run.reducer.set_loss_scale(16.0)
        run.step(4, 16.0)
        # The skipped step's gradients are kept back, not lost, as is what was there before it.
        run.check(run.owed(), 1e-5)
        run.reducer.close()


def test_loss_scale_and_skipped_steps() -> None:
    worlds.run([2, 2], scaled)


def overflow(rank: int, size: int) -> None:
    """Infinity on one rank reaches all, and no residual keeps it."""
    for form in FEEDBACK:
        run = Run(rank, form)
        run.step(0)
        run.step(1)
        run.model.zero_grad()
        worst = torch.inf if rank == 0 else 1.0
        (run.model.weight * 1.0).sum().backward()
        run.model.zero_grad()
        run.reducer._reset()
        run.model.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), worst))  # noqa: B023
        run.model.weight.sum().backward()
        run.reducer.flush()
        run.reducer.apply()
        assert run.model.weight.grad is not None
        assert not run.model.weight.grad.isfinite().all()
        for parts in run.reducer.residuals().values():
            assert all(part.isfinite().all() for _, part in parts)
        run.reducer.close()


def test_what_is_not_finite_is_seen_by_all_and_kept_by_none() -> None:
    worlds.run([1, 1], overflow)


class Scaler:
    """What `LossScale` reads of a GradScaler."""

    def __init__(self) -> None:
        self._scale = torch.tensor(4.0)

    def get_scale(self) -> float:
        raise AssertionError("makes the host wait")


def test_the_scale_is_followed_without_waiting() -> None:
    scaler = Scaler()
    scale = LossScale(scaler)  # type: ignore[arg-type]
    assert scale.change() is None
    scaler._scale.mul_(2)
    change = scale.change()
    assert change is not None and float(change.factor) == 2 and not change.skipped
    scaler._scale.mul_(0.5)
    change = scale.change()
    assert change is not None and float(change.factor) == 0.5 and change.skipped


# --- checkpoints ---


def first_half(rank: int, size: int, path: str, form: str, parts: bool) -> None:
    run = Run(rank, form, **(PARTS if parts else {}))
    for step in range(4):
        run.step(step)
    state = run.reducer.state_dict()
    if rank == 0:
        torch.save({"state": state, "applied": run.applied, "wanted": run.wanted}, path)
    run.reducer.close()


def second_half(rank: int, size: int, path: str, form: str, late: bool) -> None:
    run = Run(rank, form, **(PARTS if late else {}))
    saved = torch.load(path)
    if late:  # as older versions named a compiled model's
        saved["state"] = {
            key: {f"_orig_mod.{name}": value for name, value in found.items()}
            if isinstance(found, dict)
            else found
            for key, found in saved["state"].items()
        }
    run.applied, run.wanted = saved["applied"], saved["wanted"]
    if late:  # after the first step, whose layout was a guess
        run.step(50)
    run.reducer.load_state_dict(saved["state"])
    for step in range(60, 64):
        run.step(step)
    run.check(run.owed(), 3e-6)
    assert run.reducer.steps == 8
    run.reducer.close()


@pytest.mark.parametrize("form", ["topk", "int8", "int4", "lowrank1"])
def test_a_checkpoint_goes_on_in_a_world_of_another_size(form: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    worlds.run([2, 2], first_half, path, form, form == "int8")
    assert torch.load(path)["state"]["residual"]["weight"].abs().max() > 0
    worlds.run([1, 1, 1], second_half, path, form, False)
    worlds.run([1, 1], second_half, path, form, True)


def refused_state(rank: int, size: int) -> None:
    run = Run(rank, "topk")
    run.step(0)
    run.step(1)
    state = run.reducer.state_dict()
    other = torch.nn.Linear(3, 3)
    reducer = Reducer(other.named_parameters(), options("topk"))
    with pytest.raises(UsageError, match=r"residual of weight is \(50, 64\)"):
        reducer.load_state_dict(state)
    other(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UsageError, match="middle of a step"):
        reducer.state_dict()
    reducer.flush()
    reducer.apply()


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    worlds.run([1, 1], refused_state)


# --- momentum and warm-up ---


def momentum(rank: int, size: int) -> None:
    """In a dense form, and after a fall back to one, it is the optimizer's momentum."""
    for form, fall in (("exact", None), ("int8", None), ("topk", "exact")):
        run = Run(rank, form, momentum=0.5, **(PARTS if form != "int8" else {}))
        velocity = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in run.named.items()}
        for step in range(5):
            own = run.gradients(step)
            if fall and step > 0:
                for bucket in range(len(run.reducer.exchanges)):
                    run.reducer.assignment.use(bucket, fall)
            run.step(step)
            for name, mean in models.mean_over_ranks(own).items():  # type: ignore[arg-type]
                velocity[name] = 0.5 * velocity[name] + mean
                have = run.named[name].grad
                assert have is not None
                worst = (have.double() - velocity[name]).abs().max()
                assert worst < (0.1 if form == "int8" else 1e-5), (form, step, worst)
        run.reducer.close()


def test_momentum_in_dense_forms_is_the_optimizers() -> None:
    worlds.run([2, 2], momentum)


class Scaled:
    """A training of ten steps whose loss is scaled, with an overflow on one rank in the fifth.

    `applied`: momentum is the reducer's; else the optimizer's, under plain DDP.
    """

    def __init__(self, rank: int, applied: bool, **more: Any) -> None:
        torch.manual_seed(3)
        self.rank, self.step = rank, 0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.model: Any = DistributedDataParallel(torch.nn.Linear(16, 16))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.0 if applied else 0.5
        )
        if applied:
            accelerate(self.model, momentum=0.5, scaler=self.scaler, **more)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(100 * self.step + self.rank)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 16, generator=generator)).square().mean()
            bad = self.step == 5 and self.rank == 0
            self.scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def momentum_of_skipped_steps(rank: int, size: int) -> None:
    """An overflow leaves no trace in the velocity; and it is in a checkpoint, also at that step."""
    want, have = Scaled(rank, applied=False), Scaled(rank, applied=True)
    for steps in (4, 1, 5):  # the second is the one that is skipped
        want.go(steps)
        have.go(steps)
        assert torch.equal(want.weights(), have.weights()), want.step
        state = have.model.evener.state_dict()
        again = Scaled(rank, applied=True)
        again.model.load_state_dict(have.model.state_dict())
        again.scaler.load_state_dict(have.scaler.state_dict())
        again.step = have.step
        again.model.evener.load_state_dict(state)
        have = again
    for form in ("int8", "topk", "topk-chunk"):
        run = Scaled(rank, applied=True, mode=form, ratio=0.1)
        run.go(10)
        assert run.weights().isfinite().all(), form
        velocity = run.model.evener.state_dict()["velocity"]
        assert all(tensor.isfinite().all() for tensor in velocity.values()), form


@pytest.mark.parametrize("shape", [[1, 1], [2]], ids=str)
def test_momentum_survives_skipped_steps_and_resumes(shape: list[int]) -> None:
    worlds.run(shape, momentum_of_skipped_steps, env={"LIGHT_TOPK_THRESHOLD": "0"})


def corrected(rank: int, size: int) -> None:
    """Top-k against DGC's algorithm, written down for all ranks in one place."""
    run = Run(rank, "topk", momentum=0.5)
    k = max(1, int(run.exchange("weight").bucket.buffer.numel() * 0.05))
    shape = run.named["weight"].shape
    velocity = torch.zeros(size, *shape).view(size, -1)
    residual = torch.zeros_like(velocity)
    for step in range(5):
        everyone: list[torch.Tensor] = [torch.empty(0)] * size
        dist.all_gather_object(everyone, run.gradients(step)["weight"].view(-1) / size)
        run.step(step)
        gradients = torch.stack(everyone)
        velocity = 0.5 * velocity + gradients
        if step == 0:  # dense: everybody's velocity, of which each takes its share
            want = velocity.sum(0)
            velocity = (want / size).expand(size, -1).clone()
        else:
            residual += velocity
            want = torch.zeros(velocity.shape[1])
            for v, r in zip(velocity, residual, strict=True):
                taken = torch.sort(r.abs(), descending=True, stable=True).indices[:k]
                want[taken] += r[taken]
                r[taken] = 0
                v[taken] = 0
        have = run.named["weight"].grad
        assert have is not None
        torch.testing.assert_close(have.view(-1), want, atol=1e-6, rtol=1e-5)
    assert len(run.reducer.exchanges) == 2


def test_momentum_correction_is_that_of_deep_gradient_compression() -> None:
    worlds.run([1, 1], corrected)


def test_the_ratio_comes_down_from_a_quarter() -> None:
    ratios = [ratio_at(step, 0.001, 10) for step in range(12)]
    assert ratios[0] == 0.25 and ratios[10] == ratios[11] == 0.001
    assert ratios == sorted(ratios, reverse=True) and len(set(ratios)) == 6
    assert ratio_at(0, 0.5, 10) == 0.5 and ratio_at(0, 0.01, 0) == 0.01


# --- the guard and the records ---


def guarded(rank: int, size: int, cosine: float) -> list[str]:
    run = Run(rank, "topk", guard_steps=2, guard_cosine=cosine)
    run.reducer.optimizers.given(torch.optim.SGD(run.model.parameters()))
    forms = []
    for step in range(9):
        run.step(step)
        forms.append(run.exchange("weight").wire.name)
    run.check(run.owed(), 1e-2)  # one step of BF16
    run.reducer.close()
    return forms


def test_the_guard_falls_back_step_by_step_and_loses_nothing(tmp_path: Path) -> None:
    env = {"EVENER_STATS_DIR": str(tmp_path)}
    found = worlds.run([2, 2], guarded, 0.9999999, env=env)
    # Checked in steps 2, 4, 6, 8; the first step is exact.
    want = ["topk", "int8", "int8", "bf16", "bf16", "exact", "exact", "exact", "exact"]
    assert found == [want] * 4
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("comm-*.json"))]
    assert {record["rank"] for record in records} == {0, 1, 2, 3}
    (bucket,) = [b for b in records[0]["comm"]["buckets"] if "weight" in b["name"]]
    assert bucket["algorithm"] == "2d" and bucket["bytes_sent"] > 0
    assert 0 < bucket["cosine"] <= 1 and bucket["measured_ms"] > 0
    (path,) = tmp_path.glob("guard-*.csv")  # rank 0's alone
    rows = list(csv.DictReader(path.open()))
    assert [(row["step"], row["form"], row["falls_to"]) for row in rows] == [
        ("2", "topk", "int8"),
        ("4", "int8", "bf16"),
        ("6", "bf16", "exact"),
    ]
    ratios = [float(row["residual_ratio"]) for row in rows]
    assert ratios[0] > 0.5 > ratios[1] > 0 == ratios[2]
    cosines = [float(row["cosine"]) for row in rows]
    assert 0.1 < cosines[0] < cosines[1] < cosines[2] < 1


def test_the_guard_leaves_alone_what_is_within_limits() -> None:
    assert worlds.run([1, 1], guarded, -0.5) == [["topk"] * 9] * 2


def replanned(rank: int, size: int) -> None:
    """The guard lowers the weight from top-k to INT8; then a planner decides again."""
    run = Run(rank, "topk", guard_steps=2, guard_cosine=0.9999999)
    for step in range(2):
        run.step(step)
    reducer, index = run.reducer, run.exchange("weight").bucket.index
    assert run.exchange("weight").wire.name == "int8"
    allowed = {form: reducer.assignment.permitted(index, form) for form in wires.names()}
    assert allowed == {
        form: wires.get(form).place <= wires.get("int8").place for form in wires.names()
    }
    for choice, form in (("topk", "int8"), ("bf16", "bf16"), ("int8", "int8"), ("topk", "int8")):
        reducer.adopt([("flat", choice)] * len(reducer.buckets), reducer.sequence)
        assert run.exchange("weight").wire.name == form, choice
    run.check(run.owed(), 1e-5)
    reducer.close()


def test_a_new_plan_does_not_raise_what_the_guard_has_lowered() -> None:
    worlds.run([1, 1], replanned)


def two_at_once(rank: int, size: int) -> tuple[int, set[str], set[str]]:
    run, other = (Run(rank, "topk", guard_steps=2) for _ in range(2))
    for step in range(2):
        run.step(step)
        other.step(step)
    other.reducer.close()
    run.reducer.close()
    directory = Path(settings.EVENER_STATS_DIR.get())
    mine = f"*-r{rank}-{os.getpid()}*"  # ranks are threads of one process, or processes
    found = {path.name for path in directory.glob(mine)}
    last = Run(rank, "topk")
    last.step(0)
    last.reducer.close()
    return os.getpid(), found, {path.name for path in directory.glob(mine)}


def test_two_reducers_of_a_process_write_files_of_their_own(tmp_path: Path) -> None:
    found = worlds.run([1, 1], two_at_once, env={"EVENER_STATS_DIR": str(tmp_path)})
    for rank, (pid, names, later) in enumerate(found):
        who = f"{re.sub('[^A-Za-z0-9-]', '_', socket.gethostname())}-r{rank}-{pid}"
        want = {f"comm-{who}.json", f"comm-{who}-2.json"}
        want |= {f"guard-{who}.csv", f"guard-{who}-2.csv"} if rank == 0 else set()
        assert names == want == later


# --- the door ---


def refused(rank: int, size: int) -> None:
    def model() -> DistributedDataParallel:
        return DistributedDataParallel(torch.nn.Linear(4, 4))

    with pytest.raises(UsageError, match="both say what is sent"):
        accelerate(model(), mode="exact", wire="fp16")
    with pytest.raises(UsageError, match="floor='int8'"):
        accelerate(model(), mode="topk", floor="int8")
    with pytest.raises(UsageError, match="mode='fp12'"):
        accelerate(model(), mode="fp12")
    wrapped = model()
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="SGD applies its own"):
        accelerate(wrapped, sgd, mode="topk", momentum=0.9)


def test_what_the_door_refuses() -> None:
    worlds.run([1], refused)


def test_the_modes() -> None:
    assert wires.names() == MODES
    for name in MODES:  # every chain of milder forms ends in exact
        seen = [name]
        while seen[-1] != "exact":
            seen.append(wires.get(seen[-1]).milder)
            assert len(seen) < 9
