"""`horovod.torch`'s operations over real ranks: values, dtypes, agreement, errors on every rank."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import evener.horovod.torch as hvd
from evener.horovod.common.exceptions import NotInitializedError
from evener.horovod.executor import Executor
from evener.horovod.state import STATE
from tests import worlds

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def tensor_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def reductions(rank: int, size: int) -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    for dtype in [*FLOATS, *INTEGERS]:
        for shape in ((), (0,), (7,), (3, 4, 5)):
            mine = tensor_of(rank, dtype, shape)
            everyone = torch.stack([tensor_of(r, dtype, shape).double() for r in range(size)])
            want = {
                hvd.Sum: everyone.sum(0),
                hvd.Average: everyone.mean(0),
                hvd.Min: everyone.amin(0),
                hvd.Max: everyone.amax(0),
                hvd.Product: everyone.prod(0),
            }
            for op, expected in want.items():
                if op == hvd.Average and dtype in INTEGERS:
                    expected = expected.trunc()
                got = hvd.allreduce(mine, op=op)
                assert got.dtype == dtype
                torch.testing.assert_close(got, expected.to(dtype), msg=f"{dtype} {op}")
    # Truncation is toward zero, and scaling of integers is done in floating point.
    value = torch.tensor([-5, 7, 11, -9]) if rank == 0 else torch.zeros(4, dtype=torch.int64)
    assert hvd.allreduce(value).tolist() == [int(v / size) for v in (-5, 7, 11, -9)]
    half = hvd.allreduce(torch.tensor([3, 5]), op=hvd.Sum, prescale_factor=0.5)
    assert half.tolist() == [1 * size, 2 * size]
    # Half precision is scaled in single: 60000 / 1 + 60000 would not fit before the division.
    big = torch.full((2,), 60000.0, dtype=torch.float16)
    assert hvd.allreduce(big).tolist() == [60000.0] * 2
    scaled = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
    assert scaled.tolist() == [1.5 * size] * 2
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(torch.ones(1), average=False).item() == size
    small = hvd.allreduce(torch.full((3,), 1.0009765625), compression=hvd.Compression.fp16)
    assert small.dtype == torch.float32
    assert small.tolist() == [1.0009765625] * 3


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_reductions(shape: list[int]) -> None:
    worlds.run(shape, reductions)


def handles(rank: int, size: int) -> None:
    hvd.init()
    inputs = [torch.full((4,), float(rank + i)) for i in range(20)]
    started = [hvd.allreduce_async(t, name=f"t{i}", op=hvd.Sum) for i, t in enumerate(inputs)]
    for i, handle in enumerate(started):
        want = sum(r + i for r in range(size))
        assert hvd.synchronize(handle).tolist() == [want] * 4
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is None
    assert [t[0].item() for t in inputs] == [rank + i for i in range(20)]  # untouched
    assert hvd.synchronize(10**9) is None

    x = torch.full((3,), float(rank), requires_grad=True)
    assert hvd.allreduce_(x, op=hvd.Max) is x
    assert x.tolist() == [size - 1] * 3
    # Rank 1 holds the operation up, so that its name is certainly still in flight on rank 0.
    if rank == 0:
        first = hvd.allreduce_async_(torch.ones(1), name="twice")
        assert not hvd.poll(first)
        with pytest.raises(ValueError, match=r"'allreduce\.twice' is still in flight"):
            hvd.allreduce_async_(torch.ones(1), name="twice")
    else:
        time.sleep(0.3)
        first = hvd.allreduce_async_(torch.ones(1), name="twice")
    hvd.synchronize(first)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce(torch.ones(4, 4).t()[:, :2])
    with pytest.raises(ValueError, match="root_rank=7"):
        hvd.broadcast(torch.ones(1), 7)
    with pytest.raises(ValueError, match="not supported"):
        hvd.allreduce(torch.ones(1, dtype=torch.complex64))
    hvd.barrier()


def test_handles() -> None:
    worlds.run([2], handles)


def gathers_and_broadcasts(rank: int, size: int) -> None:
    hvd.init()
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        mine = tensor_of(rank, dtype, (rank, 3))  # rank 0 has no row
        want = torch.cat([tensor_of(r, dtype, (r, 3)) for r in range(size)])
        assert torch.equal(hvd.allgather(mine), want)
        for root in range(size):
            value = tensor_of(rank, dtype, (2, 3))
            assert torch.equal(hvd.broadcast(value, root), tensor_of(root, dtype, (2, 3)))
            assert torch.equal(value, tensor_of(rank, dtype, (2, 3)))
            hvd.broadcast_(value, root)
            assert torch.equal(value, tensor_of(root, dtype, (2, 3)))
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == list(range(size))
    assert hvd.allgather(torch.empty(0, 2)).shape == (0, 2)
    scalar = hvd.broadcast(torch.tensor(rank), 1)
    assert (scalar.shape, scalar.item()) == ((), 1)

    x = torch.full((rank + 1, 2), 2.0, requires_grad=True)
    (hvd.allgather(x) * torch.arange(1.0, 4.0).view(3, 1)).sum().backward()
    start = sum(range(1, rank + 1))
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [float(start + 1 + i) for i in range(rank + 1)]
    y = torch.ones(2, requires_grad=True)
    (hvd.allreduce(y, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [3.0, 3.0]
    z = torch.ones(2, requires_grad=True)
    (hvd.broadcast(z, 1) * (rank + 1)).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == ([1.5, 1.5] if rank == 1 else [0.0, 0.0])

    long = "é" * 3000  # longer than an exchange has room for
    assert hvd.broadcast_object({"from": rank, "text": long}, 1) == {"from": 1, "text": long}
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]
    assert hvd.broadcast(torch.ones(1), 0, name=long).item() == 1


def test_gathers_and_broadcasts() -> None:
    worlds.run([2], gathers_and_broadcasts)


def disagreements(rank: int, size: int) -> list[str]:
    hvd.init()
    both = (torch.ones(2), torch.ones(3)) if rank == 0 else (torch.ones(3), torch.ones(2))
    whole, other = torch.ones(2), torch.ones(2, dtype=torch.float64)
    cases = [
        lambda: hvd.allreduce(both[0], name="shape"),
        lambda: hvd.allreduce(whole if rank else other, name="dtype"),
        lambda: hvd.allreduce(whole, op=hvd.Sum if rank else hvd.Max, name="op"),
        lambda: hvd.allreduce(whole, prescale_factor=1.0 + rank, name="factor"),
        lambda: hvd.broadcast(whole, rank, name="root"),
        lambda: hvd.allgather(torch.ones(1, 2 + rank), name="columns"),
        lambda: hvd.reducescatter(both[0], name="rows"),
        lambda: hvd.alltoall(torch.ones(2, 2 + rank), name="columns"),
        lambda: hvd.grouped_allreduce([whole] * (1 + rank), name="group"),
        lambda: hvd.broadcast_parameters([("a", both[0]), ("b", whole)], 0),
    ]
    said = []
    for case in cases:
        with pytest.raises(hvd.HorovodInternalError) as refused:
            case()
        said.append(refused.value.problem)
        # The next operation is none the worse for it.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    return said


def test_disagreement_is_the_same_error_on_every_rank_and_no_harm() -> None:
    first, second = worlds.run([2], disagreements)
    assert first == second
    for text, part in zip(
        first,
        (
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but another "
            "rank sent a tensor of shape [3].",
            "Mismatched data types: One rank had type float64, but another rank had type float32.",
            "Mismatched reduction operation: One rank sent reduction op 4",
            "Mismatched prescale and/or postscale factors: One rank sent factors (1, 1), but "
            "another rank sent factors (2, 1).",
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank "
            "specified root rank 1.",
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal",
            "Mismatched REDUCESCATTER tensor shapes",
            "Mismatched ALLTOALL tensor shapes: One rank sent a tensor with dimension 1 equal",
            "Mismatched ALLREDUCE groups: One rank sent 1 tensors, but another rank sent 2.",
            'shape [3].*(tensor "a")',
        ),
        strict=True,
    ):
        assert all(piece in text for piece in part.split(".*")), text


def dies(rank: int, size: int) -> None:
    del size
    hvd.init()
    if rank == 1:
        import os

        os._exit(3)
    with pytest.raises(hvd.HorovodInternalError, match=r"lost failed|has been shut down"):
        hvd.allreduce(torch.ones(1), name="lost")
    with pytest.raises(hvd.HorovodInternalError, match="an earlier operation failed"):
        hvd.allreduce(torch.ones(1))


def test_a_dead_peer_is_an_error_and_not_a_hang() -> None:
    first, _ = worlds.outcomes([2], dies, env={"EVENER_TIMEOUT": "10"})
    assert not first.error, first.error


def generations(rank: int, size: int) -> tuple[Any, ...]:
    with pytest.raises(NotInitializedError):
        hvd.rank()
    for _ in range(3):
        assert not hvd.is_initialized()
        hvd.init()
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
        place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
        homogeneous = hvd.is_homogeneous()
        hvd.shutdown()
        hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(torch.ones(1))
    return (rank, *place, homogeneous)


def test_shutdown_then_init_again_and_the_place_of_each_rank() -> None:
    assert worlds.run([2, 1], generations) == [
        (0, 0, 2, 0, 2, False),
        (1, 1, 2, 0, 1, False),
        (2, 0, 1, 1, 2, False),
    ]


def test_a_wrong_variable_is_refused_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "soon")
    with pytest.raises(Exception, match="HOROVOD_CYCLE_TIME='soon'"):
        hvd.init()
    assert not hvd.is_initialized()


def test_introspection_without_init() -> None:
    assert hvd.gloo_built()
    assert not hvd.mpi_built()
    assert hvd.nccl_built() == 0 or torch.cuda.is_available()


def test_a_gpu_that_is_not_there_is_refused_by_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' operations, which would be the first to find out, wait for this rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(STATE, "_engine", SimpleNamespace())
    with pytest.raises(ValueError, match=r"join\(device=1\): this process has 1 GPU"):
        hvd.join(1)


def test_zeros_are_made_on_the_gpu_of_the_last_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device is of a thread: the engine's thread, which chose none, has GPU 0."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    engine: Any = SimpleNamespace(join_device=-1, timeline=SimpleNamespace(active=False))
    made, answer = Executor(engine), SimpleNamespace(gpu=True)
    assert made._device(answer) == torch.device("cuda", 0)  # type: ignore[arg-type]
    source = SimpleNamespace(device=torch.device("cuda", 1))
    entry = SimpleNamespace(inputs=[source], here=True)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    with made._placed([answer], [entry]):  # type: ignore[list-item]
        pass
    assert made._device(answer) == torch.device("cuda", 1)  # type: ignore[arg-type]
    engine.join_device = 3
    assert made._device(answer) == torch.device("cuda", 3)  # type: ignore[arg-type]
