"""A whole run: who takes part, on what, and all types, operations and roots in turn."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import traceback
from typing import Any

from evener.errors import EvenerError, UsageError
from evener.tools.bench.collectives import algorithms
from evener.tools.bench.collectives import options as rules
from evener.tools.bench.collectives.clock import Clock
from evener.tools.bench.collectives.options import Options
from evener.tools.bench.collectives.output import Device, Report
from evener.tools.bench.collectives.shapes import ALL, Collective
from evener.tools.bench.collectives.team import Processes, Shared, Team


def run(name: str, options: Options, arguments: list[str]) -> bool:
    """Run one collective's benchmark in this process; whether its results are right."""
    collecting = gc.isenabled()
    gc.disable()  # -z, -I and Gloo have Python inside the time
    try:
        return _run(name, options, arguments)
    finally:
        if collecting:
            gc.enable()


def _run(name: str, options: Options, arguments: list[str]) -> bool:
    import torch

    collective = ALL[name]
    first, least = rules.environment(os.environ)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU", "use --device cpu")
    processes = Processes.join()
    per_process = options.nthreads * options.ngpus
    ranks = processes.size * per_process
    rules.check(options, collective, device, ranks)
    algorithms.check(options, collective, device, per_process)
    if device == "cpu":
        if per_process > 1 and processes.size > 1:
            raise UsageError(
                f"-t {options.nthreads} -g {options.ngpus}: on the CPU a rank is a process",
                f"start {ranks} processes, with -t 1 -g 1",
            )
        if per_process > 1:
            return _spawn(name, options, arguments, per_process)
        return _cpu(collective, options, arguments, processes, least)
    return _gpu(collective, options, arguments, processes, first, least)


def _rows(clock: Clock, options: Options, device: str) -> None:
    for kind in options.types(device):
        for op in options.operations(clock.collective, device):
            for root in options.roots(clock.collective, clock.ranks):
                clock.run(kind, op, root)


def _cpu(
    collective: Collective,
    options: Options,
    arguments: list[str],
    processes: Processes,
    least: float | None,
) -> bool:
    import torch

    from evener.tools.bench.collectives.gloo import GlooCarrier

    name = f"CPU, {torch.get_num_threads()} threads"
    mine = [Device(processes.rank, _host(), os.getpid(), 0, "cpu", name)]
    devices = [one for process in processes.gather(mine) for one in process]
    report = Report(options, collective.name, 0, processes.rank == 0, arguments)
    report.head(devices)
    carrier = GlooCarrier(options, processes.rank, processes.size)
    team = Team(processes, 1, 0, Shared(1))
    _rows(Clock(carrier, team, options, collective, processes.size, report), options, "cpu")
    if options.algo:
        algorithms.run(options, processes, report, torch.device("cpu"))
    return report.foot(least)


def _spawn(name: str, options: Options, arguments: list[str], ranks: int) -> bool:
    """Start `ranks` processes here and wait; a rank that fails ends the others."""
    from multiprocessing import connection, get_context

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    context = get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [
        context.Process(target=_child, args=(rank, name, options, arguments, ranks, store.port))
        for rank in range(ranks)
    ]
    try:
        for child in children:
            child.start()
        left = list(children)
        while left:
            connection.wait([child.sentinel for child in left])
            for child in [one for one in left if one.exitcode is not None]:
                left.remove(child)
                if child.exitcode == 1:
                    continue  # wrong results: every rank comes to the same end
                if child.exitcode:
                    raise EvenerError(
                        f"rank {children.index(child)} ended with status {child.exitcode}",
                        "its message is above; the other ranks were stopped",
                    )
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
    return not any(child.exitcode for child in children)


def _child(
    rank: int, name: str, options: Options, arguments: list[str], ranks: int, port: int
) -> None:
    """One CPU rank. Status 3: it raised, and its message is printed."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    gc.disable()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    processes = Processes()
    processes.rank = processes.local_rank = rank
    processes.size = ranks
    _, least = rules.environment(os.environ)
    try:
        good = _cpu(ALL[name], options, arguments, processes, least)
    except EvenerError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(3)
    except Exception:  # noqa: BLE001 - printed, and told to the parent by the status
        traceback.print_exc()
        sys.exit(3)
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


def _gpu(
    collective: Collective,
    options: Options,
    arguments: list[str],
    processes: Processes,
    first: int,
    least: float | None,
) -> bool:
    import torch

    from evener.tools.bench.collectives.cuda import CudaCarrier, communicators
    from evener.tools.bench.collectives.nccl import Nccl, functions

    nccl = Nccl()
    per_process = options.nthreads * options.ngpus
    base = first + processes.local_rank * per_process
    have = torch.cuda.device_count()
    # Where a launcher shows each process its own GPU only, that one is device 0.
    if base + per_process > have and have == per_process:
        base = 0
    if base + per_process > have:
        raise UsageError(
            f"{base + per_process} GPUs asked for on {_host()}, {have} there",
            f"give -t and -g with at most {have} together, or fewer processes per host",
        )
    ranks = processes.size * per_process
    begin = processes.rank * per_process
    mine = [
        Device(begin + i, _host(), os.getpid(), base + i, *_gpu_name(base + i))
        for i in range(per_process)
    ]
    devices = [one for process in processes.gather(mine) for one in process]
    unique = processes.broadcast(nccl.unique_id() if processes.rank == 0 else b"")
    shared = Shared(options.nthreads)
    report = Report(options, collective.name, nccl.version(), processes.rank == 0, arguments)
    report.functions = functions(collective.name, nccl.has)
    report.head(devices)
    failures: list[BaseException] = []
    gpus = [base + i for i in range(per_process)]
    memory = _Memory(gpus)
    comms = [] if options.parallel_init else communicators(nccl, gpus, begin, ranks, unique)

    def work(thread: int) -> None:
        try:
            part = slice(thread * options.ngpus, (thread + 1) * options.ngpus)
            mine, first = gpus[part], begin + part.start
            own_comms = comms[part] or communicators(nccl, mine, first, ranks, unique)
            team = Team(processes, options.nthreads, thread, shared)
            memory.stage(team, "communicators")
            carrier = CudaCarrier(options, nccl, mine, first, ranks, own_comms)
            memory.stage(team, "buffers")
            own = report if thread == 0 else Report(options, collective.name, 0, False, [])
            _rows(Clock(carrier, team, options, collective, ranks, own), options, "cuda")
            memory.stage(team, "first use")
            carrier.close()
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            failures.append(error)
            shared.wait.abort()

    threads: list[Any] = [
        threading.Thread(target=work, args=(i,), daemon=True) for i in range(1, options.nthreads)
    ]
    for thread in threads:
        thread.start()
    work(0)
    if failures:
        first_error = next(
            (e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0]
        )
        raise first_error
    for thread in threads:
        thread.join()
    if options.memory:
        report.memory = memory.most(processes)
    if options.algo:
        algorithms.run(options, processes, report, torch.device("cuda", base))
    return report.foot(least)


class _Memory:
    """What -M reports: how much the use of this process's GPUs grew in each stage."""

    def __init__(self, gpus: list[int]) -> None:
        self.gpus = gpus
        self.last = self._used()
        self.stages: dict[str, list[int]] = {}

    def _used(self) -> list[int]:
        import torch

        pairs = [torch.cuda.mem_get_info(gpu) for gpu in self.gpus]
        return [total - free for free, total in pairs]

    def stage(self, team: Team, name: str) -> None:
        """A stage ends, on all threads of all processes."""
        team.barrier()
        if team.thread == 0:
            now = self._used()
            self.stages[name] = [b - a for a, b in zip(self.last, now, strict=True)]
            self.last = now
        team.barrier()

    def most(self, processes: Processes) -> dict[str, int]:
        """Each stage's bytes on the GPU where the whole is largest."""
        totals = [sum(each) for each in zip(*self.stages.values(), strict=True)]
        worst = totals.index(max(totals))
        mine = {name: each[worst] for name, each in self.stages.items()}
        return max(processes.gather(mine), key=lambda one: sum(one.values()))


def _gpu_name(device: int) -> tuple[str, str]:
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus, number = (
        getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{number:02x}", properties.name


def _host() -> str:
    return socket.gethostname().split(".")[0]
