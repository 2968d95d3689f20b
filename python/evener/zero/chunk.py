"""A chunk: the parameters of one unit and one optimizer group in one flat buffer.

This rank holds 1/N of the chunk's weights, gradient and optimizer states, in host memory or (where
the plan says so) on the accelerator. The whole weights exist on the accelerator between `load` and
`free`, in a buffer whose storage is emptied and filled again: views that autograd saved in the
forward pass (`weight.t()` of a linear layer) share the storage, so they are right again when the
backward pass has it filled. While it is empty, parameters are views of one NaN with the right
shape: whoever reads them gets NaN and no crash.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from evener.zero import weight
from evener.zero.device import Event
from evener.zero.ssd import Away
from evener.zero.states import BLOCK, SCALE, States, cut, decode, encode, part, stride
from evener.zero.units import Group


@dataclass(frozen=True)
class Run:
    """Elements [begin, end) of a rank's share that take their `step`-th optimizer step."""

    begin: int
    end: int
    step: int
    shape: torch.Size | None = None
    """The parameter's shape, if the rule updates it as a whole; the run is what this rank has."""
    place: int = 0
    """Then also its place in the chunk."""


@dataclass
class Chunk:
    """See the head of this file. `index`: its place in the model, and its random stream."""

    index: int
    group: Group
    states: States
    gradient: torch.Tensor | None
    flat: torch.Tensor
    resident: bool
    keeps: bool
    """The weights stay on the accelerator even where the states are on the host."""
    placeholder: torch.Tensor
    stays: bool = False
    """`keeps` wherever the states go: the weights are read while their unit does not run."""
    loaded: bool = False
    requested: bool = False
    stale: bool = True
    filled: bool = False
    """`gradient` holds something since the last step."""
    touched: bool = False
    ahead: bool = False
    """Updated in the backward pass, before the step (see `in_backward`)."""
    gradient_buffer: torch.Tensor | None = None
    """What `gradient` is a view of then."""
    crossed: bool = False
    """`gradient` holds the mean of all copies (see `ranks`)."""
    norms: torch.Tensor | None = None
    given: set[int] = field(default_factory=set)
    """Places of the parameters that have had a gradient since the last step, on this rank."""
    steps: list[int] = field(default_factory=list)
    """Optimizer steps of each parameter: one without a gradient takes none, as in torch."""
    away: Away | None = None
    """The states that are on the SSD; `states` lacks them."""
    gradient_event: Event | None = None
    load_event: Event | None = None
    owed: torch.Tensor | None = None
    """What the form in which gradients cross between nodes has not sent yet (see `form`)."""
    owed_event: Event | None = None
    updated_event: Event | None = None
    """On the accelerator, the end of an update that the streaming lane did."""
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    updated: threading.Event = field(default_factory=threading.Event)
    saved: threading.Event = field(default_factory=threading.Event)
    """Clear while a checkpoint has still to read the states: nobody writes them then."""
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.updated.set()
        self.saved.set()
        self.bytes = self.flat.numel() * self.flat.element_size()
        self.steps = self.steps or [0] * len(self.group.pieces)
        for place, piece in enumerate(self.group.pieces):
            weight.take(piece.parameter, self, place, piece.name)

    def begin_step(self, moving: set[int], rank: int) -> list[Run]:
        """Count a step of the parameters at the places `moving`: what of this rank's share is
        updated. Neighbours of one count are one run: mostly that is all of it."""
        for place in moving:
            self.steps[place] += 1
        pieces, share = self.group.pieces, self.states.weights.numel()
        starts = [piece.offset for piece in pieces] + [self.flat.numel()]
        runs: list[Run] = []
        for place in sorted(moving):
            # With the padding behind it: it is zero, and stays so. A matrix comes without.
            piece, whole = pieces[place], self.group.rule.whole
            end = piece.offset + piece.numel if whole else starts[place + 1]
            low = max(starts[place] - rank * share, 0)
            high = min(end - rank * share, share)
            if low >= high:
                continue
            if whole:
                runs.append(Run(low, high, self.steps[place], piece.shape, place))
                continue
            last = runs[-1] if runs else None
            if last is not None and last.end == low and last.step == self.steps[place]:
                runs[-1] = Run(last.begin, high, last.step)
            else:
                runs.append(Run(low, high, self.steps[place]))
        return runs

    def formats(self) -> dict[str, torch.dtype]:
        """All states that there are, wherever they are, by name."""
        found = {name: tensor.dtype for name, tensor in self.states.tensors().items()}
        if self.away is not None:
            found |= {name: self.away.dtype(name) for name in self.away.names}
        return found

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """What there is of one of the states for elements [begin, end): a view, or a copy of what
        is on the SSD."""
        if self.away is not None and name in self.away.names:
            return self.away.read(name, begin, end)
        return cut(name, self.states.tensors()[name], begin, end)

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Set elements of one of the states, from `begin` on."""
        if self.away is not None and name in self.away.names:
            self.away.write(name, begin, values.to("cpu", self.away.dtype(name)))
        else:
            first = begin // stride(name)
            self.states.tensors()[name][first : first + values.numel()].copy_(values)

    def read_moment(self, name: str, begin: int, end: int) -> torch.Tensor:
        """A moment in its own dtype, or as float32 where it is kept in codes; as `read`."""
        if not self.coded(name):
            return self.read(name, begin, end)
        last = -(-end // BLOCK) * BLOCK
        codes, scales = self.read(name, begin, last), self.read(name + SCALE, begin, last)
        return decode(name, codes, scales)[: end - begin]

    def write_moment(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Set a moment from element `begin` on; codes are of the nearest numbers, and `values` are
        all of a parameter's that this rank has."""
        if not self.coded(name):
            self.write(name, begin, values)
            return
        whole = functional.pad(values.float(), (0, -values.numel() % BLOCK))
        codes, scales = encode(name, whole)
        self.write(name, begin, codes)
        self.write(name + SCALE, begin, scales)

    def coded(self, name: str) -> bool:
        """Whether a moment is kept in codes of one byte."""
        return name + SCALE in self.states.tensors()

    def full(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The float32 weights of elements [begin, end) of this share, or what is stored of a
        frozen chunk: a copy where they are not stored so."""
        end = self.states.weights.numel() if end is None else end
        inside = part(self.states, begin, end)
        if not self.group.trainable:
            return inside.weights
        if self.away is None:
            return inside.full()
        if "lower" in self.away.names:
            inside.lower = self.away.read("lower", begin, end)
        elif "master" in self.away.names:
            return self.away.read("master", begin, end)
        return inside.full()

    def store(self, begin: int, values: torch.Tensor) -> None:
        """Set the float32 weights from element `begin` on; `values` where the weights are."""
        inside = part(self.states, begin, begin + values.numel())
        if self.away is None:
            inside.store(values)
            return
        if "lower" in self.away.names:
            inside.lower = torch.empty(values.numel(), dtype=torch.int16)
        elif "master" in self.away.names:
            inside.master = torch.empty(values.numel())
        inside.store(values.cpu())
        for name in ("lower", "master"):
            if name in self.away.names:
                self.away.write(name, begin, inside.tensors()[name])

    def bind(self) -> None:
        """Parameters become views of the flat buffer."""
        for piece in self.group.pieces:
            end = piece.offset + piece.numel
            weight.lend(piece.parameter)
            piece.parameter.data = self.flat[piece.offset : end].view(piece.shape)

    def unbind(self) -> None:
        """Parameters become NaN without memory."""
        for piece in self.group.pieces:
            weight.lend(piece.parameter)
            piece.parameter.data = self.placeholder.expand(piece.shape)
        self.guard()

    def guard(self) -> None:
        """Who computes with the parameters now would take values of before the last step."""
        for piece in self.group.pieces:
            weight.away(piece.parameter)

    def refresh(self) -> None:
        """The states were written: what is on the accelerator is old, unless it is the states."""
        if not (self.keeps and self.states.weights.data_ptr() == self.flat.data_ptr()):
            self.stale, self.loaded = True, False
            self.guard()

    def allocate(self) -> None:
        """Room for the whole weights."""
        self.flat.untyped_storage().resize_(self.bytes)

    def empty(self) -> None:
        """Give the room back."""
        self.flat.untyped_storage().resize_(0)
