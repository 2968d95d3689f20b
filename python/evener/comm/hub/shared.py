"""The shared weights of nodes, the outer step, and the forms in which changes travel.

Everything lies in flat float32 tensors on the CPU: first what a lossy form may round (matrices),
then the rest (norms and biases), padded; buffers with floating values (batch norm's) apart. Hub and
nodes make the same outer step from the same bytes. It is written without an operation that a
processor could fuse: then it gives the same bits on every machine, and the digests say so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from evener.comm import drift, wires
from evener.comm.buckets import padded
from evener.comm.codecs import casts, int8
from evener.comm.fragments import digest
from evener.comm.hub.membership import Claim
from evener.comm.wires.blocks import BlockWire
from evener.errors import UsageError

_LINE = 32


@dataclass(frozen=True)
class Sizes:
    """Entries: `large` ones that a form may round, `small` ones that it may not, `buffers`."""

    large: int
    small: int
    buffers: int

    @property
    def weights(self) -> int:
        """Entries of the flat weights, padded so that digests have whole lines."""
        return padded(self.large + self.small, _LINE)

    @property
    def state(self) -> int:
        """Bytes of weights, momentum and buffers."""
        return 4 * (2 * self.weights + self.buffers)


@dataclass(frozen=True)
class Outer:
    """The outer step: SGD with Nesterov momentum."""

    lr: float
    momentum: float


class Shared:
    """Weights, momentum and buffers after `round` exchanges and `steps` steps."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.round = self.steps = 0
        self._all = torch.zeros(sizes.state // 4)
        n = sizes.weights
        self.weights, self.momentum = self._all[:n], self._all[n : 2 * n]
        self.buffers = self._all[2 * n :]

    def step(self, mean: torch.Tensor, buffers: torch.Tensor, outer: Outer) -> None:
        """Move by the mean change [weights], which is used up; `buffers`: the mean of all."""
        if outer.momentum:
            self.momentum.mul_(outer.momentum).add_(mean)
            mean.add_(self.momentum.mul(outer.momentum))
        self.weights.sub_(mean.mul_(outer.lr))
        self.buffers.copy_(buffers)
        self.round += 1

    @property
    def claim(self) -> Claim:
        """What others compare. Buffers follow from the same bytes, and are in no digest."""
        return Claim(self.round, digest([self.weights, self.momentum]))

    def raw(self) -> memoryview:
        """Its bytes, as they are until the next step."""
        return self._all.numpy().data.cast("B")

    def fill(self, raw: bytearray, round_: int, steps: int) -> None:
        """Take another one's bytes. Raises ValueError where they are not as many."""
        self._all.copy_(torch.frombuffer(raw, dtype=torch.float32))
        self.round, self.steps = round_, steps


class Form:
    """How a change [weights] is written, with buffers behind it. `name`: one of `FORMS`."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        """Raises UsageError for a form that does not travel to a hub."""
        if name not in FORMS:
            raise UsageError(
                f"nodes that come and go do not send {name}", f"give one of {', '.join(FORMS)}"
            )
        self.name, self.sizes = name, sizes
        found = wires.get(name)
        self._blocks = found if issubclass(found, BlockWire) else None
        self._cast = found.cast
        large = 4 * sizes.large
        if self._blocks is not None:
            self._room = self._blocks.room(sizes.large)
            large = self._blocks.size(self._room)
        elif self._cast is not None:
            large = padded(self._cast.itemsize * sizes.large, 4)
        self._large = large
        self.size = large + 4 * (sizes.weights - sizes.large + sizes.buffers)

    @property
    def feedback(self) -> bool:
        """Whether what it rounds away is kept, and sent in a later round."""
        return self._blocks is not None

    def write(
        self,
        change: torch.Tensor,
        buffers: torch.Tensor,
        residual: torch.Tensor | None,
        key: Sequence[int],
    ) -> memoryview:
        """The bytes; `residual` [large] keeps what they leave out. `key`: for chance."""
        raw = torch.zeros(self.size, dtype=torch.uint8)
        large, rest = change[: self.sizes.large], change[self.sizes.large :]
        head = raw[: self._large]
        if self._blocks is not None:
            codes, scales = self._blocks.views(head.unsqueeze(0), self._room)
            self._blocks.quantize(large, residual, codes[0], scales[0], int8.key(*key))
        elif self._cast is not None:
            narrow = head.view(self._cast)[: self.sizes.large]
            casts.narrow(large, 1.0, narrow)
        else:
            head.view(torch.float32).copy_(large)
        torch.cat([rest, buffers], out=raw[self._large :].view(torch.float32))
        return raw.numpy().data

    def read(self, raw: bytearray | memoryview) -> tuple[torch.Tensor, torch.Tensor]:
        """Change [weights] and buffers."""
        found = torch.frombuffer(raw, dtype=torch.uint8)
        change = torch.empty(self.sizes.weights)
        large = change[: self.sizes.large]
        head = found[: self._large]
        if self._blocks is not None:
            codes, scales = self._blocks.views(head.unsqueeze(0), self._room)
            self._blocks.add_up(codes, scales, 1.0, large)
        elif self._cast is not None:
            casts.widen(head.view(self._cast)[: self.sizes.large], 1.0, large)
        else:
            large.copy_(head.view(torch.float32))
        rest = found[self._large :].view(torch.float32)
        small = self.sizes.weights - self.sizes.large
        change[self.sizes.large :].copy_(rest[:small])
        return change, rest[small:].clone()


FORMS = ("exact", "bf16", "fp16", "int8", "int4")


def average(
    form: Form, brought: Iterable[tuple[bytearray, int]]
) -> tuple[torch.Tensor, torch.Tensor, list[int], float | None]:
    """The mean of changes, and of buffers, weighted by the steps that each took, in their order.

    Also the places of those that are not finite, which are left out, and the drift of the others
    (`evener.comm.drift`), weighted in the same way.
    """
    total, buffers = torch.zeros(form.sizes.weights), torch.zeros(form.sizes.buffers)
    steps, left, squares = 0, list[int](), 0.0
    for place, (raw, taken) in enumerate(brought):
        change, values = form.read(raw)
        if not bool(change.isfinite().all()):
            left.append(place)
            continue
        squares += taken * float(change.square().sum())
        total.add_(change.mul_(taken))
        buffers.add_(values.mul_(taken))
        steps += taken
    if steps:
        total.div_(steps)
        buffers.div_(steps)
        squares /= steps
    return total, buffers, left, drift.of([squares], float(total.square().sum()))


def job_of(
    names: Sequence[str], parameters: Sequence[torch.Tensor], buffers: Sequence[str], **more: object
) -> list[list[str]]:
    """What must be equal on all nodes: (what, how), in the order of comparison."""
    said = [[name, str(value)] for name, value in more.items()]
    said.append(["number of parameters", str(len(names))])
    for name, parameter in zip(names, parameters, strict=True):
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        said.append([f"parameter {name}", f"{parameter.dtype} {shape}"])
    said.append(["buffers", f"{len(buffers)}, {zlib.crc32(' '.join(buffers).encode()):08x}"])
    return said


def difference(hubs: list[list[str]], nodes: list[list[str]]) -> str:
    """In words, where a node's job is another one than the hub's; "" where it is the same."""
    for (what, there), (mine, here) in zip(hubs, nodes, strict=False):
        if (what, there) != (mine, here):
            if what == mine:
                return f"the other nodes have {what} = {there}, this one has {here}"
            return f"the other nodes have {what}, this one has {mine}"
    return "" if len(hubs) == len(nodes) else "its model has other parameters"
