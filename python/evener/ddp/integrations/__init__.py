"""What frameworks need of Evener beside training: a few lines each, and none of them is imported
before it is used.

    keep          what compression has not sent yet, out of a model that is accelerated, and back
    transformers  in the checkpoints of transformers' Trainer
    lightning     in those of Lightning's
    trackers      bytes, forms and exposed time in Weights & Biases, TensorBoard and MLflow
"""

from __future__ import annotations

import logging
from typing import Any


def lightning_callbacks() -> list[Any]:
    """What each Trainer of Lightning's gets besides its own, by the entry point. Never raises."""
    from evener.base import settings
    from evener.errors import EvenerError

    try:
        if settings.EVENER_DDP.get() == "off":
            return []
        from evener.ddp.integrations.lightning import KeepResiduals
    except (EvenerError, ImportError) as error:
        logging.getLogger("evener").warning("Lightning's checkpoints hold no residuals: %s", error)
        return []
    return [KeepResiduals()]


__all__ = ["trackers", "transformers"]
