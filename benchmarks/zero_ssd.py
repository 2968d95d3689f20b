"""The largest model that the memory engine trains: without an SSD, with one, and with one and the
optimizer in the backward pass.

    python benchmarks/zero_ssd.py FOLDER [--gpu 4GB --host 14GB --ssd 36GB] [--json FILE]

Each of the three in a process of its own, the machine is measured, the most layers of width
2560 that fit are searched by plan, one layer more must be refused, and the largest is trained for
--steps steps of 1 x 1024 tokens. Reported: peaks of GPU and host and bytes read and written against
the plan; seconds per step against the bound backward + max(forward, bytes / the tier's rate of
reading and writing at once). Forward and backward are timed alone. --tiny: the same code on a CPU,
with limits of megabytes; it checks itself, and times are of no GPU. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from zero_models import GB, VOCABULARY, host_peak, loss_of, on_meta, place, value_of

from evener import zero
from evener.zero import ssd

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}

IN_BACKWARD = "with, in backward"
CASES = ("without", "with", IN_BACKWARD)
LIMITS: dict[str, Any] = {
    "gpu": "4GB", "host": "14GB", "ssd": "36GB", "width": 2560, "layers": 80,
}  # fmt: skip
TINY: dict[str, Any] = {
    "gpu": "170MB", "host": "520MB", "ssd": "600MB", "width": 256, "layers": 60,
}  # fmt: skip


def idle(engine: zero.Engine) -> float:
    """The time at which nothing is under way any more."""
    engine.settle()
    harness.settle()
    return time.perf_counter()


class Case:
    """One of the two searches."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device, self.width = torch.device(place()), given.width
        cuda = self.device.type == "cuda"
        self.length = 1024 if cuda else 64
        self.budget: dict[str, str | int] = {"gpu": given.gpu, "host": given.host}
        self.machine = zero.probe(self.device).machine
        self.rates: ssd.Rates | None = None
        if given.case != "without":
            self.budget["ssd"] = f"{given.folder}:{given.ssd}"
            size, seconds = (4 * GB, 3.0) if cuda else (64 << 20, 0.2)
            self.rates = ssd.measure(str(given.folder), size, seconds)
            self.machine = replace(self.machine, ssd=self.rates.both)
        own = {"checkpointing": "auto", "loss": "chunked", "rehearse": False}
        own |= {"device": "cuda" if cuda else "simulated", "budget": self.budget}
        self.config = {**CONFIG, "evener": own}
        if given.case == IN_BACKWARD:
            own["optimizer_in_backward"] = True
            self.config["gradient_clipping"] = 0.0

    def fits(self, layers: int) -> bool:
        """Whether a model of this many layers does, by plan."""
        return zero.plan(
            on_meta(layers, self.width), config=self.config, budget=self.budget,
            batch=(1, self.length), machine=self.machine,
        ).fits  # fmt: skip

    def search(self, top: int) -> int:
        """The most layers that fit."""
        low, high = 0, top + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        if not 0 < low < top:
            sys.exit(f"error: {low} layers fit of 1 to {top}\n  fix: change the limits or --layers")
        return low

    def engine(self, layers: int) -> zero.Engine:
        """Ready to train. Raises NoFitError."""
        return zero.initialize(
            model=on_meta(layers, self.width), config=self.config, weights=value_of,
            batch=(1, self.length), machine=self.machine,
        )[0]  # fmt: skip

    def train(self, layers: int, steps: int) -> dict[str, Any]:
        """Losses, bytes and seconds of each step, and peaks."""
        begun = time.perf_counter()
        engine = self.engine(layers)
        took = time.perf_counter() - begun
        plan = engine.plan
        assert plan is not None
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, self.length)
        tokens = torch.randint(0, VOCABULARY, shape, device=self.device, generator=generator)
        rows = []
        try:
            for _ in range(steps):
                before = engine.memory()
                start = idle(engine)
                loss = loss_of(engine, tokens)
                forward = idle(engine)
                engine.backward(loss)
                backward = idle(engine)
                engine.step()
                end = idle(engine)
                after = engine.memory()
                rows.append({
                    "loss": loss.item(),
                    "forward": forward - start,
                    "backward": backward - forward,
                    "optimizer": end - backward,
                    "seconds": end - start,
                    "read": after["ssd read"] - before["ssd read"],
                    "written": after["ssd written"] - before["ssd written"],
                })  # fmt: skip
            peaks = engine.memory()
        finally:
            engine.close()
        gpu = {"budget": plan.budget.gpu, "planned": plan.gpu_bytes, "peak": peaks["gpu peak"]}
        return {
            "layers": layers,
            "parameters": sum(place.numel for place in plan.places),
            "prepared_s": took,
            "steps": rows,
            "gpu": gpu,
            "host": {"planned": plan.host_bytes, "peak": host_peak()},
            "file": plan.ssd_bytes,
            "again": peaks["passes run again"],
        }


def search_and_train(given: argparse.Namespace) -> None:
    """One case, in this process."""
    case = Case(given)
    begun = time.perf_counter()
    layers = case.search(given.layers)
    found: dict[str, Any] = {"searched_s": time.perf_counter() - begun, "refused": ""}
    try:
        case.engine(layers + 1).close()
    except zero.NoFitError as error:
        found["refused"] = str(error)
    found |= case.train(layers, given.steps)
    harness.say(**found, rates=vars(case.rates) if case.rates else None)


def show(name: str, found: dict[str, Any]) -> list[str]:
    """Print a case; what is not as it must be."""
    wrong = []
    keys = ("layers", "parameters", "searched_s", "prepared_s", "gpu", "host", "file", "again")
    print(f"{name}: {({key: found[key] for key in keys})}\n  one layer more: "
          f"{found['refused'].partition(chr(10))[0] or 'TRAINS'}")  # fmt: skip
    for row in found["steps"]:
        if moved := row["read"] + row["written"]:
            row["bound"] = row["backward"] + max(row["forward"], moved / found["rates"]["both"])
            row["x the bound"] = row["seconds"] / row["bound"]
        print(f"  {row}", flush=True)
        if not math.isfinite(row["loss"]):
            wrong.append(f"{name}: the loss is {row['loss']}")
        if not row["read"] <= found["file"] or not row["written"] <= found["file"]:
            wrong.append(f"{name}: more bytes than planned")
    if not found["refused"]:
        wrong.append(f"{name}: one layer more was not refused")
    if found["gpu"]["peak"] > found["gpu"]["budget"]:
        wrong.append(f"{name}: GPU over the budget")
    return wrong


def largest(given: argparse.Namespace) -> int:
    """Both cases; 1 where something is not as planned."""
    for name, value in (TINY if given.tiny else LIMITS).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("error: there is no GPU here\n  fix: --tiny checks the program on a CPU")
    if given.case:
        search_and_train(given)
        return 0
    words = harness.arguments_of(given, "gpu", "host", "ssd", "width", "layers", "steps", "tiny")
    cases: dict[str, Any] = {}
    wrong: list[str] = []
    for case in CASES:
        job = harness.again(str(given.folder), "--case", case, *words)
        if job.failed:
            print(f"{case}: {job.failed}")
            return 1
        cases[case] = job.row
        wrong += show(case, job.row)
        harness.keep(given, **cases)
    for case in CASES[1:]:
        times = cases[case]["parameters"] / cases["without"]["parameters"]
        print(f"{case}: {times:.2f} x as large as without an SSD")
    for text in wrong:
        print(f"NOT as planned: {text}")
    return 1 if wrong else 0


def main() -> int:
    """Parse and measure."""
    parser = harness.arguments(__doc__)
    parser.add_argument("folder", type=Path)
    for name in LIMITS:
        kind = type(LIMITS[name])
        parser.add_argument(
            f"--{name}", type=kind, help=f"{LIMITS[name]}, with --tiny {TINY[name]}"
        )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.folder.is_dir():
        sys.exit(f"error: {given.folder} is no folder\n  fix: give one on the SSD")
    return largest(given)


if __name__ == "__main__":
    sys.exit(main())
