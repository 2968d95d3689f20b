"""A command of which only the output is wanted."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping


def execute(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """(what it wrote, its exit status) of a shell's `command`; None where it cannot be started."""
    try:
        done = subprocess.run(
            command,
            shell=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError:
        return None
    return done.stdout, done.returncode
