"""`HorovodBasics`: the questions about the job as methods, as libraries of others use them."""

from __future__ import annotations

from typing import Any

from evener.horovod.common import util
from evener.horovod.common.process_sets import ProcessSet, global_process_set
from evener.horovod.common.reductions import Adasum, Average, Max, Min, Product, Sum


class HorovodBasics:
    """One for a framework; all are of the same job. Arguments say where upstream's library is."""

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        del pkg_path, args

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """See `horovod.torch.init`."""
        from evener.horovod.state import STATE

        STATE.init(comm, process_sets)

    def shutdown(self) -> None:
        """End what `init` began."""
        from evener.horovod.state import STATE

        STATE.shutdown()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in _ASKED:
            raise AttributeError(name)
        from evener.horovod.torch import job  # imports torch

        return getattr(job, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        from evener.horovod.common.process_sets import get_process_set_ids_and_ranks

        return get_process_set_ids_and_ranks()


_ASKED = frozenset(
    (
        *("is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size"),
        *("rank", "local_rank", "cross_rank", "is_homogeneous", "mpi_threads_supported"),
        *("mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built"),
        *("ccl_built", "cuda_built", "rocm_built"),
    )
)

__all__ = ["HorovodBasics", "ProcessSet", "global_process_set", "util"]
