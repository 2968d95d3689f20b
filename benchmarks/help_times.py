"""How long `--help` of each command and one tab completion take, from the shell's point of view.

    python benchmarks/help_times.py [--json benchmarks/results/help-times.json]

Each is started five times; the quickest counts, in seconds of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from evener.cli import evener
from evener.tools.bench.train.machine import describe

TIMES = 5


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command that is no group."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))
    else:
        yield path


def quickest(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """(clock, processor) in seconds."""
    found = []
    for _ in range(TIMES):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(words, env={**os.environ, **environment}, check=True, capture_output=True)
        clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((clock, used))
    return min(clock for clock, _ in found), min(used for _, used in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    program = str(Path(sys.executable).with_name("evener"))
    rows = {}
    for path in [(), *leaves(evener)]:
        rows[" ".join(["evener", *path, "--help"])] = quickest([program, *path, "--help"], {})
    for typed in ("evener la", "evener plan --net", "evener bench train --mo"):
        words = typed.split()
        asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
        asked["_EVENER_COMPLETE"] = "bash_complete"
        rows[f"{typed}<tab>"] = quickest([program], asked)
    for name, (clock, used) in sorted(rows.items(), key=lambda row: -row[1][0]):
        print(f"{clock:6.2f} s  {used:6.2f} s of processor  {name}")
    if given.json:
        record = {
            "machine": describe(),
            "rows": [
                {"what": n, "seconds": round(c, 3), "cpu": round(u, 3)}
                for n, (c, u) in rows.items()
            ],
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
