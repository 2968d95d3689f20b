"""Nodes that go on while an exchange is on its way. The twin is `tests/twins/nodes.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import worlds
from tests.hubs import OUTER, LiveHub, Node, together, until


class Plain:
    """The shared weights by the formula, of nodes that all take part, in float32."""

    def __init__(self, weights: torch.Tensor, nodes: int) -> None:
        self.shared, self.momentum = weights.clone(), torch.zeros_like(weights)
        self.own = [weights.clone() for _ in range(nodes)]
        self.sent = [(weights.clone(), 0)] * nodes
        self.since = [0] * nodes

    def step(self, node: int, by: float) -> None:
        self.own[node].add_(by)
        self.since[node] += 1

    def send(self, node: int) -> None:
        self.sent[node] = self.own[node].clone(), self.since[node]
        self.since[node] = 0

    def close(self) -> None:
        mean = torch.zeros_like(self.shared)
        for weights, steps in self.sent:
            mean += (self.shared - weights) * steps
        mean /= sum(steps for _, steps in self.sent)
        lr, mu = OUTER["outer_lr"], OUTER["outer_momentum"]
        self.momentum = mu * self.momentum + mean
        self.shared = self.shared - lr * (mean + mu * self.momentum)

    def land(self, node: int) -> None:
        since = self.own[node] - self.sent[node][0]
        self.own[node] = since + self.shared if self.since[node] else self.shared.clone()


def weights(node: Node) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in node.net.parameters()]).clone()


def called(node: Node) -> bool:
    link: Any = node.rounds._link
    return bool(link.called == node.rounds._shared.round)


def hears(node: Node) -> None:
    """As at the end of a step."""
    node.rounds._lead(node.rounds._handle)


def two(hub: LiveHub, **how: Any) -> tuple[Node, Node]:
    """Both begin with the same weights."""
    a, b = Node(hub, "a", 1, **how), Node(hub, "b", 1, **how)
    together(a.begin, b.begin)
    for node in (a, b):
        node.step(0.0)
        until(lambda n=node: (hears(n), n.rounds._entered == 1)[1], "it is in, and knows it")
    return a, b


def steps_behind_an_exchange_count_once() -> None:
    hub = LiveHub(least=2)
    try:
        a, b = two(hub, every=4, overlap=2)
        plain = Plain(weights(a), 2)
        plain.since = [1, 1]
        for step in range(2, 12):  # sent after steps 4, 8; landed after 6, 10
            for which, by in enumerate((0.01, -0.02)):
                plain.step(which, by)
                if step in (4, 8):
                    plain.send(which)
            if step in (6, 10):
                plain.close()
                plain.land(0)
                plain.land(1)
            a.step(0.01)
            b.step(-0.02)
            for which, node in enumerate((a, b)):
                assert torch.equal(weights(node), plain.own[which]), (step, which)
                assert node.rounds.since == plain.since[which]
                assert node.rounds.steps == step and node.rounds.rounds == (step - 2) // 4
        assert a.bits() != b.bits()
        together(a.rounds.end_round, b.rounds.end_round)
        assert a.bits() == b.bits() and a.rounds.rounds == 3 and a.rounds.since == 0
        assert hub.hub._averaged == 22
    finally:
        hub.stop()


def a_slow_node_lands_when_it_is_called() -> None:
    hub = LiveHub(least=2)
    try:
        a, b = two(hub, every=4, overlap=3)
        plain = Plain(weights(a), 2)
        plain.since = [1, 1]
        for _ in range(3):
            a.step()
            plain.step(0, 0.01)
        until(lambda: called(b), "b is called")
        b.step()
        plain.step(1, 0.01)
        for which in range(2):
            plain.send(which)
        plain.close()
        until(lambda: hub.membership.shared.round == 1, "the round ends")
        for step in range(4):
            a.step()
            plain.step(0, 0.01)
            if step == 2:
                plain.land(0)
        until(lambda: (hears(b), called(b))[1], "b is called again")
        b.step(0.02)  # its first one since it sent
        plain.step(1, 0.02)
        plain.land(1)
        for which, node in enumerate((a, b)):
            assert torch.equal(weights(node), plain.own[which])
            plain.send(which)
        until(lambda: hub.membership.shared.round == 2, "b holds nobody up")
        plain.close()
        together(a.rounds.land, b.rounds.land)
        assert torch.equal(weights(a), plain.shared) and a.bits() == b.bits()
        assert hub.hub._averaged == 4 + 2 + 4 + 1
    finally:
        hub.stop()


def a_hub_dies_with_a_change_on_its_way() -> None:
    hub = LiveHub(least=2)
    a, b = two(hub, every=3, overlap=2)
    for _ in range(2):
        a.step()
    until(lambda: any(m.brought for m in hub.membership.members.values()), "a's change is there")
    hub.stop()
    a.step()  # nobody waits for a hub
    again = LiveHub(least=2, port=hub.port)
    try:
        b.step(0.5)
        b.step(0.5)  # a change for a hub that knows none yet
        together(a.rounds.end_round, b.rounds.end_round)
        assert a.bits() == b.bits()
        assert again.hub._averaged == 4 + 3, "each step counts once"
    finally:
        again.stop()


def who_leaves_with_a_change_on_its_way_has_counted() -> None:
    hub = LiveHub(least=2)
    try:
        a, b = two(hub, every=3, overlap=2)
        for _ in range(2):
            a.step(0.5)
        a.rounds.close()
        until(lambda: called(b), "b is called")
        for _ in range(3):
            b.step()
        assert hub.hub._averaged == 3 + 2 and b.rounds.rounds == 1 and b.rounds.since == 2
    finally:
        hub.stop()


def a_state_is_loaded_behind_an_exchange() -> None:
    hub = LiveHub(least=2)
    try:
        a, b = two(hub, every=3, overlap=2)
        for _ in range(2):
            a.step(0.5)
            b.step()
        before = a.rounds.state_dict()
        assert a.rounds._flight is not None and before["shared"].keys() == {*a.rounds.names}
        a.rounds.load_state_dict(before)  # its change counts, and the hub is further than this
        assert a.rounds.rounds == 1 and a.rounds.since == 0
        b.rounds.land()
        assert a.bits() == b.bits()
    finally:
        hub.stop()


def other_weights_over_the_same_connection() -> None:
    hub = LiveHub()
    try:
        a, b = Node(hub, "a", 1), Node(hub, "b", 2)
        a.begin()
        a.step()  # it is in
        b.rounds._shared.round = 1  # as if the hub that is gone had ended a round
        b.begin()
        until(lambda: hub.membership.shared.round == 1, "b's weights are the shared ones")
        until(lambda: (a.step(), a.rounds.rounds == 1)[1], "a takes them")
        a.step()
        b.step()
        together(a.rounds.exchange, b.rounds.exchange)
        assert a.bits() == b.bits() and hub.hub._averaged == 2
    finally:
        hub.stop()


def who_enters_late_is_called() -> None:
    hub = LiveHub()
    try:
        a, b = two(hub, every=10**6)
        c = Node(hub, "c", every=10**6)

        def comes() -> None:
            c.begin()
            until(lambda: (c.step(0.0), bool(c.rounds.rounds))[1], "c is called, too")

        threads = [threading.Thread(target=act) for act in (a.rounds.exchange, comes)]
        threads[0].start()
        until(lambda: called(b), "the others are called")
        threads[1].start()
        until(lambda: len(hub.membership.inside) == 3, "c is in")
        b.rounds.exchange()
        for thread in threads:
            thread.join()
        assert a.bits() == b.bits() == c.bits() and hub.hub._averaged >= 3
    finally:
        hub.stop()


def a_guest_hears_of_rounds_that_end_before_its_first_step(said: bool) -> None:
    """It downloads the weights once, however long that takes. `said`: that it has taken a step,
    while the average is on its way to it.
    """
    hub = LiveHub()
    try:
        a, b = two(hub, every=10**6)
        c = Node(hub, "c", 5, every=10**6)
        c.begin()
        link: Any = c.rounds._link
        whole, each = link.received, c.rounds._form.size
        for round_ in (1, 2):
            a.step(0.01)
            b.step(-0.02)
            together(a.rounds.exchange, b.rounds.exchange)
            until(lambda n=round_: link.received == whole + n * each, "the average is there")
        if said:
            events = [link.events.get() for _ in range(2)]
            c.rounds.since = 1
            c.rounds._say()
            until(lambda: hub.call(lambda: hub.membership.members[3].place) == "guest", "passed")
            for event in events:
                link.events.put(event)
        until(lambda: (c.step(0.0), c.rounds._entered == link.session)[1], "it is in")
        assert link.received == whole + 2 * each
        together(a.rounds.exchange, b.rounds.exchange, c.rounds.exchange)
        assert a.bits() == b.bits() == c.bits() and a.rounds.rounds == 3
    finally:
        hub.stop()


def a_guest_that_is_quiet() -> None:
    a_guest_hears_of_rounds_that_end_before_its_first_step(said=False)


def a_guest_that_said_so_too_early() -> None:
    a_guest_hears_of_rounds_that_end_before_its_first_step(said=True)


def _run(_rank: int, _size: int, function: str) -> None:
    globals()[function]()


@pytest.mark.parametrize(
    "case",
    [
        steps_behind_an_exchange_count_once,
        a_slow_node_lands_when_it_is_called,
        a_hub_dies_with_a_change_on_its_way,
        who_leaves_with_a_change_on_its_way_has_counted,
        a_state_is_loaded_behind_an_exchange,
        other_weights_over_the_same_connection,
        who_enters_late_is_called,
        a_guest_that_is_quiet,
        a_guest_that_said_so_too_early,
    ],
    ids=lambda case: case.__name__,
)
def test_nodes(case: Callable[[], None]) -> None:
    worlds.run([1], _run, case.__name__, timeout=120)
