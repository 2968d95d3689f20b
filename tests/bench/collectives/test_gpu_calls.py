"""What is called on GPUs and in which order, with NCCL and CUDA replaced by recorders.

Whether the results are right is for test_gpu.py, on GPUs. Here: several devices in one thread or
several threads, graphs, groups, registration, events and the way everything is given back.
"""

import ctypes
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.errors import EvenerError
from evener.tools.bench.collectives import cuda, nccl, run
from evener.tools.bench.collectives.options import Options

DEVICES = 2


def native(name: str) -> Any:
    """The C signature of a function that `evener._native` calls; None of others."""
    if name == "cudaSetDevice":
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    if name == "cudaStreamQuery":
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)
    if name == "ncclCommGetAsyncError":
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))
    moves = ("AllReduce", "ReduceScatter", "Reduce", "Broadcast", "AllGather", "Send", "Recv")
    moves += ("AlltoAll", "Gather", "Scatter")
    if name in ("ncclGroupStart", "ncclGroupEnd") or name in [f"nccl{move}" for move in moves]:
        kinds = {ctypes.c_void_p: ctypes.c_size_t}  # 0 stays 0, not None
        signature = [kinds.get(kind, kind) for kind in nccl._SIGNATURES[name]]
        return ctypes.CFUNCTYPE(ctypes.c_int, *signature)
    return None


class Recorder:
    """Stands for a library: each function notes its name and says success.

    What native code calls is a C function, and its arguments are kept in `native_calls`.
    """

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.native_calls: list[tuple[str, tuple[int, ...]]] = []
        self.answers: dict[str, Callable[[int], int]] = {}
        """Status of a native function by how often it was called before."""
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._functions:
            return self._functions[name]

        def call(*arguments: Any) -> int:
            self.log.append(name)
            if name == "cudaEventElapsedTime":
                arguments[0]._obj.value = 2.0  # milliseconds
            if name == "cudaStreamCreateWithFlags":
                arguments[0]._obj.value = self.log.count(name)
            return 0

        def noted(*arguments: Any) -> int:
            before = sum(name == one for one, _ in self.native_calls)
            self.log.append(name)
            self.native_calls.append((name, arguments))
            return self.answers[name](before) if name in self.answers else 0

        signature = native(name)
        self._functions[name] = signature(noted) if signature else call
        return self._functions[name]


class FakeNccl(Recorder):
    """NCCL with memory: ncclMemAlloc gives addresses, never used."""

    _next = itertools.count(1 << 30, 1 << 30)

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.lacks: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return name not in self.lacks

    def check(self, status: int, what: str) -> None:
        if status:
            raise nccl.NcclError(f"{what}: {status}", "none")

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self, name), ctypes.c_void_p).value or 0

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
def fake(log: list[str]) -> FakeNccl:
    """The NCCL that `bench` calls."""
    return nccl.Nccl()  # type: ignore[return-value]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    fake = FakeNccl(noted)
    monkeypatch.setattr(nccl, "Nccl", lambda: fake)
    monkeypatch.setattr(cuda, "_runtime", lambda: Recorder(noted))
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "set_device": lambda device: noted.append(f"device {device}"),
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
        def __getattr__(self, name: str) -> Any:
            if name == "cudaSetDevice":
                return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(self.select)
            return super().__getattr__(name)

        def select(self, device: int) -> int:
            now[0] = device
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


def test_calls_go_through_the_buffers(fake: FakeNccl) -> None:
    bench(ngpus=1, minbytes=1024, maxbytes=4096, stepfactor=4, warmup_iters=0, iters=6)
    sent = [arguments[0] for name, arguments in fake.native_calls if name == "ncclAllReduce"]
    first = sent[:7]  # one to connect, six measured, of the smallest size out of place
    assert [address - first[0] for address in first] == [0, 0, 1024, 2048, 3072, 0, 1024]
    whole = sent[14:21]  # of the largest, which fills the buffer
    assert len(set(whole)) == 1


def once(fake: FakeNccl, name: str, **given: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The calls of the one measured iteration out of place, of 64 floats on two GPUs."""
    bench(name, minbytes=256, maxbytes=256, warmup_iters=0, iters=1, datatype="float", **given)
    calls = fake.native_calls[2:]  # without the group that makes the communicators
    # First to connect, then measured: the same again.
    each = next(n for n in range(1, len(calls)) if calls[:n] == calls[n : 2 * n])
    return calls[:each]


@pytest.mark.parametrize(
    ("name", "function", "numbers"),
    [
        ("all_reduce", "ncclAllReduce", (7, 2)),
        ("reduce_scatter", "ncclReduceScatter", (7, 2)),
        ("reduce", "ncclReduce", (7, 2, 1)),
        ("broadcast", "ncclBroadcast", (7, 1)),
        ("all_gather", "ncclAllGather", (7,)),
        ("alltoall", "ncclAlltoAll", (7,)),
        ("gather", "ncclGather", (7, 1)),
        ("scatter", "ncclScatter", (7, 1)),
    ],
)
def test_arguments_of_a_collective(
    name: str,
    function: str,
    numbers: tuple[int, ...],
    fake: FakeNccl,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = once(fake, name, root=1, **({"op": "max"} if 2 in numbers else {}))
    assert [one for one, _ in calls] == ["ncclGroupStart", function, function, "ncclGroupEnd"]
    count = 64 if name in ("all_reduce", "reduce", "broadcast") else 32
    for device, (_, arguments) in enumerate(calls[1:3]):
        send, receive, *rest = arguments
        assert send and receive and send != receive
        assert rest == [count, *numbers, device + 1, device + 1]  # communicator and stream
    assert f" functions={function}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["alltoall", "gather", "scatter", "sendrecv", "hypercube"])
def test_sends_meet_receives(name: str, fake: FakeNccl, capsys: pytest.CaptureFixture[str]) -> None:
    fake.lacks = ("ncclAlltoAll", "ncclGather", "ncclScatter")  # as before NCCL 2.28
    groups: list[list[tuple[str, tuple[int, ...]]]] = []
    for call in once(fake, name, root=1):
        if call[0] == "ncclGroupStart":
            groups.append([])
        elif call[0] != "ncclGroupEnd":
            groups[-1].append(call)
    assert len(groups) == (2 if name == "hypercube" else 1)
    for group in groups:
        # communicator is rank + 1: (from, to, count) of what is sent and of what is awaited
        sent = [(a[4] - 1, a[3], a[1]) for one, a in group if one == "ncclSend"]
        awaited = [(a[3], a[4] - 1, a[1]) for one, a in group if one == "ncclRecv"]
        assert sorted(sent) == sorted(awaited)
        assert sent
    pairs = {(a[4] - 1, a[3]) for group in groups for one, a in group if one == "ncclSend"}
    expected = {
        "alltoall": {(0, 0), (0, 1), (1, 0), (1, 1)},
        "gather": {(0, 1), (1, 1)},
        "scatter": {(1, 0), (1, 1)},
        "sendrecv": {(0, 1), (1, 0)},
        "hypercube": {(0, 0), (1, 1), (0, 1), (1, 0)},
    }
    assert pairs == expected[name]
    assert " functions=ncclSend,ncclRecv\n" in capsys.readouterr().out.replace(
        "ncclRecv,ncclSend", "ncclSend,ncclRecv"
    )


def test_a_failed_call_ends_its_groups_and_is_named(fake: FakeNccl) -> None:
    fake.answers["ncclAllReduce"] = lambda before: 5 if before == 6 else 0
    # Two GPUs: calls 0 and 1 connect, 2 to 5 are iterations 0 and 1, then the third fails.
    with pytest.raises(nccl.NcclError, match="all_reduce, call 2: 5"):
        bench(warmup_iters=0, iters=9, agg_iters=3, minbytes=1024)
    assert fake.log.count("ncclAllReduce") == 7
    assert fake.log.count("ncclGroupStart") == fake.log.count("ncclGroupEnd")


def test_aggregation_is_a_group_around_groups(fake: FakeNccl) -> None:
    bench(warmup_iters=0, iters=2, agg_iters=2, ngpus=1)
    names = [one for one, _ in fake.native_calls[2:]]
    start, call, end = "ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"
    assert names == [call, *[start, call, call, end] * 2] * 2


@pytest.mark.parametrize("blocking", [1, 2, 3])
def test_blocking_waits_after_each_call(blocking: int, log: list[str]) -> None:
    bench(blocking=blocking, warmup_iters=0, ngpus=1)
    calls = [name for name in log if name in ("ncclAllReduce", "cudaStreamQuery")]
    assert calls.count("ncclAllReduce") == 2 * 4
    for before, after in itertools.pairwise(calls):
        assert (before, after) != ("ncclAllReduce", "ncclAllReduce")


def stall(monkeypatch: pytest.MonkeyPatch, log: list[str], status: int) -> Recorder:
    """A CUDA whose streams always answer `status`."""
    runtime = Recorder(log)
    runtime.answers["cudaStreamQuery"] = lambda _: status
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    return runtime


def test_a_stream_that_never_ends_is_told(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stall(monkeypatch, log, 600)
    with pytest.raises(EvenerError, match="-T 1: rank 0 is not done"):
        bench(timeout=1)
    assert "ncclCommGetAsyncError" in log


def test_an_error_of_another_rank_is_told(
    fake: FakeNccl, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stall(monkeypatch, log, 600)
    # In progress is no error.
    fake.answers["ncclCommGetAsyncError"] = lambda before: 6 if before else 0
    with pytest.raises(nccl.NcclError, match="rank 1: 6"):
        bench()


def test_null_streams_are_asked_on_their_own_devices(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [0], []

    def select(device: int) -> int:
        now[0] = device
        return 0

    def query(stream: int) -> int:
        asked.append((now[0], stream))
        return 0

    functions = {
        "cudaSetDevice": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(select),
        "cudaStreamQuery": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(query),
    }

    class Cuda(Recorder):
        def __getattr__(self, name: str) -> Any:
            return functions[name] if name in functions else super().__getattr__(name)

    monkeypatch.setattr(cuda, "_runtime", lambda: Cuda(log))
    bench(stream_null=1)
    assert set(asked) == {(0, 0), (1, 0)}


def test_a_failure_of_the_device_is_told(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stall(monkeypatch, log, 700)

    def told(status: int, what: str) -> None:
        if status:
            raise EvenerError(f"CUDA could not {what}: {status}", "none")

    monkeypatch.setattr(cuda, "_cuda_check", told)
    with pytest.raises(EvenerError, match="finish the work of rank 0: 700"):
        bench(warmup_iters=0)


def test_the_call_that_connects_is_not_in_the_time(
    fake: FakeNccl, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_is_slow(before: int) -> int:
        time.sleep(0.5 if before in (0, 6) else 0.001)  # of five on either side
        return 0

    fake.answers["ncclAllReduce"] = first_is_slow
    bench(ngpus=1, warmup_iters=0, iters=5)
    row = next(x for x in capsys.readouterr().out.splitlines() if not x.startswith("#")).split()
    for time_us in (row[5], row[9]):
        assert 1000 <= float(time_us) < 100_000


@pytest.mark.parametrize("version", [22703, 22809])
def test_communicators_are_made_as_nccl_tests_makes_them(version: int) -> None:
    class Library(nccl.Nccl):
        def __init__(self) -> None:
            self.made: list[str] = []

        def version(self) -> int:
            return version

        def check(self, status: int, what: str) -> None:
            assert not status

        def ncclCommInitRank(self, *_: Any) -> int:  # noqa: N802 - NCCL's name
            self.made.append("plain")
            return 0

        def ncclCommInitRankConfig(self, *given: Any) -> int:  # noqa: N802 - NCCL's name
            config = given[4]._obj
            assert ctypes.sizeof(config) == config.size == 80
            assert (config.version, config.nvlinkCentricSched) == (22800, 1)
            assert config.blocking == config.nChannelsPerNetPeer == -(2**31)
            assert config.netName is None and config.commName is None
            self.made.append("config")
            return 0

    library = Library()
    library.communicator(2, bytes(128), 1)
    assert library.made == ["plain" if version < 22800 else "config"]
