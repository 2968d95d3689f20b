"""What a form on the wire is, and the list of all that there are.

A further form (FP8, INT4, PowerSGD) is one class:

    @register
    class Int4Wire(Wire):
        name, milder, lossy, feedback, limits = "int4", "int8", True, True, Limits(1.0, 0.9)

        def exchange(self, shard, state): ...

`milder` is what the accuracy guard (`evener.comm.guard`) falls back to past `limits`, or past
`strict` where the optimizer is not known to be linear in the gradients; `lossy` forms
leave norms and biases out; forms with `feedback` keep in `state.residual` what they did not send,
and all that goes with it (checkpoints, loss scales, other world sizes) is done for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from evener.comm.buckets import Bucket
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.state import ShardState
from evener.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Past which the guard falls back.

    `residual`: largest norm of the residual over the gradient's. `cosine`: least cosine between the
    compressed and the dense reduction of one step.
    """

    residual: float = float("inf")
    cosine: float = -1.0


class Wire(ABC):
    """See the module. One object serves all buckets of one route.

    It talks to its peers by the methods of `self.outer`, and its scratch memory is `Scratch`: on a
    GPU buckets may be at work on several streams at once.
    """

    name: ClassVar[str]
    milder: ClassVar[str] = "exact"
    lossy: ClassVar[bool] = False
    feedback: ClassVar[bool] = False
    # Sparse forms take the optimizer's momentum into account before they select (DGC); for others
    # it is applied to the result.
    sparse: ClassVar[bool] = False
    limits: ClassVar[Limits] = Limits()
    # Under an optimizer that is not known to be linear in the gradients; None: the same.
    strict: ClassVar[Limits | None] = None

    def __init__(self, route: Route, options: Options) -> None:
        self.route, self.options = route, options
        self.outer, self.scaling = route.outer, route.scaling

    @abstractmethod
    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """Reduce `shard` [n], of the bucket's dtype, over the outer group, in place.

        Leaves the same bits on every rank of the group. It runs on an outer lane: on a CPU it may
        block, on a GPU it only enqueues on the current stream, so scratch memory may be used again
        by the next bucket of that stream without waiting.
        """

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """What one rank hands to the network for a shard of `numel` entries of `itemsize` bytes."""
        return _around(self.outer.size, numel * itemsize)


def _around(peers: int, size: int) -> int:
    """Bytes that one rank of a bandwidth-optimal all-reduce of `size` bytes sends."""
    return 2 * (peers - 1) * size // peers


_FORMS: dict[str, type[Wire]] = {}


def register(form: type[Wire]) -> type[Wire]:
    """Make `form` known by its name. Raises ValueError where the name is taken."""
    if form.name in _FORMS:
        raise ValueError(f"the form {form.name!r} exists already")
    _FORMS[form.name] = form
    return form


def names() -> tuple[str, ...]:
    """All forms, in the order in which they were registered."""
    return tuple(_FORMS)


def get(name: str) -> type[Wire]:
    """The form of that name. Raises UsageError that lists them."""
    if name not in _FORMS:
        raise UsageError(f"there is no form {name!r}", f"choose from {', '.join(_FORMS)}")
    return _FORMS[name]


def ladder(form: str) -> tuple[str, ...]:
    """The forms from "exact" to `form`: what each falls back to, the other way round."""
    found = [form]
    while found[-1] != "exact":
        found.append(get(found[-1]).milder)
    return tuple(reversed(found))


def candidates(floor: str) -> tuple[str, ...]:
    """What a planner may choose from, down to `floor`, in the order in which it tries them.

    Its ladder; and before a sparse floor the sparse forms that stand where it does and were
    registered later: with "topk" chunk-wise top-k too, which sends the same share of the entries,
    is quicker to make, and half of the bytes.
    """
    found = ladder(floor)
    if not get(floor).sparse:
        return found
    beside = [f for f in _FORMS if get(f).sparse and get(f).milder == get(floor).milder]
    return (*found[:-1], *reversed(beside[beside.index(floor) :]))


def milder(one: str, other: str) -> str:
    """Which of the two forms is fewer falls away from "exact"; `one` where they are as many."""
    return min((one, other), key=lambda form: len(ladder(form)))


def choose(options: Options, route: Route, bucket: Bucket) -> str:
    """Which form a bucket's shard is sent in. The same on every rank: it looks at sizes only."""
    numel = bucket.buffer.numel() // route.shards
    if route.levels.nodes == 1 or route.outer.size == 1:
        return "exact"  # nothing crosses a network
    form = get(options.wire)
    if form.sparse:
        shard_bytes = numel * bucket.buffer.element_size()
        if shard_bytes < options.topk_min_bytes or numel >= 2**31:
            return "exact"
    return suitable(form.name, bucket)


def suitable(form: str, bucket: Bucket) -> str:
    """`form`, or exact where it has nothing to do: norms, biases, what is so already."""
    if get(form).lossy and bucket.dense:
        return "exact"
    return "exact" if _CASTS.get(form) == bucket.buffer.dtype else form


_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
