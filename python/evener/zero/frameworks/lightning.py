"""Lightning with the engine under it: a strategy by name.

    import evener.zero.frameworks.lightning  # knows the name
    trainer = lightning.Trainer(strategy="evener_zero", ...)

or `strategy=ZeroStrategy(config="ds_config.json")`. The LightningModule's steps run inside the
engine's forward pass; its optimizer is the engine's, with the groups and schedulers that
`configure_optimizers` gave. Checkpoints are Lightning's own files. After `fit` the module has its
weights again, on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero import device as devices
from evener.zero.api import Batch
from evener.zero.config import Config, read
from evener.zero.engine import Engine
from evener.zero.frameworks import faces

try:
    from lightning.pytorch.strategies import (  # type: ignore[import-not-found,unused-ignore]
        SingleDeviceStrategy,
        StrategyRegistry,
    )
except ImportError:
    try:
        from pytorch_lightning.strategies import (  # type: ignore[import-not-found,unused-ignore]
            SingleDeviceStrategy,
            StrategyRegistry,
        )
    except ImportError:
        raise UsageError("Lightning is not installed", "pip install lightning") from None

NAME = "evener_zero"


class _Steps(nn.Module):
    """What the engine calls: one of the LightningModule's steps."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        quiet = _quiet(self.module) if _fake(args, kwargs) else contextlib.nullcontext()
        with quiet:
            return getattr(self.module, step)(*args, **kwargs)


def _fake(args: Any, kwargs: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    return any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs)))


@contextlib.contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Nothing is logged of a step that is only traced."""
    names = ("log", "log_dict")
    for name in names:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)


class ZeroStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """See the head of this file. `config` and `batch` as `zero.initialize` has them; `example`: a
    batch, or all that `training_step` is called with, as (batch, 0)."""

    strategy_name = NAME
    optimizers: Any

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        example: Any = None,
        batch: Batch | None = None,
        **given: Any,
    ) -> None:
        self._settings = dataclasses.replace(read(config))
        self._example, self._batch = example, batch
        self._engine: Engine | None = None
        self._steps: _Steps | None = None
        given.setdefault("device", devices.pick(self._settings.device).device)
        super().__init__(**given)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights go into the engine's states."""
        return True

    def model_to_device(self) -> None:
        """The engine decides where it lives; without training it is moved as ever."""
        if self.lightning_module.trainer.state.fn != "fit":
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Hand the module and its optimizer to the engine."""
        super().setup_optimizers(trainer)
        faces.refuse_ranks("Lightning")
        if len(self.optimizers) != 1:
            raise UsageError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers", "give one"
            )
        settings, module = self._settings, self.lightning_module
        precision = str(self.precision_plugin.precision)
        if precision.startswith("16"):
            raise UsageError(f"precision = {precision!r}", 'use "bf16-true" or "32-true"')
        if precision.startswith("bf16") and settings.dtype == torch.float32:
            settings.dtype = torch.bfloat16
        if trainer.gradient_clip_val:
            if trainer.gradient_clip_algorithm not in (None, "norm"):
                raise UsageError('gradient_clip_algorithm is not "norm"', "use norm")
            settings.clipping = float(trainer.gradient_clip_val)
        steps = trainer.accumulate_grad_batches
        settings.accumulation = faces.accumulation(settings, steps, "the Lightning Trainer")
        self._steps = _Steps(module)
        self._engine, front = faces.take_over(
            module,
            self.optimizers[0],
            settings,
            root=self._steps,
            example=self._call(),
            batch=self._batch,
        )
        self.optimizers = [front]
        self.precision_plugin.clip_gradients = self._clip

    def _clip(
        self, _optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Instead of the precision plugin, which reads gradients: they are the engine's."""
        if gradient_clip_algorithm != "norm":  # Lightning's enumeration is equal to its words
            raise UsageError("gradients cannot be clipped by value", "use norm")
        assert self._engine is not None
        self._engine.clipping = max(0.0, float(clip_val))

    def _call(self) -> Any:
        if self._example is None:
            return None
        given = self._example if isinstance(self._example, tuple | list) else (self._example, 0)
        return ("training_step", *given)

    def _run(self, step: str, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None:
            return getattr(self.lightning_module, step)(*args, **kwargs)
        return self._engine(step, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Through the engine, as the others."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `training_step`."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `training_step`."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `training_step`."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", *args, **kwargs)

    def teardown(self) -> None:
        """The module gets its weights back."""
        engine, self._engine = self._engine, None
        if engine is not None:
            del self.precision_plugin.clip_gradients
            faces.give_back(engine, self.lightning_module)
            self._steps = None
        super().teardown()


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, ZeroStrategy, description="memory by evener.zero")
