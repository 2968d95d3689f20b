"""How the door gets into a process that imports nothing of Evener's.

`evener.pth`, which the wheel puts beside the package, runs a line at the start of every Python; it
comes here only where EVENER_DDP is set. `site/sitecustomize.py` does the same for a Python that has
Evener on its path without an installation, and is what `evener launch --ddp` uses.

torch is not imported here: a process that never trains must not wait for it. A finder at the head
of `sys.meta_path` waits for torch's module of DistributedDataParallel, and leaves when it came; one
more waits for transformers' Trainer, whose checkpoints are to hold what compression has not sent.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from evener.errors import UsageError

VARIABLE = "EVENER_DDP"
SITE = Path(__file__).parent / "site"
_MODULE = "torch.nn.parallel.distributed"
_TRAINER = "transformers.trainer"
_OFF = ("", "off")


class _Finder:
    """Finds a module as everybody does, and has the door look at it when it was run."""

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


def arm() -> None:
    """Wait for torch's DDP where EVENER_DDP asks for it. Once a process; never raises."""
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, look in ((_MODULE, _open), (_TRAINER, _keep_residuals)):
        module = sys.modules.get(name)
        if module is not None:
            look(module)
        else:
            sys.meta_path.insert(0, _Finder(name, look))


def _open(module: Any) -> None:
    """Stand before DDP's forward. torch is half imported: the rest comes with the first call."""
    kind = module.DistributedDataParallel
    inner = kind.forward

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        kind.forward = inner  # what stays, where the door cannot open
        try:
            from evener.door import models

            models.follow(kind)
        except Exception as error:  # noqa: BLE001 - a program that never asked must run
            sys.stderr.write(f"evener: {VARIABLE} has no effect: {error}\n")
        return kind.forward(self, *inputs, **kwargs)

    kind.forward = forward


def _keep_residuals(module: Any) -> None:
    """Give each Trainer a callback besides those that it has by default. Never raises."""
    try:
        from evener.ddp.integrations.transformers import KeepResiduals

        if KeepResiduals not in module.DEFAULT_CALLBACKS:
            module.DEFAULT_CALLBACKS.append(KeepResiduals)
    except Exception as error:  # noqa: BLE001 - a program that never asked must run
        sys.stderr.write(f"evener: the Trainer's checkpoints hold no residuals: {error}\n")


def variables(env: Mapping[str, str], floor: str = "") -> dict[str, str]:
    """What opens the door in a job whose environment is `env`: for `evener launch` and the lab.

    `floor`: the least exact form that may be sent; "" where nothing may be lost. A variable that is
    set wins. Raises UsageError for a value that cannot be.
    """
    from evener.base import settings

    given = settings.EVENER_DDP.get(env)
    if settings.EVENER_DDP.is_set(env) and given == "off":
        raise UsageError(
            f"--ddp was given, and {VARIABLE} is off", f"leave one of them out, or unset {VARIABLE}"
        )
    floor = settings.EVENER_FLOOR.get(env) or floor
    if floor:
        from evener.comm import forms

        forms.require(floor, settings.EVENER_FLOOR.name)
    opened = {VARIABLE: given if given != "off" else "auto" if floor else "exact"}
    if floor and opened[VARIABLE] == "auto":
        opened[settings.EVENER_FLOOR.name] = floor
    others = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SITE)]
    return {**opened, "PYTHONPATH": os.pathsep.join([str(SITE), *others])}
