"""Hosts from a batch system: read right, and used where there is no mpirun to know them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.tools.launch import batch
from evener.tools.launch.hosts import Host


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", "gpu1"),
        ("gpu[1-3]", "gpu1 gpu2 gpu3"),
        ("gpu[08-10,3],login", "gpu08 gpu09 gpu10 gpu3 login"),
        ("r[1-2]n[01-02]-ib.example.org", " ".join(
            f"r{r}n0{n}-ib.example.org" for r in (1, 2) for n in (1, 2)
        )),
        ("a-[1]-b,c", "a-1-b c"),
    ],
)  # fmt: skip
def test_slurms_short_form(text: str, names: str) -> None:
    assert batch.expand(text) == names.split()


@pytest.mark.parametrize(
    "text", ["", "gpu[1-", "gpu[1-x]", "gpu[1-999999999]", "gpu 1", "[", ",", "$(x)"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        batch.expand(text)


@given(st.text(alphabet="g1,[]-x ", max_size=20))
def test_any_list_is_read_or_refused(text: str) -> None:
    try:
        assert all(batch.expand(text))
    except UsageError as error:
        assert error.fix


def test_slots_are_tasks_or_gpus() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "g[1-3]"}
    assert batch.hosts(job) == [Host("g1", 1), Host("g2", 1), Host("g3", 1)]
    tasks = {**job, "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert [host.slots for host in batch.hosts(tasks)] == [2, 2, 1]
    assert [host.slots for host in batch.hosts({**job, "SLURM_GPUS_ON_NODE": "8"})] == [8, 8, 8]


def test_files_of_pbs_and_lsf(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\na\nb\n")
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        assert batch.hosts({name: str(file)}) == [Host("a", 2), Host("b", 1)]
        with pytest.raises(UsageError, match=name):
            batch.hosts({name: str(tmp_path / "none")})
    assert batch.hosts({}) == []


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Without mpirun on the PATH."""
    here = {**os.environ, "PATH": "/nowhere", **env}
    command = [sys.executable, "-m", "evener", "launch", *arguments, "--dry-run", sys.executable]
    return subprocess.run(command, env=here, capture_output=True, text=True, timeout=60)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[8-9].invalid", "SLURM_NTASKS": "4"}


def test_two_slurm_nodes_without_mpirun_get_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("")
    (tmp_path / "ssh").chmod(0o755)
    slurm = {**SLURM, "SLURM_TASKS_PER_NODE": "2(x2)", "PATH": str(tmp_path)}
    for arguments in (["-np", "4"], [], ["--torchrun", "-np", "4"]):
        done = launch(*arguments, **slurm)
        assert done.returncode == 0, done.stderr
        _, *hosts = done.stdout.splitlines()
        assert len(hosts) == 2
        for name, line in zip(("gpu8.invalid", "gpu9.invalid"), hosts, strict=True):
            assert name in line
            assert "--nproc-per-node=2" in line
    assert "the hosts are Slurm's" in launch("-np", "4", **slurm).stdout
    done = launch("-np", "5", **slurm)
    assert done.returncode == 2
    assert "-np 5 needs 5 slots, but there are 4" in done.stderr


def test_one_slurm_node_runs_as_many_ranks_as_were_asked_for() -> None:
    done = launch("-np", "2", **{**SLURM, "SLURM_JOB_NODELIST": "gpu8.invalid"})
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node=2" in done.stdout
