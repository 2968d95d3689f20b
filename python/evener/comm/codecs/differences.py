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
- A lane's bits fill words of 32. Before each weight, every lane that holds fewer than 32 bits takes
  the next word, in lane order. So words of all lanes lie in one stream and no lane needs a length.
- The tile's header is `words * 512 + K`; no word where nothing changed.

Three implementations of one definition, which give the same bits: the reference here in plain
torch, crates/kernels/src/differences.rs for CPU tensors, `triton_differences` for GPU tensors.
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels
from evener.comm.codecs.rice import ESCAPE, EXPONENT, HIGHEST, LANES, LOWEST, STEPS, TILE, tiles


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
    return (headers >> 9).sum(dtype=torch.int64) + headers.numel()


def write(new: torch.Tensor, old: torch.Tensor, headers: torch.Tensor, out: torch.Tensor) -> None:
    """Write the message to `out`, int32 [size(headers)] or more."""
    if new.device.type == "cpu":
        shift, mask = EXPONENT[old.dtype]
        bits = new.view(torch.int16), old.view(torch.int16)
        _kernels.differences_write(*bits, shift, mask, headers, out)
        return
    from evener.comm.codecs import triton_differences

    triton_differences.write(new, old, headers, out)


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


def plan_reference(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """See `plan`."""
    dtype, inside = old.dtype, _inside(old.numel(), old.device)
    new, old = _bits(new), _bits(old)
    z, exponent = _zigzag(new, old), _exponents(old, dtype)
    changed = z > 0
    wanted = torch.where(changed, _log2(z.clamp(min=1)) + exponent, 0)
    count = changed.sum((1, 2))
    middle = wanted.sum((1, 2)) // count.clamp(min=1)
    best, chosen = torch.full_like(count, 1 << 62), torch.zeros_like(count)
    for shift in range(LOWEST, HIGHEST + 1):
        tried = (middle + shift).clamp(min=0)
        k = (tried.view(-1, 1, 1) - exponent).clamp(0, 15)
        bits = torch.where(inside, _lengths(z, k), 0).sum((1, 2))
        chosen = torch.where(bits < best, tried, chosen)
        best = torch.minimum(bits, best)
    words = torch.where(count > 0, _run(z, exponent, inside, chosen, None, None), 0)
    return (words * 512 + chosen).to(torch.int32)


def write_reference(
    new: torch.Tensor, old: torch.Tensor, headers: torch.Tensor, out: torch.Tensor
) -> None:
    """See `write`."""
    dtype, inside = old.dtype, _inside(old.numel(), old.device)
    new, old = _bits(new), _bits(old)
    count = headers.numel()
    out[:count] = headers
    words = (headers >> 9).to(torch.int64)
    kept = words > 0
    first = count + words.cumsum(0) - words
    z, exponent = _zigzag(new, old)[kept], _exponents(old, dtype)[kept]
    chosen = (headers & 511).to(torch.int64)[kept]
    _run(z, exponent, inside[kept], chosen, first[kept], out)


def _run(
    z: torch.Tensor,
    exponent: torch.Tensor,
    inside: torch.Tensor,
    chosen: torch.Tensor,
    first: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Code tiles side by side; how many words each takes. Writes them where `out` is given."""
    shape = (z.shape[0], LANES)
    zero = torch.zeros(shape, dtype=torch.int64, device=z.device)
    taken = torch.zeros(z.shape[0], 1, dtype=torch.int64, device=z.device)
    if first is not None:
        taken = first.unsqueeze(1).clone()
    begun = taken.clone()
    # `have`: the bits that the decoder's lane holds. A lane has places for its next two words.
    have, held, filled, here, next_ = zero, zero, zero, zero - 1, zero - 1
    k = (chosen.view(-1, 1, 1) - exponent).clamp(0, 15)
    length = torch.where(inside, _lengths(z, k), 0)
    q = z >> k
    ones = (1 << q.clamp(max=ESCAPE)) - 1
    low = (z & ((1 << k) - 1)) << (q.clamp(max=ESCAPE) + 1)
    code = torch.where(q < ESCAPE, ones | low, ones | (z << ESCAPE))
    code = torch.where(inside, code, 0)
    for step in range(z.shape[1]):
        needs = (have < 32).to(torch.int64)
        place = taken + needs.cumsum(1) - needs
        taken = taken + needs.sum(1, keepdim=True)
        have = have + 32 * needs - length[:, step]
        empty = here < 0
        next_ = torch.where((needs > 0) & ~empty, place, next_)
        here = torch.where((needs > 0) & empty, place, here)
        held = held | (code[:, step] << filled)
        filled = filled + length[:, step]
        full = filled >= 32
        if out is not None:
            out[here[full]] = _signed(held[full] & 0xFFFFFFFF)
        held = torch.where(full, held >> 32, held)
        filled = torch.where(full, filled - 32, filled)
        here, next_ = torch.where(full, next_, here), torch.where(full, -1, next_)
    if out is not None:
        for rest, at in ((held, here), (zero, next_)):
            out[at[at >= 0]] = _signed(rest[at >= 0])
    return (taken - begun).squeeze(1)


def _signed(words: torch.Tensor) -> torch.Tensor:
    return (words - ((words & 0x80000000) << 1)).to(torch.int32)


def read_reference(message: torch.Tensor, weights: torch.Tensor) -> None:
    """See `read`."""
    n, dtype = weights.numel(), weights.dtype
    count = tiles(n)
    headers = message[:count].to(torch.int64)
    words = headers >> 9
    kept = words > 0
    if not bool(kept.any()):
        return
    whole, inside = _bits(weights), _inside(n, weights.device)[kept]
    old = whole[kept]
    k = ((headers & 511)[kept].view(-1, 1, 1) - _exponents(old, dtype)).clamp(0, 15)
    taken = (count + words.cumsum(0) - words)[kept].unsqueeze(1)
    stream = message.to(torch.int64) & 0xFFFFFFFF
    held = torch.zeros(old.shape[0], LANES, dtype=torch.int64, device=weights.device)
    have, z = held, torch.zeros_like(old)
    for step in range(STEPS):
        needs = have < 32
        place = taken + needs.cumsum(1) - needs.to(torch.int64)
        taken = taken + needs.sum(1, keepdim=True)
        word = stream[place.clamp(max=stream.numel() - 1)]
        held = held | torch.where(needs, word << have, 0)
        have = have + 32 * needs.to(torch.int64)
        q = _ones(held)
        low = (held >> (q + 1)) & ((1 << k[:, step]) - 1)
        found = torch.where(q < ESCAPE, q << k[:, step] | low, (held >> ESCAPE) & 0xFFFF)
        found = torch.where(inside[:, step], found, 0)
        length = torch.where(inside[:, step], _lengths(found, k[:, step]), 0)
        z[:, step] = found
        held, have = held >> length, have - length
    whole[kept] = _apply(old, z)
    bits = whole.view(-1)[:n]
    weights.view(torch.int16).copy_((bits - ((bits & 0x8000) << 1)).to(torch.int16))


def _ones(held: torch.Tensor) -> torch.Tensor:
    """How many ones the lowest bits begin with, at most `ESCAPE`."""
    low = held & ((1 << ESCAPE) - 1)
    return _log2(~low & (low + 1))
