"""python -m tests.wild: programs of others, plain and under Evener's doors; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.wild import environments, runner
from tests.wild.cases import CASES, DOORS, PLAIN, PROGRAMS, Case, Door
from tests.wild.runner import Row


def main() -> int:
    """Exit status: 0 where all are equal, 1 where one is not, 2 for a wrong command line."""
    args = _arguments()
    cases = [
        case
        for case in CASES
        if (not args.only or case.name in args.only or (case.package and case.package in args.only))
        and args.keyword in case.name
    ]
    doors = [door for door in DOORS if not args.door or door.name in args.door]
    programs = [
        program
        for program in PROGRAMS
        if not args.door
        and (not args.only or program.name in args.only)
        and args.keyword in program.name
    ]
    unknown = set(args.door) - {door.name for door in DOORS}
    if unknown or not (cases or programs):
        what = f"no door {', '.join(sorted(unknown))}" if unknown else "no case of that name"
        print(f"error: {what}", file=sys.stderr)
        print("  fix: python -m tests.wild --list shows all", file=sys.stderr)
        return 2
    if args.list:
        _list(cases)
        for program in programs:
            print(f"{program.name}: {program.module}.py, beside itself without Evener")
        return 0
    cases = [case for case in cases if _doors(case, doors)]
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    rows: list[Row] = []
    wanted = {each.env for each in (*cases, *programs)}
    problems = {name: environments.make(name) for name in sorted(wanted)}
    versions = {name: environments.versions(name) for name, why in problems.items() if not why}
    for case in cases:
        package = case.package or "(loop)"
        if problems[case.env]:
            why = problems[case.env]
            rows.append(Row(case.name, package, "", "all", result="not installed", why=why))
            continue
        mine = _doors(case, doors)
        version = versions[case.env].get(case.package.lower() or "torch", "")
        rows += runner.compare(
            case,
            mine,
            environments.python(case.env),
            version,
            args.steps,
            args.keep,
            lambda text: print(f"{text} ...", file=sys.stderr, flush=True),
        )
        if args.json:
            args.json.write_text(_json(rows, args.steps), encoding="utf-8")
    for program in programs:
        print(f"{program.name} ...", file=sys.stderr, flush=True)
        row = Row(program.name, program.module, "", "itself", result="not installed")
        row.why = problems[program.env]
        rows.append(row if row.why else runner.alone(program, environments.python(program.env)))
        if args.json:
            args.json.write_text(_json(rows, args.steps), encoding="utf-8")
    _show(rows, args.verbose)
    bad = [row for row in rows if not row.ok]
    seconds = time.monotonic() - started
    print(
        f"{len(rows)} runs of {len(cases) + len(programs)} programs in {seconds:.0f} s: "
        f"{len(bad)} not equal"
    )
    return 1 if bad else 0


def _doors(case: Case, doors: list[Door]) -> list[Door]:
    """Those of `doors` that `case` runs under."""
    return [door for door in doors if (door.name in case.doors if case.doors else door.ddp)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="this case or package"
    )
    parser.add_argument("-k", dest="keyword", default="", help="cases whose name contains this")
    parser.add_argument("--door", action="append", default=[], help="under this door only")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and weights there")
    parser.add_argument("-v", "--verbose", action="store_true", help="what Evener printed, too")
    return parser.parse_args()


def _list(cases: list[Case]) -> None:
    for door in (PLAIN, *DOORS):
        print(f"door {door.name}: {door.what}{f' ({door.reason})' if door.reason else ''}")
    for case in cases:
        doors = ", ".join(case.doors) or "all of DDP's"
        print(f"{case.name}: {case.package or 'a loop'}, {case.script}.py, doors: {doors}")


def _show(rows: list[Row], verbose: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("program", "package", "version", "door", "steps", "result"):
        table.add_column(name, overflow="fold")
    for name in ("difference", "step time"):
        table.add_column(name, justify="right")
    for row in rows:
        apart = "" if row.difference is None or row.door == PLAIN.name else f"{row.difference:.1e}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
        steps = str(row.steps or "")
        mark = row.result if row.ok else f"{row.result}  <-"
        table.add_row(row.case, row.package, row.version, row.door, steps, mark, apart, ratio)
    Console(width=max(Console().width, 110)).print(table)
    for row in rows:
        if row.why:
            print(f"\n{row.case} under {row.door}: {row.result}: {row.why}")
        if verbose and row.said:
            print(f"\n{row.case} under {row.door}:\n  " + "\n  ".join(row.said))


def _json(rows: list[Row], steps: int) -> str:
    found = {"version": 1, "steps": steps, "rows": [dataclasses.asdict(row) for row in rows]}
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
