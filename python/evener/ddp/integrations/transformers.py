"""transformers' Trainer.

    Trainer(..., callbacks=[KeepResiduals()])
    Trainer(..., callbacks=[FollowPrecision()])

KeepResiduals: checkpoints hold what compression has not sent yet, in `evener.pt`. Under EVENER_DDP
nobody writes that line: `evener.door` adds the class to those that each Trainer has by default.
FollowPrecision: half precision while it does no harm (`evener.precision`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from evener import precision
from evener.ddp.integrations import keep
from evener.errors import UsageError

logger = logging.getLogger("evener.integrations")

_FILE = f"{keep.NAME}.pt"


class KeepResiduals(TrainerCallback):  # type: ignore[misc]
    """Saves with each checkpoint, and loads where a training resumes."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """On every rank, behind the Trainer's own saving; the ranks that save write."""
        owed = None if model is None else keep.collect(model)
        folder = _folder(args, state)
        if owed is not None and args.should_save and folder.is_dir():
            part = folder / f"{_FILE}.part"
            torch.save(owed, part)
            part.replace(folder / _FILE)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """On every rank, for a `train` that goes on with this model."""
        if model is not None:
            keep.remember(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """A resumed training knows how many steps were taken, and so its checkpoint."""
        path = _folder(args, state) / _FILE
        if model is None or not state.global_step or not path.is_file():
            return
        keep.install(model, torch.load(path, map_location="cpu", weights_only=True))
        if state.is_world_process_zero:
            logger.info("what compression had not sent yet comes from %s", path)


class FollowPrecision(TrainerCallback):  # type: ignore[misc]
    """Half precision (bfloat16) that follows the loss; `policy` says what happened.

    options: of `evener.precision.follow`. Raises UsageError where the Trainer chooses the precision
    itself (bf16=True, fp16=True).
    """

    def __init__(self, **options: Any) -> None:
        self.policy: Any = None
        self._options = options

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """On every rank."""
        if args.bf16 or args.fp16:
            raise UsageError(
                "FollowPrecision chooses the precision, and so do bf16=True and fp16=True",
                "leave these out of TrainingArguments",
            )
        inner = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
        self.policy = precision.follow(model, inner, **self._options)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model computes as before."""
        self.policy.detach()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
