"""Act on a module when a program imports it: nothing is imported before, or for it.

A finder at the head of `sys.meta_path` waits for one name, finds the module as everybody does, and
leaves. It costs a program that never imports the module one comparison an import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    def __init__(self, name: str, look: Callable[[Any], None]) -> None:
        self.name, self._look = name, look

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._look(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after(name: str, look: Callable[[Any], None]) -> None:
    """Call `look(module)` once the module `name` has run: now, where it has already.

    `look` must not raise: the import is the program's own.
    """
    module = sys.modules.get(name)
    if module is not None:
        look(module)
    else:
        sys.meta_path.insert(0, _Finder(name, look))
