"""CUDA streams for communication that do not hold up training, nor each other.

The driver hands its queues to the device (CUDA_DEVICE_MAX_CONNECTIONS, 8 where unset) to streams,
round and round, and a stream that waits for the network holds up whatever comes after it in the
same queue, also of other streams. torch's streams of high priority share two. So these are made one
by one, and tried: one waits, the others and the current stream must go on (`crates/staging`).

Streams are taken and given back; none is ever destroyed.
"""

from __future__ import annotations

import logging

import torch

from evener import _native

logger = logging.getLogger("evener.comm")

# Enough for a reducer with a staged transport: its own two, those of its lanes, the optimizer's.
_BATCH = 6
_FREE: dict[torch.device, list[torch.cuda.Stream]] = {}


def take(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """`count` streams of high priority that nobody else uses."""
    free = _FREE.setdefault(device, [])
    if len(free) < count:
        free += _more(device, max(_BATCH, count - len(free)))
    taken, free[:] = free[:count], free[count:]
    return taken


def give_back(device: torch.device, streams: list[torch.cuda.Stream]) -> None:
    """Nothing will be enqueued on them by whoever took them."""
    _FREE.setdefault(device, []).extend(streams)


def _more(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    if torch.version.hip is None:
        try:
            with torch.cuda.device(device):
                beside = torch.cuda.current_stream(device).cuda_stream
                made = _native.new_streams(count, beside)
            return [torch.cuda.ExternalStream(stream, device) for stream in made]
        except RuntimeError as error:
            logger.warning("streams may hold each other up, which costs time: %s", error)
    return [torch.cuda.Stream(device, priority=-1) for _ in range(count)]
