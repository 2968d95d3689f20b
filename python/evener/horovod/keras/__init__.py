"""`horovod.keras` is not served: importing it says what to use."""

from __future__ import annotations

from evener.horovod.common.exceptions import NotServedError

raise NotServedError(
    "horovod.keras is not part of Evener's Horovod",
    "use horovod.torch, or run this script with upstream's Horovod; TensorFlow is planned",
)
