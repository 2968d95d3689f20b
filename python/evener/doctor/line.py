"""One line of the checklist, and the list of all checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["good", "bad", "info"]
_SUBJECTS = ("gpu", "nccl", "nics", "kernel")


@dataclass(frozen=True, slots=True)
class Line:
    """`good` is checked off, `bad` is not and has a fix, `info` is said without a verdict."""

    subject: str
    name: str
    state: State
    found: str
    fix: str = ""

    def text(self) -> str:
        """`[x] name: found`, and the fix under it."""
        mark = {"good": "[x]", "bad": "[ ]", "info": "[-]"}[self.state]
        fix = f"\n      fix: {self.fix}" if self.fix and self.state != "good" else ""
        return f"{mark} {self.name}: {self.found}{fix}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


Check = Callable[[Path], Iterable[Line]]


def examine(root: Path = Path("/")) -> list[Line]:
    """All checks of this machine. A check that itself fails is a line, never an end."""
    lines: list[Line] = []
    for subject in _SUBJECTS:
        module = importlib.import_module(f"evener.doctor.{subject}")
        checks: tuple[Check, ...] = module.CHECKS
        for check in checks:
            try:
                lines += check(root)
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                name = check.__name__.replace("_", " ")
                lines.append(Line(subject, name, "bad", f"cannot be told: {error}"))
    return lines


def read(path: Path) -> str:
    """A small file's text, stripped; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
