"""The door without a line: Evener under every DistributedDataParallel that a program makes.

    EVENER_DDP=exact torchrun --nproc-per-node 4 train.py

enter       how it gets into a process: a line that Python runs at its start waits for torch's DDP
sharded     FSDP2: a look at each model that `fully_shard` was applied to (EVENER_FSDP)
memory      transformers' Trainer under the memory engine (EVENER_ZERO)
data        shares of the data among nodes that come and go (EVENER_HUB_SLOT)
models      one follower a model: DDP's own steps first, then all ranks agree, then Evener
optimizers  who steps a model's parameters, as torch's own hooks see it
agree       the ranks' vote, by the store, with a time limit
pace        how long steps take, before and after

The doors of DDP and FSDP2 never raise and never hang. What cannot be accelerated stays plain, on
all ranks alike, and one line says why. Nothing here is imported where no variable is set.
"""

__all__ = ["enter"]
