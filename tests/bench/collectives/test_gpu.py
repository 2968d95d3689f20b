"""On GPUs: NCCL through ctypes, checked results, graphs, groups, threads, aggregation.

All in this process but the last three, because a process takes longer to start than to measure.
-T ends a collective that hangs; what hangs inside CUDA or NCCL is for the runner's limit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.tools.bench.collectives.names import NAMES
from evener.tools.bench.collectives.options import Options
from evener.tools.bench.collectives.run import run

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="no GPU"),
]
two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
RUN = (
    "import sys; from evener.base.click import run; "
    "from evener.tools.bench.collectives import command; "
    "name = sys.argv.pop(1); run(lambda: getattr(command, name)(prog_name=name))"
)


@pytest.fixture(autouse=True)
def plain_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVLink multicast is not there in every virtual machine; a plug-in is not what is tested."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")


def bench(tmp_path: Path, name: str, **given: Any) -> dict[str, Any]:
    path = tmp_path / "out.json"
    defaults = {"minbytes": 1 << 10, "maxbytes": 1 << 20, "stepfactor": 32, "iters": 5}
    options = Options(**{**defaults, **given, "timeout": 60, "output_file": str(path)})
    assert run(name, options, [])
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_all_gpus_of_one_process(name: str, tmp_path: Path) -> None:
    gpus = 1 << (GPUS.bit_length() - 1)
    found = bench(tmp_path, name, minbytes=8, maxbytes=8 << 20, stepfactor=64, ngpus=gpus)
    assert found["out_of_bounds"]["okay"]
    assert found["config"]["devices"][-1]["rank"] == gpus - 1


@pytest.mark.parametrize(
    "more",
    [
        {"cudagraph": 2},
        {"cudagraph": 2, "agg_iters": 2},
        {"agg_iters": 4},
        {"blocking": 1},
        {"blocking": 3},
        {"stream_null": 1},
        {"local_register": 1},
        {"local_register": 2},
        {"unalign": 1},
        {"report_cputime": 1},
        {"op": "all"},
        {"datatype": "all"},
    ],
    ids=str,
)
def test_options(more: dict[str, Any], tmp_path: Path) -> None:
    assert bench(tmp_path, "all_reduce", ngpus=min(GPUS, 2), **more)["out_of_bounds"]["okay"]


def test_graphs_of_a_collective_with_several_steps(tmp_path: Path) -> None:
    gpus = 1 << (GPUS.bit_length() - 1)
    assert bench(tmp_path, "hypercube", ngpus=gpus, cudagraph=1)["out_of_bounds"]["okay"]


def test_single_iterations_are_timed(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "all_reduce", ngpus=min(GPUS, 2), per_iter_timing=1, per_iter_skip=1, memory=1
    )
    for row in found["results"]:
        each = row["in_place_per_iter"]
        assert len(each["times_us"]) == 5
        assert 0 < each["min_us"] <= each["p50_us"] <= each["p99_us"] <= each["max_us"]
    assert found["gpu_memory"]["buffers"] >= 2 << 20


@two
@pytest.mark.parametrize("parallel", [0, 1])
@pytest.mark.parametrize("cudagraph", [0, 1])
def test_threads(parallel: int, cudagraph: int, tmp_path: Path) -> None:
    found = bench(
        tmp_path, "all_reduce", nthreads=2, minbytes=8, parallel_init=parallel, cudagraph=cudagraph
    )
    assert len(found["config"]["devices"]) == 2
    assert found["out_of_bounds"]["okay"]


@two
def test_torchrun_and_own_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shown = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "--no-python", sys.executable, "-c", RUN, "all_reduce", "-b", "8", "-e", "1M", "-f",
            "32", "-J", str(path), "--algo", "flat,2d+bf16",
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = json.loads(path.read_text())
    assert found["out_of_bounds"]["okay"]
    assert {row["algorithm"] for row in found["algorithms"]} == {"flat", "2d+bf16"}
    assert all(row["nwrong"] == 0 for row in found["algorithms"])


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shown = subprocess.run(
        [sys.executable, "-c", RUN, "all_reduce", "-b", "8", "-e", "64", "-f", "2", "-J", path],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "NCCL_DEBUG": "WARN"},
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert json.loads(path.read_text())["out_of_bounds"]["okay"]


def test_more_gpus_than_there_are() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", RUN, "all_reduce", "-g", str(GPUS + 1)],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert shown.returncode == 2
    assert "GPUs asked for" in shown.stderr
