"""Makes `horovod.X` another name of the module `evener.horovod.X`, for every X.

One finder instead of a tree of re-exporting files: a module has both names and is one object, so
`horovod.torch.mpi_ops.synchronize is evener.horovod.torch.mpi_ops.synchronize`, and an exception
caught by one name is raised by the other.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from evener.base.log import logger

_TARGET = "evener.horovod"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not fullname.startswith(self._prefix):
            return None
        real = f"{_TARGET}.{fullname.removeprefix(self._prefix)}"
        try:
            found = importlib.util.find_spec(real)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, is_package=found.submodule_search_locations is not None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{_TARGET}.{spec.name.removeprefix(self._prefix)}")
        # The import system writes the new name's spec into what it gets; exec_module puts back.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the module was imported by its own name."""
        module.__spec__ = importlib.util.find_spec(module.__name__)


def install(name: str, file: str) -> None:
    """Serve `name`.X from now on. file: where `name` was imported from, for the message."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(name))
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    logger.warning(
        "`import horovod` is Evener's (%s), not the installed Horovod %s; uninstall one of them",
        Path(file).parent,
        version,
    )
