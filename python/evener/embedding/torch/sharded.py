"""A table that lies on all ranks: keys go to their owners, values come back, gradients follow.

Each key has one owner, by a hash. A `Stage` is one hop: it sends every key of this rank once to the
rank of its group that the key's hash names, and what arrives from all peers, each key once again,
goes on to what is below: another stage, or the rows of this rank. Values take the same way back;
gradients take it forth, and are summed at each stage in the order of ranks, so the sum is the same
in every run.

Between hosts of several ranks there are two stages. The first stays inside the host, and brings the
same key of all its ranks together; the second crosses the network, where each key of a host goes
once. Groups and hosts come from `evener.comm`. Its transports move equal parts, and parts here are
as long as the keys happen to be, so NCCL or Gloo carries them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evener.comm.groups import Communicators
from evener.comm.options import Options as CommOptions
from evener.embedding.torch.forms import Form, decode, encode
from evener.embedding.torch.rows import Rows
from evener.embedding.torch.traffic import Traffic
from evener.embedding.torch.waiting import add_rows

# 2^64 / golden ratio and another odd number, as signed int64: multiplication wraps on every device.
_MIX = (-7046029254386353131, -4417276706812531889)


def hashes(keys: torch.Tensor) -> torch.Tensor:
    """int64 [n], at least 0, well spread, the same on every device and in every process."""
    mixed = keys * _MIX[0]
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MIX[1]
    return (mixed >> 17) & 0x7FFFFFFF


@dataclass(frozen=True)
class Way:
    """How the keys of one lookup went, for the values to come back and gradients to follow."""

    keys: torch.Tensor  # as asked for
    order: torch.Tensor  # positions of `keys`, by peer
    sent: list[int]  # how many to each peer
    came: list[int]  # how many from each
    place: torch.Tensor  # of each that came, in the keys that went on
    below: Any


class Below(Protocol):
    """What a stage asks. Keys are given once each."""

    def route(self, keys: torch.Tensor, step: int | None) -> Any:
        """Take keys there. `step` is None for inference."""

    def values(self, way: Any) -> torch.Tensor:
        """[n, dim], float32."""

    def give(self, way: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take gradients [n, dim] to the owners; (keys, sums) of what this rank owns."""


class Here:
    """The bottom: the rows of this rank."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def route(self, keys: torch.Tensor, step: int | None) -> tuple[torch.Tensor, int | None]:
        return keys, step

    def values(self, way: tuple[torch.Tensor, int | None]) -> torch.Tensor:
        keys, step = way
        return self.rows.peek(keys) if step is None else self.rows.read(keys, step)

    def give(
        self, way: tuple[torch.Tensor, int | None], gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return way[0], gradients


class Stage:
    """One hop; see the head of this file.

    `stride`: a key of hash h goes to rank h // stride % size of `group`. `remote`: for each rank of
    the group, whether it is on another host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        stride: int,
        below: Below,
        dim: int,
        forms: tuple[Form, Form],
        traffic: Traffic,
        remote: list[bool],
    ) -> None:
        self.group, self.rank, self.stride = group, rank, stride
        self.below, self.dim, self.forms = below, dim, forms
        self.traffic, self.remote, self.size = traffic, remote, len(remote)

    def _move(self, data: torch.Tensor, sent: list[int], came: list[int], what: str) -> Any:
        """All-to-all of rows: `sent[r]` of `data` to rank r, `came[r]` from it."""
        received = data.new_empty(sum(came), *data.shape[1:])
        dist.all_to_all_single(received, data.contiguous(), came, sent, group=self.group)
        width = data[:1].numel() * data.element_size() if data.ndim > 1 else data.element_size()
        for peer, (n, remote) in enumerate(zip(sent, self.remote, strict=True)):
            if peer != self.rank:
                self.traffic.count(what if remote else "inside", n * width)
        return received

    def route(self, keys: torch.Tensor, step: int | None) -> Way:
        to = hashes(keys) // self.stride % self.size
        order = torch.argsort(to, stable=True)
        counts = torch.bincount(to, minlength=self.size)
        ones = [1] * self.size
        came = self._move(counts, ones, ones, "counts").tolist()
        sent = counts.tolist()
        arrived = self._move(keys[order], sent, came, "keys")
        unique, place = torch.unique(arrived, return_inverse=True)
        return Way(keys, order, sent, came, place, self.below.route(unique, step))

    def values(self, way: Way) -> torch.Tensor:
        found = self.below.values(way.below)[way.place]
        form = self.forms[0]
        back = self._move(encode(found, form), way.came, way.sent, "values")
        values = torch.empty(len(way.keys), self.dim, device=back.device)
        values[way.order] = decode(back, form, self.dim)
        return values

    def give(self, way: Way, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.forms[1]
        ordered = encode(gradients[way.order], form)
        arrived = decode(self._move(ordered, way.sent, way.came, "gradients"), form, self.dim)
        keys = way.below.keys if isinstance(way.below, Way) else way.below[0]
        return self.below.give(way.below, add_rows(arrived, way.place, len(keys)))


class Sharded:
    """A table over the ranks of `group` (default: all); collective, in the same order on all.

    `forms`: of values and of gradients, where they cross between hosts. Inside a host both go as
    they are.
    """

    def __init__(
        self,
        rows: Rows,
        dim: int,
        forms: tuple[Form, Form],
        traffic: Traffic,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rows, self.dim, self.traffic = rows, dim, traffic
        # "nccl" is the collective library, whichever it is: on CPUs Gloo.
        self._groups = Communicators(CommOptions(outer="nccl"), rows.device, group)
        self.rank, self.size = self._groups.rank, self._groups.size
        route, hosts = self._groups.route, self._groups.hosts
        if route.levels.uneven:  # owners of keys are counted by inner groups of one size
            route = self._groups.flat()
        inner, mine = route.levels.inner, hosts[self.rank]
        remote = [hosts[place] != mine for place in route.levels.outer]
        exact: tuple[Form, Form] = ("exact", "exact")
        self.first = Stage(
            route.outer.handle,
            route.outer.rank,
            len(inner),
            Here(rows),
            dim,
            forms if any(remote) else exact,
            traffic,
            remote,
        )
        if route.scatter is not None:
            group, rank = route.scatter.handle, route.scatter.rank
            near = [False] * len(inner)
            self.first = Stage(group, rank, 1, self.first, dim, exact, traffic, near)
        self.hosts, self._levels = route.levels.nodes, route.levels

    def owner(self, keys: torch.Tensor) -> torch.Tensor:
        """The rank of each key, by the number that `place` gives this rank."""
        return hashes(keys) % self.size

    @property
    def place(self) -> int:
        """The number of this rank among owners: `owner(key) == place` where the key is here."""
        levels = self._levels
        inner = levels.inner.index(self.rank)
        return levels.outer.index(self.rank) * len(levels.inner) + inner

    def largest(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        told = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._groups.control.handle)
        return float(told)

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gave, in the order of `place`."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.place, data), group=self._groups.control.handle)
        return [part for _, part in sorted(found, key=lambda each: int(each[0]))]

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' numbers (float64, on the CPU)."""
        numbers = numbers.clone()
        dist.all_reduce(numbers, group=self._groups.control.handle)
        return numbers
