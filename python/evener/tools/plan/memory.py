"""`evener plan-memory` and `evener zero report`: their options.

What they do is in `evener.zero`, which imports torch: that takes seconds, and help, tab completion
and plans of tables (`evener.embedding.planning`) do without it.
"""

from __future__ import annotations

from typing import Any

import click

from evener.errors import UsageError

# The options of a plan of tables, and the default of --batch there.
_OF_TABLES = {"gpu", "host", "ssd", "batch", "ranks", "nodes", "between", "as_json"}
_SAMPLES = "8192"
_DEFAULT = click.core.ParameterSource.DEFAULT


@click.command("plan-memory")
@click.argument("model")
@click.option(
    "--on",
    metavar="MACHINE",
    help="A machine that is not here, as a100-40gb,pcie4,ddr4-8ch; or by numbers: "
    "gpu=40GB,tflops=312,hbm=1555,pcie=31.5,dram=205 (GB/s of the peaks).",
)
@click.option(
    "--gpu", default="auto", help="Budget of each GPU, as 24GB or 24GiB. auto: all that is free."
)
@click.option("--host", default="auto", help="Budget of host memory, as 110GB. auto: what is free.")
@click.option(
    "--ssd",
    default="",
    metavar="FOLDER:SIZE",
    help="An SSD as third tier, as /mnt/nvme:500GB. Its rate is measured here; with --on it is "
    "taken from ssd=GB/s of the machine (3).",
)
@click.option(
    "--batch",
    default="1x1024",
    show_default=True,
    help=f"Micro-batch: rows x tokens. Of tables: samples per rank (default {_SAMPLES}).",
)
@click.option("--accumulation", default=1, show_default=True, type=click.IntRange(1))
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="GPUs.")
@click.option(
    "--nodes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Nodes with --ranks GPUs each and a copy of the states; gradients cross between them once "
    "per step.",
)
@click.option(
    "--between",
    default="25gbit",
    show_default=True,
    metavar="RATE",
    help="The network of each node, with --nodes.",
)
@click.option(
    "--crossing",
    default="exact",
    show_default=True,
    metavar="FORM",
    help="In what gradients cross, with --nodes: as evener.crossing of the configuration.",
)
@click.option(
    "--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp16", "fp32"])
)
@click.option(
    "--moments", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16", "int8"])
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    type=click.Choice(["adamw", "muon"]),
    help="muon: torch.optim.Muon has the matrices of the blocks, and AdamW the rest.",
)
@click.option(
    "--master/--no-master",
    default=True,
    help="Whether BF16 weights have an exact copy; without, they are rounded stochastically.",
)
@click.option(
    "--optimizer-in-backward",
    is_flag=True,
    help="As evener.optimizer_in_backward of the configuration: no gradient is kept.",
)
@click.option(
    "--checkpointing",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "none", "recompute", "offload"]),
    help="Of activations.",
)
@click.option(
    "--loss",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "plain", "chunked", "fused"]),
    help="As evener.loss of the configuration.",
)
@click.option(
    "--tiles",
    is_flag=True,
    help="MLPs, norms and attention of recomputed blocks run in parts: as evener.tiles.",
)
@click.option(
    "--sequence",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Of the --ranks, how many share each sequence: as evener.sequence of the configuration.",
)
@click.option("--chunks", is_flag=True, help="List every chunk.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_context
def plan_memory(context: click.Context, /, **given: Any) -> None:
    """Whether MODEL fits, where it will live, and how long a step takes.

    MODEL is 7b, 8b, 13b or 70b, or Hugging Face's config.json, or its directory. With transformers
    installed its own model is traced, whatever its architecture; without, Llama-shaped ones are
    planned from shapes. This machine is probed first (copies, the CPU optimizer, both at once),
    or --on names one that is not here. GB are 10^9 bytes. Exit status 1: it does not fit.

    MODEL is also the tables of a recommender, a JSON file:

    \b
      {"tables": [{
        "name": "items", "num_embeddings": 4000000, "embedding_dim": 64,
        "feature_names": ["item", "seen"], "ids": [1, 20],
        "optimizer": "row_wise_adagrad", "dtype": "f32", "zipf": 1.05}]}

    ids are how many of them a sample has, per feature. How often rows are used is "zipf": EXPONENT,
    or as counted: "snapshot": FOLDER of store.snapshot, or "frequencies": [[times, rows], ...],
    which evener.embedding.torch.describe(collection, "tables.json") writes. --gpu is what caches
    may take of each GPU (auto: no cache); --host and --ssd are of a node.
    """
    from evener.embedding import planning

    if (tables := planning.holds_tables(given["model"])) is not None:
        by_hand = {name for name in given if context.get_parameter_source(name) != _DEFAULT}
        for name in sorted(by_hand - _OF_TABLES - {"model"}):
            raise UsageError(f"--{name} is for models, and this file has tables", "leave it out")
        kept = {name: given[name] for name in _OF_TABLES}
        if "batch" not in by_hand:
            kept["batch"] = _SAMPLES
        planning.run(tables, given["model"], **kept)
        return
    from evener.zero import command

    command.run_plan(**given)


@click.group("zero")
def zero_group() -> None:
    """What the memory engine recorded."""


@zero_group.command("report")
@click.argument("recording", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="The page; default: beside the recording. Its folder is made where it is missing.",
)
def zero_report(recording: str, output: str | None) -> None:
    """RECORDING (of `zero.report.write`) as an HTML page: timeline, residency, prediction."""
    from evener.zero import command

    command.write_report(recording, output)
