"""Whether a device's kernels give the bits that the CPU's give: tried once, before they are used.

Kernels of Triton are compiled on the user's machine, for a GPU and by a compiler that Evener may
never have run on. What weights travel in must be right, so a few tiles go through them first.
"""

from __future__ import annotations

import functools
import logging

import torch

from evener.comm.codecs import checks, differences
from evener.comm.codecs.rice import EXPONENT, TILE

logger = logging.getLogger("evener.fsdp")


@functools.cache
def differences_are_right(device: torch.device) -> bool:
    """Code tiles on `device` and read them there; False, with a line, where that goes wrong."""
    if device.type == "cpu":
        return True
    try:
        for dtype in EXPONENT:
            _try(device, *_weights(dtype))
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        why = " ".join(str(error).split())[:300] or type(error).__name__
        logger.warning(
            "the kernels for differences of weights do not work on %s (%s): weights travel whole",
            torch.cuda.get_device_name(device) if device.type == "cuda" else device,
            why,
        )
        return False
    return True


def _weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new ones: tiles with a step of an optimizer, a few changes, none, and any bits."""
    chance = torch.Generator().manual_seed(5)
    old = torch.randn(6 * TILE + 5, generator=chance).mul_(0.02)
    size = torch.full_like(old, 3e-4)
    size[2 * TILE : 3 * TILE] = 0
    size[3 * TILE : 4 * TILE] = 2e-6
    new = (old + size * torch.randn(old.numel(), generator=chance)).to(dtype)
    old = old.to(dtype)
    wild = torch.randint(-(2**15), 2**15, (2, TILE), generator=chance).to(torch.int16)
    old[4 * TILE : 5 * TILE], new[4 * TILE : 5 * TILE] = wild.view(dtype)
    return old, new


def _try(device: torch.device, old: torch.Tensor, new: torch.Tensor) -> None:
    there, changed = old.to(device), new.to(device)
    headers, found = differences.plan(new, old), differences.plan(changed, there)
    _equal("headers", found, headers)
    said, told = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64, device=device)
    first, begins = differences.places(headers, said), differences.places(found, told)
    _equal("places", begins, first)
    _equal("sizes", told, said)
    words = int(said)
    message = torch.empty(words, dtype=torch.int32)
    sent = torch.empty(words, dtype=torch.int32, device=device)
    differences.write(new, old, headers, first, message)
    differences.write(changed, there, found, begins, sent)
    _equal("words", sent, message)
    differences.read(sent, there)
    _equal("weights", checks.bits(there), checks.bits(new))
    # With and without weights behind the last whole word.
    for n in (new.numel(), new.numel() // 4 * 4):
        _equal("checksums", checks.checksum(changed[:n]).view(1), checks.checksum(new[:n]).view(1))


def _equal(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    differ = (found.cpu() != wanted).sum().item()
    if differ:
        raise ValueError(f"{differ} of {wanted.numel()} {what} differ from the CPU's")
