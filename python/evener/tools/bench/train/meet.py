"""The ranks of a launcher that names no address (plain mpirun, srun): find rank 0, then go on.

torchrun and `evener launch` say where rank 0 is. Where nobody does, the ranks meet once by
`evener.comm.world.rendezvous`, and each learns the address by which it reached rank 0 and a port
that is free there; the agents then start as if torchrun had started them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from evener.base.ports import free_port
from evener.comm.world.ranks import detect
from evener.tools.bench.train.clusters import Given


def given() -> Given:
    """This process's place. Raises UsageError or RendezvousError where the ranks do not meet."""
    ranks = detect()
    if os.environ.get("MASTER_ADDR") and None not in (ranks.local_rank, ranks.local_size):
        return Given.detect(os.environ)
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from evener.comm.world import rendezvous

    ranks = rendezvous.init_process_group(backend="gloo", set_device=False)
    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = [free_port()]
    dist.broadcast_object_list(port, src=0)
    rendezvous.shutdown()
    found = {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(port[0]),
    }
    return replace(Given.detect({**os.environ, **found}), store_is_served=False)
