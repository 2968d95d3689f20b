"""Weights of 16 bits as differences to those that the receiver holds: exact, in a few bits each.

An optimizer moves most bf16 weights by a few units in the last place, or not at all. So each
weight is sent as its distance in ulps, in a Rice code whose parameter follows the old weight's
exponent: a step of one size is many ulps of a small weight and few of a large one. Any 16 bits
arrive as they were, NaN and -0 too. Rice coding: R. F. Rice, JPL 79-22 (1979); one stream for many
lanes, with words in the order in which the decoder asks for them: F. Giesen, arXiv 1402.3392.

The definition, for a tile of 8,192 weights (32 lanes, weight `step * 32 + lane`):

- `ordered(x)`: the bits with the sign flipped, all bits flipped where the sign is set: neighbours
  in value are neighbours in number. `z`: `ordered(new) - ordered(old)` modulo 2^16, zigzag.
- `k = clamp(K - exponent(old), 0, 15)`, with one `K` for the tile. `q = z >> k` ones, a zero, then
  the low `k` bits of `z`; twelve ones and 16 bits of `z` where `q` is 12 or more. First bits are
  lowest.
- Where exponents are above `K`, a step is less than a unit, and most weights stay: such a weight is
  *rare*. In a grouped tile, four steps of a lane that hold rare weights begin with one bit: whether
  any of them changed. If none did, they take no more bits. It is grouped where that is shorter.
- A lane's bits fill words of 32. Before each weight, every lane whose bits do not suffice for it
  (and for the bit of its group) takes the next word, in lane order. So words of all lanes lie in
  one stream and no lane needs a length.
- The tile's header is `words * 1024 + grouped * 512 + K`, and 0 where nothing changed.

Three implementations of one definition, which give the same bits: the reference here in plain
torch, crates/kernels/src/differences.rs for CPU tensors, `triton_differences` for GPU tensors.
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels
from evener.comm.codecs.rice import (
    ESCAPE,
    EXPONENT,
    GROUP,
    HIGHEST,
    LANES,
    LOWEST,
    STEPS,
    TILE,
    tiles,
)


def supports(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be sent as differences."""
    return dtype in EXPONENT


def plan(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The headers of the message that turns `old` into `new`; int32 [tiles], on their device.

    `new`, `old`: contiguous, [n], bf16 or fp16. The message has `size(headers)` int32 words.
    """
    if new.device.type == "cpu":
        headers = torch.empty(tiles(old.numel()), dtype=torch.int32)
        shift, mask = EXPONENT[old.dtype]
        bits = new.view(torch.int16), old.view(torch.int16)
        _kernels.differences_plan(*bits, shift, mask, headers)
        return headers
    from evener.comm.codecs import triton_differences

    return triton_differences.plan(new, old)


def size(headers: torch.Tensor) -> torch.Tensor:
    """Words of a message with these headers, itself among them: an int64 scalar on the device."""
    return (headers >> 10).sum(dtype=torch.int64) + headers.numel()


def places(headers: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """Where in the message each tile's words begin: int64 [tiles], on the device of `headers`.

    `said`: int64 [1] to [4]; its first becomes the message's size, the others 0.
    """
    if headers.device.type == "cpu":
        return places_reference(headers, said)
    from evener.comm.codecs import triton_differences

    return triton_differences.places(headers, said)


def write(
    new: torch.Tensor,
    old: torch.Tensor,
    headers: torch.Tensor,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the message to `out`, int32 [size(headers)] or more; `first`: by `places`."""
    if new.device.type == "cpu":
        shift, mask = EXPONENT[old.dtype]
        bits = new.view(torch.int16), old.view(torch.int16)
        _kernels.differences_write(*bits, shift, mask, headers, out)
        return
    from evener.comm.codecs import triton_differences

    triton_differences.write(new, old, headers, first, out)


def read(message: torch.Tensor, weights: torch.Tensor) -> None:
    """Turn `weights` (the old ones, [n]) into the new ones, in place."""
    if weights.device.type == "cpu":
        _kernels.differences_read(message, *EXPONENT[weights.dtype], weights.view(torch.int16))
        return
    from evener.comm.codecs import triton_differences

    triton_differences.read(message, weights)


# --- the reference ---


def _bits(weights: torch.Tensor) -> torch.Tensor:
    """int64 [tiles, steps, lanes]: the 16 bits of each weight, 0 past the last one."""
    bits = weights.view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.nn.functional.pad(bits, (0, -bits.numel() % TILE)).view(-1, STEPS, LANES)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    return bits ^ torch.where(bits >= 0x8000, 0xFFFF, 0x8000)


def _zigzag(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    distance = (_ordered(new) - _ordered(old)) & 0xFFFF
    distance = distance - ((distance & 0x8000) << 1)
    return ((distance << 1) ^ (distance >> 63)) & 0xFFFF


def _apply(old: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    number = (_ordered(old) + ((z >> 1) ^ -(z & 1))) & 0xFFFF
    return number ^ torch.where(number >= 0x8000, 0x8000, 0xFFFF)


def _log2(x: torch.Tensor) -> torch.Tensor:
    """The whole part of the logarithm of whole numbers from 1 to 2^24."""
    return (x.float().view(torch.int32).to(torch.int64) >> 23) - 127


def _inside(n: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(tiles(n) * TILE, device=device)
    return (at < n).view(-1, STEPS, LANES)


def _exponents(old: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shift, mask = EXPONENT[dtype]
    return (old >> shift) & mask


def _lengths(z: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q = z >> k
    return torch.where(q < ESCAPE, q + 1 + k, ESCAPE + 16)


def _rare(exponent: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
    """Bool, as `exponent`: weights of grouped tiles that seldom change."""
    header = header.view(-1, 1, 1)
    return (exponent > (header & 511)) & ((header & 512) > 0)


def _any(marks: torch.Tensor) -> torch.Tensor:
    """Bool [tiles, steps, lanes]: whether there is a mark in the weight's group."""
    found = marks.view(-1, STEPS // GROUP, GROUP, LANES).any(2, keepdim=True)
    return found.expand(-1, -1, GROUP, -1).reshape(marks.shape)


def _shape(
    z: torch.Tensor, exponent: torch.Tensor, inside: torch.Tensor, header: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bits of each weight; whether its group's bit goes before it, and what that is."""
    rare = _rare(exponent, header)
    moved = _any(rare & (z > 0))
    k = ((header & 511).view(-1, 1, 1) - exponent).clamp(0, 15)
    length = torch.where(inside & (moved | ~rare), _lengths(z, k), 0)
    flagged = _any(rare)
    flagged[:, torch.arange(STEPS, device=z.device) % GROUP != 0] = False
    return length, flagged.to(torch.int64), moved.to(torch.int64)


def plan_reference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """See `plan`."""
    dtype, inside = old.dtype, _inside(old.numel(), old.device)
    new, old = _bits(new), _bits(old)
    z, exponent = _zigzag(new, old), _exponents(old, dtype)
    changed = z > 0
    wanted = torch.where(changed, _log2(z.clamp(min=1)) + exponent, 0)
    count = changed.sum((1, 2))
    middle = wanted.sum((1, 2)) // count.clamp(min=1)
    best, header = torch.full_like(count, 1 << 62), torch.zeros_like(count)
    for shift in range(LOWEST, HIGHEST + 1):
        for grouped in (0, 512):
            tried = (middle + shift).clamp(min=0) + grouped
            length, flagged, _ = _shape(z, exponent, inside, tried)
            lanes = (length + flagged).sum(1)
            bits, words = lanes.sum(1), (lanes + 31 >> 5).sum(1)
            header = torch.where(bits < best, words * 1024 + tried, header)
            best = torch.minimum(bits, best)
    return torch.where(count > 0, header, 0).to(torch.int32)


def places_reference(headers: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """See `places`."""
    words = (headers >> 10).to(torch.int64)
    ends = words.cumsum(0) + headers.numel()
    said.zero_()
    said[:1] = size(headers)
    return ends - words


def write_reference(
    new: torch.Tensor, old: torch.Tensor, headers: torch.Tensor, out: torch.Tensor
) -> None:
    """See `write`."""
    dtype, inside = old.dtype, _inside(old.numel(), old.device)
    new, old = _bits(new), _bits(old)
    count = headers.numel()
    out[:count] = headers
    words = (headers >> 10).to(torch.int64)
    kept = words > 0
    taken = (count + words.cumsum(0) - words)[kept].unsqueeze(1)
    z, exponent = _zigzag(new, old)[kept], _exponents(old, dtype)[kept]
    header = headers[kept].to(torch.int64)
    length, flagged, moved = _shape(z, exponent, inside[kept], header)
    k = ((header & 511).view(-1, 1, 1) - exponent).clamp(0, 15)
    q = z >> k
    ones = (1 << q.clamp(max=ESCAPE)) - 1
    low = (z & ((1 << k) - 1)) << (q.clamp(max=ESCAPE) + 1)
    code = torch.where(q < ESCAPE, ones | low, ones | (z << ESCAPE))
    code = torch.where(length > 0, code, 0) << flagged | moved & flagged
    length = length + flagged
    # The word that a lane fills. Before the first one it is a full one that lies nowhere.
    held = torch.zeros(z.shape[0], LANES, dtype=torch.int64, device=z.device)
    filled, here = held + 32, held - 1
    for step in range(STEPS):
        held = held | (code[:, step] << filled)
        filled = filled + length[:, step]
        needs = filled > 32
        done = needs & (here >= 0)
        out[here[done]] = _signed(held[done] & 0xFFFFFFFF)
        held, filled = torch.where(needs, held >> 32, held), torch.where(needs, filled - 32, filled)
        here = torch.where(needs, taken + needs.cumsum(1) - 1, here)
        taken = taken + needs.sum(1, keepdim=True)
    out[here[here >= 0]] = _signed(held[here >= 0])


def _signed(words: torch.Tensor) -> torch.Tensor:
    return (words - ((words & 0x80000000) << 1)).to(torch.int32)


def read_reference(message: torch.Tensor, weights: torch.Tensor) -> None:
    """See `read`."""
    n, dtype = weights.numel(), weights.dtype
    count = tiles(n)
    headers = message[:count].to(torch.int64)
    words = headers >> 10
    kept = words > 0
    if not bool(kept.any()):
        return
    whole, inside = _bits(weights), _inside(n, weights.device)[kept]
    old, header = whole[kept], headers[kept]
    exponent = _exponents(old, dtype)
    k, rare = ((header & 511).view(-1, 1, 1) - exponent).clamp(0, 15), _rare(exponent, header)
    grouped = _any(rare)
    taken = (count + words.cumsum(0) - words)[kept].unsqueeze(1)
    stream = message.to(torch.int64) & 0xFFFFFFFF
    held = torch.zeros(old.shape[0], LANES, dtype=torch.int64, device=weights.device)
    have, z, quiet = held, torch.zeros_like(old), held > 0
    for step in range(STEPS):
        flagged = (grouped[:, step] & (step % GROUP == 0)).to(torch.int64)
        # What is not there reads as zeros, so a code that is cut says more bits than there are.
        for again in (False, True):
            silent = torch.where(flagged > 0, (held & 1) == 0, quiet)
            found, length = _one(held >> flagged, k[:, step])
            there = inside[:, step] & ~(silent & rare[:, step])
            length = torch.where(there, length, 0) + flagged
            if again:
                break
            needs = length > have
            place = taken + needs.cumsum(1) - 1
            taken = taken + needs.sum(1, keepdim=True)
            word = stream[place.clamp(min=0, max=stream.numel() - 1)]
            held = held | torch.where(needs, word << have, 0)
            have = have + 32 * needs
        z[:, step], quiet = torch.where(there, found, 0), silent
        held, have = held >> length, have - length
    whole[kept] = _apply(old, z)
    bits = whole.view(-1)[:n]
    weights.view(torch.int16).copy_((bits - ((bits & 0x8000) << 1)).to(torch.int16))


def _one(held: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distance that each lane's bits begin with, and how many bits it takes."""
    q = _ones(held)
    low = (held >> (q + 1)) & ((1 << k) - 1)
    found = torch.where(q < ESCAPE, q << k | low, (held >> ESCAPE) & 0xFFFF)
    return found, torch.where(q < ESCAPE, q + 1 + k, ESCAPE + 16)


def _ones(held: torch.Tensor) -> torch.Tensor:
    """How many ones the lowest bits begin with, at most `ESCAPE`."""
    low = held & ((1 << ESCAPE) - 1)
    return _log2(~low & (low + 1))
