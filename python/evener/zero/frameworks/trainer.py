"""transformers' Trainer with the engine under it: its class by one line.

    trainer = zero.trainer(Trainer, config="ds_config.json")(model=model, args=arguments, ...)

It works for any class that Trainer is a base of (Seq2SeqTrainer, trl's SFTTrainer). Arguments,
callbacks, checkpoints and `resume_from_checkpoint` are Trainer's own. Nothing of transformers is
imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from evener.base.given import given
from evener.errors import UsageError
from evener.zero.api import Batch
from evener.zero.config import Config, read
from evener.zero.frameworks import faces
from evener.zero.frameworks.accelerate import attach
from evener.zero.split import MuonAdamW
from evener.zero.untouched import random_kept


def _load_on_the_host(args: Any) -> None:
    """trl loads a model by its name, and onto the GPU where nothing is said: it need not fit there.
    Raises UsageError for what trl does with such a model before it trains."""
    if getattr(args, "precompute_ref_log_probs", False) and args.device.type != "cpu":
        raise UsageError(
            "precompute_ref_log_probs = True runs the model on the GPU before the engine has it",
            "leave it out: with peft there is no second model, and without it the reference model "
            "is on the GPU as a whole",
        )
    own = args.model_init_kwargs or {}
    args.model_init_kwargs = {"device_map": {"": "cpu"}, **own}


def _without_gradients(trainer: Any) -> None:
    """trl's second model only says what it would have said. While its weights ask for gradients,
    autocast keeps a copy of each in half precision, beside the engine and unknown to its plan."""
    model = getattr(trainer, "model", None)
    trained = set(model.parameters()) if isinstance(model, nn.Module) else set()
    for name in ("ref_model", "teacher_model"):
        other = getattr(trainer, name, None)
        if isinstance(other, nn.Module):
            for parameter in set(other.parameters()) - trained:
                parameter.requires_grad_(False)


def _batch(trainer: Any) -> Batch | None:
    """Rows and tokens of a micro-batch for the plan, as the collator makes it of the first rows: a
    pair of trl's is two. trl cuts at `max_length`. None where this cannot be known."""
    data, count = trainer.train_dataset, trainer.args.per_device_train_batch_size
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    with random_kept():
        try:
            made = trainer.data_collator([data[n] for n in range(min(count, len(data)))])
            rows, tokens = made["input_ids"].shape
        except Exception:  # noqa: BLE001 - it only makes the plan better; training says what it is
            return None
    longest = getattr(trainer.args, "max_length", None)
    return int(rows), int(longest if isinstance(longest, int) else tokens)


@given
def trainer(
    base: type[Any],
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    example: Any = None,
    batch: Batch | None = None,
) -> type[Any]:
    """A class as `base` that trains under the engine. `config`, `example` and `batch` as
    `zero.initialize` has them; without the last two, the collator says how many rows a batch has.
    Precision, accumulation, clipping and the optimizer are those of the training arguments,
    `gradient_checkpointing` is the engine's own. Where the configuration's optimizer is Muon, it is
    `MuonAdamW`: with the arguments' `learning_rate` and `weight_decay`, where the configuration has
    no `lr` or `weight_decay`. Raises ConfigError for what the configuration cannot be."""
    if not hasattr(base, "create_accelerator_and_postprocess"):
        raise UsageError(f"{base.__name__} is no Trainer", "give transformers.Trainer or its like")
    wanted = read(config)

    class ZeroTrainer(base):  # type: ignore[misc]
        """See `evener.zero.frameworks.trainer`."""

        evener = True  # the door's mark

        def __init__(self, *given: Any, **named: Any) -> None:
            model = named.get("model", given[0] if given else None)
            args = named.get("args", given[1] if len(given) > 1 else None)
            if isinstance(model, str) and hasattr(args, "model_init_kwargs"):
                _load_on_the_host(args)
            super().__init__(*given, **named)
            _without_gradients(self)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            settings = dataclasses.replace(wanted)
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
            known = batch is not None or example is not None
            attach(self.accelerator, settings, example, lambda: batch if known else _batch(self))

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            options = wanted.muon
            if options is not None and vars(self).get("optimizer") is None:
                own = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
                self.optimizer: Any = MuonAdamW(self.model, **{**own, **options})
            return super().create_optimizer(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            engine = vars(self.accelerator).get("evener")
            with engine.explained() if engine is not None else contextlib.nullcontext():
                return super().training_step(*args, **kwargs)

        def _has_mixed_mesh_grads(self, model: Any) -> bool:
            """No gradient is a DTensor. transformers 5.24 would read them to find out."""
            return False

        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """The engine decides where it lives."""

    ZeroTrainer.__name__ = f"Zero{base.__name__}"
    return ZeroTrainer
