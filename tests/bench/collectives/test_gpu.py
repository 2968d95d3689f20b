"""On GPUs: NCCL through ctypes, checked results, graphs, groups, threads, aggregation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.bench.collectives.names import NAMES

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no GPU"),
]
RUN = (
    "import sys; from evener._click import run; from evener.bench.collectives import command; "
    "name = sys.argv.pop(1); run(lambda: getattr(command, name)(prog_name=name))"
)


def bench(tmp_path: Path, name: str, *arguments: str) -> dict:
    path = tmp_path / "out.json"
    shown = subprocess.run(
        [sys.executable, "-c", RUN, name, "-J", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_all_gpus_of_one_process(name: str, tmp_path: Path) -> None:
    gpus = 1 << (GPUS.bit_length() - 1)
    found = bench(tmp_path, name, "-b", "8", "-e", "8M", "-f", "64", "-g", str(gpus), "-n", "5")
    assert found["out_of_bounds"]["okay"]
    assert found["config"]["devices"][-1]["rank"] == gpus - 1


@pytest.mark.parametrize(
    "more",
    [
        ["-G", "2"],
        ["-m", "4"],
        ["-z", "1"],
        ["-z", "3"],
        ["-y", "1"],
        ["-R", "1"],
        ["-u", "1"],
        ["-C", "1"],
        ["-o", "all"],
        ["-d", "all"],
    ],
)
def test_options(more: list[str], tmp_path: Path) -> None:
    size = ["-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-g", str(min(GPUS, 2))]
    assert bench(tmp_path, "all_reduce", *size, *more)["out_of_bounds"]["okay"]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_threads(tmp_path: Path) -> None:
    found = bench(tmp_path, "all_reduce", "-t", "2", "-b", "8", "-e", "1M", "-f", "32", "-n", "5")
    assert len(found["config"]["devices"]) == 2
    assert found["out_of_bounds"]["okay"]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shown = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "--no-python", sys.executable, "-c", RUN, "all_reduce", "-b", "8", "-e", "1M", "-f",
            "32", "-J", str(path),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert json.loads(path.read_text())["out_of_bounds"]["okay"]


def test_more_gpus_than_there_are(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", RUN, "all_reduce", "-g", str(GPUS + 1)],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert shown.returncode == 2
    assert "GPUs asked for" in shown.stderr
