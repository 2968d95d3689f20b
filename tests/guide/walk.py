"""A reader who goes through a page: files are written, commands run, from top to bottom."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.guide.blocks import PAGES, ROOT, Block, blocks
from tests.guide.outputs import same, shown

RUNS = ("run", "checkout", "mpi")
SECONDS = 600  # for a block, on a machine with other work on it
__all__ = ["PAGES", "RUNS", "Walk", "environment", "go_through"]


@dataclass
class Walk:
    """What came of it: blocks that this machine cannot run, and what is shown as output."""

    skipped: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    ran: int = 0


def environment(programs: Path, **more: str) -> dict[str, str]:
    """As a reader has it who has activated the environment whose programs are there."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = {**kept, "PATH": f"{programs}:{os.environ['PATH']}", **more}
    if os.geteuid() == 0:  # mpirun wants to be told
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def go_through(
    page: Path,
    env: Mapping[str, str],
    folder: Path | None = None,
    no_lab: str = "",
    check: bool = True,
) -> Walk:
    """Run the blocks of a page in a folder of its own. `no_lab`: why there is no lab here.

    Raises AssertionError where a block fails, or prints what the page does not show.
    """
    walk, last = Walk(), ""
    folder = folder or Path(tempfile.mkdtemp(prefix=f"{page.stem}-"))
    for block in blocks(page):
        if block.mark == "file":
            (folder / block.argument).write_text(block.text + "\n", encoding="utf-8")
        elif block.mark == "output" and last:
            walk.printed.append(last)
            assert not check or same(block.text, last), (
                f"{block}: prints something else; `make outputs` writes it anew\n{shown(last)}"
            )
        elif block.mark in RUNS:
            last = ""
            if no_lab and re.search(r"\blab\b", block.text):
                walk.skipped.append(f"{block} wants a lab: {no_lab}")
            elif block.mark == "mpi" and not shutil.which("mpirun"):
                walk.skipped.append(f"{block} wants mpirun (package openmpi-bin)")
            else:
                last = _run(block, folder, env)
                walk.ran += 1
    return walk


def _run(block: Block, folder: Path, env: Mapping[str, str]) -> str:
    """What it printed."""
    argv = ["python", "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    argv[0] = shutil.which(argv[0], path=env["PATH"]) or argv[0]
    try:
        done = subprocess.run(
            argv,
            input=block.text,
            cwd=ROOT if block.mark == "checkout" else folder,
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{block}: over {SECONDS} s\n{error.stdout}") from error
    assert done.returncode in block.statuses, f"{block}: status {done.returncode}\n{done.stdout}"
    return done.stdout
