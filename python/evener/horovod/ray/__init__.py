"""`horovod.ray`: Horovod jobs on a Ray cluster, whose workers are Ray actors.

`RayExecutor` starts a fixed number of workers, or an elastic job where `min_workers` is given;
`ElasticRayExecutor` is upstream's older interface to the latter. The actors are worker.py's;
strategy.py places them; job.py makes them the workers of an `evener.tools.launch.elastic` job.
"""

from __future__ import annotations

from evener.horovod.common.exceptions import NotServedError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise NotServedError(
        "horovod.ray needs Ray, which is not installed", "pip install ray"
    ) from error

from evener.horovod.ray.elastic import ElasticRayExecutor
from evener.horovod.ray.runner import RayExecutor
from evener.horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
