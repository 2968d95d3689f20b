"""Cards that come up while a job runs, addresses that change: TCP uses them without a restart."""

from collections.abc import Callable
from time import monotonic, sleep

import pytest

from evener.tools.lab import Lab, Spec, unavailable
from tests.net.exchange import exchange, quiet

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    quiet,
]

SECONDS = 8.0
# Bytes of messages, however busy the machine is.
CARRIES = 500_000
TRIES = 4


def ip(lab: Lab, node: int, *commands: str) -> None:
    for one in commands:
        lab.nodes[node].run(["ip", *one.split()], check=True)


def arrived(lab: Lab, node: int) -> int:
    """Bytes that eth1 has received."""
    count = "/sys/class/net/eth1/statistics/rx_bytes"
    return int(lab.nodes[node].run(["cat", count], check=True).stdout)


def give(lab: Lab, node: int, host: int) -> None:
    """Address `host` of its network to eth1, and the routes that go with it."""
    address, gateway = f"10.2.{node}.{host}", f"10.2.{node}.1"
    ip(
        lab,
        node,
        f"address add {address}/24 dev eth1",
        f"route add 10.2.0.0/16 via {gateway} dev eth1",
        f"route add default via {gateway} dev eth1 table 101",
        f"rule add from {address} lookup 101",
    )


def long_run(lab: Lab, log: list[str], when_both_begin: Callable[[], None]) -> bool:
    """Whether the exchange lasted long enough: it may be over before a card is found."""
    rows = exchange(lab, SECONDS, log=log, when_both_begin=when_both_begin)
    return rows[0]["seconds"] > SECONDS / 2


each_end = pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)], ids=["one", "other", "both"])


@each_end
@pytest.mark.parametrize("lacks", ["carrier", "address"])
def test_a_card_that_comes_later_is_used(lacks: str, nodes: tuple[int, ...]) -> None:
    for _ in range(TRIES):
        log: list[str] = []
        with Lab(Spec.parse("2x1@100mbit,nics=2,queue=20ms")) as lab:
            for node in nodes:
                if lacks == "carrier":
                    lab.fault(f"node{node}.eth1", "down")
                else:
                    ip(lab, node, "address flush dev eth1")

            def come(lab: Lab = lab) -> None:
                for node in nodes:
                    if lacks == "carrier":
                        lab.fault(f"node{node}.eth1", "up")
                    else:
                        give(lab, node, 2)

            told = long_run(lab, log, come)
            got = {node: arrived(lab, node) for node in nodes}
        if told:
            break
    # Nothing finds a card that is not used.
    assert min(got.values()) > CARRIES, (got, log)
    assert {line[:7] for line in log if "has come" in line} == {f"{n}@node{n}" for n in nodes}, log


@each_end
def test_an_address_that_changes_is_followed(nodes: tuple[int, ...]) -> None:
    for _ in range(TRIES):
        log: list[str] = []
        before: dict[int, int] = {}
        with Lab(Spec.parse("2x1@100mbit,nics=2,queue=20ms")) as lab:

            def change(lab: Lab = lab, before: dict[int, int] = before) -> None:
                for node in nodes:
                    ip(lab, node, "address flush dev eth1")
                    before[node] = arrived(lab, node)
                    give(lab, node, 7)

            told = long_run(lab, log, change)
            got = {node: arrived(lab, node) - before[node] for node in nodes}
        if told:
            break
    assert min(got.values()) > CARRIES, (got, log)
    said = {line[:7] for line in log if " replaces " in line}
    assert said == {f"{node}@node{node}" for node in nodes}, log


def test_the_only_address_of_a_node_may_change() -> None:
    log: list[str] = []
    to_it: list[str] = []
    with Lab(Spec.parse("2x1@100mbit,queue=20ms")) as lab:

        def change() -> None:
            ip(
                lab,
                1,
                "address del 10.1.1.2/24 dev eth0",
                "address add 10.1.1.7/24 dev eth0",
                "route add default via 10.1.1.1 dev eth0",
                # The harness has a connection from the former one.
                "address add 10.1.1.2/32 dev lo",
            )
            end = monotonic() + 10.0
            while len(to_it) < 8 and monotonic() < end:
                sleep(0.5)
                table = lab.nodes[0].run(["cat", "/proc/net/tcp"], check=True).stdout
                # Each line: number, local and remote address, state; 01 is established.
                rows = [line.split() for line in table.splitlines()[1:]]
                up = [row[2] for row in rows if row[3] == "01"]
                to_it[:] = [one for one in up if one.startswith("0701010A:")]

        rows = exchange(lab, SECONDS, log=log, when_both_begin=change)
    assert rows[0]["messages"] >= 16
    assert len(to_it) >= 8, (to_it, log)
