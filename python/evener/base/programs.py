"""Which `python` a job's ranks run: that of the environment in which Evener itself is installed.

`/data/venv/bin/evener launch -np 4 python train.py` works without `activate`: the shell then finds
another python, which has no Evener, or another version.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path


def prefer_own(command: Sequence[str], env: MutableMapping[str, str]) -> str:
    """Put our environment's programs first in `env`, if `command` is meant to be one of them.

    Returns what was done, in one line; "" where nothing had to be. A command with a path, one that
    our environment does not have, and an Evener of the system's own Python change nothing.
    """
    if sys.prefix == sys.base_prefix and not (Path(sys.prefix) / "conda-meta").is_dir():
        return ""
    own = Path(sys.executable).parent / command[0]
    if os.sep in command[0] or not own.exists():
        return ""
    found = shutil.which(command[0], path=env.get("PATH", os.defpath))
    if found is not None and Path(found).parent.resolve() == own.parent.resolve():
        return ""
    env["PATH"] = os.pathsep.join([str(own.parent), env.get("PATH", os.defpath)])
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    return (
        f"{command[0]} is {own}, of the environment that has this Evener"
        + (f", and not {found}" if found else "")
    )  # fmt: skip
