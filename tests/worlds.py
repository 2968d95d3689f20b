"""Worlds of a few ranks on this machine, for tests: real processes, real Gloo.

`run(shape, function)` starts one process a rank and calls `function(rank, size)` in each, with a
default process group in place; `shape` says how many ranks each pretended host has. It returns what
the ranks returned, or raises with the traceback of the first that failed. Processes come from a
fork server that has imported torch, so a world costs a fraction of a second, not seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests import gpus

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "tests.preload"])


class RankFailedError(AssertionError):
    """A rank raised, died, or did not finish in time."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: str = ""
    exception: BaseException | None = field(default=None, compare=False)


def outcomes(
    shape: Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    timeout: float = 90,
    gpu: bool = False,
) -> list[Outcome]:
    """Run and return what became of every rank, failures included.

    `gpu`: rank r has GPU r as its current device (`gpus.of`), and NCCL stands beside Gloo. Where
    ranks of a host share a GPU, each is an NCCL host of its own: a warning says so.
    """
    hosts = [f"host{node}" for node, ranks in enumerate(shape) for _ in range(ranks)]
    size = len(hosts)
    apart = gpu and gpus.doubled(hosts, torch.cuda.device_count())
    if apart:
        warnings.warn(
            f"{size} ranks share {torch.cuda.device_count()} GPU(s): those of a host talk through "
            "NCCL's sockets, so NVLink is not tested",
            stacklevel=3,
        )
    # A store in this process, on a port that the kernel chose: no two tests can collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    try:
        for rank, host in enumerate(hosts):
            receive, send = _context.Pipe(duplex=False)
            environment = {
                **names(host, rank, apart),
                "GLOO_SOCKET_IFNAME": "lo",
                "EVENER_TIMEOUT": "30",
                **(env or {}),
            }
            process = _context.Process(
                target=_rank,
                args=(send, store.port, rank, size, environment, gpu, function, args),
                daemon=True,
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def names(host: str, rank: int, apart: bool) -> dict[str, str]:
    """What a rank's host is called; `apart`: NCCL has one for each rank, Evener has not."""
    if apart:
        return {"NCCL_HOSTID": f"{host}.{rank}", "EVENER_HOSTID": host}
    return {"NCCL_HOSTID": host}


def run(shape: Sequence[int], function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run and return the ranks' values; raise RankFailedError with the first traceback."""
    found = outcomes(shape, function, *args, **kwargs)
    for rank, outcome in enumerate(found):
        if outcome.error:
            raise RankFailedError(f"rank {rank} of {shape}:\n{outcome.error}")
    return [outcome.value for outcome in found]


class Several:
    """What became of the cases of one world: `found[name]` is what `run` would have returned."""

    def __init__(self, ranks: list[Outcome]) -> None:
        self._ranks = ranks

    def __getitem__(self, name: str) -> list[Any]:
        """The ranks' values; raises RankFailedError with the first traceback of this case."""
        values = []
        for rank, outcome in enumerate(self._ranks):
            done = outcome.value or {}
            if name not in done:
                why = outcome.error or f"not begun: case {list(done)[-1]!r} failed before"
                raise RankFailedError(f"rank {rank}, case {name!r}: {why}")
            if done[name].error:
                raise RankFailedError(f"rank {rank}, case {name!r}:\n{done[name].error}")
            values.append(done[name].value)
        return values


def several(shape: Sequence[int], cases: Mapping[str, tuple[Any, ...]], **kwargs: Any) -> Several:
    """Run cases one after the other in one world: name to (function, arguments after rank, size).

    After a case that failed on a rank, this rank begins no other: its peers may be anywhere.
    """
    return Several(outcomes(shape, _several, dict(cases), **kwargs))


def _several(rank: int, size: int, cases: dict[str, tuple[Any, ...]]) -> dict[str, Outcome]:
    done: dict[str, Outcome] = {}
    for name, (function, *args) in cases.items():
        try:
            done[name] = Outcome(value=function(rank, size, *args))
        except BaseException as error:  # noqa: BLE001 - reported by the parent
            done[name] = Outcome(error=traceback.format_exc(), exception=_picklable(error))
            break
    return done


def _collect(pipes: list[Connection], timeout: float) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(pipes):
        open_pipes = [pipe for i, pipe in enumerate(pipes) if i not in found]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                found[rank] = Outcome(error="the process died")
        if not ready:
            for rank in range(len(pipes)):
                found.setdefault(rank, Outcome(error=f"not finished after {timeout} s"))
    return [found[rank] for rank in range(len(pipes))]


def _rank(
    send: Connection,
    port: int,
    rank: int,
    size: int,
    environment: dict[str, str],
    gpu: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        if gpu:
            torch.cuda.set_device(gpus.of(rank))
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        # A rank that leaves before the last has joined would break that one's init.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{peer}" for peer in range(size)])
        outcome = Outcome(value=function(rank, size, *args))
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        outcome = Outcome(error=traceback.format_exc(), exception=_picklable(error))
    send.send_bytes(pickle.dumps(outcome))
    send.close()
    # Destroying the groups waits for peers, which a failed rank must not do.
    os._exit(1 if outcome.error else 0)


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - then only its text travels
        return None
    return error
