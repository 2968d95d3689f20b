"""The Horovod door across simulated hosts: mpirun without any address, and `evener launch`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest

from evener.tools.lab import Lab
from evener.tools.launch import horovod_path
from tests.conftest import START
from tests.horovod.test_door import SCRIPT

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PLACE = "print('PLACE', hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("2x2@1gbit") as built:
        yield built


@pytest.mark.mpi
@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (package openmpi-bin)")
def test_plain_mpirun_over_two_hosts(lab: Lab) -> None:
    first = lab.nodes[0]
    command = [
        "mpirun",
        "-np",
        "4",
        "-H",
        "node0:2,node1:2",
        "-x",
        f"PYTHONPATH={horovod_path.ALIAS}:{START}",
    ]
    command += ["-x", "LIGHT_2D_ALLREDUCE=1", "-x", "LIGHT_INTRA_SIZE=2", "-x", "OMP_NUM_THREADS=1"]
    # The lab's nodes have these from the lab's launcher, a cluster's have not.
    unset = "unset MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME NCCL_HOSTID RANK WORLD_SIZE; "
    done = first.run(
        [*command, "sh", "-c", unset + 'exec "$0" -c "$1"', sys.executable, SCRIPT + PLACE],
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "Total on 4 CPU(s), 0.28.1" in done.stdout
    assert "rendezvous by PMIx" in done.stderr or "rendezvous by mpi4py" in done.stderr
    assert "2-D all-reduce (2 nodes, inner groups of 2)" in done.stderr
    places = sorted(line for line in done.stdout.splitlines() if line.startswith("PLACE"))
    assert places == ["PLACE 0 0 2 0", "PLACE 1 1 2 0", "PLACE 2 0 2 1", "PLACE 3 1 2 1"]


def test_evener_launch_over_two_hosts(lab: Lab) -> None:
    first = lab.nodes[0]
    agent = first.environment()["OMPI_MCA_plm_rsh_agent"]
    code = "from evener.cli import main; main()"
    command = [sys.executable, "-c", code, "launch", "--horovod", "--rsh", agent]
    done = first.run([*command, "-H", "node0:1,node1:1", sys.executable, "-c", SCRIPT], timeout=150)
    assert done.returncode == 0, done.stderr
    assert "[0@node0] Total on 2 CPU(s), 0.28.1" in done.stdout
