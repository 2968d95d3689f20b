"""Sweeps: what is run, what is called best, and when it is called chance."""

import json
import sys
from pathlib import Path

import pytest

from evener.errors import EvenerError, UsageError
from evener.tools.bench.collectives import sweep
from evener.tools.bench.collectives.sweep import BASE, DEFAULTS, Tried, parse, reason, rest, verdict

# Stands for `evener bench`: bandwidth depends on a variable, and a value of it fails.
FAKE = """
import json, os, sys
where = sys.argv[sys.argv.index("-J") + 1]
fast = int(os.environ.get("SPEED", "1"))
if fast == 9:
    sys.exit("error: no such speed")
rows = [
    {"size": size, **{side: {"time": 100 / fast} for side in ("out_of_place", "in_place")}}
    for size in (8, 64)
]
found = {"average_bus_bandwidth": {"bandwidth": float(fast)}, "results": rows}
open(where, "w").write(json.dumps(found))
"""


def tried(setting: sweep.Setting, *means: float) -> Tried:
    one = Tried(setting, means=list(means))
    one.rows = {(8, False): [1 / mean for mean in means]}
    return one


def test_values_are_combined_and_defaults_leave_out_what_is_set() -> None:
    (group,) = parse(["A=1,2", "B=x,y"], {})
    assert len(group) == 4
    assert (("A", "2"), ("B", "x")) in group
    names = {name for group in parse(["default"], {}) for one in group for name, _ in one}
    assert names == {name for group in DEFAULTS for one in group for name, _ in one}
    left = parse(["default"], {"NCCL_ALGO": "Ring"})
    assert all(name != "NCCL_ALGO" for group in left for one in group for name, _ in one)


@pytest.mark.parametrize("given", [["A"], ["=1"], ["A=1,,2"], ["A B=1"], ["A=1", "A=2"]])
def test_what_is_no_setting_is_refused(given: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(given, {})


def test_runs_get_the_arguments_but_the_sweeps_own() -> None:
    words = ["bench", "all_reduce", "-g", "4", "--sweep", "A=1", "--rounds=3", "-J", "x", "-c", "0"]
    assert rest(words) == ["-g", "4", "-c", "0"]
    assert rest(["bench", "all_reduce", "-Jx.json", "--sweep=A=1", "-b", "8"]) == ["-b", "8"]


def test_best_and_why() -> None:
    base, fast = tried(BASE, 1.0, 1.1), tried((("A", "2"),), 2.0, 2.1)
    found = verdict({one.setting: one for one in (base, fast)})
    assert found["document"]["best"] == {"A": "2"}
    assert found["document"]["beyond_noise"]
    assert "# use: export A=2;" in found["text"]
    assert "1.91 times" in reason(fast, base)


@pytest.mark.parametrize("means", [(1.05, 1.4), (1.4,)], ids=["rounds overlap", "one round"])
def test_chance_is_called_chance(means: tuple[float, ...]) -> None:
    base, other = tried(BASE, 1.0, 1.1), tried((("A", "2"),), *means)
    found = verdict({one.setting: one for one in (base, other)})
    assert not found["document"]["beyond_noise"]
    assert "may be chance" in found["document"]["why"]
    assert not any(line.startswith("# use") for line in found["text"])


def test_nothing_better_is_said() -> None:
    base, slow = tried(BASE, 2.0, 2.0), tried((("A", "2"),), 1.0, 1.0)
    assert "no setting" in verdict({one.setting: one for one in (base, slow)})["document"]["why"]


def test_nothing_that_runs_is_an_error() -> None:
    with pytest.raises(EvenerError, match="no setting ran"):
        verdict({BASE: Tried(BASE, error="status 2")})


def test_a_sweep_runs_each_setting_and_keeps_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPEED", raising=False)
    script, out = tmp_path / "fake.py", tmp_path / "sweep.json"
    script.write_text(FAKE)
    through = f"{sys.executable} {script}"
    sweep.run_sweep("all_reduce", ("SPEED=1,3,9",), through, 2, ["-b", "8"], str(out))
    document = json.loads(out.read_text())
    assert document["best"] == {"SPEED": "3"}
    assert document["beyond_noise"]
    errors = {one["setting"].get("SPEED"): one["error"] for one in document["settings"]}
    assert errors[None] is errors["3"] is None
    assert "no such speed" in errors["9"]
    assert "failed" in capsys.readouterr().out
