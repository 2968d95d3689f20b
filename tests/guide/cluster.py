"""Run the `cluster` blocks of the guide that start a job on hosts, in a lab with an sshd.

    python -m tests.guide.cluster [PAGE ...]      default: the pages of the first ten minutes

gpu1 and gpu2 are two nodes of a lab. The commands are those of the page, as they stand, with the
program that the page shows, or else that of `evener quickstart`. A command of more ranks than 4 is
left out and said, as is one that starts nothing on hosts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evener.tools.lab import Lab, Spec
from tests.guide.blocks import ROOT, blocks, commands, evener_words

PAGES = ("../../README", "ddp", "door", "horovod", "fsdp", "launch", "slow-networks")
MOST = 4
STARTS = re.compile(r"^evener (launch|horovodrun) .*-H gpu1:(\d+),gpu2:(\d+)")


def programs(folder: Path, page: Path) -> None:
    """train.py of the page, and those of `evener quickstart` for its doors."""
    for kind in ("ddp", "fsdp"):
        subprocess.run(
            [sys.executable, "-c", "from evener.cli import main; main()", "quickstart", kind,
             str(folder / kind)], check=True, capture_output=True,
        )  # fmt: skip
        (folder / kind / "evener.toml").unlink()
    shown = [b for b in blocks(page) if b.mark == "file" and b.argument == "train.py"]
    (folder / "page").mkdir()
    for block in shown or []:
        (folder / "page/train.py").write_text(block.text + "\n", encoding="utf-8")
    horovod = next(b for b in blocks(ROOT / "docs/guide/horovod.md") if b.mark == "file")
    (folder / "horovod").mkdir()
    (folder / "horovod/train.py").write_text(horovod.text + "\n", encoding="utf-8")


def place(folder: Path, line: str) -> Path:
    """Where a command's train.py lies."""
    if "--fsdp" in line:
        return folder / "fsdp"
    if "horovod" in line:
        return folder / "horovod"
    if (folder / "page/train.py").exists() and "--ddp" not in line:
        return folder / "page"
    return folder / "ddp"


def main() -> int:
    """A line per command."""
    failed, done = 0, set()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Lab(Spec(nodes=2, slots=2, link="1gbit")) as lab:
        lab.sshd()
        names = "".join(f"{node.addresses[0]} gpu{n + 1}\n" for n, node in enumerate(lab.nodes))
        for node in lab.nodes:
            node.run(["sh", "-c", f"printf '{names}' >> /etc/hosts"])
        for name in sys.argv[1:] or PAGES:
            page = (ROOT / f"docs/guide/{name}.md").resolve()
            folder = Path(tempfile.mkdtemp(prefix="evener-cluster-", dir=ROOT / ".build"))
            programs(folder, page)
            for block in blocks(page):
                if block.mark != "cluster":
                    continue
                for words in commands(block.text):
                    line = " ".join(words)
                    found = STARTS.match(line)
                    ranks = re.search(r"-np (\d+)", line)
                    if not found or evener_words(words) is None or line in done:
                        continue
                    if ranks and int(ranks[1]) > MOST:
                        print(f"left out ({ranks[1]} ranks): {line}", flush=True)
                        continue
                    done.add(line)
                    began = time.monotonic()
                    ran = lab.nodes[0].run(words, cwd=place(folder, line), timeout=300)
                    seconds = time.monotonic() - began
                    said = ran.stdout.strip().splitlines() or ["(nothing)"]
                    failed += ran.returncode != 0
                    state = "ran" if ran.returncode == 0 else f"status {ran.returncode}"
                    print(f"{state} in {seconds:.0f} s: {line}\n    {said[-1]}", flush=True)
                    if ran.returncode:
                        print(ran.stderr[-2000:])
            shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
