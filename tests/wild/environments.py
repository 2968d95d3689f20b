"""The environments in which programs of others run: made once, by uv, under .build/.

They hold the project's own torch, so that a door meets the version it is tested with, and hard
links from uv's cache make them cheap. What cannot be installed is said and goes into the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.wild.cases import ENVIRONMENTS

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / ".build"
_TORCH = ("torch", "torchvision")


def folder(name: str) -> Path:
    return BUILD / ("wild-venv" if name == "main" else f"wild-venv-{name}")


def python(name: str) -> Path:
    return folder(name) / "bin" / "python"


def make(name: str) -> str:
    """Make the environment where it is missing or asks for other packages; why not, or empty."""
    stamp = folder(name) / "wild.json"
    pins = _pins()
    wanted = json.dumps([*ENVIRONMENTS[name], *pins])
    if stamp.is_file() and stamp.read_text() == wanted:
        return ""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        return "uv is missing: `make setup` installs it"
    print(f"making {folder(name)}: {', '.join(ENVIRONMENTS[name])}", file=sys.stderr, flush=True)
    commands: list[list[str]] = [
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder(name))]
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:
        # An override, not a constraint: a package that caps torch is tried with this one all the
        # same, because this is the one that its user would have beside Evener.
        override.write("".join(f"{pin}\n" for pin in pins))
        override.flush()
        install = [uv, "pip", "install", "--quiet", "--python", str(python(name))]
        commands.append([*install, "--override", override.name, *_TORCH, *ENVIRONMENTS[name]])
        for command in commands:
            # The project's own constraints are for the project's own environment.
            env = {k: v for k, v in os.environ.items() if k not in ("UV_CONSTRAINT", "VIRTUAL_ENV")}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                return f"uv cannot install it: {done.stderr.strip()[-600:]}"
    stamp.write_text(wanted)
    return ""


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in _TORCH]


def versions(name: str) -> dict[str, str]:
    """Distribution to version, of what is installed there."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    done = subprocess.run([str(python(name)), "-c", code], capture_output=True, text=True)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}
