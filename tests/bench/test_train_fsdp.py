"""FSDP2's columns on two Gloo processes: equal to the bit where they must be, and faults found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest
import torch

from evener.tools.bench.train import (
    clusters,
    columns,
    drive,
    models,
    plan,
    progress,
    results,
    table,
)
from evener.tools.bench.train import sharded as sharding
from evener.tools.bench.train.clusters import Loopback
from evener.tools.bench.train.columns import Column
from evener.tools.bench.train.plan import Options
from evener.tools.bench.train.results import Results
from evener.tools.bench.train.verdict import verdict
from tests.bench.test_train_figures import NEARLY, OTHER, made
from tests.bench.test_train_run import evener


@pytest.mark.parametrize(("amp", "model"), [("bf16", "gpt-tiny"), ("none", "bert-tiny")])
def test_exact_trains_as_fsdp2_does_to_the_bit(amp: str, model: str) -> None:
    given = () if amp == "bf16" else ("--amp", amp)  # bf16 is what such a table begins with
    shown = evener(
        "--device", "cpu", "--model", model, "--batch-size", "2", "--steps", "4", "--warmup", "1",
        "--repeats", "1", "--processes", "2", "--rows", "node", *given, "--json", "-",
        "--columns", "fsdp2,fsdp-exact,fsdp-bf16,fsdp-int8,fsdp-int4",
        EVENER_FSDP="int8", EVENER_DDP="auto",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    taken = Results.from_json(json.loads(shown.stdout))
    assert taken.complete and taken.settings["amp"] == amp
    assert not {"EVENER_FSDP", "EVENER_DDP"} & set(taken.environment), "they are for programs"
    assert taken.settings["gradient_bytes"] == 4 * models.TEXT[model].parameters
    losses, sums = {}, {}
    for run in taken.runs:
        losses[run.column] = [(rank["first_loss"], rank["last_loss"]) for rank in run.ranks]
        sums[run.column] = {rank["checksum"] for rank in run.ranks}
        assert len(sums[run.column]) == 1
    assert losses["fsdp-exact"] == losses["fsdp2"]
    assert sums["fsdp-exact"] == sums["fsdp2"]
    # Forms are other ones, or nothing was exchanged in them.
    assert sums["fsdp-int8"] != sums["fsdp2"] and sums["fsdp-int4"] != sums["fsdp2"]
    labels = dict(table.grid(taken).extras)
    assert labels["times FSDP2"][0] == "1.00"


FAULTS = {
    "half": "wrong result: its first update is 0.5",
    "strange": "does not synchronise: parameters of rank 1 differ",
}
PATCH = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from evener.tools.bench.train import agent, columns, wrap
from evener.tools.bench.train.columns import Column
class Strange(AllGather):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        if dist.get_rank() == 1:
            output_tensor[:4].mul_(1.25)
faults = {
    "half": lambda module: module.set_all_reduce_hook(lambda gradients: gradients.mul_(0.5)),
    "strange": lambda module: module.set_custom_all_gather(Strange()),
}
inner = wrap.WRAPPERS["fsdp2"]
def apply(model, optimizer, device, column, options):
    wrapped = inner(model, optimizer, device, column, options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and column.name in faults:
            faults[column.name](module)
    return wrapped
wrap.WRAPPERS["fsdp2"] = apply
for name in faults:
    columns.COLUMNS[name] = Column(name, name, "", "fsdp2")
agent.main()
"""


class _Patched(Loopback):
    def run(self, argv: Sequence[str], on_line: clusters.OnLine, timeout: float) -> int:
        return super().run([sys.executable, "-c", PATCH, argv[-1]], on_line, timeout)


def test_gradients_or_weights_that_are_not_all_there_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in FAULTS:
        monkeypatch.setitem(columns.COLUMNS, name, Column(name, name, "", "fsdp2"))
    options = Options(
        model="gpt-tiny", batch_size=2, device="cpu", steps=2, warmup=1, repeats=1, timeout=100,
        threads=1, amp="bf16",
    )  # fmt: skip
    names = ",".join(["fsdp2", *FAULTS])
    todo = plan.make(options, nodes=1, slots=2, rows=["node"], columns=columns.parse(names))
    cluster = _Patched(1, 2)
    taken = results.begin(todo, command="test", cluster=cluster.describe())
    drive.measure(todo, cluster, taken, progress.Lines(todo, "process", lambda _: None))
    found = {run.column: run.reason for run in taken.runs}
    assert found.pop("fsdp2") == ""
    for name, reason in found.items():
        assert reason.startswith(FAULTS[name]), reason


def test_what_fsdp2_is_compared_with() -> None:
    rates = {"plain": [9.0], "fsdp2": [4.0], "fsdp-exact": [5.0], "fsdp-int8": [6.0]}
    taken = made(rates, change={"fsdp-int8": {"update": NEARLY}})
    assert taken.complete
    assert verdict(taken).endswith(
        "Evener FSDP INT8 is 1.50 x as fast as FSDP2 (6.0 images/s, 4.0); "
        "Evener FSDP exact, which sends every gradient, 1.25 x"
    )
    assert dict(table.grid(taken).extras)["times FSDP2"] == ("1.00", "1.25", "1.50")
    wrong = made(rates, change={"fsdp-int8": {"update": OTHER}})
    assert "from FSDP2's" in wrong.failures[0].reason
    beside = made({**rates, "ddp": [3.0]})
    assert dict(table.grid(beside).extras)["times DDP"] == ("1.33", "1.67", "2.00", "1.00")


@pytest.mark.parametrize(
    ("model", "why"), [("vgg-tiny", "no repeated blocks"), ("resnet18", "batch norms")]
)
def test_other_models_are_refused_before_anything_starts(model: str, why: str) -> None:
    shown = evener("--device", "cpu", "--model", model, "--columns", "ddp,fsdp-int8")
    assert shown.returncode == 2
    assert f"column fsdp-int8: model {model} has {why}" in shown.stderr and "gpt2" in shown.stderr


@pytest.mark.parametrize(
    ("model", "count"), [("gpt2", 12), ("bert-base", 12), ("vit_b_16", 12), ("swin_t", 12)]
)
def test_the_repeated_blocks_are_what_is_sharded(model: str, count: int) -> None:
    with torch.device("meta"):
        built = models.build(model)
    found = sharding.blocks(built)
    assert len(found) == count
    inside = sum(p.numel() for block in found for p in block.parameters())
    assert inside > 0.6 * sum(p.numel() for p in built.parameters())
