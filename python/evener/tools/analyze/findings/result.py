"""What NCCL's bare result means where its log is missing: `ncclSystemError`, and no more.

    torch.distributed.DistBackendError: NCCL error in: ...cpp:1333, unhandled system error (run with
      NCCL_DEBUG=INFO for details), NCCL version 2.18.1

A result is a class of errors. It does not name a cause, so this says what to collect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evener.tools.analyze.findings.base import CRASHED, ENDED
from evener.tools.analyze.findings.who import ranks
from evener.tools.analyze.model import Run


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    pattern: re.Pattern[str]
    short: str
    detail: str
    command: str
    root: int


# The order in which one of several is nearer to the reason.
_RESULTS = (
    _Result(
        "ncclUnhandledCudaError",
        re.compile(r"ncclUnhandledCudaError|unhandled cuda error"),
        "a call of CUDA or HIP failed",
        "The usual ones are a driver that does not fit, GPU memory that is full, a GPU that is "
        "not visible or not ready (Fabric Manager), peer access that is refused, and a kernel "
        "that failed before.",
        "nvidia-smi; nvidia-smi -q | grep -A4 Fabric; dmesg -T | grep -iE 'nvrm|xid'",
        CRASHED + 4,
    ),
    _Result(
        "ncclInvalidUsage",
        re.compile(r"ncclInvalidUsage|\binvalid usage"),
        "NCCL was called in a way that it does not allow",
        "The usual ones are two ranks on one GPU, tensors of another GPU than the rank's, and "
        "ranks with different versions of NCCL.",
        "nvidia-smi -L; python -c 'import torch; print(torch.cuda.nccl.version())'    # each host",
        CRASHED + 4,
    ),
    _Result(
        "ncclInvalidArgument",
        re.compile(r"ncclInvalidArgument|NCCL error.*\binvalid argument"),
        "an argument of a call is wrong",
        "The usual ones are a tensor that is not on a GPU or not contiguous, and a rank or root "
        "outside of the group.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL COMMAND",
        CRASHED + 4,
    ),
    _Result(
        "ncclSystemError",
        re.compile(r"ncclSystemError|unhandled system error"),
        "a call of the system failed",
        "The usual ones are sockets (an interface that the other hosts do not reach, a closed "
        "port), /dev/shm that is full, and a network card that may not lock memory or set up a "
        "connection.",
        "df -h /dev/shm; ulimit -l; ip -br addr; ibv_devinfo | grep -E 'hca_id|state'",
        CRASHED + 3,
    ),
    _Result(
        "ncclInternalError",
        re.compile(r"ncclInternalError|internal error - please"),
        "NCCL met something that it did not expect",
        "It is seldom a bug of NCCL: versions 2.18 call every error of the network so, and ranks "
        "that lost a peer during the set-up say it too. The first error of another rank, and "
        "equal versions on all hosts, come first.",
        "python -c 'import torch; print(torch.cuda.nccl.version())'    # on each host",
        ENDED + 4,
    ),
    _Result(
        "ncclRemoteError",
        re.compile(r"ncclRemoteError|remote process exited"),
        "another rank ended, or the network to it failed",
        "This rank only notices. Look at the ranks that print another error, or none.",
        "dmesg -T | grep -iE 'killed process|oom|xid|link'",
        ENDED + 3,
    ),
)


def bare(run: Run) -> tuple[str, str, str, int] | None:
    """Title, meaning, commands and rank among reasons; None where no result is named."""
    texts = [(-1, record.text) for record, _ in run.ended]
    texts += [(r.rank, f"{r.name}: {r.text}") for r in run.evidence.raised if "NCCL" in r.text]
    for one in _RESULTS:
        who = [rank for rank, text in texts if one.pattern.search(text)]
        if not who:
            continue
        named = {rank for rank in who if rank >= 0}
        of = f" on {ranks(named)}" if named else ""
        return (
            f"the run failed: NCCL returned {one.name}{of} ({one.short}), and its log, which says "
            "why, is not here",
            f"{one.detail} NCCL prints the reason only with NCCL_DEBUG=WARN or INFO: set it on "
            "every rank and run again.",
            one.command,
            one.root,
        )
    return None
