"""`import horovod` is Evener's: by `evener launch --horovod`, under plain mpirun, as a package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evener.tools.launch import horovod_path
from tests.conftest import START

# In the style of upstream's synthetic benchmark: what such scripts import and print.
SCRIPT = """
import atexit
import os
import time
import timeit
import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.torch.mpi_ops import synchronize
from evener.comm.world import gloo

# Runs after Horovod's own end, which must leave no thread that could need the interpreter. The
# kernel lists a thread for a moment after it was joined.
def last():
    end = time.monotonic() + 5
    while gloo.threads():
        if time.monotonic() > end:
            os._exit(9)
        time.sleep(0.01)
atexit.register(last)
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(8, 20), torch.randint(10, (8,))

def step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()

timeit.timeit(step, number=3)
import evener.horovod.torch.mpi_ops
assert synchronize is evener.horovod.torch.mpi_ops.synchronize
try:
    import horovod.mxnet
except ModuleNotFoundError as error:
    assert error.name == "horovod.mxnet"
if hvd.rank() == 0:
    print("Total on %d CPU(s), %s" % (hvd.size(), horovod.__version__.split("+")[0]))
"""


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_evener_launch_puts_it_in_place(script: Path) -> None:
    code = "from evener.cli import main; main()"
    command = [sys.executable, "-c", code, "launch", "--horovod", "-np", "1", "--no-tag"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Total on 1 CPU(s), 0.28.1\n"  # several: test_lab
    assert "`import horovod` is Evener's" in done.stderr


@pytest.mark.mpi
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (package openmpi-bin)")
def test_plain_mpirun_with_lightccs_variables(script: Path) -> None:
    variables = {
        "LIGHT_INTRA_SIZE": "2",
        "LIGHT_2D_ALLREDUCE": "1",
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_THRESHOLD": "2097152",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": "0",
        "PYTHONPATH": f"{horovod_path.ALIAS}:{START}",
    }
    passed = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    done = subprocess.run(
        ["mpirun", "-np", "2", "--oversubscribe", *passed, sys.executable, str(script)],
        env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "Total on 2 CPU(s), 0.28.1" in done.stdout


def test_the_distribution_holds_the_same_file() -> None:
    package = Path(__file__).parents[2] / "compat" / "horovod" / "horovod"
    assert package.resolve() == (horovod_path.ALIAS / "horovod").resolve()
    assert [path.name for path in package.glob("*.py")] == ["__init__.py"]


def test_an_installed_horovod_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "horovod":
            return "0.28.1"
        raise horovod_path.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(horovod_path.importlib.metadata, "version", version)
    path, note = horovod_path.put_in_place(f"/a{os.pathsep}/b")
    assert path.split(os.pathsep) == [str(horovod_path.ALIAS), "/a", "/b"]
    assert "installed upstream Horovod 0.28.1 is not used" in note
    assert "upstream's Horovod 0.28.1" in horovod_path.describe()
