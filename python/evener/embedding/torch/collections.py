"""torchrec's collections of tables, on tables that grow and share one exchange.

`EmbeddingBagCollection` and `EmbeddingCollection` take torchrec's configuration objects, or ours of
the same fields, and a `Jagged` or a KeyedJaggedTensor. All tables are looked up together
(`lookups.look`), so several ranks exchange keys, rows and gradients once per step. Tables are
sharded by rows over all ranks; there is no plan to make and no wrapper.

An id must be below `num_embeddings`, as in torchrec: what is out of range is refused. With
`use_virtual_table=True` any int64 is an id, and the table takes memory as ids come.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from evener.base.given import fields, given
from evener.embedding import Normal, Options, Uniform
from evener.embedding.options import Init, Optimizer
from evener.embedding.torch import lookups
from evener.embedding.torch.inputs import Bags, check_ids, is_jagged
from evener.embedding.torch.jagged import Jagged, JaggedTensor, KeyedTensor
from evener.embedding.torch.layouts import Feature
from evener.embedding.torch.modules import DynamicEmbedding, DynamicEmbeddingBag, _Dynamic
from evener.embedding.torch.plain import fill
from evener.embedding.torch.pooled import Exchange
from evener.embedding.torch.rows import HostRows
from evener.errors import UsageError

_SMALL = 8192
"""A table of so few rows is likely sent whole: it costs its owner no row per sample."""
_DTYPES = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
_DRAWN: dict[Any, Callable[..., Init]] = {
    nn.init.uniform_: lambda a=0.0, b=1.0: Uniform(a, b),
    nn.init.normal_: lambda mean=0.0, std=1.0: Normal(mean, std),
}


@fields
@dataclass
class EmbeddingConfig:
    """A table, with the fields of torchrec's object of this name.

    `init_fn` fills a tensor [num_embeddings, embedding_dim] in place, which is made for it once on
    every rank; each takes the rows that it owns.
    Without it, or where it is a `functools.partial` of torch's `uniform_` or `normal_`, a row gets
    its values when it is first seen. Default: uniform between -/+ sqrt(1 / num_embeddings).
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = "FP32"
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[torch.Tensor], Any] | None = None
    need_pos: bool = False
    use_virtual_table: bool = False


@fields
@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table whose rows are pooled. `pooling`: "SUM" or "MEAN", or torchrec's PoolingType."""

    pooling: Any = "SUM"


def _word(value: Any) -> str:
    """The name of an enumeration's value, or a string, in capitals."""
    return str(getattr(value, "value", value)).upper()


def _init(config: Any) -> tuple[Init, Callable[[torch.Tensor], Any] | None]:
    """How rows begin, and what fills all of them at once."""
    fills = getattr(config, "init_fn", None)
    if isinstance(fills, functools.partial) and fills.func in _DRAWN and not fills.args:
        return _DRAWN[fills.func](**fills.keywords), None
    bound = math.sqrt(1 / config.num_embeddings)
    low, high = config.weight_init_min, config.weight_init_max
    return Uniform(-bound if low is None else low, bound if high is None else high), fills


class _Tables(nn.Module):
    """Modules by name. `nn.ModuleDict` refuses the names of its own methods, such as `items`."""

    def __init__(self, modules: Mapping[str, _Dynamic]) -> None:
        super().__init__()
        self._modules.update(modules)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)


class _Collection(nn.Module):
    """What both collections share: tables by name, and features of an input by table."""

    def __init__(
        self,
        tables: Sequence[Any],
        make: Callable[[Any, Options, str, dict[str, Any]], _Dynamic],
        optimizer: Optimizer | Mapping[str, Optimizer] | None,
        prefix: str,
        rest: Mapping[str, Any],
        resident: bool = False,
    ) -> None:
        super().__init__()
        self.configs = list(tables)
        names = [config.name for config in self.configs]
        if not names or not all(names) or len(set(names)) != len(names):
            raise UsageError(f"tables are named {names}", "give each table a name of its own")
        self._homes = self._places(rest.get("group")) if resident else {}
        for what, each in {"optimizer": optimizer, **rest}.items():
            if isinstance(each, Mapping) and (unknown := set(each) - set(names)):
                raise UsageError(
                    f"there is {what} for {', '.join(map(str, unknown))}, and no such table",
                    f"tables are {', '.join(names)}",
                )
        self._modules_of: list[_Dynamic] = []
        for config in self.configs:
            self._modules_of.append(self._made(config, make, optimizer, prefix, rest))
        # What training has looked up, for `describe`: ids and samples of each table's features.
        self._seen = {c.name: [[0, 0] for _ in c.feature_names] for c in self.configs}
        self._steps_seen, self._last = 0, -1
        self._exchange = self._resident() if resident else None
        used = [name for config in self.configs for name in config.feature_names]
        self._shared = {name for name in used if used.count(name) > 1}

    def _places(self, group: Any) -> dict[str, int]:
        """The rank of each table: the largest first, each to the rank that has the least.

        Tables are weighed by their bytes, and by what they send: a row per sample and feature.
        """
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        sent, held, found = [0] * size, [0] * size, {}
        for config in sorted(self.configs, key=lambda c: -c.num_embeddings * c.embedding_dim):
            if getattr(config, "use_virtual_table", False):
                raise UsageError(
                    f"table {config.name!r} has use_virtual_table=True, and cannot be resident",
                    "give num_embeddings, or leave resident=True out",
                )
            small = config.num_embeddings <= _SMALL
            loads = held if small else sent
            home = min(range(size), key=lambda rank: (loads[rank], held[rank]))
            found[config.name] = home
            sent[home] += 0 if small else config.embedding_dim * len(config.feature_names)
            held[home] += config.num_embeddings * config.embedding_dim
        return found

    def _made(
        self, config: Any, make: Any, optimizer: Any, prefix: str, rest: Mapping[str, Any]
    ) -> _Dynamic:
        kind = _word(config.data_type)
        if kind not in _DTYPES:
            raise UsageError(
                f"table {config.name!r} has data_type={kind}", f"one of {', '.join(_DTYPES)}"
            )
        if getattr(config, "need_pos", False):
            raise UsageError(
                f"table {config.name!r} has need_pos=True, which is not there",
                "multiply by a weight per position: per-id weights, with is_weighted=True",
            )
        if not config.feature_names:
            raise UsageError(f"table {config.name!r} has no feature", "give feature_names")
        own = optimizer.get(config.name) if isinstance(optimizer, Mapping) else optimizer
        init, fills = _init(config)
        options = Options(config.embedding_dim, dtype=_DTYPES[kind], init=init)
        if own is not None:
            options = dataclasses.replace(options, optimizer=own)
        how = {
            what: each[config.name] if isinstance(each, Mapping) else each
            for what, each in rest.items()
            if not isinstance(each, Mapping) or config.name in each
        }
        module: _Dynamic = make(config, options, prefix + config.name, how)
        if self._homes:
            self._settle(module, config)
        _ = module.table.sharded  # all ranks meet here, whether they have rows already or not
        if fills is not None and not len(module.store):
            weight = torch.empty(config.num_embeddings, config.embedding_dim)
            with torch.no_grad():
                fills(weight)
            fill(module, weight)
        return module

    def _settle(self, module: _Dynamic, config: Any) -> None:
        """All rows of this table belong to one rank."""
        table = module.table
        if not isinstance(table.rows, HostRows) or table._sharded is not None:
            raise UsageError(
                f"table {config.name!r} has a cache or was looked up, and cannot be resident",
                "leave cache_rows out, and give the collection a prefix of its own",
            )
        if table.options["tier"] is not None:
            raise UsageError(
                f"table {config.name!r} has an SSD tier, and cannot be resident",
                "leave storage or resident=True out",
            )
        table.home = self._homes[config.name]

    def _name(self, config: Any, feature: str) -> str:
        return f"{feature}@{config.name}" if feature in self._shared else feature

    def _resident(self) -> Exchange:
        tables = [module.table for module in self._modules_of]
        ranks = {table.sharded.ranks for table in tables if table.sharded is not None}
        alone = any(table.sharded is None for table in tables)
        if len(ranks) + alone > 1:
            raise UsageError(
                "resident tables lie on different ranks", "give all of them one shard= and group="
            )
        features = [
            Feature(name, i, _word(getattr(config, "pooling", "SUM")) == "MEAN", seen)
            for i, config in enumerate(self.configs)
            for name, seen in zip(config.feature_names, self._seen[config.name], strict=True)
        ]
        rows = [int(config.num_embeddings) for config in self.configs]
        return Exchange(tables, rows, features, ranks.pop() if ranks else None)

    def _features(self, features: Any) -> list[list[JaggedTensor]]:
        """Features by table. Raises UsageError for one that is missing or out of range."""
        found = Jagged.of(features).to_dict()
        result, bounded = [], []
        for config in self.configs:
            missing = [name for name in config.feature_names if name not in found]
            if missing:
                raise UsageError(
                    f"table {config.name!r} looks up feature {missing[0]!r}, which is not given",
                    f"features given: {', '.join(found)}",
                )
            result.append([found[name] for name in config.feature_names])
            if not getattr(config, "use_virtual_table", False):
                bounded += [(name, config) for name in config.feature_names]
        self._check([(*each, found[each[0]].values()) for each in bounded])
        return result

    def _check(self, bounded: Sequence[tuple[str, Any, torch.Tensor]]) -> None:
        """Compare the ids of features with their tables' ranges; a GPU is waited for once."""
        bounded = [each for each in bounded if each[2].numel()]
        if not bounded:
            return
        ends = torch.stack([torch.stack(torch.aminmax(ids)) for *_, ids in bounded]).tolist()
        for (name, config, _), (least, most) in zip(bounded, ends, strict=True):
            if least < 0 or most >= config.num_embeddings:
                raise UsageError(
                    f"feature {name!r} has id {least if least < 0 else most}, and table "
                    f"{config.name!r} has num_embeddings={config.num_embeddings}",
                    "give ids from 0, or use_virtual_table=True for a table of any id",
                )

    def _look(self, features: Any, parts: list[list[JaggedTensor]]) -> list[Any]:
        """(values, inverse, ids) of each table, all looked up together."""
        given, asked, rest = features.values(), [], []
        for module, own in zip(self._modules_of, parts, strict=True):
            ids = torch.cat([check_ids(feature.values()) for feature in own])
            keys, inverse = module._unique(given, ids)
            asked.append((module.table, keys))
            rest.append((inverse, ids))
        train = self._modules_of[0]._train()
        if train:
            self._count(parts)
        values = lookups.look(asked, train)
        return [(each, *more) for each, more in zip(values, rest, strict=True)]

    def _count(self, parts: list[list[JaggedTensor]]) -> None:
        self._count_step()
        for config, own in zip(self.configs, parts, strict=True):
            for count, feature in zip(self._seen[config.name], own, strict=True):
                count[0] += feature.values().numel()
                count[1] += feature.lengths().numel()

    def _count_step(self) -> None:
        step = self._modules_of[0].table.step
        self._steps_seen += step != self._last
        self._last = step

    def prefetch(self, features: Any) -> None:
        """Begin to fetch the rows of the next training batch, while this one trains.

        The next training lookup must be of this very object, not changed since. Collective where
        tables are sharded.
        """
        if self._exchange is not None:
            self._exchange.prefetch(_even(features))
            return
        lookups.prefetch(
            [
                (
                    module.table,
                    features.values(),
                    torch.cat([check_ids(each.values()) for each in own]).to(module.table.device),
                )
                for module, own in zip(self._modules_of, self._features(features), strict=True)
            ]
        )


def _even(features: Any) -> Any:
    """Features of one batch; nothing is read that is on a device."""
    if not is_jagged(features) or not callable(getattr(features, "keys", None)):
        raise UsageError(
            f"features are a {type(features).__name__}",
            "give a Jagged, or a KeyedJaggedTensor of torchrec",
        )
    check_ids(features.values())
    own = getattr(features, "inverse_indices_or_none", lambda: None)()
    if own is not None or len(set(features.stride_per_key())) > 1:
        raise UsageError(
            "resident tables take features of one batch, without inverse",
            "expand the features, or make the collection without resident=True",
        )
    return features


class EmbeddingBagCollection(_Collection):
    """Pooled tables: features in, a KeyedTensor out."""

    @given
    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: torch.device | str | int = "cpu",
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        prefix: str = "",
        resident: bool = False,
        **rest: Any,
    ) -> None:
        """
        tables: an EmbeddingBagConfig each, ours or torchrec's.
        is_weighted: multiply rows by the weights of the input; with pooling SUM.
        optimizer: of all tables, or by the name of a table; default: that of `Options`.
        prefix: before the names of tables, which are those of the process' stores.
        resident: all rows lie on `device`, each table whole on one rank, which pools its bags. The
            quickest where they fit. Rows of all ids are there from the start. Without weights.
        The rest is as in DynamicEmbedding, of all tables or by the name of a table.

        Raises UsageError for a configuration that cannot be.
        """

        def make(config: Any, options: Options, name: str, rest: dict[str, Any]) -> _Dynamic:
            mode = _word(config.pooling).lower()
            if is_weighted and mode != "sum":
                raise UsageError(
                    f"table {config.name!r} has weights and pooling {mode}", "take pooling SUM"
                )
            return DynamicEmbeddingBag(options, name, mode=mode, device=device, **rest)

        if resident and is_weighted:
            raise UsageError(
                "resident tables take no weight per id", "leave resident=True or the weights out"
            )
        super().__init__(tables, make, optimizer, prefix, rest, resident)
        self.is_weighted = is_weighted
        self.embedding_bags = _Tables(
            {c.name: module for c, module in zip(self.configs, self._modules_of, strict=True)}
        )

    def embedding_bag_configs(self) -> list[Any]:
        """As given."""
        return self.configs

    @_disable_dynamo
    def forward(self, features: Any) -> KeyedTensor:
        """[batch, dim] of each feature, tables in their order.

        A feature of two tables is named `feature@table`. Raises UsageError for what does not fit.
        """
        if self._exchange is not None:
            return self._pooled(self._exchange, features)
        jagged = Jagged.of(features)
        parts = self._features(jagged)
        pooled: dict[str, torch.Tensor] = {}
        for config, module, own, (values, inverse, ids) in zip(
            self.configs, self._modules_of, parts, self._look(jagged, parts), strict=True
        ):
            assert isinstance(module, DynamicEmbeddingBag)
            lengths = torch.cat([feature.lengths() for feature in own])
            ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
            rows = module._pool(values, inverse, Bags(ids, ends, self._weights(config, own)))
            counts = [feature.lengths().numel() for feature in own]
            for name, part in zip(config.feature_names, rows.split(counts), strict=True):
                to = jagged.inverse(name)
                pooled[self._name(config, name)] = part if to is None else part[to]
        sizes = {part.shape[0] for part in pooled.values()}
        if len(sizes) > 1:
            raise UsageError(
                f"features have batches of {', '.join(map(str, sorted(sizes)))} samples",
                "give inverse, which says the bag of each sample, or use an EmbeddingCollection",
            )
        return KeyedTensor(pooled)

    def _pooled(self, exchange: Exchange, features: Any) -> KeyedTensor:
        train = self._modules_of[0]._train()
        found = lookups.pooled(exchange, _even(features), train)
        if train:
            self._count_step()
        names = [
            self._name(config, name) for config in self.configs for name in config.feature_names
        ]
        return KeyedTensor(dict(zip(names, found[1:], strict=True)), found[0])

    def _weights(self, config: Any, own: list[JaggedTensor]) -> torch.Tensor | None:
        if not self.is_weighted:
            return None
        found = [feature.weights_or_none() for feature in own]
        weights = [each for each in found if each is not None]
        if len(weights) < len(found):
            raise UsageError(
                f"table {config.name!r} needs a weight per id, and the features have none",
                "give features with weights, or is_weighted=False",
            )
        return torch.cat(weights)


class EmbeddingCollection(_Collection):
    """Tables whose rows are not pooled: features in, rows of each out, as jagged as they came."""

    @given
    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | int = "cpu",
        need_indices: bool = False,
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        prefix: str = "",
        **rest: Any,
    ) -> None:
        """
        tables: an EmbeddingConfig each, ours or torchrec's.
        need_indices: give the ids beside the rows, as weights.
        The rest is as in EmbeddingBagCollection.
        """

        def make(_config: Any, options: Options, name: str, rest: dict[str, Any]) -> _Dynamic:
            return DynamicEmbedding(options, name, device=device, **rest)

        super().__init__(tables, make, optimizer, prefix, rest)
        self.need_indices = need_indices
        self.embeddings = _Tables(
            {c.name: module for c, module in zip(self.configs, self._modules_of, strict=True)}
        )

    def embedding_configs(self) -> list[Any]:
        """As given."""
        return self.configs

    @_disable_dynamo
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Rows [ids of the feature, dim] of each feature, with its offsets."""
        jagged = Jagged.of(features)
        parts = self._features(jagged)
        found = {}
        for config, own, (values, inverse, _) in zip(
            self.configs, parts, self._look(jagged, parts), strict=True
        ):
            rows = values if inverse is None else nn.functional.embedding(inverse, values)
            counts = [feature.values().numel() for feature in own]
            for name, feature, part in zip(
                config.feature_names, own, rows.split(counts), strict=True
            ):
                ids = feature.values() if self.need_indices else None
                found[self._name(config, name)] = JaggedTensor(part, feature.offsets(), ids)
        return found
