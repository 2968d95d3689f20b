"""transformers' Trainer with the engine under it: its class by one line.

    trainer = zero.trainer(Trainer, config="ds_config.json")(model=model, args=arguments, ...)

It works for any class that Trainer is a base of (Seq2SeqTrainer, trl's SFTTrainer). Arguments,
callbacks, checkpoints and `resume_from_checkpoint` are Trainer's own. Nothing of transformers is
imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.base.given import given
from evener.errors import UsageError
from evener.zero.api import Batch
from evener.zero.config import Config, read
from evener.zero.frameworks import faces
from evener.zero.frameworks.accelerate import accelerate
from evener.zero.split import MuonAdamW


@given
def trainer(
    base: type[Any],
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    example: Any = None,
    batch: Batch | None = None,
) -> type[Any]:
    """A class as `base` that trains under the engine. `config`, `example` and `batch` as
    `zero.initialize` has them; precision, accumulation, clipping and the optimizer are those of
    the training arguments, `gradient_checkpointing` is the engine's own. Where the configuration's
    optimizer is Muon, it is `MuonAdamW`: with the arguments' `learning_rate` and `weight_decay`,
    where the configuration has no `lr` or `weight_decay`."""
    if not hasattr(base, "create_accelerator_and_postprocess"):
        raise UsageError(f"{base.__name__} is no Trainer", "give transformers.Trainer or its like")

    class ZeroTrainer(base):  # type: ignore[misc]
        """See `evener.zero.frameworks.trainer`."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            settings = dataclasses.replace(read(config))
            args = self.args
            # The engine recomputes blocks, so Trainer must not. transformers 5.24 renamed it.
            for name in ("gradient_checkpointing", "activation_checkpointing"):
                if getattr(args, name, None):
                    setattr(args, name, False)
                    settings.checkpointing = settings.checkpointing or True
            steps = args.gradient_accumulation_steps
            settings.accumulation = faces.accumulation(settings, steps, "the training arguments")
            settings.micro_batch = settings.micro_batch or args.per_device_train_batch_size
            args._n_gpu = min(args.n_gpu, 1)
            accelerate(self.accelerator, settings, example=example, batch=batch)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            options = read(config).muon
            if options is not None and vars(self).get("optimizer") is None:
                own = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
                self.optimizer: Any = MuonAdamW(self.model, **{**own, **options})
            return super().create_optimizer(*args, **kwargs)

        def _has_mixed_mesh_grads(self, model: Any) -> bool:
            """No gradient is a DTensor. transformers 5.24 would read them to find out."""
            return False

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """The engine decides where it lives."""

    ZeroTrainer.__name__ = f"Zero{base.__name__}"
    return ZeroTrainer
