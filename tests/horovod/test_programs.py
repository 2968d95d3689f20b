"""What programs of others do around Horovod, and what they import from it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evener.horovod.torch as hvd
from evener.base.ports import free_port
from evener.horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from evener.horovod.state import STATE
from evener.horovod.torch.optimizer import _DistributedOptimizer
from evener.tools.launch import horovod_path
from tests import worlds
from tests.conftest import START


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


# --- torch.distributed's default group is the program's ------------------------------------------

ALONE = """
import os, sys
import torch, torch.distributed as dist
import horovod.torch as hvd
hvd.init()
assert not dist.is_initialized()
rank, size = hvd.rank(), hvd.size()
model = torch.nn.Linear(3, 2)
hvd.broadcast_parameters(model.state_dict(), 0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                     model.named_parameters())
def step():
    optimizer.zero_grad()
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 1.5))
step()
assert not dist.is_initialized()
# Now the program makes a group of its own, at the address that Horovod used too, and ends it.
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size)
mine = torch.ones(1)
dist.all_reduce(mine)
step()
dist.destroy_process_group()
step()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == mine.item() == 2
hvd.shutdown()
hvd.init()
step()
"""


def test_the_default_group_is_left_to_the_program(tmp_path: Path) -> None:
    run_script(tmp_path, ALONE)


FINISHED = """
import os
import torch
import horovod.torch as hvd
hvd.init(process_sets="dynamic")
rank, first = hvd.rank(), int(os.environ["FIRST"])
others = hvd.add_process_set([r for r in range(hvd.size()) if r != first])
for _ in range(20):  # until it is a frozen schedule
    hvd.allreduce(torch.ones(1), name="loss")
if rank != first:
    # It waits for the rank that finishes, and so begins after that.
    try:
        hvd.allreduce(torch.ones(2))
        raise SystemExit("a rank that has finished took part")
    except hvd.HorovodInternalError as error:
        assert f"rank {first} called shutdown" in str(error), error
    for _ in range(20):
        total = hvd.allreduce(torch.tensor([7.0]), op=hvd.Sum, process_set=others)
        assert total.item() == 14
    try:
        hvd.barrier()
        raise SystemExit("a rank that has finished took part")
    except hvd.HorovodInternalError as error:
        assert "called shutdown" in str(error), error
        assert "before it ends" in str(error), error
"""


@pytest.mark.parametrize("first", ["0", "2"])
def test_a_rank_that_has_finished_fails_no_set_without_it(tmp_path: Path, first: str) -> None:
    run_script(tmp_path, FINISHED, 3, FIRST=first, EVENER_FREEZE_AFTER="3")


# Ranks are forked when all is imported, which takes seconds; each still ends when it likes.
RANKS = """
import os, sys
import torch, torch._dynamo, evener.horovod.torch
ranks = []
for rank in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=sys.argv[1])
        break
    ranks.append(child)
else:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def run_script(folder: Path, text: str, size: int = 2, **more: str) -> None:
    """That many ranks of it, without a launcher; all must end well."""
    script = folder / "train.py"
    script.write_text(RANKS + text)
    done = subprocess.run(
        [sys.executable, str(script), str(size)],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONPATH": os.pathsep.join([str(horovod_path.ALIAS), START]),
            "GLOO_SOCKET_IFNAME": "lo",
            "EVENER_TIMEOUT": "30",
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


# --- optimizers ----------------------------------------------------------------------------------


def one_after_the_other(rank: int, _size: int) -> None:
    hvd.init()
    model = model_of()

    def build() -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(inner, model.named_parameters())

    if rank == 0:
        optimizer = build()  # the first process first, as with downloads
    hvd.barrier()
    if rank != 0:
        optimizer = build()
    model(batch(rank, 0)).square().mean().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(*hvd.allgather(weights[None]))


def test_making_an_optimizer_is_not_collective() -> None:
    worlds.run([2], one_after_the_other, env={"EVENER_TIMEOUT": "15"})


def one_after_another(rank: int, _size: int) -> None:
    """As in a search for hyperparameters: each round makes and drops an optimizer."""
    hvd.init()
    found = []
    for step in range(6):
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        for again in range(3):
            optimizer.zero_grad()
            model(batch(rank, step + again)).square().mean().backward()
            optimizer.step()
        assert STATE._world is not None
        found.append(len(STATE._world.groups()))
        del optimizer, inner, model
        if rank == step % 2:
            gc.collect()
    assert len(set(found[2:])) == 1, found


def test_optimizers_that_are_dropped_leave_their_groups_to_the_next() -> None:
    worlds.run([2], one_after_another)


def made_by_a_library(rank: int, size: int) -> None:
    """Libraries make the class themselves, and look at what upstream's keeps."""
    hvd.init()
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    made = type("SGD", (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))
    groups = inner.param_groups
    optimizer = made(groups, model.named_parameters(), hvd.Compression.none, 1, hvd.Sum)
    assert optimizer._requires_update == set(model.parameters())
    assert optimizer._allreduce_delay == dict.fromkeys(model.parameters(), 1)
    for step in range(2):
        assert not optimizer._handles
        model(batch(rank, step)).square().mean().backward()
        assert set(optimizer._handles) == set(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    parameter = model[0].weight
    parameter.grad = torch.full_like(parameter, rank + 1.0)
    handle, context = optimizer._allreduce_grad_async(parameter)
    assert hvd.Compression.none.decompress(hvd.synchronize(handle), context).eq(3).all()
    optimizer.zero_grad()
    plain = model_of()
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for member in range(size):
            plain(batch(member, step)).square().mean().backward()
        alone.step()
        alone.zero_grad()
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have, want)


# --- join ----------------------------------------------------------------------------------------


def uneven(rank: int, size: int) -> None:
    """hvd.join()'s main use: ranks have different numbers of batches, one of them none at all."""
    hvd.init()
    first, second = model_of(), model_of()
    arguments: list[dict[str, Any]] = [{}, {"op": hvd.Sum, "backward_passes_per_step": 2}]
    pairs = [
        (
            model,
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                model.named_parameters(),
                **given,
            ),
        )
        for model, given in zip((first, second), arguments, strict=True)
    ]
    wanted = [model_of(), model_of()]
    plain = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in wanted]
    for epoch in range(2):
        counts = [(member * 2 + epoch) % (2 * size) for member in range(size)]
        for step in range(counts[rank]):
            for (model, optimizer), given in zip(pairs, arguments, strict=True):
                optimizer.zero_grad()
                for part in range(given.get("backward_passes_per_step", 1)):
                    model(batch(rank, 10 * epoch + step + part)).square().mean().backward()
                optimizer.step()
            hvd.allreduce(torch.ones(1), name="loss")  # what is negotiated goes on beside it
        grads = [p.grad.clone() for p in first.parameters() if p.grad is not None]
        last = hvd.join()
        kept = [p.grad for p in first.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        assert counts[last] == max(counts)
        for (model, optimizer), want, alone, given in zip(
            pairs, wanted, plain, arguments, strict=True
        ):
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
            for step in range(max(counts)):
                alone.zero_grad()
                for member in range(size):
                    if step < counts[member]:
                        for part in range(given.get("backward_passes_per_step", 1)):
                            loss = want(batch(member, 10 * epoch + step + part)).square().mean()
                            (loss if "op" in given else loss / size).backward()
                alone.step()
            for have, expected in zip(model.parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(have, expected)


@pytest.mark.parametrize("shape", [[3], [1, 1]])
def test_join_with_uneven_batches(shape: list[int]) -> None:
    worlds.run(shape, uneven, env={"EVENER_TIMEOUT": "20", "EVENER_HOROVOD_ZERO_STEP": "0"})


# --- what libraries import -----------------------------------------------------------------------


class ReducesItself(torch.optim.Adam):
    """A distributed optimizer of a library's own, as gradient compression has: its step waits."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                hvd.allreduce_(parameter.grad)
        return super().step(closure)


def one_that_reduces_itself(rank: int, size: int) -> None:
    """All ranks without a state take the step with zeros at the same time, as upstream's do."""
    model = model_of()
    optimizer = ReducesItself(model.parameters(), lr=0.1 * (rank + 1))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def asks(rank: int, size: int) -> None:
    made_by_a_library(rank, size)
    one_that_reduces_itself(rank, size)
    assert hvd.mpi_threads_supported()  # scripts assert it, and may use mpi4py beside
    basics = hvd.mpi_ops._basics
    assert (basics.rank(), basics.size(), basics.mpi_built()) == (rank, size, False)


def test_questions_and_a_class_made_by_a_library() -> None:
    worlds.run([2], asks, env={"EVENER_TIMEOUT": "20"})


class Communicator:
    """An mpi4py communicator, as far as it is used: its broadcast goes through files."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = Path(folder), rank, size

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        return self.size

    def bcast(self, value: Any, root: int) -> Any:
        path = self.folder / "value"
        if self.rank == root:
            (self.folder / "part").write_text(value)
            (self.folder / "part").rename(path)
        while not path.exists():
            time.sleep(0.01)
        return path.read_text()


def by_communicator(rank: int, size: int, folder: str) -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with pytest.raises(ValueError, match="comm="):
        hvd.init(comm=3)
    hvd.init(comm=Communicator(folder, size - 1 - rank, size))
    assert (hvd.rank(), hvd.size()) == (size - 1 - rank, size)
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1]


def test_ranks_are_those_of_the_communicator_that_is_given(tmp_path: Path) -> None:
    worlds.run([2], by_communicator, str(tmp_path))


@pytest.mark.parametrize("name", ["spark", "mxnet"])
def test_what_is_not_served_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=rf"horovod\.{name}(.|\n)*fix: "):
        __import__(f"evener.horovod.{name}")


def test_without_tensorflow_its_horovod_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for name in [name for name in sys.modules if name.startswith("evener.horovod.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"horovod\.tensorflow needs(.|\n)*fix: "):
        __import__("evener.horovod.tensorflow")


class Numbers(BaseDataLoader):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Any:
        yield from range(self.count)
        if self.count == 13:
            raise OSError("the file has gone")

    def _process_batch(self, batch: Any) -> Any:
        return 2 * batch


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_that_reads_ahead(ahead: int) -> None:
    loader = Ahead(ahead, False, 5)
    assert len(loader) == 5
    for _ in range(2):
        assert list(loader) == [0, 2, 4, 6, 8]
    loader.close_async_loader()
    broken = Ahead(ahead, False, 13)
    with pytest.raises(OSError, match="has gone"):
        list(broken)
    broken.close_async_loader()
