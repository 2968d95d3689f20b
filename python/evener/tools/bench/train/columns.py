"""The columns of the table: each says in one entry what is done to the gradients.

To add one, add an entry; if no function in wrap.py does what it needs, add that function too.
`env` is set in the column's processes before its process group is made, so it may hold what NCCL
and Gloo read then, but nothing that is read when torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from evener.comm import forms
from evener.errors import UsageError


@dataclass(frozen=True)
class Column:
    """One way to combine gradients.

    `tolerance`: largest relative L2 distance between this column's first update of the parameters
    and the reference's, from the same start and the same data; and between what the next steps do
    (see `guard`). No update at all is at distance 1. A column beyond it is reported as failed.
    `evener`: shown as Evener's, not as what it is compared with. `gpu_only`: why the column does
    not run on CPUs, where it does not.
    """

    name: str
    title: str
    what: str
    wrap: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.02
    evener: bool = False
    gpu_only: str = ""

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the model only (FSDP2)."""
        return self.wrap == "fsdp2"


# Nobody knows what a hook of torch's has not sent: what it sends must point DDP's way.
_UNKNOWN = 0.98


def _modes() -> Iterable[Column]:
    for form in forms.listed():
        yield Column(
            form.name,
            f"Evener {form.title}",
            f"two levels, {form.what}",
            "evener",
            {"algorithm": "2d", "wire": form.name},
            tolerance=form.first_update,
            evener=True,
        )


def _flat() -> Iterable[Column]:
    """To see what two levels are worth."""
    for form in forms.listed():
        yield Column(
            f"{form.name}-flat",
            f"{form.title}, flat",
            f"as {form.name}, in one level: all ranks exchange with all",
            "evener",
            {"algorithm": "flat", "wire": form.name},
            tolerance=form.first_update,
            evener=True,
        )


def _overlapped() -> Iterable[Column]:
    """With the optimizer given to accelerate(); and the planner's choice, down to each floor."""
    for form in forms.listed():
        yield Column(
            f"{form.name}-overlap",
            f"{form.title} + overlap",
            f"as {form.name}, and the optimizer's step overlaps the next forward",
            "evener",
            {"algorithm": "2d", "wire": form.name, "overlap": True},
            tolerance=form.first_update,
            evener=True,
        )
    for form in forms.listed():
        yield Column(
            f"auto-{form.name}",
            f"planned, {form.title}",
            f"the planner's choice, down to {form.name}, with overlap across the step",
            "evener",
            {"mode": "auto", "floor": form.name, "overlap": True},
            tolerance=form.first_update,
            evener=True,
        )


def _sharded() -> Iterable[Column]:
    """FSDP2 over all ranks, alone and with Evener below it."""
    yield Column(
        "fsdp2",
        "FSDP2",
        "PyTorch's fully_shard of each block, over all ranks, as it comes",
        "fsdp2",
    )
    for name in ("exact", "bf16", "int8", "int4"):
        form = forms.described(name)
        yield Column(
            f"fsdp-{name}",
            f"Evener FSDP {form.title}",
            "fsdp2 with weights as exact differences"
            + ("" if name == "exact" else f" and gradients in {form.title}"),
            "fsdp2",
            {"form": name},
            tolerance=form.first_update,
            evener=True,
        )


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("ddp", "DDP", "PyTorch's DistributedDataParallel as it comes", "ddp"),
        Column(
            "ddp-ring",
            "DDP, ring",
            "DDP with NCCL_ALGO=RING, the flat ring that Horovod runs (Gloo: a ring always)",
            "ddp",
            env={"NCCL_ALGO": "RING"},
        ),
        Column(
            "horovod",
            "Evener Horovod",
            "a Horovod script's way: hvd.DistributedOptimizer as it comes, which loses nothing",
            "horovod",
            evener=True,
        ),
        Column(
            "horovod-topk",
            "Evener Horovod top-k",
            "as horovod, with LIGHT_2D_ALLREDUCE=1 and LIGHT_TOPK_ALLREDUCE=1",
            "horovod",
            env={"LIGHT_2D_ALLREDUCE": "1", "LIGHT_TOPK_ALLREDUCE": "1"},
            tolerance=forms.described("topk").first_update,
            evener=True,
        ),
        Column("ddp-fp16", "DDP + fp16", "DDP with its own fp16_compress_hook", "hook:fp16"),
        Column("ddp-bf16", "DDP + bf16", "DDP with its own bf16_compress_hook", "hook:bf16"),
        Column(
            "ddp-powersgd",
            "DDP + PowerSGD",
            "DDP with its own PowerSGD hook, rank 1",
            "powersgd",
            {"rank": 1},
            tolerance=_UNKNOWN,
            gpu_only="the hook mixes up its collectives over Gloo when there are several buckets",
        ),
        *_modes(),
        *_flat(),
        *_overlapped(),
        *_sharded(),
    )
}

# Short names for the headline table.
ALIASES = {"ring": "ddp-ring"}

DEFAULT = ("ddp", "ring", "exact", "fp16", "topk")

# Row "one" needs no column: a single process has nobody to talk to.
PLAIN = Column("plain", "plain PyTorch", "one process, no wrapper", "none")

# What the others are compared with: the first of these that a table has.
REFERENCES = ("ddp", "fsdp2")


def reference(names: Iterable[str]) -> str | None:
    """The column of `names` that the others are compared with, if it is there."""
    present = set(names)
    return next((name for name in REFERENCES if name in present), None)


def column(name: str) -> Column:
    """The column of that name or alias. Raises UsageError that lists the names."""
    found = COLUMNS.get(ALIASES.get(name, name))
    if found is None:
        raise UsageError(
            f"there is no column {name!r}", forms.suggestion(name, [*COLUMNS, *ALIASES])
        )
    return found


def parse(text: str) -> tuple[Column, ...]:
    """`ddp,ring,topk` as columns, in that order, each once. Raises UsageError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(f"{text!r} names no column", f"choose from {', '.join(COLUMNS)}")
    return tuple({entry.name: entry for entry in map(column, names)}.values())


def modes(text: str) -> str:
    """`exact,int8` as names of columns: Evener's modes only. Raises UsageError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        forms.require(name, "--modes")
    return ",".join(names)


def listing() -> Iterable[tuple[str, str]]:
    """(name, what it does) of every column and alias, for help texts and documentation."""
    for entry in COLUMNS.values():
        yield entry.name, entry.what
    for alias, name in ALIASES.items():
        yield alias, f"the same as {name}"
