"""The plug-in between simulated nodes: faults, several NICs, IPv4 paths it cannot see.

Every byte that arrives is compared. What a fault costs in time is for benchmarks, not for tests.
"""

import json
import os
from pathlib import Path
from threading import Timer

import pytest

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, command
from evener.tools.lab import Lab, Spec, unavailable
from tests.net.exchange import ENGINE, exchange, refused_is_skipped

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

each_engine = pytest.mark.parametrize("engine", ["tcp", "udp", "xdp"])


def test_packets_go_past_the_kernel_and_nothing_is_lost() -> None:
    log: list[str] = []
    with Lab(Spec.parse("2x1@400mbit,paths=4,queue=20ms")) as lab:
        faults = ("1s:path1:blackhole", "2s:path1:heal")
        env = {ENGINE: "xdp"}
        rows = exchange(lab, 3.0, *faults, env=env, log=log)
    assert rows[0]["messages"] >= 16
    said = [line for line in log if " xdp: " in line]
    sent = [int(line.split(" xdp: ")[1].split()[0]) for line in said if "past the kernel" in line]
    assert len(sent) == 2 and min(sent) > 100, said


@each_engine
@pytest.mark.parametrize(
    "faults",
    [
        ("1s:path1:blackhole", "3s:path1:heal"),
        ("1s:path0:down", "2s:path0:up", "2.5s:path2:down", "3.5s:path2:up"),
        (
            "1s:path0:blackhole",
            "1.5s:path1:blackhole",
            "2s:path2:blackhole",
            "4s:path0:heal",
            "4s:path1:heal",
            "4s:path2:heal",
        ),
    ],
    ids=["black hole", "links down", "three of four black"],
)
def test_nothing_is_lost_where_paths_fail(faults: tuple[str, ...], engine: str) -> None:
    with Lab(Spec.parse("2x1@400mbit,paths=4,queue=20ms")) as lab:
        rows = exchange(lab, 4.0, *faults, env={ENGINE: engine})
    assert rows[0]["messages"] >= 16


@each_engine
def test_every_nic_carries_its_share(engine: str) -> None:
    with Lab(Spec.parse("2x1@200mbit,nics=2,queue=20ms")) as lab:
        rows = exchange(lab, 1.0, env={ENGINE: engine})
        sent = []
        for name in ("eth0", "eth1"):
            count = f"/sys/class/net/{name}/statistics/tx_bytes"
            sent.append(int(lab.nodes[0].run(["cat", count], check=True).stdout))
    moved = rows[0]["messages"] * rows[0]["size"]
    assert min(sent) > moved / 5, sent


def test_a_lost_carrier_is_noticed_and_comes_back() -> None:
    # Nodes have a /tmp of their own: what they write is read in the working directory.
    directory = Path(f".evener-test-{os.getpid()}").resolve()
    faults = ("1.5s:node0.eth1:down", "3s:node0.eth1:up")
    try:
        with Lab(Spec.parse("2x1@100mbit,nics=2,queue=20ms")) as lab:
            env = {"EVENER_STATS_DIR": str(directory), "EVENER_DRIVE_LOG": "1"}
            log: list[str] = []
            rows = exchange(lab, 5.0, *faults, env=env, log=log)
        # The kernel said it, before silence could: on the node whose NIC it is, and on no other.
        assert {line[:7] for line in log if "lost its carrier" in line} == {"0@node0"}, log
        assert rows[0]["messages"] >= 16
        records = [json.loads(path.read_text()) for path in directory.glob("net-*.json")]
        assert len(records) == 2
        more = []
        for record in records:
            # Paths of eth1 that are there at the end came after the repair, and carried. The node
            # that ends first closes those of the other.
            over = [path for path in record["net"]["ended"] if path["why"] == "the peer closed it"]
            last = [path for path in record["net"]["paths"] + over if path["nic"] == "eth1"]
            carried = sum(path["bytes_sent"] for path in last)
            assert carried > 0
            (nic,) = [nic for nic in record["net"]["devices"] if nic["name"] == "eth1"]
            more.append(nic["bytes_sent"] - carried)
            # Counted while something is waited for, and none lasts as long as the fault.
            silences = [us for _, us in record["net"]["silences_us"]]
            assert silences and max(silences) < 1_400_000, silences
        # Those that went before it count for the NIC as well. The other node may hear that the
        # first one was closed, once it can: then it is among those above.
        assert min(more) >= 0 and max(more) > 0, more
    finally:
        for path in directory.glob("*"):
            path.unlink()
        directory.rmdir()


@each_engine
def test_a_nic_that_goes_away_costs_nothing_but_time(engine: str) -> None:
    with Lab(Spec.parse("2x1@200mbit,nics=2,queue=20ms")) as lab:
        gone = Timer(2.0, lambda: lab.nodes[0].run(["ip", "link", "delete", "eth1"], check=True))
        gone.start()
        try:
            rows = exchange(lab, 4.0, env={ENGINE: engine})
        finally:
            gone.join()
        left = lab.nodes[0].run(["ls", "/sys/class/net"], check=True).stdout.split()
    assert "eth1" not in left
    assert rows[0]["messages"] >= 16


@each_engine
def test_who_talks_to_a_killed_process_gets_a_remote_error(engine: str) -> None:
    job = Job(str(plugin_path()), comms=1, depth=2, sizes="65536", seconds=30.0)
    said: dict[int, str] = {0: "", 1: ""}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        said[rank] += line + "\n"

    # Rank 1 is killed when both have long been at it.
    dies = '"$@" & sleep 4; kill -9 $!; wait; exit 0'
    lives = "trap '' TERM; \"$@\" 2>&1; true"
    shell = ["sh", "-c", f'if [ "$RANK" = 1 ]; then {dies}; else {lives}; fi', "sh"]
    with Lab(Spec.parse("2x1@100mbit,paths=2,queue=20ms")) as lab:
        env = {"EVENER_NET_TIMEOUT": "1.5", ENGINE: engine, "EVENER_DRIVE_LOG": "1"}
        result = lab.launch([*shell, *command(job)], env=env, timeout=25.0, on_line=on_line)
    assert result.ok, (result, said)
    refused_is_skipped(list(said.values()))
    assert "test returned 6" in said[0], said
