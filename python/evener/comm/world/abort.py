"""Ends collectives whose peers are gone, so that a process can go on without them.

A collective of NCCL that waits for a dead peer is a kernel that never ends, and whatever waits for
the GPU (a copy to the host, a memory allocation, a stream's end) waits with it. Only an abort ends
it. `ncclCommAbort` raises a flag at which the communicator's own kernels end, and then frees its
memory, for which CUDA waits for every kernel of the GPU, other communicators' included: two of them
with work in flight, aborted one after the other, wait for ever (pytorch issue 119797). So each is
aborted in a thread of its own: all flags are up before anyone waits. Evener's own transports
(`evener.comm.transport`), for which streams may wait as well, are closed beside them.

What was aborted cannot be destroyed in the ordinary way, which first waits for what was started:
`forget_groups` empties torch's tables instead.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from evener.base.log import logger
from evener.comm import transport
from evener.comm.world import world
from evener.errors import EvenerError


class AbortError(EvenerError):
    """The GPU cannot be used any more: this process has to end."""


_LOCK = threading.Lock()
# Groups that were aborted; default groups among them are what `aborted` asks for.
_ENDED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def nccl_backends() -> list[tuple[dist.ProcessGroup, Any]]:
    """Every group of this process that has an NCCL backend, with it."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return []
    device, found = torch.device("cuda"), []
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    for group in [*groups, *(group for one in world.live() for group in one.groups())]:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # noqa: S112 - this group has none for GPUs
            continue
        if isinstance(backend, dist.ProcessGroupNCCL):
            found.append((group, backend))
    return found


def end_collectives(limit: float = 30.0) -> None:
    """End what NCCL has in flight in this process. From any thread; a second call does little.

    limit: seconds. Raises AbortError where NCCL, or the GPU after it, has not come to an end then.
    """
    if not dist.is_initialized() and not world.live():
        return
    deadline = time.monotonic() + limit
    with _LOCK:
        backends = [(group, backend) for group, backend in nccl_backends() if group not in _ENDED]
        jobs = [_Job(backend.abort) for _, backend in backends]
        jobs += [_Job(end) for end in transport.take_all()]
        stuck = [job for job in jobs if not job.ended(deadline)]
        _ENDED.update(group for group, _ in backends)
        if dist.group.WORLD is not None:
            _ENDED.add(dist.group.WORLD)
        _ENDED.update(one.group for one in world.live())
    for job in jobs:
        if job.error is not None:
            logger.debug("a group was not aborted: %s", job.error)
    if stuck:
        raise AbortError(
            f"{len(stuck)} of {len(jobs)} communicators did not end within {limit:g} s",
            "start this process anew; NCCL_DEBUG=INFO shows what it waits for",
        )
    if jobs:
        logger.debug("ended %d communicators", len(jobs))


def wait_for_gpu(limit: float = 30.0) -> None:
    """Wait until the current GPU has done what it was given. No GPU in use: nothing to do.

    Raises AbortError where it does not end within `limit` seconds, or its context is lost.
    """
    if not torch.cuda.is_initialized():
        return
    device = torch.cuda.current_device()  # of this thread: the next one begins with 0
    job = _Job(lambda: torch.cuda.synchronize(device))
    if not job.ended(time.monotonic() + limit):
        raise AbortError(
            f"GPU {device} is still at work {limit:g} s after its collectives were aborted",
            "start this process anew",
        )
    if job.error is not None:
        raise AbortError(
            f"GPU {device} cannot be used after its peer's death: {job.error}",
            "start this process anew",
        ) from job.error


def aborted() -> bool:
    """Whether `end_collectives` was called since the default group, or a world, was made."""
    bases = [one.group for one in world.live()]
    if dist.group.WORLD is not None:
        bases.append(dist.group.WORLD)
    return any(base in _ENDED for base in bases)


def forget_groups() -> None:
    """Drop torch.distributed's groups, the default one too, without waiting for what they do."""
    try:
        # It aborts Gloo's groups as well: their peers learn that we have given up.
        dist.distributed_c10d._abort_process_group()
    except RuntimeError as error:
        logger.debug("groups are destroyed, not aborted: %s", error)
        dist.destroy_process_group()


def nccl_error() -> str:
    """What NCCL says went wrong in some group of this process; "" where nothing did."""
    for group, backend in nccl_backends():
        try:
            state = backend.get_error()
        except RuntimeError as error:
            return str(error)
        if state.name != "SUCCESS":
            return f"NCCL reports {state.name} in group {group.group_name}"
    return ""


class _Job:
    """A call in a daemon thread: one that hangs must not keep the process from ending."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="evener-abort", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self.error = error

    def ended(self, deadline: float) -> bool:
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()
