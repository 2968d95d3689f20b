"""HOROVOD_RANK and its like: every launcher tells a rank its place before the program begins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evener.horovod.torch as hvd
from evener.tools.launch.horovod_env import place, translated
from tests import worlds

SHOW = """
import json, os, sys
told = {k: v for k, v in os.environ.items() if k.startswith("HOROVOD_")}
sys.stdout.write(json.dumps(told) + "\\n")
sys.stdout.flush()
"""
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_places_count_each_rank_once(slots: list[int]) -> None:
    found = [place(rank, slots) for rank in range(sum(slots))]
    assert [(host, local) for host, local, *_ in found] == [
        (host, local) for host, count in enumerate(slots) for local in range(count)
    ]
    for local in range(max(slots)):
        crosses = [(cross, size) for _, mine, _, cross, size in found if mine == local]
        assert crosses == [(i, len(crosses)) for i in range(len(crosses))]


def test_what_is_not_known_is_not_said() -> None:
    torchrun = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = translated({**torchrun, "MASTER_ADDR": "gpu1", "MASTER_PORT": "7"}, "gpu1:2,gpu2:1")
    assert [found[f"HOROVOD_{name}"] for name in NAMES] == ["2", "3", "0", "1", "1", "2"]
    assert found["HOROVOD_HOSTNAME"] == "gpu2"
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "gpu1"
    # mpirun by node: rank 1 is the first of the second host.
    by_node = {f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "1"), ("SIZE", "4"))}
    by_node |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    found = translated(by_node, "gpu1:2,gpu2:2")
    assert found["HOROVOD_LOCAL_RANK"] == "0"
    assert "HOROVOD_CROSS_RANK" not in found
    assert "HOROVOD_HOSTNAME" not in found
    assert translated({}, "gpu1:1") == {}


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_"))}


def shown(arguments: list[str]) -> list[dict[str, str]]:
    code = "from evener.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, sys.executable, "-c", SHOW],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda found: found["HOROVOD_RANK"])


@pytest.mark.parametrize(
    "engine",
    [
        "--torchrun",
        pytest.param(
            "--mpi",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)"),
            ],
        ),
    ],
)
def test_launch_tells_them(engine: str) -> None:
    extra = ["--mpi-args=--oversubscribe"] if engine == "--mpi" else []
    found = shown(["launch", "--horovod", engine, *extra, "-np", "2", "--no-tag"])
    for rank, told in enumerate(found):
        places = [told[f"HOROVOD_{name}"] for name in NAMES]
        assert places == [str(rank), "2", str(rank), "2", "0", "1"]
        assert told["HOROVOD_CONTROLLER"] == told["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert told["HOROVOD_HOSTNAME"]


def test_the_lab_tells_them_and_serves_the_door(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHOW + "import horovod.torch\nassert 'evener' in horovod.__version__\n")
    code = "from evener.cli import main; main()"
    command = [sys.executable, "-c", code, "lab", "run", "--spec", "2x1", "--loopback", "--horovod"]
    done = subprocess.run(
        [*command, f"--keep={tmp_path}", "--no-prefix", "--", sys.executable, str(script)],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = sorted((json.loads(line) for line in lines), key=lambda told: told["HOROVOD_RANK"])
    for rank, told in enumerate(found):
        assert [told[f"HOROVOD_{n}"] for n in NAMES] == [str(rank), "2", "0", "1", str(rank), "2"]


def told_by_init(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    hvd.init()
    for name in NAMES:
        assert os.environ[f"HOROVOD_{name}"] == str(getattr(hvd, name.lower())())


def test_init_says_it_under_launchers_that_do_not() -> None:
    worlds.run([1, 2], told_by_init)
