"""python -m tests.twins: search for programs where Evener differs from the plain reference."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.twins import harness
from tests.twins._alone import Alone
from tests.twins.harness import Result

# Where no terminal shows a bar, a line says every this many seconds how far a search is.
EVERY = 30.0
# A fault may take more programs to be found than a round has.
ROUNDS_PER_FAULT = 10


def main() -> int:
    """Exit status: 0 where nothing differs (with --faults: all are found), 1 otherwise."""
    args = _arguments()
    # Stopped, it ends the processes of twins too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console(width=None if sys.stdout.isatty() else 140)
    names = args.pillar or harness.names()
    rows = _faults(names, args, console) if args.faults else _programs(names, args, console)
    return 0 if all(row["good"] for row in rows) else 1


def _programs(names: list[str], args: argparse.Namespace, console: Console) -> list[dict]:
    """Search every twin: a round each, or rounds for `--hours`."""
    until = time.monotonic() + args.hours * 3600
    totals: dict[str, list[Result]] = {name: [] for name in names}
    rows: dict[str, dict] = {}
    seed = args.start
    while True:
        for name in names:
            with contextlib.closing(Alone(name)) as alone:
                if _skipped(alone, console):
                    continue
                result = _search(alone, seed, args, console)
            totals[name].append(result)
            if result.error:
                console.print(f"{name}, seed {seed}: {result.error}", markup=False)
                if result.program is not None:
                    console.print(f"  shortest program, kept as a test: {harness.keep(result)}")
            rows[name] = _row(name, totals[name])
            _say(console, result, "a difference" if result.error else "nothing found")
            _write(args, [*rows.values()])
        seed += 1
        if time.monotonic() >= until:
            break
    table = Table("pillar", "seeds", "programs", "seconds", "found")
    for row in rows.values():
        count, seconds = str(row["programs"]), f"{row['seconds']:.0f}"
        table.add_row(row["pillar"], row["seeds"], count, seconds, str(len(row["found"])))
    console.print(table)
    return [*rows.values()]


def _row(name: str, results: list[Result]) -> dict:
    """What all rounds of a twin found."""
    found = [asdict(result) for result in results if result.error]
    return {
        "pillar": name,
        "seeds": f"{results[0].seed} to {results[-1].seed}",
        "programs": sum(result.programs for result in results),
        "seconds": sum(result.seconds for result in results),
        "found": found,
        "good": not found,
    }


def _faults(names: list[str], args: argparse.Namespace, console: Console) -> list[dict]:
    """Put each fault in, one at a time, and search until it is found."""
    table = Table("pillar", "fault", "found after", "seconds", "program")
    rows = []
    for name in names:
        with contextlib.closing(Alone(name)) as alone:
            for fault in [] if _skipped(alone, console) else alone.faults:
                result = _search(alone, args.start, args, console, fault)
                good = bool(result.error) and not result.broken
                said = "found" if good else "NOT FOUND"
                after = f"{result.programs} programs" if good else result.without or "not found"
                if result.broken:
                    said = after = "the fault itself is broken"
                    console.print(result.broken, markup=False, highlight=False)
                program = json.dumps(result.program) if good else ""
                table.add_row(name, fault, after[:300], f"{result.seconds:.0f}", program[:300])
                rows.append({"fault": fault, **asdict(result), "good": good})
                _say(console, result, f"{said}: {fault}")
                _write(args, rows)
    console.print(table)
    return rows


def _skipped(alone: Alone, console: Console) -> bool:
    """Say so where a twin cannot run here."""
    alone.start()
    if alone.skipped:
        console.print(f"{alone.name}: skipped: {alone.skipped}", markup=False)
    return bool(alone.skipped)


def _search(
    alone: Alone, seed: int, args: argparse.Namespace, console: Console, fault: str = ""
) -> Result:
    """One search in the twin's process, with a bar or lines that say how far it is."""
    alone.start()
    count = args.seeds or alone.programs_per_round * (ROUNDS_PER_FAULT if fault else 1)
    what = f"{alone.name}: {fault}" if fault else alone.name
    with _progress(console, what, count) as ran:
        return alone.search(seed, count, fault, ran)


@contextlib.contextmanager
def _progress(console: Console, what: str, count: int) -> Iterator[Any]:
    """Give a function that is told how many programs have begun."""
    if console.is_terminal:
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(what, total=count)
            yield lambda programs: bars.update(task, completed=programs)
        return
    began = said = time.monotonic()

    def ran(programs: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= EVERY:
            said = now
            console.print(f"{what}: {programs} of {count} programs, {now - began:.0f} s")

    yield ran


def _say(console: Console, result: Result, what: str) -> None:
    """A line as a search ends."""
    line = f"{result.twin}: {result.programs} programs, {result.seconds:.0f} s, {what}"
    console.print(line, markup=False)


def _write(args: argparse.Namespace, rows: list[dict]) -> None:
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.twins", description=__doc__)
    parser.add_argument(
        "pillar", nargs="*", help=f"which twins (all): {', '.join(harness.names())}"
    )
    parser.add_argument(
        "--seeds", type=int, help="programs per pillar and round (of each: programs_per_round)"
    )
    parser.add_argument("--hours", type=float, default=0, help="go on with new rounds this long")
    parser.add_argument("--start", type=int, default=0, help="the first round's seed")
    parser.add_argument("--faults", action="store_true", help="put faults in; each must be found")
    parser.add_argument("--json", type=Path, help="write what was found here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
