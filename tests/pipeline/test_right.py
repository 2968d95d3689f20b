"""Right or refused: what a trace does not see, compared with the plain model over steps.

Two ranks share a world. A case gives a model, a loss, and what is done in a step; the plain model
does the same in one process.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import pipeline
from evener.errors import UsageError
from evener.pipeline import torch_names
from evener.pipeline.example import Example
from evener.pipeline.verify import verify
from tests import worlds
from tests.comm.scripts import heard

RATES = pipeline.Rates(1e11, 1e10, 1e-6)
WIDTH = 8


class Stack(nn.Module):
    """Residual layers, with something of the case's in the middle."""

    def __init__(self, middle: nn.Module | None = None, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.middle = middle

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if at == 1 and self.middle is not None:
                x = self.middle(x)
        return x * scale


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Do(nn.Module):
    def __init__(self, what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


def _hooked(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda g: g * 0.1)
    return y


def _counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * self.calls


def _counting_in_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen += 1
    return x * (self.seen / 8)


def _averaging(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.lerp_(x.detach().mean(), 0.1)
    return x


def _summing(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen += x.detach().sum()
    return x


def _noisy(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x) if self.training else x


def _trains_alone(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not self.training:
        raise RuntimeError("for training alone")
    return x


def _autocast(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            x = torch.relu(x @ torch.eye(WIDTH))
    return x.float()


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    keep = (target[..., :1] > 0).float()
    return ((output - target).square() * keep).sum() / keep.sum().clamp(min=1)


def labelled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Some labels are ignored: by their number in a row."""
    labels = torch.where(target[:, 0] > -0.5, target.argmax(-1), -100)
    return functional.cross_entropy(output, labels)


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output @ target.T, torch.arange(output.shape[0]))


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(rows, WIDTH, generator=generator) for _ in range(2)]
    return draw[0], draw[1]


Case = dict[str, Any]

REFUSED: dict[str, tuple[Case, str]] = {
    "function": ({"middle": lambda: Do(lambda _, x: Reverse.apply(x))}, "Function Reverse"),
    "hook": ({"middle": lambda: Do(_hooked)}, "registers a hook"),
    "counter": ({"middle": lambda: Do(_counting)}, "loss is .*, the model's"),
    "a counter in a buffer": (
        {"middle": lambda: Do(_counting_in_a_buffer)},
        "buffer middle.seen would move once per microbatch",
    ),
    "a counter in a buffer, in evaluate": (
        {
            "middle": lambda: Do(_counting_in_a_buffer),
            "average": "microbatches",
            "evaluate": True,
        },
        r"cannot be evaluated in the pipeline: in eval\(\) it moves the buffer middle.seen",
    ),
    "a running mean of its own": (
        {"middle": lambda: Do(_averaging)},
        "buffer middle.seen would move once per microbatch",
    ),
    "hook of a parameter": (
        {"before": lambda m: m.layers[0].weight.register_hook(lambda g: g * 2)},
        r"layers.0.weight has a hook",
    ),
    "in-batch negatives": ({"loss": contrastive}, "no weighted mean"),
    "backward hook": (
        {"before": lambda m: m.layers[1].register_full_backward_hook(lambda *_: None)},
        "hook",
    ),
    "a number that changes": ({"call": lambda s: {"scale": 1.0 + s}}, r"scale=2.0 was captured"),
    "another shape": ({"cut": lambda x, s: x[:, : WIDTH - s]}, "was captured as a tensor of shape"),
    "another dtype": ({"cut": lambda x, s: x.double() if s else x}, "float64, and was captured"),
    "noise in evaluate": (
        {"middle": lambda: Do(_noisy), "plain": False, "evaluate": True},
        "cannot be evaluated",
    ),
    "tied copies that ran apart": (
        {
            "before": lambda m: setattr(m.layers[3], "weight", m.layers[0].weight),
            "after": lambda ps: [p.grad.mul_(0.5) for p in ps[:1]] if worlds_rank() else None,
        },
        "become different",
    ),
}

RIGHT: dict[str, Case] = {
    "eval submodule": {
        "middle": lambda: nn.Dropout(0.5),
        "before": lambda m: m.middle.eval(),
    },
    "frozen batch norm": {
        "middle": lambda: nn.BatchNorm1d(WIDTH),
        "before": lambda m: m.middle.eval(),
        "evaluate": True,
    },
    "a counter in a buffer": {
        "middle": lambda: Do(_counting_in_a_buffer),
        "micro": True,
        "average": "microbatches",
    },
    "a sum over rows in a buffer": {"middle": lambda: Do(_summing), "tolerance": 1e-4},
    "batch norm": {"middle": lambda: nn.BatchNorm1d(WIDTH), "micro": True, "parts": 4},
    "a branch on rows": {
        "middle": lambda: Do(lambda _, x: x * 2 if x.shape[0] > 4 else x),
        "micro": True,
    },
    "autocast": {"middle": lambda: Do(_autocast), "tolerance": 2e-2},
    "sum": {"loss": total, "lr": 1e-3},
    "masked": {"loss": masked},
    "ignored labels": {"loss": labelled, "parts": 2},
    "uneven rows": {"rows": lambda s: 10 if s else 8},
    "clip": {"after": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05), "lr": 1.0},
    "clip, infinity": {
        "after": lambda ps: nn.utils.clip_grad_norm_(ps, 0.01, norm_type=float("inf")),
        "lr": 1.0,
    },
    "clip a part": {"after": lambda ps: nn.utils.clip_grad_norm_(ps[:1], 0.01), "micro": None},
    "tied and clipped": {
        "before": lambda m: setattr(m.layers[3], "weight", m.layers[0].weight),
        "after": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05),
        "lr": 1.0,
    },
    "float64": {"before": lambda m: m.double(), "cut": lambda x, _: x.double()},
    "an auxiliary loss": {"aux": True},
}


def worlds_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Routed(nn.Module):
    """Keeps a loss of its own as an attribute, as layers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.aux_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chance = self.gate(x).softmax(-1)
        self.aux_loss = (chance.mean(0) * chance.square().mean(0)).sum()
        return self.last(x * chance.amax(-1, keepdim=True))


def _model(case: Case) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = Stack(case["middle"]() if "middle" in case else None)
    model.train()
    if "before" in case:
        case["before"](model)
    return model


def _inputs(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    x, y = batch(step, case["rows"](step) if "rows" in case else 8)
    cut = case.get("cut", lambda tensor, _: tensor)
    return cut(x, step), cut(y, step), case["call"](step) if "call" in case else {}


def run(rank: int, size: int, table: str, name: str, steps: int = 3) -> Any:
    case = REFUSED[name][0] if table == "refused" else RIGHT[name]
    if case.get("aux"):
        return auxiliary(rank, size)
    model, loss = _model(case), case.get("loss", mse)
    x, y, more = _inputs(case, 0)
    try:
        pipe = pipeline.auto(
            model, {"x": x, **more}, target=y, loss=loss, rates=RATES,
            microbatches=case.get("parts", 4), average=case.get("average", "batch"), timeout=30,
        )  # fmt: skip
    except UsageError as error:
        return str(error)
    optimizer = torch.optim.SGD(pipe.parameters(), case.get("lr", 0.05))
    losses = []
    try:
        for step in range(steps):
            x, y, more = _inputs(case, step)
            losses.append(pipe.step(x=x, **more, target=y).item())
            if "after" in case:
                case["after"](list(pipe.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        if case.get("evaluate"):
            losses.append(pipe.evaluate(x=x, **more, target=y).item())
    except (UsageError, pipeline.PipelineError) as error:
        return str(error)
    finally:
        pipe.close()
    return losses, {n: t.clone() for n, t in pipe.state_dict().items()}


def plain(name: str, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = RIGHT[name]
    model, loss = _model(case), case.get("loss", mse)
    optimizer = torch.optim.SGD(model.parameters(), case.get("lr", 0.05))
    losses = []
    for step in range(steps):
        x, y, more = _inputs(case, step)
        parts = 4 if case.get("micro") else 1
        value = sum(
            loss(model(a, **more), b) / parts
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
        )
        value.backward()
        losses.append(value.item())
        if "after" in case:
            case["after"](list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    if case.get("evaluate"):
        losses.append(loss(model.eval()(x), y).item())
    return losses, model.state_dict()


def auxiliary(rank: int, size: int) -> Any:
    """A loss that reads a module's attribute, as layers of experts have."""
    torch.manual_seed(3)
    model = Routed()
    kept = copy.deepcopy(model)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse(output, target) + 0.01 * model.aux_loss

    x, y = batch(0)
    given = {"target": y, "loss": loss, "rates": RATES, "microbatches": 2, "timeout": 30}
    with pytest.raises(UsageError, match="average='microbatches'"):
        pipeline.auto(model, {"x": x}, **given)
    pipe = pipeline.auto(model, {"x": x}, average="microbatches", **given)
    value = pipe.step(x=x, target=y).item()
    pipe.close()
    wanted = 0.0
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        one = (mse(kept(a), b) + 0.01 * kept.aux_loss) / 2
        one.backward()
        wanted += one.item()
    assert value == pytest.approx(wanted, rel=1e-6)
    gradients = {n: p.grad for n, p in kept.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)
    assert model.aux_loss is None


def unused(rank: int, size: int, folder: str) -> Any:
    """What takes no part in the loss is in checkpoints, and comes back from them."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Stack()
        model.unused = nn.Linear(2, 2)
        x, y = batch(0)
        pipe = pipeline.auto(
            model, {"x": x}, target=y, loss=mse, rates=RATES, microbatches=4, timeout=30, seed=seed
        )
        if seed == 1:
            pipe.save(folder)
        else:
            pipe.load(folder)
            assert pipe._draw.seed == 1
        states.append({n: t.clone() for n, t in pipe.state_dict().items()})
        pipe.close()
    assert rank or "unused.weight" in states[0]
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name


def evaluated_first(rank: int, size: int) -> Any:
    """An evaluation before any step, with both stages in one process, and training after it."""
    torch.manual_seed(3)
    model = Stack()
    kept = copy.deepcopy(model)
    x, y = batch(0)
    pipe = pipeline.auto(model, {"x": x}, target=y, loss=mse, rates=RATES, microbatches=2,
                         schedule="Interleaved1F1B", stages_per_rank=2, timeout=30)  # fmt: skip
    losses = [pipe.evaluate(x=x, target=y).item(), pipe.step(x=x, target=y).item()]
    value = mse(kept(x), y)
    value.backward()
    assert losses == pytest.approx([value.item()] * 2, rel=1e-6)
    gradients = {n: p.grad for n, p in kept.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)
    pipe.close()


def ignored(rank: int, size: int) -> Any:
    """Arguments that would have no effect."""
    x, y = batch(0)
    given = {"target": y, "loss": mse, "rates": RATES, "microbatches": 2}
    pipe = pipeline.auto(Stack(), {"x": x}, **given)
    with pytest.raises(UsageError, match="microbatches, rates: the plan that is given"):
        pipeline.auto(Stack(), {"x": x}, plan=pipe.plan, **given)
    with pytest.raises(UsageError, match="the mesh has no dimension for it"):
        pipeline.auto(Stack(), {"x": x}, tensor={"layers.*": "colwise"}, **given)
    pipe.close()


def not_compared(rank: int, size: int) -> list[str]:
    """A model without values, and one that cannot run in eval()."""
    x, y = batch(0)
    given = {"target": y, "loss": mse, "rates": RATES, "microbatches": 2}
    with heard() as said:
        with torch.device("meta"):
            empty = Stack()
        weights = {n: torch.zeros(p.shape) for n, p in empty.named_parameters()}
        pipeline.auto(empty, {"x": x}, weights=lambda name, _: weights[name], **given).close()
        pipeline.auto(Stack(Do(_trains_alone)), {"x": x}, **given).close()
    return [line for line in said.lines if "not compared" in line]


def test_evaluates_before_it_trains() -> None:
    cases = {"first": (evaluated_first,), "ignored": (ignored,), "not compared": (not_compared,)}
    found = worlds.several([1], cases, timeout=120)
    assert found["first"] == found["ignored"] == [None]
    assert found["not compared"] == [
        [
            "pipeline: stages and model were not compared: the model has no values (the meta "
            "device)",
            "pipeline: whether the model mixes rows of microbatches was not compared: the model in "
            "eval() raises RuntimeError: for training alone",
        ]
    ]


def test_a_counter_is_refused_where_the_model_has_no_values() -> None:
    x, y = batch(0)
    with torch.device("meta"):
        model = Stack(Do(_counting_in_a_buffer))
    call = Example.of({"x": x.to("meta")}, y.to("meta"))
    captured = pipeline.capture(model, call, loss=mse)
    cuts, both = [len(captured.ops) // 2], call.resized(16)
    with pytest.raises(UsageError, match=r"buffer middle.seen would move once per microbatch"):
        verify(model, mse, captured, cuts, call, both)
    verify(model, mse, captured, cuts, call, both, whole_batches=False)
    verify(model, mse, captured, cuts, call, None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> worlds.Several:
    cases: dict[str, Any] = {f"refused {name}": (run, "refused", name) for name in REFUSED}
    cases |= {f"right {name}": (run, "right", name) for name in RIGHT}
    cases["unused"] = unused, str(tmp_path_factory.mktemp("right") / "kept")
    return worlds.several([2], cases, timeout=300)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, two: worlds.Several) -> None:
    found = two[f"refused {name}"]
    for said in found:
        assert isinstance(said, str), said
        assert re.search(REFUSED[name][1], said.splitlines()[0]), said


@pytest.mark.parametrize("name", RIGHT)
def test_equal_to_the_plain_model(name: str, two: worlds.Several) -> None:
    found = two[f"right {name}"]
    if name == "an auxiliary loss":
        return
    if name == "clip a part":  # the first parameter of each rank
        assert all(not isinstance(one, str) for one in found), found
        return
    losses, weights = plain(name)
    bound = RIGHT[name].get("tolerance", 1e-5)
    seen = set()
    for one in found:
        assert not isinstance(one, str), one
        assert one[0] == pytest.approx(losses, rel=bound)
        for key, tensor in one[1].items():
            seen.add(key)
            torch.testing.assert_close(tensor, weights[key], rtol=bound, atol=bound)
    assert seen == set(weights)


def test_what_is_unused_is_saved_and_loaded(two: worlds.Several) -> None:
    assert two["unused"] == [None, None]


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = Stack(Do(_counting))
    model.layers[0].eval()
    x, y = batch(0)
    pipeline.capture(model, {"x": x}, target=y, loss=mse)
    assert model.middle.calls == 0
    assert not model.layers[0].training and model.layers[1].training


def test_a_torch_with_other_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    with pytest.raises(UsageError, match=r"torch 2.9 to 2.11, and this is 2.15.0"):
        torch_names.require()


def test_a_torch_that_splits_no_backward_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    torch_names.require()
    with pytest.raises(UsageError, match=r"'ZBVZeroBubble' was tried on torch 2.11 alone"):
        torch_names.require_split("ZBVZeroBubble")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    torch_names.require_split("ZBVZeroBubble")
