"""The modules beside nn.Embedding and nn.EmbeddingBag, and what they refuse."""

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.embedding import Options, Sgd, SsdTier
from evener.embedding.torch import DynamicEmbedding, DynamicEmbeddingBag, DynamicOptimizer
from evener.errors import UsageError

KEYS, DIM, LR = 100, 8, 0.1
SHIFT = -50  # keys are any int64: negative ones too


def pair(mode: str = "sum", **how: Any) -> tuple[DynamicEmbeddingBag, nn.EmbeddingBag]:
    """A dynamic bag and torch's own, with the same values of the keys SHIFT .. SHIFT + KEYS."""
    options = Options(DIM, optimizer=Sgd(lr=LR))
    own = {name: value for name, value in how.items() if name != "padding_idx"}
    padding = how.get("padding_idx")
    dynamic = DynamicEmbeddingBag(
        options, mode=mode, padding_idx=None if padding is None else padding + SHIFT, **own
    )
    plain = nn.EmbeddingBag(KEYS, DIM, mode=mode, **how)
    values = dynamic.store.lookup_infer(torch.arange(SHIFT, SHIFT + KEYS))
    plain.weight.data.copy_(values)
    return dynamic, plain


def same_steps(
    dynamic: DynamicEmbeddingBag, plain: nn.EmbeddingBag, *inputs: Any, steps: int = 3
) -> None:
    """Train both on the same, and compare results, weights and gradients of weights per sample."""
    optimizer = DynamicOptimizer(dynamic)
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    ids, *rest = inputs
    weights = rest[1] if len(rest) > 1 else None
    for _ in range(steps):
        gradients = []
        results = []
        for module, given in ((dynamic, ids + SHIFT), (plain, ids)):
            if weights is not None:
                rest[1] = weights.clone().requires_grad_()
            out = module(given, *rest)
            (out * torch.arange(1, DIM + 1)).square().mean().backward()
            results.append(out.detach())
            gradients.append(rest[1].grad if weights is not None else torch.zeros(1))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    values = dynamic.store.lookup_infer(torch.arange(SHIFT, SHIFT + KEYS))
    torch.testing.assert_close(values, plain.weight.detach())


IDS = torch.randint(0, KEYS, (12, 5), generator=torch.Generator().manual_seed(1))
FLAT = IDS.reshape(-1)
OFFSETS = torch.tensor([0, 0, 7, 20, 20, 59])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_two_dimensions(mode: str, dtype: torch.dtype) -> None:
    same_steps(*pair(mode), IDS.to(dtype))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_offsets_with_empty_bags(mode: str) -> None:
    same_steps(*pair(mode), FLAT, OFFSETS)


def test_include_last_offset() -> None:
    ends = torch.cat((OFFSETS, torch.tensor([60])))
    same_steps(*pair("mean", include_last_offset=True), FLAT, ends)


@pytest.mark.parametrize(
    "inputs", [(IDS, None, torch.rand(12, 5)), (FLAT, OFFSETS, torch.rand(60))]
)
def test_weights_per_sample(inputs: Any) -> None:
    same_steps(*pair("sum"), *inputs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("inputs", [(IDS,), (FLAT, OFFSETS)])
def test_padding(mode: str, inputs: Any) -> None:
    dynamic, plain = pair(mode, padding_idx=int(FLAT[3]))
    same_steps(dynamic, plain, *inputs)
    assert dynamic.store.meta(torch.tensor([int(FLAT[3]) + SHIFT]))[0][0] == -1  # got no row


def test_embedding_of_any_shape_and_padding() -> None:
    module = DynamicEmbedding(Options(DIM), padding_idx=7)
    ids = torch.tensor([[[7, 2**63 - 1]], [[-(2**63), 7]]])
    out = module(ids)
    assert out.shape == (2, 1, 2, DIM)
    assert not out[0, 0, 0].any() and not out[1, 0, 1].any()
    assert out[0, 0, 1].any() and out[1, 0, 0].any()
    assert len(module.store) == 2
    assert module(torch.full((3,), 7)).eq(0).all()
    assert module(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, DIM)


@dataclass
class Jagged:
    """As torchrec's KeyedJaggedTensor: methods, not attributes; keys() only where keyed."""

    ids: torch.Tensor
    ends: torch.Tensor
    names: tuple[str, ...]
    factors: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        return self.ids

    def offsets(self) -> torch.Tensor:
        return self.ends

    def keys(self) -> tuple[str, ...]:
        return self.names

    def weights_or_none(self) -> torch.Tensor | None:
        return self.factors


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["sum", "mean", None])
@pytest.mark.parametrize("how", [{}, {"cache_rows": 9}, {"padding_idx": 1}], ids=str)
def test_batches_without_an_id_are_as_torch_has_them(
    shape: tuple[int, int], mode: str | None, how: dict[str, int]
) -> None:
    ids = torch.empty(shape, dtype=torch.int64)
    module: nn.Module
    if mode is None:
        module, plain = DynamicEmbedding(Options(DIM), **how), nn.Embedding(9, DIM)
    else:
        module = DynamicEmbeddingBag(Options(DIM), mode=mode, **how)
        plain = nn.EmbeddingBag(9, DIM, mode=mode)
    for train in (True, False):
        found = module.train(train)(ids)
        if train:
            found.sum().backward()
        # nn.EmbeddingBag itself cannot take bags of no id in two dimensions.
        right = torch.zeros(shape[0], DIM) if mode and not shape[1] else plain(ids)
        assert torch.equal(found, right)


def test_features_with_batches_of_their_own_are_refused() -> None:
    class Strides(Jagged):
        def stride_per_key(self) -> list[int]:
            return self.strides

    ids, ends = torch.arange(6), torch.arange(7)
    module = DynamicEmbeddingBag(Options(DIM), mode="sum")
    given = Strides(ids, ends, ("user", "item"))
    for strides in ([2, 4], [1, 5], [2, 2]):
        given.strides = strides
        with pytest.raises(UsageError, match="2 features have 6 bags"):
            module(given)
    given.strides = [3, 3]
    assert module(given).shape == (3, 2 * DIM)
    with pytest.raises(UsageError, match="4 features have 6 bags"):
        module(Jagged(ids, ends, ("a", "b", "c", "d")))


def test_keyed_jagged_features_lie_side_by_side() -> None:
    module = DynamicEmbeddingBag(Options(DIM), mode="sum")
    ids, ends = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 2, 2, 3, 6])
    out = module(Jagged(ids, ends, ("user", "item")))  # two features, a batch of two
    rows = module.store.lookup_infer(ids)
    assert out.shape == (2, 2 * DIM)
    torch.testing.assert_close(out[0], torch.cat((rows[0] + rows[1], rows[2])))
    torch.testing.assert_close(out[1], torch.cat((torch.zeros(DIM), rows[3] + rows[4] + rows[5])))
    lengths = module(ids, lengths=torch.tensor([2, 0, 1, 3]))
    torch.testing.assert_close(lengths[3], rows[3] + rows[4] + rows[5])
    torch.testing.assert_close(lengths[1], torch.zeros(DIM))


def test_strings() -> None:
    module = DynamicEmbedding(Options(DIM, keys="string"))
    first = module(["anna", "boris", "anna"])
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])
    assert module([["anna", "boris"]]).shape == (1, 2, DIM)
    assert len(module.store) == 2
    module.eval()
    module(["clara"])
    assert len(module.store) == 2


def test_inference_never_inserts() -> None:
    module = DynamicEmbeddingBag(Options(DIM))
    with torch.no_grad():
        module(IDS)
    module.eval()
    assert not module(IDS).requires_grad
    assert len(module.store) == 0
    before = module(IDS)
    module.train()
    torch.testing.assert_close(module(IDS), before)  # a new row starts with what inference gave
    assert len(module.store) == len(torch.unique(IDS))


def test_one_name_is_one_table() -> None:
    first, second = (DynamicEmbedding(Options(DIM), "shared-by-two") for _ in range(2))
    first(torch.arange(5))
    assert len(second.store) == 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(torch.rand(3, 2)), "torch.float32"),
        (lambda m: m(torch.arange(4)), "offsets or lengths"),
        (lambda m: m(torch.arange(4), torch.tensor([1, 2])), "begin with 0"),
        (lambda m: m(torch.arange(4), torch.tensor([0, 3, 2])), "not fall"),
        (lambda m: m(torch.arange(4), lengths=torch.tensor([1, 2])), "bags end at 3"),
        (lambda m: m(torch.arange(4), lengths=torch.tensor([5, -1])), "below 0"),
        (lambda m: m(torch.ones(2, 2).long(), torch.tensor([0])), "2-D ids"),
        (lambda m: m(torch.ones(2, 2).long(), None, torch.ones(2)), "per_sample_weights"),
        (lambda m: m(torch.ones(2, 2, 2).long()), "3 dimensions"),
        (lambda m: m([1, 2]), "list"),
        (lambda _: DynamicEmbeddingBag(4, mode="max"), "'max'"),
        (lambda _: DynamicEmbeddingBag(4, wire="fp4"), "'fp4'"),
        (lambda _: DynamicEmbedding(4, cache_rows=-1), "-1"),
        (copy.deepcopy, "cannot be copied"),
        (pickle.dumps, "cannot be pickled"),
        (lambda _: DynamicOptimizer(nn.Linear(2, 2)), "no embedding"),
    ],
)
def test_what_cannot_be_is_named_and_changes_nothing(call: Any, words: str) -> None:
    module = DynamicEmbeddingBag(Options(DIM), mode="sum")
    with pytest.raises(UsageError, match=words) as raised:
        call(module)
    assert raised.value.fix
    assert len(module.store) == 0


def test_storage_bounds_memory_and_changes_no_bit(tmp_path: Path) -> None:
    """Rows that are seldom used are in a file, and training goes as if they were not."""
    found = []
    for storage in (None, SsdTier(str(tmp_path / "cold"), 600)):
        options = Options(DIM, optimizer=Sgd(lr=LR), seed=3, shards=4)
        embedding = DynamicEmbedding(options, storage=storage)
        optimizer = DynamicOptimizer(embedding)
        draw = torch.Generator().manual_seed(0)
        for _ in range(20):
            ids = torch.randint(0, 5000, (300,), generator=draw)
            embedding(ids).square().sum().backward()
            optimizer.step()
        stats = embedding.store.stats()
        found.append((embedding.eval()(torch.arange(5000)), stats["rows"]))
    assert stats["cold_rows"] > 2000 and stats["warmed"] > 0
    assert stats["rows"] - stats["cold_rows"] <= 600 + 300
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert not list((tmp_path / "cold").iterdir())  # the file has no name
    with pytest.raises(OSError, match="/proc/none"):
        DynamicEmbedding(DIM, storage=SsdTier("/proc/none", 5))
