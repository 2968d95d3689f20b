"""`nn.Embedding` and `nn.EmbeddingBag` without a vocabulary: any int64, or any string, is a key."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch._compile import _disable_dynamo

from evener.base.given import given
from evener.embedding import Options, SsdTier, Store
from evener.embedding.torch import lookups
from evener.embedding.torch import state as states
from evener.embedding.torch.cache import CachedRows, CacheStats
from evener.embedding.torch.inputs import Bags, bags, check_ids, is_jagged, token
from evener.embedding.torch.table import Table
from evener.embedding.torch.traffic import Traffic
from evener.errors import UsageError


class _Dynamic(nn.Module):
    """What both modules share: a table, and nothing that torch counts as a parameter."""

    @given
    def __init__(
        self,
        options: Options | int,
        name: str | None = None,
        *,
        device: torch.device | str | int = "cpu",
        padding_idx: int | None = None,
        cache_rows: int = 0,
        fused: bool = False,
        shard: bool = True,
        group: dist.ProcessGroup | None = None,
        wire: str = "exact",
        gradient_wire: str = "exact",
        average: bool = True,
        in_state_dict: bool = True,
        storage: SsdTier | None = None,
    ) -> None:
        """
        options: of the store, or the number of values per row and the rest by default.
        name: of the store; `evener.embedding.Store.find(name)` and TensorFlow see the same rows.
            Modules of one name share a table, and must be made with the same arguments.
        device: where ids and values are. Rows are in host memory.
        padding_idx: a key that is no key: its values are 0, and it gets no row.
        cache_rows: this many hot rows are kept and stepped on `device`.
        fused: step at the end of each backward pass, without a DynamicOptimizer. Then gradients
            are neither accumulated, nor clipped, nor unscaled.
        shard: spread rows over the ranks of `group` (default: all) where there are several.
        wire, gradient_wire: how values and gradients cross between hosts: "exact", "fp16", "bf16"
            or "int8" (with a scale per row).
        average: gradients are the mean over ranks, as DistributedDataParallel has it; else the sum.
        in_state_dict: `state_dict()` holds the rows. For large tables use False, and
            `evener.embedding.torch.save(model, folder)`.
        storage: where rows that are seldom used go: `SsdTier(folder, rows=1_000_000)`. None: as
            `options` say.

        Raises UsageError for options that cannot be.
        """
        super().__init__()
        if cache_rows < 0:
            raise UsageError(f"cache_rows={cache_rows} cannot be", "0 or more rows")
        options = Options(options) if isinstance(options, int) else options
        if storage is not None:
            options = dataclasses.replace(options, tier=storage)
        self.table = Table.named(
            options,
            name,
            device=torch.device(device),
            cache_rows=cache_rows,
            fused=fused,
            shard=shard,
            group=group,
            wire=wire,
            gradient_wire=gradient_wire,
            average=average,
        )
        self.padding_idx = padding_idx
        self.in_state_dict = in_state_dict

    @property
    def store(self) -> Store:
        """The rows of this rank, up to date."""
        return self.table.store

    @property
    def embedding_dim(self) -> int:
        """Values per row."""
        return self.table.dim

    @property
    def traffic(self) -> Traffic:
        """Bytes that went to other ranks."""
        return self.table.traffic

    @property
    def cache_stats(self) -> CacheStats | None:
        """What the cache did; None without one."""
        rows = self.table.rows
        return rows.stats if isinstance(rows, CachedRows) else None

    def evict(self) -> int:
        """Apply the eviction policy now; how many rows of this rank went."""
        return self.table.evict()

    def _train(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _keys(self, given: Any) -> Any:
        """Strings become the int64 keys that the store gives them."""
        kind = self.table.options["keys"]
        if isinstance(given, torch.Tensor) or is_jagged(given):
            return given
        if kind != "string":
            raise UsageError(
                f"ids of embedding {self.table.name!r} are a {type(given).__name__}",
                'give a tensor of integers; keys="string" in its options takes lists of strings',
            )
        rows = list(given)
        nested = bool(rows) and not isinstance(rows[0], str | bytes)
        if nested and len({len(row) for row in rows}) > 1:
            raise UsageError("lists of strings are not equally long", "give a list and lengths")
        flat = [text for row in rows for text in row] if nested else rows
        if self.table.sharded is not None:
            raise UsageError(
                "strings have no owner among ranks", "hash them to int64 first, or give shard=False"
            )
        numbers = torch.as_tensor(self.table.store.intern(flat, insert=self._train()))
        numbers = numbers.to(self.table.device)
        return numbers.view(len(rows), len(rows[0])) if nested else numbers

    def _rows(self, given: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values, and where each id is in them (None: in their order)."""
        keys, inverse = self._unique(given, ids)
        (values,) = lookups.look([(self.table, keys)], self._train())
        return values, inverse

    def _unique(self, given: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys to look up, and where each id is in them (None: in their order)."""
        ids = ids.to(self.table.device)
        if self.table.repeats:
            return ids, None
        if self._train():
            return self.table.unique(token(given), ids)
        keys, inverse = torch.unique(ids, return_inverse=True)
        return keys, inverse

    def get_extra_state(self) -> Any:
        """What `state_dict()` holds: the rows of this rank, slots and counts included."""
        return states.state(self.table, rows=self.in_state_dict)

    def set_extra_state(self, state: Any) -> None:
        """From `load_state_dict`. Raises UsageError for another table's, with nothing changed."""
        states.set_state(self.table, state)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UsageError(
            f"embedding {self.table.name!r} cannot be copied: its rows are in a store",
            "make a module with another name and give it load_state_dict(other.state_dict())",
        )

    def __reduce__(self) -> Any:
        raise UsageError(
            f"embedding {self.table.name!r} cannot be pickled: its rows are in a store",
            "pickle its state_dict(), or use evener.embedding.torch.save(model, folder)",
        )

    def extra_repr(self) -> str:
        """As `print(model)` shows it."""
        table = self.table
        cache = f", cache_rows={table.rows.capacity}" if isinstance(table.rows, CachedRows) else ""
        return f"{table.dim}, name={table.name!r}, rows={len(table._store)}{cache}"


class DynamicEmbedding(_Dynamic):
    """`nn.Embedding` without a vocabulary. In `eval()` or under `no_grad` it never inserts."""

    @_disable_dynamo
    def forward(self, input: Any) -> torch.Tensor:
        """float32 [*, dim] for integer ids [*] (or a list of strings)."""
        given = self._keys(input)
        ids = check_ids(given)
        flat, keep = ids.reshape(-1), None
        if self.padding_idx is not None and bool((flat == self.padding_idx).any()):
            keep = flat != self.padding_idx
            flat = flat[keep]
        values, inverse = self._rows(given, flat)
        if inverse is not None:
            values = F.embedding(inverse, values)
        if keep is not None:
            keep = keep.to(values.device)
            at = (torch.cumsum(keep, 0) - 1).clamp_(min=0)
            rows = values[at] if values.shape[0] else values.new_zeros(keep.numel(), self.table.dim)
            values = torch.where(keep.unsqueeze(1), rows, torch.zeros_like(rows))
        return values.reshape(*ids.shape, self.table.dim)

    def prefetch(self, input: Any) -> None:
        """Begin to fetch the rows of the next training batch, while this one trains.

        The next training lookup must be of this very tensor, not changed since; another one is
        right too, and gains nothing.
        """
        ids = check_ids(self._keys(input)).reshape(-1)
        if self.padding_idx is not None:
            ids = ids[ids != self.padding_idx]
        lookups.prefetch([(self.table, token(input), ids.to(self.table.device))])


class DynamicEmbeddingBag(_Dynamic):
    """`nn.EmbeddingBag` without a vocabulary. In `eval()` or under `no_grad` it never inserts."""

    @given
    def __init__(
        self,
        options: Options | int,
        name: str | None = None,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **rest: Any,
    ) -> None:
        """
        mode: "sum" or "mean".
        include_last_offset: offsets have one entry more, the end of the last bag.
        The rest is as in DynamicEmbedding.
        """
        if mode not in ("sum", "mean"):
            raise UsageError(f"mode={mode!r} is not there", '"sum" or "mean"')
        super().__init__(options, name, **rest)
        self.mode, self.include_last_offset = mode, include_last_offset

    @_disable_dynamo
    def forward(
        self,
        input: Any,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [bags, dim].

        input: integer ids, 2-D (a bag per row), or 1-D with `offsets` (where bags begin) or
        `lengths`; or jagged ids that bring their own, such as torchrec's JaggedTensor. For
        a KeyedJaggedTensor of f features the result is [batch, f * dim], features in its order.
        per_sample_weights: a factor per id, with mode "sum".

        An empty bag is 0. Raises UsageError for what does not fit.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise UsageError(
                f"per_sample_weights with mode={self.mode!r}", 'make the module with mode="sum"'
            )
        given = self._keys(input)
        found = self._bags(given, offsets, per_sample_weights, lengths)
        values, inverse = self._rows(given, found.ids)
        pooled = self._pool(values, inverse, found)
        if found.keys == 1:
            return pooled
        batch = found.count // found.keys
        dim = self.table.dim
        return pooled.view(found.keys, batch, dim).transpose(0, 1).reshape(batch, found.keys * dim)

    def _bags(
        self,
        given: Any,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> Bags:
        return bags(
            given,
            offsets,
            weights,
            lengths=lengths,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )

    def _pool(self, values: torch.Tensor, inverse: torch.Tensor | None, of: Bags) -> torch.Tensor:
        weights = None if of.weights is None else of.weights.to(values.device, values.dtype)
        if inverse is None and of.length:
            rows = values.view(of.count, of.length, self.table.dim)
            if weights is not None:
                rows = rows * weights.view(of.count, of.length, 1)
            return rows.sum(1) if self.mode == "sum" else rows.mean(1)
        if inverse is None:
            inverse = torch.arange(values.shape[0], device=values.device)
        if not inverse.numel():
            # No id at all: still part of the graph, so that every rank's backward pass comes here.
            return values.new_zeros(of.count, self.table.dim) + values.sum()
        ends = of.offsets.to(values.device)
        return F.embedding_bag(
            inverse,
            values,
            ends,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def prefetch(
        self,
        input: Any,
        offsets: torch.Tensor | None = None,
        *,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Begin to fetch the rows of the next training batch, while this one trains.

        The next training lookup must be of this very tensor, not changed since; another one is
        right too, and gains nothing.
        """
        ids = self._bags(input, offsets, None, lengths).ids
        lookups.prefetch([(self.table, token(input), ids.to(self.table.device))])

    def extra_repr(self) -> str:
        """As `print(model)` shows it."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
