"""The cluster examples: what they start exists and takes the options that they give it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"


def run(argv: list[str], folder: Path, **env: str) -> str:
    """Output of a command that must succeed, with this environment's programs first."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        argv, cwd=folder, env={**clean, "PATH": path, **env}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sbatch_takes_hosts_and_slots_from_slurm(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    scontrol.chmod(0o755)
    script = str(CLUSTER / "train.sbatch")
    slurm = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4"}
    shown = run(["bash", script, "--dry-run", "train.py", "--lr", "1"], tmp_path, **slurm)
    for part in ("n1", "n2", "n3", "--nproc-per-node=4", "train.py --lr 1"):
        assert part in shown.replace("--nproc-per-node 4", "--nproc-per-node=4"), shown
    shown = run(["bash", script, "--dry-run", "train.py"], tmp_path)
    assert "node1" in shown and "node2" in shown


def test_sbatch_outside_of_slurm_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(CLUSTER / "train.sbatch"), "train.py"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "fix: sbatch" in done.stderr


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """All containers of a manifest, wherever they are."""
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for inner in node.values():
            yield from containers(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from containers(inner)


@pytest.mark.parametrize("name", ["mpijob.yaml", "jobset.yaml"])
def test_commands_of_manifests_are_taken(name: str, tmp_path: Path) -> None:
    manifest = yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))
    commands = [container["command"] for container in containers(manifest)]
    assert commands
    for command in commands:
        assert all(isinstance(word, str) for word in command), command
        if command[0] == "evener":
            hostfile = tmp_path / "hostfile"  # as the operator writes it
            hostfile.write_text("evener-train-worker-0 slots=8\nevener-train-worker-1 slots=8\n")
            command = [word.replace("/etc/mpi/hostfile", str(hostfile)) for word in command]
            at = command.index("launch") + 1
            words = [sys.executable, "-m", *command[:at], "--dry-run", *command[at:]]
            shown = run(words, tmp_path)
            assert "train.py" in shown and "evener-train-worker-1" in shown
        elif command[0] == "torchrun":
            taken = get_args_parser().parse_args(command[1:])
            job = f"{manifest['metadata']['name']}-{manifest['spec']['replicatedJobs'][0]['name']}"
            assert taken.rdzv_endpoint.startswith(f"{job}-0-0.{manifest['metadata']['name']}:")
            assert taken.nnodes == str(manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"])  # fmt: skip  # noqa: E501
        else:
            assert command[0] == "/usr/sbin/sshd"


def test_ray_example_trains_without_ray(tmp_path: Path) -> None:
    shown = run([sys.executable, str(CLUSTER / "ray_train.py"), "--dry-run"], tmp_path)
    assert "rank 0 of 1: loss" in shown
