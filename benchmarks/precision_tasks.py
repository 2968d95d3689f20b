"""What precision_accuracy.py trains: a CNN, a character GPT, and a click model with a teacher.

Each gives a model of float32, the batches of a seed, the same batches while the data drift, and a
score on what is not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accuracy_digits as digits
import torch
from accuracy_gpt import text
from guard_limits import Characters
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

Batch = tuple[torch.Tensor, torch.Tensor]


class Task:
    """A model and its data. `better`: +1 where a higher score is better, -1 where a lower is."""

    model: nn.Module
    steps = 600
    score_is = ""
    better = 1

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        raise NotImplementedError

    def batches(self) -> Iterator[Batch]:
        """Without end, the same for every way to train."""
        raise NotImplementedError

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over the batch."""
        return cross_entropy(out.flatten(0, -2), y.flatten())

    def drifted(self, batch: Batch, level: float, number: int) -> Batch:
        """A batch as it is when the data have moved by `level`, 0 to 1."""
        raise NotImplementedError

    def score(self, model: nn.Module) -> float:
        """In float32, on what is not trained on."""
        raise NotImplementedError


class Digits(Task):
    """The digits CNN of accuracy_digits.py, 30 epochs."""

    steps, score_is = 690, "accuracy, %"

    def __init__(self, seed: int) -> None:
        self.images, self.labels = digits.data()
        order = torch.randperm(len(self.images), generator=_generator(100 + seed))
        self.test, self.rest = order[: digits.TEST], order[digits.TEST :]
        self._generator = _generator(seed)
        torch.manual_seed(seed)
        self.model = digits.cnn()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def batches(self) -> Iterator[Batch]:
        while True:
            order = torch.randperm(len(self.rest), generator=self._generator)
            for part in self.rest[order].split(digits.BATCH):
                yield self.images[part], self.labels[part]

    def drifted(self, batch: Batch, level: float, number: int) -> Batch:
        """The pictures turn darker, and labels get mixed up."""
        x, y = batch
        swap = torch.rand(len(y), generator=_generator(number)) < 0.3 * level
        return x * (1 - 0.5 * level), torch.where(swap, (y + 1) % 10, y)

    def score(self, model: nn.Module) -> float:
        with torch.no_grad():
            right = model(self.images[self.test]).argmax(1) == self.labels[self.test]
        return 100 * float(right.float().mean())


class Gpt(Task):
    """A character GPT of 0.1M parameters, far from its end, as most of a long training is."""

    score_is, better = "loss", -1

    def __init__(self, seed: int, source: Path | None = None) -> None:
        self._task = Characters(seed, "adamw", text(source))
        self._generator = _generator(seed)
        self.model = self._task.model

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def batches(self) -> Iterator[Batch]:
        while True:
            yield self._task.draw(self._task.rest, self._task.rows, self._generator)

    def drifted(self, batch: Batch, level: float, number: int) -> Batch:
        """More and more letters are others."""
        generator = _generator(number)
        rows = torch.cat([batch[0], batch[1][:, -1:]], 1)
        other = torch.randint(int(self._task.rest.max()) + 1, rows.shape, generator=generator)
        swap = torch.rand(rows.shape, generator=generator) < 0.3 * level
        return self._task.cut(torch.where(swap, other, rows))

    def score(self, model: nn.Module) -> float:
        with torch.no_grad():
            generator = _generator(7)
            batches = [self._task.draw(self._task.test, 64, generator) for _ in range(20)]
            losses = [self.loss(model(x), y) for x, y in batches]
        return float(torch.stack(losses).mean())


class Clicks(Task):
    """Clicks that a teacher draws: eight fields of 200 ids, pairs of which count.

    The teacher is a factorization machine, the model embeddings with a small network above.
    """

    score_is = "AUC, %"
    fields, ids, rows = 8, 200, 256

    def __init__(self, seed: int) -> None:
        generator = _generator(1)  # one teacher for all seeds
        self._weights = torch.randn(self.fields * self.ids, generator=generator)
        self._factors = torch.randn(self.fields * self.ids, 4, generator=generator)
        self._test = self._draw(20_000, generator)
        self._generator = _generator(1000 + seed)
        torch.manual_seed(seed)
        self.model = _Tower(self.fields, self.fields * self.ids)

    def _draw(self, rows: int, generator: torch.Generator) -> Batch:
        found = torch.randint(self.ids, (rows, self.fields), generator=generator)
        found += self.ids * torch.arange(self.fields)
        return found, self._clicks(found, self._weights, generator)

    def _clicks(
        self, ids: torch.Tensor, weights: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        factors = self._factors[ids]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        odds = 0.5 * weights[ids].sum(1) + 0.1 * pairs - 1
        return torch.bernoulli(odds.sigmoid(), generator=generator)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def batches(self) -> Iterator[Batch]:
        while True:
            yield self._draw(self.rows, self._generator)

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(out.flatten(), y)

    def drifted(self, batch: Batch, level: float, number: int) -> Batch:
        """What is liked changes: the teacher's weights turn."""
        other = torch.randn(len(self._weights), generator=_generator(2))
        weights = (1 - level) * self._weights + level * other
        return batch[0], self._clicks(batch[0], weights, _generator(number))

    def score(self, model: nn.Module) -> float:
        ids, clicks = self._test
        with torch.no_grad():
            ranks = model(ids).flatten().double().argsort().argsort().double() + 1
        positive = clicks > 0
        ones, zeros = int(positive.sum()), int((~positive).sum())
        return 100 * float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


class _Tower(nn.Module):
    """Logits [rows, 1] from ids [rows, fields]."""

    def __init__(self, fields: int, ids: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(ids, 8)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.network = nn.Sequential(nn.Linear(8 * fields, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network(self.embed(ids).flatten(1))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TASKS: dict[str, type[Task]] = {"digits": Digits, "gpt": Gpt, "clicks": Clicks}
