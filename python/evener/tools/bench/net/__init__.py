"""`evener bench net`: the network as NCCL's progress thread would use it, without a GPU."""
