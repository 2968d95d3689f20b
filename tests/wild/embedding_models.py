"""Recommenders of others with Evener's embedding in the place of every nn.Embedding.

    python -m tests.wild.embedding_models

Models of deepctr-torch, torch-rechub, torchfm and pytorch-widedeep train twice from the same
weights: as they are, and with each table swapped for a DynamicEmbedding that holds the same rows.
Losses must be the same to rounding: within 1e-5, or, for a model that rounding alone moves further,
within what one bit more in each weight changes. A loop with string keys and bags that may be empty
must learn. Exit status 1 where not. `make wild` runs it after the doors' programs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

LR, STEPS, TOLERANCE = 0.05, 8, 1e-5


def enter() -> None:
    """Go on in the environment of the programs, which is made where it is missing."""
    from tests.wild import environments

    problem = environments.make("recommend")
    if problem:
        print(f"not installed: {problem}")
        raise SystemExit(0)
    python = str(environments.python("recommend"))
    path = os.pathsep.join([str(environments.ROOT), str(environments.ROOT / "python")])
    os.execve(
        python,
        [python, "-m", "tests.wild.embedding_models", "--inside"],
        {**os.environ, "PYTHONPATH": path},
    )


def swap(model: Any, name: str) -> int:
    """Every nn.Embedding as a DynamicEmbedding with the same rows; how many."""
    import torch

    from evener.embedding import Options, Sgd
    from evener.embedding.torch import DynamicEmbedding

    count = 0
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Embedding):
            continue
        made = DynamicEmbedding(
            Options(module.embedding_dim, optimizer=Sgd(lr=LR)),
            f"{name}-{path}",
            padding_idx=module.padding_idx,
        )
        made.store.upsert(torch.arange(module.num_embeddings), module.weight.detach(), 0)
        parent = model.get_submodule(path.rpartition(".")[0])
        parent.add_module(path.rpartition(".")[2], made)
        count += 1
    return count


def losses(model: Any, optimizer: Any, batch: Any, loss: Callable[[Any, Any], Any]) -> list[float]:
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def compare(name: str, make: Callable[[], Any], batch: Any, truth: Any) -> bool:
    """Both ways; whether they agree."""
    import torch

    from evener.embedding.torch import DynamicOptimizer

    def loss(model: Any, given: Any) -> Any:
        return torch.nn.functional.binary_cross_entropy(model(given).view(-1), truth)

    torch.manual_seed(0)
    model = make()
    plain = losses(model, torch.optim.SGD(model.parameters(), lr=LR), batch, loss)
    torch.manual_seed(0)
    model = make()
    count = swap(model, name)
    optimizer = DynamicOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    ours = losses(model, optimizer, batch, loss)
    worst, bound = distance(plain, ours), TOLERANCE
    if worst >= bound:
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 2**-23)
        other = losses(model, torch.optim.SGD(model.parameters(), lr=LR), batch, loss)
        bound = max(bound, distance(plain, other))
    good = worst < bound and count > 0 and plain[-1] < plain[0]
    print(
        f"{name:22} {count:2} tables, loss {plain[0]:.4f} to {plain[-1]:.4f}, largest difference "
        f"{worst:.1e} of {bound:.1e}: {'equal' if good else 'DIFFERS'}",
        flush=True,
    )
    return good


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference of losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def models() -> list[bool]:
    """All of them."""
    import numpy as np
    import torch
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN, DeepFM
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import DIN as RechubDIN  # noqa: N811
    from torch_rechub.models.ranking import WideDeep

    draw, n = np.random.default_rng(0), 64
    truth = torch.tensor(draw.integers(0, 2, n), dtype=torch.float32)
    columns = [SparseFeat(f"c{i}", 200, embedding_dim=8) for i in range(5)] + [DenseFeat("x", 1)]
    table = np.concatenate([draw.integers(0, 200, (n, 5)), draw.random((n, 1))], 1)
    fm = torch.tensor(table, dtype=torch.float32)
    lengths = draw.integers(1, 7, n)
    past = np.where(np.arange(6)[None] < lengths[:, None], draw.integers(1, 100, (n, 6)), 0)
    item = draw.integers(1, 100, (n, 1))
    ragged = torch.tensor(np.concatenate([item, past, lengths[:, None]], 1), dtype=torch.float32)
    behaviour = [
        SparseFeat("item", 100, embedding_dim=8),
        VarLenSparseFeat(
            SparseFeat("hist_item", 100, embedding_dim=8, embedding_name="item"), 6, length_name="n"
        ),
    ]

    def wide() -> Any:
        # The features keep their tables: a model that starts anew needs new ones.
        deep = [SparseFeature(f"c{i}", 300, embed_dim=8) for i in range(4)]
        return WideDeep(deep, deep, {"dims": [16], "dropout": 0.0})

    def din() -> Any:
        history = [SequenceFeature("hist", 100, embed_dim=8, pooling="concat", shared_with="item")]
        return RechubDIN(
            features=[SparseFeature("user", 50, embed_dim=8)],
            history_features=history,
            target_features=[SparseFeature("item", 100, embed_dim=8)],
            mlp_params={"dims": [16]},
            attention_mlp_params={"dims": [8]},
        )

    four = {f"c{i}": torch.tensor(draw.integers(0, 300, n)) for i in range(4)}
    three = {
        "user": torch.tensor(draw.integers(0, 50, n)),
        "item": torch.tensor(draw.integers(1, 100, n)),
        "hist": torch.tensor(draw.integers(0, 100, (n, 7))),
    }
    plain = {"l2_reg_embedding": 0, "dnn_dropout": 0}
    return [
        compare("deepctr-torch DeepFM", lambda: DeepFM(columns, columns, **plain), fm, truth),
        compare("deepctr-torch DIN", lambda: DIN(behaviour, ["item"], **plain), ragged, truth),
        compare("torch-rechub WideDeep", wide, four, truth),
        compare("torch-rechub DIN", din, three, truth),
        *more(behaviour, ragged, truth),
        strings(),
    ]


def more(behaviour: Any, ragged: Any, truth: Any) -> list[bool]:
    """A recurrent net, a transformer, one table for all fields, a table for each pair of fields,
    and a wide part whose rows are single numbers."""
    import numpy as np
    import torch
    from deepctr_torch.models import DIEN
    from pytorch_widedeep.models import TabMlp, Wide, WideDeep
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking import BST
    from torchfm.model.fnfm import FieldAwareNeuralFactorizationMachineModel
    from torchfm.model.xdfm import ExtremeDeepFactorizationMachineModel

    np.long = np.int64  # torchfm is older than numpy 1.24, which took the name away
    draw, n = np.random.default_rng(2), len(truth)
    sizes = np.array([40, 30, 20])
    fields = torch.tensor(draw.integers(0, sizes, (n, 3)))
    clicks = {
        "user": torch.tensor(draw.integers(0, 50, n)),
        "item": torch.tensor(draw.integers(1, 100, n)),
        "hist": torch.tensor(draw.integers(1, 100, (n, 7))),
    }
    names = ["a", "b", "c"]
    both = {"wide": fields + torch.tensor([1, 41, 71]), "deeptabular": fields + 1.0}

    def transformer() -> Any:
        history = [SequenceFeature("hist", 100, embed_dim=8, pooling="concat", shared_with="item")]
        target = [SparseFeature("item", 100, embed_dim=8)]
        user = [SparseFeature("user", 50, embed_dim=8)]
        return BST(user, history, target, {"dims": [16], "dropout": 0.0}, nhead=2, dropout=0.0)

    def wide() -> Any:
        deep = TabMlp(
            {name: i for i, name in enumerate(names)},
            cat_embed_input=[(name, int(size), 8) for name, size in zip(names, sizes, strict=True)],
            mlp_hidden_dims=[16],
            mlp_dropout=0.0,
        )
        return torch.nn.Sequential(WideDeep(Wide(91), deep), torch.nn.Sigmoid())

    def extreme() -> Any:
        return ExtremeDeepFactorizationMachineModel(sizes, 8, (16,), 0.0, (8,))

    def aware() -> Any:
        return FieldAwareNeuralFactorizationMachineModel(sizes, 8, (16,), (0.0, 0.0))

    return [
        compare("deepctr-torch DIEN", lambda: DIEN(behaviour, ["item"]), ragged, truth),
        compare("torch-rechub BST", transformer, clicks, truth),
        compare("torchfm xDeepFM", extreme, fields, truth),
        compare("torchfm FNFM", aware, fields, truth),
        compare("pytorch-widedeep", wide, both, truth),
    ]


def strings() -> bool:
    """Keys as MovieLens has users, in bags that may be empty."""
    import numpy as np
    import torch

    from evener.embedding import Adagrad, Options
    from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer

    options = Options(16, optimizer=Adagrad(lr=0.5), keys="string")
    bag, head = DynamicEmbeddingBag(options, "users", mode="mean"), torch.nn.Linear(16, 2)
    optimizer = DynamicOptimizer(bag, torch.optim.SGD(head.parameters(), lr=0.5))
    draw, found = np.random.default_rng(1), []
    for _ in range(80):
        lengths = draw.integers(0, 6, 32)
        ids = draw.integers(0, 200, lengths.sum())
        ends = np.concatenate([[0], lengths.cumsum()])
        odd = [np.mean(ids[a:b] % 2) if b > a else 0 for a, b in itertools.pairwise(ends)]
        rows = bag([f"user:{i}" for i in ids], torch.tensor(ends[:-1]))
        loss = torch.nn.functional.cross_entropy(head(rows), torch.tensor(np.array(odd) > 0.5) * 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    good = np.mean(found[-10:]) < 0.6 * np.mean(found[:10]) and len(bag.store) == 200
    print(f"string keys, empty bags: loss {found[0]:.3f} to {found[-1]:.3f}, {len(bag.store)} rows")
    return bool(good)


if __name__ == "__main__":
    if "--inside" not in sys.argv:
        enter()
    raise SystemExit(0 if all(models()) else 1)
