"""Nodes are separate hosts that reach each other by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from evener.lab import Lab, Spec, unavailable

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=f"no lab here: {unavailable()}"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Spec(nodes=2, slots=2, link="1gbit", paths=2)) as built:
        yield built


def test_host_names_are_the_nodes_own(lab: Lab) -> None:
    names = [node.run(["hostname"], check=True).stdout.strip() for node in lab.nodes]
    assert names == ["node0", "node1"]


def test_tmp_is_the_nodes_own(lab: Lab) -> None:
    lab.nodes[0].run(["touch", "/tmp/mine", "/dev/shm/mine"], check=True)
    for path in ("/tmp/mine", "/dev/shm/mine"):
        assert lab.nodes[0].run(["ls", path]).returncode == 0
        assert lab.nodes[1].run(["ls", path]).returncode != 0


def test_nodes_reach_each_other_by_name(lab: Lab) -> None:
    serve = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); "
    serve += "c, peer = s.accept(); c.send(peer[0].encode())"
    ask = "import socket; print(socket.create_connection(('node1', 5000), 5).recv(99).decode())"
    with lab.nodes[1].popen([sys.executable, "-c", serve], stdout=-1, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        answer = lab.nodes[0].run([sys.executable, "-c", ask], timeout=20)
    assert answer.stdout.strip() == lab.nodes[0].addresses[0], answer.stderr
