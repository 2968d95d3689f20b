"""The forms by what they say of themselves, without importing torch: for help texts and names.

A form is one class in `evener.comm.wires`, and says there everything once. Importing that package
imports torch, which takes seconds; so what a help text shows is read from the source, where it must
stand as plain strings and numbers in the body of the class (`tests/comm/test_forms.py`).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evener.errors import UsageError

_FOLDER = Path(__file__).parent / "wires"


@dataclass(frozen=True)
class Described:
    """`name`, as users write it; `title` and `what`: for tables; `place`: see `Wire.place`.

    `late`: "sparse" or "low-rank" where what a step does not send comes later, else "".
    `first_update`: how far, relative, a training's first updates may be from DDP's.
    """

    name: str
    title: str
    what: str
    place: int
    late: str
    first_update: float


@cache
def listed() -> tuple[Described, ...]:
    """All forms, from the mildest to the harshest."""
    found = [
        _described(node)
        for path in sorted(_FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(map(_registers, node.decorator_list))
    ]
    return tuple(sorted(found, key=lambda form: form.place))


def names() -> tuple[str, ...]:
    """Names of all forms, from the mildest to the harshest."""
    return tuple(form.name for form in listed())


def described(name: str) -> Described:
    """The form of that name, which must be one."""
    return next(form for form in listed() if form.name == name)


def require(name: object, what: str, *, besides: Iterable[str] = ()) -> str:
    """`name`, which must be a form's or one of `besides`; `what`: the option or variable it is in.

    Raises UsageError with the nearest name that there is.
    """
    allowed = (*besides, *names())
    if isinstance(name, str) and name in allowed:
        return name
    raise UsageError(f"{what}={name!r} is not known", suggestion(str(name), allowed))


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """What to write instead of `name`."""
    allowed = tuple(allowed)
    near = difflib.get_close_matches(name.lower(), allowed, 1)
    choose = f"choose one of {', '.join(allowed)}"
    return f"did you mean {near[0]!r}? {choose}" if near else choose


def _registers(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "register"


def _described(node: ast.ClassDef) -> Described:
    said = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            said[statement.targets[0].id] = statement.value
    fields = Described.__dataclass_fields__
    try:
        return Described(**{field: ast.literal_eval(said[field]) for field in fields})
    except (KeyError, ValueError) as error:
        raise TypeError(f"{node.name} says no {error} as a plain value in its body") from error
