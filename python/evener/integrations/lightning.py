"""Lightning: its checkpoints hold what compression has not sent yet, under "evener".

    Trainer(callbacks=[KeepResiduals()])

Where Evener is installed nobody writes that line: Lightning asks installed packages for callbacks
(the entry point `lightning.pytorch.callbacks_factory`), and gets this one where EVENER_DDP is set.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from evener.integrations import keep


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
