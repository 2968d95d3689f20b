"""Who takes part: ranks, where they meet, the groups they have, and how these end.

ranks       rank and size, from what the launcher left in the environment
rendezvous  where ranks meet: contact, pmix and libmpi are ways to hand an address on
world       process groups beside torch.distributed's default group
topology    which rank lives on which node
gloo        the interface on which it listens, and its threads at the end
elastic     ranks that come and go
abort       what is under way ends when a peer is gone
"""

__all__ = [
    "abort",
    "contact",
    "elastic",
    "meeting",
    "ranks",
    "rendezvous",
    "stores",
    "topology",
    "world",
]
