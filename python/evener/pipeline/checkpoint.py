"""Checkpoints of a pipeline: the model's own names, in files that need no pipeline to be read.

    model-00001-of-00002.safetensors ...       each rank's weights
    model.safetensors.index.json               which file has which, as transformers writes it
    optimizer-00001-of-00002.pt ...            states by the parameter's name
    evener.json                                steps, and what the caller gave

Ranks write into a folder beside the wanted one; rank 0 renames it when all have. What was there
before is gone only then.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from evener.base.given import given
from evener.errors import UsageError
from evener.pipeline.tensor import like

_INDEX, _EXTRA = "model.safetensors.index.json", "evener.json"


def save(
    folder: Path, tensors: dict[str, torch.Tensor], optimizer: dict[str, Any] | None,
    extra: dict[str, Any], rank: int, ranks: int, group: dist.ProcessGroup,
) -> Path:  # fmt: skip
    """Write this rank's part; returns when all have. Raises OSError where one cannot."""
    part = folder.with_name(folder.name + ".part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier(group)
    name = f"{rank + 1:05}-of-{ranks:05}"
    if not part.is_dir():
        raise UsageError(
            f"{part} is not there on this host", "give a folder that all hosts of the job share"
        )
    # Names that share a tensor would be refused: each gets its own copy in the file.
    values = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    save_file(values, part / f"model-{name}.safetensors", metadata={"format": "pt"})
    if optimizer is not None:
        torch.save(optimizer, part / f"optimizer-{name}.pt")
    sizes = {key: value.numel() * value.element_size() for key, value in values.items()}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, sizes, group=group)
    if rank == 0:
        where: dict[str, str] = {}
        for other, keys in enumerate(everyone):
            for key in keys:
                where.setdefault(key, f"model-{other + 1:05}-of-{ranks:05}.safetensors")
        total = sum({k: v for keys in everyone for k, v in keys.items()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (part / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        (part / _EXTRA).write_text(json.dumps(extra) + "\n", encoding="utf-8")
        publish(part, folder)
    dist.barrier(group)
    return folder


def publish(part: Path, folder: Path) -> None:
    """`part` becomes `folder`. What was there is in a folder `.old` until that is done."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            folder.rename(old)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        # A volume is mounted there, as containers and labs do: it stays, what is in it changes.
        _publish_inside(part, folder)
        return
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _publish_inside(part: Path, folder: Path) -> None:
    new, old = folder / ".part", folder / ".old"
    for each in (new, old):
        shutil.rmtree(each, ignore_errors=True)
    before = list(folder.iterdir())
    shutil.copytree(part, new)
    old.mkdir()
    for each in before:
        each.rename(old / each.name)
    for each in list(new.iterdir()):
        each.rename(folder / each.name)
    for each in (new, old, part):
        shutil.rmtree(each, ignore_errors=True)


class State:
    """A checkpoint that is read. Raises UsageError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            self.where: dict[str, str] = index["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{folder} is no checkpoint: {error}", "give a folder that pipe.save wrote"
            ) from None
        extra = folder / _EXTRA
        self.extra: dict[str, Any] = json.loads(extra.read_text()) if extra.is_file() else {}

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Those of `names` that are there; default: all."""
        wanted = self.where if names is None else [n for n in names if n in self.where]
        files: dict[str, list[str]] = {}
        for name in wanted:
            files.setdefault(self.where[name], []).append(name)
        found = {}
        for file, keys in files.items():
            with safe_open(self.folder / file, framework="pt") as opened:
                for key in keys:
                    found[key] = opened.get_tensor(key)
        return found

    def restore(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        """Give an optimizer the states that were saved for its parameters."""
        saved: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("optimizer-*.pt")):
            part = torch.load(path, map_location="cpu", weights_only=True)
            saved.update(part["states"])
            groups = part["groups"]
        if not groups:
            raise UsageError(f"{self.folder} holds no optimizer", "give save() the optimizer too")
        if len(groups) != len(optimizer.param_groups):
            raise UsageError(
                f"the checkpoint's optimizer has {len(groups)} groups, this one "
                f"{len(optimizer.param_groups)}",
                "make it as it was made before",
            )
        made = optimizer.state_dict()
        order = [p for group in optimizer.param_groups for p in group["params"]]
        made["state"] = {
            at: _divided(p, saved[names[id(p)]])
            for at, p in enumerate(order)
            if names.get(id(p)) in saved
        }
        for own, group in zip(made["param_groups"], groups, strict=True):
            own.update(group)
        optimizer.load_state_dict(made)


def _divided(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state, divided over ranks as the parameter is."""
    if not isinstance(parameter, DTensor):
        return state
    return {
        key: like(parameter, value)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def named_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name; raises UsageError for parameters of others."""
    states = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UsageError("the optimizer has parameters that are not the pipeline's",
                                 "make it with pipe.parameters()")  # fmt: skip
            if parameter in optimizer.state:
                states[names[id(parameter)]] = dict(optimizer.state[parameter])
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {"states": states, "groups": groups}


@given
def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint: `model.load_state_dict(pipeline.weights(folder))`."""
    return State(Path(folder)).tensors()
