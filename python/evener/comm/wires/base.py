"""What a form is, and the list of all forms.

A further form is one file in this folder with one class, which says everything once:

    @register
    class Int4Wire(Wire):
        name = "int4"
        title = "INT4"
        what = "4-bit integers in blocks between nodes, with error feedback"
        place = 30  # harsher than INT8
        late = ""  # nothing is sent in a later step
        first_update = 0.05
        milder, rows_as = "int8", "int8"
        lossy = feedback = True
        limits = Limits(residual=1.0, cosine=0.9)
        strict = Limits(residual=0.25, cosine=0.9)

        @classmethod
        def paper(cls, ratio): ...

        def exchange(self, shard, state): ...

and is then a `mode=`, a floor, a column of the bench, and what the planner may choose. Checkpoints,
loss scales, other world sizes and the guard follow from these attributes. docs/reference/forms.md,
"Adding a form", goes through one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from evener.comm import forms
from evener.comm.buckets import Bucket
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.state import ShardState
from evener.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Past which the guard falls back.

    `residual`: largest norm of the residual over the gradient's. `cosine`: least cosine between the
    compressed and the dense reduction of one step, of a whole bucket; `each`: of every parameter by
    itself, which tells where one whose gradients are small has left the form's range.
    """

    residual: float = float("inf")
    cosine: float = -1.0
    each: float = -1.0


@dataclass(frozen=True)
class Paper:
    """A form on paper: what it sends and how often it touches memory.

    A rank's payload for n entries, of 4 bytes as they come, is `share` * 4n + `root` * sqrt(n)
    bytes. `summed`: a collective adds payloads up, in this many `rounds` (a ring: 2 (N-1)/N
    payloads per rank), as quantised ones do in two halves; otherwise every rank gets every other's
    payload (N-1 of them), or from `halves_from` ranks on as one that is summed. `passes`: times
    that encode and decode together touch the shard's bytes in memory, to which decoding adds
    `passes_a_peer` for every peer.
    """

    name: str
    share: float
    summed: bool
    passes: float
    passes_a_peer: float = 0.0
    root: float = 0.0
    rounds: int = 1
    halves_from: int = 0

    def payload(self, size: float) -> float:
        """Bytes for `size` bytes of FP32 gradients."""
        return self.share * size + self.root * math.sqrt(size / 4)

    def sent(self, size: float, nodes: int) -> float:
        """Bytes that one rank hands to the network for a shard of `size` bytes."""
        peers = 2 * (nodes - 1) / nodes if self._around(nodes) else nodes - 1
        return peers * self.payload(size)

    def hops(self, nodes: int) -> int:
        """Messages one behind the other."""
        return 2 * (nodes - 1) * self.rounds if self._around(nodes) else nodes - 1

    def _around(self, nodes: int) -> bool:
        return self.summed or 0 < self.halves_from <= nodes


class Wire(ABC):
    """See the module. One object serves all buckets of one route.

    It talks to its peers by the methods of `self.outer`, and its scratch memory is `Scratch`: on a
    GPU buckets may be at work on several streams at once.
    """

    # What users write, what tables show, and one line of help. Plain strings, see `comm.forms`.
    name: ClassVar[str]
    title: ClassVar[str]
    what: ClassVar[str]
    # Where it stands among floors: a planner with a floor takes nothing of a higher place.
    place: ClassVar[int]
    # How far, relative, the first updates of a training may be from DDP's (`bench train`): what is
    # not sent yet counts as applied. It was not, so gradients are those of other parameters.
    first_update: ClassVar[float]
    # What the guard (`comm.guard`) falls back to past `limits`, or past `strict` where the
    # optimizer is not known to be linear in the gradients; None: the same.
    milder: ClassVar[str] = "exact"
    limits: ClassVar[Limits] = Limits()
    strict: ClassVar[Limits | None] = None
    # Leaves norms and biases out.
    lossy: ClassVar[bool] = False
    # Keeps in `state.residual` what was not sent.
    feedback: ClassVar[bool] = False
    # Sends a gradient over many steps. Then it is no choice under Adam's moments, wants tensors
    # whole (its host's time is by tensor, not by byte), and only its like stand before it as a
    # planner's choices: "sparse" or "low-rank"; "" for forms that send all of a gradient at once.
    late: ClassVar[str] = ""
    # Takes the optimizer's momentum into account before it selects (DGC); for others it is applied
    # to the result.
    sparse: ClassVar[bool] = False
    # A gradient that the optimizer could take may be too large for it. No planner chooses such a
    # form: one loss spike, which clipping makes harmless, would be infinite on its way.
    overflows: ClassVar[bool] = False
    # The dtype in which all entries cross, where that is all that it does.
    cast: ClassVar[torch.dtype | None] = None
    # The form in which the rows of an embedding go (`comm.rows`); one with `rows_*` below.
    rows_as: ClassVar[str] = "exact"

    def __init__(self, route: Route, options: Options) -> None:
        self.route, self.options = route, options
        self.outer, self.scaling = route.outer, route.scaling

    @classmethod
    @abstractmethod
    def paper(cls, ratio: float) -> Paper:
        """Its costs; `ratio`: the share of entries that sparse forms send."""

    @abstractmethod
    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """Reduce `shard` [n], of the bucket's dtype, over the outer group, in place.

        Leaves the same bits on every rank of the group. It runs on an outer lane: on a CPU it may
        block, on a GPU it only enqueues on the current stream, so scratch memory may be used again
        by the next bucket of that stream without waiting.
        """

    def sent_bytes(self, numel: int, itemsize: int, state: ShardState | None = None) -> int:
        """What one rank hands to the network for a shard of `numel` entries of `itemsize` bytes.

        `state`: the shard's, where there is one.
        """
        del state
        return around(self.outer.size, numel * itemsize)

    # --- rows, in forms that name themselves in `rows_as` ---

    @classmethod
    def rows_bytes(cls, numel: int, dtype: torch.dtype) -> int:
        """Bytes of `numel` values that come as `dtype`; `rows_write` fills a multiple of 16."""
        raise NotImplementedError(f"{cls.name} sends no rows")

    @classmethod
    def rows_write(cls, values: torch.Tensor, factor: float, raw: torch.Tensor, key: int) -> None:
        """Encode `values` [n] into `raw`, uint8, which may be for more: the rest is 0.

        `factor`: of the average, for forms that multiply before they send. `key`: for what is
        rounded at random.
        """
        raise NotImplementedError(f"{cls.name} sends no rows")

    @classmethod
    def rows_read(
        cls, raw: torch.Tensor, factor: float, final: float, out: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """A peer's values [n], times `final`: in `out` [n] float32, or as they came, in `dtype`."""
        raise NotImplementedError(f"{cls.name} sends no rows")


def around(peers: int, size: int) -> int:
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
    """All forms, from the mildest to the harshest."""
    return tuple(sorted(_FORMS, key=lambda name: _FORMS[name].place))


def get(name: str) -> type[Wire]:
    """The form of that name. Raises UsageError that lists them."""
    if name not in _FORMS:
        raise UsageError(f"there is no form {name!r}", forms.suggestion(name, names()))
    return _FORMS[name]


def ladder(form: str) -> tuple[str, ...]:
    """The forms from "exact" to `form`: what each falls back to, the other way round."""
    found = [form]
    while found[-1] != "exact":
        found.append(get(found[-1]).milder)
    return tuple(reversed(found))


def papers(ratio: float = 0.01) -> tuple[Paper, ...]:
    """All forms on paper, from the mildest to the harshest; `ratio`: of top-k."""
    return tuple(get(name).paper(ratio) for name in names())


def candidates(floor: str) -> tuple[str, ...]:
    """What a planner may choose from, down to `floor`, in the order in which it tries them.

    All that stand before it and send a gradient at once, and its like. Among those that send as
    much as each other only the last, which has the wider range; none that overflows, but what it
    falls back to: BF16 for FP16.
    """
    last = get(floor)
    while last.overflows:
        last = get(last.milder)
    before = [get(name) for name in names() if get(name).place <= last.place]
    before = [form for form in before if not form.overflows]
    before = [form for form in before if form.late in ("", last.late)]
    shares = [(form.late, form.paper(0.01).payload(4 << 20)) for form in before]
    kept = [
        form.name
        for i, form in enumerate(before)
        if shares[i] not in shares[i + 1 :] or form.name == "exact"
    ]
    return tuple(kept)


def milder(one: str, other: str) -> str:
    """Which of the two forms is fewer falls away from "exact"; `one` where they are as many."""
    return min((one, other), key=lambda form: len(ladder(form)))


def choose(options: Options, route: Route, bucket: Bucket) -> str:
    """Which form a bucket's shard is sent in. The same on every rank: it looks at sizes only."""
    numel = bucket.buffer.numel() // route.shards
    if route.levels.nodes == 1 or not route.levels.crosses:
        return "exact"  # nothing crosses a network
    form = get(options.wire)
    if form.sparse:
        shard_bytes = numel * bucket.buffer.element_size()
        if shard_bytes < options.topk_min_bytes or numel >= 2**31:
            return "exact"
    return suitable(form.name, bucket)


def suitable(form: str, bucket: Bucket) -> str:
    """`form`, or another where it has nothing to do: norms, biases, rows, what is as small already.

    A cast that makes nothing smaller only takes range or precision away: gradients of 16 bits cross
    as they are.
    """
    made = get(form)
    if made.lossy and bucket.dense:
        return "exact"
    if bucket.by_rows and made.rows_as != form:
        return suitable(made.rows_as, bucket)
    if made.cast is not None and made.cast.itemsize >= bucket.buffer.element_size():
        return "exact"
    return form
