"""The record of a benchmark: its figures, and all that they were made with.

Every record has `command`, `date`, `arguments`, `machine` (processor, cores, memory, load, kernel,
GPUs, driver) and `versions` (Python, Evener and its commit, torch and NCCL, and the packages that a
benchmark names). A folder of this machine is no part of a record.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from evener.tools.bench.train import machine
from evener.tools.doctor.nccl import loaded

RESULTS = Path(__file__).parents[1] / "results"
_PLACES = ("json", "folder", "out")
"""Arguments that say where something is on this machine."""


def arguments(doc: str | None, *, json: str = "") -> argparse.ArgumentParser:
    """A parser whose description is the first line of `doc`, with `--json FILE`.

    `json`: the name in benchmarks/results that a record has where none is given; else there is no
    record.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = RESULTS / json if json else None
    text = f"the record (default: benchmarks/results/{json})" if json else "the record"
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help=text)
    return parser


def choose(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """Those that `text` asks for, separated by commas, of those that there are; all without it."""
    asked = [one.strip() for one in text.split(",")] if text else list(known)
    for one in asked:
        if one not in known:
            sys.exit(f"error: there is no {what} {one!r}\n  fix: some of {', '.join(known)}")
    return asked


def record(given: argparse.Namespace, packages: Iterable[str] = (), **figures: Any) -> Any:
    """A document of `figures`; `packages`: whose versions count beside torch's."""
    asked = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(given).items()
        if name not in _PLACES
    }
    return {
        "command": _command(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": asked,
        "machine": {**machine.describe(), "arch": platform.machine()},
        "versions": {**machine.versions(), **_nccl(), **_versions(packages)},
        **figures,
    }


def _command() -> str:
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def _nccl() -> dict[str, str]:
    torch = sys.modules.get("torch")  # a benchmark that does not use it need not import it
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"nccl": ".".join(map(str, loaded()))}


def write(path: Path | None, document: Any) -> None:
    """All or nothing; nothing where no file is wanted."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    part.replace(path)


def keep(given: argparse.Namespace, packages: Iterable[str] = (), **figures: Any) -> None:
    """Write the record of `figures` to `given.json`, where that is given."""
    if given.json:
        write(given.json, record(given, packages, **figures))


class Kept:
    """A file of named rows that grows over several calls of a benchmark; each call is in `runs`.

    What is measured stays, whatever happens to the rest: the file is written after every row.
    """

    def __init__(self, given: argparse.Namespace, packages: Iterable[str] = ()) -> None:
        self.path: Path | None = given.json
        self.document: dict[str, Any] = {"runs": [], "rows": {}}
        if self.path and self.path.is_file():
            self.document |= json.loads(self.path.read_text(encoding="utf-8"))
        self.document["runs"] = [*self.document["runs"], record(given, packages)]

    @property
    def rows(self) -> dict[str, Any]:
        """By name, in the order in which they came."""
        rows: dict[str, Any] = self.document["rows"]
        return rows

    def add(self, name: str, row: Any, **beside: Any) -> None:
        """A row; an older one of this name is replaced. `beside`: entries of the document."""
        self.rows.pop(name, None)
        self.rows[name] = row
        self.document |= beside
        write(self.path, self.document)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The row of this name, measured where it is not there yet."""
        if name not in self.rows:
            self.add(name, measure())
        return self.rows[name]

    def missing(self, names: Iterable[str], only: str = "", again: bool = False) -> list[str]:
        """The ones in `names` that have no row yet, or with `again` those that failed.

        `only`: beginnings of names, separated by semicolons.
        """
        starts = tuple(only.split(";"))
        return [
            name
            for name in names
            if name.startswith(starts)
            and (name not in self.rows or (again and "failed" in self.rows[name]))
        ]


def show(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; numbers with three digits after the point where they are fractions."""

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:,.3f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines)
