"""The options of a store: the defaults of Python are those of the native side, field by field."""

import json

import pytest

from evener import _native
from evener.embedding import Options, Store, forget
from evener.embedding.options import Admission, Eviction, Init, Optimizer

KINDS = [
    (name, kind)
    for name, base in (
        ("optimizer", Optimizer),
        ("init", Init),
        ("admission", Admission),
        ("eviction", Eviction),
    )
    for kind in base.__subclasses__()
]


def native(plain: dict[str, object]) -> dict[str, object]:
    """What the native side makes of options that leave things out."""
    try:
        found: dict[str, object] = json.loads(
            _native.EmbeddingStore.open("defaults", json.dumps(plain)).options()
        )
    finally:
        forget("defaults")
    return found


def test_defaults_are_those_of_the_native_side() -> None:
    assert native({"dim": 4}) == Options(4).to_dict()


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda x: getattr(x, "kind", ""))
def test_defaults_of_each_kind_are_those_of_the_native_side(name: str, kind: type) -> None:
    whole = kind().to_dict()
    assert native({"dim": 4, name: whole})[name] == whole  # it knows every field
    given = {"kind": whole["kind"]}
    while True:
        # What the native side has no default for is asked for by name; the rest must agree.
        try:
            assert native({"dim": 4, name: given})[name] == whole
            return
        except ValueError as error:
            missing = str(error).split("missing field `")[1].split("`")[0]
            given[missing] = whole[missing]


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda x: getattr(x, "kind", ""))
def test_json_comes_back_as_it_was(name: str, kind: type) -> None:
    options = Options(8, **{name: kind()})
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"dim": 0}, "dim 0"),
        ({"dim": 4, "shards": 3}, "shards 3"),
        ({"dim": 4, "dtype": "f64"}, "f64"),
        ({"dim": 4, "optimizer": {"kind": "adam", "beta1": 1.0}}, "beta1 1"),
        ({"dim": 4, "admission": {"kind": "counter", "count": 0}}, "admission.count"),
        ({"dim": 4, "eviction": {"kind": "lru", "rows": 0}}, "eviction.rows"),
        ({"dim": 4, "eviction": {"kind": "fifo"}}, "fifo"),
        ({"dim": 4, "tier": {"path": "", "rows": 5}}, "tier.path"),
        ({"dim": 4, "tier": {"path": "cold", "rows": 0}}, "tier.rows"),
    ],
)
def test_what_cannot_be_is_named(plain: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Store("never", plain)
    with pytest.raises(KeyError):
        Store.find("never")
