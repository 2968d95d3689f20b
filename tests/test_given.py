"""Every public call, with wrong types, too few arguments and unknown names: one line, no traceback.

The calls and their parameters are taken from the faces of the packages, so a new one is tried too.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from evener.base.given import ArgumentError, fits, given
from evener.errors import EvenerError

FACES = (
    *("ddp", "fsdp", "zero", "pipeline", "moe", "embedding.torch", "embedding"),
    *("precision", "compile"),
)
# Faces whose classes are made by users, and all of those; of others, these.
OF_CLASSES = ("moe", "embedding.torch", "embedding")
CLASSES = (
    *("precision.Limits", "precision.torch.Policy", "compile.Options", "compile.torch.bucketed"),
    *("net.environment", "net.adopt"),
    *(f"ddp.integrations.trackers.{name}" for name in ("wandb", "mlflow", "tensorboard")),
)
# Made by calls of Evener's own, from what was checked there.
INNER = {
    *("Store", "Traffic", "Rows", "Routing", "Optimizer", "Init", "Admission", "Eviction"),
    *("JaggedTensor", "KeyedTensor"),
}
# Errors that a program raises itself, and functions of tensors, whose errors are torch's.
OF_TENSORS = {"cross_entropy", "load_balancing_loss"}


class Strange:
    """A type that no call takes."""


WRONG: tuple[Any, ...] = (Strange(), "int8", 7, -1.5, None, b"x", [Strange()], {"no": Strange()})


def calls() -> Iterator[tuple[str, Any]]:
    for face in FACES:
        module = importlib.import_module(f"evener.{face}")
        for name in getattr(module, "__all__", ("accelerate", "release")):
            value = getattr(module, name, None)
            made = inspect.isclass(value) and face in OF_CLASSES and name not in INNER
            made = made and not issubclass(value, BaseException)
            takes = (inspect.isfunction(value) or made) and inspect.signature(value).parameters
            if takes and name not in OF_TENSORS:
                yield f"{face}.{name}", value
    for path in CLASSES:
        face, _, name = path.rpartition(".")
        yield path, getattr(importlib.import_module(f"evener.{face}"), name)


CALLS = dict(calls())


def right(hint: Any) -> Any:
    """A plain value for a required parameter, so that the wrong one is met alone."""
    if hint is torch.nn.Module:
        return torch.nn.Linear(2, 2)
    return "x"


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    function = CALLS[name]
    signature = inspect.signature(function)
    makes = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(inspect.unwrap(makes))
    except NameError:  # one that only type checkers import
        hints = {}
    needed = {
        key: right(hints.get(key))
        for key, p in signature.parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    tried = 0
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for value in WRONG:
            if fits(value, hints.get(key, Any)):
                continue  # of the right type: its value is the call's own to judge
            tried += 1
            refused(function, **{**needed, key: value})
    if not _open(signature):
        refused(function, no_such_parameter=1, **needed)
    if needed:
        refused(function)
        tried += 1
    assert tried


def _open(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def refused(function: Any, /, *args: Any, **kwargs: Any) -> None:
    """It raises an error of Evener's, in two lines at most, that says what was given."""
    with pytest.raises(Exception) as error:
        function(*args, **kwargs)
    shown = "".join(traceback.format_exception(error.value))
    assert isinstance(error.value, EvenerError), f"{function.__name__}({args}, {kwargs}):\n{shown}"
    assert len(str(error.value).splitlines()) <= 2


def test_numbers_of_numpy_are_numbers() -> None:
    from evener.embedding import Adagrad, Counter

    assert Adagrad(lr=np.float32(0.5)).lr == 0.5 and Counter(np.int64(3)).count == 3  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Adagrad\(\) was given 'fast' \(a str\) as lr"):
        Adagrad(lr="fast")  # type: ignore[arg-type]


def test_an_optimizer_in_the_wrong_place() -> None:
    from evener.ddp import accelerate

    with pytest.raises(TypeError, match=r"accelerate\(\) was given 'int8' \(a str\) as optimizer"):
        accelerate(torch.nn.Linear(2, 2), "int8")  # type: ignore[arg-type]


def test_calls_of_horovod() -> None:
    """Their arguments are upstream's, and so are ValueErrors; what is no tensor is said at once."""
    import evener.horovod.torch as hvd

    hvd.init()
    tried = 0
    for name in hvd.__all__:
        call = getattr(hvd, name)
        first = next(iter(inspect.signature(call).parameters), "") if callable(call) else ""
        if first not in ("tensor", "tensors", "optimizer"):
            continue
        rest = {"root_rank": 0} if "broadcast" in name else {}
        for value in WRONG:
            refused(call, **{first: value}, **rest)
            tried += 1
    assert tried > 150
    refused(
        hvd.DistributedOptimizer, torch.optim.SGD([torch.zeros(1)]), None, hvd.Compression.none, "2"
    )
    with pytest.raises(ValueError, match="'int8' has no compress and decompress"):
        hvd.allreduce(torch.zeros(1), compression="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence of tuples"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)]), 7)  # type: ignore[arg-type]
    hvd.shutdown()


def test_what_fits_passes() -> None:
    @given
    def call(a: int, b: float = 0.0, *rest: int, c: str | None = None, **more: float) -> Any:
        """Documented."""
        return a, b, rest, c, more

    assert call(1, 2, 3, c=None, d=5) == (1, 2, (3,), None, {"d": 5})
    assert call.__doc__ == "Documented." and "c" in inspect.signature(call).parameters
    for wrong in ((True,), ("1",), (1, "2")):
        with pytest.raises(ArgumentError):
            call(*wrong)


@pytest.mark.parametrize(
    ("value", "hint", "well"),
    [
        (1, float, True), (True, int, False), ("a", str | None, True), (None, str | None, True),
        ("ab", typing.Sequence[int], False), (["a"], typing.Sequence[str], True),
        ("a", typing.Literal["a", "b"], True), ("c", typing.Literal["a", "b"], False),
        (print, typing.Callable[..., Any], True), (1, typing.Callable[..., Any], False),
        (Strange(), Any, True), ({}, typing.Mapping[str, int], True),
    ],
)  # fmt: skip
def test_types(value: Any, hint: Any, well: bool) -> None:
    assert fits(value, hint) is well
