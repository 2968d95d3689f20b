"""What a store is made with, as dataclasses; `Options.to_json` is what the native side reads.

The defaults here are those of `crates/embedding/src/options.rs`, and a test compares them. Values
are checked there, once for all doors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from evener import _native
from evener.base.given import fields, given


@dataclass(frozen=True)
class _Kind:
    """One choice of several: its JSON is its fields and `kind`."""

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}


class Optimizer(_Kind):
    """The step that the store does. `lr` may be given anew with each step."""


class Init(_Kind):
    """Values of a new row: a function of (seed, key, column) alone."""


class Admission(_Kind):
    """Which keys get a row."""


class Eviction(_Kind):
    """Which rows go."""


@fields
@dataclass(frozen=True)
class Sgd(Optimizer):
    """`w -= lr (g + weight_decay w)`."""

    kind: ClassVar[str] = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0


@fields
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`a += g^2; w -= lr g / (sqrt(a) + eps)`, as in PyTorch.

    `weight_decay` times the weights is added to the gradient first.
    """

    kind: ClassVar[str] = "adagrad"
    lr: float = 0.1
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0


@fields
@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one sum for a row: `s += mean(g^2); w -= lr g / (sqrt(s) + eps)`, as in FBGEMM.

    `weight_decay` times the weights is added to the gradient, or with `decoupled` the weights decay
    by `lr * weight_decay` (FBGEMM's modes L2 and DECOUPLE).
    """

    kind: ClassVar[str] = "row_wise_adagrad"
    lr: float = 1e-2
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False


@fields
@dataclass(frozen=True)
class PartialRowWiseAdam(Optimizer):
    """Adam with one second moment for a row, the mean of its squared gradients, as in FBGEMM.

    Weights decay by `lr * weight_decay`. A row that is not seen does not change.
    """

    kind: ClassVar[str] = "partial_row_wise_adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@fields
@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (You et al., 2020) with a row as a layer: AdamW's step, scaled to the row's length.

    Where the row or the step is 0 it is not scaled. A row that is not seen does not change.
    """

    kind: ClassVar[str] = "lamb"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0


@fields
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; moments of a row decay in steps in which it is not seen, its weights rest in them.

    `eps` is added after the correction of the second moment, as in PyTorch, or with `eps_hat`
    before it, as in Keras. `weight_decay` times the weights is added to the gradient first.
    """

    kind: ClassVar[str] = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_hat: bool = False
    weight_decay: float = 0.0


@fields
@dataclass(frozen=True)
class LazyAdam(Optimizer):
    """Adam in which a row that is not seen does not change (`torch.optim.SparseAdam`)."""

    kind: ClassVar[str] = "lazy_adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@fields
@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled decay; a row that is not seen does not change.

    `eps` and `eps_hat`: as in `Adam`.
    """

    kind: ClassVar[str] = "adam_w"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_hat: bool = False
    weight_decay: float = 1e-2


@fields
@dataclass(frozen=True)
class Ftrl(Optimizer):
    """FTRL-proximal as TensorFlow writes it."""

    kind: ClassVar[str] = "ftrl"
    lr: float = 0.1
    lr_power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator: float = 0.1
    beta: float = 0.0


@fields
@dataclass(frozen=True)
class GroupAdam(Optimizer):
    """Adam with a sparse group lasso: rows whose linear term is small become zero."""

    kind: ClassVar[str] = "group_adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0


@fields
@dataclass(frozen=True)
class GroupFtrl(Optimizer):
    """FTRL with a sparse group lasso."""

    kind: ClassVar[str] = "group_ftrl"
    lr: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0
    initial_accumulator: float = 0.1
    beta: float = 0.0


@fields
@dataclass(frozen=True)
class Zeros(Init):
    """0."""

    kind: ClassVar[str] = "zeros"


@fields
@dataclass(frozen=True)
class Constant(Init):
    """The same everywhere."""

    kind: ClassVar[str] = "constant"
    value: float = 0.0


@fields
@dataclass(frozen=True)
class Uniform(Init):
    """Uniform between `low` and `high`."""

    kind: ClassVar[str] = "uniform"
    low: float = -0.05
    high: float = 0.05


@fields
@dataclass(frozen=True)
class Normal(Init):
    """Normal."""

    kind: ClassVar[str] = "normal"
    mean: float = 0.0
    std: float = 0.05


@fields
@dataclass(frozen=True)
class TruncatedNormal(Init):
    """Normal, cut at two deviations."""

    kind: ClassVar[str] = "truncated_normal"
    mean: float = 0.0
    std: float = 0.05


@fields
@dataclass(frozen=True)
class Counter(Admission):
    """A key that was looked up `count` times, itself included, counted exactly."""

    kind: ClassVar[str] = "counter"
    count: int = 4


@fields
@dataclass(frozen=True)
class Bloom(Admission):
    """A key that was looked up `count` times by a counting Bloom filter for `capacity` keys.

    A share of up to `false_positives` of the keys comes in early, none late.
    """

    kind: ClassVar[str] = "bloom"
    count: int = 4
    capacity: int = 1_000_000
    false_positives: float = 0.01


@fields
@dataclass(frozen=True)
class Probability(Admission):
    """With probability `p` each time, drawn from (seed, key, step)."""

    kind: ClassVar[str] = "probability"
    p: float = 0.1


@fields
@dataclass(frozen=True)
class Ttl(Eviction):
    """Rows that no step updated for more than `steps` steps go."""

    kind: ClassVar[str] = "ttl"
    steps: int = 100_000


@fields
@dataclass(frozen=True)
class Lru(Eviction):
    """The longest not updated go, down to `rows`."""

    kind: ClassVar[str] = "lru"
    rows: int = 1_000_000


@fields
@dataclass(frozen=True)
class Lfu(Eviction):
    """The least often updated go, down to `rows`."""

    kind: ClassVar[str] = "lfu"
    rows: int = 1_000_000


@fields
@dataclass(frozen=True)
class L2(Eviction):
    """Rows whose values have a Euclidean norm below `norm` go."""

    kind: ClassVar[str] = "l2"
    norm: float = 1e-3


@fields
@dataclass(frozen=True)
class SsdTier:
    """`rows` rows stay in memory; the others, seldom used, are in a file in the folder `path`.

    Keys and their places stay in memory. A batch in training brings its rows back, besides those
    `rows`. The file has no name and goes with the process: snapshots hold what is in it.
    """

    path: str
    rows: int


@fields
@dataclass(frozen=True)
class Options:
    """What a store is made with.

    `dim`: values per row. `dtype`: how values are kept ("f32", "f16", "bf16"); slots are f32, and
    so is all that comes in and goes out. `shards`: parts that are locked and grown by themselves, a
    power of two. `evict_every`: eviction runs by itself after this many steps; 0: only when asked.
    `seed`: of initial values and of draws. `keys`: "int" or "string". `missing`: what a lookup
    gives for a key that has no row and gets none, "initial" values or "zeros". `threads`: of a
    batch, 0 for all CPUs. `reserve`: rows to make room for at once. `tier`: where
    rows beyond a number go; None: all are in memory.
    """

    dim: int
    dtype: str = "f32"
    shards: int = 64
    optimizer: Optimizer = field(default_factory=Adagrad)
    init: Init = field(default_factory=Normal)
    admission: Admission | None = None
    eviction: Eviction | None = None
    evict_every: int = 0
    seed: int = 0
    keys: str = "int"
    missing: str = "initial"
    threads: int = 0
    reserve: int = 0
    tier: SsdTier | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("optimizer", "init", "admission", "eviction"):
            chosen = plain[name]
            plain[name] = {"kind": "none"} if chosen is None else chosen.to_dict()
        plain["tier"] = None if self.tier is None else dataclasses.asdict(self.tier)
        return plain

    def to_json(self) -> str:
        """What the native side reads; `from_json` reads it too."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The options of a JSON object; what it leaves out has its default."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Options:
        """As `from_json`, of plain values."""
        given = dict(plain)
        for name, base in (
            ("optimizer", Optimizer),
            ("init", Init),
            ("admission", Admission),
            ("eviction", Eviction),
        ):
            if isinstance(given.get(name), dict):
                given[name] = _choice(name, base, given[name])
        if isinstance(given.get("tier"), dict):
            given["tier"] = SsdTier(**given["tier"])
        return cls(**given)


def _choice(name: str, base: type[_Kind], given: dict[str, Any]) -> _Kind | None:
    kinds = {kind.kind: kind for kind in base.__subclasses__()}
    fields = dict(given)
    kind = fields.pop("kind", None)
    if kind == "none":
        return None
    if kind not in kinds:
        raise ValueError(f"{name} of kind {kind!r} is unknown: {', '.join(sorted(kinds))}")
    return kinds[kind](**fields)


@given
def slots(options: Options | dict[str, Any]) -> int:
    """Float32 values that the optimizer keeps for a row, beside its own."""
    chosen = options if isinstance(options, Options) else Options.from_dict(options)
    return _native.embedding_slots(chosen.to_json())
