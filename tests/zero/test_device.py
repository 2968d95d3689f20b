"""What the accelerator's memory does when it runs out while streams still read what is free."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

# The process ends here where it is wrong: an illegal address is never forgotten by CUDA.
READS_WHAT_IS_FREE = """
import sys, torch
from evener.zero.device import CudaDevice

MB = 1 << 20
device = CudaDevice(0)
device.limit(1024 * MB)
with device.on("back"):
    memory = torch.ones(400 * MB, dtype=torch.uint8, device=device.device)
device.wait("reduce", device.record("back"))
with device.on("reduce"):
    torch.cuda._sleep(1_000_000_000)
    found = memory.view(torch.int32).max()
del memory
if sys.argv[1] == "told":
    device.reading("reduce", "back")
whole = torch.empty(800 * MB, dtype=torch.uint8, device=device.device).fill_(7)
torch.cuda.synchronize()
print(f"{int(found):#x}")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_memory_that_another_stream_reads_stays_on_the_gpu_until_it_has() -> None:
    """As a sum of micro-batches that waits for the network, while the backward pass finds no
    memory: the allocator takes what is free from the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", READS_WHAT_IS_FREE, "told"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "0x1010101"
