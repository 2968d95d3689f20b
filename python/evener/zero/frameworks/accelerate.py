"""Accelerate with the engine under it: one line after the Accelerator is made.

    accelerator = Accelerator()
    zero.accelerate(accelerator, config="ds_config.json")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

`prepare` then hands the model and its optimizer to the engine, instead of moving them to a GPU.
The rest of the script stays: `backward`, `clip_grad_norm_`, `accumulate`, `save_state`,
`load_state`, `get_state_dict`. Nothing of Accelerate is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from evener.base.given import given
from evener.errors import UsageError
from evener.zero.api import Batch
from evener.zero.config import Config, read
from evener.zero.engine import Engine
from evener.zero.frameworks import faces


@given
def accelerate(
    accelerator: Any,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    example: Any = None,
    batch: Batch | None = None,
) -> Any:
    """Let this Accelerator's `prepare` use the engine; returns the accelerator. `config`,
    `example` and `batch` as `zero.initialize` has them. Where the configuration says nothing:
    bfloat16 where the Accelerator's mixed precision is bf16, its accumulation steps, and the
    rows of the loader. Raises UsageError for fp16 and for several processes."""
    return attach(accelerator, config, example, lambda: batch)


def attach(
    accelerator: Any,
    config: str | Path | Mapping[str, Any] | Config | None,
    example: Any,
    batch: Callable[[], Batch | None],
) -> Any:
    """`accelerate`, where `batch` is known only when the model is prepared."""
    faces.refuse_ranks("Accelerate")
    precision = str(getattr(accelerator, "mixed_precision", "no"))
    if precision in ("fp16", "fp8"):
        raise UsageError(f"mixed_precision = {precision!r}", 'use "bf16" or "no"')
    settings = dataclasses.replace(read(config))
    if precision == "bf16" and settings.dtype == torch.float32:
        settings.dtype = torch.bfloat16
    steps = int(getattr(accelerator, "gradient_accumulation_steps", 1))
    settings.accumulation = faces.accumulation(settings, steps, "the Accelerator")
    held: dict[str, Engine] = {}
    prepare = accelerator.prepare

    def prepared(*args: Any, device_placement: Any = None) -> Any:
        models = [x for x in args if isinstance(x, nn.Module)]
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer)]
        if not models and not optimizers:
            return prepare(*args, device_placement=device_placement)
        if len(models) != 1 or len(optimizers) != 1:
            raise UsageError(
                f"prepare() was given {len(models)} models and {len(optimizers)} optimizers",
                "give one model and its optimizer in one call",
            )
        if held:
            raise UsageError("a second model is prepared", "use one Accelerator for each")
        rows = [x.batch_size for x in args if isinstance(x, DataLoader) and x.batch_size]
        if settings.micro_batch is None and rows:
            settings.micro_batch = rows[0]
        model, given = models[0], optimizers[0]
        engine, front = faces.take_over(model, given, settings, example=example, batch=batch())
        held["engine"] = engine
        accelerator.evener = engine
        model.register_forward_pre_hook(_moved(engine), with_kwargs=True)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        accelerator._models.append(model)
        others = tuple(x for x in args if x is not model and x is not given)
        # First the optimizer: schedulers look for it among those that are prepared.
        found: dict[int, Any] = {id(given): accelerator.prepare_optimizer(front, False)}
        found[id(model)] = model
        if others:
            made = prepare(*others)
            found |= dict(zip(map(id, others), made if len(others) > 1 else [made], strict=True))
        result = tuple(found[id(x)] for x in args)
        return result if len(result) > 1 else result[0]

    clip = accelerator.clip_grad_norm_

    def clip_grad_norm_(
        parameters: Iterable[Any], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        if "engine" not in held:
            found: torch.Tensor | None = clip(parameters, max_norm, norm_type)
            return found
        if norm_type != 2:
            raise UsageError(f"clip_grad_norm_ with norm_type = {norm_type}", "use 2")
        if not accelerator.sync_gradients:
            return None
        engine = held["engine"]
        engine.clipping = float(max_norm) if max_norm < float("inf") else 0.0
        return engine.norm()

    def clip_grad_value_(*_: Any, **__: Any) -> None:
        raise UsageError("gradients cannot be clipped by value", "use clip_grad_norm_")

    accelerator.prepare = prepared
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_
    return accelerator


def _moved(engine: Engine) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return engine.inputs(args, kwargs)

    return hook
