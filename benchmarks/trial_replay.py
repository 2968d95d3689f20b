"""How many steps a planner's trial takes, replayed on the steps that the zoo has recorded.

    python benchmarks/trial_replay.py                     # benchmarks/results/zoo*.json
    python benchmarks/trial_replay.py --trials 200 --host slow

No model and no network: each way takes what the recorded trial measured of it, times what the
recorded steps scatter by, in their order, from a place drawn at random. `--host slow`: instead of
that, a host that is slow for some fifty steps at a time. Printed by rate: steps and seconds until
the choice is final; the seconds lost in them against the best way; and how much slower than the
best the kept way is.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.comm.planner.choose import LIBRARY, Choice, Decision
from evener.comm.planner.trial import Trial, Way

# Milliseconds that a way's first step takes longer, and a new C++ reducer's by how much.
_FIRST_MS, _ONE_BUCKET = 40.0, 1.2


@dataclass(frozen=True)
class Row:
    """One trial of the zoo's. `ms` and `said`: of each way's step, measured and predicted."""

    rate: float
    names: list[str]
    ms: list[float]
    said: list[float]
    scatter: list[list[float]]


@dataclass(frozen=True)
class Replayed:
    """What one trial took; `slower`: what was kept over the best, less one."""

    steps: float
    seconds: float
    lost_s: float
    slower: float


def rows(paths: list[Path]) -> Iterator[Row]:
    """All trials in these files."""
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            cells: list[dict[str, Any]] = list(row["cells"].values())
            taken = [cell["steps_ms"] for cell in cells if len(cell.get("steps_ms", [])) >= 6]
            scatter = [[ms / statistics.median(steps) for ms in steps] for steps in taken]
            for cell in cells:
                if tried := cell.get("plan", {}).get("tried"):
                    yield Row(
                        row["rate"],
                        list(tried),
                        [way["ms"] for way in tried.values()],
                        [way["modelled_ms"] for way in tried.values()],
                        scatter or [[1.0]],
                    )


def way(name: str, said: float) -> Way:
    """As the planner makes it; harsher forms by the names of the ways."""
    own = name == "DDP's own"
    algorithm = LIBRARY if own or "hook" in name else "2d"
    harsh = 0 if own else 1 if "bf16" in name else 2 if name.startswith("planned") else 3
    choice = Choice(algorithm, "exact", (0.0, 1.0, 0.0))
    return Way(name, Decision((choice,), (0,), False, 10.0, said, 20.0), harsh, own)


def replay(row: Row, dice: random.Random, slow_host: bool) -> Replayed:
    """One trial."""
    trial = Trial([way(*both) for both in zip(row.names, row.said, strict=True)], 3)
    series, best, drift = dice.choice(row.scatter), min(row.ms), 0.0
    place, taken = dice.randrange(len(series)), [0] * len(row.ms)
    spent = lost = 0.0
    last = -1
    while (window := trial.window) is not None:
        times = []
        for step in range(window.settle + window.steps):
            place += 1
            factor = series[place % len(series)]
            if slow_host:
                drift = 0.98 * drift + 0.2 * dice.gauss(0, 0.3)
                factor = (1 + abs(drift)) * dice.gauss(1, 0.02)
            ms = row.ms[window.way] * factor
            if step == 0 and window.way != last:
                library = trial.ways[window.way].decision.library
                ms = ms * (_ONE_BUCKET if library else 1) + _FIRST_MS * (not taken[window.way])
            times.append(ms)
            taken[window.way] += 1
            spent += ms
            lost += ms - best * factor
        last = window.way
        trial.took(times)
    return Replayed(sum(taken), spent / 1e3, lost / 1e3, row.ms[trial.result.kept] / best - 1)


def main() -> None:
    """A line for each rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/zoo*.json")
    parser.add_argument("--trials", type=int, default=40, help="of each recorded one")
    parser.add_argument("--host", choices=("recorded", "slow"), default="recorded")
    given = parser.parse_args()
    files = given.files or sorted((Path(__file__).parent / "results").glob("zoo*.json"))
    found: dict[float, list[Replayed]] = {}
    for row in rows(files):
        for seed in range(given.trials):
            one = replay(row, random.Random(seed), given.host == "slow")
            found.setdefault(row.rate, []).append(one)
    print("| Gb/s | trials | steps | seconds | lost | kept way slower by | by over 2% in |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for rate, made in sorted(found.items()):
        mean = [
            statistics.fmean(getattr(each, name) for each in made)
            for name in ("steps", "seconds", "lost_s", "slower")
        ]
        wrong = sum(each.slower > 0.02 for each in made) / len(made)
        print(
            f"| {rate:g} | {len(made)} | {mean[0]:.0f} | {mean[1]:.1f} | {mean[2]:.2f} "
            f"| {mean[3]:.2%} | {wrong:.1%} |"
        )


if __name__ == "__main__":
    main()
