"""What a bag may be given, in one form: flat ids, and where each bag begins.

`nn.EmbeddingBag`'s inputs (2-D; 1-D with offsets), and the jagged ones of recommender models:
values with lengths or offsets, or an object that has them, such as torchrec's `JaggedTensor` and
`KeyedJaggedTensor`. torchrec is not imported: whatever has the methods will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from evener.errors import UsageError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Bags:
    """`ids` int64 [n]; bag i is `ids[offsets[i]:offsets[i + 1]]`, `offsets` int64 [bags + 1].

    `length`: of every bag, where all are equally long. `keys`: how many features lie one behind
    another; the result of bag i * batch + b belongs to feature i of sample b.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    length: int | None = None
    keys: int = 1

    @property
    def count(self) -> int:
        """How many bags."""
        return self.offsets.numel() - 1


def check_ids(ids: Any) -> torch.Tensor:
    """`ids` as int64, or UsageError."""
    if not isinstance(ids, torch.Tensor):
        raise UsageError(f"ids are a {type(ids).__name__}", "give a tensor of integers")
    if ids.dtype not in INTEGERS:
        raise UsageError(
            f"ids are {ids.dtype}, which is no type of integer", "give int64 ids: `ids.long()`"
        )
    return ids.long()


def _method(given: Any, name: str) -> Any:
    found = getattr(given, name, None)
    return found() if callable(found) else found


def is_jagged(given: Any) -> bool:
    """Whether it has values and offsets of its own."""
    return not isinstance(given, torch.Tensor) and all(
        callable(getattr(given, name, None)) for name in ("values", "offsets")
    )


def _one_batch(given: Any, features: int) -> None:
    """Refuse features with batches of their own: there is no [batch, features * dim] of them."""
    strides = _method(given, "stride_per_key")
    counts = sorted({int(n) for n in strides}) if strides is not None else []
    bags = given.offsets().numel() - 1
    fair = features > 0 and bags % features == 0
    if len(counts) > 1 or not fair or (counts and counts[0] * features != bags):
        raise UsageError(
            f"{features} features have {bags} bags, {counts or 'not the same number'} of each",
            "give features of one batch size, or a bag for each feature",
        )


def token(given: Any) -> torch.Tensor:
    """The tensor by which a batch is known again."""
    found: torch.Tensor = given.values() if is_jagged(given) else given
    return found


def bags(
    given: Any,
    offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Bags:
    """Bags of what a user gave. Raises UsageError, which names what does not fit."""
    features = 1
    if is_jagged(given):
        if offsets is not None or lengths is not None:
            raise UsageError("jagged ids come with their offsets", "leave offsets and lengths out")
        keys = _method(given, "keys")
        features = len(keys) if keys is not None else 1
        _one_batch(given, features)
        own = _method(given, "weights_or_none")
        weights = own if weights is None else weights
        offsets, given, include_last_offset = given.offsets(), given.values(), True
    ids = check_ids(given)
    check_weights(ids, weights)
    length = None
    if ids.ndim == 2:
        if offsets is not None or lengths is not None:
            raise UsageError("2-D ids have bags of their own", "leave offsets and lengths out")
        count, length = ids.shape
        ends = torch.arange(count + 1, device=ids.device) * length
    elif ids.ndim == 1:
        ends = ends_of(ids, offsets, lengths, include_last_offset)
    else:
        raise UsageError(f"ids have {ids.ndim} dimensions", "give 1-D ids with offsets, or 2-D ids")
    flat = ids.reshape(-1)
    weights = None if weights is None else weights.reshape(-1)
    if padding_idx is not None:
        flat, ends, weights, length = _without(flat, ends, weights, padding_idx, length)
    return Bags(flat, ends, weights, length, features)


def check_weights(ids: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Raise UsageError where there is not one weight per id."""
    if weights is not None and weights.shape != ids.shape:
        raise UsageError(
            f"per_sample_weights of shape {tuple(weights.shape)} for ids of {tuple(ids.shape)}",
            "give one weight per id",
        )


def ends_of(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    lengths: torch.Tensor | None,
    include_last_offset: bool,
) -> torch.Tensor:
    """int64 [bags + 1], from 0 to the number of ids. Raises UsageError for what does not fit."""
    n = ids.numel()
    if (offsets is None) == (lengths is None):
        raise UsageError("1-D ids need offsets or lengths", "give one of them, or 2-D ids")
    zero = torch.zeros(1, dtype=torch.int64, device=ids.device)
    if lengths is not None:
        ends = torch.cat((zero, torch.cumsum(check_ids(lengths).reshape(-1), 0)))
        if lengths.numel() and bool((lengths < 0).any()):
            raise UsageError("a length is below 0", "give the number of ids of each bag")
    else:
        assert offsets is not None
        ends = check_ids(offsets)
        if ends.ndim != 1 or not ends.numel():
            raise UsageError(
                f"offsets of shape {tuple(ends.shape)} cannot be", "give 1-D offsets, from 0"
            )
        if not include_last_offset:
            ends = torch.cat((ends, torch.full_like(zero, n)))
        if int(ends[0]) != 0 or bool((ends[1:] < ends[:-1]).any()):
            raise UsageError("offsets must begin with 0 and not fall", "see nn.EmbeddingBag")
    if int(ends[-1]) != n:
        raise UsageError(
            f"bags end at {int(ends[-1])}, and there are {n} ids",
            "give offsets or lengths that cover all ids (include_last_offset says whether offsets "
            "have the last end)",
        )
    return ends


def _without(
    ids: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor | None,
    padding: int,
    length: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]:
    """The same without padding, which no bag counts."""
    keep = ids != padding
    if bool(keep.all()):
        return ids, ends, weights, length
    before = torch.cat((torch.zeros_like(ends[:1]), torch.cumsum(keep, 0)))
    return ids[keep], before[ends], None if weights is None else weights[keep], None
