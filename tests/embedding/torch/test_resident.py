"""Resident tables beside those that lie by rows in host memory: the same values, rows and slots."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.embedding import Adagrad, Adam, RowWiseAdagrad, Sgd, SsdTier
from evener.embedding.torch import (
    DynamicOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Jagged,
    clip_grad_norm_,
    describe,
    load,
    no_sync,
    save,
)
from evener.errors import UsageError
from tests import worlds
from tests.embedding.torch.test_lookups import Counts

_NAMES = itertools.count()
ROWS = {"a": 50, "b": 6, "c": 40, "d": 20}
FEATURES = ["x", "y", "z", "w"]
LIMITS = [40, 50, 6, 20]
OPTIMIZERS = {"a": Adagrad(0.1), "b": Adagrad(0.1), "c": Adam(0.1), "d": RowWiseAdagrad(0.1)}


def collection(resident: bool, **how: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(50, 8, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(6, 8, "b", feature_names=["z"], pooling="MEAN"),
        EmbeddingBagConfig(40, 4, "c", feature_names=["x"]),
        EmbeddingBagConfig(20, 8, "d", feature_names=["w"]),
    ]
    prefix = f"resident-{next(_NAMES)}-"
    how = {"optimizer": OPTIMIZERS, **how}
    return EmbeddingBagCollection(tables, prefix=prefix, resident=resident, **how)


def draw(seed: int, batch: int) -> Jagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4, batch), generator=generator)
    ids = [
        torch.randint(0, limit, (int(own.sum()),), generator=generator)
        for limit, own in zip(LIMITS, lengths, strict=True)
    ]
    return Jagged(FEATURES, torch.cat(ids), lengths=lengths.flatten())


def loss_of(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.linspace(-1, 1, values.numel()).view(values.shape)).square().sum()


def rows_of(model: EmbeddingBagCollection) -> dict[str, dict[int, np.ndarray]]:
    """Values, slots and version of the rows that this rank owns and that a step has changed."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for config in model.configs:
        store = model.embedding_bags[config.name].store
        found[config.name] = {
            int(key): np.append(row, version)
            for chunk in store.export_rows()
            for key, row, frequency, version in zip(*chunk, strict=True)
            if frequency
        }
    return found


def train(
    rank: int, _size: int, resident: bool, batches: list[int], way: str, form: str
) -> tuple[Any, Any, list[int]]:
    how: dict[str, Any] = {"wire": form, "gradient_wire": form, "fused": way == "fused"}
    model = collection(resident, **how)
    optimizer = None if way == "fused" else DynamicOptimizer(model)
    seen, calls, ahead = [], [], None
    for step in range(5):
        features = ahead or draw(100 * step + rank, batches[rank])
        ahead = None
        with Counts() as counts:
            found = model(features)
            if way == "ahead":
                ahead = draw(100 * step + 100 + rank, batches[rank])
                model.prefetch(ahead)
            whole = found.values() if way != "unused" or step % 2 else found["y"]
            if way == "hold" and step % 2 == 0:
                with no_sync(model):
                    loss_of(whole).backward()
                seen.append(found.values().detach())
                continue
            loss_of(whole).backward()
            if way == "clip":
                seen.append(clip_grad_norm_(model, 0.5))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        seen.append(found.values().detach())
        calls.append(counts.n)
    model.eval()
    seen.append(model(draw(7 + rank, batches[rank])).values())
    return seen, rows_of(model), calls


def same(resident: list[Any], plain: list[Any]) -> None:
    for (seen, _, _), (wanted, _, _) in zip(resident, plain, strict=True):
        for one, other in zip(seen, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    for name in ROWS:
        ours, theirs = (
            {key: row for _, rows, _ in ranks for key, row in rows[name].items()}
            for ranks in (resident, plain)
        )
        assert ours.keys() <= theirs.keys()
        for key, row in ours.items():
            np.testing.assert_allclose(row, theirs[key], rtol=2e-5, atol=2e-6)
        owners = [rank for rank, (_, rows, _) in enumerate(resident) if rows[name]]
        assert len(owners) == 1


@pytest.mark.parametrize("way", ["plain", "ahead", "unused", "hold", "clip", "fused"])
def test_one_rank(way: str) -> None:
    found = [[train(0, 1, resident, [6], way, "exact")] for resident in (True, False)]
    same(*found)


# Batches that take a table whole, and others that ask for bags of it; and a rank without samples.
@pytest.mark.parametrize("batches", [[30, 30], [5, 30], [0, 9]], ids=str)
def test_ranks(batches: list[int]) -> None:
    ways = ["plain", "ahead", "unused", "hold", "clip", "fused"]
    if 0 in batches:
        ways = ["plain", "ahead", "fused"]
    cases = {
        f"{way}-{resident}": (train, resident, batches, way, "exact")
        for way in ways
        for resident in (True, False)
    }
    found = worlds.several((1, 1), cases)
    for way in ways:
        same(found[f"{way}-True"], found[f"{way}-False"])
        if way == "plain":
            assert all(calls == [4] * 5 for *_, calls in found[f"{way}-True"])


def test_ranks_of_several_hosts_take_four_collectives() -> None:
    cases = {str(r): (train, r, [7, 3, 12, 7], "plain", "exact") for r in (True, False)}
    found = worlds.several((2, 2), cases)
    same(found["True"], found["False"])
    assert all(calls == [4] * 5 for *_, calls in found["True"])


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_forms_cross_between_hosts(form: str) -> None:
    found = worlds.several((1, 1), {f: (train, True, [8, 8], "plain", f) for f in (form, "exact")})
    for (seen, *_), (wanted, *_) in zip(found[form], found["exact"], strict=True):
        far = [float((a - b).abs().max()) for a, b in zip(seen, wanted, strict=True)]
        assert 0 < far[0] < 0.005, "values of the first step are rounded once"
        assert far[0] < max(far) < 0.3 if form == "int8" else max(far) < 0.005


def counted(rank: int, _size: int) -> list[tuple[str, int, int, int]]:
    model = collection(True)
    optimizer = DynamicOptimizer(model)
    loss_of(model(draw(rank, 16)).values()).backward()
    optimizer.step()
    modules = [model.embedding_bags[name] for name in ROWS]
    return [(m.table.name, m.table.home, *_sent(m)) for m in modules]  # type: ignore[misc]


def _sent(module: Any) -> tuple[int, int]:
    return module.traffic.values, module.traffic.gradients


def test_traffic_is_counted_by_table() -> None:
    for rank, tables in enumerate(worlds.run((1, 1), counted)):
        for name, home, values, gradients in tables:
            # 16 samples: bags of `a`, `c` and `d`; `b` crosses whole.
            rows = {"a": 32, "b": 6, "c": 16, "d": 16}[name[-1]]
            row = rows * (16 if name.endswith("c") else 32)
            assert (values, gradients) == ((row, 0) if home == rank else (0, row))


def saved(rank: int, size: int, folder: str, go_on: bool) -> dict[str, dict[int, np.ndarray]]:
    model = collection(True)
    optimizer = DynamicOptimizer(model)
    if go_on:
        load(model, folder)
    for step in range(3, 6) if go_on else range(3):
        for part in range(2):  # two micro-batches: whatever the number of ranks, the same samples
            if part % size == rank or size == 1:
                features = draw(10 * step + part, 9)
                (loss_of(model(features).values()) / (1 if size == 2 else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not go_on:
        save(model, folder)
    return rows_of(model)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_goes_on(tmp_path: Path, first: int, then: int) -> None:
    for size, go_on in ((first, False), (then, True)):
        found = worlds.run((1,) * size, saved, str(tmp_path / "some"), go_on)
    worlds.run((1,), saved, str(tmp_path / "one"), False)
    (wanted,) = worlds.run((1,), saved, str(tmp_path / "one"), True)
    for name in ROWS:
        ours = {key: row for rows in found for key, row in rows[name].items()}
        assert ours.keys() == wanted[name].keys()
        for key, row in ours.items():
            np.testing.assert_allclose(row, wanted[name][key], rtol=2e-5, atol=2e-6)


def test_state_dict_goes_on_and_modules_see_the_rows() -> None:
    one, other = collection(True), collection(True)
    steps = {model: DynamicOptimizer(model) for model in (one, other)}
    for seed in range(3):
        loss_of(one(draw(seed, 6)).values()).backward()
        steps[one].step()
        steps[one].zero_grad()
    other.load_state_dict(one.state_dict())
    for model, optimizer in steps.items():
        loss_of(model(draw(9, 6)).values()).backward()
        optimizer.step()
    for name, rows in rows_of(one).items():
        for key, row in rows_of(other)[name].items():
            assert np.array_equal(row, rows[key])
    bag = one.embedding_bags["d"]
    wanted = bag.store.lookup_infer(torch.tensor([3, 4])).sum(0)
    torch.testing.assert_close(bag(torch.tensor([[3, 4]]))[0], wanted)
    with pytest.raises(UsageError, match="rows 0 to 19"):
        bag(torch.tensor([[20]]))


def refused(rank: int, _size: int) -> list[str]:
    model = collection(True)
    optimizer, errors = DynamicOptimizer(model), []
    bad = Jagged(FEATURES, torch.tensor([1, 1, 1 + 99 * rank, 1]), lengths=torch.ones(4).long())
    for act in (lambda: model(bad), lambda: _nan(model, optimizer, rank)):
        try:
            act()
        except UsageError as error:
            errors.append(str(error))
    before = rows_of(model)
    loss_of(model(draw(rank, 6)).values()).backward()
    optimizer.step()
    assert not before["a"]
    return errors


def _nan(model: Any, optimizer: Any, rank: int) -> None:
    scale = float("nan") if rank else 1.0
    (model(draw(rank, 6)).values() * scale).sum().backward()
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


def test_what_one_rank_does_wrong_all_refuse() -> None:
    first, second = worlds.run((1, 1), refused)
    assert "another rank's features do not fit" in first[0]
    assert "'z' has id 100" in second[0]
    assert all("not finite" in errors[1] for errors in (first, second))


def test_what_cannot_be_resident(tmp_path: Path) -> None:
    table = EmbeddingBagConfig(9, 4, "t", feature_names=["f"])
    ways: list[tuple[dict[str, Any], str]] = [
        ({"cache_rows": 4}, "has a cache or"),
        ({"storage": SsdTier(str(tmp_path), rows=4)}, "SSD tier"),
        ({"is_weighted": True}, "no weight per id"),
    ]
    for how, message in ways:
        with pytest.raises(UsageError, match=message):
            EmbeddingBagCollection([table], prefix=f"no-{next(_NAMES)}-", resident=True, **how)
    virtual = EmbeddingBagConfig(9, 4, "t", feature_names=["f"], use_virtual_table=True)
    with pytest.raises(UsageError, match="use_virtual_table"):
        EmbeddingBagCollection([virtual], prefix=f"no-{next(_NAMES)}-", resident=True)
    model = collection(True)
    with pytest.raises(UsageError, match="without inverse"):
        model(Jagged(FEATURES, torch.arange(4), lengths=torch.ones(4).long(), strides=[1, 2, 1, 0]))
    with pytest.raises(UsageError, match="'w', which is not given"):
        model(Jagged(FEATURES[:3], torch.arange(3), lengths=torch.ones(3).long()))


def test_describe_and_rates(tmp_path: Path) -> None:
    model = collection(True, optimizer=Sgd(1.0))
    optimizer = DynamicOptimizer(model)
    optimizer.param_groups[0]["lr"] = 0.0  # tables of one arena, of two rates
    before = model.embedding_bags["a"].store.lookup_infer(torch.arange(50)).clone()
    loss_of(model(draw(1, 6)).values()).backward()
    optimizer.step()
    after = model.embedding_bags["a"].store.lookup_infer(torch.arange(50))
    assert torch.equal(before, after)
    assert rows_of(model)["b"]
    (found,) = [t for t in describe(model, tmp_path / "t.json")["tables"] if t["name"] == "a"]
    counts = draw(1, 6).lengths().view(4, 6).sum(1)
    assert found["ids"] == [float(counts[0]) / 6, float(counts[1]) / 6]
