"""torchrec's collections on tables that grow, beside nn.EmbeddingBag, on one rank and several."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evener.embedding import Adagrad, Constant, Sgd, Uniform
from evener.embedding.torch import (
    DynamicEmbeddingBag,
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Jagged,
    KeyedTensor,
    export,
    fill,
)
from evener.errors import UsageError
from tests import worlds

KEYS, BATCH = ["a", "b", "c", "d"], 5


def configs(kind: Any = EmbeddingBagConfig) -> list[Any]:
    return [
        kind(20, 4, "first", feature_names=["c", "a"], init_fn=nn.init.normal_),
        kind(30, 3, "second", feature_names=["b"], weight_init_min=-2.0, weight_init_max=3.0),
        kind(20, 4, "third", feature_names=["a", "d"]),
    ]


def draw(seed: int, batch: int = BATCH, weighted: bool = False) -> Jagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * batch,), generator=generator)
    n = int(lengths.sum())
    ids = torch.randint(0, 20, (n,), generator=generator)
    weights = torch.rand(n, generator=generator) if weighted else None
    return Jagged(KEYS, ids, lengths=lengths, weights=weights)


class Plain(nn.Module):
    """The same of torch's own modules."""

    def __init__(self, of: EmbeddingBagCollection, mode: str) -> None:
        super().__init__()
        self.of, self.bags = of.configs, nn.ModuleDict()
        for config in of.configs:
            bag = nn.EmbeddingBag(config.num_embeddings, config.embedding_dim, mode=mode)
            ids = torch.arange(config.num_embeddings)
            bag.weight.data = of.embedding_bags[config.name].store.lookup_infer(ids)
            self.bags[config.name] = bag

    def forward(self, features: Jagged, weighted: bool) -> torch.Tensor:
        found, columns = features.to_dict(), []
        for config in self.of:
            for name in config.feature_names:
                each = found[name]
                weights = each.weights_or_none() if weighted else None
                columns.append(
                    self.bags[config.name](
                        each.values(), each.offsets()[:-1], per_sample_weights=weights
                    )
                )
        return torch.cat(columns, 1)


@pytest.mark.parametrize(("pooling", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
def test_bags_are_those_of_torch(pooling: str, weighted: bool) -> None:
    chosen = configs()
    for config in chosen:
        config.pooling = pooling
    rates = {"first": Sgd(0.5), "second": Adagrad(0.2, 1e-3)}
    prefix = f"{pooling}-{weighted}-"
    model = EmbeddingBagCollection(chosen, weighted, optimizer=rates, prefix=prefix)
    plain = Plain(model, pooling.lower())
    optimizer = DynamicOptimizer(model)
    weights = {name: bag.weight for name, bag in plain.bags.items()}
    steps = [
        torch.optim.SGD([weights["first"]], 0.5),
        torch.optim.Adagrad([weights["second"]], 0.2, eps=1e-3),
        torch.optim.Adagrad([weights["third"]], 0.1),
    ]
    for step in range(4):
        features = draw(step, weighted=weighted)
        found, right = model(features), plain(features, weighted)
        assert found.keys() == ["c", "a@first", "b", "a@third", "d"]
        assert found.length_per_key() == [4, 4, 3, 4, 4]
        torch.testing.assert_close(found.values(), right, atol=2e-6, rtol=0)
        factors = torch.linspace(-1, 1, right.numel()).view(right.shape)
        (found.values() * factors).sum().backward()
        (right * factors).sum().backward()
        for each in (optimizer, *steps):
            each.step()
            each.zero_grad()
    start = model.embedding_bags["second"].store.options.init
    assert start == Uniform(-2.0, 3.0)


def test_rows_of_each_id() -> None:
    model = EmbeddingCollection(configs(EmbeddingConfig), need_indices=True, prefix="rows-")
    features = draw(3)
    found = model(features)
    for name, config, feature in [("c", 0, "c"), ("a@third", 2, "a"), ("b", 1, "b")]:
        own = features.to_dict()[feature]
        store = model.embeddings[model.configs[config].name].store
        assert torch.equal(found[name].values(), store.lookup_infer(own.values()))
        assert torch.equal(found[name].lengths(), own.lengths())
        assert torch.equal(found[name].weights_or_none(), own.values())
    assert [len(each) for each in found["b"].to_dense()] == found["b"].lengths().tolist()


def test_features_have_batches_of_their_own() -> None:
    model = EmbeddingBagCollection(configs(), prefix="own-")
    strides, lengths = [2, 1, 2, 3], torch.tensor([1, 2, 0, 3, 1, 1, 0, 2])
    ids = torch.arange(10)
    inverse = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 2]])
    few = Jagged(KEYS, ids, lengths=lengths, strides=strides, inverse=inverse)
    found = model(few)
    whole = few.to_dict()
    for i, key in enumerate(KEYS):
        rows = whole[key].to_dense()
        for sample, bag in enumerate(inverse[i].tolist()):
            for name in [key] if key != "a" else ["a@first", "a@third"]:
                table = {"c": "first", "a@first": "first", "b": "second"}.get(name, "third")
                store = model.embedding_bags[table].store
                wanted = store.lookup_infer(rows[bag]).sum(0)
                torch.testing.assert_close(found[name][sample], wanted)
    with pytest.raises(UsageError, match="batches of 1, 2, 3 samples"):
        model(Jagged(KEYS, ids, lengths=lengths, strides=strides))
    rows_only = EmbeddingCollection(configs(EmbeddingConfig), prefix="own-rows-")
    assert rows_only(few)["d"].lengths().tolist() == [1, 0, 2]


class Theirs:
    """The methods of torchrec's KeyedJaggedTensor that are read."""

    def __init__(self, of: Jagged) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        if name == "inverse_indices_or_none":
            return lambda: None
        return getattr(self.of, name)


def test_what_is_given_is_not_copied() -> None:
    features = draw(1, weighted=True)
    taken = Jagged.of(Theirs(features))
    for name in ("values", "offsets", "weights_or_none"):
        assert getattr(taken, name)().data_ptr() == getattr(features, name)().data_ptr()
    assert features.to_dict()["b"].values().data_ptr() != 0
    base = features.values().untyped_storage().data_ptr()
    assert features.to_dict()["b"].values().untyped_storage().data_ptr() == base
    other = KeyedTensor({"x": torch.ones(2, 1), "y": torch.zeros(2, 2)})
    left, right = KeyedTensor.regroup([other], [["y"], ["y", "x"]])
    assert left.shape == (2, 2) and right.tolist() == [[0, 0, 1]] * 2
    assert other.offset_per_key() == [0, 1, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"need_pos": True}, "need_pos"),
        ({"data_type": "INT8"}, "data_type=INT8"),
        ({"feature_names": []}, "no feature"),
        ({"name": "second"}, "named"),
    ],
)
def test_tables_that_cannot_be_are_named(change: dict[str, Any], words: str) -> None:
    chosen = configs()
    for name, value in change.items():
        setattr(chosen[0], name, value)
    with pytest.raises(UsageError, match=words):
        EmbeddingBagCollection(chosen, prefix="no-")


def test_inputs_that_cannot_be_are_named() -> None:
    model = EmbeddingBagCollection(configs(), prefix="bad-")
    good = draw(0)
    for ids, words in [(good.values() + 20, "num_embeddings=20"), (good.values() - 20, "has id -")]:
        with pytest.raises(UsageError, match=words):
            model(Jagged(KEYS, ids, offsets=good.offsets()))
    with pytest.raises(UsageError, match="feature 'a', which is not given"):
        model(Jagged(["c"], torch.arange(3), lengths=torch.tensor([3])))
    with pytest.raises(UsageError, match="a name twice"):
        model(Jagged(["c", "c"], torch.arange(3), lengths=torch.tensor([3, 0])))
    with pytest.raises(UsageError, match="features are a Tensor"):
        model(torch.arange(3))
    with pytest.raises(UsageError, match="optimizer for nobody"):
        EmbeddingBagCollection(configs(), prefix="bad-", optimizer={"nobody": Sgd()})
    grows = EmbeddingBagConfig(1, 4, "grows", feature_names=["c"], use_virtual_table=True)
    free = EmbeddingBagCollection([grows])
    assert free(Jagged(["c"], torch.tensor([-(2**62)]), lengths=torch.tensor([1])))["c"].any()


def sharded(rank: int, _size: int, folder: str) -> dict[str, Any]:
    model = EmbeddingBagCollection(configs(), optimizer=Sgd(0.5), prefix="ranks-")
    optimizer = DynamicOptimizer(model)
    weight = torch.arange(80.0).view(20, 4)
    owned = fill(model.embedding_bags["third"], weight)
    for step in range(3):
        features = draw(10 * step + rank)
        model.prefetch(features)
        model(features).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = export(model, Path(folder) / "rows.npz")
    found = dict(np.load(path))
    return {"owned": owned, "path": path.name, "rows": found}


def test_ranks_train_as_one(tmp_path: Path) -> None:
    found = worlds.run((1, 1), sharded, str(tmp_path))
    assert sum(each["owned"] for each in found) == 20
    assert [each["path"] for each in found] == ["rows-0-of-2.npz", "rows-1-of-2.npz"]
    model = EmbeddingBagCollection(configs(), optimizer=Sgd(0.5), prefix="one-")
    optimizer = DynamicOptimizer(model)
    fill(model.embedding_bags["third"], torch.arange(80.0).view(20, 4))
    for step in range(3):
        parts = [model(draw(10 * step + rank)).values().square().sum() for rank in range(2)]
        torch.stack(parts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("second", "third"):  # each rank drew the first by itself
        store = model.embedding_bags[name].store
        keys = np.concatenate([each["rows"][f"ranks-{name}.keys"] for each in found])
        values = np.concatenate([each["rows"][f"ranks-{name}.values"] for each in found])
        assert len(keys) == len(set(keys.tolist())) == len(store)
        wanted = store.lookup_infer(torch.from_numpy(keys))
        torch.testing.assert_close(torch.from_numpy(values), wanted, atol=2e-5, rtol=2e-6)


def test_both_formats_of_plain_arrays_hold_the_same(tmp_path: Path) -> None:
    safe = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    bag = DynamicEmbeddingBag(3, "two-formats")
    fill(bag, torch.arange(9.0).view(3, 3))
    found = np.load(export(bag, tmp_path / "rows.npz"))
    again = safe.load_file(export(bag, tmp_path / "rows.safetensors"))
    assert found.files and sorted(again) == sorted(found.files)
    assert all(np.array_equal(again[name], found[name]) for name in again)


def test_tables_come_and_go_as_plain_arrays(tmp_path: Path) -> None:
    bag = DynamicEmbeddingBag(3, "plain-in")
    keys = torch.tensor([5, -9, 2**62])
    assert fill(bag, torch.arange(9.0).view(3, 3), keys) == 3
    assert torch.equal(bag.store.lookup_infer(keys), torch.arange(9.0).view(3, 3))
    found = np.load(export(bag, tmp_path / "rows.npz"))
    order = [found["plain-in.keys"].tolist().index(int(key)) for key in keys]
    assert np.array_equal(found["plain-in.values"][order], np.arange(9.0).reshape(3, 3))
    with pytest.raises(UsageError, match=r"shape \[2, 4\]"):
        fill(bag, torch.zeros(2, 4))
    with pytest.raises(UsageError, match="1 keys for 2 rows"):
        fill(bag, torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UsageError, match="no known ending"):
        export(bag, tmp_path / "rows.csv")
    with pytest.raises(UsageError, match="no embedding"):
        export(nn.Linear(1, 1), tmp_path / "rows.npz")
    drawn = functools.partial(nn.init.constant_, val=2.0)
    config = EmbeddingConfig(3, 2, "filled", feature_names=["x"], init_fn=drawn)
    filled = EmbeddingCollection([config])
    assert list(filled.embeddings) == ["filled"]
    assert list(filled.state_dict()) == ["embeddings.filled._extra_state"]
    items = EmbeddingCollection([EmbeddingConfig(3, 2, "items", feature_names=["x"])])
    assert items.embeddings["items"].table.name == "items"
    assert len(filled.embeddings["filled"].store) == 3
    assert filled.embeddings["filled"].store.options.init != Constant(2.0)
    assert (filled.embeddings["filled"].store.lookup_infer(torch.arange(3)) == 2).all()
