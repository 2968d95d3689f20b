"""Calls of torch that must find nothing pending and tell nobody: replaying or capturing a CUDA
graph (it reads parameters by address), and destroying the process groups (a peer may still need
what is on its way from here). The first overlap of a process wraps them; there is no hook for
either. A process that ends without them waits in `atexit`.

A backward that begins while something is pending is told of: it may be another model's, or one that
goes round this one's forward and writes the gradients that are on their way.

A transform of torch.func takes parameters out of Python's sight, and what torch.compile has made
reads them in code of its own: both find nothing pending.

And one that must wait for more than it says: a stream that is made to wait for the stream of
`optimizer.step()` may read all parameters from then on. Updates run on another stream, so it waits
for them too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._functorch import eager_transforms, vmap
from torch.distributed import distributed_c10d


class Deferred(Protocol):
    """Updates that are under way: `evener.comm.overlap.step.StepOverlap`."""

    def finish(self, reason: str, *, on_host: bool = False) -> None: ...
    def backward_begins(self) -> None: ...
    def updated_for(self, stream: Any) -> torch.cuda.Event | None: ...


_LIVE: weakref.WeakSet[Deferred] = weakref.WeakSet()
_DONE: set[str] = set()
# How torch.func enters a transform, in the modules that do.
_ENTERED: tuple[tuple[Any, str], ...] = (
    (eager_transforms, "_grad_increment_nesting"),
    (eager_transforms, "_jvp_increment_nesting"),
    (eager_transforms, "_func_increment_nesting"),
    (vmap, "_vmap_increment_nesting"),
)
_ENTERS = "_maybe_set_eval_frame"


def watch(overlap: Deferred) -> None:
    """Finish `overlap` before any of these calls, for as long as it lives."""
    eval_frame = _eval_frame()
    _LIVE.add(overlap)
    if not _DONE:
        _DONE.add("wrapped")
        destroy = _first(dist.destroy_process_group, "")  # the end, as it is meant to be
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
        for module, name in _transforms():
            setattr(module, name, _first(getattr(module, name), "torch.func"))
        eval_frame._maybe_set_eval_frame = _compiled(eval_frame._maybe_set_eval_frame)
        atexit.register(_at_exit)


def refusal() -> str:
    """Why uses of parameters cannot be noticed with this torch; empty where they can."""
    if len(list(_transforms())) < len(_ENTERED) or not hasattr(_eval_frame(), _ENTERS):
        return f"torch {torch.__version__} enters transforms and compiled code by unknown ways"
    return ""


def within() -> bool:
    """Whether a transform of torch.func or compiled code is running: nothing is deferred there."""
    functorch: Any = torch._C._functorch
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return functorch.peek_interpreter_stack() is not None or callable(callback)


def _eval_frame() -> Any:
    """torch's module: imported late, because that takes a second, and a program that makes no
    optimizer does without it."""
    from torch._dynamo import eval_frame

    return eval_frame


def _transforms() -> Iterator[tuple[Any, str]]:
    """By which torch.func enters a transform: module and name."""
    for module, name in _ENTERED:
        if hasattr(module, name):
            yield module, name


def _compiled(enter: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile has made calls this with a function before it runs, and also behind."""

    @functools.wraps(enter)
    def wrapped(callback: Any) -> Any:
        if callable(callback):
            for overlap in list(_LIVE):
                overlap.finish("compiled code runs")
        return enter(callback)

    return wrapped


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
