"""`evener launch --min-nodes` and `--join`: what is refused, and nodes that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evener.cli import evener
from evener.errors import UsageError
from evener.tools.launch import nodes
from evener.tools.launch.hosts import Host
from tests.hubs import LiveHub, token_file

LOCAL = ("--ddp", "--every", "8")


def launch(*words: str) -> str:
    with pytest.raises(UsageError) as raised:
        CliRunner().invoke(evener, ["launch", *words, "python", "x.py"], catch_exceptions=False)
    return str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-nodes", "2", "-np", "2"], "--min-nodes is for nodes that take local steps"),
        (["--join", "a:1", "--ddp", "-np", "2"], "--join is for nodes that take local steps"),
        ([*LOCAL, "--join", "a:1", "--min-nodes", "1", "-np", "2"], "were both given"),
        ([*LOCAL, "--token-file", "t", "-np", "2"], "--token-file is for"),
        ([*LOCAL, "--join", "a:1", "-np", "2"], "needs the hub's token"),
        (["--ddp", "--every", "auto", "--min-nodes", "1", "-np", "2"], "--every auto"),
        ([*LOCAL, "--min-nodes", "1", "--mpi", "-np", "2"], "each node is a job of its own"),
        ([*LOCAL, "--min-nodes", "3", "-H", "a:1,b:1"], "--min-nodes 3, and 2 hosts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together(words: list[str], said: str) -> None:
    assert said in launch(*words)


def test_a_wrong_token_is_refused_before_anything_starts() -> None:
    hub = LiveHub()
    try:
        join = (*LOCAL, "--join", f"127.0.0.1:{hub.port}", "-np", "1")
        assert "another token" in launch(*join, "--token-file", str(token_file("other")))
        assert "one host" in launch(
            *join[:-2], "--token-file", str(token_file()), "-H", "localhost:1,127.0.0.1:1"
        )
    finally:
        hub.stop()


def test_a_dry_run_shows_the_nodes() -> None:
    words = ["launch", *LOCAL, "--min-nodes", "1", "-H", "a:2,b:4", "--dry-run", "python", "x.py"]
    shown = CliRunner().invoke(evener, words, catch_exceptions=False)
    assert "a node on each of a:2,b:4" in shown.output


class Fails(nodes._Nodes):
    """Nodes whose program ends as it is told, without a host."""

    ends: list[int]

    def open(self, host: Host) -> Any:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", f"raise SystemExit({self.ends.pop(0)})"]
        )


def run(ends: list[int], ages: list[float]) -> nodes._Node:
    """A node that ends so, at these ages."""
    made = Fails([], [])
    made.ends = ends
    now = 0.0
    made.nodes = [nodes._Node(Host("a", 1), made.open(Host("a", 1)), now)]
    for age in ages:
        made.nodes[0].process.wait()
        now += age
        made.look(now)
        now += nodes._AGAIN
        made.look(now)
    made.nodes[0].process.wait()
    made.look(now)
    return made.nodes[0]


def test_a_node_that_fails_is_started_again_and_given_up_when_it_fails_at_its_start() -> None:
    assert run([1, 1, 0], [1.0, 1.0]).status == 0
    assert run([3, 3, 3], [1.0, 1.0]).status == 3
    assert run([1, 1, 1, 1, 1, 0], [500.0] * 5).status == 0


def test_options_reach_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(nodes, "start", lambda asked, hosts: seen.append((asked, hosts)))
    given = [
        *LOCAL,
        "--min-nodes",
        "1",
        "-H",
        "a:2",
        "--overlap",
        "2",
        "--floor",
        "int8",
        "-x",
        "A=1",
        "--no-watch",
    ]
    CliRunner().invoke(evener, ["launch", *given, "python", "x.py"], catch_exceptions=False)
    ((asked, hosts),) = seen
    words = nodes._words(asked, "h:1", tmp_path / "t")
    assert hosts == [Host("a", 2)]
    assert words[:5] == ["--no-config", "--ddp", "--every", "8", "--join"]
    for pair in (
        ("--overlap", "2"),
        ("--floor", "int8"),
        ("-x", "A=1"),
        ("--token-file", str(tmp_path / "t")),
    ):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "--no-watch" in words and "--min-nodes" not in words
