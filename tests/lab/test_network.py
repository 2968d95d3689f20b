"""Rates, caps, paths and faults, measured from inside with bounds that a busy machine cannot break.

What is shaped must never be faster than stated (by more than queue and burst explain); how much
slower it gets depends on who else uses the machine, so that side is generous.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from evener.tools.lab import Lab, Spec
from tests.lab.traffic import Probe, attempt, send, sink, throughput

pytestmark = pytest.mark.lab
PORTS = list(range(20000, 20016))


@pytest.fixture(scope="module")
def two_paths() -> Iterator[Lab]:
    with Lab(Spec(nodes=2, link="400mbit", paths=2)) as built, sink(built.nodes[1]):
        yield built


@pytest.fixture
def healed(two_paths: Lab) -> Iterator[Lab]:
    yield two_paths
    for path in ("path0", "path1"):
        two_paths.fault(path, "heal")


@pytest.fixture
def probe(healed: Lab) -> Iterator[Probe]:
    prober = Probe(healed, healed.nodes[0], "node1")
    yield prober
    prober.close()


def eventually(check: Callable[[], bool], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if check():
            return True
    return check()


def test_a_link_is_as_fast_as_stated(two_paths: Lab) -> None:
    rate = throughput(two_paths.nodes[0], "node1", PORTS[:8], seconds=1, most=10**9)
    assert 0.1 * 400e6 < rate < 1.1 * 400e6


def test_one_flow_has_one_path(two_paths: Lab) -> None:
    (flow,) = send(two_paths.nodes[0], "node1", PORTS[:1], seconds=1, most=10**9)
    assert 0.1 * 200e6 < flow < 1.1 * 200e6


def test_a_flow_cap_holds_for_each_flow() -> None:
    with Lab(Spec(nodes=2, link="1gbit", flow_cap="50mbit")) as lab, sink(lab.nodes[1]):
        flows = send(lab.nodes[0], "node1", [20000, 20002, 20004], seconds=1, most=10**9)
    assert all(0.1 * 50e6 < flow < 1.1 * 50e6 for flow in flows), flows


def test_paths_repeat_with_the_seed_and_change_with_it() -> None:
    found = []
    for seed in (1, 1, 2):
        spec = Spec(nodes=2, link=None, paths=4, hash_seed=seed)
        with Lab(spec) as lab, sink(lab.nodes[1]):
            if any("seed" in note for note in lab.notes):
                pytest.skip(lab.notes[0])
            prober = Probe(lab, lab.nodes[0], "node1")
            found.append(prober.paths(PORTS))
            prober.close()
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert len(set(found[0])) > 1


def test_a_black_hole_is_silent_and_hits_its_path_alone(healed: Lab, probe: Probe) -> None:
    node = healed.nodes[0]
    taken = dict(zip(PORTS, probe.paths(PORTS), strict=True))
    healed.fault("path1", "blackhole")
    ways = attempt(node, "node1", PORTS)
    assert {ways[port] for port in PORTS if taken[port] == 1} == {"silence"}
    # Answers are spread by themselves: a flow that goes out on path 0 may be answered on path 1.
    assert {ways[port] for port in PORTS if taken[port] == 0} >= {"connected"}
    assert set(ways.values()) == {"connected", "silence"}
    healed.fault("path1", "heal")
    assert set(attempt(node, "node1", PORTS, seconds=20).values()) == {"connected"}


def test_what_goes_down_is_left(healed: Lab, probe: Probe) -> None:
    healed.fault("path1", "down")
    assert eventually(lambda: set(probe.paths(PORTS)) == {0})
    healed.fault("path1", "up")
    assert eventually(lambda: set(probe.paths(PORTS)) == {0, 1})


def test_one_node_s_path_goes_down_and_the_others_are_told(healed: Lab, probe: Probe) -> None:
    # node1 loses its cable to path 1: node0, whose own cable is fine, has to send around it.
    healed.fault("node1.path1", "down")
    assert eventually(lambda: set(probe.paths(PORTS)) == {0})
    healed.fault("node1.path1", "heal")
    assert eventually(lambda: set(probe.paths(PORTS)) == {0, 1})


def test_a_nic_that_goes_down_loses_its_carrier_and_gets_it_back() -> None:
    with Lab(Spec(nodes=2, link=None, nics=2)) as lab, sink(lab.nodes[1]):
        node = lab.nodes[0]

        def carriers() -> list[str]:
            paths = [f"/sys/class/net/eth{index}/carrier" for index in range(2)]
            return node.run(["cat", *paths], check=True).stdout.split()

        assert carriers() == ["1", "1"]
        lab.fault("node0.eth1", "down")
        assert carriers() == ["1", "0"]
        assert attempt(node, "10.1.1.2", PORTS[:1]) == {PORTS[0]: "connected"}
        assert attempt(node, "10.2.1.2", PORTS[:1]) == {PORTS[0]: "silence"}
        lab.fault("node0.eth1", "up")
        assert carriers() == ["1", "1"]
        assert attempt(node, "10.2.1.2", PORTS[:1], seconds=20) == {PORTS[0]: "connected"}


def test_flapping_goes_on_until_it_is_healed(healed: Lab, probe: Probe) -> None:
    port = PORTS[probe.paths(PORTS).index(1)]
    healed.fault("path1", "flap 1s")
    for path in (0, 1, 0):
        assert eventually(lambda path=path: probe.path(port) == path)
    healed.fault("path1", "heal")
    assert eventually(lambda: probe.path(port) == 1)


def test_rate(healed: Lab) -> None:
    for path in ("path0", "path1"):
        healed.fault(path, "rate 20mbit")
    (flow,) = send(healed.nodes[0], "node1", PORTS[:1], seconds=1, most=10**9)
    assert flow < 1.1 * 20e6
    healed.fault("node0", "heal")
    healed.fault("node1", "heal")
    (flow,) = send(healed.nodes[0], "node1", PORTS[:1], seconds=1, most=10**9)
    assert flow > 1.1 * 20e6


def test_loss_is_the_share_that_was_asked_for(healed: Lab) -> None:
    for path in ("path0", "path1"):
        healed.fault(path, "loss 50%")
    receive = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 6000)); "
    )
    receive += "s.setsockopt(1, 8, 1 << 22); print('up', flush=True); n = 0\n"
    receive += "try:\n  s.settimeout(10)\n  while s.recv(100) != b'end': n += 1; s.settimeout(2)\n"
    receive += "except TimeoutError: pass\nprint(n)"
    fire = "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    fire += "for i in range(1000): s.sendto(b'x' * 64, ('node1', 6000)); time.sleep(0.0002)\n"
    fire += "for i in range(50): s.sendto(b'end', ('node1', 6000))"
    with healed.nodes[1].popen([sys.executable, "-c", receive], stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        healed.nodes[0].run([sys.executable, "-c", fire], check=True, timeout=30)
        arrived = int(process.stdout.read())
    assert 400 < arrived < 600  # six standard deviations


def test_the_timeline_runs_by_itself(healed: Lab) -> None:
    node = healed.nodes[0]
    healed.schedule("0s:path0:blackhole", "0s:path1:blackhole")
    assert eventually(lambda: attempt(node, "node1", PORTS[:1]) == {PORTS[0]: "silence"})
    healed.schedule("0s:path0:heal", "0s:path1:heal")
    assert eventually(lambda: attempt(node, "node1", PORTS[:1]) == {PORTS[0]: "connected"})
