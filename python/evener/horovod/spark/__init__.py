"""`horovod.spark` is not served: importing it says what to use."""

from __future__ import annotations

from evener.horovod.common.exceptions import NotServedError

raise NotServedError(
    "horovod.spark is not part of Evener's Horovod",
    "start the job by `evener launch --horovod` or horovod.run on the hosts of the cluster, and "
    "read the data with petastorm or pyarrow",
)
