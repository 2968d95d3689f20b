"""What a script of tests/wild uses. It runs in the program's own environment, on each rank.

from tests.wild import harness as wild

wild.begin()                     seeds, one thread, the process group where the script wants one
wild.watch(model)                the weights that are compared; before training
wild.line(ddp, optimizer)        here the user of a door writes its line, if it has one
wild.step(loss)                  after each step
wild.end()                       leaves the results for the runner
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("WILD_STEPS", "50"))
RANK = int(os.environ.get("RANK", "0"))
OUT = Path(os.environ.get("WILD_OUT", "."))
SCRATCH = OUT / f"scratch{RANK}"  # a folder of this rank, empty at the start
HOROVOD = os.environ.get("WILD_LINE") == "horovod"  # the program uses Horovod, and not DDP

_watched: list[torch.nn.Module] = []
_start: dict[str, torch.Tensor] = {}
_losses: list[float] = []
_times: list[float] = []


def begin(group: bool = False) -> None:
    """Seeds and threads; `group`: make the default process group (a framework does it itself)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    if group:
        dist.init_process_group("gloo")


def data(step: int, *shape: int) -> torch.Tensor:
    """Normal numbers of this rank's batch in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randn(*shape, generator=generator)


def tokens(step: int, high: int, *shape: int) -> torch.Tensor:
    """Integers below `high` of this rank's batch in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randint(high, shape, generator=generator)


def watch(*models: torch.nn.Module) -> None:
    """Compare these models' weights at the end."""
    _watched.extend(models)
    _start.update(_weights())


def line(model: Any, *optimizers: Any) -> None:
    """The place of a door's line. `model`: the DistributedDataParallel."""
    kind = os.environ.get("WILD_LINE", "")
    if not kind or HOROVOD:
        return
    import evener.base.log
    import evener.ddp

    if kind == "model":
        evener.ddp.accelerate(model)
    else:
        evener.ddp.accelerate(model, optimizers[0])


def step(loss: Any) -> None:
    """A step is over; its loss on this rank."""
    _losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
    _times.append(time.perf_counter())


def end() -> None:
    """Leave losses, weights, times and the weights' hash; end the process group."""
    weights = _weights()
    digest = hashlib.sha256()
    for name in sorted(_parameters()):
        digest.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    laps = sorted(b - a for a, b in itertools.pairwise(_times))
    half = _times[len(_times) // 2 :]
    late = sorted(b - a for a, b in itertools.pairwise(half))
    torch.save(
        {
            "losses": _losses,
            "start": _start,
            "weights": weights,
            "hash": digest.hexdigest(),
            "step_s": late[len(late) // 2] if late else laps[0] if laps else 0.0,
        },
        OUT / f"rank{RANK}.pt",
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _weights() -> dict[str, torch.Tensor]:
    """Whole tensors, also where each rank has a part: collective there."""
    return {
        f"{index}.{name}": getattr(value, "full_tensor", lambda value=value: value)()
        .detach()
        .to("cpu", copy=True)
        for index, model in enumerate(_watched)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _parameters() -> set[str]:
    """Names of what all ranks must hold alike: buffers may be a rank's own under DDP too."""
    names = set()
    for index, model in enumerate(_watched):
        kept = model.state_dict().keys()
        names |= {f"{index}.{name}" for name, _ in model.named_parameters() if name in kept}
    return names
