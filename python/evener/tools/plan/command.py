"""`evener plan`: its options.

What it does is in `predict`, which imports torch: that takes seconds, and help and tab completion
do without it.
"""

from __future__ import annotations

from typing import Any

import click

from evener.base.click import StepsOrAuto
from evener.comm import forms
from evener.errors import UsageError

# What TCP over IPv4 carries of a frame of 1500 bytes: 1448 of 1538 on Ethernet.
_GOODPUT = 0.94


class _Form(click.Choice[str]):
    """A form's name; an unknown one is answered with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As click's."""
        return forms.require(value, "--floor")


def _complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    names = ["vgg16", "resnet50", "vit_b_16", "gpt2", "bert-base"]
    names += ["vgg-tiny", "mlp-wide", "cnn-small"]
    return [name for name in names if name.startswith(incomplete)]


@click.command()
@click.option(
    "--model",
    shell_complete=_complete_models,
    help="A classifier of torchvision or a built-in (evener bench train --list-models). With "
    "--every and --fsdp also 7b, 8b, 13b or 70b (Llamas), a config.json, or LAYERSxWIDTH; with "
    "--every a number of weights, as 10b.",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(dir_okay=False),
    help="Instead of --model: a file that EVENER_PROFILE=FILE wrote while training.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds of one step on one GPU alone. Default: the profile's; else measured here.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples per GPU and step. Default: the model's own, as in evener bench train.",
)
@click.option("--nodes", default="2x1", show_default=True, help="NODESxGPUS; several: 2x8,4x8,8x8.")
@click.option(
    "--network", default="25gbit", show_default=True, help="Rate of a node's network card."
)
@click.option(
    "--latency-us",
    type=click.FloatRange(0),
    default=50.0,
    show_default=True,
    help="One message between nodes.",
)
@click.option(
    "--goodput",
    type=click.FloatRange(0, 1, min_open=True),
    default=_GOODPUT,
    show_default=True,
    help="Share of the rate that reaches the payload.",
)
@click.option(
    "--inside", default="1200gbit", show_default=True, help="Rate of a GPU's link in its node."
)
@click.option(
    "--memory",
    default="16tbit",
    show_default=True,
    help="Rate of the GPU's memory: what encoding and decoding are bound by.",
)
@click.option(
    "--floor",
    type=_Form([form.name for form in forms.listed()]),
    default="int8",
    show_default=True,
    help="Harshest form that mode auto may choose.",
)
@click.option(
    "--topk-ratio",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Share of the entries that top-k sends.",
)
@click.option(
    "--bucket-mb",
    type=click.IntRange(0),
    help="MiB up to which gradients are fused. Default: 25; with --every 64.",
)
@click.option(
    "--overlap/--no-overlap",
    default=True,
    show_default=True,
    help="Details for training with overlap across the step, or without.",
)
@click.option(
    "--every",
    type=StepsOrAuto(),
    metavar="N|auto",
    help="Plan local steps: ranks average their weights every N steps, or nodes by way of a hub.",
)
@click.option(
    "--speeds",
    default="1",
    show_default=True,
    help="With --every: speeds that nodes have in turn, as 1,0.8,0.5; --compute-ms is of speed 1.",
)
@click.option("--hub", help="With --every: rate of the hub's card. Default: a node's.")
@click.option(
    "--fsdp",
    is_flag=True,
    help="Plan FSDP2 over all ranks: plain, and with Evener's differences and forms.",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="With --fsdp: of a step; gradients are reduced with the last one.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def plan(**given: Any) -> None:
    """What would be chosen for each bucket, and the step to expect, on a network not rented yet.

    The model's shapes (or the profile of a run) are played through the planner's cost model, in
    virtual time: rings between nodes and inside them, forms by the bytes that they send. A
    prediction: `accelerate(mode="auto")` probes the real network and logs both.
    """
    if bool(given["model"]) == bool(given["profile_path"]):
        raise UsageError(
            "evener plan needs to know what is trained", "give either --model or --profile"
        )
    if given["every"] and given["fsdp"]:
        raise UsageError("--every is for DDP models, and --fsdp for FSDP2's", "give one of them")
    only = {"speeds": ("every", "1"), "hub": ("every", None), "micro_batches": ("fsdp", 1)}
    for name, (owner, default) in only.items():
        if given[name] != default and not given[owner]:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} goes with --{owner}", f"give --{owner}, or leave it out")
    if given["fsdp"]:
        if given["profile_path"]:
            raise UsageError("--fsdp: a profile does not say what FSDP2 shards", "give --model")
        from evener.tools.plan import sharded

        sharded.run(given)
        return
    if given["every"]:
        from evener.tools.plan import local

        local.run(given)
        return
    from evener.tools.plan import predict

    predict.run(given)
