"""EVENER_FSDP: a program that knows nothing of Evener, with and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.base.ports import free_port
from evener.door.enter import SITE

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch, torch.distributed as dist
import torch._dynamo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests import forked

forked.ranks(2)
dist.init_process_group("gloo")
rank = dist.get_rank()
for kind in sys.argv[1:]:
    if kind != "replicas":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "unsharded":
        model.unshard()
    torch.manual_seed(rank)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
    if rank == 0:
        print(kind, total.hex())
dist.destroy_process_group()
"""


def trained(folder: Path, *kinds: str, **env: str) -> tuple[str, str]:
    """What the program printed, a line a kind, and what was said on the way."""
    script = folder / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    path = os.pathsep.join([str(SITE), str(ROOT), *sys.path[1:]])
    meet = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(script), *kinds],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **meet, **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


# Sharded; with weights that are gathered before the first forward, as PyTorch's own example
# prefetches; and with replicas, which are left and said.
ALL = "shards", "unsharded", "replicas"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints without Evener."""
    return trained(tmp_path_factory.mktemp("plain"), *ALL)[0]


def test_a_program_trains_to_the_same_bits(tmp_path: Path, plain: str) -> None:
    ours, said = trained(tmp_path, *ALL, EVENER_FSDP="exact")
    assert ours == plain
    assert said.count("EVENER_FSDP=exact: Sequential goes on with Evener") == 2, said
    assert said.count("is left as it is: its mesh has replicas") == 1


def test_a_lossy_form_changes_them(tmp_path: Path, plain: str) -> None:
    ours, _ = trained(tmp_path, "shards", EVENER_FSDP="int8")
    assert ours.splitlines() != plain.splitlines()[:1]


def test_a_value_that_cannot_be_is_said(tmp_path: Path, plain: str) -> None:
    ours, said = trained(tmp_path, "shards", EVENER_FSDP="int3")
    assert ours.splitlines() == plain.splitlines()[:1]
    assert "Sequential is left as it is" in said
    assert "int3" in said
