"""Go through the pages of the first ten minutes on the wheel, in an empty environment.

    make ten-minutes            # after `make wheel`

The environment gets dist/*.whl and torch, and nothing else. Minutes are printed, and those of
processor time, which other work on the machine does not change. Each page runs
from top to bottom as it stands, by `tests/guide/walk.py`: what a block prints is part of it. Exit
status 1: a command of a page failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.guide.walk import environment, go_through  # noqa: E402

PAGES = ("ddp", "horovod", "operator", "one-gpu")


def clock() -> tuple[float, float]:
    """Seconds that went by, and those of processor time that the processes so far took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), used.ru_utime + used.ru_stime


def main() -> int:
    """A line per page as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help=f"default: {' '.join(PAGES)}")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        print("dist/ has no wheel\n  fix: make wheel", file=sys.stderr)
        return 2
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==[^\s;]+", pins, re.MULTILINE)
    assert torch is not None
    failed, rows = False, {}

    def note(name: str, began: tuple[float, float], said: str) -> None:
        wall, cpu = (now - then for now, then in zip(clock(), began, strict=True))
        rows[name] = {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
        print(f"{name:12} {wall / 60:5.1f} min ({cpu / 60:.1f} of a core): {said}", flush=True)

    with tempfile.TemporaryDirectory(prefix="evener-ten-minutes-") as name:
        folder = Path(name)
        began = clock()
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "uv"
        python = str(folder / "env/bin/python")
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, str(wheels[-1]), torch[0]],
            env={k: v for k, v in os.environ.items() if k != "UV_CONSTRAINT"},
            check=True,
        )
        note("install", began, f"{wheels[-1].name}, {torch[0]}")
        env = environment(folder / "env/bin", EVENER_COMPILE_DIR=str(folder / "compiled"))
        env.pop("VIRTUAL_ENV", None)
        code = "from evener.tools import lab; print(lab.unavailable() or '')"
        lab = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True)
        no_lab = lab.stdout.strip() if not lab.returncode else "evener.tools.lab failed"
        for page in given.pages:
            began = clock()
            there = folder / page
            there.mkdir()
            try:
                walk = go_through(ROOT / f"docs/guide/{page}.md", env, there, no_lab)
                said = f"{walk.ran} blocks" + "".join(f"; skipped: {s}" for s in walk.skipped)
            except AssertionError as error:
                failed, said = True, f"FAILED: {error}"
            note(page, began, said)
    if given.json:
        record = {
            "command": "make ten-minutes",
            "wheel": wheels[-1].name,
            "torch": torch[0],
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "pages": rows,
        }
        given.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
