"""Overlap across the step: the network works on while the next forward has begun.

    backward    buckets are submitted as without it
    step()      takes a snapshot of the hyperparameters, says how each bucket is to be updated, and
                returns: a bucket is updated when its reduction lands
    forward     waits for a bucket where it first uses one of its parameters

Start reading at `step`. `guard` is how a use is noticed, `optimizers` what may be deferred, `order`
in which order buckets leave, `interpose` the calls of torch before which everything is finished.
"""

from evener.comm.overlap.optimizers import innermost, refusal
from evener.comm.overlap.step import StepOverlap, refuse_model

__all__ = ["StepOverlap", "innermost", "optimizers", "refusal", "refuse_model"]
