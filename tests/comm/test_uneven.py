"""Nodes with different numbers of ranks, in two levels: the same numbers, and the same bits.

What holds for even nodes is tested there with uneven ones beside (`test_reducer`,
`test_compression`, `test_topology`); here is what only uneven ones can get wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evener.comm import wires
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models, test_compression
from tests.comm.test_planner_live import planned

STEPS, SOME = 50, 8
FORMS = wires.names()
# The buckets of tests are small, and each form is to be taken as it is.
ALL = {"LIGHT_TOPK_THRESHOLD": "0", "EVENER_TRIAL_STEPS": "0"}
STAGED = {
    "EVENER_OUTER": "staged",
    "EVENER_NET_IFNAME": "lo",
    "EVENER_NET_FLOWS": "2",
    "EVENER_NET_WORKERS": "1",
}


def train(rank: int, steps: int, **how: object) -> torch.Tensor:
    """The weights after `steps` steps of SGD on data of each rank's own."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(
        torch.nn.Linear(37, 61), torch.nn.Tanh(), torch.nn.Linear(61, 29), torch.nn.Linear(29, 3)
    )
    model: torch.nn.Module = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if how:
        accelerate(model, bucket_bytes=3000, **how)  # type: ignore[arg-type]
        assert model.evener.communicators.route.levels.uneven == (  # type: ignore[union-attr, operator]
            how.get("algorithm") != "flat"
        )
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        x = torch.randn(8, 37, generator=generator)
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
    if how:
        model.evener.close()  # type: ignore[union-attr, operator]
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(rank: int, size: int, forms: list[str]) -> dict[str, torch.Tensor]:
    found = {"ddp": train(rank, STEPS), "flat": train(rank, STEPS, mode="exact", algorithm="flat")}
    found["exact"] = train(rank, STEPS, mode="exact")
    found["some of ddp"] = train(rank, SOME)
    return found | {form: train(rank, SOME, mode=form) for form in forms if form != "exact"}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("shape", [[2, 1], [1, 3, 2]], ids=str)
def test_fifty_steps_are_those_of_ddp(shape: list[int]) -> None:
    found = worlds.run(shape, trained, list(FORMS), env=ALL)
    for rank in found[1:]:
        for form, weights in rank.items():
            assert torch.equal(weights, found[0][form]), f"{form}: ranks differ"
    assert distance(found[0]["ddp"], found[0]["some of ddp"]) > 0.1, "nothing was learnt"
    assert distance(found[0]["exact"], found[0]["ddp"]) < 1e-5
    assert distance(found[0]["exact"], found[0]["flat"]) < 1e-5
    for form in FORMS[1:]:
        if not wires.get(form).late:  # of those, what arrives late: `test_compression`
            assert distance(found[0][form], found[0]["some of ddp"]) < 0.1, form


def staged(rank: int, size: int) -> str:
    """The transport carries what owners exchange; who owns nothing has none."""
    made = Communicators(Options(outer="staged"), torch.device("cpu"))
    owns = made.route.levels.owns
    assert (made.route.outer.transport is not None) == owns
    made.close()
    weights = train(rank, 6, mode="int8")
    everyone = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(one, weights) for one in everyone)
    return made.route.carrier.name


def test_the_staged_transport() -> None:
    assert worlds.run([2, 1], staged, env=STAGED) == ["staged"] * 3


def lent(rank: int, size: int) -> None:
    """Groups that are lent again fit, whatever some ranks made and gave back among themselves."""
    for members in ([0, 1], [1]):
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            Communicators(Options(timeout=10), torch.device("cpu"), group).close()
    for algorithm in ("2d", "flat", "2d"):
        made = Communicators(Options(algorithm=algorithm, timeout=10), torch.device("cpu"))  # type: ignore[arg-type]
        whole = torch.full((64,), float(rank + 1))
        if made.route.levels.two_level:
            made.route.reduce_inside(whole)
        start, end = made.route.place(64)
        if made.route.levels.owns:
            made.route.outer.all_reduce(whole[start:end], dist.ReduceOp.SUM)
        if made.route.levels.two_level:
            made.route.spread_inside(whole)
        assert torch.equal(whole, torch.full((64,), 6.0))
        made.flat()
        made.close()


def test_groups_are_lent_again() -> None:
    worlds.run([2, 1], lent, env={"EVENER_TIMEOUT": "10"})


def test_the_guard_and_the_checkpoint_ask_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    found = worlds.run([3, 2], test_compression.guarded, 0.9999999)
    assert all(forms == found[0] for forms in found) and found[0][-1] == "exact"
    for form in ("topk", "int8", "lowrank1"):
        worlds.run([2, 1], test_compression.first_half, path, form, form == "int8")
        worlds.run([1, 2], test_compression.second_half, path, form, True)


def test_momentum_and_scales_of_the_loss() -> None:
    worlds.run([2, 1], test_compression.momentum)
    worlds.run([2, 1], test_compression.scaled)
    env = {"LIGHT_TOPK_THRESHOLD": "0"}
    worlds.run([2, 1], summed_by_the_library, env=env)


def summed_by_the_library(rank: int, size: int) -> None:
    """What the two levels leave behind is what one level does, also in 16 bits."""
    for dtype in (torch.float16, torch.bfloat16):
        model = accelerate(DistributedDataParallel(models.seeded(dtype)))
        models.backward(model, models.batch(rank, 0, dtype))
        assert models.same_on_all_ranks(model)


def test_the_planner_prices_both_levels() -> None:
    found = worlds.run([2, 1], planned, [], 6, True)
    first = found[0][2][0]
    assert all(ranks[2][0] == first and ranks[0] == found[0][0] for ranks in found)
    said = "\n".join(found[0][1])
    assert "reduce-scatter in the node: " in said and "flat all-reduce: " in said
