"""The command blocks of README.md, CONTRIBUTING.md and docs/guide, and what their marks say.

A fence says after its language what a test does with the block:

    ```sh run               runs in the page's own folder, and must succeed
    ```sh run: exits 0, 1   the same, and may end with one of these statuses
    ```text output          what the block before it printed: see `outputs`
    ```python run           the same, as a script
    ```sh checkout          runs in the root of the checkout
    ```sh mpi               runs where mpirun is installed
    ```sh cluster           needs more than this machine: each `evener` command is parsed, and run
                            with --dry-run where it has that option
    ```sh skip: why         is not run, for the reason given
    ```python file=train.py is written into the page's folder, where later blocks find it
    ```python               a piece of a script: it must compile, and the names of evener exist

The blocks of a page share one folder and run from top to bottom, as a reader goes through it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
MARKS = ("run", "checkout", "mpi", "cluster", "skip", "file", "piece", "output")


@dataclass(frozen=True)
class Block:
    """One fence: `mark` is one of MARKS, `argument` the file's name or the reason."""

    page: Path
    line: int
    language: str
    mark: str
    argument: str
    text: str

    @property
    def statuses(self) -> tuple[int, ...]:
        """With which a block that runs may end."""
        if self.mark not in ("run", "checkout") or not self.argument:
            return (0,)
        return tuple(map(int, re.findall(r"\d+", self.argument)))

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fences of a page that have a language."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: tuple[int, str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = (number, line[3:].strip())
            continue
        start, info = opened
        opened = None
        language, _, rest = info.partition(" ")
        mark, _, argument = re.sub(r"^(\w+)[=:] *", r"\1 ", rest).partition(" ")
        text = "\n".join(lines[start : number - 1])
        found.append(Block(page, start, language, mark or "piece", argument, text))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The words of each line, comments left out, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def evener_words(words: list[str]) -> list[str] | None:
    """What follows `evener` or `python -m evener` in a command, or None where it has neither."""
    for at, word in enumerate(words):
        if word == "evener" and (at == 0 or words[at - 1] in ("-m", "&&")):
            after = words[at + 1 :]
            ends = [after.index(end) for end in ("||", "&&", "|", ">", ";") if end in after]
            return after[: min(ends)] if ends else after
    return None
