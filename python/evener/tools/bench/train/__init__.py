"""`evener bench train`: the same training, synchronised in several ways, side by side.

A *row* is how many ranks train (one, one node, all); a *column* is how their gradients are
combined; a *cell* is one row with one column, run `repeats` times. How the parts stand together:

    command     parses, makes the plan, shows progress, writes what came out
    plan        options -> rows x columns x repeats, interleaved (pure)
    columns     the columns, one small entry each;  wrap  what an entry's `wrap` does to a model
    clusters    starts one agent a slot: in a lab, as loopback processes, or in the ranks given
    agent       one a slot, lives through the whole plan; forks a fresh process for each run
    worker      that process: builds the model, trains, measures, reports
    results     runs -> cells -> figures;  stats, guard, nccl  parts of it (pure)
    table, markdown, page    the same figures for a terminal, a README, a browser
    sharded      what FSDP2's columns shard, and in which precision

Only agent, worker, models, sharded and wrap import torch.
"""

__all__ = ["models"]
