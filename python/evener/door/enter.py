"""How the door gets into a process that imports nothing of Evener's.

`evener.pth`, which the wheel puts beside the package, runs a line at the start of every Python; it
comes here only where EVENER_DDP, EVENER_FSDP or EVENER_ZERO is set. `site/sitecustomize.py` does
the same for a Python that has Evener on its path without an installation, and is what `evener
launch --ddp` and `--fsdp` use.

torch is not imported here: a process that never trains must not wait for it. A finder at the head
of `sys.meta_path` waits for torch's module of DistributedDataParallel, and leaves when it came;
others wait for that of `fully_shard`, and for transformers' Trainer: it may train under the memory
engine, and its checkpoints are to hold what compression has not sent. A program that ends without
what a variable is for has asked in vain: rank 0 says so, then.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.base import imports
from evener.door import data
from evener.errors import UsageError

VARIABLE = "EVENER_DDP"
SHARDED = "EVENER_FSDP"
MEMORY = "EVENER_ZERO"
SITE = Path(__file__).parent / "site"
_MODULE = "torch.nn.parallel.distributed"
_TRAINER = "transformers.trainer"
_OPTIMIZER = "torch.optim.optimizer"
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"
_OFF = ("", "off")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# Set in a rank's own environment, so that the processes which it starts know that they are not it.
_WITHIN = "_EVENER_DOOR_WITHIN"
_armed: list[bool] = []
_met: set[str] = set()  # variables whose kind of model this process has run
_trained: list[bool] = []  # with EVENER_ZERO: an optimizer made a step


def arm() -> None:
    """Wait for DDP, FSDP2, Trainer where a variable asks for it. Once a process; never raises."""
    if _armed:
        return
    _armed.append(True)
    if _asked(VARIABLE):
        imports.after(_MODULE, _open)
        imports.after(_TRAINER, _keep_residuals)
        if _asked("EVENER_HUB_SLOT"):
            imports.after(data.SAMPLER, data.divide_sampler)
            imports.after(data.ACCELERATE, data.divide_accelerate)
    if _asked(SHARDED):
        imports.after(_FULLY_SHARD, _open_sharded)
    if _asked(MEMORY):
        imports.after(_TRAINER, _open_trainer)
        imports.after(_OPTIMIZER, _see_a_step)
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "")
    if not rank and _asked(MEMORY):
        atexit.register(_in_vain, os.getpid())
    if rank == "0":
        if _WITHIN not in os.environ:
            atexit.register(_in_vain, os.getpid())
        os.environ[_WITHIN] = "1"


def _in_vain(process: int) -> None:
    """The end of rank 0: say which variable had nothing to act on."""
    if os.getpid() != process or hasattr(sys, "last_value"):
        return  # forked from it, or ended by an error, which is to stand last
    for variable, what in (
        (VARIABLE, "the program ran no DistributedDataParallel"),
        (SHARDED, "the program ran no model that fully_shard sharded"),
        (MEMORY, "the program trained without transformers' Trainer"),
    ):
        if variable == MEMORY and not _trained:
            continue  # a launcher, or a tool beside the training
        by_hand = variable == VARIABLE and "evener.ddp.line" in sys.modules
        if _asked(variable) and variable not in _met and not by_hand:
            value = os.environ[variable]
            sys.stderr.write(f"evener 0: {variable}={value} never took over: {what}\n")


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in _OFF


def _open_sharded(module: Any) -> None:
    """Stand around `fully_shard`, before the package that holds it takes the name."""
    inner = module.fully_shard

    @functools.wraps(inner)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        nonlocal inner
        if not hasattr(inner, "_evener"):
            try:
                from evener.door import sharded

                inner = sharded.around(inner, functools.partial(_met.add, SHARDED))
            except Exception as error:  # noqa: BLE001 - a program that never asked must run
                sys.stderr.write(f"evener: {SHARDED} has no effect: {error}\n")
            inner._evener = True
        return inner(*args, **kwargs)

    module.fully_shard = fully_shard


def _open_trainer(module: Any) -> None:
    """Make each Trainer one of the memory engine's. What it has against that, it raises."""

    def made(kind: Any, *_: Any, **__: Any) -> Any:
        _met.add(MEMORY)
        from evener.door import memory

        return object.__new__(memory.under(kind))

    module.Trainer.__new__ = staticmethod(made)


def _see_a_step(module: Any) -> None:
    def seen(*_: Any) -> None:
        _trained.append(True)
        handle.remove()

    handle = module.register_optimizer_step_post_hook(seen)


def _open(module: Any) -> None:
    """Stand before DDP's forward. torch is half imported: the rest comes with the first call."""
    kind = module.DistributedDataParallel
    inner = kind.forward

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        _met.add(VARIABLE)
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


def variables(
    env: Mapping[str, str], floor: str = "", every: int | str = 0, overlap: int | None = None
) -> dict[str, str]:
    """What opens DDP's door in a job whose environment is `env`: for `evener launch` and the lab.

    `floor`: the least exact form that may be sent; "" where nothing may be lost. `every`: steps
    that each rank takes by itself, or "auto"; 0: none. `overlap`: behind how many of these an
    exchange runs. A variable that is set wins. Raises UsageError for a value that cannot be.
    """
    from evener.base import settings

    given = _given(settings.EVENER_DDP, env, "--ddp")
    floor = settings.EVENER_FLOOR.get(env) or floor
    if floor:
        from evener.comm import forms

        forms.require(floor, settings.EVENER_FLOOR.name)
    opened = {VARIABLE: given if given != "off" else "auto" if floor else "exact"}
    if floor and opened[VARIABLE] == "auto":
        opened[settings.EVENER_FLOOR.name] = floor
    for setting, value in ((settings.EVENER_EVERY, every), (settings.EVENER_OVERLAP, overlap)):
        told = setting.get(env) if setting.is_set(env) else value
        if told:
            opened[setting.name] = str(told)
    if settings.EVENER_OVERLAP.name in opened and settings.EVENER_EVERY.name not in opened:
        name = settings.EVENER_OVERLAP.name
        raise UsageError(f"{name}={opened[name]} is of local steps", "give --every too")
    return {**opened, **_path(env)}


def require(ddp: bool, floor: str | None, every: int | str | None, overlap: int | None) -> None:
    """Raise UsageError for options of `--ddp`'s that were given without it."""
    for option, given in (("--floor", floor), ("--every", every), ("--overlap", overlap)):
        if given and not ddp:
            raise UsageError(f"{option} {given} is for --ddp", "give --ddp too")


def variables_sharded(env: Mapping[str, str]) -> dict[str, str]:
    """What opens FSDP2's door; see `variables`."""
    from evener.base import settings

    given = _given(settings.EVENER_FSDP, env, "--fsdp")
    return {SHARDED: given if given != "off" else "exact", **_path(env)}


def _given(setting: Any, env: Mapping[str, str], option: str) -> str:
    given: str = setting.get(env)
    if setting.is_set(env) and given == "off":
        raise UsageError(
            f"{option} was given, and {setting.name} is off",
            f"leave one of them out, or unset {setting.name}",
        )
    return given


def _path(env: Mapping[str, str]) -> dict[str, str]:
    others = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SITE)]
    return {"PYTHONPATH": os.pathsep.join([str(SITE), *others])}
