"""`evener` of an environment that is not active."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.base import programs

BIN = str(Path(sys.executable).parent)

pytestmark = pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="not in an environment")


def other(folder: Path) -> str:
    """A folder with a python that is none."""
    fake = folder / "python"
    fake.write_text("#!/bin/sh\necho the other python\n")
    fake.chmod(0o755)
    return str(folder)


def test_its_own_python_comes_first(tmp_path: Path) -> None:
    env = {"PATH": f"{other(tmp_path)}:{BIN}", "VIRTUAL_ENV": "/other"}
    said = programs.prefer_own(["python", "t.py"], env)
    assert f"and not {tmp_path}/python" in said
    assert env == {"PATH": f"{BIN}:{tmp_path}:{BIN}", "VIRTUAL_ENV": sys.prefix}
    assert programs.prefer_own(["python", "t.py"], env) == ""


def test_what_is_meant_to_be_another_stays(tmp_path: Path) -> None:
    for command in (f"{other(tmp_path)}/python", "./python", "no-such-program", "sh"):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        assert programs.prefer_own([command], dict(env)) == ""
    env = {"PATH": BIN}
    assert programs.prefer_own(["python"], env) == ""


def test_ranks_run_with_the_python_of_evener(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{other(tmp_path)}:/usr/bin:/bin"}
    env.pop("VIRTUAL_ENV", None)
    code = "import sys, evener; print(sys.prefix)"
    command = [sys.executable, "-m", "evener", "launch", "-np", "1", "python", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"[0@localhost] {sys.prefix}\n", done.stderr
    assert "of the environment that has this Evener" in done.stderr
