"""`horovod.mxnet` is not served: importing it says what to use."""

from __future__ import annotations

from evener.horovod.common.exceptions import NotServedError

raise NotServedError(
    "horovod.mxnet is not part of Evener's Horovod",
    "MXNet is retired: move the model to PyTorch and use horovod.torch",
)
