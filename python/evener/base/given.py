"""Arguments of public calls, checked against their annotations before anything happens.

    @given
    def accelerate(model: nn.Module, optimizer: Optimizer | None = None, *, mode: str | None = None)

    accelerate(model, "int8")
    > accelerate() was given 'int8' (a str) as optimizer
    >   fix: give optimizer= Optimizer or None

What a library checks by hand, or finds out ten calls deeper, follows from the signature: one rule
instead of a line in every function. Only for calls that are made a few times in a program.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from evener.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class ArgumentError(UsageError, TypeError):
    """An argument is of another type than its place in the call."""


def given(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises ArgumentError for an argument that its annotation does not allow."""
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}
    makes = function.__name__ == "__init__"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        name = type(args[0]).__name__ if makes else function.__qualname__
        if not hints:
            hints.update(_hints(function))
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{name}(): {error}", f"call {name}{_shown(signature)}") from None
        for key, value in bound.items():
            parameter = signature.parameters[key]
            plain = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if plain and value is not parameter.default and not fits(value, hints.get(key, Any)):
                raise ArgumentError(
                    f"{name}() was given {_short(value)} as {key}",
                    f"give {key}= {_words(hints[key])}",
                )
        return function(*args, **kwargs)

    return checked


def fields(kind: type[T]) -> type[T]:
    """A class, most often a dataclass, whose constructor checks its arguments as `given` does."""
    kind.__init__ = given(kind.__init__)  # type: ignore[method-assign]
    return kind


def fits(value: object, hint: Any) -> bool:
    """Whether `value` may stand where `hint` is the annotation; True where that cannot be told."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's are, too
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    kind = origin or hint
    if isinstance(value, str) and kind in (collections.abc.Sequence, collections.abc.Iterable):
        return typing.get_args(hint) == (str,)
    try:
        return isinstance(value, kind)
    except TypeError:  # Any, a TypeVar, a protocol that is not for run time
        return True


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {"return": None, **typing.get_type_hints(function)}
    except (NameError, TypeError):  # a name that only type checkers import
        return {"return": None}


def _short(value: object) -> str:
    if isinstance(value, (str, int, float, bool, type(None))):
        text = repr(value)
        return f"{text if len(text) <= 60 else text[:57] + '...'} (a {type(value).__name__})"
    return f"a {type(value).__name__}"


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(one) for one in typing.get_args(hint))
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _shown(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(inspect.Signature(bare))
    return text if len(text) < 200 else text[:197] + "..."
