"""Rates, caps, paths and faults, measured from inside with bounds that a busy machine cannot break.

What is shaped must never be faster than stated (by more than queue and burst explain); how much
slower it gets depends on who else uses the machine, so that side is generous.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from evener.errors import UsageError
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


# Arguments: host, packets. Prints the round trips in ms of those that came back, in their order.
# Each on one processor: a sender that moves leaves packets in the old one's queue, and the kernel
# lets later ones pass them.
_ONE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
_ECHO = (
    _ONE
    + """
import socket, sys, threading, time
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind(("", 5001))
mine.settimeout(3)
sent = {}
def send():
    for i in range(int(sys.argv[2])):
        sent[i] = time.monotonic()
        mine.sendto(b"%d" % i, (sys.argv[1], 5002))
        time.sleep(0.001)
threading.Thread(target=send, daemon=True).start()
try:
    for _ in range(int(sys.argv[2])):
        i = int(mine.recv(100))
        print(i, (time.monotonic() - sent[i]) * 1e3)
except TimeoutError:
    pass
"""
)
_ANSWER = (
    _ONE
    + """
import socket
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind(("", 5002))
print("up", flush=True)
while True: mine.sendto(*mine.recvfrom(100))
"""
)


def echoes(lab: Lab, count: int) -> list[tuple[int, float]]:
    """The number of each packet that came back, and its round trip in ms."""
    argv = [sys.executable, "-c", _ECHO, "node1", str(count)]
    said = lab.nodes[0].run(argv, timeout=60, check=True).stdout.splitlines()
    pairs = (line.split() for line in said)
    return [(int(number), float(time)) for number, time in pairs]


@pytest.fixture(scope="module")
def long_way() -> Iterator[Lab]:
    with Lab("2x1@100mbit,queue=20ms,delay=20ms") as lab:
        argv = [sys.executable, "-c", _ANSWER]
        with lab.nodes[1].popen(argv, stdout=-1, text=True) as answers:
            assert answers.stdout is not None and answers.stdout.readline() == "up\n"
            yield lab
            answers.kill()


def test_a_packet_takes_as_long_as_stated(long_way: Lab) -> None:
    found = echoes(long_way, 50)
    assert len(found) == 50
    assert min(took for _, took in found) >= 40
    assert [number for number, _ in found] == list(range(50))


def test_a_delay_changes_and_heals(long_way: Lab) -> None:
    long_way.fault("path0", "delay 60ms")
    assert min(took for _, took in echoes(long_way, 5)) >= 120
    long_way.fault("node1", "delay 5ms")  # 30 ms on node0's cable, 5 on node1's
    assert 70 <= min(took for _, took in echoes(long_way, 5)) < 120
    long_way.fault("path0", "heal")
    assert 40 <= min(took for _, took in echoes(long_way, 5)) < 70


def test_packets_pass_others_and_are_lost(long_way: Lab) -> None:
    long_way.fault("path0", "reorder 20%")
    found = echoes(long_way, 100)
    assert len(found) == 100
    assert [number for number, _ in found] != list(range(100))
    long_way.fault("path0", "heal")
    long_way.fault("path0", "loss 30%")
    assert 10 < len(echoes(long_way, 100)) < 90  # 49 of 100 come there and back
    long_way.fault("path0", "heal")
    assert len(echoes(long_way, 20)) == 20


def test_tcp_crosses_a_delay_line_whole(long_way: Lab) -> None:
    """Also in units of the kernel's that are larger than a packet."""
    with sink(long_way.nodes[1]):
        rate = throughput(long_way.nodes[0], "node1", PORTS[:4], seconds=1, most=10**9)
    assert 0.05 * 100e6 < rate < 1.1 * 100e6


def test_a_cable_with_delay_goes_down_and_up(long_way: Lab) -> None:
    with sink(long_way.nodes[1]):
        long_way.fault("node1", "down")
        assert set(attempt(long_way.nodes[0], "node1", [20000]).values()) != {"connected"}
        long_way.fault("node1", "up")
        assert eventually(
            lambda: set(attempt(long_way.nodes[0], "node1", [20001]).values()) == {"connected"}
        )


def test_a_lab_without_delay_lines_says_so() -> None:
    with Lab("1x1") as lab, pytest.raises(UsageError, match="--delay 0ms"):
        lab.fault("path0", "delay 10ms")


def test_a_lab_can_lose_packets_from_the_start() -> None:
    with Lab("2x1@100mbit,loss=30%") as lab:
        argv = [sys.executable, "-c", _ANSWER]
        with lab.nodes[1].popen(argv, stdout=-1, text=True) as answers:
            assert answers.stdout is not None and answers.stdout.readline() == "up\n"
            assert 10 < len(echoes(lab, 100)) < 90
            answers.kill()
