"""What an embedding is made with, in the words of TFRA and DeepRec, as the store's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evener.errors import UsageError


@dataclass(frozen=True)
class CounterFilter:
    """Admits a key at its `filter_freq`-th look-up in training; counted exactly.

    A key whose row is removed or evicted is counted from 0 again.
    """

    filter_freq: int = 1

    def options(self) -> dict[str, Any]:
        return {"kind": "counter", "count": self.filter_freq} if self.filter_freq > 1 else _NONE


@dataclass(frozen=True)
class CBFFilter:
    """Admits a key at its `filter_freq`-th look-up, by a counting Bloom filter.

    `max_element_size`: how many different keys to expect. `false_positive_probability`: the share
    of keys that may be admitted early.
    """

    filter_freq: int = 1
    max_element_size: int = 1 << 20
    false_positive_probability: float = 0.01

    def options(self) -> dict[str, Any]:
        if self.filter_freq <= 1:
            return _NONE
        return {
            "kind": "bloom",
            "count": self.filter_freq,
            "capacity": self.max_element_size,
            "false_positives": self.false_positive_probability,
        }


@dataclass(frozen=True)
class ProbabilityFilter:
    """Admits a key with this probability at each look-up in training."""

    probability: float

    def options(self) -> dict[str, Any]:
        return {"kind": "probability", "p": self.probability}


@dataclass(frozen=True)
class GlobalStepEvict:
    """Evicts rows that no step has updated for more than `steps_to_live` steps."""

    steps_to_live: int

    def options(self) -> dict[str, Any]:
        return {"kind": "ttl", "steps": self.steps_to_live}


@dataclass(frozen=True)
class L2WeightEvict:
    """Evicts rows whose Euclidean norm is below `l2_weight_threshold`."""

    l2_weight_threshold: float

    def options(self) -> dict[str, Any]:
        return {"kind": "l2", "norm": self.l2_weight_threshold}


@dataclass(frozen=True)
class LRUEvict:
    """Evicts the rows that were not updated for longest, down to `rows`."""

    rows: int

    def options(self) -> dict[str, Any]:
        return {"kind": "lru", "rows": self.rows}


@dataclass(frozen=True)
class LFUEvict:
    """Evicts the rows that were updated least often, down to `rows`."""

    rows: int

    def options(self) -> dict[str, Any]:
        return {"kind": "lfu", "rows": self.rows}


@dataclass(frozen=True)
class StorageOption:
    """Where rows are. `storage_path`: a folder for the rows beyond `rows_in_memory`; without it all
    rows are in memory."""

    storage_path: str | None = None
    rows_in_memory: int = 0

    def options(self) -> dict[str, Any] | None:
        if self.storage_path is None:
            return None
        if self.rows_in_memory <= 0:
            raise UsageError(
                f"StorageOption(storage_path={self.storage_path!r}) without rows_in_memory",
                "say how many rows stay in memory: StorageOption(path, rows_in_memory=1_000_000)",
            )
        return {"path": self.storage_path, "rows": self.rows_in_memory}


@dataclass(frozen=True)
class InitializerOption:
    """How a new row starts, and what a key without a row gives.

    `initializer`: as for `get_variable`. `missing`: "initial" (what its row would start with; the
    default) or "zeros".
    """

    initializer: Any = None
    missing: str = "initial"


@dataclass(frozen=True)
class EmbeddingVariableOption:
    """What a table does beyond looking up; each part may be left out."""

    filter_option: CounterFilter | CBFFilter | ProbabilityFilter | None = None
    evict_option: GlobalStepEvict | L2WeightEvict | LRUEvict | LFUEvict | None = None
    storage_option: StorageOption = field(default_factory=StorageOption)
    init_option: InitializerOption = field(default_factory=InitializerOption)
    evict_every: int = 0
    """Eviction runs by itself every so many steps; 0: when `evict()` is called."""

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "admission": self.filter_option.options() if self.filter_option else _NONE,
            "eviction": self.evict_option.options() if self.evict_option else _NONE,
            "evict_every": self.evict_every,
            "missing": self.init_option.missing,
        }
        if tier := self.storage_option.options():
            found["tier"] = tier
        return found

    def to_config(self) -> dict[str, Any]:
        """Plain values, of which `from_config` makes an equal one; Keras saves them."""
        init, _ = initial(self.init_option.initializer)
        parts = {
            name: {"class": type(part).__name__, **dataclasses.asdict(part)}
            for name in ("filter_option", "evict_option", "storage_option")
            if (part := getattr(self, name)) is not None
        }
        chosen = None if self.init_option.initializer is None else init
        parts["init_option"] = {"initializer": chosen, "missing": self.init_option.missing}
        return {**parts, "evict_every": self.evict_every}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EmbeddingVariableOption:
        """What `to_config` gave, as options. UsageError for a part that is not known."""
        given = dict(config)
        for name in ("filter_option", "evict_option", "storage_option"):
            if isinstance(part := given.get(name), Mapping):
                values = dict(part)
                kind = _PARTS.get(values.pop("class", ""))
                if kind is None:
                    raise UsageError(
                        f"{name} {part!r} of an embedding is not known",
                        f"use one of {', '.join(_PARTS)}",
                    )
                given[name] = kind(**values)
        if isinstance(given.get("init_option"), Mapping):
            given["init_option"] = InitializerOption(**given["init_option"])
        return cls(**given)


_PARTS: dict[str, Any] = {
    part.__name__: part
    for part in (
        CounterFilter, CBFFilter, ProbabilityFilter,
        GlobalStepEvict, L2WeightEvict, LRUEvict, LFUEvict, StorageOption,
    )
}  # fmt: skip

_NONE: dict[str, Any] = {"kind": "none"}

_BY_NAME: dict[str, dict[str, Any]] = {
    "zeros": {"kind": "zeros"},
    "ones": {"kind": "constant", "value": 1.0},
    "uniform": {"kind": "uniform", "low": -0.05, "high": 0.05},
    "random_uniform": {"kind": "uniform", "low": -0.05, "high": 0.05},
    "normal": {"kind": "normal", "mean": 0.0, "std": 0.05},
    "random_normal": {"kind": "normal", "mean": 0.0, "std": 0.05},
    "truncated_normal": {"kind": "truncated_normal", "mean": 0.0, "std": 0.05},
}

# Class name of an initializer, of Keras, TensorFlow 2 or 1 > the kind of the store's.
_BY_CLASS = {
    "Zeros": "zeros",
    "Ones": "ones",
    "Constant": "constant",
    "RandomUniform": "uniform",
    "RandomNormal": "normal",
    "TruncatedNormal": "truncated_normal",
}


def initial(initializer: Any) -> tuple[dict[str, Any], int | None]:
    """(the store's `init`, the initializer's seed where it has one).

    `initializer`: None, a number, a name, a dict of the store, or an initializer object of Keras or
    TensorFlow whose formula a row can follow alone. A row's values come from (seed, key, column),
    so they do not depend on when or where the row is made.

    Raises UsageError for any other.
    """
    if initializer is None:
        return dict(_BY_NAME["normal"]), None
    if isinstance(initializer, Mapping):
        return dict(initializer), None
    if isinstance(initializer, int | float):
        return {"kind": "constant", "value": float(initializer)}, None
    if isinstance(initializer, str):
        if initializer in _BY_NAME:
            return dict(_BY_NAME[initializer]), None
        raise UsageError(
            f"initializer {initializer!r} is not one that a row can follow alone",
            f"use one of {', '.join(_BY_NAME)}, or an initializer object",
        )
    if isinstance(initializer, type):
        initializer = initializer()
    kind = _BY_CLASS.get(_plain(type(initializer).__name__))
    get_config = getattr(initializer, "get_config", None)
    if kind is None or get_config is None:
        raise UsageError(
            f"initializer {initializer!r} is not one that a row can follow alone",
            "use RandomUniform, RandomNormal, TruncatedNormal, Constant, Zeros or Ones",
        )
    config = get_config()
    seed = config.get("seed")
    seed = seed if isinstance(seed, int) else None
    if kind == "constant":
        return {"kind": kind, "value": float(config["value"])}, seed
    if kind == "uniform":
        low, high = config["minval"], config["maxval"]
        return {"kind": kind, "low": float(low), "high": float(1.0 if high is None else high)}, seed
    if kind in ("normal", "truncated_normal"):
        return {"kind": kind, "mean": float(config["mean"]), "std": float(config["stddev"])}, seed
    return dict(_BY_NAME[kind]), seed


def _plain(name: str) -> str:
    """RandomUniform for random_uniform_initializer and RandomUniformV1 of TensorFlow 1."""
    words = name.removesuffix("Initializer").removesuffix("V2").removesuffix("V1")
    if "_" in words or words.islower():
        words = "".join(part.title() for part in words.removesuffix("_initializer").split("_"))
    return words
