"""Run a bounded list of tests with other versions of torch, TensorFlow and Python; print a table.

    make matrix                                   the oldest and the newest torch
    make matrix ARGS="--torch 2.9,2.15 --python 3.10,3.12 --tensorflow 2.21"

A cell is a virtual environment under .build/matrix, made once: one torch, one Python, and what the
tests import. Evener itself is the checkout's (its native module is abi3). A Python that is not on
this machine, and a torch that has no wheel for a Python, give a cell that says so. What each group
of tests came to is kept in benchmarks/results/matrix.json, which later runs add to, and shown in
docs/guide/install.md. Exit status 1: a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CELLS = ROOT / ".build" / "matrix"
RECORD = ROOT / "benchmarks" / "results" / "matrix.json"
PAGE = ROOT / "docs" / "guide" / "install.md"
TORCH = ("2.9", "2.11", "2.13", "2.15")
NEEDS = (
    *("pytest", "pytest-timeout", "hypothesis", "numpy>=1.26", "click>=8.1", "rich>=13"),
    *("jinja2", "pyyaml", "safetensors", "pyroute2>=0.9.1"),
)
# The shortest tests that go through each pillar's use of torch; the rest is `make test`.
TESTS = {
    "fsdp": "tests/test_fsdp.py tests/test_fsdp_sharded.py",
    "door": "tests/door/test_door.py",
    "ddp": "tests/comm/test_as_ddp.py",
    "overlap": "tests/comm/test_overlap.py",
    "horovod": "tests/horovod/test_operations.py",
    "zero": "tests/zero/test_engine.py tests/zero/test_engine_face.py "
    "tests/zero/test_activations.py tests/zero/test_rules.py",
    "pipeline": "tests/pipeline/test_plan.py tests/pipeline/test_run.py",
    "moe": "tests/moe/test_layer.py tests/moe/test_convert.py",
    "embedding": "tests/embedding -k torch --ignore=tests/embedding/tensorflow",
    "compile": "tests/compile -k torch",
    "precision": "tests/precision -k torch",
    "calls": "tests/test_given.py",
}
TF_TESTS = {
    "embedding": "tests/embedding/test_tensorflow.py",
    "compile": "tests/compile/test_tensorflow.py",
    "precision": "tests/precision/test_keras.py",
    "horovod": "tests/horovod/test_tensorflow.py",
}


def interpreter(version: str) -> str | None:
    """A Python of that version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    others = [str(p) for p in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, [shutil.which(f"python{version}"), *others]):
        # A shim of pyenv is there for versions that it does not give.
        if not subprocess.run([candidate, "--version"], capture_output=True).returncode:
            return candidate
    return None


def cell(package: str, version: str, python: str) -> Path | str:
    """The environment of a cell, or why there is none."""
    uv = shutil.which("uv", path=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}") or "uv"
    found = interpreter(python)
    if found is None:
        return f"no Python {python} here"
    folder = CELLS / f"{package}-{version}-py{python}"
    if not (folder / "made").exists():
        print(f"making {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([found, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        # The pins of development are for another Python and torch.
        env = {name: value for name, value in os.environ.items() if name != "UV_CONSTRAINT"}
        words = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
        made = subprocess.run([*words, f"{package}=={version}.*", *NEEDS], env=env,
                              capture_output=True, text=True)  # fmt: skip
        if made.returncode:
            return f"no wheel: {(made.stderr.strip().splitlines() or ['?'])[-1][:60]}"
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "checkout.pth").write_text(f"{ROOT / 'python'}\n")
        (folder / "made").touch()
    return folder


def outcome(python: Path, name: str, tests: str, seconds: int) -> dict[str, object]:
    """pytest's counts, and which tests failed."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m",
               "not gpu and not lab and not mpi", *tests.split()]  # fmt: skip
    begin = time.monotonic()
    env = {**os.environ, "VIRTUAL_ENV": str(python.parents[1])}
    log = CELLS / f"{python.parents[1].name}-{name}.log"
    with log.open("w+") as out:
        try:
            status: int | str = subprocess.run(
                command, cwd=ROOT, env=env, stdout=out, stderr=out, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"over {seconds} s"
        out.seek(0)
        said = out.read()
    last = (said.splitlines() or [""])[-1]
    found: dict[str, object] = {
        kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }
    if status not in (0, 1):
        found["status"] = status
    if wrong := re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE):
        found["wrong"] = wrong
    return found | {"seconds": round(time.monotonic() - begin)}


def versions(python: Path) -> dict[str, str]:
    """What a cell has, of what matters."""
    code = (
        "import importlib.metadata as m, json, sys; names = 'torch triton nvidia-nccl-cu12"
        " nvidia-nccl-cu13 tensorflow-cpu keras numpy'.split()\n"
        "found = {d.metadata['Name'].replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': sys.version.split()[0]} | {n: found[n] for n in names"
        " if n in found}))"
    )
    return dict(json.loads(subprocess.check_output([str(python), "-c", code])))


def keep(cell: str, has: dict[str, str], name: str, found: dict[str, object]) -> None:
    """Put a group's outcome beside those of other cells and runs."""
    record: dict[str, Any] = {"command": "make matrix"}
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    there = record.setdefault("cells", {}).setdefault(cell, {})
    there["versions"] = has
    there.setdefault("tests", {})[name] = found
    record["cells"] = dict(sorted(record["cells"].items()))
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(TABLE, lambda _: table(record), page), encoding="utf-8")


TABLE = r"(?ms)^\| packages \|.*?\n(?=\n)"


def table(record: dict[str, Any]) -> str:
    """A row per cell: what passed, what was skipped, which groups of tests did not pass."""
    head = "| packages | Python | passed | skipped | groups of tests | not passed |\n"
    rows = [head + "|---|---|---:|---:|---|---|\n"]
    for cell in record["cells"].values():
        has = dict(cell["versions"])
        python = has.pop("python")
        named = [f"{n.replace('nvidia-nccl-cu12', 'NCCL').replace('nvidia-nccl-cu13', 'NCCL')} {v}"
                 for n, v in has.items() if n != "numpy"]  # fmt: skip
        counts = {k: sum(int(t.get(k, 0)) for t in cell["tests"].values())
                  for k in ("passed", "skipped")}  # fmt: skip
        wrong = [f"{name}: {_wrong(t)}" for name, t in cell["tests"].items()
                 if "wrong" in t or "status" in t]  # fmt: skip
        rows.append(
            f"| {', '.join(named)} | {python} | {counts['passed']} | {counts['skipped']} | "
            f"{_groups(cell['tests'])} | {'; '.join(wrong)} |\n"
        )
    return "".join(rows)


def _groups(tests: dict[str, Any]) -> str:
    return "all" if set(tests) in (set(TESTS), set(TF_TESTS)) else ", ".join(tests)


def _wrong(group: dict[str, Any]) -> str:
    names = [f"`{name.rpartition('::')[2]}`" for name in group.get("wrong", ())]
    if "status" in group:
        return str(group["status"])
    return ", ".join(names) if len(names) < 4 else f"{len(names)} tests"


def main() -> int:
    """Print a row per cell as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default=f"{TORCH[0]},{TORCH[-1]}")
    parser.add_argument("--python", default="")
    parser.add_argument("--tensorflow", default="")
    parser.add_argument("--tests", default=",".join(TESTS), help=f"of {', '.join(TESTS)}")
    parser.add_argument("--seconds", type=int, default=600, help="for each group of tests")
    given = parser.parse_args()
    chosen = given.tests.split(",")
    cells = [("torch", v, p) for v in filter(None, given.torch.split(","))
             for p in (given.python or ("3.10" if v == "2.9" else "3.12")).split(",")]  # fmt: skip
    cells += [("tensorflow-cpu", v, p) for v in filter(None, given.tensorflow.split(","))
              for p in (given.python or "3.12").split(",")]  # fmt: skip
    print("| packages | Python | tests | outcome |\n|---|---|---|---|", flush=True)
    failed = False
    for package, version, python in cells:
        there = cell(package, version, python)
        if isinstance(there, str):
            print(f"| {package} {version} | {python} | | {there} |", flush=True)
            continue
        suite = TF_TESTS if package.startswith("tensorflow") else {n: TESTS[n] for n in chosen}
        for name, tests in suite.items():
            found = outcome(there / "bin/python", name, tests, given.seconds)
            keep(there.name, versions(there / "bin/python"), name, found)
            failed |= "passed" not in found or "wrong" in found or "status" in found
            said = ", ".join(f"{n} {kind}" for kind, n in found.items() if kind != "wrong")
            print(f"| {package} {version} | {python} | {name} | {said} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
