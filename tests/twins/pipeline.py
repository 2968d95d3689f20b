"""Pipelines of two stages against the plain model: equal within rounding, or refused in a line.

A program is a model (layers of many kinds, ties, buffers), a loss, and what a user does in steps:
train, accumulate, clip, skip, change a number, give another number of rows, evaluate, meet values
that are not finite, save, and go on elsewhere. Stages share one process, or have one of two.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin

WIDTH, CLASSES = 6, 5

# What a pipeline must carry, and what it may refuse.
CARRIED = (
    "linear", "gelu", "norm", "eval dropout", "no dropout", "eval batch norm", "detach", "no_grad",
    "in place", "shared", "frozen", "attention", "mode", "complex", "autocast", "frozen in part",
)  # fmt: skip
COUNTING = ("counter in a buffer", "calls counted")
COUPLED = ("batch norm", *COUNTING, "branch on rows")
REFUSED = ("function", "identity function", "hook", "counter", "parameter hook", "backward hook",
           "reentrant", "in-batch")  # fmt: skip
LOSSES = ("mse", "sum", "labels", "mask", "weights", "own")


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        _.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.scale, None


class Layer(nn.Module):
    """One layer of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        if kind == "norm":
            self.more: nn.Module = nn.LayerNorm(WIDTH)
        elif kind in ("eval dropout", "no dropout"):
            self.more = nn.Dropout(0.5 if kind == "eval dropout" else 0.0)
            self.more.train(kind == "no dropout")
        elif kind in ("batch norm", "eval batch norm"):
            self.more = nn.BatchNorm1d(WIDTH)
            self.more.running_mean.normal_()
            self.more.train(kind == "batch norm")
        elif kind == "attention":
            # Without biases: a key's has no gradient but for what rounding leaves of 0.
            self.more = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        elif kind == "complex":
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))
        elif kind in COUNTING:
            self.register_buffer("seen", torch.zeros(()))
        elif kind == "frozen":
            self.linear.requires_grad_(False)
        elif kind == "frozen in part":
            self.linear.weight.requires_grad_(False)
        elif kind == "parameter hook":
            self.linear.weight.register_hook(lambda g: g * 3)
        elif kind == "backward hook":
            self.linear.register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + getattr(self, "do_" + self.kind.replace(" ", "_").replace("-", "_"))(y)

    def _as_it_is(self, y: torch.Tensor) -> torch.Tensor:
        return y

    do_linear = do_frozen = do_frozen_in_part = _as_it_is
    do_parameter_hook = do_backward_hook = _as_it_is

    def _more(self, y: torch.Tensor) -> torch.Tensor:
        return self.more(y)

    do_norm = do_eval_dropout = do_no_dropout = do_batch_norm = do_eval_batch_norm = _more

    def do_gelu(self, y: torch.Tensor) -> torch.Tensor:
        return functional.gelu(y) * 2

    def do_detach(self, y: torch.Tensor) -> torch.Tensor:
        return y + (torch.round(y * 4) / 4 - y).detach()

    def do_no_grad(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            size = y.abs().mean(-1, keepdim=True)
        return y / (1 + size)

    def do_in_place(self, y: torch.Tensor) -> torch.Tensor:
        y = y * 1
        y[:, :2] *= 0.5
        y += 1
        return y

    def do_shared(self, y: torch.Tensor) -> torch.Tensor:
        return self.linear(y)

    def do_attention(self, y: torch.Tensor) -> torch.Tensor:
        two = torch.stack((y, y.flip(-1)), 1)
        return self.more(two, two, two, need_weights=False)[0][:, 0]

    def do_mode(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2 if self.training else y * 3

    def do_complex(self, y: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(torch.fft.rfft(y).dtype)
        return torch.tanh(torch.fft.irfft(torch.fft.rfft(y) * weight, n=WIDTH))

    def do_autocast(self, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(y)
        return y.to(self.linear.weight.dtype)

    def do_counter_in_a_buffer(self, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return y * (self.seen / 4).clamp(max=1)

    def do_calls_counted(self, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return y

    def do_branch_on_rows(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2 if y.shape[0] > 3 else y

    def do_function(self, y: torch.Tensor) -> torch.Tensor:
        return _Turned.apply(y, -0.5)

    def do_identity_function(self, y: torch.Tensor) -> torch.Tensor:
        return _Turned.apply(y, 1.0)

    def do_hook(self, y: torch.Tensor) -> torch.Tensor:
        y = y * 1
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.1)
        return y

    def do_counter(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return y * self.calls

    def do_reentrant(self, y: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.linear, y, use_reentrant=True)

    def do_in_batch(self, y: torch.Tensor) -> torch.Tensor:
        return y - y.mean(0, keepdim=True)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for kind in program["layers"])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Linear(2, 2)
        self.own = program["loss"] == "own"
        if program["tied"]:
            self.layers[-1].linear.weight = self.layers[0].linear.weight

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0,
        extra: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        for layer in self.layers:
            x = layer(x)
        out = self.head(x) * scale
        if extra is not None and extra["flip"]:
            out = -out + extra["add"]
        if not self.own:
            return out
        return {"loss": functional.cross_entropy(out, labels), "logits": out}


def _loss(kind: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    weights = torch.linspace(0.5, 1.5, CLASSES)

    def of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if kind in ("mse", "sum"):
            wanted = functional.one_hot(target.clamp(min=0), CLASSES).to(output.dtype)
            return functional.mse_loss(output, wanted, reduction="mean" if kind == "mse" else "sum")
        if kind == "labels":
            return functional.cross_entropy(output, target, ignore_index=-100)
        if kind == "weights":
            return functional.cross_entropy(output, target, weight=weights.to(output.dtype))
        keep = (target >= 0).to(output.dtype)
        each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
        return (each * keep).sum() / keep.sum().clamp(min=1.0)

    return None if kind == "own" else of


def _share(kind: str, target: torch.Tensor, whole: torch.Tensor) -> float:
    """What rows count in the loss of the whole batch."""
    if kind == "sum":
        return 1.0
    if kind == "mse":
        return len(target) / len(whole)
    if kind == "weights":
        weights = torch.linspace(0.5, 1.5, CLASSES).double()
        one, all_of_them = (weights[t[t >= 0]].sum() for t in (target, whole))
        return float(one) / float(all_of_them)
    one, all_of_them = ((t >= 0).sum() for t in (target, whole))
    if kind == "mask":
        return max(float(one), 1.0) / max(float(all_of_them), 1.0)
    return float(one) / float(all_of_them)


def _made(program: Program, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Model(program)
    return model.double() if program["double"] else model


def _batch(program: Program, step: int, op: str) -> tuple[dict[str, Any], torch.Tensor | None]:
    rows = program["rows"] + (1 if op == "rows" else 0)
    generator = torch.Generator().manual_seed(program["seed"] * 100 + step)
    x = torch.randn(rows, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    if program["loss"] in ("labels", "mask", "own", "weights"):
        # One of each microbatch's rows stays.
        labels[torch.rand(rows, generator=generator) < 0.3] = -100
        labels[:: max(1, rows // program["parts"])] = 1
    if op == "not finite":
        x[0, 0] = float("nan")
    given: dict[str, Any] = {"x": x.double() if program["double"] else x}
    given["scale"] = 2.0 if op == "number" else 1.0
    given["extra"] = (
        {"flip": True, "add": torch.ones(1).to(given["x"])} if program["extra"] else None
    )
    if program["loss"] == "own":
        return {**given, "labels": labels}, None
    return given, labels


class Plain:
    """The model, trained as anybody would."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, _made(program, program["seed"])
        self.optimizer = _optimizer(program, self.model.parameters())
        self.loss = _loss(program["loss"])

    def value(self, given: dict[str, Any], target: torch.Tensor | None) -> torch.Tensor:
        out = self.model(**given)
        return out["loss"] if self.loss is None else self.loss(out, target)

    def backward(self, given: dict[str, Any], target: torch.Tensor | None) -> float:
        whole_batches = self.program.get("average", "batch") == "batch"
        # Batch norm's statistics are those of microbatches; nothing else may be.
        if whole_batches and "batch norm" not in self.program["layers"]:
            loss = self.value(given, target)
            loss.backward()
            return loss.item()
        total = 0.0
        for part, aim, share in self.parts(given, target):
            loss = self.value(part, aim) * share
            loss.backward()
            total += loss.item()
        return total

    def parts(self, given: dict[str, Any], target: torch.Tensor | None) -> Iterator[Any]:
        """Microbatches, and what each counts."""
        rows, count = len(given["x"]), self.program["parts"]
        sizes = [rows // count + (m < rows % count) for m in range(count)]
        whole = given["labels"] if target is None else target
        begin = 0
        for size in sizes:
            at = slice(begin, begin + size)
            part = {k: v[at] if k in ("x", "labels") else v for k, v in given.items()}
            share = _share(self.program["loss"], whole[at], whole)
            if self.program.get("average", "batch") == "microbatches":
                share = 1 / count
            yield part, None if target is None else target[at], share
            begin += size

    def evaluate(self, given: dict[str, Any], target: torch.Tensor | None) -> float:
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            if self.program.get("average", "batch") == "batch":
                found = float(self.value(given, target))
            else:
                found = sum(float(self.value(part, aim)) * share
                            for part, aim, share in self.parts(given, target))  # fmt: skip
        for module, mode in modes:
            module.training = mode
        return found


def _optimizer(program: Program, parameters: Any) -> torch.optim.Optimizer:
    if program["optimizer"] == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    rate = 1e-3 if program["loss"] == "sum" else 5e-2
    return torch.optim.SGD(parameters, lr=rate, momentum=0.5)


def run(rank: int, size: int, program: Program, fault: str, folder: str) -> Any:
    """One rank: "refused" with what was said, or what differs; "" where nothing does."""
    from evener import pipeline
    from evener.errors import UsageError

    logging.getLogger("evener").setLevel(logging.ERROR)
    options: dict[str, Any] = {"rates": pipeline.Rates(1e11, 1e10, 1e-6), "timeout": 60}
    if size == 1:
        options |= {"schedule": "Interleaved1F1B", "stages_per_rank": 2}
    given, target = _batch(program, 0, "train")
    more = {"target": target, "loss": _loss(program["loss"]), "microbatches": program["parts"],
            "average": program.get("average", "batch")}  # fmt: skip

    def build(seed: int) -> Any:
        return pipeline.auto(_made(program, seed), given, **more, **options)

    plain = Plain(program)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        try:
            pipe = build(program["seed"])
        except UsageError as error:
            return ["refused", str(error)]
        try:
            return _steps(program, pipe, plain, build, Path(folder))
        finally:
            pipe.close()


def _steps(program: Program, pipe: Any, plain: Plain, build: Any, folder: Path) -> Any:
    from evener.errors import UsageError
    from evener.pipeline import PipelineError

    optimizer = _optimizer(program, pipe.parameters())
    # A complex parameter has 32 bits in a model of doubles, too.
    bound = 1e-9 if program["double"] and "complex" not in program["layers"] else 2e-4
    bound = 2e-2 if "autocast" in program["layers"] else bound
    refused = ""
    made = [pipe]
    for step, op in enumerate(program["steps"]):
        given, target = _batch(program, step, op)
        if op == "save":
            pipe.save(folder / f"{step}", optimizer, {"at": step})
            pipe = build(program["seed"] + 1)
            made.append(pipe)
            optimizer = _optimizer(program, pipe.parameters())
            plain.optimizer.zero_grad()  # a checkpoint holds no gradients, torch's neither
            if pipe.load(folder / f"{step}", optimizer)["at"] != step:
                return ["differs", "what was saved beside the weights"]
            continue
        try:
            if op == "evaluate":
                found, wanted = (
                    pipe.evaluate(**given, target=target).item(),
                    plain.evaluate(given, target),
                )
            else:
                found = pipe.step(**given, target=target).item()
                wanted = None
        except PipelineError as error:
            if op != "not finite":
                return ["differs", f"step {step} ({op}): {error}"]
            plain.backward(given, target)  # for what it does to running statistics
            optimizer.zero_grad()
            plain.optimizer.zero_grad()
            if "batch norm" in program["layers"]:
                return _end(program, pipe, plain, bound, refused)
            continue
        except UsageError as error:
            refused = f"step {step} ({op}): {error}"
            continue
        if op == "not finite":
            return ["differs", f"step {step}: a value that is not finite went through"]
        if wanted is None:
            wanted = plain.backward(given, target)
        if abs(found - wanted) > bound * max(abs(wanted), 1e-2):
            return ["differs", f"step {step} ({op}): loss {found}, plain {wanted}"]
        if op == "evaluate" or op == "accumulate":
            continue
        if op == "skip":
            optimizer.zero_grad()
            plain.optimizer.zero_grad()
            continue
        if op.startswith("clip"):
            kind = float("inf") if op == "clip infinity" else 2.0
            norms = [
                float(nn.utils.clip_grad_norm_(list(ps.parameters()), 0.01, norm_type=kind))
                for ps in (pipe, plain.model)
            ]
            # torch adds a norm of complex gradients up in another order.
            if abs(norms[0] - norms[1]) > max(bound, 1e-7) * norms[1]:
                return ["differs", f"step {step}: norms {norms}"]
        for one in (optimizer, plain.optimizer):
            if op == "rate":
                for group in one.param_groups:
                    group["lr"] *= 0.5
            one.step()
            one.zero_grad()
    found = _end(program, pipe, plain, bound, refused)
    for one in made[1:]:
        one.close()
    return found


def _end(program: Program, pipe: Any, plain: Plain, bound: float, refused: str) -> Any:
    wanted = plain.model.state_dict()
    # AdamW divides by what rounding leaves of a gradient.
    loose = 100 * bound if program["optimizer"] == "adamw" else 10 * bound
    for name, tensor in pipe.state_dict().items():
        other = wanted[name]
        if tensor.dtype != other.dtype:
            return ["differs", f"{name} is {tensor.dtype}, plain {other.dtype}"]
        if not torch.allclose(tensor, other, rtol=loose, atol=loose, equal_nan=True):
            return ["differs", f"{name}: {(tensor - other).abs().max()}"]
    return ["refused", refused] if refused else ["equal", ""]


# --- Faults: what was wrong once, for the processes of a world too --------------------------------


@contextlib.contextmanager
def _patched(*patches: tuple[str, str, Any]) -> Iterator[None]:
    import importlib

    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            owner: Any = importlib.import_module(f"evener.pipeline.{module}")
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            made = value(getattr(owner, last)) if callable(value) else value
            stack.enter_context(mock.patch.object(owner, last, made))
        yield


def _unseen() -> tuple[str, str, Any]:
    from evener.pipeline.verify import Verified

    return "api", "verify", lambda _: lambda *_, **__: Verified()


@contextlib.contextmanager
def _all_hooks() -> Iterator[None]:
    yield


class _Deaf(list[Any]):
    """Hears nobody."""

    def append(self, _: Any) -> None:
        pass


def _own_norms() -> Any:
    from evener.comm import total_norm

    return mock.patch.object(total_norm, "_asked", _Deaf())


def _woken(plain: Any) -> Any:
    def capture(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model.train()
        return plain(model, *args, **kwargs)

    return capture


def _without_left(plain: Any) -> Any:
    def load(self: Any, state: Any) -> None:
        left, self._left = self._left, {}
        plain(self, state)
        self._left = left

    return load


def _takes_gradients(self: Any, gradients: Any, microbatch: int) -> None:
    for info, tensor in zip(self.grad_recv_info[microbatch], gradients, strict=False):
        info.buffer = tensor


def _mean(_: Any) -> Any:
    from evener.pipeline.weigh import Weighing

    return lambda *_: Weighing("mean")


FAULTS: dict[str, Callable[[], Any]] = {
    "a trace's backward": lambda: _patched(
        _unseen(),
        ("capture", "_no_hooks", lambda _: _all_hooks),
        ("capture", "_refuse_hooks", lambda _: lambda _: None),
    ),
    "eval() submodules are woken": lambda: _patched(
        ("api", "capture", _woken), ("plan", "capture", _woken)
    ),
    "numbers and flags are baked in": lambda: _patched(
        ("capture", "check_same", lambda _: lambda *_: None)
    ),
    "a branch of the whole batch": lambda: _patched(
        ("verify", "_differs", lambda _: lambda *_: ""),
        (
            "capture",
            "Captured.fits",
            lambda _: lambda self, rows: self.dynamic or rows == self.rows,
        ),
    ),
    "each stage clips by its own norm": _own_norms,
    "a mean of means": lambda: _patched(("api", "agreed", _mean)),
    "evaluate keeps the training mode": lambda: _patched(
        ("verify", "_evaluates", lambda _: lambda *_, **__: "")
    ),
    "losses become float32": lambda: _patched(
        ("running", "Pipeline._agree", lambda plain: lambda *args: plain(*args).float())
    ),
    "counters move once per microbatch": lambda: _patched(
        ("verify", "_counting", lambda _: lambda *_: "")
    ),
    "counters move in an evaluation": lambda: _patched(
        ("verify", "_same", lambda _: lambda *_: True)
    ),
    "an evaluation takes gradients": lambda: _patched(
        ("stage", "Stage.set_local_bwd_input", lambda _: _takes_gradients)
    ),
    "what is unused is not loaded": lambda: _patched(
        ("running", "Pipeline.load_state_dict", _without_left)
    ),
}

_switch = Switch()
_world = functools.cache(Ranks)
counts: dict[str, int] = {}


def check(program: Program) -> None:
    """Equal, or refused where the program has what a pipeline may refuse."""
    world = _world(program["ranks"])
    with tempfile.TemporaryDirectory() as folder:
        found = world.run("tests.twins.pipeline:run", program, _switch.fault, folder)
    for verdict, said in found:
        assert verdict != "differs", said
        counts[verdict] = counts.get(verdict, 0) + 1
        if verdict == "refused":
            assert _may_refuse(program), said


def _may_refuse(program: Program) -> bool:
    kinds = {*program["layers"], *program["steps"]}
    counting = bool(kinds & {*COUNTING})
    if counting and program.get("average") == "microbatches" and "evaluate" not in kinds:
        kinds -= {*COUNTING}
    # Batch norm takes no single row; a number and other rows may be refused when they come.
    return bool(kinds & {*REFUSED, *COUPLED, "number", "rows", "mode"})


def _program(draw: Any) -> Program:
    # Most programs are of what must be carried, with at most one kind that may be refused.
    layers = draw(st.lists(st.sampled_from(CARRIED), min_size=2, max_size=4))
    for kinds, most in ((COUPLED, 3), (REFUSED, 6)):
        if draw(st.integers(0, most)) == 0:
            layers.insert(draw(st.integers(0, len(layers))), draw(st.sampled_from(kinds)))
    parts = draw(st.sampled_from([2, 3, 4]))
    return {
        "layers": layers,
        "tied": draw(st.booleans()),
        "extra": draw(st.booleans()),
        "double": draw(st.booleans()) and "autocast" not in layers,
        "loss": draw(st.sampled_from(LOSSES)),
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
        "parts": parts,
        "rows": parts * draw(st.sampled_from([2, 3])),
        "ranks": draw(st.sampled_from([1, 1, 1, 2])),
        "average": draw(st.sampled_from(["batch", "batch", "microbatches"])),
        "steps": [draw(st.sampled_from(["train", "train", "evaluate"])),
                  *draw(st.lists(st.sampled_from(
            ["train", "accumulate", "clip", "clip infinity", "skip", "number", "rows", "evaluate",
             "save", "rate", "not finite"]), max_size=4))],
        "seed": draw(st.integers(0, 50)),
    }  # fmt: skip


TWIN = Twin(
    name="pipeline",
    programs=st.composite(_program)(),
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    programs_per_round=50,
)
