"""Muon on several ranks, which have a part of every matrix: the weights of one rank on the whole
batch, wherever matrices live; what crosses for it, and what a plan says of it."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from evener import zero
from evener.errors import EvenerError
from evener.zero import rules
from evener.zero.owners import Exchange, Matrix, cuts, load
from evener.zero.ranks import Ranks
from tests import gpus, worlds

from .models import Model, batches, loss_of
from .test_muon import Squares, optimizers, start, step
from .test_plan import MACHINE

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")
NAMES = {f"layers.{n}/0" for n in range(4)}
BFLOAT16 = {"bf16": {"enabled": True}}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (3, "host", {}),
    (2, "accelerator", {}),
    (1, "host", BFLOAT16),
    (3, "ssd", BFLOAT16),
    (3, "streaming", {"fp16": {"enabled": True, "loss_scale": 64.0}}),
]
SMOOTH = {"momentum": 0.8, "eps": 1e-3, "ns_steps": 1}
"""Each further step of Newton-Schulz makes differences of rounding three times as large."""


def data() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randint(0, 50, (6, 8), generator=made) for _ in range(4)]


def gathered(engine: zero.Engine) -> dict[str, torch.Tensor]:
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        mine = chunk.full()
        if engine.device.device.type == "cuda":
            mine = mine.cuda()
        whole = torch.empty(mine.numel() * engine.world, device=mine.device)
        if engine.world > 1:
            engine.ranks.collect(whole, mine)
        else:
            whole.copy_(mine)
        whole = whole.cpu()
        for piece in chunk.group.pieces:
            found[piece.name] = whole[piece.offset : piece.offset + piece.numel].view(piece.shape)
    return found


def trained(
    case: tuple[int, str, dict[str, Any]], part: slice, folder: str, same: bool
) -> dict[str, torch.Tensor]:
    """Weights after some steps of the rows `part` of each batch."""
    stage, place, changes = case
    budget = {"evener": {"budget": {"ssd": f"{folder}:100MB"}}} if place == "ssd" else {}
    model = Model(width=48)
    engine, made = start(
        model,
        NAMES if place == "accelerator" else set(),
        NAMES if place == "ssd" else None,
        place == "streaming",
        optimizers(model, **({} if same else SMOOTH)),
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        gradient_clipping=0.0 if same else 0.5,
        **{**budget, **changes},
    )
    for tokens in data():
        engine.backward(loss_of(engine, tokens[part].to(engine.device.device)))
        for one in made:
            one.step()
    assert engine.ranks.replicas == ("nodes" in changes.get("evener", {})) + 1
    if place == "ssd":
        assert all(c.away is not None for c in engine.chunks() if c.group.name in NAMES)
    found = gathered(engine)
    engine.close()
    return found


def worker(rank: int, size: int, folder: str, same: bool) -> None:
    torch.set_num_threads(1)
    rows = slice(None) if same else slice(6 // size * rank, 6 // size * (rank + 1))
    for number, case in enumerate(CASES):
        torch.manual_seed(rank)  # rank 0's values are taken by all
        torch.save(trained(case, rows, folder, same), Path(folder) / f"{number}-{rank}.pt")


@pytest.mark.parametrize(("size", "same"), [(2, True), (3, False), (4, True)])
def test_the_weights_of_one_rank(size: int, same: bool, tmp_path: Path) -> None:
    """Where all ranks have the same batch, the mean of their gradients is that of one: then every
    bit is the same. Else sums over parts of a batch are rounded otherwise."""
    worlds.run([size], worker, str(tmp_path), same)
    bound = {"rtol": 0.0, "atol": 0.0} if same else {"rtol": 2e-3, "atol": 2e-4}
    for number, case in enumerate(CASES):
        found = [torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(size)]
        torch.manual_seed(0)
        want = trained(case, slice(None), str(tmp_path), same)
        for name, value in found[0].items():
            assert all(torch.equal(value, other[name]) for other in found), (case, name)
            if same or not case[2]:  # a gradient of half precision is rounded on each rank
                torch.testing.assert_close(value, want[name], **bound)


GPU: dict[str, Any] = {"evener": {"device": "cuda"}}
CASES_ON_GPU: list[tuple[int, str, dict[str, Any]]] = [
    (3, "host", GPU),
    (2, "accelerator", GPU | BFLOAT16),
    (3, "accelerator", GPU | BFLOAT16),
    (3, "streaming", GPU | BFLOAT16),
]


def worker_on_gpu(rank: int, _size: int, folder: str) -> None:
    for number, case in enumerate(CASES_ON_GPU):
        torch.manual_seed(rank)
        torch.save(trained(case, slice(None), folder, True), Path(folder) / f"{number}-{rank}.pt")


@pytest.mark.gpu
@gpus.needs(2)
def test_the_weights_of_one_rank_on_gpus(tmp_path: Path) -> None:
    worlds.run([2], worker_on_gpu, str(tmp_path), gpu=True)
    for number, case in enumerate(CASES_ON_GPU):
        torch.manual_seed(0)
        want = trained(case, slice(None), str(tmp_path), True)
        for rank in range(2):
            found = torch.load(tmp_path / f"{number}-{rank}.pt")
            for name, value in want.items():
                assert torch.equal(found[name], value), (number, rank, name)


def copied(rank: int, _size: int, folder: str) -> None:
    """Two nodes with a copy of the states each."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    where = {"evener": {"nodes": "replicate"}}
    torch.save(trained((3, "host", where), slice(None), folder, True), Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize("shape", [[1, 1], [2, 2]])
def test_copies_on_nodes_are_the_weights_of_one_rank(shape: list[int], tmp_path: Path) -> None:
    worlds.run(shape, copied, str(tmp_path))
    torch.manual_seed(0)
    want = trained((3, "host", {}), slice(None), str(tmp_path), True)
    for rank in range(sum(shape)):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(found[name], value) for name, value in want.items()), rank


def resuming(rank: int, size: int, folder: str, saves: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    engine, made = start(Model(width=48), {"layers.1/0"})
    if not saves:
        zero.load_checkpoint(engine, folder)
    for tokens in data()[:2] if saves else data()[2:]:
        step(loss_of(engine, tokens), made)
    if saves:
        zero.save_checkpoint(engine, folder)
        states = [one.state_dict() for one in made]
        before = gathered(engine)
        step(loss_of(engine, data()[3]), made)
        for one, state in zip(made, states, strict=True):
            assert any("range" in entry for entry in state["state"].values())
            one.load_state_dict(state)
        assert [one.state_dict()["state"].keys() for one in made] == [
            s["state"].keys() for s in states
        ]
        for one, state in zip(made, states, strict=True):
            for number, entry in one.state_dict()["state"].items():
                for name, value in entry.items():
                    other = state["state"][number][name]
                    same = (
                        torch.equal(value, other)
                        if isinstance(value, torch.Tensor)
                        else value == other
                    )
                    assert same, (number, name)
        assert not torch.equal(gathered(engine)["embed.weight"], before["embed.weight"])
    torch.save(gathered(engine), Path(folder) / f"{size}-{rank}.pt")
    engine.close()


def test_a_checkpoint_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """From three ranks to two and to one, which then go the same way bit for bit."""
    worlds.run([3], resuming, str(tmp_path), True)
    worlds.run([2], resuming, str(tmp_path), False)
    resuming(0, 1, str(tmp_path), False)
    two, one = (torch.load(tmp_path / name) for name in ("2-1.pt", "1-0.pt"))
    assert all(torch.equal(two[name], value) for name, value in one.items())


def failing(rank: int, _size: int) -> list[str]:
    """Products that fail on one rank; what two steps say."""
    if rank == 1:

        def fails(*_: Any) -> None:
            raise RuntimeError("no products")

        rules.Muon.products = fails  # type: ignore[assignment]
    engine, made = start(Model())
    said = []
    for tokens in batches(2):
        try:
            step(loss_of(engine, tokens), made)
            engine.drain()
        except EvenerError as error:
            said.append(str(error))
    return said


def test_a_rank_that_fails_ends_every_step() -> None:
    """Its states are half new; its peers do not wait for ever for one that has ended."""
    first, second = worlds.run([2], failing)
    assert len(first) == len(second) == 2
    assert all("no products" in said for said in second)
    assert all("step on the host failed" in said for said in first)


class Counted(Ranks):
    """Counts elements that come from other ranks."""

    crossed = 0

    def swap(self, came: Any, sent: Any, sizes: list[int], given: list[int]) -> None:
        Counted.crossed += sum(sizes) - sizes[self.rank]
        super().swap(came, sent, sizes, given)


def counting(rank: int, size: int) -> tuple[int, int, int]:
    """Elements that came in one step; the most that are planned for a rank; elements in all."""
    engine, made = start(Model(width=48))
    lanes = engine._lanes
    lanes._ranks = Counted(**vars(lanes._ranks))
    step(loss_of(engine, data()[0]), made)
    engine.drain()
    chunks = [c for c in engine.chunks() if c.group.matrices]
    planned = [load(c.group.matrices, c.states.weights.numel(), size).crossing for c in chunks]
    numel = sum(m.numel for c in chunks for m in c.group.matrices)
    engine.close()
    return Counted.crossed, sum(planned), numel


def test_what_crosses_is_what_is_planned() -> None:
    """On two ranks a chunk's two matrices are one on each, and nothing does. On three, both are
    cut: a third of each goes to its owner and comes back."""
    assert [crossed for crossed, *_ in worlds.run([2], counting)] == [0, 0]
    found = worlds.run([3], counting)
    assert max(crossed for crossed, *_ in found) == found[0][1] > 0
    assert sum(crossed for crossed, *_ in found) == 2 * found[0][2] // 3


def test_the_figures_of_the_guide() -> None:
    """A block of Llama 3 8B on 8 ranks: docs/guide/memory.md, docs/architecture/memory.md."""
    block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    block += [(14336, 4096), (14336, 4096), (4096, 14336)]
    matrices, offset = [], 0
    for shape in block:
        matrices.append(Matrix(offset, shape[0] * shape[1], shape[0] * shape[1]))
        offset += shape[0] * shape[1]
    found = load(tuple(matrices), offset // 8, 8)
    assert round(2 * found.crossing / 1e6) == 63 and round(2 * offset * 7 / 8 / 1e6) == 382
    assert round(offset / 8 / 1e6) == 27 and round(14336 * 4096 / 1e6) == 59


SHAPES = st.lists(st.integers(1, 400), min_size=1, max_size=8)


@hypothesis.given(SHAPES, st.integers(1, 9), st.integers(0, 3))
def test_every_element_goes_to_its_owner_and_comes_back(
    sizes: list[int], world: int, spare: int
) -> None:
    matrices, offset = {}, 0
    for place, size in enumerate(sizes):
        matrices[place] = Matrix(offset, size, float(size))
        offset += size + spare
    share = -(-offset // world)
    found = cuts(matrices, share)
    plans = [Exchange.of(found, rank, world) for rank in range(world)]
    seen = collections.Counter(
        cut.rank * share + at
        for plan in plans
        for cut in plan.mine
        for at in range(cut.begin, cut.end)
    )
    assert seen == collections.Counter(
        m.offset + n for m in matrices.values() for n in range(m.numel)
    )
    for rank, plan in enumerate(plans):
        for other in range(world):
            gone = [cut for cut in plan.mine if cut.owner == other]
            assert gone == [cut for cut in plans[other].owned if cut.rank == rank]
            assert plan.gone[other] == plans[other].came[rank] == sum(cut.numel for cut in gone)
    for place in matrices:
        parts = [cut for cut in found if cut.place == place]
        assert len({cut.owner for cut in parts}) == 1
        most = max(parts, key=lambda cut: cut.numel)
        assert sum(c.numel for c in parts if c.rank == c.owner) == most.numel
        # In the order of elements: an owner puts them together as they come.
        owned = [cut for cut in plans[parts[0].owner].owned if cut.place == place]
        assert owned == sorted(parts, key=lambda cut: cut.rank)
    whole = load(tuple(matrices.values()), share, world)
    assert whole.flops <= sum(sizes) and (world > 1 or whole.crossing == 0)


def peak(rank: int, _size: int, gpu: int, moments: str) -> dict[str, int]:
    torch.manual_seed(0)
    x = torch.randn(2, 192)
    model = Squares()
    engine, *_ = zero.initialize(
        model=model,
        optimizer=optimizers(model),
        config={
            "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 0},
            "evener": {
                "device": "simulated",
                "moments": moments,
                "budget": {"gpu": gpu, "host": 1 << 30},
            },
        },
        machine=MACHINE,
        example=x,
    )
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    engine.drain()
    found = engine.memory()
    engine.close()
    return found


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_plans_count_the_exchange(moments: str) -> None:
    """With what was planned it goes through, but for the norms of chunks: 512 bytes each."""
    held, norms = MACHINE.reserve, 6 << 10
    whole = max(worlds.run([2], peak, 1 << 40, moments), key=lambda found: found["gpu peak"])
    planned, most = (whole[name] - held for name in ("gpu planned", "gpu peak"))
    assert most <= planned + norms and planned < 1.1 * most, whole
    worlds.run([2], peak, whole["gpu planned"] + norms, moments)
