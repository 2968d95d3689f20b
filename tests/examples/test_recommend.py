"""The example runs, learns, forgets, and goes on where it was."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def train(*arguments: str, program: str = "train.py") -> str:
    command = [sys.executable, str(ROOT / "examples/recommend" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_learns_forgets_and_goes_on(tmp_path: Path) -> None:
    small = ("--samples", "6000", "--batch", "200", "--every", "20", "--keep-days", "1")
    first = train(*small, "--days", "2", "--folder", str(tmp_path))
    assert "day 0: AUC 0." in first and "day 1" in first
    assert len(list(tmp_path.glob("full-*.evs"))) == 2  # the one before stays
    assert list(tmp_path.glob("delta-*.evs"))
    second = train(*small, "--days", "3", "--folder", str(tmp_path))
    assert second.startswith("goes on with") and "after step 59" in second
    assert "day 1" not in second
    (line,) = [line for line in second.splitlines() if line.startswith("day 2")]
    assert float(line.split()[3]) > 0.55
    assert int(line.split(" evicted")[0].split()[-1].replace(",", "")) > 0


def test_tensorflow_goes_on_where_torch_was(tmp_path: Path) -> None:
    """One folder, two frameworks: rows, versions and steps go on; stale rows go as in one."""
    small = ("--samples", "6000", "--batch", "200", "--every", "20", "--keep-days", "1")
    train(*small, "--days", "1", "--folder", str(tmp_path))
    program = "train_tensorflow.py"
    first = train(*small, "--days", "2", "--folder", str(tmp_path), program=program)
    assert first.startswith("goes on with") and "after step 29" in first
    second = train(*small, "--days", "3", "--folder", str(tmp_path), program=program)
    assert "after step 59" in second and "day 1" not in second
    (line,) = [line for line in second.splitlines() if line.startswith("day 2")]
    assert int(line.split(" evicted")[0].split()[-1].replace(",", "")) > 0
