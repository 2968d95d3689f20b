"""Lightning.

    Trainer(callbacks=[KeepResiduals()])
    Trainer(callbacks=[FollowPrecision()])

FollowPrecision: half precision while it does no harm (`evener.precision`). KeepResiduals:
checkpoints hold what compression has not sent yet, under "evener". Where Evener is installed nobody
writes that line: Lightning asks installed packages for callbacks (the entry point
`lightning.pytorch.callbacks_factory`), and gets this one where EVENER_DDP is set.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from evener import precision
from evener.ddp.integrations import keep
from evener.errors import UsageError


class KeepResiduals(Callback):  # type: ignore[misc]
    """Saves with each checkpoint, and loads with it."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """On every rank; rank 0 writes the checkpoint."""
        owed = keep.collect(pl_module)
        if owed is not None:
            checkpoint[keep.NAME] = owed

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """On every rank, for a `save_checkpoint` after `fit`."""
        keep.remember(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """On every rank."""
        if keep.NAME in checkpoint:
            keep.install(pl_module, checkpoint[keep.NAME])


class FollowPrecision(Callback):  # type: ignore[misc]
    """Half precision (bfloat16) that follows the loss of `training_step`; `policy` says what
    happened.

    options: of `evener.precision.follow`. Raises UsageError where the Trainer has a precision of
    its own, or several optimizers.
    """

    def __init__(self, **options: Any) -> None:
        self.policy: Any = None
        self._options = options
        self._hooks: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """On every rank."""
        if str(trainer.precision) not in ("32-true", "32"):
            raise UsageError(
                f"FollowPrecision chooses the precision, and so does precision={trainer.precision}",
                "leave precision= out of Trainer",
            )
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"FollowPrecision is for one optimizer, here are {len(trainer.optimizers)}",
                "leave the callback out",
            )
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
        self.policy = precision.follow(pl_module, optimizer, **self._options)
        # Lightning's steps run backward inside of optimizer.step.
        self._hooks = self.policy.attach("training_step", steps=False)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The gradients are there."""
        self._hooks.decide(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module computes as before."""
        self.policy.detach()
