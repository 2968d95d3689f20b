"""Embeddings taken apart: what layers add to their gradient leaves early, lookups leave as rows.

The gradient of a parameter that is looked up (`lookups`) takes two ways, and the result is the sum:

    its buckets       what layers that share the weight bring, as soon as it is there, in all the
                      forms and with all that goes with them
    a bucket by rows  what lookups bring, at the end of backward: `rows`, added when the others
                      have landed

Each rank may put anything on either way, for a sum is a sum: an accumulated gradient goes with what
the layers bring. Without layers the parameter's own buckets are empty, and not sent, unless some
rank has something dense. What ranks must agree on is how many rows there are at most, and whether
a rank has something dense: one small reduction on the CPU, begun with the first gradient, when
the network is idle, and waited for at the end of backward. (Begun there, it would wait in line
behind all that is on its way.)

The first step leaves everything whole. It shows how many rows are looked up per step, so what is
worth it, and whether the parameter has uses that nobody watches (`F.linear(x, embedding.weight)`);
then it stays whole. So it does where a planner may send a share of its entries in far fewer bytes
than its rows take. Where such a use comes up later, the weight is asked for outside of its modules,
and goes whole in that step (`lookups`). One of which nothing can be seen, by a reference that the
program has kept, is an error: the parameter's buckets may have left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from evener.comm import lookups, wires
from evener.comm.agree import everyones
from evener.comm.arrivals import Arrivals
from evener.comm.buckets import Bucket, Buckets
from evener.comm.errors import CommError
from evener.comm.groups import Communicators
from evener.comm.lookups import Lookup
from evener.comm.options import Options
from evener.comm.rows import Rows, merged

if TYPE_CHECKING:
    from torch import nn

    from evener.comm.profile import StepProfile

logger = logging.getLogger("evener.comm")

# Rows are worth it where they are at most this share of what the whole takes.
_WORTH = 0.5


@dataclass
class Part:
    """One parameter that is taken apart. `expected`: rows per step, as the first one had.

    `whole`: it is not any more.
    """

    index: int
    layers: bool
    expected: int
    whole: bool = False
    # Uses in layers whose gradients have not come; and lookups, known when backward begins.
    awaited: int = 0
    looked: list[Lookup] = field(default_factory=list)
    # The weight was asked for outside of its modules, in the forward of this step.
    elsewhere: bool = False
    said: bool = False
    # This step, on this rank:
    dense: torch.Tensor | None = None
    rows: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    complete: bool = False
    sent: bool = False  # the parameter's own buckets have left
    had: bool = False  # a gradient before, which is part of what has left
    told: bool = False  # all ranks of something dense
    # And of all ranks, see `Parts.agree`:
    most: int = 0
    whole_now: bool = False

    def reset(self) -> None:
        """Expect the next step's gradients."""
        self.dense = None
        self.rows = []
        self.complete = self.sent = self.had = self.told = self.whole_now = False
        self.most = 0


@dataclass
class _Seen:
    """What a parameter's first step shows: rows looked up, when its layers' part came,
    and what has come by the uses that are watched. `other`: there are others. `accumulates`:
    something was there before."""

    rows: int = 0
    looked: list[Lookup] = field(default_factory=list)
    place: int | None = None
    dense: torch.Tensor | None = None
    other: bool = False
    accumulates: bool = False


class Owner(Protocol):
    """The reducer, as far as it matters here."""

    names: list[str]
    parameters: list[torch.nn.Parameter]
    device: torch.device
    options: Options
    communicators: Communicators
    buckets: Buckets
    arrivals: Arrivals
    own_hooks: int
    steps: int
    finish: Callable[[str], None]


class Parts:
    """Those of one reducer; empty until `watch`."""

    def __init__(self, reducer: Owner) -> None:
        self.reducer = reducer
        self.of: dict[int, Part] = {}
        # What a planner may choose from; () where none does.
        self.forms: tuple[str, ...] = ()
        self._seen: dict[int, _Seen] = {}
        self._layers: dict[int, bool] = {}
        self._handles: list[lookups.Handle] = []
        self._agreed = False
        self._question: tuple[list[Part], torch.Tensor, Any] | None = None

    def watch(self, model: nn.Module, *, layers: bool) -> None:
        """From the next forward on. The same on all ranks, before the first step.

        `layers`: take also those apart that layers share.
        """
        reducer, options = self.reducer, self.reducer.options
        if not options.rows_bytes or options.momentum or not _compressible(reducer):
            return
        places = {
            id(p): index
            for index, p in enumerate(reducer.parameters)
            if p.dim() == 2
            and p.is_contiguous()
            and p.shape[0] < 2**31
            and p.numel() * p.element_size() >= options.rows_bytes
        }
        found, name = lookups.candidates(model, places), lookups.compiled(model)
        everyone = everyones(reducer.communicators, (found, name))
        # A model may be compiled on one rank alone.
        name = next((other for _, other in everyone if other is not None), None)
        found = {i: tied for i, tied in found.items() if all(i in other for other, _ in everyone)}
        self._layers = {index: tied for index, tied in found.items() if layers or not tied}
        self._seen = {index: _Seen() for index in self._layers}
        watched = {index: reducer.parameters[index] for index in self._layers}
        if watched and name is not None:
            for index in watched:
                self._say_whole(index, f"{name or 'the model'} is compiled")
            self._layers, self._seen = {}, {}
            return
        self._handles = list(lookups.hook(model, self, watched))

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    # --- lookups.Watcher ---

    def watches(self, index: int) -> bool:
        """See `lookups.Watcher`."""
        if not self.reducer.arrivals.active or _capturing(self.reducer.device):
            return False
        part = self.of.get(index)
        return index in self._seen if part is None else not part.whole

    def used(self, index: int, lookup: Lookup | None) -> None:
        """See `lookups.Watcher`."""
        part = self.of.get(index)
        if lookups.in_backward():
            return  # what is computed again was counted
        looked = self._seen[index].looked if part is None else part.looked
        if lookup is not None:
            looked.append(lookup)
        elif part is not None:
            part.awaited += 1

    def elsewhere(self, index: int) -> None:
        """See `lookups.Watcher`."""
        if (part := self.of.get(index)) is None:
            return  # what comes in the first step shows it
        if not part.said:
            logger.info(
                "%s: its gradient is sent whole in steps in which the weight is asked for outside "
                "of its embedding and linear layers, from step %d on",
                self.reducer.names[index],
                self.reducer.steps + 1,
            )
        part.elsewhere = part.said = True

    def came(self, index: int, lookup: Lookup | None, gradient: torch.Tensor) -> bool:
        """See `lookups.Watcher`. In autograd's thread."""
        part, reducer = self.of.get(index), self.reducer
        if (
            not reducer.arrivals.active
            or gradient.layout != torch.strided
            or self._goes_whole(index)
        ):
            return False
        if part is None:
            return index in self._seen and self._see(index, lookup, gradient)
        if lookup is None:
            part.awaited = max(0, part.awaited - 1)
        if part.whole or (lookup is None and part.sent):
            return False
        self._mark(index)
        if lookup is None:
            part.dense = gradient if part.dense is None else part.dense + gradient
            # Where no lookup is known they will come by the parameter itself.
            if part.looked and not part.awaited:
                self._complete(part)
            return True
        if lookup not in part.looked:
            return False  # ranks have been told of fewer rows
        rows = lookup.rows()
        part.rows.append((rows, gradient.index_select(0, rows)))
        return True

    def _see(self, index: int, lookup: Lookup | None, gradient: torch.Tensor) -> bool:
        """The first step: as `came`."""
        seen = self._seen[index]
        if self.reducer.parameters[index].grad is not None:
            seen.accumulates = True
        if lookup is not None:
            seen.rows += lookup.rows().numel()
            seen.other |= lookup not in seen.looked
        elif seen.place is None:
            seen.place = len(self.reducer.arrivals.order)
        self._mark(index)
        seen.dense = gradient if seen.dense is None else seen.dense + gradient
        return True

    def _goes_whole(self, index: int) -> bool:
        """Whether this backward brings all of the gradient to the parameter, on this rank.

        Others have hooks on it, which should see all of it; it is to have a graph; or a part of it
        comes by a use that is not watched.
        """
        parameter, part = self.reducer.parameters[index], self.of.get(index)
        hooks = len(parameter._backward_hooks or ()) > self.reducer.own_hooks or bool(
            getattr(parameter, "_post_accumulate_grad_hooks", None)
        )
        return hooks or torch.is_grad_enabled() or (part is not None and part.elsewhere)

    # --- the course of a step ---

    def first_arrived(self, index: int) -> bool:
        """In the first step all uses have brought what they have; True: some of it was taken here.

        What the parameter then has itself came by a use that nobody watches, or before.
        """
        seen = self._seen.get(index)
        if seen is None or seen.dense is None:
            return False
        grad = self.reducer.parameters[index].grad
        seen.other |= grad is not None and not seen.accumulates
        return True

    def takes(self, index: int) -> bool:
        """Something came to the parameter itself: whether that is to be on one of the two ways."""
        part = self.of.get(index)
        if part is None or part.whole:
            return False
        self._mark(index)
        if part.sent:
            raise self._too_late(part)
        if part.layers:
            self._complete(part)
        return True

    def _mark(self, index: int) -> None:
        """A part of this gradient has come."""
        self.reducer.finish("backward while gradients or updates were on their way")
        self.reducer.arrivals.mark(index)

    def _complete(self, part: Part) -> None:
        if not part.complete:
            part.complete = True
            self.reducer.arrivals.complete(part.index)

    def begin(self) -> None:
        """With the first gradient of a step: ask how many rows there are. Does not wait."""
        parts = [part for part in self.of.values() if not part.whole]
        if self._question is not None or self._agreed or not parts:
            return
        counts = []
        for part in parts:
            rows = sum(lookup.rows().numel() for lookup in part.looked)
            before = self.reducer.parameters[part.index].grad is not None
            part.told = not part.layers and (before or self._goes_whole(part.index))
            counts.append((rows, int(part.told)))
        asked = torch.tensor(counts, dtype=torch.int64)
        control = self.reducer.communicators.control.handle
        with self._failing():
            work = dist.all_reduce(asked, dist.ReduceOp.MAX, group=control, async_op=True)
        self._question = parts, asked, work

    def agree(self) -> None:
        """At the end of backward, once a step: what there is on all ranks. Collective."""
        self.begin()
        if self._question is None:
            return
        (parts, asked, work), self._question, self._agreed = self._question, None, True
        with self._failing():
            work.wait()
        size = self.reducer.communicators.size
        for part, (most, told) in zip(parts, asked.tolist(), strict=True):
            part.awaited, part.looked, part.elsewhere = 0, [], False
            if len(part.rows) > 1:
                part.rows = [merged(part.rows)]
            many = _equivalent(most, size) >= self.reducer.parameters[part.index].shape[0]
            part.whole_now = not part.layers and bool(many or told)
            part.most = 0 if part.whole_now else most
            grad = self.reducer.parameters[part.index].grad
            if grad is not None and not part.layers and not part.whole_now:
                raise self._too_late(part)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        communicators = self.reducer.communicators
        try:
            yield
        except RuntimeError as error:
            raise CommError(
                f"rank {communicators.rank} asked its peers how many rows they have: {error}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within {communicators.waits}",
            ) from error

    def _too_late(self, part: Part) -> CommError:
        return CommError(
            f"{self.reducer.names[part.index]}: in step {self.reducer.steps + 1} a part of its "
            "gradient came by a use that could not be seen, when the rest had left",
            "use it as an attribute of its module (embedding.weight) in each forward, or set "
            "EVENER_ROWS_THRESHOLD=0, which sends embeddings whole",
        )

    def _say_whole(self, index: int, why: str) -> None:
        if self.reducer.communicators.rank == 0:
            logger.info(
                "%s: its gradient is sent whole, because %s", self.reducer.names[index], why
            )

    def sends(self, index: int) -> bool:
        """Whether the parameter's own buckets are exchanged in this step."""
        part = self.of.get(index)
        return part is None or part.layers or part.whole or part.whole_now

    def expects_none(self, bucket: Bucket) -> bool:
        """Whether this bucket is there for what does not come in an ordinary step."""
        part = self.of.get(bucket.slots[0].index)
        if part is None:
            return False
        return part.whole if bucket.by_rows else not part.layers

    def as_whole(self, profile: StepProfile) -> StepProfile | None:
        """The step if what layers share were left whole; None where nothing is shared."""
        found = list(profile.buckets)
        for part in self._shared():
            own = self.reducer.buckets.buckets_of[part.index]
            last = self.reducer.buckets[own[0]].parts[-1]
            for bucket in own:
                ready = max(found[bucket].ready_ms, found[last].ready_ms)
                found[bucket] = dataclasses.replace(found[bucket], ready_ms=ready)
            found[last] = dataclasses.replace(found[last], numel=0)
        return dataclasses.replace(profile, buckets=tuple(found)) if self._shared() else None

    def leave_whole(self) -> None:
        """From the next step on, on all ranks: what layers share is not taken apart."""
        for part in self._shared():
            part.whole = True

    def _shared(self) -> list[Part]:
        return [part for part in self.of.values() if part.layers and not part.whole]

    @property
    def watched(self) -> bool:
        """Whether `gradient` may be anything but the parameter's own."""
        return bool(self.of or self._seen)

    def gradient(self, index: int) -> torch.Tensor | None:
        """What goes into the parameter's own buckets now: they leave."""
        parameter = self.reducer.parameters[index]
        gradient, part, seen = parameter.grad, self.of.get(index), self._seen.get(index)
        if part is not None:
            # What comes later must not be added to what is under way.
            parameter.grad = None
            return _total(gradient, self._dense(part, gradient is not None))
        return gradient if seen is None else _total(gradient, seen.dense)

    def _dense(self, part: Part, had: bool) -> torch.Tensor | None:
        dense, part.dense, part.sent, part.had = part.dense, None, True, had
        if part.whole_now and part.rows:
            whole = torch.zeros_like(self.reducer.parameters[part.index])
            for rows, values in part.rows:
                whole.index_add_(0, rows, values)
            dense, part.rows = _total(whole, dense), []
        return dense

    def rows(self, part: Part) -> Rows | None:
        """What goes by rows now; None where nobody has anything."""
        if not part.most:
            return None
        if part.rows:
            return Rows(*part.rows[0], part.most)
        parameter = self.reducer.parameters[part.index].detach()
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return Rows(rows, parameter.new_empty(0, parameter.shape[1]), part.most)

    def reset(self) -> None:
        """Expect the next step's gradients."""
        self._agreed = False
        for part in self.of.values():
            part.reset()

    # --- layout ---

    def settle(self, order: list[int]) -> list[int]:
        """After the first step: decide what is taken apart. The order with that. Collective."""
        if not self._layers:
            return order
        reducer = self.reducer
        mine = {i: (seen.rows, seen.accumulates, seen.other) for i, seen in self._seen.items()}
        everyone: list[Any] = [None] * reducer.communicators.size
        dist.all_gather_object(everyone, mine, group=reducer.communicators.control.handle)
        for index, layers in sorted(self._layers.items()):
            counts, accumulated, others = zip(*(seen[index] for seen in everyone), strict=True)
            if any(others):
                self._say_whole(index, "it has uses besides embeddings and linear layers")
            elif not max(counts):
                self._say_whole(index, "no lookup was seen in the first step")
            # Accumulated, an untied one is dense in every step.
            elif (layers or not any(accumulated)) and worth(
                max(counts), len(everyone), reducer.parameters[index].shape[0]
            ):
                if (said := self._fewer_whole(index, max(counts))) is not None:
                    self._say_whole(index, said)
                else:
                    self._take_apart(index, layers, max(counts))
        places = {index: self._seen[index].place for index in self.of}
        kept = [index for index in order if places.get(index) is None]
        early = [(place, index) for index, place in places.items() if place is not None]
        for place, index in sorted(early):
            kept.insert(place, index)
        self._seen.clear()
        return kept

    def _fewer_whole(self, index: int, rows: int) -> str | None:
        """Why the parameter is not taken apart although it has few rows; None where it is."""
        communicators, parameter = self.reducer.communicators, self.reducer.parameters[index]
        options = self.reducer.options
        if parameter.numel() * parameter.element_size() < options.topk_min_bytes:
            return None  # too small for such a form
        found = fewer_whole(
            rows,
            (parameter.shape[0], parameter.shape[1]),
            communicators.size,
            communicators.route.levels.nodes,
            self.forms,
            options.ratio,
        )
        if found is None:
            return None
        form, whole, apart = found
        return (
            f"{form} may be planned for it: {whole / 1e6:.3g} MB per node and step, as rows "
            f"{apart / 1e6:.3g} MB"
        )

    def _take_apart(self, index: int, layers: bool, rows: int) -> None:
        self.of[index] = Part(index, layers, rows)
        if self.reducer.communicators.rank == 0:
            logger.info(
                "%s: %s of %s rows per step, sent as rows%s",
                self.reducer.names[index],
                f"{rows:,}",
                f"{self.reducer.parameters[index].shape[0]:,}",
                "; what the layer adds that shares it leaves before" if layers else "",
            )

    def expected(self) -> dict[int, int]:
        """By parameter the entries of the rows that are expected of one rank."""
        return {
            index: part.expected * self.reducer.parameters[index].shape[1]
            for index, part in self.of.items()
        }

    def ordered(self, sequence: Iterable[int]) -> tuple[int, ...]:
        """The same order of buckets, but each by rows behind those to which it adds, and those that
        are not sent just before it."""
        buckets, found = self.reducer.buckets, []
        left = list(sequence)
        place = {bucket: i for i, bucket in enumerate(left)}
        for part in self.of.values():
            own = self.reducer.buckets.buckets_of[part.index]
            if not own:
                continue
            last = buckets[own[0]].parts[-1]
            at = max(place[b] for b in own) if part.layers else place[last]
            found.append((max(at, place[last]), (*(() if part.layers else own), last)))
        moved = {bucket for _, group in found for bucket in group}
        behind = dict(found)
        made: list[int] = []
        for at, bucket in enumerate(left):
            if bucket not in moved:
                made.append(bucket)
            made.extend(behind.get(at, ()))
        return tuple(made)


def _compressible(reducer: Owner) -> bool:
    """Whether gradients cross a network, and not only the largest of them."""
    nodes = reducer.communicators.route.levels.nodes
    return nodes > 1 and not wires.get(reducer.options.wire).late


def worth(rows: int, ranks: int, limit: int) -> bool:
    """Whether this many rows of each rank, of `limit` in all, are to be sent as rows."""
    return _equivalent(rows, ranks) <= _WORTH * limit


def fewer_whole(
    rows: int, shape: tuple[int, int], ranks: int, nodes: int, forms: Iterable[str], ratio: float
) -> tuple[str, float, float] | None:
    """The form in which a gradient of `shape` takes far fewer bytes than its rows in any form.

    Only forms that send a gradient over many steps do. With it the bytes that a node sends per
    step, whole and as rows; None where there is no such form. `rows`: of one rank. `ratio`: the
    share of entries that top-k sends.
    """
    numel = shape[0] * shape[1]
    whole = {
        form: wires.get(form).paper(ratio).sent(4.0 * numel, nodes)
        for form in forms
        if wires.get(form).late
    }
    if not whole:
        return None
    values = min(
        wires.get(wires.get(form).rows_as).rows_bytes(rows * shape[1], torch.float32)
        for form in forms
    )
    apart = (ranks - ranks / nodes) * (4 * rows + values)
    form = min(whole, key=whole.__getitem__)
    return (form, whole[form], apart) if whole[form] <= _WORTH * apart else None


def _total(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Their sum, in the memory of the first where it may be changed."""
    if one is None or other is None:
        return other if one is None else one
    with torch.no_grad():
        return one + other if one.requires_grad else one.add_(other)


def _equivalent(rows: int, ranks: int) -> int:
    """The all-reduce of this many rows sends as many bytes between nodes as all ranks' rows."""
    return -(-rows * ranks // 2)


def _capturing(device: Any) -> bool:
    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())
