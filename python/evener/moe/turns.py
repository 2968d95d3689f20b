"""Parts of a batch take turns on one device: while the tokens of one travel, another computes.

    compute   a: attention | b: attention | a: experts | b: experts | a: attention ...
    network                | a: tokens go | b: tokens go | a: sums back | b: sums back ...

A layer alone has less to compute than to send, and its attention needs the sums of the layer
before; the other half of the batch needs nothing of it. (DeepSeek-V3's two micro-batches, arXiv
2412.19437.) Each part runs the module's own forward pass in a thread of its own, so any model can
take turns, and hands over where its tokens leave (`hand_over`). One part runs at a time, in an
order that is the same on all ranks. Each has its own groups and its own lane: tokens of one do not
queue behind those of another, and the network has something to carry between two collectives.

Backward takes turns by itself. Autograd runs, of what is ready, what was made last; so each part
goes on counting where the one before it stopped (`_count_on`), and the order is that of forward,
reversed. The first goes on from the caller's number, and the caller from the last one's: else what
the caller made would come before the parts' on one rank and after them on another, and with it
collectives of layers that run again.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from evener.comm.watch import Watch
from evener.errors import UsageError

_own = threading.local()


class _StoppedError(BaseException):
    """Ends a part because another failed. No Exception: nobody on the way should judge it."""


@dataclass(frozen=True)
class Part:
    """What this thread runs: part `index`, with `share` of the batch."""

    index: int
    share: float
    turns: Turns


def part() -> Part | None:
    """The part that this thread runs; None outside of `Turns`."""
    return getattr(_own, "part", None)


def hand_over() -> None:
    """Let the other parts run until it is this one's turn again. Outside of `Turns` nothing."""
    mine = part()
    if mine is not None:
        mine.turns.hand_over(mine.index)


class Turns:
    """One call of a module in `parts` parts."""

    def __init__(self, parts: int, device: torch.device) -> None:
        self._running = [True] * parts
        self._device = device
        self._turn = 0
        self._changed = threading.Condition()
        self._stopped = False
        # The number of autograd's last node, whoever made it: the caller, or a part.
        self._counted = torch.is_grad_enabled()
        self._number = _count() if self._counted else -1
        self.error: BaseException | None = None
        others = [_other_state(device) for _ in range(parts - 1)]
        self._random = [_random_state(device), *others]

    def run(self, index: int, work: Callable[[], Any]) -> Any:
        """A part, in its own thread."""
        result = None
        try:
            self._wait(index)
            result = work()
        except _StoppedError:  # noqa: S110 - `error` says why it was stopped
            pass
        except BaseException as error:  # noqa: BLE001 - told to the caller's thread, which raises it
            with self._changed:
                self.error = self.error or error
                self._stopped = True
                self._changed.notify_all()
        finally:
            with self._changed:
                self._running[index] = False
                if self._turn == index:
                    self._leave(index)
        return result

    def hand_over(self, index: int) -> None:
        with self._changed:
            self._leave(index)
        self._wait(index)

    def stop(self) -> None:
        """End all parts at their next turn."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def finish(self) -> None:
        """The caller's thread goes on: with the first part's random numbers, and counting."""
        _set_random_state(self._device, self._random[0])
        if self._counted:
            _count_on(self._number)

    def _leave(self, index: int) -> None:
        if self._counted:
            self._number = _count()
        self._random[index] = _random_state(self._device)
        count = len(self._running)
        for step in range(1, count + 1):
            following = (index + step) % count
            if self._running[following]:
                self._turn = following
                break
        self._changed.notify_all()

    def _wait(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index or self._stopped)
            if self._stopped:
                raise _StoppedError
            if self._counted:
                _count_on(self._number)
            # A layer that runs again in backward must draw what it drew: without the other's.
            _set_random_state(self._device, self._random[index])


def _count() -> int:
    """The number of a node that is made now, in this thread."""
    with torch.enable_grad():
        node: Any = _like.view_as(_like).grad_fn
    return int(node._sequence_nr())


_like = torch.empty(0, requires_grad=True)


def _count_on(number: int) -> None:
    while _count() < number:
        pass


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _other_state(device: torch.device) -> list[torch.Tensor]:
    """Random numbers of another part, seeded from one of the caller's."""
    seed = int(torch.randint(1 << 62, ()).item())
    made = [torch.Generator().manual_seed(seed).get_state()]
    if device.type == "cuda":
        made.append(torch.Generator(device).manual_seed(seed).get_state())
    return made


@contextmanager
def _as_caller(device: torch.device) -> Iterator[Callable[[], ExitStack]]:
    """What a thread must enter to compute as this one does."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in {"cpu", device.type}
    }
    cached = torch.is_autocast_cache_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter() -> ExitStack:
        stack = ExitStack()
        if stream is not None:
            torch.cuda.set_device(device)
            stack.enter_context(torch.cuda.stream(stream))
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, (on, dtype) in casts.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
        return stack

    yield enter


class InTurns:
    """A module's forward pass in parts; stands in the module's `forward`."""

    def __init__(
        self, forward: Callable[..., Any], name: str, parts: int, module: nn.Module, watch: Watch
    ) -> None:
        self.forward, self.name, self.parts = forward, name, parts
        self.module, self.watch = module, watch
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or part() is not None:
            return self.forward(*args, **kwargs)
        # All of it: an error in the attention of one rank would leave the others waiting.
        with self.watch.step(f"the forward pass of {self.name}"):
            outs = self._in_parts(args, kwargs)
        return self._joined(outs)

    def _in_parts(self, args: Any, kwargs: Any) -> list[Any]:
        leaves, tree = tree_flatten((args, kwargs))
        rows = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), None)
        device = next(
            (x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("cpu")
        )
        if rows is None or rows < self.parts:
            raise UsageError(
                f"{self.name} was given a batch of {rows or 'no'} rows for {self.parts} parts",
                f"give {self.parts} rows or more in training, or interleave fewer parts",
            )
        split = [
            x.tensor_split(self.parts)
            if isinstance(x, torch.Tensor) and x.dim() and len(x) == rows
            else [x] * self.parts
            for x in leaves
        ]
        given = [tree_unflatten([x[at] for x in split], tree) for at in range(self.parts)]
        sizes = [len(x) for x in torch.empty(rows, 0).tensor_split(self.parts)]
        return self._run(given, [size / rows for size in sizes], device)

    def _run(self, given: list[Any], shares: list[float], device: torch.device) -> list[Any]:
        turns = Turns(self.parts, device)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.parts, "evener-moe-part")

        with _as_caller(device) as enter:

            def work(at: int) -> Any:
                def own() -> Any:
                    args, kwargs = given[at]
                    with enter():
                        return self.forward(*args, **kwargs)

                _own.part = Part(at, shares[at], turns)
                try:
                    return turns.run(at, own)
                finally:
                    _own.part = None

            futures = [
                self._threads.submit(contextvars.copy_context().run, work, at)
                for at in range(self.parts)
            ]
            try:
                outs = [future.result() for future in futures]
            except BaseException:
                turns.stop()
                raise
        if turns.error is not None:
            raise turns.error
        turns.finish()
        return outs

    def _joined(self, outs: list[Any]) -> Any:
        """One output from those of the parts."""
        flat = [tree_flatten(out) for out in outs]
        joined = []
        for pieces in zip(*(leaves for leaves, _ in flat), strict=True):
            first = pieces[0]
            if isinstance(first, torch.Tensor):
                if not first.dim():
                    raise UsageError(
                        f"{self.name} gives one value for its whole batch",
                        "interleave the stack of layers (such as model.model), not the model "
                        "with its loss",
                    )
                joined.append(torch.cat(pieces))
            elif all(piece is first or piece == first for piece in pieces):
                joined.append(first)
            else:
                raise UsageError(
                    f"{self.name} gives a {type(first).__name__}, which is not a tensor",
                    "let it give tensors alone in training (of transformers: use_cache=False)",
                )
        return tree_unflatten(joined, flat[0][1])
