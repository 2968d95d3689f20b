"""Which `horovod` a job imports: Evener's, put in place by `--horovod`, or what is installed.

Evener's `horovod` package is not on the path of an installation, so that nobody's real Horovod is
overwritten; it is a folder inside this package, which the launcher puts before all others.

    python -m evener.tools.launch.horovod_path     prints that folder, for a PYTHONPATH of one's own
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import evener.errors
from evener.errors import EvenerError

ALIAS = Path(evener.errors.__file__).parent / "horovod" / "alias"


def describe() -> str:
    """One line on the `horovod` that is installed, "" where there is none."""
    for distribution, text in (
        ("evener-horovod", "`import horovod` is Evener's (distribution evener-horovod {})"),
        ("horovod", "`import horovod` is upstream's Horovod {}; --horovod takes Evener's instead"),
    ):
        try:
            return text.format(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:  # noqa: S112 - it is not installed
            continue
    return ""


def put_in_place(python_path: str) -> tuple[str, str]:
    """(PYTHONPATH with Evener's horovod first, a line that says which one is used and why)."""
    if not ALIAS.is_dir():
        raise EvenerError(f"this installation has no {ALIAS}", "install evener anew")
    others = [part for part in python_path.split(os.pathsep) if part and part != str(ALIAS)]
    note = f"--horovod: `import horovod` is Evener's, from {ALIAS}"
    try:
        version = importlib.metadata.version("horovod")
        note += f"; the installed upstream Horovod {version} is not used in this job"
    except importlib.metadata.PackageNotFoundError:  # noqa: S110 - there is none to name
        pass
    return os.pathsep.join([str(ALIAS), *others]), note


if __name__ == "__main__":
    sys.stdout.write(f"{ALIAS}\n")
