"""One line of the checklist, and the list of all checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["good", "bad", "info"]
Severity = Literal["slow", "broken"]
_SUBJECTS = ("gpu", "nccl", "nics", "kernel")


@dataclass(frozen=True, slots=True)
class Line:
    """`good` is checked off, `bad` is not and has a fix, `info` is said without a verdict.

    severity: of a bad line: whether jobs are slower for it, or fail. gain: what the fix changes, in
    figures where they follow from what was found.
    """

    subject: str
    name: str
    state: State
    found: str
    fix: str = ""
    gain: str = ""
    severity: Severity = "slow"

    def text(self) -> str:
        """`[x] name: found`, and under it the fix and what that gains."""
        mark = {"good": "[x]", "info": "[-]", "slow": "[ ]", "broken": "[!]"}
        shown = f"{mark[self.severity if self.state == 'bad' else self.state]} {self.name}: "
        shown += self.found
        if self.state != "good":
            shown += f"\n      fix: {self.fix}" * bool(self.fix)
            shown += f"\n      gain: {self.gain}" * bool(self.gain)
        return shown

    def document(self) -> dict[str, Any]:
        """As JSON; `severity` is null for lines that are not bad."""
        return {**asdict(self), "severity": self.severity if self.state == "bad" else None}


def exit_status(lines: Iterable[Line]) -> int:
    """0: nothing to fix. 1: jobs run, slower than they could. 2: jobs fail."""
    bad = {line.severity for line in lines if line.state == "bad"}
    return 2 if "broken" in bad else 1 if bad else 0


Check = Callable[[Path], Iterable[Line]]


def examine(root: Path = Path("/")) -> list[Line]:
    """All checks of this machine. A check that itself fails is a line, never an end."""
    lines: list[Line] = []
    for subject in _SUBJECTS:
        module = importlib.import_module(f"evener.tools.doctor.{subject}")
        checks: tuple[Check, ...] = module.CHECKS
        for check in checks:
            try:
                lines += check(root)
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                name = check.__name__.replace("_", " ")
                lines.append(Line(subject, name, "info", f"cannot be told: {error}"))
    return lines


def read(path: Path) -> str:
    """A small file's text, stripped; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
