"""Cards that come up while a job runs, addresses that change: they are used without a restart."""

import pytest

from evener.tools.lab import Lab, Spec, unavailable
from tests.net.exchange import ENGINE, exchange, wait_until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

TRIAL = 0.2
# Bytes of messages. What asks whether a path is there, and acknowledgements, are less in the time.
CARRIES = 8_000_000


def ip(lab: Lab, node: int, *commands: str) -> None:
    for one in commands:
        lab.nodes[node].run(["ip", *one.split()], check=True)


def arrived(lab: Lab, node: int, nic: str) -> int:
    """Bytes that a NIC has received."""
    count = f"/sys/class/net/{nic}/statistics/rx_bytes"
    return int(lab.nodes[node].run(["cat", count], check=True).stdout)


def wait_for_bytes(lab: Lab, nodes: tuple[int, ...], log: list[str], nic: str = "eth1") -> None:
    """Until that NIC of each has carried messages from now on."""
    before = {node: arrived(lab, node, nic) for node in nodes}

    def more() -> dict[int, int]:
        return {node: arrived(lab, node, nic) - before[node] for node in nodes}

    wait_until(lambda: min(more().values()) > CARRIES, lambda: (more(), log))


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


ONE, BOTH = (0,), (0, 1)


@pytest.mark.parametrize(
    ("engine", "lacks", "nodes"),
    [
        ("tcp", "carrier", ONE),
        ("tcp", "address", BOTH),
        ("udp", "carrier", ONE),
        ("udp", "address", BOTH),
        ("xdp", "carrier", ONE),
    ],
)
def test_a_card_that_comes_later_is_used(engine: str, lacks: str, nodes: tuple[int, ...]) -> None:
    log: list[str] = []
    with Lab(Spec.parse("2x1@100mbit,nics=2,queue=20ms")) as lab:
        for node in nodes:
            if lacks == "carrier":
                lab.fault(f"node{node}.eth1", "down")
            else:
                ip(lab, node, "address flush dev eth1")

        def come() -> None:
            for node in nodes:
                if lacks == "carrier":
                    lab.fault(f"node{node}.eth1", "up")
                else:
                    give(lab, node, 2)
            wait_for_bytes(lab, nodes, log)

        exchange(lab, TRIAL, env={ENGINE: engine}, log=log, meanwhile=come)
    assert {line[:7] for line in log if "has come" in line} == {f"{n}@node{n}" for n in nodes}, log


@pytest.mark.parametrize(("engine", "nodes"), [("tcp", BOTH), ("udp", BOTH), ("xdp", ONE)])
def test_an_address_that_changes_is_followed(engine: str, nodes: tuple[int, ...]) -> None:
    log: list[str] = []
    with Lab(Spec.parse("2x1@100mbit,nics=2,queue=20ms")) as lab:

        def change() -> None:
            for node in nodes:
                ip(lab, node, "address flush dev eth1")
            for node in nodes:
                give(lab, node, 7)
            wait_for_bytes(lab, nodes, log)

        exchange(lab, TRIAL, env={ENGINE: engine}, log=log, meanwhile=change)
    said = {line[:7] for line in log if " replaces " in line}
    assert said == {f"{node}@node{node}" for node in nodes}, log


@pytest.mark.parametrize("engine", ["tcp", "udp", "xdp"])
def test_the_only_address_of_a_node_may_change(engine: str) -> None:
    log: list[str] = []
    former = "10.1.1.2"

    def change() -> None:
        ip(
            lab,
            1,
            f"address del {former}/24 dev eth0",
            "address add 10.1.1.7/24 dev eth0",
            "route add default via 10.1.1.1 dev eth0",
            # The harness has a connection from the former one, and needs it in the end.
            f"address add {former}/32 dev lo",
        )
        ip(lab, 0, f"route add blackhole {former}/32")
        wait_for_bytes(lab, (0, 1), log, "eth0")
        ip(lab, 0, f"route del blackhole {former}/32")

    with Lab(Spec.parse("2x1@100mbit,queue=20ms")) as lab:
        exchange(lab, TRIAL, env={ENGINE: engine}, log=log, meanwhile=change)
