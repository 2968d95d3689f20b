"""What is called on GPUs and in which order, with NCCL and CUDA replaced by recorders.

Whether the results are right is for test_gpu.py, on GPUs. Here: several devices in one thread or
several threads, graphs, groups, registration, events and the way everything is given back.
"""

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.bench.collectives import cuda, nccl, run
from evener.bench.collectives.options import Options

DEVICES = 2


class Recorder:
    """Stands for a library: each function notes its name and says success."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.log.append(name)
            if name == "cudaStreamQuery":
                return 0
            if name == "cudaEventElapsedTime":
                arguments[0]._obj.value = 2.0  # milliseconds
            return 0

        return call


class FakeNccl(Recorder):
    """NCCL with memory: ncclMemAlloc gives addresses, never used."""

    _next = itertools.count(1 << 30, 1 << 30)

    def check(self, status: int, what: str) -> None:
        assert status == 0, what

    def version(self) -> int:
        return 22809

    def unique_id(self) -> bytes:
        return bytes(128)

    def communicator(self, ranks: int, unique: bytes, rank: int) -> ctypes.c_void_p:
        self.log.append(f"init {rank}/{ranks}")
        return ctypes.c_void_p(rank + 1)

    def ncclMemAlloc(self, pointer: Any, _size: int) -> int:  # noqa: N802 - NCCL's name
        pointer._obj.value = next(self._next)
        self.log.append("ncclMemAlloc")
        return 0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    fake = FakeNccl(noted)
    monkeypatch.setattr(nccl, "Nccl", lambda: fake)
    monkeypatch.setattr(cuda, "_runtime", lambda: Recorder(noted))
    streams = itertools.count(1)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "set_device": lambda device: noted.append(f"device {device}"),
        "Stream": lambda _: SimpleNamespace(cuda_stream=next(streams)),
        "default_stream": lambda _: SimpleNamespace(cuda_stream=0),
        "mem_get_info": lambda _: (1 << 40, 1 << 41),
        "synchronize": lambda _: None,
        "get_device_properties": lambda _: SimpleNamespace(name="A GPU"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    real = torch.as_tensor

    def as_tensor(data: Any, *rest: Any, **more: Any) -> torch.Tensor:
        if isinstance(data, cuda._Memory):
            return torch.zeros(data.__cuda_array_interface__["shape"][0], dtype=torch.uint8)
        return real(data, *rest, **more)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return noted


def bench(name: str = "all_reduce", **given: Any) -> None:
    options = {"minbytes": 1024, "maxbytes": 1024, "iters": 3, "check": 0, "warmup_iters": 1}
    assert run.run(name, Options(**{**options, "ngpus": DEVICES, **given}), [])


def test_graphs_are_made_runnable_when_no_device_captures(log: list[str]) -> None:
    bench(cudagraph=2)
    open_captures = 0
    for name in log:
        open_captures += (name == "cudaStreamBeginCapture") - (name == "cudaStreamEndCapture")
        if name.startswith("cudaGraph"):
            assert open_captures == 0, name
    # Two sides, two devices: each graph is launched twice and then destroyed.
    assert log.count("cudaGraphInstantiateWithFlags") == 2 * DEVICES
    assert log.count("cudaGraphLaunch") == 2 * 2 * DEVICES
    assert log.count("cudaGraphExecDestroy") == log.count("cudaGraphDestroy") == 2 * DEVICES


def test_a_graph_is_launched_on_its_own_device(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at: list[tuple[int, int]] = []
    now = [0]

    class Cuda(Recorder):
        def cudaSetDevice(self, device: ctypes.c_int) -> int:  # noqa: N802 - CUDA's name
            now[0] = device.value
            return 0

        def cudaGraphLaunch(self, _graph: Any, stream: ctypes.c_void_p) -> int:  # noqa: N802
            at.append((now[0], stream.value or 0))
            return 0

    monkeypatch.setattr(cuda, "_runtime", lambda: Cuda(log))
    bench(cudagraph=1)
    assert {device for device, _ in at} == {0, 1}
    assert len(set(at)) == DEVICES  # one stream a device


@pytest.mark.parametrize("name", ["all_reduce", "alltoall", "hypercube", "gather"])
@pytest.mark.parametrize("agg", [1, 3])
def test_groups_are_closed_and_all_is_given_back(name: str, agg: int, log: list[str]) -> None:
    bench(name, agg_iters=agg)
    assert log.count("ncclGroupStart") == log.count("ncclGroupEnd") > 0
    assert log.count("ncclMemAlloc") == log.count("ncclMemFree") == 2 * DEVICES
    assert log.count("ncclCommDestroy") == DEVICES
    assert log.index("ncclCommDestroy") < log.index("ncclMemFree")


@pytest.mark.parametrize(("how", "kind"), [(1, ""), (2, "Window")])
def test_registration(how: int, kind: str, log: list[str]) -> None:
    bench(local_register=how)
    assert log.count(f"ncclComm{kind}Register") == 2 * DEVICES
    assert log.count(f"ncclComm{kind}Deregister") == 2 * DEVICES
    assert log.index("ncclCommDestroy") > log.index(f"ncclComm{kind}Deregister")


@pytest.mark.parametrize("parallel", [0, 1])
def test_threads(parallel: int, log: list[str]) -> None:
    bench(ngpus=1, nthreads=DEVICES, parallel_init=parallel)
    inits = [name for name in log if name.startswith("init ")]
    assert sorted(inits) == ["init 0/2", "init 1/2"]
    # Alone, the main thread makes all communicators in one group; else each thread its own.
    assert log.count("ncclGroupStart") == (DEVICES if parallel else 1)
    assert log.count("ncclCommDestroy") == DEVICES
    # One device a thread: no groups around calls. Warm-up 1, then 1 + 3 on either side.
    assert log.count("ncclAllReduce") == DEVICES * (1 + 2 * 4)


def test_iterations_and_memory(log: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench(per_iter_timing=1, memory=1)
    assert log.count("cudaEventRecord") == 2 * 3 * 2 * DEVICES
    assert log.count("cudaEventCreate") == log.count("cudaEventDestroy")
    shown = capsys.readouterr().out
    assert shown.count("2000.00  2000.00  2000.00     0.00") == 2
    assert "GPU memory usage" in shown


def test_calls_go_through_the_buffers(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def all_reduce(_self: Any, send: ctypes.c_void_p, *_rest: Any) -> int:
        sent.append(send.value or 0)
        return 0

    monkeypatch.setattr(FakeNccl, "ncclAllReduce", all_reduce, raising=False)
    bench(ngpus=1, minbytes=1024, maxbytes=4096, stepfactor=4, warmup_iters=0, iters=6)
    first = sent[:7]  # one to connect, six measured, of the smallest size out of place
    low = first[0]
    assert [address - low for address in first] == [0, 0, 1024, 2048, 3072, 0, 1024]
    assert log
