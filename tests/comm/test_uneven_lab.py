"""Uneven nodes in a lab: what crosses a card, and a script that knows nothing of Evener."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from evener.tools.lab import Lab, unavailable
from tests import worlds

pytestmark = [pytest.mark.lab, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
STEPS, BYTES = 4, 4 * 1_000_000

COUNTS = f"""
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch._dynamo
import evener.ddp
from tests import forked

def sent():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])

def all_sent():
    # The second barrier: a rank that goes on while another still has to read would be counted.
    dist.barrier()
    count = sent()
    dist.barrier()
    return count

cases, ranks = map(json.loads, sys.argv[1:])
forked.ranks(*ranks)
dist.init_process_group("gloo")
found = {{}}
for algorithm, form in cases:
    torch.manual_seed(1)
    net = torch.nn.Linear(1000, 1000, bias=False)
    model = evener.ddp.accelerate(DistributedDataParallel(net), wire=form, algorithm=algorithm)
    x = torch.randn(2, 1000)
    steps = []
    for step in range({STEPS} + 2):
        before = all_sent()
        model.zero_grad()
        model(x).square().sum().backward()
        steps.append(all_sent() - before)
    # The least: on a busy machine TCP sends again what was only late.
    found[f"{{algorithm}} {{form}}"] = min(steps[2:])
    model.evener.close()
# The ranks of a node share a pipe, and `print` would write each word by itself.
sys.stdout.write(f"SENT {{json.dumps(found)}}\\n")
dist.barrier()
"""

PLAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 7))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(50):
    torch.manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    x = torch.randn(8, 30)
    (model(x) - x[:, :7]).square().mean().backward()
    optimizer.step()
print("WEIGHTS", *[f"{v:.9g}" for p in net.parameters() for v in p.detach().flatten().tolist()])
dist.barrier()
"""


def launched(lab: Lab, argv: list[str], word: str, **env: str) -> tuple[list[str], str]:
    """The ranks' lines that begin with `word`, without it; and all that was said."""
    said: list[str] = []
    env = {"EVENER_TRIAL_STEPS": "0", "EVENER_LOG": "info", **env}
    done = lab.launch(
        [sys.executable, *argv],
        env=env,
        cwd=ROOT,
        on_line=lambda *line: said.append(line[-1]),
        timeout=120,
    )
    text = "\n".join(said)
    assert done.status == 0, text
    found = [line.removeprefix(word) for line in said if line.startswith(word)]
    assert found, text
    return found, text


def lab_of(spec: str) -> Lab:
    if reason := unavailable():
        pytest.skip(reason)
    return Lab(spec)


@pytest.mark.parametrize("shape", [[2, 1], [3, 1]], ids=str)
def test_the_bytes_that_cross_a_card(shape: list[int]) -> None:
    forms = ["exact", "fp16", "int8"]
    cases = [[algorithm, form] for form in forms for algorithm in ("flat", "2d")]
    argv, ranks = ["-c", COUNTS, json.dumps(cases), json.dumps(shape)], sum(shape)
    with lab_of("2x1") as lab:
        found, _ = launched(lab, argv, "SENT", EVENER_GUARD_STEPS="0")
    assert len(found) == ranks
    # A card has the bytes of all ranks of its node: any of them has counted the same.
    sent = json.loads(found[0])
    payload = {"exact": BYTES, "fp16": BYTES / 2, "int8": BYTES / 4}
    for form, size in payload.items():
        # Headers, and scales of INT8.
        assert 1 <= sent[f"2d {form}"] / size < 1.03, sent
        if form != "int8":
            assert 1 <= sent[f"flat {form}"] / (2 * (ranks - 1) / ranks * size) < 1.03, sent
        assert sent[f"flat {form}"] > 1.25 * sent[f"2d {form}"], sent


def by_ddp(rank: int, size: int) -> str:
    """What the script prints where nothing is done to it; the group is there already."""
    with redirect_stdout(io.StringIO()) as said, patch.object(dist, "init_process_group"):
        exec(PLAIN, {})
    return said.getvalue().removeprefix("WEIGHTS")


def test_an_unchanged_script_trains_as_with_ddp() -> None:
    plain = worlds.run([2, 1], by_ddp)
    with lab_of("2+1") as lab:
        door = {"EVENER_DDP": "exact", "EVENER_DDP_PLAIN": "1"}
        ours, said = launched(lab, ["-c", PLAIN], "WEIGHTS", **door)
    assert "2-D all-reduce (2 nodes, inner groups of [2, 1]" in said
    assert len(ours) == len(plain) == 3
    assert len(set(ours)) == 1, "ranks differ"
    have, want = ([float(value) for value in line.split()] for line in (ours[0], plain[0]))
    assert have == pytest.approx(want, rel=1e-4, abs=1e-6)
