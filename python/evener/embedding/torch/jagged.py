"""Ids of several features in one tensor, and what comes out for them.

The layout is that of torchrec's KeyedJaggedTensor: values feature by feature, sample by sample, and
a length per feature and sample. `Jagged` and torchrec's class are read by the same methods, so a
collection takes either, and neither is copied. torchrec is imported by `to_torchrec` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.base.given import given
from evener.embedding.torch.inputs import check_ids, check_weights, ends_of, is_jagged
from evener.errors import UsageError


@dataclass(frozen=True)
class JaggedTensor:
    """One feature: `values` [n, ...]; sample b has those from `offsets[b]` to `offsets[b + 1]`."""

    _values: torch.Tensor
    _offsets: torch.Tensor
    _weights: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Ids [n], or rows [n, dim]."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """int64 [batch + 1], from 0."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """int64 [batch]."""
        return self._offsets.diff()

    def weights_or_none(self) -> torch.Tensor | None:
        """A number per value."""
        return self._weights

    def to_dense(self) -> list[torch.Tensor]:
        """The values of each sample."""
        return list(self._values.split(self.lengths().tolist()))


class Jagged:
    """Ids of several features, each with a batch size of its own if need be."""

    @given
    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        *,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        strides: Sequence[int] | None = None,
        inverse: torch.Tensor | None = None,
    ) -> None:
        """
        values: integer ids [n], those of the first feature first.
        lengths, offsets: int64 [bags] or [bags + 1] (from 0), one of them. Nothing is copied.
        weights: float [n].
        strides: bags of each feature; default: as many of each.
        inverse: int64 [features, batch]: which bag of a feature a sample of the batch has. So a
            user's ids are there once for all his samples.

        Raises UsageError for what does not fit.
        """
        self._keys, self._values, self._weights = list(keys), values, weights
        self._lengths, self._offsets = lengths, offsets
        ids = check_ids(values)
        self._offsets = ends_of(ids, offsets, lengths, include_last_offset=True)
        check_weights(ids, weights)
        bags, n = self._offsets.numel() - 1, len(self._keys)
        if strides is None and (not n or bags % n):
            raise UsageError(
                f"{n} features have {bags} bags",
                "give strides: how many of them are each feature's",
            )
        self._strides = list(strides) if strides is not None else [bags // n] * n
        if len(self._strides) != n or sum(self._strides) != bags:
            raise UsageError(
                f"{n} features with strides {self._strides} have {bags} bags",
                "give one stride per feature; their sum is the number of bags",
            )
        self._inverse = inverse

    @classmethod
    def of(cls, given: Any) -> Jagged:
        """Read torchrec's KeyedJaggedTensor, or an object with its methods; nothing is copied."""
        if isinstance(given, cls):
            return given
        if not is_jagged(given) or not callable(getattr(given, "keys", None)):
            raise UsageError(
                f"features are a {type(given).__name__}",
                "give a Jagged, or a KeyedJaggedTensor of torchrec",
            )
        inverse = _call(given, "inverse_indices_or_none")
        if inverse is not None:
            names, inverse = list(inverse[0]), inverse[1]
            order = [names.index(key) for key in list(given.keys())]
            inverse = inverse[order] if order != list(range(len(names))) else inverse
        return cls(
            given.keys(),
            given.values(),
            offsets=given.offsets(),
            weights=_call(given, "weights_or_none"),
            strides=_call(given, "stride_per_key"),
            inverse=inverse,
        )

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def values(self) -> torch.Tensor:
        """Ids [n], as given."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """int64 [bags + 1]."""
        assert self._offsets is not None
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """int64 [bags]."""
        return self.offsets().diff() if self._lengths is None else self._lengths

    def weights_or_none(self) -> torch.Tensor | None:
        """A number per id."""
        return self._weights

    def stride_per_key(self) -> list[int]:
        """Bags of each feature."""
        return self._strides

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each feature by its name, with offsets from 0; ids are views."""
        if len(set(self._keys)) != len(self._keys):
            raise UsageError(f"features {self._keys} have a name twice", "give each its own name")
        ends = self.offsets()
        bounds = [0]
        for stride in self._strides:
            bounds.append(bounds[-1] + stride)
        at = ends[torch.tensor(bounds, device=ends.device)].tolist()
        found = {}
        for i, key in enumerate(self._keys):
            part = slice(at[i], at[i + 1])
            weights = None if self._weights is None else self._weights[part]
            own = ends[bounds[i] : bounds[i + 1] + 1] - at[i]
            found[key] = JaggedTensor(self._values[part], own, weights)
        return found

    def inverse(self, key: str) -> torch.Tensor | None:
        """int64 [batch]: the bag of each sample; None where bags are the samples."""
        return None if self._inverse is None else self._inverse[self._keys.index(key)]

    def inverse_indices_or_none(self) -> tuple[list[str], torch.Tensor] | None:
        """The features' names, and int64 [features, batch]."""
        return None if self._inverse is None else (self._keys, self._inverse)

    def to_torchrec(self) -> Any:
        """The same as torchrec's KeyedJaggedTensor, on the same memory. Needs torchrec."""
        from torchrec.sparse.jagged_tensor import (  # type: ignore[import-not-found]
            KeyedJaggedTensor,
        )

        even = len(set(self._strides)) == 1
        how: dict[str, Any] = (
            {"stride": self._strides[0]}
            if even
            else {"stride_per_key_per_rank": [[n] for n in self._strides]}
        )
        if self._inverse is not None:
            how["inverse_indices"] = (self._keys, self._inverse)
        offsets = self.offsets()
        return KeyedJaggedTensor(
            self._keys, self._values, self._weights, self._lengths, offsets, **how
        )


def _call(given: Any, name: str) -> Any:
    method = getattr(given, name, None)
    return method() if callable(method) else None


class KeyedTensor:
    """Pooled features side by side: `values()` [batch, sum of dims], as torchrec's."""

    def __init__(
        self, parts: Mapping[str, torch.Tensor], whole: torch.Tensor | None = None
    ) -> None:
        """parts: [batch, dim] of each feature, in the order of columns; `whole`: these columns."""
        self._parts, self._whole = dict(parts), whole

    def keys(self) -> list[str]:
        """The features' names."""
        return list(self._parts)

    def values(self) -> torch.Tensor:
        """[batch, sum of dims]."""
        return torch.cat(list(self._parts.values()), 1) if self._whole is None else self._whole

    def length_per_key(self) -> list[int]:
        """Dims."""
        return [part.shape[1] for part in self._parts.values()]

    def offset_per_key(self) -> list[int]:
        """Where each feature's columns begin, and where the last ends."""
        found = [0]
        for length in self.length_per_key():
            found.append(found[-1] + length)
        return found

    def key_dim(self) -> int:
        """Which dimension features share."""
        return 1

    def __getitem__(self, key: str) -> torch.Tensor:
        """[batch, dim]. Raises KeyError."""
        return self._parts[key]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Each feature by its name."""
        return dict(self._parts)

    @staticmethod
    def regroup(tensors: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        """The columns of each group side by side; `tensors` may be torchrec's too."""
        found = {key: tensor[key] for tensor in tensors for key in tensor.keys()}  # noqa: SIM118
        return [torch.cat([found[key] for key in group], 1) for group in groups]
