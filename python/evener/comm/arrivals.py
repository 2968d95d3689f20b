"""From autograd's hooks to buckets that leave: what of a step has come, and what goes next.

A gradient goes one way:

    a hook of the node that accumulates it > `came` > the owner > `count`, its passes
    > `complete`, its buckets > `issue_complete`, in one sequence > the owner's `submit`

    WAITING    nothing of this step has come
    ARRIVING   gradients come; a bucket leaves when it is complete and all before it have left
    LEFT       every bucket was submitted; the results are on their way, until `reset`

Ranks may produce gradients in different orders, yet all issue their buckets in one `sequence`, the
same on all: a bucket that is complete early waits for those before it. This module knows nothing of
buffers, forms and groups.

The end of backward: autograd calls back when a backward ends, but a checkpointed part of a model
has a backward of its own within the whole one. So the callback is queued where backward meets the
model's outputs (`backward_begins`), as FSDP2 does; where nobody says that, with the first gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from evener.comm.errors import CommError
from evener.comm.frozen import thawed
from evener.comm.lanes import Ticket


class Phase(Enum):
    """See the module."""

    WAITING = 0
    ARRIVING = 1
    LEFT = 2


class Owner(Protocol):
    """Who is told, in autograd's threads."""

    def begins(self) -> None:
        """A backward that is to be reduced begins. Also with the first gradient of a step."""

    def began(self) -> None:
        """The first gradient of a step has come."""

    def special(self) -> Iterable[int] | None:
        """Gradients that `arrived` must be told of; others are only counted. None: all of them.

        Asked with the first gradient of each step.
        """

    def arrived(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index`, which is to be reduced."""

    def completed(self, bucket: int) -> None:
        """All gradients of this bucket are there."""

    def submit(self, bucket: int) -> Ticket:
        """It leaves: issue its collectives."""


class Arrivals:
    """Those of one reducer.

    Attributes for front doors: `active` (False: gradients accumulate locally, as under `no_sync`;
    what a step needs is for the door to say, so that other backward passes stay out of it),
    `passes` (backward passes whose gradients are summed before a bucket leaves; see `set_passes`),
    `holds` (nothing leaves before `flush`: backward is then seen without communication beside it)
    and `on_backward_end` (called by autograd when a backward that brought gradients has ended).
    """

    def __init__(self, names: Sequence[str], owner: Owner, *, repeats: bool) -> None:
        """`repeats`: see `Reducer`."""
        self._names, self._owner = names, owner
        self.active = True
        self.holds = False
        self.passes = 1
        self.on_backward_end: Callable[[], None] | None = None
        self.phase = Phase.WAITING
        self.sequence: tuple[int, ...] = ()
        # Whether a parameter was used since the last step, under no_sync too.
        self.used = [False] * len(names)
        # Parameters in the order in which their gradients came.
        self.order: list[int] = []
        self.tickets: dict[int, Ticket] = {}
        # How often each gradient comes in a backward; counted in the first step.
        self._times = [1] * len(names)
        self._counting = repeats
        self._sizes: Sequence[int] = ()
        self._buckets_of: Sequence[tuple[int, ...]] = ()
        self._ends_in: int | None = None
        self._nodes: list[Any] = []
        self._hooks: list[Any] = []

    def hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on be told of their gradients.

        On the nodes that accumulate, as DDP: they run behind the hooks of the user's own, whenever
        those were registered. A parameter does not hold its node, so we do.
        """
        parameters = list(parameters)
        with thawed(parameters):
            self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        self._hooks = [node.register_hook(_Hook(self, i)) for i, node in enumerate(self._nodes)]

    def detach(self) -> None:
        """Be told no more. May be called twice."""
        for hook in self._hooks:
            hook.remove()

    # --- layout ---

    def lay_out(self, sizes: Sequence[int], buckets_of: Sequence[tuple[int, ...]]) -> None:
        """`sizes`: gradients by bucket; `buckets_of`: by parameter the buckets it lies in."""
        self._sizes, self._buckets_of = sizes, buckets_of
        self.reset()

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after `passes` backward passes. Between steps only."""
        self.passes = passes
        self.reset()

    def expect_repeats(self) -> None:
        """A gradient may come several times in a backward; said before the first step."""
        self._counting = True

    @property
    def repeats(self) -> bool:
        """Whether a gradient comes several times in a backward, or may."""
        return self._counting or any(times > 1 for times in self._times)

    def settle(self) -> None:
        """The first step is over: how often gradients come is known."""
        self._counting = False

    def reset(self) -> None:
        """Forget the step: every gradient is still to come."""
        self.phase = Phase.WAITING
        self.order = []
        self.tickets = {}
        self.used = [False] * len(self.used)
        self._here = [False] * len(self.used)
        self._plain = [False] * len(self.used)
        self._left = [self.passes * times for times in self._times]
        self._missing = list(self._sizes)
        self._next = 0

    # --- gradients come ---

    def came(self, index: int) -> None:
        """Backward has added to this parameter's gradient. From autograd's thread."""
        # Also under no_sync: what came then is part of what is reduced later.
        self.used[index] = True
        if self.active:
            self._owner.arrived(index)

    def came_plain(self, index: int) -> None:
        """As `came`, for a gradient that has come once, whole, and needs no more than counting.

        A model of many small layers has thousands of these in a step.
        """
        self._plain[index] = False
        self.used[index] = self._here[index] = True
        self._left[index] = 0
        self.order.append(index)
        bucket = self._buckets_of[index][0]
        self._missing[bucket] = left = self._missing[bucket] - 1
        if not left:
            self._owner.completed(bucket)
            self._issue_complete()

    def _all_plain(self) -> list[bool]:
        """Which gradients need no more than counting, from the second one of a step on."""
        special = self._owner.special()
        if special is None or self.passes != 1 or self._counting:
            return [False] * len(self.used)
        plain = [
            times == 1 and not here and len(buckets) == 1
            for times, here, buckets in zip(self._times, self._here, self._buckets_of, strict=True)
        ]
        for index in special:
            plain[index] = False
        return plain

    def begin(self) -> None:
        """A gradient of this step has come."""
        if self._ends_in is None:
            self.backward_begins()
        if self.phase is Phase.WAITING:
            self.phase = Phase.ARRIVING
            self._owner.began()
            self._plain = self._all_plain()

    def count(self, index: int) -> bool:
        """One pass has brought this gradient: whether it was the last that is waited for."""
        self._left[index] -= 1
        if self._left[index] > 0:
            return False
        if self._here[index]:
            if self._counting:
                self._times[index] += 1
                return False
            raise CommError(
                f"the gradient of {self._names[index]} came again before it was applied",
                "step once a backward, or say how many passes are accumulated "
                "(no_sync(), backward_passes_per_step); where checkpointed layers share it, "
                "checkpoint with use_reentrant=False, or set static_graph=True",
            )
        self._here[index], self._plain[index] = True, False
        return True

    def mark(self, index: int) -> None:
        """A part of this gradient has come, from where it came, and not by its hook."""
        self.begin()
        self._here[index] = self.used[index] = True
        self._left[index], self._plain[index] = 0, False

    def expect_one(self, index: int) -> None:
        """It has come before anybody looked: `count` once is all of it."""
        self._left[index], self.used[index] = 1, True

    def partly(self) -> list[int]:
        """Parameters whose gradients came in this step, in one backward pass at least."""
        full = (self.passes * times for times in self._times)
        pairs = zip(self._left, full, strict=True)
        return [index for index, (left, expected) in enumerate(pairs) if left < expected]

    def complete(self, index: int) -> None:
        """All of this gradient, or all that its own buckets are for, is there."""
        for bucket in self._buckets_of[index]:
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._owner.completed(bucket)
        self._issue_complete()

    def _issue_complete(self) -> None:
        if not self.holds and not self._counting:
            while self._next < len(self.sequence) and not self._missing[self.sequence[self._next]]:
                self.issue()

    # --- buckets leave ---

    @property
    def place(self) -> int:
        """How many buckets have left in this step."""
        return self._next

    def issue(self) -> None:
        """The next bucket of the sequence leaves."""
        bucket = self.sequence[self._next]
        self.tickets[bucket] = self._owner.submit(bucket)
        self._next += 1
        self.phase = Phase.LEFT if self._next == len(self.sequence) else Phase.ARRIVING

    def flush(self) -> None:
        """All that are left leave. What has no gradient counts as zeros."""
        while self._next < len(self.sequence):
            self.issue()

    # --- the end of backward ---

    def backward_begins(self) -> None:
        """Have `on_backward_end` called when the backward ends that runs now, in this thread."""
        # Each pass that is summed finds what was kept, or dropped, since the one before.
        summed = self.passes > 1 and not self._next
        if self.active and (self.phase is Phase.WAITING or summed):
            self._owner.begins()
        task = int(torch._C._current_graph_task_id())
        if self.on_backward_end is not None and task not in (-1, self._ends_in):
            self._ends_in = task
            Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._ends_in = None
        if self.phase is not Phase.WAITING and self.on_backward_end is not None:
            self.on_backward_end()


class _Hook:
    """The hook of a node that accumulates. It dies with the reducer."""

    def __init__(self, arrivals: Arrivals, index: int) -> None:
        self._arrivals, self.index = weakref.ref(arrivals), index

    def __call__(self, nothing: Any, gradients: tuple[torch.Tensor | None, ...]) -> None:
        arrivals, gradient = self._arrivals(), gradients[0]
        if arrivals is None or gradient is None:
            return
        if arrivals._plain[self.index] and arrivals.active and not gradient.is_sparse:
            arrivals.came_plain(self.index)
        else:
            arrivals.came(self.index)
