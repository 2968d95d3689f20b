"""benchmarks/harness: turns, what their times say, records, and processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = '''
"""A benchmark.

More."""
import os, sys, time
sys.path.insert(0, {folder!r})
import harness

parser = harness.arguments(__doc__)
parser.add_argument("--kind", default="parent")
given = parser.parse_args()
match given.kind:
    case "parent":
        good = harness.again("--kind", "good", limit=60, env={{"SEEN": "yes"}})
        bad = harness.again("--kind", "bad", limit=60)
        late = harness.again("--kind", "late", limit=0.5)
        world = harness.ranks("--kind", "rank", limit=60)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
        led = harness.again("--kind", "second", limit=60, launcher=torchrun)
        harness.keep(given, ["pytest", "absent"], good=good.row, bad=bad.failed,
                     late=late.row, world=world.said, led=led.row)
    case "good":
        harness.say(seen=os.environ["SEEN"])
    case "bad":
        raise ValueError("the third step")
    case "second":
        if os.environ["RANK"] == "1":
            raise ValueError("the third step")
        time.sleep(60)
    case "late":
        time.sleep(60)
    case "rank":
        harness.say(rank=os.environ["RANK"], of=os.environ["WORLD_SIZE"])
'''


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    module: ModuleType = harness
    return module


def test_ways_take_turns_and_warming_does_not_count(harness: ModuleType) -> None:
    now, called = 0.0, []

    def way(name: str, seconds: float) -> Any:
        def call() -> None:
            nonlocal now
            now += seconds
            called.append(name)

        return call

    found = harness.turns(
        {"a": way("a", 1.0), "b": way("b", 3.0)},
        2, warmup=1, calls=2, clock=lambda: now, alternate=True,
    )  # fmt: skip
    assert found == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert "".join(called) == "aabb" + "bbaa" + "aabb"


def test_the_clock_waits_for_what_was_begun(harness: ModuleType) -> None:
    now, pending = 0.0, 0.0

    def begin() -> None:
        nonlocal pending
        pending += 5.0

    def settle() -> None:
        nonlocal now, pending
        now, pending = now + pending, 0.0

    found = harness.turns({"a": begin}, 1, settle=settle, clock=lambda: now)
    assert found == {"a": [5.0]}


def test_figures_of_samples(harness: ModuleType) -> None:
    assert harness.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
    assert harness.quartiles([7.0]) == {"low": 7.0, "median": 7.0, "high": 7.0}
    assert harness.quartiles([1.0, 2.0, 3.0]) == {"low": 1.0, "median": 2.0, "high": 3.0}
    assert harness.interval([-1.0, 1.0, 0.0]) == pytest.approx(4.303 / 3**0.5)
    assert harness.interval([1.0]) != harness.interval([1.0])  # NaN


def test_the_interval_is_that_of_paired_differences(harness: ModuleType) -> None:
    exact = {0: 98.0, 1: 98.5, 2: 99.0}
    found = harness.paired({2: 100.0, 0: 97.0, 1: 98.5, 3: 0.0}, exact)
    assert found["difference"] == 0.0 and found["mean"] == pytest.approx(295.5 / 4)
    assert found["interval"] == pytest.approx(4.303 / 3**0.5)
    assert harness.paired({0: 98.0}, exact) == {"mean": 98.0, "difference": 0.0}
    assert harness.paired({7: 98.0}, exact) == {"mean": 98.0}
    assert harness.paired({}, exact) == {}


def test_a_record_has_all_that_a_figure_was_made_with(tmp_path: Path) -> None:
    script, out = tmp_path / "some_benchmark.py", tmp_path / "out.json"
    script.write_text(SCRIPT.format(folder=str(BENCHMARKS)))
    argv = [sys.executable, str(script), "--kind", "parent", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    found = json.loads(out.read_text())
    assert found["command"] == "python benchmarks/some_benchmark.py --kind parent"
    assert found["arguments"] == {"kind": "parent"}
    assert {"cpu", "cores", "memory_gib", "load", "kernel"} <= set(found["machine"])
    assert {"python", "evener", "torch", "pytest"} <= set(found["versions"])
    assert found["versions"]["absent"] == ""
    assert found["date"].endswith("Z")
    assert str(tmp_path) not in out.read_text()
    assert found["good"] == {"seen": "yes"}
    assert found["bad"] == "status 1; ValueError: the third step (some_benchmark.py:25)"
    assert found["led"]["failed"].startswith("status 1; ValueError: the third step (some_benchmark")
    assert found["late"] == {"failed": "status -9; ran past 0 s"}
    assert sorted(one["rank"] for one in found["world"]) == ["0", "1"]
    assert {one["of"] for one in found["world"]} == {"2"}


TOLD = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/a/train.py", line 8, in <module>
[rank0]:     dist.barrier()
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:19879
[rank1]: Traceback (most recent call last):
[rank1]:   File "/a/train.py", line 6, in <module>
[rank1]:     step()
[rank1]:   File "/a/steps.py", line 31, in step
[rank1]:     raise ValueError("the third step")
[rank1]: ValueError: the third step
E1129 22:23:00.319 12415 api.py:986] failed (exitcode: 1) local_rank: 1 of binary: python
"""
TORCHRUN = """\
Traceback (most recent call last):
  File "/torch/distributed/launcher/api.py", line 317, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 12760)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12761)
  traceback : Signal 9 (SIGKILL) received by PID 12761
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TOLD + TORCHRUN, "rank 1: ValueError: the third step (steps.py:31)"),
        (TOLD, "rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:19879 (train.py:8)"),
        (TOLD.replace("[rank1]: ", "") + TORCHRUN, "rank 0: RuntimeError: Connection closed by "
         "peer [127.0.0.1]:19879 (train.py:8)"),
        (TORCHRUN, "rank 1 ended with status -9"),
        ("a warning\nerror: --np is 0\n  fix: give 1\n", "error: --np is 0"),
        ("no error: all is well\n", ""),
    ],
)  # fmt: skip
def test_the_first_error_of_a_job(harness: ModuleType, text: str, why: str) -> None:
    assert harness.causes.cause(text) == why


def test_rows_are_kept_over_calls(harness: ModuleType, tmp_path: Path) -> None:
    given = harness.arguments("A benchmark.").parse_args(["--json", str(tmp_path / "rows.json")])
    first = harness.Kept(given)
    first.add("a", {"ms": 1})
    first.add("b", {"failed": "no memory"}, probe={"rate": 2})
    second = harness.Kept(given)
    assert second.missing(["a", "b", "c"]) == ["c"]
    assert second.missing(["a", "b", "c"], again=True) == ["b", "c"]
    assert second.missing(["a", "b", "c"], only="a;b", again=True) == ["b"]
    assert second.get("a", lambda: pytest.fail("it is there")) == {"ms": 1}
    assert second.get("c", lambda: {"ms": 3}) == {"ms": 3}
    document = json.loads((tmp_path / "rows.json").read_text())
    assert list(document["rows"]) == ["a", "b", "c"] and document["probe"] == {"rate": 2}
    assert [set(run) for run in document["runs"]] == [
        {"command", "date", "arguments", "machine", "versions"}
    ] * 2


def test_a_table(harness: ModuleType) -> None:
    assert harness.show(["way", "ms"], [("a", 1.23456), ("b", None)]) == (
        "| way | ms |\n|---|---:|\n| a | 1.235 |\n| b |  |"
    )
