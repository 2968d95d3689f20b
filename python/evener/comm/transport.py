"""What carries the exchange between nodes: the collective library, or a transport of Evener's own.

An NCCL kernel that waits for a slow network occupies SMs for as long as the network takes, and the
training step's own kernels run beside it with what is left. A `Transport` moves bytes without them.
It knows two operations, `all_gather` and `all_to_all`; sums are made of those (`Group.all_reduce`
in `evener.comm.groups`).

`connect` decides, once for each outer group, by EVENER_OUTER; on `auto` by measuring both. All
ranks of a reducer come to the same `Carrier`, because all decide from the same gathered facts.

Transports are lent as groups are (`evener.comm.groups`), and end with the default process group, or
with the process.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.errors import EvenerError

logger = logging.getLogger("evener.comm")

# Own transport taken although it is slower by so much: it leaves the GPU to the training step.
PREFERENCE = 1.15
# What a rank receives from its peers in one measured all-gather.
MEASURED_BYTES = 16 << 20
_WARM, _TIMED = 2, 3
# New connections take up to ten exchanges to come to their rate: after the first best of `_TIMED`
# the own transport may still look half as fast as it is. So the library is taken only after this
# many rounds, or once they have taken so long.
_ROUNDS, _MOST_MS = 4, 2000.0


class Members(Protocol):
    """A communicator (`evener.comm.groups.Group`): this process is `rank` of its `size` ranks."""

    @property
    def handle(self) -> dist.ProcessGroup: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class Transport(Protocol):
    """Moves bytes between the `size` ranks of an outer group; this process is `rank` of them.

    Operations come in the same order on every rank. On a GPU they enqueue on the current stream and
    return; on a CPU they block. Tensors are contiguous, of one dtype (any), on one device.
    """

    size: int
    rank: int

    def all_gather(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """`received` [size * n] <- every rank's `payload` [n], in rank order; the same n on all."""

    def all_to_all(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """Part r of `payload` [size * n] goes to rank r; part r of `received` came from there."""

    def check(self) -> None:
        """Raise CommError when the network below has failed. Cheap: called for every bucket."""

    def close(self) -> None:
        """End it, and release streams that wait for it. From any thread; may be called twice."""


class Provider(Protocol):
    """A module that makes transports: `evener.comm.staged`."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why there is none for `device`, in words; None where there is."""

    def connect(
        self,
        rank: int,
        size: int,
        control: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
    ) -> Transport:
        """Collective over `control`. `timeout`: seconds, for this and for each operation.

        `control` is a Gloo group of exactly these ranks, in their order, and the transport's own.
        """


@dataclass(frozen=True)
class Carrier:
    """The decision for one outer group. `name`: "nccl", "gloo" or "staged"; `reason` in words.

    The measured milliseconds are those of the slowest rank; None where nothing was measured.
    """

    name: str
    reason: str
    transport: Transport | None = None
    library_ms: float | None = None
    staged_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "reason": self.reason,
            "library_ms": self.library_ms,
            "staged_ms": self.staged_ms,
        }


def provider() -> Provider:
    """Raises ImportError where this build has none."""
    from evener.comm import staged  # only where it may be used: it loads the native part

    return staged


def connect(
    group: Members,
    control: Members,
    device: torch.device,
    options: Options,
    *,
    hosts: int,
    meeting: Callable[[], dist.ProcessGroup],
) -> Carrier:
    """What carries the exchange of `group`. Collective over `control`, of which it is a part.

    `hosts`: on how many the group's ranks are. `meeting` makes a Gloo group of the ranks of
    `group`, for a transport to find its peers. Raises CommError where ranks want different things.
    Where some rank has no transport, no rank has one, and the log says why.
    """
    library = "nccl" if device.type == "cuda" else "gloo"
    why = _against(device, options, hosts, group.size)
    found = _gather(control, (options.outer, why, group.size))
    if all(size == 1 for _, _, size in found):
        return Carrier(library, "nothing crosses")
    wishes = [wish for wish, _, _ in found]
    if len(set(wishes)) > 1:
        other = next(r for r, wish in enumerate(wishes) if wish != wishes[0])
        raise CommError(
            f"rank 0 has EVENER_OUTER={wishes[0]}, rank {other} has {wishes[other]}",
            "start every rank with the same settings",
        )
    carrier = _decide(group, control, device, options, [why for _, why, _ in found], meeting)
    asked = options.outer == "staged" and carrier.transport is None
    quiet = device.type == "cpu" and options.outer != "staged"
    if control.rank == 0 and not quiet:
        logger.log(
            logging.WARNING if asked else logging.INFO,
            "the exchange between nodes goes by %s: %s",
            carrier.name,
            carrier.reason,
        )
    return carrier


def _against(device: torch.device, options: Options, hosts: int, size: int) -> str:
    """Why this rank would rather not try its own transport; "" where it would."""
    if size == 1:
        return ""  # it owns no shard, and goes with the others
    if options.outer == "nccl":
        return "EVENER_OUTER=nccl"
    if options.outer == "auto" and device.type != "cuda":
        return "on CPUs there is nothing to keep free"
    if options.outer == "auto" and hosts < 2:
        return "one host: there is no network"
    if options.outer == "auto" and hosts < size:
        # Each rank sends to each other one: what NCCL passes on inside a node would cross twice.
        return "several ranks of a host are in it, whose own links the library takes"
    try:
        return provider().unavailable(device) or ""
    except ImportError as error:
        return f"this build has no staged transport ({error})"


def _decide(
    group: Members,
    control: Members,
    device: torch.device,
    options: Options,
    against: Sequence[str],
    meeting: Callable[[], dist.ProcessGroup],
) -> Carrier:
    library = "nccl" if device.type == "cuda" else "gloo"
    if any(against):
        return Carrier(library, _first(against))
    alone = group.size == 1  # it owns no shard: it only meets the others where they meet
    transport, error = _attempt(
        meeting
        if alone
        else lambda: provider().connect(group.rank, group.size, meeting(), device, options.timeout)
    )
    transport = None if alone else transport
    if problem := _first(_gather(control, error)):
        return _without(transport, library, f"the staged transport does not connect: {problem}")
    if options.outer == "staged":
        return Carrier("staged", "EVENER_OUTER=staged", transport)
    # Its bytes on a node's card are those of a step, where the node's ranks share it.
    n = max(1, MEASURED_BYTES // max(1, group.size - 1))
    payload = torch.zeros(n, dtype=torch.uint8, device=device)
    received = torch.empty(n * group.size, dtype=torch.uint8, device=device)
    library_ms = staged_ms = float("inf")
    spent = 0.0
    for _ in range(_ROUNDS):
        theirs, error = _time(
            lambda: dist.all_gather_into_tensor(received, payload, group=group.handle),
            device,
            control,
        )
        ours, failed = 0.0, ""
        if transport is None:
            _time(lambda: None, device, control)
        else:
            own = partial(transport.all_gather, received, payload)
            ours, failed = _time(own, device, control)
            failed = failed or _attempt(transport.check)[1]
        times = _gather(control, (theirs, ours, error or failed))
        if problem := _first([why for _, _, why in times]):
            return _without(transport, library, f"the measurement failed: {problem}")
        slowest = [max(row[i] for row in times) for i in (0, 1)]
        library_ms, staged_ms = min(library_ms, slowest[0]), min(staged_ms, slowest[1])
        spent += (_WARM + _TIMED) * sum(slowest)
        if staged_ms <= PREFERENCE * library_ms or spent > _MOST_MS:
            break
    figures = (
        f"an all-gather of {MEASURED_BYTES >> 20} MiB takes {staged_ms:.1f} ms staged, "
        f"{library_ms:.1f} ms by {library}"
    )
    if staged_ms <= PREFERENCE * library_ms:
        reason = f"{figures}; it leaves the SMs to training (taken up to {PREFERENCE:g} times that)"
        return Carrier("staged", reason, transport, library_ms, staged_ms)
    if transport is not None:
        transport.close()
    reason = f"{figures}; staged is taken up to {PREFERENCE:g} times that"
    return Carrier(library, reason, None, library_ms, staged_ms)


def _time(
    operation: Callable[[], object], device: torch.device, control: Members
) -> tuple[float, str]:
    """Milliseconds of one call, best of a few, and what went wrong.

    Every rank passes every barrier, whatever fails: the peers wait there.
    """
    best, error = float("inf"), ""

    def once() -> None:
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for turn in range(_WARM + _TIMED):
        dist.barrier(group=control.handle)
        began = time.perf_counter()
        if not error:
            _, error = _attempt(once)
        if turn >= _WARM:
            best = min(best, 1e3 * (time.perf_counter() - began))
    return best, error


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Its result, and what went wrong, in words."""
    try:
        return action(), ""
    except Exception as error:  # noqa: BLE001 - told to all ranks, which then do without
        return None, str(error) or repr(error)


def _without(transport: Transport | None, library: str, reason: str) -> Carrier:
    if transport is not None:
        transport.close()
    return Carrier(library, reason)


def _gather(control: Members, mine: Any) -> list[Any]:
    found: list[Any] = [None] * control.size
    dist.all_gather_object(found, mine, group=control.handle)
    return found


def _first(reasons: Sequence[str]) -> str:
    """The reason of the first rank that has one, with its rank; "" where none has."""
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if all(other == reason for other in reasons) else f"rank {rank}: {reason}"
    return ""


# --- whose they are, and how they end ---

# An abort comes from a thread of its own (`evener.comm.world.abort`).
_LOCK = threading.Lock()
# By the default process group to which they belong: those in use and those that are free.
_OWNED: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Transport]] = weakref.WeakKeyDictionary()
_FREE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, list[Carrier]]]
_FREE = weakref.WeakKeyDictionary()


def lend(world: dist.ProcessGroup, key: object, make: Callable[[], Carrier]) -> Carrier:
    """One that was given back under `key`, else a new one by `make`. On all ranks alike."""
    free = _FREE.setdefault(world, {}).get(key)
    if free:
        return free.pop(0)
    carrier = make()
    if carrier.transport is not None:
        with _LOCK:
            if world not in _OWNED:
                owned: list[Transport] = []
                _OWNED[world] = owned
                end = weakref.finalize(world, _close, owned)  # it runs at the process's end too
                # A child of multiprocessing skips what is registered with atexit.
                util.Finalize(None, end, exitpriority=0)
            _OWNED[world].append(carrier.transport)
    return carrier


def give_back(world: dist.ProcessGroup, key: object, carrier: Carrier) -> None:
    """Nothing is in flight on it any more."""
    _FREE.setdefault(world, {}).setdefault(key, []).append(carrier)


def live() -> list[Transport]:
    """All of this process that have not been ended, lent or not."""
    with _LOCK:
        return [transport for owned in _OWNED.values() for transport in owned]


def take_all(world: dist.ProcessGroup | None = None) -> list[Callable[[], None]]:
    """What closes each transport of this process, which knows them no more: the world has ended.

    world: those of this one alone.
    """
    with _LOCK:
        worlds = [one for one in _OWNED if world is None or one is world]
        ends = [transport.close for one in worlds for transport in _OWNED[one]]
        for one in worlds:
            _OWNED[one].clear()
        for one in [one for one in _FREE if world is None or one is world]:
            del _FREE[one]
    return ends


def end_all(world: dist.ProcessGroup | None = None) -> None:
    """Close the transports of this process (or `world`) one after the other: all are idle."""
    _end(take_all(world))


def _close(owned: list[Transport]) -> None:
    _end([transport.close for transport in owned])
    owned.clear()


def _end(ends: Sequence[Callable[[], None]]) -> None:
    for end in ends:
        _, error = _attempt(end)
        if error:
            logger.debug("a transport did not close: %s", error)


def failure() -> str:
    """What some transport of this process says has failed; "" where none does."""
    for transport in live():
        try:
            transport.check()
        except EvenerError as error:
            return error.problem
    return ""
