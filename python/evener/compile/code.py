"""A digest of a function's code, and of what it calls: whether a check of an earlier process holds.

Bytecode, constants, names, defaults, and values of closures and globals that are functions, classes
or plain values, and theirs in turn. What belongs to Python, torch or TensorFlow is known by its
version, and not looked into. For a module: its tree of classes, their methods, their plain
attributes, and the shapes of its parameters.
"""

from __future__ import annotations

import hashlib
import sys
import types
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_KNOWN = {"builtins", "torch", "numpy", "tensorflow", "keras", *sys.stdlib_module_names}


def digest(function: Any, module: Any, versions: str) -> str:
    """Digest of a function, or a module's `forward`. versions: of what is not looked into."""
    walk = _Walk()
    walk.add("versions", versions, sys.version)
    if module is not None:
        walk.module(module)
    walk.value(function)
    return walk.hash.hexdigest()


class _Walk:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._seen: dict[int, Any] = {}  # what is alive keeps its number

    def add(self, *parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else repr(part).encode()
            self.hash.update(b"%d " % len(data) + data)

    def value(self, value: Any) -> None:
        """A function, a class, a plain value; of anything else the type alone."""
        if isinstance(value, _PLAIN):
            self.add(value)
            return
        kind = type(value)
        self.add(kind.__module__, kind.__qualname__)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if callable(getattr(kind, "named_modules", None)):
            self.module(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self.value(each)
        elif isinstance(value, (set, frozenset)):
            self.add(sorted(repr(each) for each in value if isinstance(each, _PLAIN)))
        elif isinstance(value, dict):
            for key, each in value.items():
                self.value(key)
                self.value(each)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif hasattr(value, "__wrapped__"):
            self.value(value.__wrapped__)
        elif callable(value) and isinstance(
            func := getattr(value, "func", None), types.FunctionType
        ):
            self.value([func, getattr(value, "args", ()), getattr(value, "keywords", {})])

    def _known(self, value: Any) -> bool:
        return str(getattr(value, "__module__", "")).partition(".")[0] in _KNOWN

    def _function(self, function: types.FunctionType) -> None:
        self.add(function.__module__, function.__qualname__)
        if self._known(function):
            return
        self._code(function.__code__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:  # not filled yet
                self.add("empty")
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self.add(name)
                self.value(function.__globals__[name])

    def _class(self, kind: type) -> None:
        self.add(kind.__module__, kind.__qualname__)
        for base in kind.__mro__:
            if self._known(base):
                self.add(base.__qualname__)
                continue
            for name, each in sorted(vars(base).items()):
                inner = getattr(each, "__func__", None) or getattr(each, "fget", None) or each
                if isinstance(inner, (types.FunctionType, *_PLAIN)) and name != "__doc__":
                    self.add(name)
                    self.value(inner)

    def _code(self, code: types.CodeType) -> None:
        self.add(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for constant in code.co_consts:
            self.value(constant)

    def module(self, module: Any) -> None:
        """A torch module."""
        for name, each in module.named_modules():
            self.add(name)
            self.value(type(each))
            for key, attribute in sorted(vars(each).items()):
                if isinstance(attribute, (*_PLAIN, list, tuple)) and not key.startswith("_"):
                    self.add(key)
                    self.value(attribute)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.add(name, tuple(tensor.shape), str(tensor.dtype))


def _names(code: types.CodeType) -> set[str]:
    """Names of globals, in nested functions too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
