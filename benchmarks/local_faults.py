"""What faults do to a training by local steps: three ranks on this machine, a fault in rank 1.

    python benchmarks/local_faults.py [--cases killed,stopped,...] [--json FILE]

All train a small network for 200 steps with every=16 and overlap=4, and end the last round. After a
run without a fault, each case has a row: how many ranks finish, whether with the weights of that
run, bit for bit; the longest step of rank 0; how long after the fault the first other rank was
done, well or not, and what rank 0 said if not.

    killed      SIGKILL in the middle of a round
    restarted   the same, but each rank saves every 32 steps, and all are started again
    stopped     SIGSTOP, and SIGCONT 30 s later
    too long    the same with EVENER_TIMEOUT=20
    model       it comes with another model
    bit         one bit of its shared weights changes
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate

CASES = ("killed", "restarted", "stopped", "too long", "model", "bit")
RANKS, STEPS, AT, SAVES, STOPPED, LIMIT = 3, 200, 106, 32, 30.0, 150.0


def be_a_rank(case: str, folder: Path) -> None:
    """Train; say how it ended."""
    rank = int(os.environ["RANK"])
    fault = folder / "fault"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 128 if case == "model" and rank == 1 else 64
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = accelerate(DistributedDataParallel(net), optimizer, every=16, overlap=4)
    saved = folder / f"rank{rank}.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        for part, name in ((net, "net"), (optimizer, "optimizer"), (model.evener, "evener")):
            part.load_state_dict(state[name])
        step = state["step"]
    longest = 0.0
    while step < STEPS:
        began = time.monotonic()
        if step == AT and rank == 1 and case != "none" and not fault.exists():
            fault.write_text(str(time.time()), encoding="utf-8")
            fail(case, model)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(32, 64, generator=generator)
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if case == "restarted" and step % SAVES == 0:
            parts = {"net": net, "optimizer": optimizer, "evener": model.evener}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "step": step}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    model.evener.end_round()
    weights = [p.detach().flatten().tolist() for p in net.parameters()]
    harness.say(rank=rank, at=time.time(), weights=hash(str(weights)), longest=longest)


def fail(case: str, model: Any) -> None:
    """Rank 1's fault."""
    mine = os.getpid()
    if case in ("killed", "restarted"):
        os.kill(mine, signal.SIGKILL)
    elif case in ("stopped", "too long"):
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED}; kill -CONT {mine}"])
        os.kill(mine, signal.SIGSTOP)
    elif case == "bit":
        model.evener.fragments[0].bucket.buffer.view(torch.int32)[0] ^= 1


def run(case: str) -> dict[str, Any]:
    """One job of `RANKS` ranks, or a second one that goes on, and what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        found = start(case, Path(folder))
        return start(case, Path(folder)) if case == "restarted" else found


def start(case: str, folder: Path) -> dict[str, Any]:
    """One job; see `run`."""
    fault = folder / "fault"
    env = {
        "EVENER_LOG": "warning",
        "PYTHONHASHSEED": "0",
        "EVENER_TIMEOUT": "20" if case == "too long" else "60",
        "NCCL_HOSTID": "one",  # all on one node
    }
    began = time.time()
    words = ("--case", case, "--folder", str(folder))
    said = harness.ranks(*words, count=RANKS, limit=LIMIT, env=env).said
    since = float(fault.read_text(encoding="utf-8")) if fault.exists() else began
    well = [one for one in said if "weights" in one]
    return {
        "finished": len(well),
        "weights": sorted({one["weights"] for one in well}),
        "longest_step": max((one["longest"] for one in well if not one["rank"]), default=0.0),
        "seconds": min((one["at"] for one in said if one["rank"] != 1), default=began) - since,
        "errors": {one["rank"]: one["error"] for one in said if "error" in one},
    }


def main() -> None:
    """Run the cases, and show the table."""
    parser = harness.arguments(__doc__, json="local-faults.json")
    parser.add_argument("--cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        try:
            be_a_rank(given.case, given.folder)
        except Exception as error:
            said = " ".join(str(error).partition("\n  fix: ")[0].split())
            harness.say(rank=int(os.environ["RANK"]), at=time.time(), error=said)
            raise
        return
    rows: list[dict[str, Any]] = []
    for case in ["none", *harness.choose(given.cases, CASES, "case")]:
        rows.append({**run(case), "case": case})
        print(rows[-1], flush=True)
        harness.keep(given, rows=rows)
    right = rows[0]["weights"]
    shown = [
        [
            row["case"],
            row["finished"],
            "yes" if row["weights"] == right else "no" if row["weights"] else "",
            f"{row['longest_step']:.1f}" if row["finished"] else "",
            f"{row['seconds']:.1f}",
            row["errors"].get(0, ""),
        ]
        for row in rows
    ]
    heads = ["", "finished", "same weights", "longest step, s", "ended after, s", "rank 0 said"]
    print(harness.show(heads, shown))


if __name__ == "__main__":
    main()
