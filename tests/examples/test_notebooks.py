"""The notebooks, cell by cell, as Jupyter runs them: `!` lines go to a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.tools import lab

FOLDER = Path(__file__).parents[2] / "examples/notebooks"
NO_LAB = lab.unavailable()
_SHELL = re.compile(r"^!(.*)$", re.MULTILINE)


def cells(name: str) -> list[str]:
    book = json.loads((FOLDER / name).read_text())
    assert all(not cell.get("outputs") for cell in book["cells"]), "outputs are not committed"
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def go_through(name: str) -> str:
    """Run all cells in this folder; gives what the shell's commands printed."""
    said: list[str] = []
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def shell(line: str) -> None:
        done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True)
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, f"{line}\n{said[-1]}"

    names: dict[str, Any] = {"shell": shell}
    for cell in cells(name):
        code = _SHELL.sub(lambda found: f"shell(f{found[1]!r})", cell)
        exec(compile(code, name, "exec"), names)
    return "".join(said)


def test_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "fits" in go_through("one_gpu.ipynb")
    assert any((tmp_path / "checkpoints").iterdir())


@pytest.mark.lab
@pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
def test_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = go_through("lab.ipynb")
    assert said.count("ms per step") >= 2 and "EVENER_DDP=auto: Sequential" in said
