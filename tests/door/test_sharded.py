"""EVENER_FSDP: a program that knows nothing of Evener, with and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evener.door.enter import SITE

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
shape = (size,) if "replicas" not in sys.argv else (size, 1)
names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
if rank == 0:
    print("total", total.hex())
dist.destroy_process_group()
"""


def trained(folder: Path, *args: str, **env: str) -> tuple[str, str]:
    """The program's last line, and what was said on the way."""
    script = folder / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    path = os.pathsep.join([str(SITE), *sys.path[1:]])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", "0", "--standalone", str(script), *args),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1], done.stderr


def test_a_program_trains_to_the_same_bits(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    ours, said = trained(tmp_path, EVENER_FSDP="exact")
    assert ours == plain
    assert "EVENER_FSDP=exact: Sequential goes on with Evener" in said
    lossy, _ = trained(tmp_path, EVENER_FSDP="int8")
    assert lossy != plain


def test_replicas_are_left_and_said(tmp_path: Path) -> None:
    _, said = trained(tmp_path, "replicas", EVENER_FSDP="exact")
    assert said.count("is left as it is: its mesh has replicas") == 1


def test_a_value_that_cannot_be_is_said(tmp_path: Path) -> None:
    _, said = trained(tmp_path, EVENER_FSDP="int4")
    assert "Sequential is left as it is" in said
    assert "int4" in said
