"""Where a rank of a benchmark runs: its device, its group, and what its node's cards have sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a benchmark of TensorFlow does without
    import torch


def settle() -> None:
    """Return when the GPU, where there is one, has done everything."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device(threads: int = 1) -> torch.device:
    """This rank's device, now the current one; on a CPU torch gets `threads`.

    The nodes of a lab see all GPUs of the machine: where there are enough each rank has its own.
    """
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    enough = count >= int(os.environ.get("WORLD_SIZE", "1"))
    number = int(os.environ.get("RANK" if enough else "LOCAL_RANK", "0")) % count
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def join(threads: int = 1) -> torch.device:
    """As `device`, with a default group of Gloo and, on a GPU, NCCL."""
    import torch.distributed as dist

    found = device(threads)
    dist.init_process_group("cpu:gloo,cuda:nccl" if found.type == "cuda" else "gloo")
    return found


def sent_bytes() -> int:
    """Bytes that this node's cards have sent, headers included, loopback apart."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(field[9]) for field in fields if field[0] != "lo")
