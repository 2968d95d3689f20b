"""CUDA and NCCL inside nodes: two hosts with GPUs of their own, on one machine."""

from __future__ import annotations

import sys

import pytest

from evener.tools.lab import Lab, Spec
from evener.tools.lab.environment import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.lab]


def lines_of(lab: Lab, script: str, **env: str) -> list[str]:
    lines: list[str] = []
    result = lab.launch(
        [sys.executable, "-c", script],
        env=env,
        timeout=150,
        on_line=lambda *line: lines.append(line[3]),
    )
    assert result.ok, lines
    return lines


@pytest.mark.skipif(len(gpus()) < 1, reason="needs a GPU")
def test_cuda_works_in_a_node() -> None:
    script = (
        "import torch; print(torch.ones(3, device='cuda').sum().item(), torch.cuda.device_count())"
    )
    with Lab(Spec(nodes=1)) as lab:
        assert lines_of(lab, script)[-1] == "3.0 1"


@pytest.mark.skipif(len(gpus()) < 1, reason="needs a GPU")
def test_nccl_goes_through_the_network_between_nodes() -> None:
    script = (
        "import torch, torch.distributed as dist, os\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('nccl')\n"
        "value = torch.full((1 << 20,), float(dist.get_rank() + 1), device='cuda')\n"
        "dist.all_reduce(value)\n"
        "torch.cuda.synchronize()\n"
        "print('sum', value[0].item())\n"
        "dist.destroy_process_group()\n"
    )
    slots = max(1, len(gpus()) // 2)
    with Lab(Spec(nodes=2, slots=slots, link="10gbit")) as lab:
        # One rank per node on 16 processors: Evener's plug-in would carry it.
        env = {"NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "0", "EVENER_NET": "off"}
        lines = lines_of(lab, script, **env)
        world = 2 * slots
        assert lines.count(f"sum {world * (world + 1) / 2}") == world
        assert any("NET/Socket" in line and "eth0" in line for line in lines), lines
        assert sum(lab.traffic().values()) > 4 << 20  # the buffer crossed it
