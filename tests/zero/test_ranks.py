"""Two ranks over Gloo: the same weights on both, those of one rank on both batches, any stage."""

from __future__ import annotations

import copy
import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero.ranks import join, meet
from tests import worlds
from tests.zero.engines import Branches, configuration, start, weights
from tests.zero.models import Model, batches, loss_of

CASES: list[tuple[int, int, set[str]]] = [
    (1, 1, set()),
    (1, 2, set()),
    (2, 2, {"layers.1/0"}),
    (3, 1, set()),
    (3, 2, {"layers.1/0"}),
]


def train(engine: zero.Engine, data: list[torch.Tensor]) -> None:
    for tokens in data:
        engine.backward(loss_of(engine, tokens))
        engine.step()


def gathered(engine: zero.Engine) -> dict[str, torch.Tensor]:
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        full = chunk.states.full()
        whole = torch.empty(full.numel() * engine.world)
        dist.all_gather_into_tensor(whole, full)
        for piece in chunk.group.pieces:
            found[piece.name] = whole[piece.offset : piece.offset + piece.numel].view(piece.shape)
    return found


def worker(rank: int, _size: int, folder: str) -> None:
    torch.set_num_threads(1)
    for number, (stage, accumulation, resident) in enumerate(CASES):
        torch.manual_seed(rank)  # rank 0's values are taken by all
        changes: dict[str, Any] = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_accumulation_steps": accumulation,
        }
        engine, *_ = zero.initialize(
            model=Model(), config=configuration(**changes), resident=resident
        )
        train(engine, [tokens[2 * rank : 2 * rank + 2] for tokens in batches(4)])
        found = gathered(engine)
        torch.save(found, Path(folder) / f"{number}-{rank}.pt")
        if number == len(CASES) - 1:
            zero.save_checkpoint(engine, Path(folder) / "saved")
            zero.export(engine, Path(folder) / "out", torch.float32)
        engine.close()


def test_two_ranks(tmp_path: Path) -> None:
    worlds.run([2], worker, str(tmp_path))
    one = {}
    for accumulation in (1, 2):
        torch.manual_seed(0)
        engine = start(Model(), gradient_accumulation_steps=accumulation)
        train(engine, batches(4))
        one[accumulation] = {name: value.clone() for name, value in weights(engine).items()}
        engine.close()
    for number, (_, accumulation, _) in enumerate(CASES):
        mine, theirs = (torch.load(tmp_path / f"{number}-{rank}.pt") for rank in (0, 1))
        for name, value in one[accumulation].items():
            assert torch.equal(mine[name], theirs[name]), (number, name)
            # Sums over two halves of a batch are rounded otherwise than over the whole.
            torch.testing.assert_close(mine[name], value, rtol=2e-3, atol=2e-4)
    # A checkpoint of two ranks on one: the same bits.
    torch.manual_seed(5)
    engine = start(Model(), gradient_accumulation_steps=2)
    zero.load_checkpoint(engine, tmp_path / "saved")
    last = torch.load(tmp_path / f"{len(CASES) - 1}-0.pt")
    assert all(torch.equal(value, last[name]) for name, value in weights(engine).items())
    assert (tmp_path / "out/model.safetensors").stat().st_size > 4 * 30000
    engine.close()


def collectives(rank: int, _size: int) -> list[Any]:
    meet()
    ranks = join(torch.device("cpu"))
    whole, share = torch.empty(4), torch.empty(2)
    ranks.gather(whole, torch.full((2,), float(rank)))
    ranks.reduce(share, torch.arange(4.0) * (rank + 1))
    total = ranks.total(torch.tensor(0.1 + rank, dtype=torch.float64))
    largest = ranks.largest(10 * rank, torch.device("cpu"))
    return [whole.tolist(), share.tolist(), float(total), ranks.agree(f"of {rank}"), largest]


def test_collectives() -> None:
    """Gathered in the order of ranks; gradients are means; rank 0's object on all."""
    first, second = worlds.run([2], collectives)
    assert first == [[0, 0, 1, 1], [0, 1.5], 0.1 + 1.1, "of 0", 10]
    assert second == [[0, 0, 1, 1], [3, 4.5], 0.1 + 1.1, "of 0", 10]


class Watched(zero.api.devices.SimulatedDevice):
    """Knows which threads have said that they are this device's."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def attach(self) -> None:
        self.threads.add(threading.current_thread().name)


def test_every_thread_chooses_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA's current device is of the thread: one that chooses none makes a context on GPU 0."""
    device = Watched()
    monkeypatch.setattr(zero.api.devices, "pick", lambda _name: device)
    before = set(threading.enumerate())
    engine, *_ = zero.initialize(
        model=Model(), config=configuration(), resident=set(), streaming=True
    )
    mine = {thread.name for thread in set(threading.enumerate()) - before}
    train(engine, batches(1))
    zero.save_checkpoint(engine, tmp_path)
    engine.close()
    assert mine == {"evener-load", "evener_host_lane", "evener_streaming_lane"}
    assert device.threads == mine | {"evener-save"}


def contexts(rank: int, _size: int) -> list[int]:
    """Trains; the GPUs on which this process has a CUDA context then."""
    engine, *_ = zero.initialize(
        model=Model(width=256),
        config=configuration(bf16={"enabled": True}, evener={"device": "cuda"}),
        resident=set(),
        streaming=True,
    )
    assert 0 < engine.ranks.bytes < 1 << 30 and engine.ranks.network > 0
    train(engine, [tokens.cuda() for tokens in batches(3)])
    engine.close()
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    for gpu in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active))
        found += [gpu] * active.value
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")
def test_no_rank_takes_memory_of_another_gpu() -> None:
    assert worlds.run([2], contexts, gpu=True) == [[0], [1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("resident", [set(), {"layers.1/0", "head/0"}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu(resident: set[str], checkpointing: bool) -> None:
    """Streams and events: the bits do not depend on where chunks live, nor on timing."""
    ends = []
    for where in (resident, resident, {f"layers.{i}/0" for i in range(4)}):
        torch.manual_seed(0)
        engine = start(
            Model(width=256),
            where,
            bf16={"enabled": True},
            evener={"device": "cuda", "checkpointing": checkpointing},
        )
        for tokens in batches(8):
            engine.backward(loss_of(engine, tokens.cuda()))
            engine.step()
        ends.append({name: value.cpu() for name, value in weights(engine).items()})
        engine.close()
    for other in ends[1:]:
        assert all(torch.equal(ends[0][name], other[name]) for name in other)


def branching(rank: int, _size: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """In the first step one rank uses branch b; in the second nobody does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Branches()
    engine = start(model)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    found = {}
    for which in ("ab" if rank else "a", "a"):
        model.which = which
        engine.backward(engine(x).square().mean())
        engine.step()
        found[which[-1]] = gathered(engine)["layers.0.b.weight"].clone()
    steps = {
        p.name: s for c in engine.chunks() for p, s in zip(c.group.pieces, c.steps, strict=True)
    }
    engine.close()
    return found, steps


def test_what_one_rank_used_moves_on_all_and_what_none_used_on_none() -> None:
    (mine, steps), (theirs, others) = worlds.run([2], branching)
    assert steps == others
    assert {name[9]: steps[name] for name in steps} == {"a": 2, "b": 1, "c": 2}
    first, second = theirs["b"], theirs["a"]
    assert torch.equal(first, second)  # the second step has left it alone
    assert torch.equal(mine["a"], second)
    torch.manual_seed(0)
    assert not torch.equal(first, Branches().layers[0]["b"].weight)


class Pair(nn.Module):
    """Two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        return x + y + torch.tanh(self.two(x)) if both else x + y


class Routed(nn.Module):
    """A rank's tokens choose one expert in some blocks; rank 1 may leave a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(4))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, who: int, skip: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if skip and who == number == 1:
                continue
            x = layer(x, number % 2 != who)
        return self.out(x)


ROUTED = [(1, 1, False), (1, 2, True), (2, 1, True), (2, 2, False), (3, 1, False), (3, 2, False)]


def routed(rank: int, size: int) -> list[float]:
    torch.set_num_threads(1)
    apart = []
    for stage, accumulation, skip in ROUTED:
        torch.manual_seed(0)
        model = Routed()
        plain = copy.deepcopy(model)
        engine = start(
            model,
            optimizer={"type": "SGD", "params": {"lr": 0.05}},
            gradient_clipping=0.0,
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
            gradient_accumulation_steps=accumulation,
        )
        optimizer = torch.optim.SGD(plain.parameters(), 0.05)
        for _ in range(3):
            for _ in range(accumulation):
                data = [torch.randn(4, 16) for _ in range(size)]
                engine.backward(engine(data[rank], rank, skip).square().mean())
                engine.step()
                losses = [plain(x, who, skip).square().mean() for who, x in enumerate(data)]
                (sum(losses) / size / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = gathered(engine)
        apart.append(
            max(
                float((found[name] - p.detach()).abs().max())
                for name, p in plain.named_parameters()
            )
        )
        engine.close()
    return apart


def test_parameters_with_a_gradient_on_some_ranks_only() -> None:
    for apart in worlds.run([2], routed):
        assert max(apart) < 1e-6, dict(zip(ROUTED, apart, strict=True))


def uneven(rank: int, _size: int) -> str:
    torch.manual_seed(0)
    engine = start(Model(), zero_optimization={"stage": 1}, gradient_accumulation_steps=2)
    for tokens in batches(2 + rank):
        engine.backward(loss_of(engine, tokens))
    try:
        engine.update()
    except UsageError as error:
        return str(error)
    return ""


def test_other_numbers_of_backward_passes_are_refused() -> None:
    for said in worlds.run([2], uneven):
        assert "run as many on every rank" in said
