"""Faults that the twin of nodes must find: what Evener would do with each of them in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from evener.comm.hub import server, shared
from evener.comm.hub.membership import Claim, Membership
from evener.comm.hub.rounds import NodeRounds
from evener.comm.hub.shared import Form, Shared


def _put(target: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(target, name, value)


def _heavy_ball(self: Any, mean: Any, buffers: Any, outer: Any) -> None:
    self.momentum.mul_(outer.momentum).add_(mean)
    self.weights.sub_(self.momentum.mul(outer.lr) if outer.momentum else mean.mul_(outer.lr))
    self.buffers.copy_(buffers)
    self.round += 1


def _alike(form: Any, brought: Any, average: Any = shared.average) -> Any:
    return average(form, [(raw, 1) for raw, _ in brought])


def _any_order(form: Any, brought: Any, average: Any = shared.average) -> Any:
    return average(form, list(brought)[::-1])


def _first_buffers(form: Any, brought: Any, average: Any = shared.average) -> Any:
    brought = list(brought)
    mean, _, *more = average(form, brought)
    return mean, form.read(brought[0][0])[1], *more


def _forgets(self: Any, member: Any) -> None:
    del self.members[member.number]
    member.place = "gone"


def _twice(self: Any, number: int, *given: Any, brings: Any = Membership.brings) -> bool:
    left = dict(self.left)
    counted = bool(brings(self, number, *given))
    self.left.update(left)
    return counted


def _without_residual(
    self: Any, change: Any, buffers: Any, residual: Any, key: Any, write: Any = Form.write
) -> Any:
    found = write(self, change, buffers, residual, key)
    if residual is not None:
        residual.zero_()
    return found


def _still_counts(self: Any, event: Any, take: Any = NodeRounds._take) -> None:
    since = self.since
    take(self, event)
    self.since = since


def _kept_back(self: Any, event: Any, take: Any = NodeRounds._take) -> None:
    residual = None if self._residual is None else self._residual.clone()
    take(self, event)
    if residual is not None:
        self._residual.copy_(residual)


def _forgets_the_way(self: Any, sent: Any = None, moved: Any = NodeRounds._moved) -> None:
    since = self.since
    moved(self)
    if sent is not None:
        self.since, self.steps = since, self.steps + since


def _a_step_late(self: Any, after_step: Any = NodeRounds._after_step) -> None:
    self.overlap += bool(self.overlap)
    after_step(self)
    self.overlap -= bool(self.overlap)


def _counts_again(self: Any, depart: Any = NodeRounds._depart) -> None:
    since = self.since
    depart(self)
    self.since = since


FAULTS: dict[str, Callable[[], Any]] = {
    "momentum is not Nesterov's": _put(Shared, "step", _heavy_ball),
    "all changes count alike": _put(server, "average", _alike),
    "changes are added in another order": _put(server, "average", _any_order),
    "buffers are one node's": _put(server, "average", _first_buffers),
    "a dead node's change is forgotten": _put(Membership, "_goes", _forgets),
    "a change that comes again counts twice": _put(Membership, "brings", _twice),
    "digests are not compared": _put(Shared, "claim", property(lambda self: Claim(self.round, 0))),
    "what rounding left out is forgotten": _put(Form, "write", _without_residual),
    "steps before a return count": _put(NodeRounds, "_take", _still_counts),
    "what rounding left out outlives a return": _put(NodeRounds, "_take", _kept_back),
    "steps behind an exchange are forgotten": _put(NodeRounds, "_moved", _forgets_the_way),
    "an exchange lands a step late": _put(NodeRounds, "_after_step", _a_step_late),
    "steps that were sent count again": _put(NodeRounds, "_depart", _counts_again),
}
