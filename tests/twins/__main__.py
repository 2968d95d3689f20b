"""python -m tests.twins: search for programs where Evener differs from the plain reference."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.twins import harness
from tests.twins.harness import Result, Twin


def main() -> int:
    """Exit status: 0 where nothing differs (with --faults: all are found), 1 otherwise."""
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    twins = [harness.twin(name) for name in args.pillar or harness.names()]
    rows = _faults(twins, args, console) if args.faults else _programs(twins, args, console)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["good"] for row in rows) else 1


def _programs(twins: list[Twin], args: argparse.Namespace, console: Console) -> list[dict]:
    """Search every twin: `--seeds` programs each, or rounds of that many for `--hours`."""
    until = time.monotonic() + args.hours * 3600
    table = Table("pillar", "seeds", "programs", "seconds", "found")
    totals: dict[str, list[Result]] = {each.name: [] for each in twins}
    seed = args.start
    while True:
        for each in twins:
            result = harness.search(each, seed, args.seeds)
            totals[each.name].append(result)
            if result.error:
                console.print(f"{each.name}, seed {seed}: {result.error}", markup=False)
                console.print(f"  shortest program, kept as a test: {harness.keep(result)}")
        seed += 1
        if time.monotonic() >= until:
            break
    rows = []
    for name, results in totals.items():
        found = [asdict(r) for r in results if r.error]
        seeds = f"{results[0].seed} to {results[-1].seed}"
        count, seconds = sum(r.programs for r in results), sum(r.seconds for r in results)
        table.add_row(name, seeds, str(count), f"{seconds:.0f}", str(len(found)))
        rows.append({"pillar": name, "seeds": seeds, "programs": count, "seconds": seconds})
        rows[-1] |= {"found": found, "good": not found}
    console.print(table)
    return rows


def _faults(twins: list[Twin], args: argparse.Namespace, console: Console) -> list[dict]:
    """Put each fault in, one at a time, and search until it is found."""
    table = Table("pillar", "fault", "found after", "seconds", "shortest program")
    rows = []
    for each in twins:
        for name, fault in each.faults.items():
            with fault():
                result = harness.search(each, args.start, args.seeds)
            good = bool(result.error)
            after = f"{result.programs} programs" if good else "not found"
            program = json.dumps(result.program) if good else ""
            table.add_row(each.name, name, after, f"{result.seconds:.0f}", program[:300])
            rows.append({"fault": name, **asdict(result), "good": good})
    console.print(table)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.twins", description=__doc__)
    parser.add_argument(
        "pillar", nargs="*", help=f"which twins (all): {', '.join(harness.names())}"
    )
    parser.add_argument("--seeds", type=int, default=100, help="programs per pillar and round")
    parser.add_argument("--hours", type=float, default=0, help="go on with new rounds this long")
    parser.add_argument("--start", type=int, default=0, help="the first round's seed")
    parser.add_argument("--faults", action="store_true", help="put faults in; each must be found")
    parser.add_argument("--json", type=Path, help="write what was found here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
