"""Buckets under torch: the same numbers and gradients, and no wrong form is used.

The backend is torch's own "eager" one, which compiles nothing: what is tested is padding, checks,
threads and records. benchmarks/compile_buckets.py runs the compiler.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from evener.compile import Options
from evener.compile.command import report
from evener.compile.torch import Function, bucketed
from evener.errors import UsageError

QUICK = Options(plan_after=4, hits=1, judge=1000)
SIZES = [20, 33, 27, 40, 31, 22, 38, 40, 25, 29, 36, 21]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EVENER_COMPILE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    yield tmp_path
    torch._dynamo.reset()


def tower(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 4))


def ready(function: Any) -> int:
    """Calls that ran compiled."""
    return sum(b["calls"] for said in function.report().values() for b in said["buckets"])


def why(function: Any) -> str:
    return " ".join(said["off"] for said in function.report().values())


def test_training_is_the_same() -> None:
    plain, made = tower(), bucketed(tower(), options=QUICK, backend="eager")
    for step, size in enumerate(SIZES):
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
        x.requires_grad_()
        y = x.detach().clone().requires_grad_()
        for model, inputs in ((plain, x), (made, y)):
            out = model(inputs)
            assert out.shape == (size, 4)
            model.zero_grad()
            out.square().mean().backward()
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad, y.grad)
        for p, m in zip(plain.parameters(), made.parameters(), strict=True):
            torch.testing.assert_close(p.grad, m.grad)
    assert ready(made.forward) >= 6
    assert not why(made.forward)


def test_nested_arguments_and_outputs() -> None:
    def pick(batch: dict[str, torch.Tensor], scale: float, *, more: torch.Tensor) -> dict[str, Any]:
        total = batch["a"] * scale + more
        return {"rows": total, "table": more.new_zeros(3, 2), "label": "x"}

    made = bucketed(pick, options=QUICK, backend="eager")
    for size in SIZES:
        a, b = torch.randn(size, 2), torch.randn(size, 2)
        found = made({"a": a}, 2.0, more=b)
        torch.testing.assert_close(found["rows"], a * 2 + b)
        assert found["table"].shape == (3, 2)
        assert found["label"] == "x"
    assert ready(made) >= 6


def test_rows_that_depend_on_each_other_are_left_alone() -> None:
    made = bucketed(lambda x: x - x.mean(0), options=QUICK, name="centred", backend="eager")
    for size in SIZES:
        x = torch.randn(size, 3)
        torch.testing.assert_close(made(x), x - x.mean(0))
    assert ready(made) == 0
    assert "depends on the padding" in why(made)


MIXED = {
    "mean": lambda x: x - x.mean(0),
    "sum over the batch": lambda x: x / x.shape[0],
    "softmax over the batch": lambda x: torch.softmax(x, 0),
    "cumsum from the end": lambda x: x.flip(0).cumsum(0).flip(0),
    "batch norm": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "maximum": lambda x: x - x.amax(0),
    "the last row alone": lambda x: torch.cat([x[:-1], x[-1:] * 2]),
    "the row before": lambda x: x + x.roll(1, 0),
    "a hair of the mean": lambda x: x + 1e-6 * x.mean(),
    "a branch on the whole": lambda x: x * (1 + (x.std() > 1e3).float()),
    "odd numbers of rows": lambda x: x * (1 + x.shape[0] % 2),
    "a constant of rows": lambda x: x[:3] * 2,
    "the number": lambda x: (x * 2, x.shape[0]),
    "pairs": lambda x: x @ x.T,
}


@pytest.mark.parametrize("name", MIXED)
def test_no_first_batch_hides_that_rows_depend_on_each_other(name: str) -> None:
    """That of a data loader is full: 1 row of padding of 1,024 says little about half of them."""
    function = MIXED[name]
    made = bucketed(function, name=name, options=QUICK, backend="eager", record=False)
    for size in [64] * 6 + [40, 33, 2, 61]:
        x = torch.randn(size, 3)
        torch.testing.assert_close(made(x), function(x))
    assert ready(made) == 0
    assert why(made)


def test_an_input_that_is_changed_is_left_alone() -> None:
    made = bucketed(lambda x: x.mul_(2), options=QUICK, name="twice", backend="eager")
    for size in SIZES:
        x = torch.ones(size, 3)
        assert made(x) is x
        assert torch.equal(x, torch.full((size, 3), 2.0))
    assert "changes an input" in why(made)


@pytest.mark.parametrize(
    "spread",
    [
        torch.Tensor.std,
        lambda x: max(map(max, x.tolist())),
        lambda x: x.detach().numpy().std(),
        lambda x: np.asarray(x).std(),
        lambda x: np.from_dlpack(x).std(),
    ],
    ids=["bool", "tolist", "numpy", "asarray", "dlpack"],
)
def test_a_number_that_decides_is_looked_for_where_all_batches_decide_alike(
    spread: Callable[[torch.Tensor], Any],
) -> None:
    def often(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if spread(x) > 5 else x

    made = bucketed(often, options=QUICK, name="often", backend="eager", record=False)
    for size in SIZES:
        x = torch.randn(size, 3)
        assert torch.equal(made(x), x)
    assert ready(made) == 0
    assert "decides by values of its rows" in why(made)
    x = 10 * torch.randn(7, 3)
    torch.testing.assert_close(made(x), x - x.mean(0))


def test_a_call_that_cannot_be_looked_at_is_left_alone() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        assert torch.is_grad_enabled()
        return x * 2

    made = bucketed(guarded, options=QUICK, name="guarded", backend="eager", record=False)
    for size in SIZES:
        x = torch.randn(size, 3)
        assert torch.equal(made(x), 2 * x)
    assert ready(made) == 0
    assert "it raises where Evener looks" in why(made)


def test_a_number_of_something_else_may_decide() -> None:
    scale = torch.tensor(2.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale.item() if torch.zeros_like(x).sum() == 0 else x

    made = bucketed(scaled, options=QUICK, name="scaled", backend="eager", record=False)
    for size in SIZES:
        x = torch.randn(size, 3)
        assert torch.equal(made(x), 2 * x)
    assert ready(made) > 0


def test_two_signatures_of_one_size_cut_their_own_outputs() -> None:
    def pick(x: torch.Tensor, whole: bool) -> torch.Tensor:
        return x * 2 if whole else x.new_ones(3)

    made = bucketed(pick, options=QUICK, backend="eager")
    for _ in range(2):
        for size in SIZES:
            for whole in (True, False):
                x = torch.randn(size, 3)
                torch.testing.assert_close(made(x, whole), pick(x, whole))
    assert ready(made) >= 12


def test_a_mask_makes_them_independent() -> None:
    def centred(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x - (x * mask[:, None]).sum(0) / mask.sum()

    made = bucketed(centred, mask="mask", options=QUICK, backend="eager")
    for size in SIZES:
        x = torch.randn(size, 3)
        torch.testing.assert_close(made(x), x - x.mean(0))
    assert ready(made) >= 6


def test_batch_normalization_is_left_alone() -> None:
    plain, made = tower(nn.BatchNorm1d(16)), tower(nn.BatchNorm1d(16))
    bucketed(made, options=QUICK, backend="eager")
    for step, size in enumerate(SIZES):
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(plain(x), made(x))
    assert "a call changes 1." in why(made.forward)
    for p, m in zip(plain.buffers(), made.buffers(), strict=True):
        torch.testing.assert_close(p, m)


def test_the_checks_draw_no_random_numbers() -> None:
    """With dropout it is compiled in the call; what is drawn is what the calls themselves draw."""
    plain, made = tower(nn.Dropout(0.5)), tower(nn.Dropout(0.5))
    bucketed(made, options=QUICK, backend="eager")
    torch.manual_seed(1)
    for size in SIZES[:4]:  # the 4th makes a bucket and runs in it
        made(torch.zeros(size, 8))
    drawn = torch.rand(1)
    assert not why(made.forward)
    assert ready(made.forward) == 0  # that one is counted as a compilation
    (said,) = made.forward.report().values()
    (edge,) = [b["edge"] for b in said["buckets"] if b["status"] == "ready"]
    torch.manual_seed(1)
    for size in [*SIZES[:3], edge]:
        plain(torch.zeros(size, 8))
    assert torch.equal(drawn, torch.rand(1))
    made.eval()
    torch.testing.assert_close(made(torch.ones(5, 8)), plain.eval()(torch.ones(5, 8)))


def test_an_error_of_the_compiler_costs_nothing() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    made = bucketed(lambda x: x + 1, options=QUICK, name="broken", backend=broken)
    for size in SIZES:
        x = torch.randn(size, 3)
        torch.testing.assert_close(made(x), x + 1)
    assert "no such instruction" in why(made)


def test_the_next_process_knows_the_sizes(place: Path) -> None:
    first = bucketed(lambda x: x * 2, options=QUICK, name="double", backend="eager")
    for size in SIZES:
        first(torch.randn(size, 3))
    first.save()
    del first  # a second one beside it would have a record of its own
    again = bucketed(lambda x: x * 2, options=QUICK, name="double", backend="eager")
    again(torch.randn(40, 3))
    again(torch.randn(40, 3))
    assert ready(again) == 1
    done = CliRunner().invoke(report, [])
    assert done.exit_code == 0, done.output
    assert "double (torch" in done.output
    assert "12 calls with 11 sizes, 20 to 40" in done.output
    (record,) = json.loads(CliRunner().invoke(report, ["--json"]).output)
    (said,) = record["signatures"].values()
    assert said["calls"] == 12


def test_what_passed_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next process with the same code. With other code it is."""

    def run(function: Any) -> Any:
        made = bucketed(function, options=QUICK, name="f", backend="eager")
        for size in SIZES:
            x = torch.randn(size, 3)
            torch.testing.assert_close(made(x), function(x))
        made.save()
        return made

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    first = run(double)
    del first  # its name is free again, as it is for the next process
    checks: list[int] = []
    check = Function._check

    def counted(self: Any, *arguments: Any) -> list[bool]:
        checks.append(1)
        return check(self, *arguments)

    monkeypatch.setattr(Function, "_check", counted)
    again = run(double)
    assert ready(again) >= 6
    assert not checks
    del again
    assert ready(run(lambda x: x * 3)) >= 6
    assert checks


def test_two_models_of_one_class_have_two_records(place: Path) -> None:
    models = [tower(), tower()]
    for model in models:
        bucketed(model, options=QUICK, backend="eager")
        for size in SIZES:
            model(torch.randn(size, 8))
        model.forward.save()
    assert [model.forward.name for model in models] == ["Sequential", "Sequential-2"]
    assert sorted(path.stem for path in place.glob("*.json")) == ["Sequential", "Sequential-2"]


def test_a_text_is_made_per_signature_and_not_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bucketed(lambda x, k: x * k, options=QUICK, name="g", backend="eager", record=False)
    texts: list[str] = []
    signature = Function._signature

    def counted(self: Any, *arguments: Any) -> str:
        texts.append(signature(self, *arguments))
        return texts[-1]

    monkeypatch.setattr(Function, "_signature", counted)
    for size in SIZES:
        for k in (1, 1.0, True):
            made(torch.ones(size, 3), k)
    assert len(texts) == len(set(texts)) == 3


def test_a_report_of_nothing(place: Path) -> None:
    with pytest.raises(UsageError, match="has no record"):
        CliRunner().invoke(report, [str(place / "none")], catch_exceptions=False)


def test_copies_and_pickles() -> None:
    model = bucketed(tower(), options=QUICK, backend="eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    x = torch.ones(4, 8)
    assert not torch.equal(model(x), other(x))
    assert torch.equal(other(x), torch.zeros(4, 4))
    with pytest.raises(UsageError, match="state_dict"):
        pickle.dumps(model)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        bucketed(3)
    with pytest.raises(UsageError, match="dynamic="):
        bucketed(lambda x: x, dynamic=True)
    with pytest.raises(UsageError, match="limit of"):
        bucketed(lambda x: x, options=Options(most=99))


class Attention(nn.Module):
    """With a bias of its own for keys, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_gradient_that_is_only_rounding() -> None:
    made = bucketed(Attention(), options=QUICK, backend="eager")
    for step, size in enumerate(SIZES):
        x = torch.randn(size, 5, 8, generator=torch.Generator().manual_seed(step))
        made(x).square().sum().backward()
        bias, weight = made.key.bias.grad, made.key.weight.grad
        assert bias.norm() < 1e-5 * weight.norm()
    assert ready(made.forward) > 0, why(made.forward)
