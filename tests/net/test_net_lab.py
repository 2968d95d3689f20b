"""The plug-in between simulated nodes: faults, several NICs, IPv4 paths it cannot see.

Every byte that arrives is compared. What a fault costs in time is for benchmarks, not for tests.
"""

import pytest

from evener.bench.net.drive import Job, command, merge
from evener.lab import Lab, Spec, unavailable
from evener.net import plugin_path

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

TIMEOUT = 60.0


def exchange(lab: Lab, seconds: float, *faults: str) -> list[dict[str, float]]:
    job = Job(str(plugin_path()), comms=2, depth=4, sizes="262144", seconds=seconds, verify=True)
    lines: list[str] = []
    errors: list[str] = []

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        (lines if stream == "stdout" else errors).append(f"{rank}@{node}: {line}"[-500:])

    if faults:
        lab.schedule(*faults)
    result = lab.launch(command(job), timeout=TIMEOUT, on_line=on_line)
    assert result.ok, (result, errors)
    return merge([line.partition(": ")[2] for line in lines])


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
def test_nothing_is_lost_where_paths_fail(faults: tuple[str, ...]) -> None:
    with Lab(Spec.parse("2x1@400mbit,paths=4,queue=20ms")) as lab:
        rows = exchange(lab, 4.0, *faults)
    assert rows[0]["messages"] >= 16


def test_every_nic_carries_its_share() -> None:
    with Lab(Spec.parse("2x1@200mbit,nics=2,queue=20ms")) as lab:
        rows = exchange(lab, 1.0)
        sent = []
        for name in ("eth0", "eth1"):
            count = f"/sys/class/net/{name}/statistics/tx_bytes"
            sent.append(int(lab.nodes[0].run(["cat", count], check=True).stdout))
    moved = rows[0]["messages"] * rows[0]["size"]
    assert min(sent) > moved / 5, sent
