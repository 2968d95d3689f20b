"""Overlap across the step: the same bits as without, whatever a script does between the steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from evener.comm.overlap import interpose
from evener.comm.overlap import step as overlap_step
from evener.comm.overlap.guard import Pending
from evener.comm.overlap.optimizers import OBSERVES
from evener.comm.overlap.order import issue_order
from evener.comm.overlap.step import State
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models, scripts
from tests.comm.scripts import accumulation, clipping, heard, keeps_zeros, plain, two_backwards


class Attention(nn.Module):
    """MultiheadAttention never calls out_proj; the head shares the embedding's weight; `extra` is
    used by nobody, `loose` by a function, `norm` in one step of two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.loose = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.extra = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        y = self.embed(x)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = y + self.lstm(y)[0]
        y = y + functional.linear(y, self.loose.weight, self.loose.bias)
        return self.head(self.norm(y) if use_all else y)


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 11, (4, 5), generator=generator).to(models.device())


class Script(scripts.Script):
    """One training script, run with the optimizer given to accelerate() and without."""

    def __init__(self, rank: int, overlapped: bool, **changes: Any) -> None:
        torch.manual_seed(3)
        super().__init__(
            rank, Attention() if changes.get("attention", True) else models.Awkward(), changes
        )
        if changes.get("scheduler_first"):
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        wrapped = DistributedDataParallel(
            self.module, find_unused_parameters=changes.get("find_unused", False)
        )
        self.model = accelerate(
            wrapped,
            self.optimizer if overlapped else None,
            mode=changes.get("mode"),
            bucket_bytes=changes.get("bucket_bytes", 600),
            partition_bytes=changes.get("partition_bytes"),
        )
        self.overlap = self.model.evener_steps.overlap
        if self.overlap is not None:
            self.overlap.wanted = changes.get("wanted", True)
        self.deferred = 0

    def loss(self, step: int) -> torch.Tensor:
        use_all = self.changes.get("always_all", False) or step % 2 == 0
        if not self.changes.get("attention", True):
            x = models.batch(self.rank, step, torch.float32).to(models.device())
            return self.model(x, use_all).square().mean()
        x = tokens(self.rank, step)
        return functional.cross_entropy(self.model(x, use_all).flatten(0, 1), x.flatten())

    def step(self) -> None:
        self.optimizer.step()
        if self.overlap is not None:
            self.deferred += self.overlap.state is State.DEFERRED


def zero_grad_late(s: Script) -> None:
    for step in range(s.steps):
        loss = s.loss(step)
        s.model.zero_grad()
        loss.backward()
        s.step()
        s.log.append(loss.detach())


def by_hand(s: Script) -> None:
    for step in range(s.steps):
        for parameter in s.module.parameters():
            parameter.grad = None
        if s.overlap is not None and step > 4:  # three were profiled
            assert s.overlap.state is State.DEFERRED, "dropping gradients waited for them"
        s.loss(step).backward()
        s.step()


def scheduler(s: Script) -> None:
    made = getattr(s, "scheduler", None) or torch.optim.lr_scheduler.StepLR(s.optimizer, 1, 0.7)
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        made.step()


def average(s: Script) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(
        s.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        averaged.update_parameters(s.module)
    s.log += [p.detach().clone() for p in averaged.parameters()]


def checkpoint(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        if step == 3:
            file = io.BytesIO()
            torch.save({"m": s.model.state_dict(), "o": s.optimizer.state_dict()}, file)
        if step == 5:
            file.seek(0)
            saved = torch.load(file, map_location=models.device())
            s.model.load_state_dict(saved["m"])
            s.optimizer.load_state_dict(saved["o"])


def copies(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        copied = copy.deepcopy(s.module)
        assert not any(isinstance(p, Pending) and type(p) is Pending for p in copied.parameters())
        s.log.append(copied(tokens(0, step)).detach())


def evaluation(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()
        s.model.eval()
        with torch.inference_mode():
            s.log.append(s.loss(50 + step).clone())
        s.model.train()


def peeks(s: Script) -> None:
    """Reads one parameter and one gradient between the steps, and a norm before them."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        if step == 4:
            s.log.append(s.module.head.bias.grad.norm())
        s.step()
        s.log.append(s.module.loose.weight.sum().detach())
        s.log.append(s.module.head.bias.grad.clone())


def closures(s: Script) -> None:
    for step in range(s.steps):

        def closure(step: int = step) -> torch.Tensor:
            s.optimizer.zero_grad()
            loss = s.loss(step)
            loss.backward()
            return loss

        s.optimizer.step(closure)


def hooks(s: Script) -> None:
    s.optimizer.register_step_post_hook(lambda *_: s.log.append(torch.tensor(1.0)))
    plain(s)


def around_the_model(s: Script) -> None:
    """Such a backward is not reduced, as with DDP: the same inputs keep the ranks alike."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        x = tokens(0, step)
        functional.cross_entropy(s.module(x).flatten(0, 1), x.flatten()).backward()
        s.step()


def penalty(s: Script) -> None:
    """A parameter that is used outside of every module, and before the forward."""
    for step in range(s.steps):
        s.optimizer.zero_grad()
        early = s.module.extra.square().sum()
        (s.loss(step) + early + s.module.loose.weight.abs().sum()).backward()
        s.step()


def loss_scale(s: Script) -> None:
    """The scaler of AMP, on the CPU, with a step that it skips."""
    scaler = torch.amp.GradScaler(models.device().type, init_scale=8.0, growth_interval=2)
    for step in range(s.steps):
        s.optimizer.zero_grad()
        loss = s.loss(step)
        if step == 4:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(s.optimizer)
        s.deferred += s.overlap is not None and s.overlap.state is State.DEFERRED
        scaler.update()


Act = Callable[[Any], None]
# Name: what the script does, how it is made, whether steps are deferred in it.
CASES: dict[str, tuple[Act, dict[str, Any], bool]] = {
    "sgd": (plain, {}, True),
    "momentum": (plain, {"options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}, True),
    "adam": (plain, {"optimizer": "Adam", "options": {"lr": 0.01}}, True),
    "adamw": (plain, {"optimizer": "AdamW", "options": {"lr": 0.01, "amsgrad": True}}, True),
    "adagrad": (plain, {"optimizer": "Adagrad", "options": {"lr": 0.1}}, True),
    "rmsprop": (plain, {"optimizer": "RMSprop", "options": {"lr": 0.01}}, True),
    "nadam": (plain, {"optimizer": "NAdam", "options": {"lr": 0.01}}, True),
    "lr is a tensor": (
        plain,
        {"optimizer": "Adam", "options": {"lr": torch.tensor(0.01)}},
        False,
    ),
    "tied and unused": (plain, {"attention": False}, True),
    "find unused": (plain, {"find_unused": True}, True),
    "find unused, tied": (zero_grad_late, {"find_unused": True, "attention": False}, True),
    "one bucket": (plain, {"bucket_bytes": 1 << 20}, True),
    "tensors in parts": (plain, {"partition_bytes": 256}, True),
    "parts, tied and unused": (plain, {"attention": False, "partition_bytes": 256}, True),
    "parts, clipped": (clipping, {"partition_bytes": 256}, False),
    "a bucket a tensor": (plain, {"bucket_bytes": 0}, True),
    "zero_grad late": (zero_grad_late, {}, True),
    "zero_grad by hand": (by_hand, {}, True),
    "keeps zeros": (keeps_zeros, {}, True),
    "scheduler": (scheduler, {}, True),
    "scheduler made first": (scheduler, {"scheduler_first": True}, True),
    "accumulation": (accumulation, {}, True),
    "two losses": (two_backwards, {}, False),  # the second one is not reduced, as with DDP
    "clipping": (clipping, {}, False),
    "average of weights": (average, {}, True),
    "checkpoint": (checkpoint, {"optimizer": "Adam", "options": {"lr": 0.01}}, True),
    "copies": (copies, {}, True),
    "evaluation": (evaluation, {}, True),
    "peeks": (peeks, {}, True),
    "closure": (closures, {}, False),
    "step hooks": (hooks, {}, False),
    "around the model": (around_the_model, {"always_all": True}, False),
    "penalty": (penalty, {}, True),
    "loss scale": (loss_scale, {}, False),
}
# As where a planner found that deferring is no faster.
for _name in ("adam", "find unused", "clipping", "checkpoint", "penalty", "closure", "two losses"):
    _act, _changes, _ = CASES[_name]
    CASES[f"{_name}, not deferred"] = (_act, {**_changes, "wanted": False}, False)


def run_both(rank: int, size: int, names: list[str]) -> dict[str, int]:
    """Every named case twice, compared bit by bit; how many steps were deferred in each."""
    deferred = {}
    for name in names:
        act, changes, _ = CASES[name]
        results = []
        for overlapped in (False, True):
            script = Script(rank, overlapped, **changes)
            act(script)
            results.append(script.result())
            script.model.evener_steps.finish("")
        expected, found = results
        assert expected.keys() == found.keys(), name
        for key, value in expected.items():
            assert models.raw(value) == models.raw(found[key]), (name, key)
        deferred[name] = script.deferred
        assert all(type(p) is nn.Parameter for p in script.module.parameters()), name
    return deferred


@pytest.mark.parametrize("part", range(4))
def test_the_same_bits_as_without(part: int) -> None:
    names = list(CASES)[part::4]
    for deferred in worlds.run([1, 1], run_both, names):
        for name, steps in deferred.items():
            assert (steps >= 2) == CASES[name][2], (name, steps)


def not_deferred(rank: int, size: int) -> tuple[list[State], list[State], int, list[str]]:
    """Where deferring is no faster, whoever looks waits, or step(): not the end of backward."""
    with heard() as said:
        script = Script(rank, True, always_all=True, wanted=False)
        overlap = script.overlap
        assert overlap is not None
        behind, ahead = [], []
        for step in range(8):
            script.optimizer.zero_grad()
            loss = script.loss(step)
            loss.backward()
            assert loss.item() > 0
            behind.append(overlap.state)
            if step % 2:
                assert script.module.head.bias.grad is not None
                ahead.append(overlap.state)
            script.optimizer.step()
            assert overlap.state is State.IDLE
    return behind[4:], ahead[2:], overlap.interrupted, said.lines


def test_a_step_that_is_not_deferred_is_waited_for_where_it_is_needed() -> None:
    for behind, ahead, interrupted, said in worlds.run([1, 1], not_deferred):
        assert set(behind) == {State.REDUCING} and set(ahead) == {State.IDLE}
        assert interrupted <= 3, "of the profiled steps, which look on purpose"
        assert not [line for line in said if "is interrupted" in line]


def buckets_wait(rank: int, size: int) -> tuple[list[int], list[str]]:
    """Forward waits for what it uses, no more: seen by holding the last bucket's reduction back."""
    script = Script(rank, True, bucket_bytes=0, always_all=True)
    plain(script)
    overlap = script.overlap
    assert overlap is not None and overlap.state is State.DEFERRED
    names = script.model.evener.names
    script.module.embed(tokens(rank, 0))
    landed = [
        names[bucket.slots[0].index]
        for bucket in script.model.evener.buckets
        if bucket.index not in overlap._waiting
    ]
    script.model.evener_steps.finish("")
    return list(script.model.evener.sequence), landed


def test_a_use_brings_in_its_own_bucket_only() -> None:
    for sequence, landed in worlds.run([1, 1], buckets_wait):
        assert landed == ["embed.weight"]
        assert sorted(sequence) == list(range(len(sequence)))


def ends_without_a_word(rank: int, size: int) -> list[float]:
    """Rank 0 saves after the last step, rank 1 destroys its groups at once."""
    import torch.distributed as dist

    script = Script(rank, True)
    plain(script)
    assert script.overlap is not None and script.overlap.state is State.DEFERRED
    if rank == 0:
        found = script.module.head.bias.detach().tolist()
        interpose._at_exit()  # worlds end their processes without it
        return found
    dist.destroy_process_group()
    assert script.overlap.state is State.IDLE
    return script.module.head.bias.detach().tolist()


def test_the_last_step_lands_on_every_rank() -> None:
    first, second = worlds.run([1, 1], ends_without_a_word)
    assert first == second


def watched_hooks(rank: int, size: int) -> tuple[list[str], int]:
    """What hooks of every optimizer hear that say of themselves that they only look."""
    said: list[str] = []

    def before(*_: Any) -> None:
        said.append("before")

    def after(*_: Any) -> None:
        said.append("after")

    for hook in (before, after):
        setattr(hook, OBSERVES, True)
    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    script = Script(rank, True, bucket_bytes=0, always_all=True)
    plain(script)
    script.model.evener_steps.finish("")
    for handle in handles:
        handle.remove()
    assert script.deferred >= 2
    return said, script.steps


def test_hooks_that_look_do_not_keep_a_step_from_being_deferred_and_hear_it_once() -> None:
    for said, steps in worlds.run([1, 1], watched_hooks):
        assert said == ["before", "after"] * steps


def refused(rank: int, size: int) -> list[str]:
    with heard() as said:
        for name in ("LBFGS", "Adafactor"):
            module = nn.Linear(4, 4)
            optimizer = getattr(torch.optim, name)(module.parameters())
            model = accelerate(DistributedDataParallel(module), optimizer)
            assert model.evener_steps.overlap is None

        class Mine(torch.optim.SGD):
            pass

        class Flagged(torch.optim.SGD):
            evener_elementwise = True

        for kind, known in ((Mine, False), (Flagged, True)):
            module = nn.Linear(4, 4)
            optimizer = kind(module.parameters(), lr=0.1)
            model = accelerate(DistributedDataParallel(module), optimizer)
            assert (model.evener_steps.overlap is not None) == known
        module = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = accelerate(DistributedDataParallel(module), optimizer)
        assert model.evener_steps.overlap is None
        script = Script(rank, True)
        clipping(script)
    return said.lines


def test_what_is_not_deferred_is_said_once() -> None:
    said = worlds.run([1, 1], refused)[0]
    text = "\n".join(said)
    assert "no, LBFGS is not known" in text and "no, Adafactor is not known" in text
    assert "no, Mine is not known" in text
    assert "Flagged" not in text
    assert "is compiled" in text
    assert len([line for line in said if "clip_grad.py" in line]) == 1, text


@pytest.fixture
def times() -> Iterator[tuple[list[float], list[float], list[float]]]:
    # VGG16's shape: the large bucket comes first in backward and is needed last.
    yield [1.0, 2.0, 9.0, 10.0], [8.0, 7.0, 2.0, 0.0], [30.0, 3.0, 4.0, 2.0]


def test_the_bucket_needed_first_leaves_first(
    times: tuple[list[float], list[float], list[float]],
) -> None:
    ready, need, cost = times
    assert issue_order(ready, need, cost) == (0, 3, 2, 1)
    # On a fast network nothing queues, and backward's order stays.
    assert issue_order(ready, need, [c / 100 for c in cost]) == (0, 1, 2, 3)
    assert issue_order([], [], []) == ()


def test_callers_are_named() -> None:
    assert overlap_step._caller().startswith(__file__)


def test_a_stream_that_waits_for_another_waits_for_the_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule alone, without a GPU; tests/gpu/test_overlap.py has what it is for."""

    class Live:
        def updated_for(self, stream: Any) -> Any:
            return None if stream == "that of step()" else "updates"

    waited: list[Any] = []
    monkeypatch.setattr(interpose, "_LIVE", [Live()])
    wait = interpose._for_updates(lambda event, stream=None: waited.append((event, stream)))
    wait("event", "side")  # type: ignore[arg-type]
    wait("event", "that of step()")  # type: ignore[arg-type]
    assert waited == [("event", "side"), ("updates", "side"), ("event", "that of step()")]


def compiled_in_place(rank: int, size: int) -> list[bool]:
    """Whether a model that is compiled in place after `accelerate` trains as plain DDP does."""
    found = []
    for when, whole in ((0, True), (0, False), (2, True)):
        results = []
        for fast in (False, True):
            torch.manual_seed(3)
            module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            model = DistributedDataParallel(module)
            if fast:
                model = accelerate(model, optimizer)
            for step in range(5):
                if fast and step == when:
                    (module if whole else module[2]).compile(backend="eager")
                optimizer.zero_grad()
                model(torch.full((2, 4), float(rank + step))).square().mean().backward()
                optimizer.step()
            if fast:
                assert model.evener_steps.overlap.off == "the model is compiled"  # type: ignore[attr-defined]
            results.append([p.detach().clone() for p in module.parameters()])
        found.append(all(torch.allclose(a, b) for a, b in zip(*results, strict=True)))
    return found


def test_a_model_compiled_in_place_after_accelerate_is_not_overlapped() -> None:
    assert worlds.run([1, 1], compiled_in_place) == [[True] * 3] * 2
