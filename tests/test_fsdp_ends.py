"""FSDP2 over all ranks when something ends: a rank that is killed, memory that is short, a gradient
that is not finite, a job that goes on with another number of ranks. As plain FSDP2 does it, and
never a hang."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import evener.fsdp
from evener.base.ports import free_port
from evener.door.enter import SITE
from tests import worlds
from tests.test_fsdp import batch
from tests.test_fsdp_sharded import alike, moved, sharded, train, weights

ROOT = Path(__file__).parents[1]
# Rank 1 ends in the third step, where a case says and in the way that it says. Cases, each with a
# port, follow one another in processes that are forked when all is imported: that takes seconds.
CASES = {
    "exact": [
        ("before", "killed"),
        ("forward", "killed"),
        ("backward", "killed"),
        ("forward", "memory"),
    ],
    "int4": [("backward", "killed"), ("backward", "memory")],
}
KILLED = """
import json, os, signal, sys, time
import torch, torch._dynamo, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests import forked

ends = []
for where, why, port in json.loads(sys.argv[1]):
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ends.append((status, time.monotonic() - began))
else:
    print(json.dumps(ends))
    sys.exit()

for number, kind in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(f"{where}-{why}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
os.environ["MASTER_PORT"] = str(port)
forked.ranks(2)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def die(*_):
    if dist.get_rank() == 1 and step == 2:
        if why == "memory":
            raise torch.OutOfMemoryError("out of memory")
        os.kill(os.getpid(), signal.SIGKILL)


step = -1
if where == "forward":
    model[1].register_forward_pre_hook(die)
if where == "backward":
    model[1].register_full_backward_pre_hook(die)
for step in range(4):
    if where == "before":
        die()
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("went on to the end")
"""


@dataclass(frozen=True)
class End:
    """How a job ended: exit status of the first rank, seconds, what both said."""

    status: int
    took: float
    out: str
    err: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[tuple[str, str], End]]:
    """How each case of a mode ended. The first test that asks runs them all."""

    @functools.cache
    def ends(mode: str) -> dict[tuple[str, str], End]:
        folder = tmp_path_factory.mktemp(mode)
        script = folder / "train.py"
        script.write_text(KILLED, encoding="utf-8")
        cases = [(*case, free_port()) for case in CASES[mode]]
        meet = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join([str(SITE), str(ROOT), *sys.path[1:]])
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(cases)],
            cwd=folder,
            env={**os.environ, **meet, "PYTHONPATH": path, "EVENER_FSDP": mode},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {
            (where, why): End(
                *end,
                (folder / f"{where}-{why}.stdout").read_text(),
                (folder / f"{where}-{why}.stderr").read_text(),
            )
            for (where, why), end in zip(CASES[mode], json.loads(done.stdout), strict=True)
        }

    return ends


@pytest.mark.timeout(620)  # the first one waits for all of its mode
@pytest.mark.parametrize(
    ("mode", "where", "why"), [(mode, *case) for mode, cases in CASES.items() for case in cases]
)
def test_a_rank_that_ends_ends_the_others(
    ended: Callable[[str], dict[tuple[str, str], End]], mode: str, where: str, why: str
) -> None:
    end = ended(mode)[where, why]
    assert end.took < 120
    assert end.status != 0
    assert "goes on with Evener" in end.err
    assert "went on to the end" not in end.out
    # Gloo's own words, as without Evener.
    assert "Connection closed by peer" in end.err or "Connection reset" in end.err


def short_of_memory(module: nn.Module, rank: int, where: str) -> list[torch.Tensor] | str:
    """Six steps; in the third, memory is short on all ranks and each takes half of its batch.

    The weights, or the error that the steps end with.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    short = False

    def fail(*_: object) -> None:
        if short:
            raise torch.OutOfMemoryError("out of memory")

    block: nn.Module = module[1]  # type: ignore[index, assignment]
    if where == "forward":
        block.register_forward_pre_hook(fail)
    else:
        block.register_full_backward_pre_hook(fail)
    try:
        for step in range(6):
            x, short = batch(step, rank), step == 2
            try:
                module(x).float().square().mean().backward()
            except torch.OutOfMemoryError:
                short = False
                optimizer.zero_grad()
                module(x[: len(x) // 2]).float().square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return weights(module)


def short_in(rank: int, size: int, where: str, mode: str) -> Any:
    plain, ours = sharded(size), sharded(size)
    before = weights(plain)
    evener.fsdp.accelerate(ours, mode=mode)
    ends = [short_of_memory(module, rank, where) for module in (plain, ours)]
    return ends if isinstance(ends[0], str) else moved(plain, ours, before)


@pytest.mark.parametrize(("mode", "limit"), [("exact", 0.0), ("int8", 0.05), ("int4", 0.2)])
def test_a_batch_that_memory_is_short_for_is_halved(mode: str, limit: float) -> None:
    assert all(off <= limit for off in worlds.run((1, 1), short_in, "forward", mode))
    # After an error in the backward pass FSDP2 of torch 2.11 cannot go on; the clipping says so.
    for plain, ours in worlds.run((1, 1), short_in, "backward", mode):
        assert plain == ours


def steps_with_a_bad_one(module: nn.Module, rank: int) -> list[bool]:
    """Six steps, of which the third is not finite on rank 1: all skip it. Which were made."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    made = []
    for step in range(6):
        optimizer.zero_grad()
        x = batch(step, rank)
        if step == 2 and rank == 1:
            x[0, 0] = float("inf")
        module(x).float().square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        made.append(bool(norm.isfinite()))
        if made[-1]:
            optimizer.step()
    return made


def skipping(rank: int, size: int, mode: str) -> tuple[list[bool], list[bool], float, bool]:
    plain, ours = sharded(size), sharded(size)
    before = weights(plain)
    evener.fsdp.accelerate(ours, mode=mode)
    made = [steps_with_a_bad_one(module, rank) for module in (plain, ours)]
    same = alike(weights(plain), weights(ours))
    return made[0], made[1], moved(plain, ours, before), same


@pytest.mark.parametrize(("mode", "limit"), [("exact", 0.0), ("int8", 0.05), ("int4", 0.2)])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_skipped(mode: str, limit: float) -> None:
    for plain, ours, off, same in worlds.run((1, 1), skipping, mode):
        assert plain == ours == [True, True, False, True, True, True]
        assert same == (mode == "exact")
        assert off <= limit


def nothing_of_it_is_kept(rank: int, size: int) -> float:
    """How much what INT4 keeps has changed in a step of which a part is not finite.

    The infinite row is rank 0's, so what rank 1 sends is spoiled.
    """
    ours = sharded(size)
    evener.fsdp.accelerate(ours, mode="int4")
    train(ours, rank, torch.optim.SGD(ours.parameters(), lr=0.1), range(2))
    reductions = ours.evener.reductions  # type: ignore[union-attr]
    before = [None if r.residual is None else r.residual.clone() for r in reductions]  # type: ignore[union-attr]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    hook = ours[3].register_forward_hook(lambda *given: given[2].register_hook(spoil) and None)  # type: ignore[index, operator]
    ours(batch(5, rank)).float().square().mean().backward()
    hook.remove()
    last = reductions[3 if reductions[3].unit.name == "3" else 4]  # type: ignore[index]
    assert last.unit.name == "3"
    was = before[reductions.index(last)]  # type: ignore[union-attr, operator]
    assert was is not None
    return float((last.residual - was).abs().max())


def test_a_spoiled_step_leaves_what_is_kept() -> None:
    assert worlds.run((1, 1), nothing_of_it_is_kept)[1] == 0.0


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim}
    if hasattr(module, "evener"):
        state["evener"] = module.evener
    return state


def made(size: int, mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = sharded(size)
    if mode != "plain":
        evener.fsdp.accelerate(module, mode=mode)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def first_half(rank: int, size: int, folder: str, mode: str) -> dict[str, torch.Tensor]:
    module, optimizer = made(size, mode)
    train(module, rank, optimizer, range(3))
    dcp.save(state_of(module, optimizer), checkpoint_id=folder)
    return owed(module, mode)


def owed(module: nn.Module, mode: str) -> dict[str, torch.Tensor]:
    if mode != "int4":
        return {}
    state = module.evener.state_dict()  # type: ignore[union-attr, operator]
    return {name: value.full_tensor() for name, value in state.items()}


def second_half(
    rank: int, size: int, folder: str, mode: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    module, optimizer = made(size, mode)
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    found = copy.deepcopy(owed(module, mode))
    train(module, rank, optimizer, range(3, 6))
    return weights(module), found


@pytest.mark.parametrize(("before", "after"), [((1, 1, 1), (1, 1)), ((1, 1), (2, 2))])
def test_a_job_goes_on_in_another_world_as_plain_fsdp2_does(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    ends = {}
    for mode in ("plain", "exact", "int4"):
        folder = str(tmp_path / mode)
        saved = worlds.run(before, first_half, folder, mode)[0]
        ends[mode], found = worlds.run(after, second_half, folder, mode)[0]
        assert found.keys() == saved.keys()
        for name, value in saved.items():  # in equal parts, kept in bf16
            assert (found[name] - value).abs().max() <= 0.01 * value.abs().max()
    assert alike(ends["plain"], ends["exact"])
    assert not alike(ends["plain"], ends["int4"])
    apart = max(
        (a - b).abs().max().item() for a, b in zip(ends["plain"], ends["int4"], strict=True)
    )
    assert apart < 6 * 2e-3  # six steps of Adam's, at most its rate each, in both
