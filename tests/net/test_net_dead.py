"""All paths dead: for a while, and for good."""

from time import monotonic, sleep

import pytest

from evener.net import plugin_path
from evener.tools.bench.net.drive import Job, command
from evener.tools.lab import Lab, Spec, unavailable
from tests.net.exchange import ENGINE, exchange, refused_is_skipped, wait_until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

each_engine = pytest.mark.parametrize("engine", ["tcp", "udp", "xdp"])
DEAD = 3.0  # seconds
TWO_PATHS = "2x1@100mbit,paths=2,queue=20ms"


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ("tcp", "blackhole"),
        ("tcp", "down"),
        ("udp", "blackhole"),
        ("udp", "down"),
        ("xdp", "blackhole"),
    ],
)
def test_nothing_is_lost_where_no_path_is_left_for_a_while(engine: str, fault: str) -> None:
    repair = "heal" if fault == "blackhole" else "up"
    gone: list[float] = []

    def carries(path: str) -> None:
        names = [f"node{node}.eth0.{path}" for node in (0, 1)]
        alone = lab.traffic()

        def more() -> list[int]:
            carried = lab.traffic()
            return [carried[name] - alone[name] for name in names]

        # More than those who knock send.
        wait_until(lambda: min(more()) > 1_000_000, more)

    def cut() -> None:
        for path in ("path0", "path1"):
            lab.fault(path, fault)
        began = monotonic()
        sleep(DEAD)
        lab.fault("path0", repair)
        gone.append(monotonic() - began)
        carries("path0")
        lab.fault("path1", repair)
        # It is used as well when it is back.
        carries("path1")

    with Lab(Spec.parse(TWO_PATHS)) as lab:
        rows = exchange(lab, 0.2, env={ENGINE: engine}, meanwhile=cut)
    # All stood still, and went on.
    assert gone[0] - 1.0 < rows[0]["stall"] < gone[0] + 20.0, (gone, rows)


@each_engine
def test_with_no_path_for_too_long_both_ends_get_a_remote_error(engine: str) -> None:
    patience = 1.5
    job = Job(str(plugin_path()), comms=1, depth=2, sizes="65536", seconds=30.0)
    said: dict[int, str] = {0: "", 1: ""}
    cut: list[float] = []
    ended: dict[int, float] = {}

    def on_line(rank: int, node: str, stream: str, line: str) -> None:
        said[rank] += line + "\n"
        # Both are connected and at it, however busy the machine is.
        if "both begin" in line and all("both begin" in text for text in said.values()):
            for path in ("path0", "path1"):
                lab.fault(path, "blackhole")
            cut.append(monotonic())
        # NCCL's ncclRemoteError.
        if "test returned 6" in line:
            ended[rank] = monotonic()

    # The first that fails must not end the other: each has to come to its own error.
    alone = ["sh", "-c", "trap '' TERM; \"$@\" 2>&1; true", "sh", *command(job)]
    with Lab(Spec.parse(TWO_PATHS)) as lab:
        env = {"EVENER_NET_TIMEOUT": str(patience), ENGINE: engine, "EVENER_DRIVE_LOG": "1"}
        result = lab.launch(alone, env=env, timeout=25.0, on_line=on_line)
    assert result.ok, result
    refused_is_skipped(list(said.values()))
    assert ended.keys() == {0, 1}, said
    for rank, at in ended.items():
        # Not before its time, but for what the lab takes to cut both; and no hang.
        assert patience - 0.5 < at - cut[0] < patience + 10.0, (rank, at - cut[0], said)
        assert "no path to the peer for" in said[rank], said
