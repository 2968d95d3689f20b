"""Which share of the data a rank reads, where nodes come and go.

`torch.distributed` knows the ranks of this node alone, so a sampler that asks it gives every node
the same data. A node has a slot, which it keeps for as long as it lives, and which the next node
gets when it is gone. Slot s of S reads every S-th sample from s on, and its L ranks divide these:
so nodes may have different numbers of ranks. While a slot is empty, nobody reads its share.
"""

from __future__ import annotations

import torch.distributed as dist

from evener.comm.hub.client import shard


def data_shard() -> tuple[int, int]:
    """This rank's share of the data, and how many there are, among the ranks of all nodes.

    For `DistributedSampler(data, rank=share, num_replicas=count)` and the like. In a job without a
    hub these are its rank and the number of ranks. Raises SettingError for an EVENER_HUB_SLOT that
    is none.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    slot, slots = shard() or (0, 1)
    return slot + slots * rank, slots * size
