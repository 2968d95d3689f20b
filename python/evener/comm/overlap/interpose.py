"""Calls of torch that must find nothing pending and tell nobody: replaying or capturing a CUDA
graph (it reads parameters by address), and destroying the process groups (a peer may still need
what is on its way from here). The first overlap of a process wraps them; there is no hook for
either. A process that ends without them waits in `atexit`.

A backward that begins while something is pending is told of: it may be another model's, or one that
goes round this one's forward and writes the gradients that are on their way.

And one that must wait for more than it says: a stream that is made to wait for the stream of
`optimizer.step()` may read all parameters from then on. Updates run on another stream, so it waits
for them too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from evener.comm.overlap.step import StepOverlap

_LIVE: weakref.WeakSet[StepOverlap] = weakref.WeakSet()
_DONE: set[str] = set()


def watch(overlap: StepOverlap) -> None:
    """Finish `overlap` before any of these calls, for as long as it lives."""
    _LIVE.add(overlap)
    if not _DONE:
        _DONE.add("wrapped")
        destroy = _first(dist.destroy_process_group, "the process groups are destroyed")
        dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy
        graph = torch.cuda.CUDAGraph
        for name, reason in (
            ("replay", "a CUDA graph is replayed"),
            ("capture_begin", "a CUDA graph is captured"),
        ):
            setattr(graph, name, _first(getattr(graph, name), reason))
        event = torch.cuda.Event
        event.wait = _for_updates(event.wait)  # type: ignore[method-assign]
        torch.autograd._engine_run_backward = _backward(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
        atexit.register(_at_exit)


def _first(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for overlap in list(_LIVE):
            overlap.finish(reason, on_host=True)
        return function(*args, **kwargs)

    return wrapped


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """What `Tensor.backward`, `torch.autograd.backward` and `.grad` go through."""

    @functools.wraps(run)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for overlap in list(_LIVE):
            overlap.backward_begins()
        return run(*args, **kwargs)

    return wrapped


def _for_updates(wait: Callable[..., None]) -> Callable[..., None]:
    """`torch.cuda.Event.wait`, through which `wait_event` and `wait_stream` go."""

    @functools.wraps(wait)
    def wrapped(event: torch.cuda.Event, stream: Any = None) -> None:
        wait(event, stream)
        for overlap in list(_LIVE):
            updated = overlap.updated_for(stream)
            if updated is not None:
                wait(updated, stream)

    return wrapped


def _at_exit() -> None:
    for overlap in list(_LIVE):
        # The process ends, perhaps because of this very error, which was shown then.
        with contextlib.suppress(Exception):
            overlap.finish("", on_host=True)
