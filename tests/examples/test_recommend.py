"""The example runs, learns, forgets, and goes on where it was."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--samples", "6000", "--batch", "200", "--every", "20", "--keep-days", "1")


def train(days: int, folder: Path, program: str = "train.py") -> str:
    command = [sys.executable, str(ROOT / "examples/recommend" / program), *SMALL]
    command += ["--days", str(days), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_day(text: str, day: int) -> tuple[float, int]:
    """AUC, and rows that were evicted."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"day {day}")]
    return float(line.split()[3]), int(line.split(" evicted")[0].split()[-1].replace(",", ""))


@pytest.fixture(scope="module")
def two_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch has made of days 0 and 1; the tests go on in copies."""
    folder = tmp_path_factory.mktemp("two") / "days"
    first = train(2, folder)
    assert "day 0: AUC 0." in first and "day 1" in first
    assert len(list(folder.glob("full-*.evs"))) == 2  # the one before stays
    assert list(folder.glob("delta-*.evs"))
    return folder


def test_it_learns_forgets_and_goes_on(two_days: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_days, tmp_path / "mine")
    second = train(3, folder)
    assert second.startswith("goes on with") and "after step 59" in second
    assert "day 1" not in second
    score, evicted = of_day(second, 2)
    assert score > 0.55 and evicted > 0


def test_tensorflow_goes_on_where_torch_was(two_days: Path, tmp_path: Path) -> None:
    """One folder, two frameworks: rows, versions and steps go on; stale rows go as in one."""
    folder = shutil.copytree(two_days, tmp_path / "mine")
    first = train(3, folder, "train_tensorflow.py")
    assert first.startswith("goes on with") and "after step 59" in first
    assert of_day(first, 2)[1] > 0
    second = train(4, folder, "train_tensorflow.py")
    assert "after step 89" in second and "day 2" not in second
    assert of_day(second, 3)[1] > 0
